"""Measure how many different solutions a policy finds of problems that can have several, and how often two differ.

The number of solutions grows with the score, as fewer samples are wrong. The share of pairs that differ does not for a
single problem, and rarely does for the mean over problems with equal weights.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd

from dvp.analysis.estimates import Estimate, mean, over_model, over_seeds, t_over_seeds
from dvp.analysis.load import Reader
from dvp.analysis.matrix import contrasts
from dvp.analysis.points import BASE, where_of
from dvp.analysis.samplers import samplers
from dvp.analysis.statistics import Statistic
from dvp.data.puzzles import read
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint, Sampler

Model = tuple[GridPoint | None, Sampler]


def statistics(experiment: Experiment, reader: Reader) -> Iterator[Statistic]:
    """Yield the diversity of every model and sampler, with the coordinates of dvp.analysis.matrix.statistics.

    different_solutions_by_policy: different solutions among the correct samples of a problem, mean over problems.
    differing_pairs_by_policy: the share of pairs of correct samples of a problem that are different solutions, mean
    over the problems of all seeds that have a pair. tokens_used_by_policy: different tokens in the texts of all
    responses of a model. The first two also as differences, different_solutions_over_unpruned_by_policy and so on; that
    of differing pairs is over the problems that have a pair with both models.
    """
    k = experiment.evaluation.samples_per_problem[experiment.report.task]
    models = [(point, sampler) for point in (None, *experiment.points) for sampler in samplers(experiment, point)]
    found = {model: solutions(reader.scored(*model).answers) for model in models}

    @cache
    def different(model: Model) -> Estimate:
        return mean(experiment, _table(found[model], "different"), reader.scored(*model).sources)

    def share(model: Model, other: Model | None = None) -> Estimate:
        both = [model] if other is None else [model, other]
        shares = [
            _table(found[each].assign(share=found[each]["differing"] / found[each]["pairs"]), "share") for each in both
        ]
        sources = [file for each in both for file in reader.scored(*each).sources]
        return mean(experiment, shares[0] if other is None else shares[0] - shares[1], sources)

    for name, of, unit, scale, minus in (
        (
            "different_solutions",
            different,
            f"solutions of {k} samples",
            "plain",
            lambda a, b: different(a) - different(b),
        ),
        ("differing_pairs", share, "fraction", "share", share),
    ):
        for point, sampler in models:
            measured, place = _unless_all_agree(of((point, sampler)), scale), where_of(experiment, point, sampler)
            yield measured.statistic(f"{name}_by_policy", place, unit, over_model(experiment, point), scale)
        yield from contrasts(experiment, name, minus, unit)
    for point, sampler in models:
        scored = reader.scored(point, sampler)
        used = [_used(reader, texts) for _, texts in scored.answers.groupby("seed")["response"]]
        how = t_over_seeds(experiment) if point else "one base model for all seeds"
        place, sources = where_of(experiment, point, sampler), (*scored.sources, f"{BASE}/manifest.json")
        yield Statistic("tokens_used_by_policy", place, *over_seeds(used), "tokens", how, sources)


def solutions(samples: pd.DataFrame) -> pd.DataFrame:
    """Count, by seed and problem, different solutions, pairs of correct samples, and pairs that differ."""
    key = ["seed", "problem"]
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


def _table(found: pd.DataFrame, column: str) -> np.ndarray:
    """Return a column as (S, P), NaN where it is not defined."""
    return found.pivot(index="seed", columns="problem", values=column).to_numpy(dtype=float)


def _unless_all_agree(estimate: Estimate, scale: bootstrap.Scale) -> Estimate:
    """Drop the interval of an estimate whose replicates all agree, a value of 0 or a share of 1.

    (`bootstrap` would give a share of 0 or 1 an interval of as many trials as problems, even those without a pair.)
    """
    value = estimate.value_R[0]
    agree = value == 0 or (scale == "share" and value == 1)
    return replace(estimate, value_R=np.array([value, np.nan])) if agree else estimate


def _used(reader: Reader, texts: pd.Series) -> int:
    encoded = reader.tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return len({token for text in encoded for token in text.ids})
