"""The gradient's variance by baseline and by position in the response, and how well OTB's proxy orders true norms."""

import math
from collections.abc import Iterator

import numpy as np

from dvp.analysis.bias import estimator_places, jackknife_error, over_problems
from dvp.analysis.estimates import pooled, spread_text
from dvp.analysis.load import Reader
from dvp.analysis.points import estimator_counterpart
from dvp.analysis.statistics import Statistic
from dvp.experiment.config import Experiment
from dvp.experiment.grid import WHOLE

# Statistic: column, unit, scale of the interval; a signal may come out below 0.
MEASURED = {
    "gradient_variance": ("variance", "of |g|²", "ratio"),
    "gradient_signal": ("signal", "of |g|²", "plain"),
    "variance_over_signal": ("variance_over_signal", "ratio", "ratio"),
}
RATIOS = {"variance_ratio": "variance", "variance_over_signal_ratio": "variance_over_signal"}


def statistics(experiment: Experiment, reader: Reader) -> Iterator[Statistic]:
    """Of every estimator at every policy, engine and position, pooled over seeds: MEASURED and RATIOS; and of every
    policy and position proxy_rank_correlation and proxy_tokens.

    A ratio is to the same correction and safe vocabulary with RLOO's baseline, where that is compared too: the
    geometric mean over seeds, its interval that of the logarithm. Intervals as those of `bias.statistics`. What is not
    defined is left out.
    """
    yield from _variances(experiment, reader)
    yield from _proxy(experiment, reader)


def variance_places(experiment: Experiment) -> list[dict[str, str]]:
    """Policy, engine, method, ρ and position of everything that is measured, as statistics name it."""
    return [
        where | {"position": position}
        for where in estimator_places(experiment)
        for position in [WHOLE, *experiment.positions]
    ]


def _variances(experiment: Experiment, reader: Reader) -> Iterator[Statistic]:
    index = ["policy", "engine", "method", "rho", "position", "seed"]
    measured, jackknife = (
        reader.bias[name].set_index(index).sort_index() for name in ("variance", "variance_jackknife")
    )
    for where in variance_places(experiment):
        key, partner = tuple(where.values()), estimator_counterpart(experiment, where["method"], "rloo")
        rows = measured.loc[key].loc[experiment.seeds]
        for name, (column, unit, scale) in MEASURED.items():
            numbers = pooled(rows[column], rows[f"{column}_se"], scale)
            if math.isfinite(numbers[0]):
                yield Statistic(name, where, *numbers, unit, over_problems(experiment), tuple(rows["source"]))
        if partner is None:
            continue
        other = (*key[:2], partner, *key[3:])
        for name, column in RATIOS.items():
            values, errors = [], []
            for seed in experiment.seeds:
                value = rows.loc[seed, column] / measured.loc[(*other, seed), column]
                values.append(math.log(value) if value > 0 else math.nan)
                own, theirs = (
                    part.assign(**{column: np.log(part[column].where(part[column] > 0))})
                    for part in (jackknife.loc[(*key, seed)], jackknife.loc[(*other, seed)])
                )
                errors.append(jackknife_error(own, theirs, column))
            numbers = tuple(math.exp(number) for number in pooled(values, errors))
            if math.isfinite(numbers[0]):
                mean, _, spread = over_problems(experiment, "geometric mean").partition("; ")
                how = f"{mean}, over {partner} from the same responses (paired); {spread}, of logarithms"
                yield Statistic(name, where, *numbers, "ratio", how, tuple(rows["source"]))


def _proxy(experiment: Experiment, reader: Reader) -> Iterator[Statistic]:
    # The trainer's own policy wrote the tokens: the same, and the same numbers, whatever engine is measured beside it.
    proxy = reader.bias["proxy"]
    for (policy, position), rows in proxy[proxy["engine"] == experiment.bias.engines[0]].groupby(
        ["policy", "position"], sort=False
    ):
        where, sources = {"policy": policy, "position": position}, tuple(rows["source"])
        numbers = pooled(rows["rank_correlation"], rows["rank_correlation_se"])
        if math.isfinite(numbers[0]):
            how = f"Spearman; {spread_text(len(experiment.seeds))}"
            yield Statistic("proxy_rank_correlation", where, *numbers, "correlation", how, sources)
        tokens = float(rows["tokens"].sum())
        yield Statistic("proxy_tokens", where, tokens, math.nan, math.nan, "tokens", "of all seeds", sources)
