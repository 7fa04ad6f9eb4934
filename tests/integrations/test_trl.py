"""TRL's own trainer with the method, two steps on a CPU, against the project's own policy, update and loss."""

import inspect
import json
import os
import re
import subprocess
import sys
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from dvp.cli import main
from dvp.core.advantages import ADVANTAGES, Responses
from dvp.core.batch import Batch, Rollout, unflatten
from dvp.core.head import MASK_LOGIT
from dvp.core.importance import PRESETS, ImportanceRule
from dvp.core.objective import Gspo, Ppo, policy_loss
from dvp.core.safe_vocabulary import FixedRho
from dvp.core.update import make_update
from dvp.errors import DvpError
from dvp.measurement.rollouts import read_rollouts
from dvp.training.backend import Policy
from rounding import assert_same_sums, rounding

pytest.importorskip("trl", reason="TRL is not installed (envs/dev.txt has it)")
from trl import GRPOTrainer
from trl.trainer import grpo_trainer, utils
from trl_settings import GROUP, PROMPTS, RHO, TEMPERATURE, TOKENS, make_settings, reward

pytestmark = pytest.mark.slow
VOCABULARY = 400
"""Of the tiny model: its longest sum, and the one that every log-prob and gradient comes through."""
CLOSE = {"rel": rounding(VOCABULARY), "abs": rounding(VOCABULARY)}


@pytest.fixture(scope="module")
def settings(tiny_model):
    return partial(make_settings, tiny_model)


def trained(trainer, settings, **options):
    """Of each step the weights before it, its loss, its gradients, and what was logged."""

    class Watched(trainer):
        def training_step(self, model, *args):
            plain = self.accelerator.unwrap_model(model)  # a process group, which DeepSpeed leaves behind, wraps it
            before = deepcopy(plain.state_dict())
            loss = super().training_step(model, *args)
            steps.append((before, loss, {name: value.grad.clone() for name, value in plain.named_parameters()}))
            return loss

    steps = []
    made = Watched(**settings, **options)
    made.train()
    return [(*step, logged) for step, logged in zip(steps, made.state.log_history, strict=False)]


def assert_gradients(found, expected, least=1e-2):
    """Assert that gradients agree, of which the largest entry is above `least`.

    They are sums over some hundred tokens with advantages of both signs, of which a tenth or less is left.
    """
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    assert largest > least
    assert_same_sums(found, expected, VOCABULARY, 10 * largest)


@pytest.fixture(scope="module")
def mismatch_trainer():
    from dvp.integrations.trl import MismatchTrainer

    return MismatchTrainer


