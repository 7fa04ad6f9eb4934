"""What MLflow's page of an experiment shows at first: a table of the policies, and their curves.

MLflow has no call for a saved view. What its "Share" button saves is a tag of the experiment, in JSON, which a page's
address names; these are such tags, written for the locked version.
"""

import json

from dvp.experiment.config import Experiment
from dvp.tracking.names import SCORES
from dvp.tracking.record import POLICY_TAG

# Without the last part of the address, MLflow shows what it has for the traces of applications instead.
PAGE = "#/experiments/{experiment}/runs?viewStateShareKey={view}&compareRunsMode={mode}&workflowType=machine_learning"
FINALS = ("reward", "k3", "gradient_norm", "kept_fraction", "collapsed")
CURVES = (
    ("Score", "{kind}", "{score}", "linear"),
    ("Reward", "LINE", "train/reward", "linear"),
    ("Mismatch: k3 between engine and trainer", "LINE", "mismatch/k3", "log"),
    ("Gradient norm", "LINE", "train/gradient_norm", "log"),
    ("Responses kept by the correction", "LINE", "correction/kept_fraction", "linear"),
    ("Entropy", "LINE", "train/entropy", "linear"),
)


def links(experiment: str) -> str:
    """Markdown links to the views. experiment : MLflow's id."""
    pages = (("Table of the policies", "table", "TABLE"), ("Curves", "curves", "CHART"))
    return " · ".join(
        f"[{name}]({PAGE.format(experiment=experiment, view=view, mode=mode)})" for name, view, mode in pages
    )


def view_tags(experiment: Experiment) -> dict[str, str]:
    """The experiment's tags that hold its views."""
    task = experiment.report.task
    score = f"{SCORES}{task}/avg_at_{experiment.evaluation.samples_per_problem[task]}"
    widths = {"attributes.`Run Name`": 270, "runDateAndNestInfo": 140, "duration": 75}
    settings = ((name, 100) for name in experiment.axes)
    shown = (("method", 80), ("engine", 70), ("rho", 105), *settings, ("seed", 50))
    params = {f"params.`{name}`": width for name, width in shown}
    metrics = {f"metrics.`{name}`": 100 for name in (score, *(f"final/{name}" for name in FINALS))}
    columns = widths | params | metrics
    view = {
        "searchFilter": f"tags.{POLICY_TAG} != ''",
        "orderByKey": f"metrics.`{score}`",
        "orderByAsc": False,
        "selectedColumns": [*params, *metrics],
        "columnOrder": list(columns),
        "columnWidths": columns,
        "runsHiddenMode": "SHOW_ALL",
    }
    of_scores = "BAR" if experiment.evaluation.at is None else "LINE"
    curves = {
        "compareRunCharts": [
            _chart(name, kind.format(kind=of_scores), metric.format(score=score), scale)
            for name, kind, metric, scale in CURVES
        ],
        "compareRunSections": [{"uuid": "main", "name": "At a glance", "display": True, "isReordered": False}],
        "isAccordionReordered": True,
    }
    views = {"table": view, "curves": view | curves}
    return {f"mlflow.sharedViewState.{name}": json.dumps(value) for name, value in views.items()}


def _chart(name: str, kind: str, metric: str, scale: str) -> dict:
    return {
        "uuid": name,
        "metricSectionId": "main",
        "displayName": name,
        "type": kind,
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "runsCountToCompare": 100,
        "scaleType": scale,
        "xAxisScaleType": "linear",
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "lineSmoothness": 0,
        "range": {},
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
        "deleted": False,
        "isGenerated": False,
    }
