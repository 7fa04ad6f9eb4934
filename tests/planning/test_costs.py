"""The cost model against numbers worked out by hand, and against the models, integrals and files that it stands for."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from dvp.cli import Card
from dvp.experiment.training import EngineConfig, TrainingConfig
from dvp.planning import costs
from dvp.planning.costs import Device, Lengths, Model

SMALL = Model(
    hidden_size=4,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=3,
    intermediate_size=5,
    tie_word_embeddings=False,
    vocabulary_size=7,
)
QWEN3_8B = Model(4096, 36, 32, 8, 128, 12288, False, 151936)
# 100 FLOP/s at half use, 10 bytes/s at half use: 50 and 5.
SLOW = Device("slow", {"float32": 100.0, "bfloat16": 400.0}, 10.0, 1e6, 20.0, 2.0, 0.5, 0.5, 0.0, 1.0)
FP32, BF16 = EngineConfig(dtype="float32"), EngineConfig(dtype="bfloat16")


def test_a_small_model_uses_less_of_a_gpu_than_a_large_one():
    """Halfway in the size's logarithm, at the root of 1.7 and 8 billion, halfway between the shares."""
    gpu = costs.DEVICES["h200"]
    shares = [gpu.utilisation(size) for size in (0.6e9, 1.7e9, (1.7e9 * 8e9) ** 0.5, 8e9, 70e9)]
    assert shares == pytest.approx([0.15, 0.15, 0.275, 0.4, 0.4])
    assert gpu.compute_seconds(989e12, "bfloat16", 1e9) == pytest.approx(1 / 0.15)
    assert costs.DEVICES["cpu"].utilisation(1e6) == costs.DEVICES["cpu"].utilisation(8e9)


def training(**changes) -> TrainingConfig:
    chosen = {
        "steps": 1,
        "prompts_per_step": 2,
        "group_size": 4,
        "tokens_per_micro_batch": 8,
        "learning_rate": 1e-6,
        "max_response_tokens": 8,
        "deepspeed": "zero3",
        "checkpoint_every": 1,
    }
    return TrainingConfig(**(chosen | changes))


# --- the model ---


def test_parameters_of_the_published_models():
    assert QWEN3_8B.parameters == 8_190_735_360
    assert Model(5120, 40, 40, 8, 128, 17408, False, 151936).parameters == 14_768_307_200


def real(model: Model, layers: int | None = None, **more) -> Qwen3ForCausalLM:
    """The model that these sizes stand for."""
    sizes = {
        "vocab_size": model.vocabulary_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": layers or model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "tie_word_embeddings": model.tie_word_embeddings,
    }
    return Qwen3ForCausalLM(Qwen3Config(**sizes, bos_token_id=None, eos_token_id=0, pad_token_id=0, **more))


@settings(max_examples=40)
@given(*(st.integers(1, most) for most in (6, 3, 2, 3, 3, 9)), st.booleans(), st.integers(2, 30))
def test_parameters_are_those_of_the_real_model(hidden, layers, kv_heads, groups, half, intermediate, tied, vocabulary):
    model = Model(hidden, layers, kv_heads * groups, kv_heads, 2 * half, intermediate, tied, vocabulary)
    with torch.device("meta"):
        made = real(model)
    assert model.parameters == sum(parameter.numel() for parameter in made.parameters())
    embedding = 0 if tied else made.model.embed_tokens.weight.numel()
    assert model.multiplying == model.parameters - embedding


def test_flops_of_a_forward_pass_by_hand():
    # A layer: 4·6 + 2·4·3 + 6·4 + 3·4·5 = 132 weights, 2·3 + 2·4 = 14 norms; all: 2·146 + 4 + 7·4 = 324 that multiply.
    assert SMALL.multiplying == 324
    # In 2 layers, 2 heads of 3 multiply the t-th token with t others, once for scores and once for values. The sum over
    # 10 tokens is that of n(n + 1), for which n² stands.
    attention = sum(2 * 2 * 2 * (2 * 3) * context for context in range(1, 11))
    assert SMALL.forward_flops(10, 10 * 11) == 2 * 324 * 10 + attention


def test_flops_of_a_forward_pass_are_those_that_torch_counts():
    """Long sequences through the real model: torch counts whole attention, of which the causal half is needed."""
    from torch.utils.flop_counter import FlopCounterMode

    model = Model(16, 2, 4, 2, 8, 24, False, 50)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        real(model, attn_implementation="eager")(torch.zeros((1, 300), dtype=torch.int64), use_cache=False)
    # Norms are counted as parameters that multiply; rotary embeddings are counted by torch.
    whole_attention = model.forward_flops(300, 2 * 300**2)
    assert counter.get_total_flops() == pytest.approx(whole_attention, rel=0.03)


