"""Every method of the catalogue at work on a tiny model: real trainer, an engine with noise of a known size, no vLLM.

This is the smoke form of config/experiments/smoke_methods.yaml.
"""

import json
import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dvp.experiment.loading import load_experiment
from dvp.measurement.gradients import Estimator, Gradients, position_parts
from dvp.training.backend import Trainer
from dvp.training.loop import Loop
from dvp.training.responses import ResponseRecorder
from dvp.training.rollouts import prompt_rows
from noisy_engine import NoisyEngine

ROOT = Path(__file__).parents[2]
EXPERIMENT = load_experiment("smoke_methods", ROOT / "config")
# Updates so small that the policy stays where it is: all methods share one trainer, and a policy that has learnt to be
# right always has no gradient.
SMALL = {"prompts_per_step": 2, "tokens_per_micro_batch": 128, "max_response_tokens": 6, "learning_rate": 1e-9}
EXPERIMENT = EXPERIMENT.model_copy(update={"training": EXPERIMENT.training.changed(**SMALL, deepspeed="zero1")})


@pytest.fixture(scope="module")
def trainer(tiny_model):
    """One for all methods, as starting DeepSpeed takes longer than what is tested."""
    options = json.loads((ROOT / "config/deepspeed/zero1.json").read_text())
    return Trainer(tiny_model, EXPERIMENT.training, options)


@pytest.fixture
def make_loop(tiny_model, trainer):
    def make(run) -> Loop:
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        engine = NoisyEngine(model, tokenizer, sigma=0.05, answers=True)
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
    metrics = loop._optimise(rollout, statistics)
    if metrics is None:
        assert expected == 0
    elif EXPERIMENT.methods[run.method].loss.by_token:
        assert metrics["gradient_norm"] == pytest.approx(expected, rel=1e-4)
