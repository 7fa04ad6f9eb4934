"""Bias and variance of the gradient estimators: the stage `bias`, pooled over seeds, as table and figure."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from dvp.analysis.figures import COLORS, MARKERS, STYLE
from dvp.analysis.formats import EMPTY, Formatted, rho_text
from dvp.analysis.inputs import check_fresh, unpruned
from dvp.analysis.statistics import Measured, Statistic
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.grid import Measurement, parse_rho
from dvp.files import read_json, verify_checksums

STATISTICS = {"squared_bias": "of |g|²", "cosine": "1", "variance": "of |g|²", "mse": "of |g|²"}
CHANGES = ("squared_bias", "variance")
NORMAL_95 = 1.959964
LINEAR = 0.1  # |squared bias| up to which the figure's axis is linear
_COLUMNS = ("kept_fraction", "mean_weight", "outside_safe_fraction", "reward")
_KEYS = ["method", "rho"]
# A colour for each correction; black for none.
_CORRECTIONS = ("#000000", *COLORS)


@dataclass(frozen=True)
class MeasuredCell:
    """A measurement as stage `bias` wrote it, tables indexed by (method, rho), rho `none` where there is none."""

    record: dict
    source: str
    estimators: pd.DataFrame
    jackknife: dict[tuple[str, str], pd.DataFrame]


def pooled(experiment: Experiment, results: Path) -> pd.DataFrame:
    """Every estimator at every policy and engine, pooled over seeds: what statistics, table and figure are made of.

    Columns: policy (`base` or the arm's path), engine, method, rho (`none` without one), label, partner (the same
    correction without safe vocabulary; None if there is none), seeds (list); each of STATISTICS, and changes of
    CHANGES (NAME_change, against the partner, NaN without one), with _low and _high; batches and empty_batches of all
    seeds; the means of _COLUMNS; sources.

    The value is the mean over seeds; its interval is normal, with the larger of the jackknife's mean variance and the
    variance between seeds (which contains it), over their number. `results` is the experiment's folder. Raises DvpError
    for a missing, stale, altered or malformed measurement.
    """
    settings = experiment.bias
    rows = []
    for policy, engine in product(settings.policies, settings.engines):
        measurements = [
            read_cell(experiment, results, Measurement(policy=policy, engine=engine, seed=seed))
            for seed in experiment.seeds
        ]
        for key in [(method, rho or "none") for method, rho in experiment.estimators]:
            partner = unpruned(experiment, key[0], (name for name, _ in experiment.estimators))
            found = [measurement.estimators.loc[key] for measurement in measurements]
            row = {
                "policy": policy if policy == "base" else policy.path,
                "engine": engine,
                "method": key[0],
                "rho": key[1],
                "label": experiment.methods[key[0]].label,
                "partner": partner,
                "seeds": list(experiment.seeds),
            }
            for name in STATISTICS:
                row |= _over_seeds(name, [one[name] for one in found], [one[f"{name}_se"] for one in found])
            for name in CHANGES:
                changes = (
                    [_change(measurement, key, (partner, "none"), name) for measurement in measurements]
                    if partner
                    else [(math.nan,) * 2]
                )
                row |= _over_seeds(f"{name}_change", *zip(*changes, strict=True))
            row |= {name: sum(int(one[name]) for one in found) for name in ("batches", "empty_batches")}
            row |= {name: float(np.mean([one[name] for one in found])) for name in _COLUMNS}
            rows.append(row | {"sources": tuple(measurement.source for measurement in measurements)})
    exact = ("rho", "partner", "seeds", "sources")
    return pd.DataFrame(
        {name: pd.Series([row[name] for row in rows], dtype=object if name in exact else None) for name in rows[0]}
    )


def measured(experiment: Experiment, results: Path) -> Measured:
    """The statistics of `pooled`, the table `bias_table` and the figure `bias_variance`. Raises DvpError."""
    rows = pooled(experiment, results)
    table = rows.drop(columns=["sources"])
    return Measured(
        statistics=_statistics(experiment, rows),
        tables={"bias_table": (table, _format(experiment, rows))},
        figures={"bias_variance": bias_variance(experiment, rows)},
        sources=tuple(dict.fromkeys(source for sources in rows["sources"] for source in sources)),
    )


def read_cell(experiment: Experiment, results: Path, measurement: Measurement) -> MeasuredCell:
    """A measurement's three files. Raises DvpError, naming the file, for a missing, stale, altered or malformed one."""
    folder = results / "bias" / measurement.path
    path = folder / "bias.json"
    record = read_json(
        path, "config_hash", "measurement", "reference", "responses_a_batch", "git_commit", "tracking_key", "files"
    )
    check_fresh(path, record, experiment.config_hash("bias", measurement=measurement))
    if record["measurement"] != measurement.path:
        raise DvpError(f"{path}: measurement: expected '{measurement.path}', found {record['measurement']!r}")
    for name in ("estimators.parquet", "jackknife.parquet"):
        if name not in record["files"]:
            raise DvpError(f"{path}: files: '{name}' is missing")
    verify_checksums(folder, record["files"])
    numbers = [f"{name}{end}" for name in STATISTICS for end in ("", "_se")]
    estimators = _read(folder / "estimators.parquet", [*_KEYS, *numbers, "batches", "empty_batches", *_COLUMNS])
    expected = [(method, rho or "none") for method, rho in experiment.estimators]
    if list(zip(estimators["method"], estimators["rho"], strict=True)) != expected:
        raise DvpError(f"{folder / 'estimators.parquet'}: method, rho: not the experiment's estimators in their order")
    # A cosine may be undefined.
    if not np.isfinite(estimators[[name for name in numbers if "cosine" not in name]].to_numpy(dtype=float)).all():
        raise DvpError(f"{folder / 'estimators.parquet'}: expected finite numbers in {', '.join(STATISTICS)}")
    jackknife = _read(folder / "jackknife.parquet", [*_KEYS, "sample", "batch", *CHANGES])
    by_estimator = {
        key: part.set_index(["sample", "batch"])[list(CHANGES)] for key, part in jackknife.groupby(_KEYS, sort=False)
    }
    if set(by_estimator) != set(expected):
        raise DvpError(f"{folder / 'jackknife.parquet'}: method, rho: not the experiment's estimators")
    return MeasuredCell(record, path.relative_to(results).as_posix(), estimators.set_index(_KEYS), by_estimator)


