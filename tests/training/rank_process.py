"""Run by the tests as each rank of one world, under torchrun: short runs with real DeepSpeed and a scripted engine.

usage: rank_process.py MODEL UNTIED FOLDER; leaves FOLDER/NAME/{metrics.jsonl,checkpoints,probe,weights,continued} of
each file NAME of config/deepspeed, with the last step's weights kept as those of an evaluated one. UNTIED is a model
whose head has a weight of its own; zero3_bf16 trains it, as it would one of eight billion parameters.
or: rank_process.py MODEL PLACE; continues PLACE/checkpoints, which may be of another number of ranks, under zero2.
"""

import json
import os
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from deepspeed.utils import (
    get_z3_leaf_modules,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
)
from safetensors.torch import save_file
from test_loop import PROMPTS, ScriptedEngine, build_loop
from test_loop import SETTINGS as ONE_RANK
from transformers import AutoModelForCausalLM, AutoTokenizer

from dvp.cli import quiet
from dvp.core.batch import Batch
from dvp.experiment.training import EngineConfig
from dvp.training import checkpoint, launch, ranks
from dvp.training.agreement import own_logits
from dvp.training.backend import Trainer
from dvp.training.engine_rounding import engine_rounding
from dvp.training.loop import Loop, run_loop
from dvp.training.responses import RESPONSES
from dvp.training.rollouts import with_sets
from noisy_engine import NoisyEngine
from rounding import TINY_LOG_PROB

ROOT = Path(__file__).parents[2]
# Of the three prompts of a step two may be on one rank, and the responses that are left need three micro-batches.
SETTINGS = ONE_RANK | {"steps": 3, "prompts_per_step": 3, "tokens_per_micro_batch": 45}
# Every advantage and the denominator depend on the whole batch.
METHOD = {"advantage": "reinforce_pp", "importance": "mis"}
REJECTED = 5


class PartlyWrongEngine(ScriptedEngine):
    """Claims log-probs for one of the prompts that get its responses rejected, so that the useful ones are uneven."""

    def generate(self, prompts, sampling, seeds):
        groups = super().generate(prompts, sampling, seeds)
        for prompt, group in zip(prompts, groups, strict=True):
            if prompt == PROMPTS[REJECTED]:
                group[:] = [replace(one, log_probs=[value + 1 for value in one.log_probs]) for one in group]
        return groups


def make_loop(model: Path, name: str) -> Loop:
    """A loop on a tiny model. Under ZeRO-3 even its small parameters are split."""
    options = {}
    if "zero3" in name:
        zero = json.loads((ROOT / f"config/deepspeed/{name}.json").read_text())["zero_optimization"]
        options["zero_optimization"] = zero | {"stage3_param_persistence_threshold": 0}
    settings = SETTINGS | {"gpus": int(os.environ.get("WORLD_SIZE", "1")), "gradient_checkpointing": "bf16" in name}
    return build_loop(model, ROOT, METHOD, engine=PartlyWrongEngine, options=options, **settings | {"deepspeed": name})


def train(model: Path, folder: Path, names: tuple[str, ...]) -> None:
    """A whole run for each DeepSpeed file, and the same run continued from its checkpoint before the last."""
    for name in names:
        place = folder / name
        loop = make_loop(model, name)
        run_loop(loop, place, place / "checkpoints", partial(save_moments, loop.trainer, place))
        weights = {name: value.clone() for name, value in loop.trainer.weights()}
        # Weights that are only lent have to be what every rank's engine got.
        assert all(torch.equal(loop.engine.pushed[-1][name], value) for name, value in weights.items())
        if "zero3" in name:
            assert not any(parameter.numel() for parameter in loop.trainer.policy.parameters())
            # Gathered layer by layer, not linear by linear.
            assert get_z3_leaf_modules(loop.trainer.policy) == list(loop.trainer.policy.model.model.layers)
            for parameter_name, parameter in loop.trainer.policy.model.named_parameters():
                part = safe_get_local_fp32_param(parameter)  # of the flattened weight, padded
                value = weights[parameter_name].flatten()[ranks.rank() * len(part) :][: len(part)]
                assert torch.equal(value, part[: len(value)]), parameter_name
        check_engines_weights(loop.trainer, model, weights)
        if "bf16" in name:
            check_sums(loop.trainer)
        save(weights, place)
        if ranks.is_main():
            shutil.copytree(place / "checkpoints", place / "continued/checkpoints")
            shutil.rmtree(place / "continued/checkpoints/step-000003")
        ranks.gather(None)
        resumed = make_loop(model, name)
        run_loop(resumed, place / "continued", place / "continued/checkpoints", lambda row: None)
        for parameter_name, value in resumed.trainer.weights():
            assert torch.equal(value, weights[parameter_name]), parameter_name
        if ranks.is_main():
            recorded = [(place / part / RESPONSES).read_bytes() for part in (".", "continued")]
            assert recorded[0] == recorded[1]


