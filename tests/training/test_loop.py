"""The RL loop against independent references: batches, seeds, the gradient of a step, and continuing a run exactly."""

import json
from functools import partial
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dvp.core.batch import Shared
from dvp.core.length_decay import LearningRateShare, LengthDecay
from dvp.errors import DvpError
from dvp.experiment.grid import Run
from dvp.experiment.loading import load_experiment
from dvp.experiment.methods import Method
from dvp.experiment.tools import Calculator
from dvp.experiment.training import EngineConfig, TrainingConfig
from dvp.rollout.engine import Completion, Sampling
from dvp.rollout.rounding import round_weight
from dvp.rollout.seeds import derived_seed
from dvp.rollout.turns import ToolEngine
from dvp.tools import make_tool
from dvp.training import checkpoint
from dvp.training.backend import Trainer
from dvp.training.checkpoint import MODEL, PROBE
from dvp.training.loop import Loop, run_loop
from dvp.training.responses import RESPONSES, ResponseRecorder, read_responses
from dvp.training.rollouts import Problems, prompt_rows
from dvp.training.stage import reporter, why_skipped
from rounding import TINY_LOG_PROB, TINY_TERMS, assert_same_steps, rounding

pytestmark = pytest.mark.slow
SETTINGS = {
    "steps": 4,
    "prompts_per_step": 2,
    "group_size": 4,
    "tokens_per_micro_batch": 56,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "max_response_tokens": 12,
    "deepspeed": "zero1",
    "checkpoint_every": 2,
}
PROMPTS = [[10 + i, 20 + i, 30 + i][: 2 + i % 2] for i in range(6)]
TERMS = TINY_TERMS + 8 * 12
"""Terms of the sums that a step's gradient comes through, a step's tokens among them."""
CALCULATOR = Calculator(kind="calculator", max_turns=3, max_answer_tokens=16)
LONG_ENOUGH = {"max_response_tokens": 100, "tokens_per_micro_batch": 220}


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 3))
def test_every_problem_is_used_once_before_any_is_used_twice(count, batch, seed):
    if count < batch:
        with pytest.raises(DvpError, match=f"{count} problems are fewer"):
            prompt_rows(count, batch, 1, seed)
        return
    per_epoch = count // batch
    for epoch in range(2):
        steps = range(1 + epoch * per_epoch, 1 + (epoch + 1) * per_epoch)
        used = [row for step in steps for row in prompt_rows(count, batch, step, seed)]
        assert len(used) == len(set(used)) == per_epoch * batch
        assert set(used) <= set(range(count))


class ScriptedEngine:
    """Samples uniformly from the vocabulary, so that its log-probs are known and far from the trainer's."""

    max_model_len = 64
    ranks = 1

    def __init__(self, model, vocabulary=400, distance=0.0):
        self.model, self.vocabulary, self.distance, self.pushed, self.slept = model, vocabulary, distance, [], []

    def generate(self, prompts, sampling, seeds):
        if sampling.whole_vocabulary:
            return side_by_side(self.model, prompts, sampling)
        rngs = map(np.random.default_rng, seeds)
        return [
            [self.one(prompt, rng, index, sampling) for index in range(sampling.n)]
            for prompt, rng in zip(prompts, rngs, strict=True)
        ]

    def one(self, prompt, rng, index, sampling):
        ids = rng.integers(2, self.vocabulary, rng.integers(3, 9)).tolist()
        return self.completion(prompt, ids, "Answer: 7\n" if index % 2 else "Answer: 8\n", "stop")

    def completion(self, prompt, ids, text, reason):
        log_probs = (dense_log_probs(self.model, prompt, ids).detach() + self.distance).tolist()
        return Completion(ids, log_probs, text, reason)

    def sleep(self, *, keep_weights):
        self.slept.append(keep_weights)

    def load_weights(self, weights):
        weights = {name: value.clone() for name, value in weights}
        self.pushed.append(weights)
        self.model.load_state_dict(weights, strict=False)


