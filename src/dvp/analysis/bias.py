"""Bias and variance of the gradient estimators: the stage `bias`, pooled over seeds, as statistics and table."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
import pandas as pd
from scipy import stats

from dvp.analysis.formats import EMPTY, Formatted, rho_text
from dvp.analysis.load import Bias
from dvp.analysis.pages import notes
from dvp.analysis.points import estimator_counterpart, policy_label
from dvp.analysis.statistics import Statistic, lookup
from dvp.analysis.tables import INTERVAL, Cell, Column, Table, interval, number
from dvp.analysis.training import over_seeds
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.measurement.files import PAIRED, SMALLEST_ESS

NORMAL_95 = 1.959964
# Of an estimator: its statistics, what else is known of it, and those whose change by DVP is told.
ESTIMATED = ("squared_bias", "cosine", "variance", "mse")
KEPT = ("kept_fraction", "mean_weight", "outside_safe_fraction", "reward")
CHANGES = ("squared_bias", "variance")
# Of the sequence weights behind a paired bias.
WEIGHTS = ("weight_ess", "weight_largest_share", "weight_mean")
_UNITS = {name: "1" if name == "cosine" else "of |g|²" for name in ESTIMATED}


def statistics(experiment: Experiment, loaded: Bias) -> list[Statistic]:
    """Of every estimator at every policy and engine, pooled over seeds: ESTIMATED, and its CHANGES by pruning.

    NAME_change is against the same correction without safe vocabulary, where there is one. Value and interval as of
    `pooled`. What is not defined, as a cosine may be, is left out.

    And PAIRED (dvp.measurement.files), left out where the sequence weights of any seed have an ESS below
    SMALLEST_ESS: the mean over seeds, with a t interval over seeds from three on, else over batches. Where those are,
    weight_mean and weight_mean_pruned, the mean of these weights: below 1 the engine does not reach all that the
    trainer samples.
    """
    return [*_statistics(experiment, loaded), *_paired_statistics(experiment, loaded)]


def _statistics(experiment: Experiment, loaded: Bias) -> Iterator[Statistic]:
    count = len(experiment.seeds)
    over = "one seed" if count == 1 else f"the mean over {count} seeds (each with problems of its own)"
    spread = f"{over}; {spread_text(count)}"
    index = [*place_columns(experiment), "seed"]
    estimators, jackknife = (table.set_index(index).sort_index() for table in (loaded.estimators, loaded.jackknife))
    for where in estimator_places(experiment):
        key, partner = tuple(where.values()), estimator_counterpart(experiment, where["method"], "unpruned")
        rows = estimators.loc[key].loc[experiment.seeds]
        sources = tuple(rows["source"])
        for name in ESTIMATED:
            scale = "ratio" if name in ("variance", "mse") else "plain"
            numbers = pooled(rows[name], rows[f"{name}_se"], scale)
            if math.isfinite(numbers[0]):
                yield Statistic(name, where, *numbers, _UNITS[name], spread, sources)
        if partner is None:
            continue
        other = tuple((where | {"method": partner, "rho": "none"}).values())
        for name in CHANGES:
            values = [rows.loc[seed, name] - estimators.loc[(*other, seed), name] for seed in experiment.seeds]
            errors = [
                jackknife_error(jackknife.loc[(*key, seed)], jackknife.loc[(*other, seed)], name)
                for seed in experiment.seeds
            ]
            how = f"{spread}; paired with {partner}, the same seeds of the sampler"
            yield Statistic(f"{name}_change", where, *pooled(values, errors), _UNITS[name], how, sources)


def _paired_statistics(experiment: Experiment, loaded: Bias) -> Iterator[Statistic]:
    estimators = loaded.estimators.set_index([*place_columns(experiment), "seed"]).sort_index()
    for where in estimator_places(experiment):
        rows = estimators.loc[tuple(where.values())].loc[experiment.seeds]
        for name, ess in PAIRED.items():
            if (rows[ess] >= SMALLEST_ESS).all():  # NaN, as of ∇J_mp without a safe vocabulary, is not
                numbers, over = _paired(rows[name], rows[f"{name}_se"], rows["batches"])
                how = f"paired with the exact gradient by the same samples of the engine; t interval over {over}"
                yield Statistic(name, where, *numbers, "of |g|²", how, tuple(rows["source"]))
                mean = ess.replace("ess", "mean")
                numbers = over_seeds(list(rows[mean]), logarithmic=False)
                how = f"mean of the weights p(y)/q(y), 1 if q reaches all of p; t interval over {len(rows)} seeds"
                yield Statistic(mean, where, *numbers, "ratio", how, tuple(rows["source"]))


def _paired(values: pd.Series, errors: pd.Series, batches: pd.Series) -> tuple[tuple[float, float, float], str]:
    """The mean over seeds with its 95 % t interval, and over what that is."""
    count = len(values)
    if bootstrap.covers_seeds(values):
        return over_seeds(list(values), logarithmic=False), f"{count} seeds"
    value, error = float(values.mean()), math.sqrt(float(np.square(errors).sum())) / count
    half = float(stats.t.ppf(0.975, int((batches - 1).sum()))) * error
    return (value, value - half, value + half), "batches, by the delete-one jackknife"


def estimator_places(experiment: Experiment) -> list[dict[str, str]]:
    """Policy, engine, task if any, method and ρ of everything that the stage `bias` measures, as statistics name it."""
    settings = experiment.bias
    return [
        {"policy": policy if policy == "base" else policy.path, "engine": engine}
        | ({"task": task} if task else {})
        | {"method": method, "rho": rho or "none"}
        for policy, engine, task, (method, rho) in product(
            settings.policies, settings.engines, settings.tasks or [None], experiment.estimators
        )
    ]


def place_columns(experiment: Experiment) -> list[str]:
    """The keys of each of `estimator_places`, in their order."""
    return ["policy", "engine", *(["task"] if experiment.bias.tasks else []), "method", "rho"]


def jackknife_error(own: pd.DataFrame, other: pd.DataFrame, name: str) -> float:
    """Standard error of a difference, by the jackknife over what both share."""
    batches = ["sample", "batch"]
    differences = own.set_index(batches)[name] - other.set_index(batches)[name]
    return math.sqrt(sum((len(part) - 1) * part.var(ddof=0) for _, part in differences.groupby("sample")))


def pooled(
    values: Sequence[float], errors: Sequence[float], scale: bootstrap.Scale = "plain"
) -> tuple[float, float, float]:
    """Mean over seeds with a t interval; with fewer than three seeds with a normal one, from the mean squared error.

    The interval is made on `scale`.

    The variance between seeds contains that within them. Where it is not larger, that is no sign that seeds do not
    differ: the larger of the two with a normal quantile covers 81 to 91 % where they do.
    """
    # Not as pandas would: what one seed leaves undefined is undefined.
    values, errors = np.asarray(values, dtype=float), np.asarray(errors, dtype=float)
    if bootstrap.covers_seeds(values):
        value, low, _ = over_seeds(values, logarithmic=False)
        half = value - low
    else:
        value = float(np.mean(values))
        half = NORMAL_95 * math.sqrt(np.mean(np.square(errors)) / len(values))
    return value, *bootstrap.ends(value, half, scale)


def spread_text(count: int) -> str:
    """How `pooled` makes an interval, in words."""
    if bootstrap.covers_seeds(range(count)):
        return f"t interval over {count} seeds"
    return (
        "normal interval from the delete-one jackknife's variance (batches of the estimator and of the reference), not "
        "over seeds"
    )


# --- tables -------------------------------------------------------------------------------------------------


def digits(sign: str = "") -> Callable[[float], str]:
    """Two digits, or whole numbers; no exponent above 10."""
    return lambda value: f"{value:{sign}.0f}" if abs(value) >= 10 else f"{value:{sign}.2g}"


def bias_table(experiment: Experiment, loaded: Bias, measured: list[Statistic]) -> Table:
    """A row for every estimator at every policy and engine, `measured` as of `statistics`."""
    known, rows = lookup(measured), {}
    estimators = loaded.estimators.set_index(place_columns(experiment)).sort_index()
    shown = [*ESTIMATED, *(f"{name}_change" for name in CHANGES), *PAIRED]
    weights = [f"{name}{end}" for end in ("", "_pruned") for name in WEIGHTS]
    for where in estimator_places(experiment):
        own = estimators.loc[[tuple(where.values())]]
        sources = tuple(own["source"])
        batches, empty = int(own["batches"].sum()), int(own["empty_batches"].sum())
        rows["/".join(where.values())] = (
            where
            | {
                "label": experiment.methods[where["method"]].label,
                "policy_label": policy_label(experiment, where["policy"]),
                "partner": estimator_counterpart(experiment, where["method"], "unpruned"),
                "seeds": list(experiment.seeds),
            }
            | {name: known(name, where) for name in shown}
            | {name: Cell(float(own[name].mean()), sources) for name in KEPT}
            | {
                # The worst seed's, as it decides; of the mean weight the mean.
                name: Cell(float(own[name].agg(_OF_SEEDS[name.removesuffix("_pruned")])), sources)
                for name in weights
                if own[name].notna().all()
            }
            | {
                "response_tokens": Cell(float(own["response_tokens"].mean()), sources),
                "batches": Cell(batches, sources),
                "empty_batches": Cell(empty, sources),
                "empty": Cell(f"{empty} / {batches}", sources),
            }
        )
    several, of_tasks = len(experiment.bias.policies) > 1, bool(experiment.bias.tasks)
    columns = [
        Column("label", "estimator"),
        Column("method", None),
        Column("partner", None),
        Column("rho", "ρ", rho_text),
        Column("engine", "engine"),
        *([Column("task", "problems"), Column("response_tokens", "tokens", number(".0f"))] if of_tasks else []),
        Column("policy", None),
        Column("policy_label", "policy" if several else None, shown_only=True),
        Column("seeds", None),
        *(Column(name, heading, interval(digits()), INTERVAL) for name, heading in _HEADINGS.items()),
        Column("squared_bias_change", "bias² change [95 %]", interval(digits("+")), INTERVAL),
        Column("variance_change", "variance change [95 %]", interval(digits("+")), INTERVAL),
        *(Column(name, heading, interval(digits()), INTERVAL) for name, heading in _PAIRED_HEADINGS.items()),
        *(Column(name, _WEIGHT_HEADINGS.get(name), number(".0f", 100)) for name in weights),
        *(Column(name, "kept (%)" if name == "kept_fraction" else None, number(".0f", 100)) for name in KEPT),
        Column("batches", None),
        Column("empty_batches", None),
        Column("empty", "empty batches", shown_only=True),
    ]
    title = f"{experiment.name}: bias and variance of the policy gradient's estimators"
    values = {
        "settings": experiment.bias,
        "count": len(experiment.seeds),
        "over_seeds": bootstrap.covers_seeds(experiment.seeds),
    }
    below = notes("bias_table", experiment, smallest_ess=SMALLEST_ESS, **values)
    return Table(title, columns, rows, below)


def format_estimators(table: pd.DataFrame, summary: dict, title: str) -> Formatted:
    """The table of a single measurement, with what one must know to read it."""

    def cell(row: dict, name: str) -> str:
        if name in PAIRED and not row[PAIRED[name]] >= SMALLEST_ESS:
            return EMPTY
        numbers = [row[name], row[f"{name}_low"], row[f"{name}_high"]]
        return interval(digits())(Statistic(name, {}, *numbers, "", "", ()))

    rows = [
        [
            row["label"],
            EMPTY if pd.isna(row["rho"]) else rho_text(row["rho"]),
            *(cell(row, name) for name in ("squared_bias", "cosine", "variance")),
            number(digits())(row["mse"]),
            *(cell(row, name) for name in PAIRED),
            f"{100 * row['kept_fraction']:.0f}",
            str(row["empty_batches"]),
        ]
        for row in table.to_dict("records")
    ]
    below = notes("one_measurement", summary=summary, estimators=len(table), smallest_ess=SMALLEST_ESS)
    headings = [*list(_HEADINGS.values())[:3], "mse", *_PAIRED_HEADINGS.values(), "kept (%)", "empty"]
    return Formatted(title, ["estimator", "ρ", *headings], rows, below)


_HEADINGS = {
    "squared_bias": "bias² [95 %]",
    "cosine": "cosine [95 %]",
    "variance": "variance [95 %]",
    "mse": "mse [95 %]",
}
_PAIRED_HEADINGS = {
    "paired_squared_bias": "paired bias² [95 %]",
    "paired_squared_bias_pruned": "paired bias² to ∇J_mp [95 %]",
}
_WEIGHT_HEADINGS = {"weight_ess": "ESS of r (%)", "weight_ess_pruned": "ESS of r, pruned (%)"}
_OF_SEEDS = {"weight_ess": "min", "weight_largest_share": "max", "weight_mean": "mean"}