def test_bytes_of_the_cache():
    assert SMALL.cache_bytes(FP32) == 2 * 2 * 1 * 3 * 4
    assert SMALL.cache_bytes(EngineConfig(dtype="bfloat16")) == 2 * 2 * 1 * 3 * 2
    assert SMALL.cache_bytes(EngineConfig(dtype="bfloat16", kv_cache_dtype="fp8")) == 2 * 2 * 1 * 3
    # 8-bit weights: a quarter of the traffic of fp32, and room for more of the cache.
    fp8 = EngineConfig(dtype="bfloat16", quantization="fp8")
    assert (SMALL.engine_bytes(FP32), SMALL.engine_bytes(BF16), SMALL.engine_bytes(fp8)) == (4, 2, 1)
    room = costs.cache_room(SMALL, fp8, SLOW) - costs.cache_room(SMALL, BF16, SLOW)
    assert room * SMALL.cache_bytes(BF16) == pytest.approx(SMALL.parameters)
    # 147,456 bytes: the known 144 KiB of Qwen3-8B in bf16.
    assert QWEN3_8B.cache_bytes(EngineConfig(dtype="bfloat16")) == 144 * 1024


@given(prompt=st.floats(0, 500), share=st.floats(0.02, 0.98), longest=st.integers(10, 9000))
def test_moments_of_lengths_are_those_of_the_uniform_distribution(prompt, share, longest):
    lengths = Lengths(prompt, share * longest, longest)
    width = min(lengths.response, longest - lengths.response)
    responses = lengths.response + width * (2 * (np.arange(4000) + 0.5) / 4000 - 1)
    assert responses.min() >= 0
    assert responses.max() <= longest
    assert lengths.sequence == pytest.approx((prompt + responses).mean())
    assert lengths.sequence_squared == pytest.approx(((prompt + responses) ** 2).mean(), rel=1e-5)
    # The t-th token of a response looks at the prompt and at the tokens before it.
    assert lengths.attended == pytest.approx((prompt * responses + responses**2 / 2).mean(), rel=1e-5)


# --- sampling ---

FIXED = Lengths(prompt=2, response=4, longest=4)  # no spread: E[r²] = 16, a response attends to 2·4 + 8 = 16 tokens


def sampled(device: Device, engine: EngineConfig = FP32, **changes) -> float:
    amounts = {"prompts": 0, "responses": 3, "at_once": 3} | changes
    return costs.sampling_seconds(SMALL, engine, device, FIXED, **amounts)


def test_sampling_that_is_bound_by_arithmetic():
    device = replace(SLOW, bandwidth=1e9)
    decode = 3 * (2 * 324 * 4 + 4 * 2 * 2 * 3 * 16)
    assert sampled(device) == pytest.approx(decode / 50)
    assert sampled(device, EngineConfig(dtype="bfloat16")) == pytest.approx(decode / 200)
    prefill = 2 * (2 * 324 * 2 + 2 * 2 * 2 * 3 * 4)
    assert sampled(device, prompts=2) == pytest.approx((decode + prefill) / 50)


def test_sampling_that_is_bound_by_memory():
    device = replace(SLOW, peak_flops={"float32": 1e9, "bfloat16": 1e9})
    # Four steps read 324 weights each; three responses read 16 tokens of 48 bytes each.
    assert sampled(device) == pytest.approx((4 * 324 * 4 + 3 * 16 * 48) / 5)
    # One response at a time: twelve steps.
    assert sampled(device, at_once=1) == pytest.approx((12 * 324 * 4 + 3 * 16 * 48) / 5)
    two = EngineConfig(dtype="float32", tensor_parallel=2)
    assert sampled(device, two) == pytest.approx((4 * 324 * 4 + 3 * 16 * 48) / 10)


def test_sampling_that_is_bound_by_launching_kernels():
    device = replace(SLOW, peak_flops={"float32": 1e12, "bfloat16": 1e12}, bandwidth=1e12, launch=0.25)
    assert sampled(device) == pytest.approx(4 * 2 * 0.25)
    # More GPUs do not launch faster.
    assert sampled(device, EngineConfig(dtype="float32", tensor_parallel=2)) == pytest.approx(4 * 2 * 0.25)
    # With CUDA graphs a step is launched at once, whatever its layers.
    device = replace(device, replay=0.1)
    assert sampled(device) == pytest.approx(4 * 0.1)
    assert sampled(device, EngineConfig(dtype="float32", cuda_graphs=False)) == pytest.approx(4 * 2 * 0.25)