class CallingEngine(ScriptedEngine):
    """Writes any tokens, and then calls the tool as often as not."""

    max_model_len = 256

    def __init__(self, model, tokenizer, distance):
        super().__init__(model, distance=distance)
        self.call = tokenizer("<tool>6*7</tool>")["input_ids"]

    def one(self, prompt, rng, index, sampling):
        ids = rng.integers(2, self.vocabulary, rng.integers(3, 9)).tolist()
        calls = sampling.stop is not None and rng.random() < 0.5
        text = "<tool>6*7</tool>" if calls else f"Answer: {rng.integers(7, 9)}\n"
        return self.completion(prompt, ids + self.call * calls, text, "string" if calls else "stop")


@torch.no_grad()
def side_by_side(model, prompts, sampling):
    """What an engine says of all tokens where it is held against the trainer."""
    ids = list(range(5, 5 + sampling.max_tokens))
    rows = [model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for prompt in prompts]
    return [[Completion(ids, [0.0] * len(ids), "", "length", vocabulary_log_probs_TV=row_TV)] for row_TV in rows]


def dense_log_probs(model, prompt, response, rho=None):
    """log p of each response token from dense logits, over the safe vocabulary if ρ is given."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    if rho is not None:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + np.log(rho), -torch.inf)
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def build_loop(
    model, root, method="rloo", rho=None, distance=0.0, tools=None, engine=None, options=None, shares=False, **settings
):
    """A loop on the tiny model with real DeepSpeed; `engine` is made from its Hugging Face model."""
    experiment = load_experiment("smoke", root / "config")
    training = TrainingConfig(**(SETTINGS | settings))
    methods = experiment.methods
    if isinstance(method, dict):
        methods, method = methods | {"own": Method(label="own", **method)}, "own"
    experiment = experiment.model_copy(update={"training": training, "methods": methods, "tools": tools})
    file = json.loads((root / "config/deepspeed" / f"{training.deepspeed}.json").read_text())
    trainer = Trainer(model, training, file | (options or {}))
    trainer.policy.shares_prompts = shares
    served, tokenizer = reference_of(model), AutoTokenizer.from_pretrained(model)
    made = engine(served) if engine else ScriptedEngine(served, distance=distance)
    if tools:
        made = ToolEngine(CallingEngine(served, tokenizer, distance), make_tool(tools), tools, tokenizer)
    recorder = ResponseRecorder(training.keep_responses, training.steps, tokenizer, tools=bool(tools))
    run = Run(method=method, engine="fp32", rho=rho, seed=3)
    problems = pd.DataFrame({"id": range(6), "answer": ["7"] * 6})
    return Loop(experiment, run, problems, PROMPTS, 1, trainer, made, recorder)


def rows(folder):
    """metrics.jsonl but for the clock's part, which no two runs share."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{key: value for key, value in line.items() if "second" not in key} for line in lines]


