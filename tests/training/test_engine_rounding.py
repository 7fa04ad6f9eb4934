"""A forward pass with the engine's own weights, against copies of the model whose weights were rounded one by one."""

import copy

import pytest
import torch
from families import FAMILIES, write_model
from test_loop import TERMS
from transformers import AutoModelForCausalLM

from dvp.experiment.training import EngineConfig
from dvp.training.backend import Policy
from dvp.training.engine_rounding import engine_rounding
from rounding import rounding

TOKENS = torch.tensor([[20, 30, 40, 50, 60, 70]])


@pytest.fixture(params=["Qwen3", "GPT-2", "Falcon"])
def model(request, tmp_path):
    write_model(tmp_path, FAMILIES[request.param])
    return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)


def logits(model):
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


def eight_bits(weight):
    """One scale an output, which is a column of GPT-2's matrices."""
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / step).round() * step


def rounded_by_hand(model, *, matrices):
    """In bf16, with matrices of 8 bits; embedding, head, norms and biases are not."""
    model = copy.deepcopy(model)
    head = model.get_output_embeddings()
    for module in model.modules():
        kind = type(module).__name__
        for name, parameter in module.named_parameters(recurse=False):
            if matrices and kind in ("Linear", "Conv1D", "FalconLinear") and module is not head and name == "weight":
                by_row = parameter.data.T if kind == "Conv1D" else parameter.data
                parameter.data = eight_bits(by_row).T if kind == "Conv1D" else eight_bits(by_row)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


@pytest.mark.parametrize("form", ["none", "int8"])
def test_the_weights_are_the_engines_and_then_the_trainers_again(model, form):
    expected, own = logits(rounded_by_hand(model, matrices=form == "int8")), logits(model)
    before = {name: (value, value.clone()) for name, value in model.state_dict().items()}
    trained = Policy(model).model
    with engine_rounding(trained, EngineConfig(dtype="bfloat16", weight_rounding=form), activations=False):
        found = logits(trained)
    assert torch.allclose(found, expected, rtol=0, atol=rounding(TERMS, expected.abs().max().item()))
    assert (found - own).abs().max() > 1e-3
    assert torch.equal(logits(trained), own)
    for name, (value, copied) in before.items():
        assert torch.equal(value, copied), name


def test_a_pass_that_fails_leaves_the_weights_alone(model):
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(IndexError), engine_rounding(model, EngineConfig(dtype="bfloat16"), activations=False):
        model(TOKENS + 10_000)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_an_engine_in_fp32_has_the_trainers_numbers(model):
    own = logits(model)
    for activations in (False, True):
        with engine_rounding(model, EngineConfig(dtype="float32"), activations=activations):
            assert torch.equal(logits(model), own)


def test_activations_are_rounded_up_to_the_logits(model):
    with engine_rounding(model, EngineConfig(dtype="bfloat16"), activations=True):
        assert torch.equal(logits(model), logits(model).bfloat16().float())
    with engine_rounding(model, EngineConfig(dtype="bfloat16", head_dtype="float32"), activations=True):
        assert (logits(model) != logits(model).bfloat16().float()).any()


@pytest.mark.parametrize(("form", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_keys_and_values_are_cut_to_8_bits(model, monkeypatch, form, dtype):
    """As attention gets them, after rotation, whatever the architecture; toward zero, as vLLM does on a CPU."""
    own, attention = logits(model), torch.nn.functional.scaled_dot_product_attention
    with engine_rounding(model, EngineConfig(dtype="float32", kv_cache_dtype=form), activations=False):
        found = logits(model)
    magnitudes = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    magnitudes = magnitudes[magnitudes.isfinite()]

    def cut(values):
        return values.sign() * magnitudes[torch.searchsorted(magnitudes, values.abs().contiguous(), right=True) - 1]

    def of_cut(query, key, value, *others, **options):
        return attention(query, cut(key), cut(value), *others, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", of_cut)
    expected = logits(model)
    assert torch.allclose(found, expected, rtol=0, atol=rounding(TERMS, expected.abs().max().item()))
    assert (found - own).abs().max() > 1e-3
