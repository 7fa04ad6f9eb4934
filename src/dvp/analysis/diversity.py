"""Different solutions of problems that can have several: how many a policy finds, and whether two of them differ.

How many are found grows with the score, as fewer samples are wrong. Whether two right samples of a problem differ does
not, of one problem; over problems with equal weights it hardly does.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
from tokenizers import Tokenizer

from dvp.analysis.estimates import Estimate, estimates, over_model, score_files, scores
from dvp.analysis.load import Scored, cell_name
from dvp.analysis.matrix import PAIRINGS, SCORE, contrasts, samplers, score_statistics, where
from dvp.analysis.pages import notes
from dvp.analysis.points import BASE, seeds_text
from dvp.analysis.statistics import Statistic, lookup
from dvp.analysis.tables import INTERVAL, Column, Table, interval
from dvp.analysis.training import MARKS, over_seeds, point_cells, point_columns
from dvp.data.puzzles import read
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, Sampler

SOLUTIONS, DIFFERING, TOKENS = "different_solutions_by_policy", "differing_pairs_by_policy", "tokens_used_by_policy"
_SCALES: dict[str, bootstrap.Scale] = {SOLUTIONS: "plain", DIFFERING: "share"}


def statistics(experiment: Experiment, loaded: Scored, tokenizer: Tokenizer) -> list[Statistic]:
    """Of every model and sampler, in places as those of the scores by policy (dvp.analysis.matrix.statistics).

    different_solutions_by_policy: different solutions among the right samples of a problem, mean over problems.
    differing_pairs_by_policy: of the pairs of right samples of a problem the share that are different solutions, mean
    over the problems of all seeds that have a pair. tokens_used_by_policy: different tokens in the texts of all
    responses of a model. The first two also as differences, different_solutions_over_unpruned_by_policy and so on, that
    of differing pairs over the problems that have a pair with both models.
    """
    found = solutions(loaded.samples)
    k = experiment.evaluation.samples_per_problem[experiment.report.task]
    different = estimates(experiment, found, "different", lambda cell: score_files(loaded, cell))
    shares = {name: _shares(experiment, own) for name, own in found.groupby("point", sort=False)}

    def share(share_SP: np.ndarray, *cells: str) -> Estimate:
        draws = different[cells[0]].draws
        sources = tuple(file for cell in cells for file in score_files(loaded, cell))
        return Estimate(draws, _mean_where_defined(draws, share_SP), sources)

    differing = {name: share(share_SP, name) for name, share_SP in shares.items()}
    kinds = (
        (SOLUTIONS, different, lambda mine, its: different[mine] - different[its], f"solutions of {k} samples"),
        (DIFFERING, differing, lambda mine, its: share(shares[mine] - shares[its], mine, its), "fraction"),
    )
    result = []
    for name, estimate, difference, unit in kinds:
        for point in (None, *experiment.points):
            for sampler in samplers(experiment, point):
                place, scale = where(experiment, point, sampler.engine, sampler.rho), _SCALES[name]
                measured = _unless_all_agree(estimate[cell_name(point, sampler)], scale)
                result.append(measured.statistic(name, place, unit, over_model(experiment, point), scale))
        for point in experiment.points:
            for pairing in PAIRINGS:
                paired = name.replace("by_policy", f"over_{pairing}_by_policy")
                result += contrasts(experiment, paired, point, pairing, difference, unit)
    return [*result, *_tokens(experiment, loaded, tokenizer)]


def solutions(samples: pd.DataFrame) -> pd.DataFrame:
    """Of every point, seed and problem: different solutions, pairs of right samples, and those that differ."""
    key = ["point", "seed", "problem"]
    right = samples[samples["correct"]]
    puzzles = {reference: read(reference) for reference in right["reference"].unique()}
    texts = [
        puzzles[reference].solution(answer)
        for reference, answer in zip(right["reference"], right["stated_answer"], strict=True)
    ]
    of_solution = right.assign(solution=texts).groupby([*key, "solution"]).size()
    of_problem = of_solution.groupby(key)
    count = of_problem.sum()
    pairs = count * (count - 1) // 2
    same = (of_solution * (of_solution - 1) // 2).groupby(key).sum()
    found = pd.DataFrame({"different": of_problem.size(), "pairs": pairs, "differing": pairs - same})
    every = samples[key].drop_duplicates().set_index(key).index
    return found.reindex(every, fill_value=0).reset_index()


def _shares(experiment: Experiment, found: pd.DataFrame) -> np.ndarray:
    """(S, P): the share of pairs that differ, NaN where there is none; of the base model the same for all seeds."""
    share = found.assign(share=found["differing"] / found["pairs"].where(found["pairs"] > 0))
    share_SP = share.pivot(index="seed", columns="problem", values="share").to_numpy()
    return np.broadcast_to(share_SP, (len(experiment.seeds), share_SP.shape[1]))


def _mean_where_defined(draws: bootstrap.Draws, value_SP: np.ndarray) -> np.ndarray:
    """Replicates, (R,), of the mean over the problems and seeds whose value is defined; NaN without any."""
    defined = np.isfinite(value_SP).ravel()
    sum_R, count_R = draws.count_RU @ np.nan_to_num(value_SP.ravel()), draws.count_RU @ defined
    return np.divide(sum_R, count_R, out=np.full_like(sum_R, np.nan), where=count_R > 0)


def _unless_all_agree(estimate: Estimate, scale: bootstrap.Scale) -> Estimate:
    """Without an interval where no sample differs from another: all replicates agree.

    (That of a share of 0 or 1 in `bootstrap` is of as many trials as there are problems, with a pair or without.)
    """
    value = estimate.value_R[0]
    agree = value == 0 or (scale == "share" and value == 1)
    return replace(estimate, value_R=np.array([value, np.nan])) if agree else estimate


def _tokens(experiment: Experiment, loaded: Scored, tokenizer: Tokenizer) -> Iterator[Statistic]:
    for point in (None, *experiment.points):
        for sampler in samplers(experiment, point):
            cell = cell_name(point, sampler)
            own = loaded.samples[loaded.samples["point"] == cell]
            used = [_used(tokenizer, texts) for _, texts in own.groupby("seed")["response"]]
            how = f"t interval over {seeds_text(experiment)}" if point else "one base model for all seeds"
            place = where(experiment, point, sampler.engine, sampler.rho)
            sources = (*score_files(loaded, cell), f"{BASE}/manifest.json")
            yield Statistic(TOKENS, place, *over_seeds(used, logarithmic=False), "tokens", how, sources)


def _used(tokenizer: Tokenizer, texts: pd.Series) -> int:
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return len({token for text in encoded for token in text.ids})


def _served(experiment: Experiment, point: GridPoint | None) -> Sampler:
    """What samples a model as in training; the base model, as the models are compared."""
    return experiment.sampler if point is None else Sampler(engine=point.engine, rho=point.rho)


def table(experiment: Experiment, loaded: Scored, measured: list[Statistic]) -> Table:
    """A row a model; `measured` as of `statistics`.

    Columns of evaluation.engine with the full vocabulary, and `served_` where that is another one: on the engine of
    training, from the vocabulary of training. In the CSV shares are fractions.
    """
    known = lookup([*measured, *score_statistics(experiment, scores(experiment, loaded))])
    exact, rows = experiment.sampler, {}
    shown = {"score": SCORE, "solutions": SOLUTIONS, "differing": DIFFERING}
    for point in (None, *experiment.points):
        full, served = where(experiment, point, exact.engine, exact.rho), _served(experiment, point)
        row = point_cells(experiment, point) | {key: known(name, full) for key, name in shown.items()}
        row["tokens"] = known(TOKENS, full)
        for kind in ("over_reference", "over_unpruned"):
            row[f"differing_{kind}"] = known(DIFFERING.replace("by_policy", f"{kind}_by_policy"), full)
        if served != exact:
            own = where(experiment, point, served.engine, served.rho)
            row |= {f"served_{key}": known(name, own) for key, name in shown.items()}
        rows[row["point"]] = row
    share, points, number = interval(".1f", 100), interval("+.1f", 100), interval(".2f")
    columns = [
        *point_columns(experiment, rows, MARKS),
        Column("score", f"{exact.engine}, full (%) [95 %]", share, INTERVAL),
        Column("solutions", "different solutions a problem [95 %]", number, INTERVAL),
        Column("differing", "pairs that differ (%) [95 %]", share, INTERVAL),
        Column("differing_over_reference", "over ref. (points) [95 %]", points, INTERVAL),
        Column("differing_over_unpruned", "over no pruning (points) [95 %]", points, INTERVAL),
        Column("tokens", "tokens used [95 %]", interval(".0f"), INTERVAL),
        Column("served_score", "as in training (%) [95 %]", share, INTERVAL),
        Column("served_solutions", "as in training: different solutions [95 %]", number, INTERVAL),
        Column("served_differing", "as in training: pairs that differ (%) [95 %]", share, INTERVAL),
    ]
    k = experiment.evaluation.samples_per_problem[experiment.report.task]
    below = notes(
        "diversity_table",
        experiment,
        evaluation=experiment.evaluation,
        k=k,
        over=bootstrap.over(experiment.seeds),
        seeds=seeds_text(experiment),
        control=any(row["role"] == "control" for row in rows.values()),
    )
    return Table(f"{experiment.name}: different solutions on {experiment.report.task}", columns, rows, below)
