"""The gradient's variance by baseline and by position in the response, and how well OTB's proxy orders true norms."""

import math
from collections.abc import Iterator

import numpy as np

from dvp.analysis.bias import digits, estimator_places, jackknife_error, pooled, spread_text
from dvp.analysis.formats import rho_text
from dvp.analysis.load import Variance
from dvp.analysis.pages import notes
from dvp.analysis.points import estimator_counterpart, policy_label
from dvp.analysis.statistics import Statistic, lookup
from dvp.analysis.tables import INTERVAL, Cell, Column, Table, interval
from dvp.experiment.config import Experiment
from dvp.experiment.grid import WHOLE

MEASURED = {
    "gradient_variance": "variance",
    "gradient_signal": "signal",
    "variance_over_signal": "variance_over_signal",
}
UNITS = {"gradient_variance": "of |g|²", "gradient_signal": "of |g|²", "variance_over_signal": "ratio"}
RATIOS = {"variance_ratio": "variance", "variance_over_signal_ratio": "variance_over_signal"}
PROXY = "proxy_rank_correlation"


def statistics(experiment: Experiment, loaded: Variance) -> list[Statistic]:
    """Of every estimator at every policy, engine and position, pooled over seeds: MEASURED and RATIOS; and PROXY.

    A ratio is to the same correction and safe vocabulary with RLOO's baseline, where that is compared too: the
    geometric mean over seeds, its interval that of the logarithm. Intervals as those of `bias.statistics`. What is not
    defined is left out.
    """
    return [*_variances(experiment, loaded), *_proxy(experiment, loaded)]


def variance_places(experiment: Experiment) -> list[dict[str, str]]:
    """Policy, engine, method, ρ and position of everything that is measured, as statistics name it."""
    return [
        where | {"position": position}
        for where in estimator_places(experiment)
        for position in [WHOLE, *experiment.positions]
    ]


def _variances(experiment: Experiment, loaded: Variance) -> Iterator[Statistic]:
    count, index = len(experiment.seeds), ["policy", "engine", "method", "rho", "position", "seed"]
    mean = "one seed" if count == 1 else f"the {{}} over {count} seeds (each with problems of its own)"
    spread = spread_text(count)
    measured = loaded.variance.set_index(index).sort_index()
    jackknife = loaded.jackknife.set_index(index).sort_index()
    for where in variance_places(experiment):
        key, partner = tuple(where.values()), estimator_counterpart(experiment, where["method"], "rloo")
        rows = measured.loc[key].loc[experiment.seeds]
        sources = tuple(rows["source"])
        for name, column in MEASURED.items():
            scale = "plain" if name == "gradient_signal" else "ratio"  # a signal may come out below 0
            numbers = pooled(rows[column], rows[f"{column}_se"], scale)
            if math.isfinite(numbers[0]):
                how = f"{mean.format('mean')}; {spread}"
                yield Statistic(name, where, *numbers, UNITS[name], how, sources)
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
                how = f"{mean.format('geometric mean')}, over {partner} from the same responses (paired); {spread}"
                how += ", of logarithms"
                yield Statistic(name, where, *numbers, "ratio", how, sources)


def _proxy(experiment: Experiment, loaded: Variance) -> Iterator[Statistic]:
    # The trainer's own policy wrote the tokens: the same, and the same numbers, whatever engine is measured beside it.
    first = loaded.proxy[loaded.proxy["engine"] == experiment.bias.engines[0]]
    for (policy, position), rows in first.groupby(["policy", "position"], sort=False):
        numbers = pooled(rows["rank_correlation"], rows["rank_correlation_se"])
        if math.isfinite(numbers[0]):
            how = f"Spearman; {spread_text(len(experiment.seeds))}"
            where = {"policy": policy, "position": position}
            yield Statistic(PROXY, where, *numbers, "correlation", how, tuple(rows["source"]))


# --- tables -------------------------------------------------------------------------------------------------


def tables(experiment: Experiment, loaded: Variance, measured: list[Statistic]) -> dict[str, Table]:
    """variance_table: a row for every estimator and position; proxy_table: a row for every policy and position."""
    return {
        "variance_table": _variance_table(experiment, measured),
        "proxy_table": _proxy_table(experiment, loaded, measured),
    }


def _variance_table(experiment: Experiment, measured: list[Statistic]) -> Table:
    known = lookup(measured)
    rows = {
        "/".join(where.values()): where
        | {
            "label": experiment.methods[where["method"]].label,
            "policy_label": policy_label(experiment, where["policy"]),
            "over": estimator_counterpart(experiment, where["method"], "rloo"),
            "seeds": list(experiment.seeds),
        }
        | {name: known(name, where) for name in (*MEASURED, *RATIOS)}
        for where in variance_places(experiment)
    }
    columns = [
        Column("label", "estimator"),
        Column("method", None),
        Column("rho", "ρ", rho_text),
        Column("engine", "engine"),
        Column("policy", None),
        Column("policy_label", "policy" if len(experiment.bias.policies) > 1 else None, shown_only=True),
        Column("position", "tokens", _position),
        Column("seeds", None),
        Column("gradient_variance", "variance [95 %]", interval(digits()), INTERVAL),
        Column("gradient_signal", None, interval(digits()), INTERVAL),
        Column("variance_over_signal", "variance / signal [95 %]", interval(digits()), INTERVAL),
        Column("over", None),
        Column("variance_ratio", "variance, over RLOO's [95 %]", interval(".2f"), INTERVAL),
        Column("variance_over_signal_ratio", "variance / signal, over RLOO's [95 %]", interval(".2f"), INTERVAL),
    ]
    title = f"{experiment.name}: variance of the policy gradient by baseline and position in the response"
    below = notes("variance_table", experiment, settings=experiment.bias, count=len(experiment.seeds))
    return Table(title, columns, rows, below)


def _proxy_table(experiment: Experiment, loaded: Variance, measured: list[Statistic]) -> Table:
    known, rows = lookup(measured), {}
    first = loaded.proxy[loaded.proxy["engine"] == experiment.bias.engines[0]]
    for (policy, position), own in first.groupby(["policy", "position"], sort=False):
        where = {"policy": policy, "position": position}
        rows["/".join(where.values())] = where | {
            "policy_label": policy_label(experiment, policy),
            "seeds": list(experiment.seeds),
            PROXY: known(PROXY, where),
            "tokens": Cell(int(own["tokens"].sum()), tuple(own["source"])),
        }
    columns = [
        Column("policy", None),
        Column("policy_label", "policy", shown_only=True),
        Column("position", "position", _position),
        Column("seeds", None),
        Column(PROXY, "rank correlation [95 %]", interval(".2f"), INTERVAL),
        Column("tokens", "tokens"),
    ]
    title = f"{experiment.name}: how OTB's proxy orders the true norms of the tokens' gradients"
    below = notes("proxy_table", experiment, settings=experiment.bias, count=len(experiment.seeds))
    return Table(title, columns, rows, below)


def _position(position: str) -> str:
    return position.replace("-", "–")