def reference_of(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def named(model):
    """Return a model's weights by name."""
    return {name: value.detach() for name, value in model.named_parameters()}


def rollout_of_step(loop, step=1, engine=None):
    """The prompts of a step and an engine's groups of responses, which a seed determines."""
    chosen = prompt_rows(6, 2, step, 3)
    prompts, seeds = [PROMPTS[row] for row in chosen], [derived_seed(3, step, row) for row in chosen]
    return prompts, (engine or loop.engine).generate(prompts, Sampling(loop.config.max_response_tokens, n=4), seeds)


@pytest.mark.parametrize("deepspeed", ["zero1", "zero2", "zero3"])
def test_a_step_is_adamw_on_the_policy_gradient_of_the_paper(make_loop, tiny_model, deepspeed):
    """Three steps against plain torch: dense logits, one backward pass, no micro-batches, no DeepSpeed."""
    loop = make_loop(deepspeed=deepspeed, gradient_checkpointing=deepspeed == "zero1")
    reference = reference_of(tiny_model)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
    shadow, before = ScriptedEngine(reference), named(reference_of(tiny_model))
    for step in (1, 2, 3):
        share = 0.25 if step == 3 else 1.0
        loop.trainer.scale_learning_rate(share)
        for group in optimizer.param_groups:
            group["lr"] = share * 1e-3 * min(1.0, step / 2)
        prompts, groups = rollout_of_step(loop, step, shadow)
        loss = 0.0
        for prompt, group in zip(prompts, groups, strict=True):
            rewards = [1.0 if one.text == "Answer: 7\n" else 0.0 for one in group]
            for index, one in enumerate(group):
                others = (sum(rewards) - rewards[index]) / 3
                log_prob = dense_log_probs(reference, prompt, one.token_ids).sum()
                loss = loss - (rewards[index] - others) * log_prob / 8
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        metrics = loop.step(step)
        assert metrics["gradient_norm"] == pytest.approx(norm.item(), rel=rounding(TERMS))
        assert metrics["reward"] == 0.5
        assert abs(metrics["k1"]) < TINY_LOG_PROB
        assert_same_steps(dict(loop.trainer.weights()), named(reference), before, TERMS)
        # What the engine received is what the trainer has.
        assert all(torch.equal(loop.engine.pushed[-1][name], value) for name, value in loop.trainer.weights())


PPO = {"kind": "ppo", "clip_low": 0.002, "clip_high": 0.004}
SEVERAL_UPDATES = {
    "weights are taken anew": ({"importance": "tis"}, None, 3e-3),
    "the policy of the rollout stays the old one": ({"loss": PPO}, None, 3e-3),
    "a token leaves, reinforce": ({}, 0.1, 1e-2),
    "a token leaves, ppo": ({"loss": {"kind": "ppo", "clip_low": 0.5, "clip_high": 0.5}}, 0.1, 1e-2),
    "a token leaves, gspo": ({"loss": {"kind": "gspo", "clip_low": 0.5, "clip_high": 0.5}}, 0.1, 1e-2),
}


@pytest.mark.parametrize(("method", "rho", "rate"), SEVERAL_UPDATES.values(), ids=SEVERAL_UPDATES)
def test_two_optimiser_steps_on_one_rollout(make_loop, tiny_model, method, rho, rate):
    """Against plain torch. A token that has left the safe vocabulary since the rollout is left out: its log-prob is a
    convention, and in GSPO's mean it would swallow the whole response. REINFORCE has no ratio to the rollout's policy:
    whatever is inside by now takes part.
    """
    pruned = {"safe_vocabulary": "fixed"} if rho else {}
    settings = {"minibatches": 2, "distance": 0.0 if rho else 0.01, "learning_rate": rate}
    loop = make_loop({"advantage": "dr_grpo"} | method | pruned, rho=rho and str(rho), **settings)
    old, reference = reference_of(tiny_model), reference_of(tiny_model)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.0)
    surrogate = method.get("loss", {"kind": "reinforce"})
    left = tokens = clipped = 0
    for update, (prompt, group) in enumerate(zip(*rollout_of_step(loop), strict=True)):
        loss = torch.zeros(())
        for index, one in enumerate(group):
            before = dense_log_probs(old, prompt, one.token_ids, rho).detach()
            now = dense_log_probs(reference, prompt, one.token_ids, rho)
            inside = now.isfinite() & (before.isfinite() if "loss" in method else True)
            left += (before.isfinite() & ~now.isfinite()).sum().item()
            tokens += len(one.token_ids)
            if not inside.any():
                continue
            advantage = (1.0 if index % 2 else 0.0) - 0.5
            if "loss" not in method:
                weight = (
                    (now.detach() - torch.tensor(one.log_probs)).exp().clamp(max=2.0) if "importance" in method else 1
                )
                loss = loss - (weight * now * advantage)[inside].sum() / len(group)
                continue
            log_ratio = (now - before)[inside]
            ratio = (log_ratio.mean() if surrogate["kind"] == "gspo" else log_ratio).exp()
            low, high = 1 - surrogate["clip_low"], 1 + surrogate["clip_high"]
            terms = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
            clipped += (terms != ratio * advantage).sum().item()
            loss = loss - terms.sum() / len(group)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for options in optimizer.param_groups:
            options["lr"] = rate * min(1.0, (update + 1) / 2)
        optimizer.step()
    metrics = loop.step(1)
    assert metrics["updates"] == 2
    assert metrics["left_safe_fraction"] == pytest.approx(left / tokens)
    assert metrics["clipped_fraction"] == pytest.approx(clipped / tokens)
    assert (left > 0, clipped > 0) == (rho is not None, surrogate == PPO)
    assert (metrics["otb_power"] is None) == (surrogate["kind"] == "gspo")
    assert_same_steps(dict(loop.trainer.weights()), named(reference), named(old), TERMS)