def test_what_does_not_fit_into_the_cache_waits():
    device = replace(SLOW, peak_flops={"float32": 1e9, "bfloat16": 1e9})
    # Beside 352·4 bytes of weights, in half of the memory, room for 1.5 sequences of 6 tokens of 48 bytes.
    device = replace(device, memory=2 * (SMALL.parameters * 4 + 1.5 * 6 * 48))
    assert costs.cache_room(SMALL, FP32, device) == pytest.approx(9)
    steps = 3 * 4 / 1.5
    assert sampled(device) == pytest.approx((steps * 324 * 4 + 3 * 16 * 48) / 5)
    # Weights that do not fit: a negative room, and a time as if one sequence went in.
    device = replace(device, memory=SMALL.parameters * 4)
    assert costs.cache_room(SMALL, FP32, device) < 0
    assert sampled(device) == pytest.approx((12 * 324 * 4 + 3 * 16 * 48) / 5)


# --- a training step ---


def step(device: Device, engine: EngineConfig = FP32, dtype: str = "float32", useful=1.0, **changes) -> dict:
    return costs.step_seconds(SMALL, training(**changes), engine, device, FIXED, 3, dtype, useful)


def test_a_training_step_by_hand():
    device = replace(SLOW, bandwidth=1e9)
    alone = step(device)
    forward = 2 * 324 * 6 + 2 * 2 * 2 * 3 * 36
    assert alone["update"] == pytest.approx(8 * forward * (1 + 3) / 50)
    assert step(device, gradient_checkpointing=True)["update"] == pytest.approx(8 * forward * (1 + 4) / 50)
    # A response without weight is scored only.
    assert step(device, useful=0.25)["update"] == pytest.approx((8 + 2 * 3) * forward / 50)
    half = step(device, dtype="bfloat16")
    assert half["update"] == pytest.approx(alone["update"] / 4)
    assert half["rollout"] == alone["rollout"] == sampled(device, prompts=2, responses=8, at_once=8)
    assert alone["synchronise"] == pytest.approx(SMALL.parameters * 4 / 0.5e9)
    assert set(alone) == {"rollout", "update", "synchronise"}
    # GPUs share it.
    device = replace(device, link=1e9)
    shared, paired = step(device, gpus=4), step(device, EngineConfig(dtype="float32", tensor_parallel=2), gpus=4)
    assert shared["update"] == pytest.approx(alone["update"] / 4)
    assert shared["rollout"] == paired["rollout"] == pytest.approx(alone["rollout"] / 4)


def test_zero_3_waits_for_its_weights_where_the_link_is_slow():
    device = replace(SLOW, peak_flops={"float32": 1e12, "bfloat16": 1e12}, bandwidth=1e12)

    def update(dtype="float32", **changes):
        return step(device, dtype=dtype, **({"gpus": 2} | changes))["update"]

    # Each GPU has 4 micro-batches, each gathers the weights for score, forward and backward and scatters gradients.
    assert update() == pytest.approx(4 * 4 * SMALL.parameters * 4 / 20)
    assert update(tokens_per_micro_batch=2 * int(FIXED.sequence)) == pytest.approx(2 * 4 * SMALL.parameters * 4 / 20)
    assert update(nodes=2) == pytest.approx(2 * 4 * SMALL.parameters * 4 / 2)  # 4 GPUs, over the network
    # The last micro-batch is a whole one: 4 responses, 3 at once, are 2 micro-batches.
    assert update(tokens_per_micro_batch=3 * int(FIXED.sequence)) == pytest.approx(2 * 4 * SMALL.parameters * 4 / 20)
    assert update("bfloat16") == update()  # gathers are fp32 all the same
    # Half of the responses have a weight: 4 micro-batches are scored, 2 trained on.
    assert update(useful=0.5) == pytest.approx((4 + 2 * 3) * SMALL.parameters * 4 / 20)


