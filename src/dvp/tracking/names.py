"""Names of runs, parameters and metrics in the tracking store: short, with metrics in groups."""

import re

import numpy as np

from dvp.experiment.config import Experiment
from dvp.experiment.grid import Run, setting_as_written, settings_as_read
from dvp.progress import rho_as_read

LAST_STEPS = 10  # final/… metrics are means over so many last steps of a run, as in the tables
# MLflow's pages group metrics by the part before the slash; the first pattern that matches a key decides.
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
SCORES = "eval/"  # prefix of an evaluation's scores, which the run that trained the model shows, too


def metric_name(key: str) -> str:
    """Return the metric's name for a key of metrics.jsonl: `mismatch/k3` for `k3`, `otb/power` for `otb_power`."""
    for group, pattern in GROUPS:
        if match := re.fullmatch(pattern, key):
            return f"{group}/{match[match.lastindex or 0]}"
    raise AssertionError(f"{key!r} is no metric")


def result_name(stage: str, task: str, key: str) -> str:
    """Return the metric's name for a stage's result: `eval/aime25/avg_at_8` for `avg@8` of an evaluation on aime25."""
    group = "eval" if stage == "evaluate" else stage
    return "/".join(filter(None, [group, task.replace("~", "_"), key.replace("@", "_at_")]))


def final_metrics(rows: list[dict]) -> dict[str, float]:
    """Compute the metrics final/…: means over a run's last steps, and whether it collapsed (1 or 0)."""
    final = {}
    for key in FINAL:
        values = [row[key] for row in rows[-LAST_STEPS:] if row.get(key) is not None]
        if values:
            final[f"final/{key}"] = float(
                f"{np.mean(values):.4g}"
            )  # rounded, as MLflow's table cells would cut off an exponent
    return final | {"final/collapsed": float(any(row.get("collapsed", False) for row in rows))}


def policy_title(experiment: Experiment, run: Run | None) -> str:
    """Describe a run's policy in a few words, as in DVP + MIS · coarse · ρ e⁻¹³ · seed 0; None: the base model."""
    if run is None:
        return "base model"
    rho = "" if run.rho is None else f"ρ {rho_as_read(run.rho)}"
    settings = settings_as_read(experiment.settings_of(run))
    step = "" if run.step is None else f"step {run.step}"
    return " · ".join(
        filter(None, [experiment.methods[run.method].label, run.engine, rho, *settings, f"seed {run.seed}", step])
    )


def policy_params(experiment: Experiment, run: Run | None) -> dict[str, str | int | None]:
    """Return the parameters by which a policy's runs are sorted, filtered and charted; None: the base model's.

    They include the training settings in which the grid's points differ. ρ is written as a decimal fraction, because
    the store sorts parameters as text.
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
    """Return the name of a stage's MLflow run: the policy's title if it makes one, else stage, task and policy."""
    done = " ".join(filter(None, [stage.replace("_", " "), task.replace("~", " ")]))
    return title if title and stage in ("base", "train") else " · ".join(filter(None, [done, title]))
