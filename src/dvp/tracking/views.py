"""Default views of an experiment's page in MLflow, stored as tags of the experiment.

MLflow has no call for a saved view: its "Share" button saves this JSON as a tag, which a page's address names. What a
view leaves out is as MLflow has it.
"""

import json

from dvp.experiment.config import Experiment
from dvp.tracking.names import SCORES

# Without workflowType, MLflow shows its page for traces of applications instead.
PAGE = "#/experiments/{experiment}/runs?viewStateShareKey={view}&compareRunsMode={mode}&workflowType=machine_learning"
METRICS = [f"final/{name}" for name in ("reward", "k3", "gradient_norm", "kept_fraction", "collapsed")]
CHARTS = {
    "Reward": ("train/reward", "linear"),
    "Mismatch: k3 between engine and trainer": ("mismatch/k3", "log"),
    "Gradient norm": ("train/gradient_norm", "log"),
    "Responses kept by the correction": ("correction/kept_fraction", "linear"),
    "Entropy": ("train/entropy", "linear"),
}
"""Metric and scale of the charts that follow that of the score."""
SECTION = {"uuid": "main", "name": "At a glance", "display": True, "isReordered": False}
LINES = {
    "runsCountToCompare": 100,
    "xAxisScaleType": "linear",
    "xAxisKey": "step",
    "selectedXAxisMetricKey": "",
    "yAxisKey": "metric",
    "yAxisExpressions": [],
    "lineSmoothness": 0,
    "range": {},
    "useGlobalXaxisKey": True,
    "useGlobalLineSmoothing": True,
}


def links(experiment: str) -> str:
    """Write Markdown links to an experiment's views. experiment : MLflow's id."""
    pages = (("Table of the policies", "table", "TABLE"), ("Curves", "curves", "CHART"))
    return " · ".join(
        f"[{name}]({PAGE.format(experiment=experiment, view=view, mode=mode)})" for name, view, mode in pages
    )


def view_tags(experiment: Experiment) -> dict[str, str]:
    """Build the tags that hold an experiment's views: the table of the policies and the curves."""
    task = experiment.report.task
    score = f"{SCORES}{task}/avg_at_{experiment.evaluation.samples_per_problem[task]}"
    params = ("method", "engine", "rho", *experiment.axes, "seed")
    columns = [f"params.`{name}`" for name in params] + [f"metrics.`{name}`" for name in (score, *METRICS)]
    table = {
        "searchFilter": "tags.policy != ''",
        "orderByKey": f"metrics.`{score}`",
        "orderByAsc": False,
        "runsHiddenMode": "SHOW_ALL",
        "selectedColumns": columns,
    }
    kind = "BAR" if experiment.evaluation.at is None else "LINE"
    charts = [_chart("Score", score, "linear", kind), *(_chart(name, *of, "LINE") for name, of in CHARTS.items())]
    curves = table | {"compareRunSections": [SECTION], "isAccordionReordered": True, "compareRunCharts": charts}
    views = {"table": table, "curves": curves}
    return {f"mlflow.sharedViewState.{name}": json.dumps(view) for name, view in views.items()}


def _chart(name: str, metric: str, scale: str, kind: str) -> dict:
    """Describe a chart of one metric."""
    named = {"uuid": name, "displayName": name, "metricSectionId": SECTION["uuid"], "deleted": False}
    shown = {"type": kind, "metricKey": metric, "selectedMetricKeys": [metric], "scaleType": scale}
    return LINES | named | shown | {"isGenerated": False}
