"""Every method of the catalogue at work on a tiny model: real trainer, an engine with noise of a known size, no vLLM.

This is the smoke form of config/experiments/tests/smoke_methods.yaml.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from test_loop import TERMS, reference_of
from transformers import AutoTokenizer

from dvp.core.kept_sets import KeptSets
from dvp.errors import DvpError
from dvp.experiment.loading import load_experiment
from dvp.experiment.training import EngineConfig, Noise
from dvp.measurement.gradients import Estimator, Gradients, position_parts
from dvp.training.backend import Trainer
from dvp.training.loop import Loop
from dvp.training.responses import ResponseRecorder
from dvp.training.rollouts import prompt_rows
from noisy_engine import NoisyEngine
from rounding import rounding

ROOT = Path(__file__).parents[2]
EXPERIMENT = load_experiment("smoke_methods", ROOT / "config")
# Updates so small that the policy stays where it is: all methods share one trainer, and a policy that has learnt to be
# right always has no gradient.
SMALL = {"prompts_per_step": 2, "tokens_per_micro_batch": 128, "max_response_tokens": 6, "learning_rate": 1e-9}
SIGMA = 0.05
# Whatever a run asks for, its engine here is exact but for noise.
NOISY = dict.fromkeys(EXPERIMENT.engines, EngineConfig(dtype="float32", noise=Noise(sigma=SIGMA)))
CHANGED = {"training": EXPERIMENT.training.changed(**SMALL, deepspeed="zero1"), "engines": NOISY}
EXPERIMENT = EXPERIMENT.model_copy(update=CHANGED)


@pytest.fixture(scope="module")
def trainer(tiny_model):
    """One for all methods, as starting DeepSpeed takes longer than what is tested."""
    options = json.loads((ROOT / "config/deepspeed/zero1.json").read_text())
    return Trainer(tiny_model, EXPERIMENT.training, options)


@pytest.fixture
def make_loop(tiny_model, trainer):
    def make(run) -> Loop:
        model = reference_of(tiny_model)
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        engine = NoisyEngine(model, tokenizer, sigma=SIGMA, answers=True)
        recorder = ResponseRecorder(EXPERIMENT.training.keep_responses, EXPERIMENT.training.steps, tokenizer)
        engine.load_weights(trainer.weights())
        problems = pd.DataFrame({"id": range(6), "answer": ["7"] * 6})
        prompts = [[10 + row, 20 + row, 30 + row][: 2 + row % 2] for row in range(6)]
        return Loop(EXPERIMENT, run, problems, prompts, 1, trainer, engine, recorder)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("run", EXPERIMENT.runs, ids=lambda run: run.method)
def test_two_steps_of_every_method_and_its_estimator_is_the_gradient_it_trains_with(make_loop, trainer, run):
    loop = make_loop(run)
    rows = [loop.step(step) for step in (1, 2)]
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    assert any(row["updates"] for row in rows) or run.method.endswith(("geo_rs", "k3"))

    # The bias study makes its gradient from the coefficients; training from the loss. Before the first update on a
    # rollout they are the same, but for a loss with one ratio a sequence.
    drawn = prompt_rows(len(loop.problems.prompts), EXPERIMENT.training.prompts_per_step, 3, run.seed)
    rollout = loop.problems.graded(drawn, loop.sample(3, drawn))
    statistics = loop.score(rollout)
    estimator = Estimator(EXPERIMENT, run.method, run.rho)
    assert type(estimator.safe.trainer) is type(loop.safe.trainer)
    coefficient_BT = estimator.update(rollout, statistics).coefficients()
    assert torch.equal(coefficient_BT, loop.prepare(rollout, statistics).coefficients())
    gradients = Gradients(trainer.policy, temperature=1.0, tokens=64, seed=0)
    assert gradients.sketch.exact
    whole_1BT = position_parts(rollout.batch.response_BT, [])
    expected = gradients.of_batch(rollout.batch, coefficient_BT, loop.safe.trainer, whole_1BT).norm().item()
    metrics = loop._optimise(rollout, statistics, statistics["target_in_safe"], moved=False)
    if metrics is None:
        assert expected == 0
    elif EXPERIMENT.methods[run.method].loss.by_token:
        assert metrics["gradient_norm"] == pytest.approx(expected, rel=rounding(TERMS))


@pytest.mark.slow
def test_on_an_exact_engine_replayed_sets_are_the_trainers_own(make_loop, trainer):
    """The two differ in what an engine's error makes of the sets, and in nothing else."""
    by_method = {run.method: run for run in EXPERIMENT.runs}
    replay, own = (make_loop(by_method[method]) for method in ("dvp_replay", "dvp"))
    replay.engine._sigma = 0.0
    rollout = replay.problems.graded([0, 1], replay.sample(1, [0, 1]))
    replayed, independent = replay.score(rollout), own.score(rollout)
    mask_BT = rollout.batch.response_BT
    assert (replayed["set_overlap"][mask_BT] == 1).all()
    assert (independent["pruned_mass"][mask_BT] > 0).any()
    for name in ("pruned_log_prob", "pruned_entropy", "pruned_mass", "safe_size"):
        # A log-softmax is off by some ε of the logits, which are below 20, however small it is itself.
        torch.testing.assert_close(replayed[name], independent[name], rtol=rounding(1), atol=rounding(8, 20), msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dvp", "dvp_engine_only", "dvp_trainer_only"])
def test_reported_sets_of_a_pruned_run_give_its_unpruned_ratio_and_change_no_statistic(make_loop, method):
    loop = make_loop(next(run for run in EXPERIMENT.runs if run.method == method))
    rollout = loop.problems.graded([0, 1], loop.sample(1, [0, 1]))
    loop.config = loop.config.changed(report_sets=True)
    reporting = loop.problems.graded([0, 1], loop.sample(1, [0, 1]))
    assert torch.equal(reporting.infer_log_prob_BT, rollout.infer_log_prob_BT)
    statistics, plain = loop.score(reporting), loop.score(rollout)
    for name in set(plain) - {"set_overlap"}:
        assert torch.equal(statistics[name], plain[name]), name
    metrics, without = loop.learn(1, [0, 1], reporting), loop.learn(1, [0, 1], rollout)
    assert metrics["gradient_norm"] == pytest.approx(without["gradient_norm"], rel=rounding(TERMS))
    if method == "dvp_trainer_only":  # whose engine samples from everything
        assert metrics.keys() == without.keys()
        return
    mask_BT, sets = reporting.batch.response_BT, KeptSets.cat(reporting.batch.kept)
    log_q_N = reporting.infer_log_prob_BT[mask_BT] + sets.log_mass_N
    d_N = (statistics["log_prob"][mask_BT] - log_q_N).double()
    assert metrics["unpruned_k3"] == pytest.approx((d_N.exp() - 1 - d_N).mean().item(), rel=1e-5)
    assert 0 < metrics["unpruned_k3"] < 0.1  # σ = 0.05
    assert 0 < metrics["engine_pruned_mass_mean"] < 1
    assert 0 < metrics["set_overlap_mean"] <= 1


@pytest.mark.slow
def test_sets_that_do_not_fit_the_sampled_tokens_are_refused(make_loop):
    run = next(run for run in EXPERIMENT.runs if run.method == "dvp_replay")
    loop = make_loop(run)
    groups = loop.sample(1, [0, 1])
    first, *others = groups[0]
    inside = first.kept.states(torch.tensor([0])).ids_M.tolist()
    outside = next(token for token in range(400) if token not in inside)
    moved = replace(first, token_ids=[outside, *first.token_ids[1:]])
    with pytest.raises(DvpError, match="tokens are not in the sets that the engine says it sampled from"):
        loop.problems.graded([0, 1], [[moved, *others], groups[1]])
    short = replace(first, kept=first.kept.states(torch.arange(len(first.kept) - 1)))
    with pytest.raises(DvpError, match="the engine reported the sets of"):
        loop.problems.graded([0, 1], [[short, *others], groups[1]])
    rollout = loop.problems.graded([0, 1], [[replace(one, kept=None) for one in group] for group in groups])
    with pytest.raises(DvpError, match="did not report the sets that it sampled from, which this method replays"):
        loop.score(rollout)