def ours(tiny_model, weights, made, *, rho, importance, advantage):
    """Loss, gradients, and how many tokens lie outside V_S, of this project's policy, update and loss."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.load_state_dict(weights)
    policy = Policy(model)
    batch = Batch.collate(made["prompt_ids"], made["completion_ids"], pad=0)
    mask_BT = batch.response_BT
    log_q_BT = unflatten(torch.tensor([value for values in made["logprobs"] for value in values]), mask_BT)
    rewards_B = torch.tensor(reward(made["completion_ids"]))
    safe = None if rho is None else FixedRho(rho)
    now = policy(batch, safe=safe, temperature=TEMPERATURE)
    log_prob_BT = unflatten(now.pruned_log_prob, mask_BT)
    names = ("pruned_log_prob", "target_in_safe", "pruned_sum_p_squared")
    update = make_update(
        Rollout(batch, log_q_BT, rewards_B, torch.zeros(len(rewards_B), dtype=torch.bool)),
        {name: unflatten(getattr(now, name).detach(), mask_BT) for name in names},
        importance=importance,
        advantage=ADVANTAGES[advantage],
        group_size=GROUP,
    )
    loss = policy_loss(
        Ppo(),
        log_prob_BT,
        log_prob_BT.detach(),
        update.weight_BT,
        update.advantage_BT,
        mask_BT,
        update.weights.denominator,
    ).loss
    loss.backward()
    gradients = {name.removeprefix("model."): value.grad for name, value in policy.named_parameters()}
    return loss.detach(), gradients, (~now.target_in_safe).sum().item()


CASES = {
    "dvp": (None, None, "dr_grpo"),
    "dvp_mis": ("mis", None, "dr_grpo"),
    "dvp_icepop": ("icepop", None, "dr_grpo"),
    "dvp_snis": (ImportanceRule(level="sequence", self_normalise=True, denominator="kept"), None, "dr_grpo"),
    "otb": (None, "otb", "otb"),
    "otb_tis": ("tis", "otb", "otb"),
}


@pytest.mark.parametrize(("correction", "advantage", "same"), CASES.values(), ids=CASES)
def test_loss_and_gradient_are_the_projects_own(
    tiny_model, mismatch_trainer, settings, tmp_path, correction, advantage, same
):
    """Also the test of the test: without V_S the numbers would be others."""
    given = settings(tmp_path)
    steps = trained(mismatch_trainer, given, correction=correction, advantage=advantage)
    rule = PRESETS.get(correction) if isinstance(correction, str) else correction or ImportanceRule()
    assert len(steps) == len(given["rollout_func"].made) == 2
    for (weights, loss, gradients, _), made in zip(steps, given["rollout_func"].made, strict=True):
        of = {"weights": weights, "made": made, "importance": rule, "advantage": same}
        expected, expected_gradients, outside = ours(tiny_model, rho=RHO, **of)
        torch.testing.assert_close(loss, expected / TOKENS, atol=rounding(VOCABULARY), rtol=0)
        expected_gradients = {name: value / TOKENS for name, value in expected_gradients.items()}
        assert_gradients(gradients, expected_gradients)
        assert outside > 0
        _, full, _ = ours(tiny_model, rho=None, **of)
        assert max((full[name] - TOKENS * expected_gradients[name]).abs().max() for name in full) > 1e-2


MODES = [("token", "truncate", None), ("token", "mask", 0.5), ("sequence", "truncate", None), ("sequence", "mask", 0.5)]


def for_vllm(trainer):
    """TRL's code for vLLM, whose log-probs come from a rollout_func."""

    class ForVllm(trainer):
        def __init__(self, **options):
            super().__init__(**options)
            self.use_vllm, self._last_loaded_step = True, -1
            self.vllm_generation = SimpleNamespace(sync_weights=lambda: None)

    return ForVllm


@pytest.mark.parametrize(("level", "action", "lower"), MODES, ids=[f"{level}_{action}" for level, action, _ in MODES])
def test_trls_own_corrections_are_rules_here(mismatch_trainer, settings, tmp_path, level, action, lower):
    """Where nothing is pruned."""
    config = {"min_p": None, "loss_type": "dapo", "vllm_importance_sampling_mode": f"{level}_{action}"}
    config |= {"vllm_importance_sampling_clip_max": 1.2, "vllm_importance_sampling_clip_min": lower}
    theirs = trained(for_vllm(GRPOTrainer), settings(tmp_path, **config))
    rule = ImportanceRule(level=level, action=action, upper=1.2, lower=lower or 0.0)
    found = trained(mismatch_trainer, settings(tmp_path, **config), correction=rule)
    for (_, loss, gradients, logged), (_, expected, expected_gradients, by_trl) in zip(found, theirs, strict=True):
        torch.testing.assert_close(loss, expected, atol=rounding(VOCABULARY), rtol=0)
        sampling = {name: value for name, value in by_trl.items() if name.startswith("sampling/")}
        assert len(sampling) == 5
        assert {name: logged[name] for name in sampling} == pytest.approx(sampling, **CLOSE)
        assert_gradients(gradients, expected_gradients)