def format_estimators(table: pd.DataFrame, summary: dict, title: str) -> Formatted:
    """The table of a single measurement, with what one must know to read it."""
    reference = summary["reference"]
    rows = [
        [
            row["label"],
            EMPTY if pd.isna(row["rho"]) else rho_text(row["rho"]),
            *(_ranged(row, name) for name in ("squared_bias", "cosine", "variance")),
            _number(row["mse"], ""),
            f"{100 * row['kept_fraction']:.0f}",
            str(row["empty_batches"]),
        ]
        for row in table.to_dict("records")
    ]
    notes = [
        *_reading("the delete-one jackknife over the batches of both"),
        f"{summary['batches']} batches of {summary['responses_a_batch']} responses to {len(summary['problems'])} "
        f"problems an estimator; {reference['batches']} such batches from the trainer's own policy (fp32) for g, with "
        f"|g|² = {reference['squared_norm']:.3g} ± {reference['squared_norm_se']:.1g} (s.e.) and mean reward "
        f"{reference['reward']:.2f}. {len(table)} estimators were compared.",
    ]
    if summary["sketched"]:
        notes.append(
            f"The gradient of {summary['parameters']:,} parameters was count-sketched to {summary['coordinates']:,} "
            "numbers: inner products are unbiased, with an error of about 0.1 % of the product of the norms."
        )
    return Formatted(title, ["estimator", "ρ", *_HEADINGS[:3], "mse", "kept (%)", "empty"], rows, notes)


_HEADINGS = ("bias² [95 %]", "cosine [95 %]", "variance [95 %]", "mse [95 %]")


def bias_variance(experiment: Experiment, rows: pd.DataFrame) -> Figure:
    """Squared bias against variance, a panel a policy and engine; an arrow from each estimator to itself with DVP."""
    engines, policies = experiment.bias.engines, list(dict.fromkeys(rows["policy"]))
    plain = list(dict.fromkeys(row["partner"] or row["method"] for row in rows.to_dict("records")))
    colors = {method: _CORRECTIONS[index % len(_CORRECTIONS)] for index, method in enumerate(plain)}
    prunings = _prunings(experiment, rows)
    markers = {pruning: MARKERS[1 + index % (len(MARKERS) - 1)] for index, pruning in enumerate(prunings)}
    shapes = {(method, rho): markers.get(_pruning(experiment, method, rho), "o") for method, rho in _pairs(rows)}
    with mpl.rc_context(STYLE):
        width = max(3.1 * len(engines), 4.2)
        figure = Figure(figsize=(width + 2.7, 3.3 * len(policies) + 0.9), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(policies), len(engines), squeeze=False, sharex=True, sharey=True)
        for (row, policy), (column, engine) in product(enumerate(policies), enumerate(engines)):
            axes = grid[row, column]
            shown = rows[(rows["policy"] == policy) & (rows["engine"] == engine)].to_dict("records")
            _panel(axes, shown, colors, shapes)
            axes.set_title(f"engine {engine}, {_policy_text(experiment, policy)}")
            if row == len(policies) - 1:
                axes.set_xlabel("variance of one batch, of |g|²")
            if column == 0:
                axes.set_ylabel("squared bias, of |g|²")
        title = (
            "Estimators of the policy gradient against the exact one: lower is less biased, further left less noisy. "
            f"Bars: 95 %. The vertical axis is linear within ±{LINEAR:g} (grey)."
        )
        figure.suptitle(textwrap.fill(title, int(13 * width)), fontsize=9.5, x=0.01, ha="left")
        handles = [
            Line2D([], [], color=color, marker="o", linewidth=0, label=experiment.methods[method].label)
            for method, color in colors.items()
        ]
        dark = "#505050"
        handles += [
            Line2D([], [], linewidth=0, label=" "),
            *(
                Line2D([], [], color=dark, marker=markers[pruning], linewidth=0, label=label)
                for pruning, label in prunings.items()
            ),
            Line2D([], [], color=dark, marker=r"$\rightarrow$", markersize=11, linewidth=0, label="what DVP changes"),
            Line2D(
                [], [], color=dark, marker="o", mfc="white", linewidth=0, label="95 % interval of the\nbias holds 0"
            ),
        ]
        figure.legend(handles=handles, loc="outside right upper")
    return figure