def test_a_step_is_the_same_where_responses_share_their_prompt(make_loop, monkeypatch):
    apart, shared = make_loop(), make_loop(shares=True)
    laid_out = []
    monkeypatch.setattr(Shared, "of", lambda batch, of=Shared.of: laid_out.append(batch) or of(batch))
    expected, found = apart.step(1), shared.step(1)
    assert any(len(rows) > 1 for batch in laid_out for _, rows in batch.units())
    for name in ("k1", "k3", "entropy", "gradient_norm"):
        assert found[name] == pytest.approx(expected[name], rel=rounding(TERMS), abs=TINY_LOG_PROB)


def test_how_the_scoring_rounds_clips_nothing_before_the_weights_have_moved(make_loop):
    """In bf16 two passes over other micro-batches differ by more than GSPO's bounds, and the policy is the same."""
    loop = make_loop({"advantage": "dr_grpo", "loss": {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}})
    score = loop.score

    def rounded(*args, **options):
        statistics = score(*args, **options)
        return statistics | {"pruned_log_prob": statistics["pruned_log_prob"].bfloat16().float()}

    loop.score = rounded
    metrics = loop.step(1)
    assert metrics["k3"] > 1e-6
    assert metrics["gradient_norm"] > 0
    assert metrics["clipped_fraction"] == 0


def test_a_step_with_a_tool_learns_from_the_models_own_tokens(make_loop, tiny_model):
    """Against plain torch: each own token's log-prob after all that came before it, and nothing of the answers."""
    loop = make_loop(tools=CALCULATOR, **LONG_ENOUGH)
    reference = reference_of(tiny_model)
    prompts, groups = rollout_of_step(loop)
    answer = loop.engine._encoded("42")
    loss, own = 0.0, 0
    for prompt, group in zip(prompts, groups, strict=True):
        rewards = [float("Answer: 7\n" in one.text) for one in group]
        for index, one in enumerate(group):
            written = torch.tensor(one.written)
            assert torch.tensor(one.token_ids)[~written].tolist() == answer * one.calls
            others = (sum(rewards) - rewards[index]) / 3
            log_prob = dense_log_probs(reference, prompt, one.token_ids)[written]
            loss = loss - (rewards[index] - others) * log_prob.sum() / 8
            own += len(one.log_probs)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    metrics = loop.step(1)
    every = [one for group in groups for one in group]
    assert metrics["gradient_norm"] == pytest.approx(norm.item(), rel=rounding(TERMS))
    assert metrics["response_tokens_mean"] == own / 8
    assert metrics["turns_mean"] == 1 + sum(one.calls for one in every) / 8 > 1
    assert abs(metrics["k1"]) < TINY_LOG_PROB
    for row in loop.recorder.rows:
        one = every[row["index"]]
        assert (row["token_id"], row["written"]) == (one.token_ids, one.written)


def test_a_stale_engine_gets_weights_every_so_many_steps(make_loop, tmp_path):
    loop = make_loop(synchronise_every=2)
    _, rows = run_loop(loop, tmp_path, tmp_path / "checkpoints", lambda row: None)
    assert len(loop.engine.pushed) == 3  # at the start, after step 2 and after step 4
    # Weights that are replaced next need not be kept; and twice it is held against the trainer, with new weights.
    assert loop.engine.slept == [True, *(True, False), True, *(True, False)]
    mismatch = [row["max_abs_log_ratio"] for row in rows]
    assert max(mismatch[0], mismatch[2]) < 1e-4
    assert min(mismatch[1], mismatch[3]) > 1e-3


def test_the_first_step_measures_the_trainers_own_noise(make_loop):
    loop = make_loop()
    first, second = loop.step(1), loop.step(2)
    assert first["self_noise_max_abs_log_ratio_shape"] < 1e-4 < first["self_noise_max_abs_log_ratio_bf16"]
    assert not any(name.startswith("self_noise") for name in second)


@pytest.fixture
def collapse_at_3(monkeypatch):
    """A mean reward that stays as it was is a fall, of two steps."""
    monkeypatch.setattr("dvp.core.collapse.PATIENCE", 2)
    monkeypatch.setattr("dvp.core.collapse.FALL", 1.5)


