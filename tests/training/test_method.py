"""Settings of a method become the rules of the core; what does not fit together is refused before anything runs."""

import math
from typing import get_args

import pytest

from dvp.core.advantages import ADVANTAGES
from dvp.core.importance import PRESETS, ImportanceRule
from dvp.core.objective import LOSSES, LossRule
from dvp.core.safe_vocabulary import EntropyScaled, FixedRho, MassBudget
from dvp.errors import DvpError
from dvp.experiment import methods
from dvp.experiment.loading import load_experiment
from dvp.experiment.methods import Importance, Loss, Method
from dvp.training.method import SafeVocabularies, check_methods, importance_rule, loss_rule


def test_every_name_of_the_core_can_be_chosen_and_no_other():
    """The names stand twice, because reading an experiment must not import torch."""
    assert set(get_args(methods.ImportancePreset)) == set(PRESETS)
    assert set(get_args(methods.LossKind)) == set(LOSSES)
    assert set(get_args(methods.Advantage)) == set(ADVANTAGES)


def test_a_preset_and_what_changes_it():
    assert importance_rule(Importance()) == ImportanceRule()
    assert importance_rule(Importance(preset="mis")) == PRESETS["mis"]
    changed = importance_rule(Importance(preset="mis", veto=1e-4, denominator="kept"))
    assert changed == ImportanceRule("sequence", "mask", 0.5, 2.0, veto=1e-4, denominator="kept")
    assert importance_rule(Importance(level="token", upper=3.0)) == ImportanceRule("token", upper=3.0)
    assert loss_rule(Loss(kind="clip_higher")) == LOSSES["clip_higher"]
    assert loss_rule(Loss(kind="ppo", clip_high=0.5)) == LossRule("ppo", 0.2, 0.5)


def sides(rule, rho=0.01):
    return SafeVocabularies(Method(label="x", advantage="rloo", safe_vocabulary=rule), rho, max_response_tokens=50)


def test_the_rules_of_both_sides():
    assert (sides(None).trainer, sides(None).engine, sides(None).rho) == (None, None, None)
    assert sides("fixed").trainer == sides("fixed").engine == FixedRho(0.01)
    margin = sides({"rule": "margin", "epsilon": 0.5})
    assert (margin.engine, margin.rho) == (FixedRho(0.01), 0.01)
    assert margin.trainer.rho == pytest.approx(0.01 * math.exp(-1))
    other = sides({"rule": "margin", "epsilon": 0.5, "side": "engine"})
    assert (other.trainer, other.engine) == (margin.engine, margin.trainer)
    mass = sides({"rule": "mass_budget", "delta": 0.1}, None)
    assert mass.trainer == mass.engine == MassBudget(0.1 / 50)
    entropy = {"alpha": 1.0, "target_entropy": 2.0, "lowest": 1e-6, "highest": 0.1}
    assert sides({"rule": "entropy"} | entropy).engine == EntropyScaled(0.01, **entropy)


def test_feedback_moves_both_sides_and_replays():
    settings = {"signal": "k3", "low": 0.1, "high": 1.0, "factor": 2.0, "lowest": 1e-4, "highest": 0.1, "patience": 2}
    safe, again = sides({"rule": "feedback"} | settings), sides({"rule": "feedback"} | settings)
    seen = []
    for k3 in (5.0, 5.0, 0.5, 5.0, 5.0, 0.0, 0.0):
        safe.observe({"k3": k3})
        again.observe({"k3": k3})
        assert safe.engine == safe.trainer == again.engine
        seen.append(safe.rho)
    assert seen == [0.01, 0.02, 0.02, 0.02, 0.04, 0.04, 0.02]


def test_settings_that_could_have_no_effect_are_refused_with_the_methods_name(root, monkeypatch):
    monkeypatch.chdir(root)
    experiment = load_experiment("smoke")
    check_methods(experiment)
    odd = Method(label="x", advantage="rloo", importance={"level": "none", "upper": 2.0})
    broken = experiment.model_copy(update={"methods": experiment.methods | {"rloo": odd}})
    with pytest.raises(DvpError, match=r"^methods.rloo: importance"):
        check_methods(broken)


def test_an_estimator_is_checked_as_the_runs_are(root, monkeypatch):
    monkeypatch.chdir(root)
    experiment = load_experiment("estimator_bias")
    check_methods(experiment)
    odd = experiment.methods["dvp_mis"].model_copy(update={"importance": Importance(level="none", upper=2.0)})
    with pytest.raises(DvpError, match=r"^methods.dvp_mis: importance"):
        check_methods(experiment.model_copy(update={"methods": experiment.methods | {"dvp_mis": odd}}))