def test_the_range_is_that_of_the_best_published_system():
    """NeMo-RL 0.4 on 16 H100s: 2,048 sequences of 1,060 tokens of at most 4,096, on-policy, 97.7 s a step.

    The formula has all of them trained on with recomputation, after prompts of 150 tokens.
    """
    llama = Model(4096, 32, 32, 8, 128, 14336, False, 128256)
    assert llama.parameters == pytest.approx(8.03e9, rel=1e-3)
    settings = {"prompts_per_step": 64, "group_size": 32, "gpus": 8, "nodes": 2, "gradient_checkpointing": True}
    settings |= {"max_response_tokens": 3946, "tokens_per_micro_batch": 32768}
    engine, lengths = EngineConfig(dtype="bfloat16", gpu_memory_utilization=0.6), Lengths(150, 910, 3946)
    made = costs.step_seconds(
        llama, training(**settings), engine, costs.DEVICES["h100"], lengths, zero_stage=1, dtype="bfloat16", useful=1
    )
    formula = made["rollout"] + made["update"]
    assert formula == pytest.approx(61.6, abs=0.05)
    assert 97.7 / formula == pytest.approx(costs.SLOWEST, abs=0.02)
    assert {name: device.slowest for name, device in costs.DEVICES.items() if device.slowest != costs.SLOWEST} == {
        "cpu": 1.0
    }


def test_the_command_knows_every_device():
    assert list(get_args(Card)) == list(costs.DEVICES)


def test_memory_of_the_trainer_falls_with_the_zero_stage():
    count = SMALL.parameters
    assert [costs.state_bytes(SMALL, 1, stage) for stage in (1, 2, 3)] == [20 * count] * 3
    assert costs.state_bytes(SMALL, 4, 1) == (8 + 3) * count
    assert costs.state_bytes(SMALL, 4, 2) == (4 + 1 + 3) * count
    assert costs.state_bytes(SMALL, 4, 3) == 5 * count


def saved_bytes(model: Model, layers: int, bf16: bool, recompute: bool = False) -> int:
    """Of what autograd keeps of a real forward pass over 512 tokens, weights left out."""
    made = real(model, layers)
    if recompute:
        made.gradient_checkpointing_enable()
        made.train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in made.parameters()}
    saved, sizes = [], {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved.append(tensor)
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        made.model(torch.zeros((1, 512), dtype=torch.int64), use_cache=False)
    return sum(sizes.values())


@pytest.mark.parametrize("shape", [(64, 96, 4, 2, 16), (128, 160, 6, 2, 32), (256, 768, 8, 2, 32)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_what_autograd_keeps_of_the_real_model(shape, dtype):
    hidden, intermediate, heads, kv_heads, head_dim = shape
    model = Model(hidden, 2, heads, kv_heads, head_dim, intermediate, False, 32)
    bf16 = dtype == "bfloat16"
    kept = saved_bytes(model, 3, bf16) - saved_bytes(model, 2, bf16)
    if bf16:  # autocast's copies of the weights are counted on their own
        kept -= 2 * (2 * hidden * (heads + kv_heads) * head_dim + 3 * hidden * intermediate)
    assert costs.layer_bytes(model, dtype) == pytest.approx(kept / 512, rel=0.03)
    recomputed = saved_bytes(model, 3, bf16, recompute=True) - saved_bytes(model, 2, bf16, recompute=True)
    assert recomputed == 512 * hidden * 4  # fp32, in bf16 too


def test_memory_of_an_update_by_hand():
    head = 7 * 4  # V × H
    tokens = 2 * (3 + 8)
    settings = {"tokens_per_micro_batch": tokens, "max_response_tokens": 8}
    parts = costs.update_bytes(SMALL, training(**settings), {"stage": 2}, prompt_tokens=3, dtype="float32")
    layer = 24 * 4 + 16 * (5 + 6 + 3) + 10 * 2
    assert list(parts.values()) == [
        20 * SMALL.parameters,
        0,
        4 * 5e8,
        0,
        0,
        tokens * 2 * layer,
        4 * (2**28 + head + 2 * tokens * 4),
        4e9,
    ]
    parts = costs.update_bytes(
        SMALL,
        training(**settings, gradient_checkpointing=True, gpus=2),
        {"stage": 3, "reduce_bucket_size": 10, "stage3_max_live_parameters": 20},
        prompt_tokens=3,
        dtype="bfloat16",
    )
    layer = 26 * 4 + 8 * 5 + 10 * (6 + 3) + 10 * 2
    assert list(parts.values()) == [
        10 * SMALL.parameters,
        4 * 20,
        4 * 10,
        2 * 324,
        4 * tokens * 2 * 4,
        tokens * layer,
        2 * 2**28 + (4 + 2) * head + (4 + 4 + 2) * tokens * 4,
        4e9,
    ]
    wide = training(**settings, gradient_checkpointing=True, gpus=2, head_dtype="float32")
    wide = costs.update_bytes(SMALL, wide, {"stage": 3}, prompt_tokens=3, dtype="bfloat16")
    assert wide["the head"] == parts["the head"] + 4 * 2**28