def test_a_collapse_is_marked_and_the_run_goes_on(make_loop, tmp_path, collapse_at_3):
    loop = make_loop(steps=5, checkpoint_every=5, keep_responses={"before_collapse": 1})
    _, rows = run_loop(loop, tmp_path, tmp_path / "checkpoints", lambda row: None)
    assert [row["collapsed"] for row in rows] == [False, False, True, True, True]
    assert (loop.collapse.collapsed_at, loop.collapse.reason) == (3, "the mean reward of 2 steps is 0.5, and was 0.5")
    assert sorted({row["step"] for row in read_responses(tmp_path / RESPONSES).to_pylist()}) == [1, 2, 3, 5]


def test_a_batch_that_is_rejected_whole_skips_the_step_and_is_counted(make_loop):
    """The engine claims log-probs one nat a token too high: every sequence ratio falls below MIS's lower bound."""
    loop = make_loop(method="rloo_mis", distance=1.0)
    before = {name: value.clone() for name, value in loop.trainer.weights()}
    metrics = loop.step(1)
    assert metrics["skipped"] is True
    assert metrics["gradient_norm"] is None
    assert metrics["masked_fraction"] == 1.0
    assert metrics["k1"] == pytest.approx(1.0, abs=TINY_LOG_PROB)
    assert all(torch.equal(before[name], value) for name, value in loop.trainer.weights())


def test_tokens_outside_the_safe_vocabulary_are_counted_and_do_not_move_the_weights(make_loop):
    """Uniform samples under ρ = 0.5 lie outside V_S nearly always; DVP without a correction must zero them itself."""
    metrics = make_loop(method="dvp", rho="0.5").step(1)
    assert metrics["outside_safe_fraction"] > 0.9
    assert metrics["masked_fraction"] == metrics["outside_safe_fraction"]
    assert metrics["safe_size"] < 20
    assert 0 < metrics["pruned_mass_mean"] < metrics["pruned_mass_max"] < 1


def test_a_prompt_longer_than_the_context_is_named(make_loop, root):
    loop = make_loop()
    experiment = load_experiment("smoke", root / "config").model_copy(update={"training": loop.config})
    problems = pd.DataFrame({"id": ["a", "b"], "answer": ["7", "7"]})
    with pytest.raises(
        DvpError, match=r"data/train.parquet: row 2 \(id b\): its prompt has 60 tokens.*of 64 leaves 52"
    ):
        Loop(experiment, loop.run, problems, [[1], [2] * 60], 1, loop.trainer, loop.engine, loop.recorder)


FEEDBACK = {"rule": "feedback", "signal": "k3", "low": 1e-9, "high": 1e-6, "factor": 2.0, "patience": 1}
DECAY = {"growth": 1e-9, "patience": 1, "factor": 0.5, "every": 1, "lowest": 0.2}
CONTINUED = {
    "plain": {},
    "shared prompts": {"shares": True},
    "tools": {"tools": CALCULATOR, **LONG_ENOUGH, "method": "otb_mis", "distance": 0.01},
    "stale engine, two minibatches, feedback on rho": {
        "method": {"advantage": "otb", "safe_vocabulary": FEEDBACK | {"lowest": 1e-6, "highest": 0.1}},
        "rho": "1e-3",
        "synchronise_every": 2,
        "minibatches": 2,
    },
    "a learning rate that falls": {
        "method": {"advantage": "rloo", "learning_rate_decay": DECAY},
        "warmup_steps": 3,
        "prompts_per_step": 1,
        "group_size": 2,  # mean lengths of 5, 7, 4.5 and 6
    },
}


