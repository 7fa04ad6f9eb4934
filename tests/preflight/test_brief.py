"""The loop of a preflight: which prompts, how long, how rewarded, and where it waits. No model is loaded."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from dvp.core.importance import ImportanceRule
from dvp.data.reward import VERIFIER
from dvp.experiment.loading import load_experiment
from dvp.preflight import brief as module
from dvp.preflight.brief import FullLength, GpuMemory, brief
from dvp.rollout.engine import Completion
from dvp.training.loop import Loop
from dvp.training.rollouts import Problems
from dvp.training.stopping import Abandoned, StopRequest


class Engine:
    """Samples the token 1, as often as it may, and notes what it is told."""

    max_model_len, ranks = 100, 1

    def __init__(self, told: list):
        self.told = told

    def generate(self, prompts, sampling, seeds):
        self.told.append("generate")
        time.sleep(0.01)
        length = sampling.max_tokens if sampling.to_the_end else 1
        completion = Completion([1] * length, [-1.0] * length, "Answer: 0", "length")
        return [[completion] * sampling.n for _ in prompts]

    def sleep(self, *, keep_weights):
        self.told.append("sleep")

    def load_weights(self, weights):
        self.told.append("weights")


@pytest.fixture
def make_loop(root, monkeypatch):
    experiment = brief(load_experiment("smoke", root / "config"))
    run = experiment.runs[0]
    prompts = [[5] * length for length in (3, 9, 4, 8, 7, 6, 2, 9, 1, 5)]
    told = []

    def set_up(loop):
        loop.config, loop.run, loop.engine = experiment.training_of(run), run, Engine(told)
        loop.safe, loop.stop, loop.told = experiment.sides_of(run), StopRequest(), told
        loop.trainer = SimpleNamespace(weights=list)
        loop.problems = Problems([""] * 10, ["7"] * 10, prompts, 0, VERIFIER)

    monkeypatch.setattr(Loop, "__init__", set_up)
    return FullLength


def test_no_correction_is_left_and_two_steps(root):
    asked = load_experiment("smoke", root / "config")
    made = brief(asked)
    assert (made.training.steps, made.training.checkpoint_every, made.training.warmup_steps) == (2, 2, 0)
    assert made.training.learning_rate >= 1e-4
    batch = ("prompts_per_step", "group_size", "minibatches", "max_response_tokens", "tokens_per_micro_batch")
    assert all(getattr(made.training, key) == getattr(asked.training, key) for key in batch)
    assert {method.importance for method in made.methods.values()} == {ImportanceRule()}
    assert {method.mask for method in made.methods.values()} == {None}


def test_responses_to_the_longest_prompts_have_the_maximum_length_and_half_of_them_a_reward(make_loop):
    loop = make_loop()
    rows = loop.rows(1)
    assert rows == loop.rows(2)
    assert [len(loop.problems.prompts[row]) for row in rows] == [9, 9, 8, 7, 6, 5, 4, 3][: loop.config.prompts_per_step]
    groups = loop.sample(1, rows)
    assert loop.told == ["generate", "sleep"]
    assert {len(one.token_ids) for group in groups for one in group} == {loop.config.max_response_tokens}
    rollout = loop.graded(rows, groups)
    assert rollout.rewards_B.tolist() == [1.0, 0.0] * (len(rows) * loop.config.group_size // 2)
    assert rollout.truncated_B.all()
    assert torch.is_floating_point(rollout.rewards_B)


def test_the_second_rollout_goes_on_until_it_is_told_to_stop(make_loop, tmp_path):
    loop = make_loop(waiting=tmp_path / "sampling")
    rows = loop.rows(1)
    loop.sample(1, rows)
    assert loop.told == ["generate", "sleep"]
    assert not (tmp_path / "sampling").exists()
    loop.told.clear()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with loop.stop, pytest.raises(Abandoned):
        loop.sample(2, rows)
    assert (tmp_path / "sampling").exists()
    assert len(loop.told) > 3
    assert set(loop.told) == {"generate"}


def test_without_a_stop_the_second_rollout_ends(make_loop, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WAIT", 0.1)
    loop = make_loop(waiting=tmp_path / "sampling")
    loop.sample(2, loop.rows(2))
    assert loop.told.count("generate") > 1
    assert loop.told[-1] == "sleep"


def test_the_memory_of_a_phase_is_recorded_before_the_engine_sleeps_or_wakes(make_loop, monkeypatch):
    loop = make_loop()
    monkeypatch.setattr(GpuMemory, "reset", lambda _: loop.told.append("begin"))
    monkeypatch.setattr(GpuMemory, "record", lambda _, phase: loop.told.append(phase))
    loop.sample(1, loop.rows(1))
    loop.synchronise()
    assert loop.told == ["begin", "generate", "rollout", "sleep", "update", "weights"]