ZERO3 = {
    # Nothing is so small that every process keeps it.
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "zero_allow_untested_optimizer": True,
    **dict.fromkeys(("gradient_clipping", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
}


@pytest.mark.parametrize(
    ("tied", "options"),
    [
        pytest.param(True, {}, id="ddp"),
        pytest.param(False, {"deepspeed": ZERO3}, id="zero3"),
        pytest.param(True, {"deepspeed": ZERO3}, id="zero3, tied head", marks=pytest.mark.nightly),
    ],
)
def test_two_processes_move_the_weights_as_one_does(tiny_model, root, tmp_path, tied, options):
    """The head's weight, which no module of its own multiplies, is whole in both passes wherever its shards are."""
    start = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(tiny_model, tie_word_embeddings=tied).save_pretrained(start)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(start)
    weights, rollouts, logged = {}, {}, {}
    script, count = root / "tests/integrations/trl_process.py", len(PROMPTS) * GROUP
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    for processes in (1, 2):
        (folder := tmp_path / str(processes)).mkdir()
        own = {"per_device_train_batch_size": count // processes} | (options if processes > 1 else {})
        command = [*run, str(processes), script, start, folder, json.dumps(own)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        weights[processes] = load_file(folder / "model.safetensors")
        logged[processes] = json.loads((folder / "logged.json").read_text())
        rollouts[processes] = pd.read_json(folder / "rollouts.jsonl", lines=True)["completion_ids"]
    assert sorted(rollouts[1]) == sorted(rollouts[2])
    for one, two in zip(logged[1], logged[2], strict=True):
        assert two == pytest.approx(one, **CLOSE)
        assert 0 < one["mismatch/outside_safe"] < one["mismatch/kept"]
    before = load_file(start / "model.safetensors")
    assert weights[1].keys() == weights[2].keys() == before.keys()
    assert min((moved - before[name]).abs().max() for name, moved in weights[1].items()) > 1e-3
    # They move by the gradient, at a learning rate of 1.
    largest = max((moved - before[name]).abs().max().item() for name, moved in weights[1].items())
    assert_same_sums(weights[2], weights[1], VOCABULARY, 10 * largest)


def test_vllm_beside_the_trainer_samples_by_min_p(tiny_model, root, tmp_path):
    """TRL's own engine in the trainer's process, in bf16, whose weights it brings up to date: two steps, on a CPU."""
    start = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(tiny_model, tie_word_embeddings=False).save_pretrained(start)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(start)
    config = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64}
    config |= {"vllm_gpu_memory_utilization": 0.05}  # of the machine's memory, on a CPU
    command = [sys.executable, root / "tests/integrations/trl_process.py", start, tmp_path, json.dumps(config)]
    plain = os.environ | {"VLLM_USE_AOT_COMPILE": "0"}  # TORCHDYNAMO_DISABLE is set for all tests
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600, env=plain)
    assert done.returncode == 0, done.stderr[-3000:]
    rollouts = pd.read_json(tmp_path / "rollouts.jsonl", lines=True)
    logged = json.loads((tmp_path / "logged.json").read_text())
    assert len(logged) == rollouts["step"].nunique() == 2
    for step, row in enumerate(logged):
        of_step = rollouts[rollouts["step"] == step]
        columns = ("old_per_token_logps", "sampling_per_token_logps", "tool_mask")
        old, sampled, safe = (np.concatenate(of_step[name].tolist()) for name in columns)
        assert row["mismatch/outside_safe"] == pytest.approx((safe == 0).mean(), abs=rounding(1))
        assert row["mismatch/outside_safe"] < 0.05
        apart, largest = np.abs(old - sampled)[safe == 1], np.abs(old[safe == 1]).max()
        assert 0 < apart.mean() < 0.05
        assert row["sampling/sampling_logp_difference/mean"] == pytest.approx(
            apart.mean(), rel=rounding(len(apart)), abs=rounding(1, largest)
        )


@pytest.fixture
def process_group():
    group = torch.distributed
    if group.is_initialized():
        yield
        return
    group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
    yield
    group.destroy_process_group()


def test_a_head_of_which_fsdp_has_a_shard_is_made_whole(
    tiny_model, mismatch_trainer, settings, tmp_path, process_group
):
    given = settings(tmp_path)
    model = given["model"] = AutoModelForCausalLM.from_pretrained(tiny_model, tie_word_embeddings=False)
    trainer = mismatch_trainer(**given, correction=None)

    def log_probs_and_gradients():
        model.zero_grad()
        trainer._scored.clear()
        ids = torch.arange(27).view(3, 9)
        log_prob_BL = model(ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True).log_probs
        log_prob_BL.sum().backward()
        gradients = {name: value.grad for name, value in model.named_parameters()}
        return log_prob_BL, {
            name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in gradients.items()
        }

    whole = log_probs_and_gradients()
    for module in (model.lm_head, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    assert isinstance(model.lm_head.weight, DTensor)
    (log_prob_BL, gradients), (expected_BL, expected) = log_probs_and_gradients(), whole
    assert_same_sums({"log_prob": log_prob_BL}, {"log_prob": expected_BL}, VOCABULARY)
    assert_same_sums(gradients, expected, VOCABULARY)


def sometimes(completion_ids, **_):
    """The reward, but None for the second response to each prompt."""
    return [None if row % GROUP == 1 else value for row, value in enumerate(reward(completion_ids))]


def test_a_response_without_reward_counts_as_in_trl(mismatch_trainer, settings, tmp_path):
    """R − R̄ of the others, as TRL has it, and nothing for itself."""
    by_trl, ours = (
        trained(mismatch_trainer, settings(tmp_path) | {"reward_funcs": sometimes}, correction="tis", advantage=name)
        for name in (None, "dr_grpo")
    )
    for (_, loss, gradients, _), (_, expected, expected_gradients, _) in zip(ours, by_trl, strict=True):
        torch.testing.assert_close(loss, expected, atol=rounding(VOCABULARY), rtol=0)
        assert_gradients(gradients, expected_gradients)


def test_a_token_that_left_v_s_is_not_in_the_sequence_ratio(tiny_model, mismatch_trainer, settings, tmp_path):
    """At the second update on a rollout, against this project's GSPO: TRL's `grpo` has a term a response."""
    config = {"importance_sampling_level": "sequence", "num_iterations": 2, "loss_type": "grpo"}
    given = settings(tmp_path, **config)
    steps = trained(mismatch_trainer, given, correction=None, advantage="rloo")
    (made,) = given["rollout_func"].made
    batch = Batch.collate(made["prompt_ids"], made["completion_ids"], pad=0)
    mask_BT = batch.response_BT
    rewards_B = torch.tensor(reward(made["completion_ids"]))
    ones_BT = torch.ones(mask_BT.shape)
    advantage_BT = ADVANTAGES["rloo"](Responses(rewards_B, mask_BT, GROUP, ones_BT, ones_BT))
    log_probs, safes = [], []
    for weights, *_ in steps:
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        model.load_state_dict(weights)
        policy = Policy(model)
        now = policy(batch, safe=FixedRho(RHO), temperature=TEMPERATURE)
        log_probs.append(unflatten(now.pruned_log_prob, mask_BT))
        safes.append(unflatten(now.target_in_safe, mask_BT))
    assert (safes[0] & ~safes[1]).sum() > 3
    weight_BT = (safes[0] & safes[1]).float()
    rest = (log_probs[1], log_probs[0].detach(), weight_BT, advantage_BT, mask_BT, len(rewards_B))
    expected = policy_loss(Gspo(clip_low=0.2, clip_high=0.2), *rest).loss
    expected.backward()
    _, loss, gradients, _ = steps[1]
    torch.testing.assert_close(loss, expected.detach(), atol=rounding(VOCABULARY), rtol=0)
    expected_gradients = {name.removeprefix("model."): value.grad for name, value in policy.named_parameters()}
    assert_gradients(gradients, expected_gradients, least=1e-3)


def test_the_table_of_completions_has_the_advantages(mismatch_trainer, settings, tmp_path):
    trained(mismatch_trainer, settings(tmp_path, log_completions=True), correction=None, advantage="rloo")
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    rewards = table["reward"].to_numpy().reshape(-1, GROUP)
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / (GROUP - 1)
    assert table["advantage"].tolist() == pytest.approx((rewards - others).flatten().tolist(), abs=rounding(GROUP))


NO_CHANGE = {"max_tokens": 5, "num_beams": 1, "seed": 3, "skip_special_tokens": False, "detokenize": False}
REFUSED = [
    ({}, {"correction": "mist"}, "correction: expected one of tis, "),
    ({}, {"advantage": "otp"}, "advantage: expected one of rloo, "),
    ({"top_p": 0.9}, {}, "generation: {'top_p': 0.9}; expected no more than min_p and temperature"),
    ({"temperature": 0.0}, {}, "generation: {'temperature': 0.0}; expected"),
    ({"vllm_structured_outputs_regex": "a+"}, {}, "generation: {'structured_outputs': 'a+'}; expected"),
    *(
        ({"generation_kwargs": NO_CHANGE | changed}, {}, f"generation: {changed}; expected")
        for changed in (
            {"min_p": 0.1},
            {"typical_p": 0.9},
            {"suppress_tokens": [3]},
            {"num_beams": 2},
            {"do_sample": False},
            {"presence_penalty": 0.5},
            {"min_tokens": 2},
            {"structured_outputs": {"regex": "a+"}},
            {"unheard_of": 1},
        )
    ),
    ({"beta": 0.1}, {}, "beta: expected 0 with min_p"),
]


@pytest.mark.parametrize(("changed", "options", "says"), REFUSED)
def test_what_cannot_be_combined_is_refused(mismatch_trainer, settings, tmp_path, changed, options, says):
    with pytest.raises(DvpError, match=re.escape(says)):
        mismatch_trainer(**settings(tmp_path, **changed), **({"correction": None} | options))


def test_what_the_model_adds_to_the_sampler_is_refused(mismatch_trainer, settings, tmp_path):
    """transformers, where it samples, takes the model's own settings for those that nobody asked for."""
    given = settings(tmp_path)
    given["model"].generation_config.update(top_k=20, no_repeat_ngram_size=0, chat_format="chatml", typical_p=0.9)
    mismatch_trainer(**given, correction=None)
    with pytest.raises(DvpError, match=re.escape("generation: {'typical_p': 0.9}; expected no more than")):
        mismatch_trainer(**given | {"rollout_func": None}, correction=None)
    unset = settings(tmp_path, top_k=None) | {"rollout_func": None}
    with pytest.raises(DvpError, match=re.escape("generation: {'top_k': 50}; expected no more than")):
        mismatch_trainer(**unset, correction=None)


def test_another_trl_is_refused(monkeypatch):
    """Before anything of it is used that it may lack."""
    monkeypatch.delitem(sys.modules, "dvp.integrations.trl", raising=False)
    monkeypatch.setattr("trl.__version__", "1.14.2")
    monkeypatch.delattr("trl.trainer.utils.FusedCausalLMOutput")
    with pytest.raises(DvpError, match=r"TRL is 1\.14\.2; expected 1\.16\.x"):
        import_module("dvp.integrations.trl")


def test_the_page_lists_the_private_parts_of_trl(root):
    """Each that is used is listed, and each that is listed is in TRL's source."""
    code = (root / "src/dvp/integrations/trl.py").read_text(encoding="utf-8")
    theirs = "".join(Path(inspect.getfile(module)).read_text(encoding="utf-8") for module in (grpo_trainer, utils))
    used = re.findall(r"\butils\.(\w+)", code)
    there = set(re.findall(r"\w+", theirs))
    used += there.intersection(re.findall(r"(?:self|super\(\))\.(_[a-z]\w+)", code))
    page = (root / "docs/trl.md").read_text(encoding="utf-8")
    [names] = re.findall(r"Private in TRL and used here: (.*?)\.", page, re.DOTALL)
    listed = set(re.findall(r"`(\w+)`", names))
    assert set(used) <= listed <= there


def test_logits_that_are_changed_are_refused(mismatch_trainer, settings, tmp_path):
    given = settings(tmp_path)
    given["model"].config.final_logit_softcapping = 30.0
    with pytest.raises(DvpError, match="the model's logits: expected its head's product alone"):
        mismatch_trainer(**given, correction=None)


def test_a_correction_without_log_probs_is_refused(mismatch_trainer, settings, tmp_path):
    trainer = mismatch_trainer(**settings(tmp_path) | {"rollout_func": None}, correction="tis")
    with pytest.raises(DvpError, match="correction, rollouts: expected the sampler's log-probs"):
        trainer.train()


def test_the_example_dumps_what_the_cli_diagnoses(root, settings, tmp_path, monkeypatch):
    """The ten lines of docs/trl.md, and the mismatch page from the file that TRL's trainer wrote."""
    monkeypatch.chdir(tmp_path)
    given = settings(tmp_path)
    given["rollout_func"].rho = 0.0  # an engine that leaves V_S
    (example,) = re.findall(r"```python\n(.*?)```", (root / "docs/trl.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(example, {"args": given.pop("args"), "settings": given})
    written = pd.read_json("rollouts.jsonl", lines=True)
    made = given["rollout_func"].made
    assert written["completion_ids"].tolist() == [ids for one in made for ids in one["completion_ids"]]
    q = [log_prob for one in made for log_probs in one["logprobs"] for log_prob in log_probs]
    assert written["sampling_per_token_logps"].sum() == pytest.approx(q, rel=rounding(1))
    count = len(PROMPTS) * GROUP
    assert written["step"].tolist() == [0] * count + [1] * count
    assert set(written["mode"]) == {"train"}
    masks = written["tool_mask"].map(np.asarray)
    assert written["outside_safe"].tolist() == [(mask == 0).sum() for mask in masks]
    assert written["outside_safe"].sum() > 0
    for row in written.itertuples():  # what stands for the log-prob of a token outside V_S is no measurement
        assert [mask == 0 for mask in row.tool_mask] == [value == MASK_LOGIT for value in row.old_per_token_logps]
    monkeypatch.chdir(root)  # whose catalogue the verb reads
    assert main(["diagnose-rollouts", str(tmp_path / "rollouts.jsonl"), "--output", str(tmp_path / "page")]) == 0
    assert "KL by position" in (tmp_path / "page/mismatch.html").read_text()


def test_the_pages_export_from_trl_is_read(root, settings, tmp_path, monkeypatch):
    """docs/examples/dump_trl.py, in TRL's own trainer."""
    exec((root / "docs/examples/dump_trl.py").read_text(encoding="utf-8"), made := {})
    monkeypatch.chdir(tmp_path)
    given = settings(tmp_path, min_p=None)
    trained(for_vllm(made["DumpingTrainer"]), given)
    first, second = read_rollouts(tmp_path / "rollouts_0.jsonl")
    assert (first.name, second.name) == ("train, step 0", "train, step 1")
    for read, sampled in zip((first, second), given["rollout_func"].made, strict=True):
        assert read.tokens["token"].tolist() == [token for ids in sampled["completion_ids"] for token in ids]
        log_q = [value for log_probs in sampled["logprobs"] for value in log_probs]
        assert read.tokens["log_q"].tolist() == pytest.approx(log_q, rel=rounding(1))
        assert read.tokens["problem"].nunique() == len(PROMPTS)


def test_the_example_runs_with_the_core_and_trl_alone(root, tiny_model, environment, isolated, tmp_path):
    """In an environment that has what these two require, and nothing else."""
    (example,) = re.findall(r"```python\n(.*?)```", (root / "docs/trl.md").read_text(encoding="utf-8"), re.DOTALL)
    program = f"""
import os, sys
os.chdir({str(tmp_path)!r})
sys.path.append({str(root / "tests/integrations")!r})
from trl_settings import make_settings
given = make_settings({str(tiny_model)!r}, {str(tmp_path)!r})
exec({example!r}, {{"args": given.pop("args"), "settings": given}})
"""
    command = isolated(site := environment("trl"), program)
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert len(pd.read_json(tmp_path / "rollouts.jsonl", lines=True)) == 2 * len(PROMPTS) * GROUP
    assert not {"vllm", "deepspeed", "mlflow", "snakemake", "lm_eval"} & {path.name for path in site.iterdir()}