def save(weights: dict[str, torch.Tensor], place: Path) -> None:
    """Leave weights.safetensors."""
    if ranks.is_main():
        save_file(weights, place / "weights.safetensors")


def save_moments(trainer: Trainer, place: Path, row: dict) -> None:
    """Leave the optimiser's whole state after the second step: moments.safetensors."""
    if row["step"] != 2:
        return
    moments = {
        f"{name}.{key}": safe_get_full_optimizer_state(parameter, key).cpu().clone()
        for name, parameter in trainer.policy.model.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }
    if ranks.is_main():
        save_file(moments, place / "moments.safetensors")


def resume(model: Path, name: str, place: Path) -> None:
    """Continue the run of `place`/checkpoints, of another number of ranks; leave its moments as they were restored."""
    loop = make_loop(model, name)
    checkpoint.restore(place / "checkpoints", loop.trainer)
    save_moments(loop.trainer, place, {"step": 2})
    run_loop(loop, place, place / "checkpoints", lambda row: None)
    save({name: value.clone() for name, value in loop.trainer.weights()}, place)


def replay(model: Path, folder: Path) -> None:
    """A step that replays the engine's sets, of which a rank has those that it sampled or computes with; replay.json"""
    tokenizer = AutoTokenizer.from_pretrained(model)
    engine = partial(NoisyEngine, tokenizer=tokenizer, sigma=0.05, answers=True)
    method = {"advantage": "rloo", "safe_vocabulary": "replay"}
    loop = build_loop(model, ROOT, method, "0.01", engine=engine, **SETTINGS | {"gpus": ranks.count()})
    asked = [0, 1, 2]
    groups = loop.sample(1, asked)
    for place, group in enumerate(groups):
        assert all(one.kept.has_ids == (place % ranks.count() == ranks.rank()) for one in group)
    rollout = loop.problems.graded(asked, groups)
    dealt = ranks.deal(rollout.batch.micro_batches(45), None)
    wanted = {row for part in dealt[ranks.rank()] if part is not None for row in part.tolist()}
    dealt = [[part for part in parts if part is not None] for parts in dealt]
    found = with_sets(rollout.batch, dealt).kept
    own = {row for row, sets in enumerate(rollout.batch.kept) if sets.has_ids}
    assert {row for row, sets in enumerate(found) if sets.has_ids} == wanted | own
    metrics = loop.learn(1, asked, rollout)
    if ranks.is_main():
        (folder / "replay.json").write_text(json.dumps(metrics))


def check_sums(trainer: Trainer) -> None:
    """The mean of the ranks' gradients of a bf16 product is not rounded to bf16."""
    rows = Batch.collate([PROMPTS[ranks.rank()]], [[50, 60, 70]], pad=1)
    trainer.forward_backward(rows, None, lambda statistics: -statistics.log_prob.mean(), last=False)
    gradient = safe_get_full_grad(trainer.policy.model.model.layers[0].mlp.up_proj.weight)
    each = ranks.gather(gradient)
    assert torch.equal(each[0], each[-1])
    assert (gradient != gradient.bfloat16()).float().mean() > 0.1


def check_engines_weights(trainer: Trainer, model: Path, weights: dict[str, torch.Tensor]) -> None:
    """A pass with the engine's weights, rounded where each rank has a part of them, is that of a model made of them."""
    rounded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, value in weights.items():
        step = value.abs().amax(dim=-1, keepdim=True) / 127
        held = (value / step).round() * step if name.endswith("proj.weight") else value
        rounded.get_parameter(name).data = held.bfloat16().float()
    batch, own = Batch.collate([PROMPTS[ranks.rank()]], [[50, 60, 70]], pad=1), trainer.policy.model
    expected, before = own_logits(rounded, batch), own_logits(own, batch)
    with engine_rounding(own, EngineConfig(dtype="bfloat16", weight_rounding="int8"), activations=False):
        found = own_logits(own, batch)
    assert torch.allclose(found, expected, rtol=0, atol=TINY_LOG_PROB)
    assert (found - before).abs().max() > 1e-3
    assert torch.equal(own_logits(own, batch), before)


def main(model: Path, *others: str) -> None:
    """Run what the usage says."""
    checkpoint.KEEP_CHECKPOINTS = 2
    if len(others) == 1:
        resume(model, "zero2", Path(others[0]))
        return
    untied, folder = map(Path, others)
    train(model, folder, ("zero1", "zero2", "zero3"))
    train(untied, folder, ("zero3_bf16",))
    replay(model, folder)


if __name__ == "__main__":
    quiet()
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *sys.argv[2:])
    launch.leave()
