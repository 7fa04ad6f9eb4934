"""What is handed to an engine, whatever a model calls its weights: shared ones, and matrices that are rounded."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dvp.errors import DvpError
from dvp.experiment.training import EngineConfig
from dvp.rollout.layout import read_layout
from dvp.rollout.rounding import round_weight
from dvp.rollout.vllm import VllmEngine, _cache_bytes, _prepared

GPT2 = {"vocab_size": 50, "n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 16}
FALCON = {"vocab_size": 50, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
PHI3 = {**FALCON, "num_key_value_heads": 1, "intermediate_size": 16, "pad_token_id": 0, "bos_token_id": 1}


def write(folder, kind, **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).float()
    model.save_pretrained(folder)
    return model


def sent(model, layout, form="none"):
    return dict(_prepared(model.named_parameters(), form, layout))


def test_a_tied_head_of_any_name_is_sent_too(tmp_path):
    """Under the name of the embedding alone, vLLM's packed head would stay as it was."""
    model = write(tmp_path, "gpt2", **GPT2)
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert torch.equal(sent(model, read_layout(tmp_path))["lm_head.weight"], model.transformer.wte.weight)


def test_an_untied_head_is_sent_once(tmp_path):
    model = write(tmp_path, "gpt2", **GPT2, tie_word_embeddings=False)
    names = [name for name, _ in _prepared(model.named_parameters(), "none", read_layout(tmp_path))]
    assert names == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    ("kind", "options", "prefix", "parts"),
    [
        ("gpt2", GPT2, "transformer.h", ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
        ("phi3", PHI3, "model.layers", ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")),
    ],
)
def test_matrices_are_rounded_by_output(tmp_path, kind, options, prefix, parts):
    """GPT-2 keeps its matrices the other way round, under names without `layers`."""
    model = write(tmp_path, kind, **options)
    rounded = sent(model, read_layout(tmp_path), "int4")
    changed = {name for name, value in model.named_parameters() if not torch.equal(rounded[name], value)}
    assert changed == {f"{prefix}.{layer}.{part}.weight" for layer in (0, 1) for part in parts}
    name = f"{prefix}.1.{parts[-1]}.weight"
    value = model.get_parameter(name)
    assert torch.equal(
        rounded[name], round_weight(value.T, "int4").T if kind == "gpt2" else round_weight(value, "int4")
    )


def test_names_in_files_may_lack_their_beginning(tmp_path):
    """As in the hub's gpt2."""
    model = write(tmp_path, "gpt2", **GPT2)
    short = [(name.removeprefix("transformer."), value) for name, value in model.named_parameters()]
    rounded = dict(_prepared(short, "int4", read_layout(tmp_path)))
    whole = sent(model, read_layout(tmp_path), "int4")
    assert all(torch.equal(rounded[name], whole[f"transformer.{name}"]) for name, _ in short)
    assert "lm_head.weight" in rounded


def test_a_matrix_that_never_comes_is_refused(tmp_path):
    model = write(tmp_path, "gpt2", **GPT2)
    others = [pair for pair in model.named_parameters() if "h.1.mlp.c_fc" not in pair[0]]
    with pytest.raises(DvpError, match=r"^weight_rounding: int4: no weight transformer\.h\.1\.mlp\.c_fc\.weight came"):
        dict(_prepared(others, "int4", read_layout(tmp_path)))


def test_a_model_of_which_no_weight_is_rounded_is_refused(tmp_path, monkeypatch):
    write(tmp_path, "gpt2", **GPT2 | {"n_layer": 0})
    config = EngineConfig(dtype="float32", weight_rounding="int4")
    with pytest.raises(DvpError, match=r"^weight_rounding: int4: .* has no linear layer to round$"):
        VllmEngine(tmp_path, config, max_model_len=8, max_num_seqs=1, seed=0)


@pytest.mark.parametrize(("kind", "options"), [("gpt2", GPT2), ("falcon", FALCON)])
def test_a_cache_has_room_where_no_heads_are_shared(kind, options, tmp_path):
    """Two layers of keys and values of 8 numbers in 4 bytes, for 3 blocks of 128 tokens and an empty one."""
    AutoConfig.for_model(kind, **options).save_pretrained(tmp_path)
    assert _cache_bytes(tmp_path, EngineConfig(dtype="float32"), 3, 16) == 4 * 128 * 2 * 2 * 8 * 4
