"""An experiment's folder with an empty SQLite store beside it."""

import shutil
from pathlib import Path

import pytest
from made_up_stages import EXPERIMENT, make_folder

from dvp.tracking.store import create_store


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory) -> Path:
    """An SQLite file with MLflow's tables, to be copied: to create them takes seconds."""
    results = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        create_store(results, "another_experiment")
    return results / "mlflow.db"


@pytest.fixture
def folder(tmp_path, monkeypatch, empty_store) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = make_folder(tmp_path / "results")
    shutil.copy(empty_store, folder.parent)
    create_store(folder.parent, EXPERIMENT)
    return folder