@pytest.mark.parametrize("settings", CONTINUED.values(), ids=CONTINUED)
def test_a_run_that_was_cut_off_continues_exactly(make_loop, tmp_path, settings, collapse_at_3):
    """Stopped after step 3, with a checkpoint at step 2: the rest is as if nothing had happened."""
    whole = make_loop(**settings)
    run_loop(whole, tmp_path / "whole", tmp_path / "whole/checkpoints", lambda row: None)

    def stop_at_3(row):
        if row["step"] == 3:
            raise KeyboardInterrupt

    folder = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run_loop(make_loop(**settings), folder, folder / "checkpoints", stop_at_3)
    assert len(rows(folder)) == 3
    resumed = make_loop(**settings)
    seen = []
    run_loop(resumed, folder, folder / "checkpoints", lambda row: seen.append(row["step"]))
    assert seen == [1, 2, 3, 4]
    assert rows(folder) == rows(tmp_path / "whole")
    assert (folder / RESPONSES).read_bytes() == (tmp_path / "whole" / RESPONSES).read_bytes()
    if "rho" in settings:
        assert len({row["rho"] for row in rows(folder)}) > 1
        assert [row["collapsed"] for row in rows(folder)] == [False, False, True, True]
    if "warmup_steps" in settings:
        rate, rates = LearningRateShare(LengthDecay(**DECAY)), []
        for row in rows(folder):
            rates.append(1e-3 * min(1.0, row["step"] / 3) * rate.value)
            rate.observe(row)
        assert [row["learning_rate"] for row in rows(folder)] == pytest.approx(rates)
        assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3 / 2, 1e-3 / 4])
    expected = dict(whole.trainer.weights())
    assert all(torch.equal(value, expected[name]) for name, value in resumed.trainer.weights())


class Clock:
    """Stands in the place of `time`; each step of a loop takes 30 s."""

    now = 0.0

    def monotonic(self):
        return self.now

    def of(self, loop):
        step = loop.step
        loop.step = lambda number: (step(number), setattr(self, "now", self.now + 30.0))[0]
        return loop


def test_the_time_left_leaves_out_steps_of_before(make_loop, tmp_path, monkeypatch, capsys):
    clock = Clock()
    monkeypatch.setattr("dvp.progress.time", clock)
    run_loop(clock.of(make_loop(steps=2)), tmp_path, tmp_path / "c", lambda row: None)
    resumed = clock.of(make_loop(steps=6))
    run_loop(resumed, tmp_path, tmp_path / "c", reporter(resumed, Mock()))
    lines = [line for line in capsys.readouterr().err.splitlines() if "step" in line and "reward" in line]
    left = [line.split("s/step  ")[1] if "left" in line else None for line in lines]
    assert left == [None, "60 s left", "30 s left", "0 s left"]


def test_a_skipped_step_says_why(make_loop, tmp_path, monkeypatch, capsys):
    unequal = make_loop(method="rloo_mis", distance=1.0)
    assert why_skipped(unequal.step(1)) == "skipped: every response is rejected"
    loop = make_loop(steps=1)
    assert why_skipped(loop.step(1)) == ""
    monkeypatch.setattr(Problems, "reward", lambda *_: 0.0)
    run_loop(loop, tmp_path, tmp_path / "c", reporter(loop, Mock()))
    assert "s/step  skipped: all rewards of each group are equal\n" in capsys.readouterr().err


def test_a_run_whose_files_are_deleted_under_it_ends_with_whole_ones(make_loop, tmp_path):
    """Snakemake does so before it starts a job, also where the run of a Snakemake that was killed still goes on."""

    def on_step(row):
        if row["step"] == 3:
            for name in ("metrics.jsonl", RESPONSES):
                (tmp_path / name).unlink()

    run_loop(make_loop(), tmp_path, tmp_path / "c", on_step)
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    _, rows = run_loop(make_loop(steps=5), tmp_path, tmp_path / "c", lambda row: None)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]


# --- weights of steps that are evaluated ---


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("last", [1, 2, 3, 4])
def test_weights_of_evaluated_steps_are_kept(make_loop, tmp_path, tiny_model, last):
    """And checkpoints go as ever. Killed after a step: before it was kept, after that but before its checkpoint, …"""

    def run(folder, on_step=lambda row: None):
        loop = make_loop()
        loop.kept = [1, 3, 4]
        run_loop(loop, folder, folder / "checkpoints", on_step)
        return loop

    def stop(row):
        if row["step"] == last:
            raise KeyboardInterrupt

    whole, cut = tmp_path / "whole/checkpoints", tmp_path / "cut/checkpoints"
    loop = run(whole.parent)
    with pytest.raises(KeyboardInterrupt):
        run(cut.parent, stop)
    run(cut.parent)
    assert names(cut) == names(whole) == ["step-000004", "weights-000001", "weights-000003", "weights-000004"]
    for step in (1, 3, 4):
        path = checkpoint.kept_weights(cut, step)
        assert checkpoint.verify(path) == {"step": step, "ranks": 1, "fingerprint": "checkpoints"}
        assert names(path) == ["manifest.json", MODEL, PROBE, "state.json"]
        for file in path.iterdir():
            assert file.read_bytes() == (checkpoint.kept_weights(whole, step) / file.name).read_bytes()
    final = load_file(checkpoint.kept_weights(cut, 4) / MODEL)
    assert all(torch.equal(final[name], value) for name, value in loop.trainer.weights())


