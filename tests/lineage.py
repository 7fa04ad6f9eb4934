"""Lineage of an MLflow run: all runs that its input came from, directly or not."""

from pathlib import Path

from mlflow.tracking import MlflowClient

from dvp.tracking.store import store_uri


def lineage(results: Path, key: str) -> dict[str, list[str]]:
    """Return the MLflow run ids, by stage, of all runs that the run with this key came from, itself included."""
    client = MlflowClient(tracking_uri=store_uri(results))
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs: dict[str, list[str]] = {}
    waiting, seen = [key], set()
    while waiting:
        key = waiting.pop()
        if key not in seen:
            seen.add(key)
            [run] = client.search_runs(experiments, f"tags.tracking_key = '{key}'")
            runs.setdefault(run.data.tags["stage"], []).append(run.info.run_id)
            waiting += " ".join(run.data.tags[name] for name in run.data.tags if name[:9] == "upstream.").split()
    return runs
