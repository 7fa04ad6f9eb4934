"""The main table (scores) and the mismatch table: at full precision, and formatted with notes."""

import math
import re
from pathlib import Path

import pandas as pd

from dvp.analysis import bootstrap
from dvp.analysis.claims import CLAIMS, Claim, claim, load_claims
from dvp.analysis.formats import EMPTY, Formatted, rho_text
from dvp.analysis.inputs import (
    BASE,
    Evaluation,
    arms,
    is_control,
    read_collapses,
    read_evaluations,
    read_metrics,
    reference_arm,
    unpruned_arm,
)
from dvp.experiment.config import Experiment
from dvp.experiment.grid import GridPoint

GAIN = "dvp_mis_gain"
LAST_STEPS = 10
_MARKS = {"control": " (control)", "reference": " (ref.)"}
# Per seed: how the last steps become one number.
STATISTICS = {
    "k1": "mean",
    "k3": "mean",
    "max_abs_log_ratio": "max",
    "ess": "mean",
    "outside_safe_fraction": "mean",
    "masked_fraction": "mean",
    "tokens_per_second": "mean",
}


def main_table(experiment: Experiment, results: Path, claims: Path = CLAIMS) -> pd.DataFrame:
    """Scores on report.task: the base model, then a row an arm in the order of the grid.

    Scores are fractions, changes are percent. Columns: arm (its path, or `base`), label, engine and rho (None
    for the base model, rho also without a safe vocabulary), role (`base`, `control`, `reference` or empty),
    seeds (list), k, score (avg@k, mean over seeds) with score_low and score_high, pass_at_k, maj_at_k,
    change_percent against the reference arm with change_low and change_high (paired), published_percent,
    over_unpruned (of an arm with a safe vocabulary: its score minus that of the same without, with _low and _high,
    paired), seed_scores (list), collapsed_at (list: the step at which a seed's run collapsed, None where it did not).
    Intervals are 95 % (dvp.analysis.bootstrap); NaN where a change is not defined.

    Raises DvpError for a missing, stale or malformed input.
    """
    evaluations = read_evaluations(experiment, results)
    published = published_gain(claims)
    k = experiment.evaluation.samples_per_problem[experiment.report.task]
    reference = reference_arm(experiment).path
    rows: dict[str, tuple[GridPoint | None, list[Evaluation]]] = {BASE: (None, [evaluations[BASE]])}
    for arm in arms(experiment):
        rows[arm.path] = (arm, [evaluations[arm.run(seed).path] for seed in experiment.seeds])
    drawn = bootstrap.replicates(
        {name: [evaluation.correct_PK for evaluation in found] for name, (_, found) in rows.items()},
        experiment.evaluation.bootstrap_resamples,
        experiment.evaluation.seed,
    )
    reference_score = _mean(rows[reference][1], f"avg@{k}")

    table = []
    for name, (arm, found) in rows.items():
        score = _mean(found, f"avg@{k}")
        low, high = bootstrap.interval(drawn[name])
        change, change_low, change_high = math.nan, math.nan, math.nan
        over, over_low, over_high = math.nan, math.nan, math.nan
        without = unpruned_arm(experiment, arm) if arm else None
        if without is not None:
            over = score - _mean(rows[without.path][1], f"avg@{k}")
            over_low, over_high = bootstrap.interval(drawn[name] - drawn[without.path])
        if reference_score > 0:
            change = 100.0 * (score / reference_score - 1.0)
            # A replicate without a correct answer leaves the interval of the relative change undefined.
            if (drawn[reference] > 0).all():
                change_low, change_high = bootstrap.interval(100.0 * (drawn[name] / drawn[reference] - 1.0))
        table.append(
            {
                "arm": name,
                "label": experiment.methods[arm.method].label if arm else "base model",
                "engine": arm.engine if arm else None,
                "rho": arm.rho if arm else None,
                "role": _role(experiment, arm),
                "seeds": list(experiment.seeds) if arm else [],
                "k": k,
                "score": score,
                "score_low": low,
                "score_high": high,
                "pass_at_k": _mean(found, f"pass@{k}"),
                "maj_at_k": _mean(found, f"maj@{k}"),
                "change_percent": change,
                "change_low": change_low,
                "change_high": change_high,
                "over_unpruned": over,
                "over_unpruned_low": over_low,
                "over_unpruned_high": over_high,
                "published_percent": published.value if arm and arm.method == published.method else math.nan,
                "seed_scores": [evaluation.metrics[f"avg@{k}"] for evaluation in found],
                "collapsed_at": read_collapses(experiment, results, arm) if arm else [],
            }
        )
    return _frame(table)