# --- engine and trainer are held together ---


class OtherEngine(ScriptedEngine):
    """Rounds the weights that it gets as `held` says; one of them it never gets."""

    def __init__(self, model, held=None, left_out=None):
        super().__init__(model)
        self.held, self.left_out = held or EngineConfig(dtype="float32"), left_out

    def load_weights(self, weights):
        super().load_weights((name, self.rounded(name, value)) for name, value in weights if name != self.left_out)

    def rounded(self, name, value):
        if name.endswith("proj.weight") and self.held.weight_rounding != "none":
            value = round_weight(value, self.held.weight_rounding)
        return value.to(getattr(torch, self.held.dtype)).float()


@pytest.fixture
def beside(make_loop):
    """A loop whose engine is said to be `config`, and does what the options say."""

    def make(config, settings=None, **options):
        loop = make_loop(warmup_steps=0, steps=2, engine=partial(OtherEngine, **options), **settings or {})
        loop.agreement._config = config
        return loop

    return make


FP32, BF16 = EngineConfig(dtype="float32"), EngineConfig(dtype="bfloat16")
INT8, INT4 = (EngineConfig(dtype="bfloat16", weight_rounding=form) for form in ("int8", "int4"))


@pytest.mark.parametrize("left_out", ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"])
def test_an_engine_with_a_weight_of_old_stops_the_run(beside, tmp_path, left_out):
    """After the first step, in a line; the step is in no file, and no checkpoint has it."""
    loop = beside(FP32, left_out=left_out)
    with pytest.raises(
        DvpError, match=r"^step 1: vLLM computes another Qwen3ForCausalLM than transformers with the sa"
    ):
        run_loop(loop, tmp_path, tmp_path / "checkpoints", lambda row: None)
    assert not (tmp_path / "metrics.jsonl").exists()
    assert not checkpoint.checkpoints(tmp_path / "checkpoints")


def on_a_tie(parameter):
    """Halfway between two numbers of bf16, where any update rounds to another one."""
    near = parameter.bfloat16().float()
    return torch.where(near == 0, 0.0, near * (1 + 2.0**-8 / (near.frexp().mantissa.abs() * 2)))


@pytest.mark.parametrize("config", [BF16, INT8], ids=["bf16", "int8"])
def test_what_rounding_makes_of_an_update_is_no_fault(beside, tmp_path, config):
    """The engine's weights jump by a step of bf16 where the trainer's hardly move, as from a model of 4 bits."""
    loop = beside(config, {"learning_rate": 1e-6}, held=config)
    with torch.no_grad():
        for parameter in loop.trainer.policy.parameters():
            parameter.copy_(on_a_tie(parameter))
    _, rows = run_loop(loop, tmp_path, tmp_path / "checkpoints", lambda row: None)
    assert len(rows) == 2


@pytest.mark.parametrize(("said", "held"), [(BF16, INT4), (INT8, INT4), (FP32, BF16)])
def test_an_engine_that_rounds_more_than_it_says_is_refused(beside, tmp_path, said, held):
    with pytest.raises(DvpError, match=r"^vLLM computes another Qwen3ForCausalLM than transformers"):
        run_loop(beside(said, held=held), tmp_path, tmp_path / "checkpoints", lambda row: None)


def test_an_engine_with_another_model_stops_the_run(make_loop, tmp_path):
    run_loop(make_loop(steps=2), tmp_path, tmp_path / "checkpoints", lambda row: None)
    resumed = make_loop()
    resumed.engine.load_weights = lambda weights: None  # it has the base model's
    with pytest.raises(
        DvpError, match=r"^vLLM computes another Qwen3ForCausalLM than transformers with the same weigh"
    ):
        run_loop(resumed, tmp_path, tmp_path / "checkpoints", lambda row: None)
