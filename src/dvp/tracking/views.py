"""Default views of an experiment's page in MLflow (views.yaml), stored as tags of the experiment."""

import json
from pathlib import Path

import yaml

from dvp.experiment.config import Experiment
from dvp.tracking.names import SCORES

# Without workflowType, MLflow shows its page for traces of applications instead.
PAGE = "#/experiments/{experiment}/runs?viewStateShareKey={view}&compareRunsMode={mode}&workflowType=machine_learning"


def links(experiment: str) -> str:
    """Write Markdown links to an experiment's views. experiment : MLflow's id."""
    pages = (("Table of the policies", "table", "TABLE"), ("Curves", "curves", "CHART"))
    return " · ".join(
        f"[{name}]({PAGE.format(experiment=experiment, view=view, mode=mode)})" for name, view, mode in pages
    )


def view_tags(experiment: Experiment) -> dict[str, str]:
    """Build the tags that hold an experiment's views: the table of the policies and the curves."""
    of = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    task = experiment.report.task
    score = f"{SCORES}{task}/avg_at_{experiment.evaluation.samples_per_problem[task]}"
    params = {}
    for name, width in of["params"].items():
        for each in experiment.axes if name == "settings" else (name,):
            params[f"params.`{each}`"] = width
    metrics = {f"metrics.`{name}`": of["metric_width"] for name in (score, *of["metrics"])}
    columns = of["widths"] | params | metrics
    shown = {"selectedColumns": [*params, *metrics], "columnOrder": list(columns), "columnWidths": columns}
    table = of["table"] | shown | {"orderByKey": f"metrics.`{score}`"}
    of["charts"][0] |= {"metricKey": score, "type": "BAR" if experiment.evaluation.at is None else "LINE"}
    charts = [
        of["chart"] | chart | {"displayName": chart["uuid"], "selectedMetricKeys": [chart["metricKey"]]}
        for chart in of["charts"]
    ]
    views = {"table": table, "curves": table | of["curves"] | {"compareRunCharts": charts}}
    return {f"mlflow.sharedViewState.{name}": json.dumps(value) for name, value in views.items()}