def _pairs(rows: pd.DataFrame) -> list[tuple[str, str]]:
    return list(dict.fromkeys(zip(rows["method"], rows["rho"], strict=True)))


def _pruning(experiment: Experiment, method: str, rho: str) -> tuple[str, str] | None:
    """The rule for the safe vocabulary with its settings, and its ρ; None without one."""
    rule = experiment.methods[method].safe_vocabulary
    return None if rule is None else (rule.model_dump_json(), rho)


def _prunings(experiment: Experiment, rows: pd.DataFrame) -> dict[tuple[str, str], str]:
    """Every rule and ρ, those of DVP with a fixed ρ first and the largest ρ first; how each is called."""
    labels, order = {}, {}
    for method, rho in _pairs(rows):
        pruning = _pruning(experiment, method, rho)
        if pruning is not None:
            rule = experiment.methods[method].safe_vocabulary.rule
            fixed, value = rule == "fixed", 0.0 if rho == "none" else parse_rho(rho)
            name = "with DVP" if fixed else f"with DVP, {rule.replace('_', ' ')}"
            labels[pruning] = name if rho == "none" else f"{name}, ρ = {rho_text(rho)}"
            order[pruning] = (not fixed, pruning[0], -value)
    return {pruning: labels[pruning] for pruning in sorted(labels, key=order.__getitem__)}


def _panel(axes: Axes, shown: list[dict], colors: dict[str, str], shapes: dict[tuple[str, str], str]) -> None:
    by_key = {(row["method"], row["rho"]): row for row in shown}
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=LINEAR, linscale=0.7)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    axes.axhspan(-LINEAR, LINEAR, color="#F0F0F0", zorder=0)
    axes.axhline(0, color="#808080", linewidth=0.8, zorder=1)
    for row in shown:
        color, x, y = colors[row["partner"] or row["method"]], row["variance"], row["squared_bias"]
        if row["partner"]:
            start = by_key[row["partner"], "none"]
            axes.annotate(
                "",
                (x, y),
                (start["variance"], start["squared_bias"]),
                arrowprops={
                    "arrowstyle": "->",
                    "color": color,
                    "linewidth": 0.9,
                    "alpha": 0.75,
                    "shrinkA": 3,
                    "shrinkB": 3,
                },
                zorder=2,
            )
        faint = {"color": color, "linewidth": 0.8, "alpha": 0.4, "zorder": 2}
        axes.plot([x, x], [row["squared_bias_low"], row["squared_bias_high"]], **faint)
        # A logarithmic axis has no place for what is not above 0.
        axes.plot([max(row["variance_low"], x / 10), row["variance_high"]], [y, y], **faint)
        told = row["squared_bias_low"] > 0
        shape = shapes[row["method"], row["rho"]]
        axes.plot(x, y, shape, color=color, markersize=5, mfc=color if told else "white", zorder=3)


def _statistics(experiment: Experiment, rows: pd.DataFrame) -> list[Statistic]:
    seeds = len(experiment.seeds)
    over = "one seed" if seeds == 1 else f"the mean over {seeds} seeds (each with problems of its own)"
    spread = (
        f"{over}; normal interval from the larger of the delete-one jackknife's variance (batches of the estimator and "
        "of the reference) and the variance between seeds"
    )
    units = STATISTICS | {f"{name}_change": STATISTICS[name] for name in CHANGES}
    return [
        Statistic(
            name=name,
            where={key: row[key] for key in ("policy", "engine", "method", "rho")},
            value=row[name],
            low=row[f"{name}_low"],
            high=row[f"{name}_high"],
            unit=unit,
            how=spread
            + (f"; paired with {row['partner']}, the same seeds of the sampler" if name.endswith("_change") else ""),
            sources=row["sources"],
        )
        for row in rows.to_dict("records")
        for name, unit in units.items()
        if math.isfinite(row[name])
    ]


