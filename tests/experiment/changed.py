"""Experiments made of one of the repository's by changes at dotted keys."""

import copy
from pathlib import Path
from typing import Any

import pytest

from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.loading import experiment_files, load_experiment, parse_experiment

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "config"
EXPERIMENTS = sorted(experiment_files(CONFIG))
GONE = object()
RLOO = {"method": "rloo", "engine": "fp32"}
REVISION = "0123456789abcdef0123456789abcdef01234567"
HUB = {"kind": "hub", "path": "a/b", "split": "test", "columns": {"problem": "problem", "answer": "answer"}}
PLAIN = {"label": "x", "advantage": "rloo"}
TOOLS = {"kind": "calculator", "max_answer_tokens": 20}
MISMATCH = {"policies": ["base"], "engines": "coarse", "problems": 2, "responses": 2, "rhos": [1e-2], "margins": [0.1]}
ESTIMATORS = [{"method": "rloo"}, {"method": ["dvp"], "rho": 1e-2}]
BIAS = {"policies": ["base"], "engines": ["coarse"], "problems": 2, "batches": 4, "reference_batches": 4}
BIAS |= {"estimators": ESTIMATORS}


def put(value: dict, changes: dict[str, Any]) -> dict:
    """A copy with the values at dotted keys replaced, added or, for GONE, taken out."""
    value = copy.deepcopy(value)
    for key, new in changes.items():
        *above, last = key.split(".")
        inner = value
        for part in above:
            inner = inner[int(part)] if isinstance(inner, list) else inner.setdefault(part, {})
        last = int(last) if isinstance(inner, list) else last
        if new is GONE:
            del inner[last]
        else:
            inner[last] = new
    return value


def experiment(*grid: dict, name: str = "smoke", **changes: Any) -> Experiment:
    """An experiment with these entries of the grid, if any, and changes by key (`training__steps=12`)."""
    changes = {key.replace("__", "."): change for key, change in changes.items()}
    value = put(load_experiment(name, CONFIG).model_dump(mode="json"), changes)
    return parse_experiment(value | ({"grid": list(grid)} if grid else {}), Path("test.yaml"))


def refused(*grid: dict, **changes: Any) -> str:
    """The line with which such an experiment is refused, after the file's name."""
    with pytest.raises(DvpError) as error:
        experiment(*grid, **changes)
    line = str(error.value)
    assert line.splitlines() == [line]
    return line.removeprefix("test.yaml: ")