def mismatch_table(experiment: Experiment, results: Path) -> pd.DataFrame:
    """The mismatch between engine and trainer at the end of training, a row an arm.

    For each of STATISTICS the mean (max for max_abs_log_ratio) over a run's last 10 steps, as the mean over
    seeds and the smallest and largest seed (`_min`, `_max`). `policies` says between which policies k1, k3,
    the log-ratio and ESS are: pruned with a safe vocabulary, else full. outside_safe_fraction is NaN where
    there is no safe vocabulary. skipped_steps counts all steps of all seeds, out of `steps`. Raises DvpError.
    """
    metrics = read_metrics(experiment, results)
    table = []
    for arm in arms(experiment):
        own = metrics[metrics["arm"] == arm.path]
        per_seed = own[own["step"] > experiment.training.steps - LAST_STEPS].groupby("seed").agg(STATISTICS)
        pruned = experiment.methods[arm.method].safe_vocabulary
        if not pruned:
            per_seed["outside_safe_fraction"] = math.nan
        row = {
            "arm": arm.path,
            "label": experiment.methods[arm.method].label,
            "engine": arm.engine,
            "rho": arm.rho,
            "role": _role(experiment, arm),
            "policies": "pruned" if pruned else "full",
            "seeds": list(experiment.seeds),
        }
        for name in STATISTICS:
            row |= {
                name: per_seed[name].mean(),
                f"{name}_min": per_seed[name].min(),
                f"{name}_max": per_seed[name].max(),
            }
        row |= {"skipped_steps": int(own["skipped"].sum()), "steps": len(own)}
        table.append(row)
    return _frame(table)


def published_gain(claims: Path = CLAIMS) -> Claim:
    """The published change of DVP + MIS over naive RLOO. Raises DvpError."""
    return claim(load_claims(claims), GAIN, claims)


def to_csv(table: pd.DataFrame) -> str:
    """Full precision; an undefined value is empty, a list's items are parted by spaces."""
    lists = {
        name: table[name].map(lambda items: " ".join(map(repr, items)))
        for name in ("seeds", "seed_scores", "collapsed_at")
        if name in table
    }
    return table.assign(**lists).to_csv(index=False)


def format_main(experiment: Experiment, table: pd.DataFrame, published: Claim) -> Formatted:
    """The main table in percent, with what one must know to read it."""
    k = int(table["k"].iloc[0])
    headings = [
        *("method", "engine", "ρ", f"avg@{k} (%) [95 %]", f"pass@{k} (%)", f"maj@{k} (%)"),
        *("change (%) [95 %]", "DVP adds (points) [95 %]", "published (%)", "per seed (%)"),
    ]
    rows = [
        [
            row["label"] + _MARKS.get(row["role"], ""),
            row["engine"] or EMPTY,
            rho_text(row["rho"]),
            _percent(row["score"], row["score_low"], row["score_high"]),
            f"{100 * row['pass_at_k']:.1f}",
            f"{100 * row['maj_at_k']:.1f}",
            "reference" if row["role"] == "reference" else _change(row),
            _points(row["over_unpruned"], row["over_unpruned_low"], row["over_unpruned_high"]),
            EMPTY if math.isnan(row["published_percent"]) else f"{row['published_percent']:+.2f}",
            _per_seed(row) if row["seeds"] else EMPTY,
        ]
        for row in table.to_dict("records")
    ]
    return Formatted(
        f"{experiment.name}: scores on {experiment.report.task}",
        headings,
        rows,
        _main_notes(experiment, table, published),
    )


def format_mismatch(experiment: Experiment, table: pd.DataFrame) -> Formatted:
    """The mismatch table, with what one must know to read it."""
    headings = [
        *("method", "engine", "ρ", "policies", "k1", "k3", "max |log ratio|", "ESS"),
        *("outside V_S", "masked", "skipped steps", "tokens/s"),
    ]
    rows = [
        [
            row["label"] + (_MARKS["control"] if row["role"] == "control" else ""),
            row["engine"],
            rho_text(row["rho"]),
            row["policies"],
            _ranged(row, "k1", ".1e"),
            _ranged(row, "k3", ".1e"),
            _ranged(row, "max_abs_log_ratio", ".2g"),
            _ranged(row, "ess", ".3f"),
            _ranged(row, "outside_safe_fraction", ".1e"),
            _ranged(row, "masked_fraction", ".3f"),
            f"{row['skipped_steps']} / {row['steps']}",
            _ranged(row, "tokens_per_second", ".0f"),
        ]
        for row in table.to_dict("records")
    ]
    last = min(LAST_STEPS, experiment.training.steps)
    notes = [
        _scale(experiment),
        *experiment.report.declarations,
        "k1 = mean(log q − log p) and k3 = mean(r − log r − 1), r = p/q, estimate KL(q‖p) in nats per token "
        "between the policies that sampled (engine, q) and that were trained (p): the pruned ones for "
        "methods with ρ, the full ones for the others (column policies). These are different quantities.",
        f"Values: mean over the last {last} steps of a run (max |log ratio|: the largest), then over "
        f"the {seeds_text(experiment)}; [smallest, largest seed], which is not a confidence interval.",
        "ESS: effective sample size of the sequences' importance weights, as a fraction of the batch. "
        "outside V_S: sampled tokens outside the trainer's safe vocabulary; they are left out of k1, k3, |log ratio| "
        "and ESS. masked: tokens of weight 0, rejected by the importance correction or outside V_S. skipped steps: "
        "all weights 0, or no group with unequal rewards; of all steps of all seeds.",
    ]
    if (table["role"] == "control").any():
        notes.append(_control_note(experiment))
    return Formatted(
        f"{experiment.name}: mismatch between engine and trainer at the end of training",
        headings,
        rows,
        notes,
    )


