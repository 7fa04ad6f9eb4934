"""Methods: what their settings become, what is refused, and the recipes for a new advantage and a new rule for ρ."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from changed import ROOT, experiment

from dvp.core.advantages import ADVANTAGES
from dvp.core.importance import PRESETS, ImportanceRule
from dvp.core.objective import LOSSES, Ppo
from dvp.core.safe_vocabulary import Rule
from dvp.experiment.loading import load_experiment
from dvp.experiment.methods import Method
from recipes import follow


def method(**settings) -> Method:
    return Method(**{"label": "x", "advantage": "rloo"} | settings)


def test_a_preset_and_what_changes_it():
    assert method().importance == ImportanceRule()
    for name, preset in PRESETS.items():
        assert method(importance=name).importance == preset
    changed = method(importance={"preset": "mis", "veto": 1e-4, "denominator": "kept"}).importance
    assert changed == PRESETS["mis"].changed(veto=1e-4, denominator="kept")
    assert method(importance={"level": "token", "upper": 3.0}).importance == ImportanceRule(level="token", upper=3.0)
    for name, loss in LOSSES.items():
        assert method(loss=name).loss == loss
    assert method(loss={"kind": "ppo", "clip_high": 0.5}).loss == Ppo(clip_high=0.5)


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("importance", [*PRESETS, {"level": "sequence", "upper": math.inf}])
def test_a_method_reads_back_as_it_was_written(advantage, importance):
    written = method(advantage=advantage, importance=importance, loss="clip_higher", safe_vocabulary="fixed")
    plain = json.loads(json.dumps(written.model_dump(mode="json"), allow_nan=False))
    assert Method.model_validate(plain) == written


def test_without_a_safe_vocabulary_neither_side_is_restricted():
    made = method().sides(None, max_response_tokens=50)
    assert (made.trainer, made.engine, made.rho) == (None, None, None)


def test_all_of_the_core_is_in_the_catalogue_and_smoke_tested():
    experiment = load_experiment("smoke_methods", ROOT / "config")
    methods = [used for name, used in experiment.methods.items() if name != "otb_mass"]  # smoke's own
    assert {used.advantage for used in methods} == set(ADVANTAGES)
    assert all(loss in [used.loss for used in methods] for loss in LOSSES.values())
    corrections = [used.importance.changed(veto=None) for used in methods]
    assert all(preset.changed(veto=None) in corrections for preset in PRESETS.values())
    rules = {used.safe_vocabulary.rule for used in methods if used.safe_vocabulary}
    asked = [get_args(kind.model_fields["rule"].annotation) for kind in get_args(get_args(Rule)[0])]
    assert rules == {name for names in asked for name in names}
    trained = {name for name, used in experiment.methods.items() if not used.true_norms}
    assert {run.method for run in experiment.runs} == trained - {"otb_mass"}


def test_bins_of_positions_are_named_by_their_ends():
    made = experiment(name="smoke_evidence", bias__norm_responses=4, bias__position_bins=[1, 8])
    assert made.positions == ["1-1", "2-8", f"9-{made.training.max_response_tokens}"]
    assert load_experiment("estimator_bias", ROOT / "config").positions == []


# --- the recipes ---

EXPERIMENT = """
name: own
extends: smoke
methods:
  own:
    label: own
    advantage: half
    safe_vocabulary: confident
    importance: {kind: smooth}
    mask: {kind: tail, probability: 1e-9}
  own_loss: {label: own loss, advantage: half, safe_vocabulary: confident, loss: squared}
engines:
  plain: {kind: plain, dtype: float32}
grid:
  - {method: rloo, engine: fp32}
  - {method: own, engine: plain, rho: 0.1}
  - {method: own_loss, engine: plain, rho: 0.1}
bias:
  policies: [base]
  engines: [coarse]
  problems: 4
  batches: 6
  reference_batches: 24
  estimators:
    - {method: rloo}
    - {method: own, rho: 0.1}
"""


@pytest.mark.slow
def test_the_recipes_with_code_are_followed(tmp_path, tiny_model):
    """docs/extend.md, followed to the letter in a copy of the package: read without torch, trained for two steps."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "config", tmp_path / "config")
    follow(tmp_path / "src" / "dvp")
    (tmp_path / "config" / "experiments" / "own.yaml").write_text(EXPERIMENT)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for command in (["format"], ["check"]):  # of `make format`, then of `make check`
        ruff = [sys.executable, "-m", "ruff", *command, tmp_path / "src"]
        done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
    program = Path(__file__).with_name("recipe_process.py")
    done = subprocess.run(
        [sys.executable, program, tiny_model],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2 steps"
