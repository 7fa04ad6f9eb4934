"""What runs, parameters and metrics are called in the tracking store: short names, metrics in groups."""

import re

import numpy as np

from dvp.experiment.config import Experiment
from dvp.experiment.grid import Run, setting_as_written, settings_as_read
from dvp.progress import rho_as_read

LAST_STEPS = 10  # final/…: means over the last steps of a run, as in the tables
# In MLflow's pages a metric's group is what stands before the slash; the first pattern that fits a name decides.
GROUPS = (
    ("time", r"seconds(?:_\w+)?|tokens_per_second"),
    ("mismatch", r"(?:unpruned_)?(?:k3|ess)|k1|chi2|max_abs_log_ratio|ratio_.+|tail_mismatch"),
    ("self_noise", r"self_noise_(.+)"),
    ("drift", r"drift_(.+)"),
    ("safe", r"rho|safe_size|(?:outside|left)_safe_fraction|(?:engine_)?pruned_.+|set_overlap_mean|sets_bytes"),
    ("correction", r"(?:kept|vetoed|filtered|masked)_fraction"),
    ("otb", r"otb_(.+)"),
    ("train", r".+"),
)
FINAL = ("reward", "k3", "ess", "entropy", "gradient_norm", "kept_fraction")
SCORES = "eval/"  # of an evaluation; shown with the run that trained the model, too


def metric_name(key: str) -> str:
    """A key of metrics.jsonl as a metric: `k3` is `mismatch/k3`, `otb_power` is `otb/power`."""
    for group, pattern in GROUPS:
        if match := re.fullmatch(pattern, key):
            return f"{group}/{match[match.lastindex or 0]}"
    raise AssertionError(f"{key!r} is no metric")


def result_name(stage: str, task: str, key: str) -> str:
    """A stage's own number as a metric: `avg@8` of an evaluation on aime25 is `eval/aime25/avg_at_8`."""
    group = "eval" if stage == "evaluate" else stage
    return "/".join(filter(None, [group, task.replace("~", "_"), key.replace("@", "_at_")]))


def final_metrics(rows: list[dict]) -> dict[str, float]:
    """final/…: means over a run's last steps, and whether it collapsed (1 or 0)."""
    final = {}
    for key in FINAL:
        values = [row[key] for row in rows[-LAST_STEPS:] if row.get(key) is not None]
        if values:
            final[f"final/{key}"] = float(f"{np.mean(values):.4g}")  # a table's cell would cut off an exponent
    return final | {"final/collapsed": float(any(row.get("collapsed", False) for row in rows))}


def policy_title(experiment: Experiment, run: Run | None) -> str:
    """A policy in a few words: DVP + MIS · coarse · ρ e⁻¹³ · seed 0. Without a run it is the base model."""
    if run is None:
        return "base model"
    rho = "" if run.rho is None else f"ρ {rho_as_read(run.rho)}"
    settings = settings_as_read(experiment.settings_of(run))
    step = "" if run.step is None else f"step {run.step}"
    return " · ".join(
        filter(None, [experiment.methods[run.method].label, run.engine, rho, *settings, f"seed {run.seed}", step])
    )


def policy_params(experiment: Experiment, run: Run | None) -> dict[str, str | int | None]:
    """What runs are sorted, filtered and charted by. ρ is a decimal fraction, as the store sorts parameters as text.

    With the training settings in which the grid's points differ, by their names.
    """
    if run is None:
        return {"method": "base", "label": "base model"}
    rho = run.rho_value and np.format_float_positional(run.rho_value, 4, fractional=False, trim="-")
    label = experiment.methods[run.method].label
    names = {"method": run.method, "label": label, "engine": run.engine, "rho": rho, "rho_text": run.rho or "none"}
    settings = {key: setting_as_written(value) for key, value in experiment.settings_of(run).items()}
    step = {} if run.step is None else {"step": run.step}
    return names | {"seed": run.seed} | settings | step


def stage_name(stage: str, task: str, title: str) -> str:
    """A stage's run: what it makes if that is a policy, else what it does to which policy."""
    done = " ".join(filter(None, [stage.replace("_", " "), task.replace("~", " ")]))
    return title if title and stage in ("base", "train") else " · ".join(filter(None, [done, title]))