def _role(experiment: Experiment, arm: GridPoint | None) -> str:
    if arm is None:
        return BASE
    if arm == reference_arm(experiment):
        return "reference"
    return "control" if is_control(experiment, arm) else ""


def _main_notes(experiment: Experiment, table: pd.DataFrame, published: Claim) -> list[str]:
    evaluation, task = experiment.evaluation, experiment.report.task
    k = int(table["k"].iloc[0])
    reference = table[table["role"] == "reference"].iloc[0]
    if bootstrap.resamples_seeds(experiment.seeds):
        drawn = f"problems, samples and the {seeds_text(experiment)}"
    else:
        drawn = (
            f"problems and samples but not over the {seeds_text(experiment)}, so it does not cover what another "
            "training run would change (see the scores per seed)"
        )
    notes = [
        _scale(experiment),
        *experiment.report.declarations,
        f"Every model at the end of its training ({experiment.training.steps} steps), sampled {k} times "
        f"a problem of {task} at temperature {evaluation.temperature:g}, top-p {evaluation.top_p:g} "
        f"with engine {evaluation.engine}; mean over the {seeds_text(experiment)}. "
        "Column engine: the one used in training.",
        f"[95 %]: hierarchical bootstrap, {evaluation.bootstrap_resamples} resamples, over {drawn}.",
        f"Change: relative to {reference['label']} on engine {reference['engine']} (ref.); its interval is "
        "paired, with the same resampled problems in all rows.",
    ]
    if table["over_unpruned"].notna().any():
        notes.append(
            "DVP adds: the score minus that of the method that differs in having no safe vocabulary, "
            "trained on the same engine; paired."
        )
    if any(step is not None for steps in table["collapsed_at"] for step in steps):
        notes.append(
            "Collapsed at step N: from there on the run was marked as collapsed (training.collapse; train.json has the "
            "reason). It went on to its last step, and its score counts like any other."
        )
    if (table["role"] == "control").any():
        notes.append(_control_note(experiment))
    if table["published_percent"].notna().any():
        notes.append(
            f"Published: {published.text}, {published.value:+g} {published.unit} ({published.source}); "
            f"{published.note}. It is set beside the change of the same method at our scale; the two are not "
            "the same experiment."
        )
    return notes


def _scale(experiment: Experiment) -> str:
    return f"Scale: {experiment.scale}"


def _control_note(experiment: Experiment) -> str:
    engine = experiment.evaluation.engine
    return f"(control): trained on the evaluation's engine ({engine}), without the mismatch."


def seeds_text(experiment: Experiment) -> str:
    """How many seeds, in words."""
    count = len(experiment.seeds)
    return "one training seed" if count == 1 else f"{count} training seeds"


def _mean(found: list[Evaluation], metric: str) -> float:
    return math.fsum(evaluation.metrics[metric] for evaluation in found) / len(found)


def _percent(value: float, low: float, high: float) -> str:
    return f"{100 * value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _points(value: float, low: float, high: float) -> str:
    return EMPTY if math.isnan(value) else f"{100 * value:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def _per_seed(row: dict) -> str:
    return " ".join(
        f"{100 * score:.1f}" + ("" if step is None else f" (collapsed at step {step})")
        for score, step in zip(row["seed_scores"], row["collapsed_at"], strict=True)
    )


def _change(row: dict) -> str:
    if math.isnan(row["change_percent"]):
        return EMPTY
    if math.isnan(row["change_low"]):
        return f"{row['change_percent']:+.1f}"
    return f"{row['change_percent']:+.1f} [{row['change_low']:+.1f}, {row['change_high']:+.1f}]"


def _ranged(row: dict, name: str, spec: str) -> str:
    value, low, high = row[name], row[f"{name}_min"], row[f"{name}_max"]
    if math.isnan(value):
        return EMPTY
    text = f"{value:{spec}}" if len(row["seeds"]) == 1 else f"{value:{spec}} [{low:{spec}}, {high:{spec}}]"
    return re.sub(r"e([-+])0(?=\d)", r"e\1", text)


def _frame(rows: list[dict]) -> pd.DataFrame:
    # Object columns keep None and lists as they are.
    exact = {"engine", "rho", "seeds", "seed_scores", "collapsed_at"}
    return pd.DataFrame(
        {name: pd.Series([row[name] for row in rows], dtype=object if name in exact else None) for name in rows[0]}
    )