def _format(experiment: Experiment, rows: pd.DataFrame) -> Formatted:
    several = rows["policy"].nunique() > 1
    measurements = [
        [
            row["label"],
            rho_text(None if row["rho"] == "none" else row["rho"]),
            row["engine"],
            *([_policy_text(experiment, row["policy"])] if several else []),
            *(_ranged(row, name) for name in STATISTICS),
            *(_ranged(row, f"{name}_change", "+") for name in CHANGES),
            f"{100 * row['kept_fraction']:.0f}",
            f"{row['empty_batches']} / {row['batches']}",
        ]
        for row in rows.to_dict("records")
    ]
    settings, count = experiment.bias, len(experiment.seeds)
    how = "the jackknife over batches and the spread between seeds, whichever is larger"
    if count > 1:
        how += f": of the mean over these {count} sets of problems, as so few do not tell how others would differ"
    notes = [
        f"Scale: {experiment.scale}",
        *experiment.report.declarations,
        *_reading(how),
        f"{settings.batches} batches of {settings.problems * experiment.training.group_size} responses to "
        f"{settings.problems} problems an estimator, {settings.reference_batches} for g; "
        + ("one seed." if count == 1 else f"mean over {count} seeds, each with problems of its own.")
        + f" {len(experiment.estimators)} estimators were compared at each policy and engine; none was left out.",
        "Changes: against the same correction without safe vocabulary, from the same seeds of the sampler (paired).",
    ]
    headings = ["estimator", "ρ", "engine", *(["policy"] if several else []), *_HEADINGS]
    headings += ["bias² change [95 %]", "variance change [95 %]", "kept (%)", "empty batches"]
    return Formatted(
        f"{experiment.name}: bias and variance of the policy gradient's estimators", headings, measurements, notes
    )


def _reading(how: str) -> list[str]:
    return [
        "g: the exact on-policy gradient, of the unpruned policy in fp32. bias² = |E ĝ − g|², estimated without bias "
        "of its own (products of different batches), so that one that is 0 comes out negative half of the time. "
        "cosine: between E ĝ and g. variance: E|ĝ − E ĝ|² of one batch. mse: their sum. All but the cosine are "
        "relative to |g|².",
        f"[95 %]: from {how}. A cosine, or its interval, is not defined where E ĝ is not told from 0.",
        "kept: responses with a token that was not rejected. empty: batches without any; their gradient counts as 0.",
    ]


def _policy_text(experiment: Experiment, policy: str) -> str:
    if policy == "base":
        return "base model"
    arm = next(one for one in experiment.bias.policies if one != "base" and one.path == policy)
    return f"after {'/'.join(filter(None, [arm.method, arm.engine, arm.rho]))}"


def _change(
    measurement: MeasuredCell, key: tuple[str, str], partner: tuple[str, str], name: str
) -> tuple[float, float]:
    """The difference of a statistic, and its standard error by the jackknife over what both share."""
    value = measurement.estimators.loc[key, name] - measurement.estimators.loc[partner, name]
    differences = measurement.jackknife[key][name] - measurement.jackknife[partner][name]
    variance = 0.0
    for _, without in differences.groupby("sample"):
        variance += (len(without) - 1) * without.var(ddof=0)
    return value, math.sqrt(variance)


def _over_seeds(name: str, values: Sequence[float], errors: Sequence[float]) -> dict[str, float]:
    within, count = float(np.mean(np.square(errors))), len(values)
    between = float(np.var(values, ddof=1)) if count > 1 else 0.0
    value = float(np.mean(values))
    half = NORMAL_95 * math.sqrt(max(within, between) / count) if math.isfinite(within) else math.nan
    return {name: value, f"{name}_low": value - half, f"{name}_high": value + half}


def _ranged(row: dict, name: str, sign: str = "") -> str:
    values = [row[name], row[f"{name}_low"], row[f"{name}_high"]]
    if not math.isfinite(values[0]):
        return EMPTY
    value, low, high = (_number(one, sign) for one in values)
    return f"{value} [{low}, {high}]" if math.isfinite(values[1]) else value


def _number(value: float, sign: str) -> str:
    """Two digits, or whole numbers; no exponent above 10."""
    return f"{value:{sign}.0f}" if abs(value) >= 10 else f"{value:{sign}.2g}"


def _read(path: Path, columns: list[str]) -> pd.DataFrame:
    try:
        table = pd.read_parquet(path, columns=columns)
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DvpError(f"{path}: no parquet file with {', '.join(columns)} ({str(error).splitlines()[0]})") from None
    return table.assign(rho=[("none" if pd.isna(rho) else rho) for rho in table["rho"]])
