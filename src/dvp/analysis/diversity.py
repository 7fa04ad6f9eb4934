"""Different solutions of problems that have several: how many a policy finds, and whether two of them differ.

How many different ones are found grows with the score, as fewer samples are wrong. Whether two right samples of a
problem differ does not.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from tokenizers import Tokenizer

from dvp.analysis.load import Matrix, cell_name
from dvp.analysis.matrix import SCORE, differences, samplers, where
from dvp.analysis.pages import notes
from dvp.analysis.points import reference_point, seeds_text, unpruned_point
from dvp.analysis.statistics import Statistic, lookup
from dvp.analysis.tables import INTERVAL, Column, Table, interval
from dvp.analysis.training import (
    LAST_STEPS,
    MARKS,
    over_seeds,
    point_cells,
    point_columns,
    replicated_means,
    replicates,
    score_files,
    train_files,
    where_of,
)
from dvp.evaluation import bootstrap
from dvp.evaluation.metrics import answer_key
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, Sampler

SOLUTIONS, DIFFERING, TOKENS = "different_solutions", "differing_pairs", "tokens_used"


def statistics(experiment: Experiment, loaded: Matrix, tokenizer: Tokenizer) -> list[Statistic]:
    """Of every model and sampler, named as the scores by policy are.

    different_solutions: different right answers among the k samples of a problem, mean over problems; differing_pairs:
    of all pairs of right samples of a problem the share whose answers differ, over all pairs; tokens_used: different
    tokens in all responses of a model. The first two also `_over_unpruned_by_policy` and `_over_reference_by_policy`,
    which are differences as those of scores.
    """
    found = solutions(loaded.samples)
    k = experiment.evaluation.samples_per_problem[experiment.report.task]
    draws, solutions_R = replicated_means(experiment, found, "different")
    differing_R, pairs_R = (replicated_means(experiment, found, column)[1] for column in ("differing", "pairs"))
    with np.errstate(invalid="ignore"):  # a replicate without a pair has no share
        share_R = {name: differing_R[name] / pairs_R[name] for name in differing_R}
    over = f"over {bootstrap.over(experiment.seeds)}"
    units = {SOLUTIONS: f"solutions of {k} samples", DIFFERING: "fraction"}
    reference, result = reference_point(experiment), []
    for name, value_R in ((SOLUTIONS, solutions_R), (DIFFERING, share_R)):
        for point in (None, *experiment.points):
            how = over + ("" if point else "; one base model for all seeds")
            for sampler in samplers(experiment, point):
                cell = cell_name(point, sampler)
                numbers = draws.estimate(value_R[cell], "share" if name == DIFFERING else "plain")
                place = where(experiment, point, sampler.engine, sampler.rho)
                result.append(Statistic(name, place, *numbers, units[name], how, score_files(loaded, cell)))
        for point in experiment.points:
            without = unpruned_point(experiment, point)
            others = {"over_unpruned": without, "over_reference": None if point == reference else reference}
            for kind, other in others.items():
                if other is not None:
                    result += differences(
                        experiment,
                        loaded,
                        draws,
                        value_R,
                        f"{name}_{kind}_by_policy",
                        point,
                        other,
                        shared_rho=kind == "over_unpruned",
                        unit=units[name],
                    )
    return [*result, *_tokens(experiment, loaded, tokenizer)]


def solutions(samples: pd.DataFrame) -> pd.DataFrame:
    """Of every point, seed and problem: different right answers, pairs of right samples, and those that differ."""
    key = ["point", "seed", "problem"]
    right = samples[samples["correct"]].assign(answer=lambda frame: frame["stated_answer"].map(answer_key))
    of_answer = right.groupby([*key, "answer"]).size()
    of_problem = of_answer.groupby(key)
    count = of_problem.sum()
    pairs = count * (count - 1) // 2
    alike = (of_answer * (of_answer - 1) // 2).groupby(key).sum()
    found = pd.DataFrame({"different": of_problem.size(), "pairs": pairs, "differing": pairs - alike})
    every = samples[key].drop_duplicates().set_index(key).index
    return found.reindex(every, fill_value=0).reset_index()


def _tokens(experiment: Experiment, loaded: Matrix, tokenizer: Tokenizer) -> Iterator[Statistic]:
    for point in (None, *experiment.points):
        for sampler in samplers(experiment, point):
            cell = cell_name(point, sampler)
            own = loaded.samples[loaded.samples["point"] == cell]
            used = [_used(tokenizer, texts) for _, texts in own.groupby("seed")["response"]]
            how = f"t interval over {seeds_text(experiment)}" if point else "one base model for all seeds"
            place = where(experiment, point, sampler.engine, sampler.rho)
            numbers = over_seeds(used, logarithmic=False)
            yield Statistic(TOKENS, place, *numbers, "tokens", how, score_files(loaded, cell))


def _pruned_mass(experiment: Experiment, loaded: Matrix, point: GridPoint) -> Statistic | None:
    """1 − Z a token at the end of training, of a point whose trainer prunes."""
    if not experiment.methods[point.method].policies.startswith("pruned"):
        return None
    own = loaded.metrics[loaded.metrics["point"] == point.path]
    last = own[own["step"] > experiment.training_of(point).steps - LAST_STEPS]
    numbers = over_seeds(list(last.groupby("seed")["pruned_mass_mean"].mean()), logarithmic=False)
    how = f"t interval over {seeds_text(experiment)}"
    return Statistic(
        "pruned_mass", where_of(experiment, point), *numbers, "share a token", how, train_files(loaded, point.path)
    )


def _used(tokenizer: Tokenizer, texts: pd.Series) -> int:
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return len({token for text in encoded for token in text.ids})


def served(experiment: Experiment, point: GridPoint | None) -> Sampler:
    """What samples a model as in training; the base model, as the models are compared."""
    return experiment.sampler if point is None else Sampler(engine=point.engine, rho=point.rho)


def table(experiment: Experiment, loaded: Matrix, measured: list[Statistic]) -> Table:
    """A row a model; `measured` as of `statistics`.

    Columns of the exact engine with the full vocabulary, and `served_`: on the engine of training, from the vocabulary
    of training. In the CSV shares are fractions.
    """
    draws, score_R = replicates(experiment, loaded)
    known, exact, rows = lookup(measured), experiment.sampler, {}
    for point in (None, *experiment.points):
        row = point_cells(experiment, point)
        full, own = (where(experiment, point, each.engine, each.rho) for each in (exact, served(experiment, point)))
        cell = cell_name(point, exact)
        how = f"over {bootstrap.over(experiment.seeds)}"
        score = draws.estimate(score_R[cell], "share")
        row |= {
            "score": Statistic(SCORE, full, *score, "fraction", how, score_files(loaded, cell)),
            "solutions": known(SOLUTIONS, full),
            "differing": known(DIFFERING, full),
            "tokens": known(TOKENS, full),
        }
        if point is not None:
            row |= {
                f"served_{key}": known(name, own) for key, name in (("solutions", SOLUTIONS), ("differing", DIFFERING))
            }
            row["differing_over_unpruned"] = known(f"{DIFFERING}_over_unpruned_by_policy", full)
            row["pruned_mass"] = _pruned_mass(experiment, loaded, point)
            row["differing_over_reference"] = known(f"{DIFFERING}_over_reference_by_policy", full)
        rows[row["point"]] = row
    share, points = interval(".1f", 100), interval("+.1f", 100)
    columns = [
        *point_columns(experiment, rows, MARKS),
        Column("score", f"{exact.engine}, full (%) [95 %]", share, INTERVAL),
        Column("solutions", "different solutions a problem [95 %]", interval(".2f"), INTERVAL),
        Column("differing", "pairs that differ (%) [95 %]", share, INTERVAL),
        Column("differing_over_reference", "over ref. (points) [95 %]", points, INTERVAL),
        Column("differing_over_unpruned", "over no pruning (points) [95 %]", points, INTERVAL),
        Column("tokens", "tokens used [95 %]", interval(".0f"), INTERVAL),
        Column("served_solutions", "as in training: different solutions [95 %]", interval(".2f"), INTERVAL),
        Column("served_differing", "as in training: pairs that differ (%) [95 %]", share, INTERVAL),
        Column("pruned_mass", "1 − Z [95 %]", interval(".1e"), INTERVAL),
    ]
    k = experiment.evaluation.samples_per_problem[experiment.report.task]
    below = notes(
        "diversity_table",
        experiment,
        evaluation=experiment.evaluation,
        k=k,
        over=bootstrap.over(experiment.seeds),
        seeds=seeds_text(experiment),
        last=LAST_STEPS,
        control=any(row["role"] == "control" for row in rows.values()),
    )
    return Table(f"{experiment.name}: different solutions on {experiment.report.task}", columns, rows, below)
