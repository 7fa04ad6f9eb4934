"""Attention in fp32, with keys and values that heads share."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dvp.core.batch import Batch
from dvp.training.attention import ATTENTION
from dvp.training.backend import Policy

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
BATCH = Batch.collate([[5], [8]], [[9, 2, 31, 44, 7], [60, 13]], pad=0)


def policy(model_type: str, attention: str | None) -> Policy:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES)
    return Policy(AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval())


@pytest.fixture
def asked(monkeypatch):
    """Of each call of PyTorch's attention `enable_gqa`, the keys' heads, the mask, and whether it is causal."""
    calls, original = [], torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, **options):
        calls.append((options.get("enable_gqa", False), key.shape[1], options["attn_mask"], options["is_causal"]))
        return original(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return calls


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_in_fp32_no_head_shares_keys_and_the_numbers_are_the_same(model_type, asked):
    plain, ours = policy(model_type, None), policy(model_type, ATTENTION)
    asked.clear()
    expected_N = plain(BATCH, safe=None, temperature=1.0).log_prob
    assert asked == [(True, 1, None, True)] * 2  # what transformers does, and the reason for all this
    asked.clear()
    log_prob_N = ours(BATCH, safe=None, temperature=1.0).log_prob
    assert asked == [(False, 4, None, True)] * 2
    torch.testing.assert_close(log_prob_N, expected_N, atol=1e-6, rtol=0)
    expected_N.sum().backward()
    log_prob_N.sum().backward()
    for (name, value), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value.grad, other.grad, atol=1e-5, rtol=1e-5, msg=name)


def test_in_bf16_the_flash_kernel_takes_shared_keys_as_they_are(asked):
    ours = policy("qwen3", ATTENTION)
    asked.clear()
    with torch.autocast("cpu", torch.bfloat16):
        ours(BATCH, safe=None, temperature=1.0)
    assert asked == [(True, 1, None, True)] * 2
