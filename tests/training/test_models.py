"""Models of many layouts: each is right in trainer and engine, or refused in a line that says what it is."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES, write_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3ForSequenceClassification

from dvp.errors import DvpError
from dvp.experiment.training import TrainingConfig
from dvp.training.backend import Trainer
from dvp.training.models import check_model

WORKING = [
    pytest.param(name, marks=[pytest.mark.slow, *([] if family.normal else [pytest.mark.nightly])])
    for name, family in FAMILIES.items()
    if family.refused is None
]
REFUSED = [name for name, family in FAMILIES.items() if family.refused is not None]
EXACT = {"dtype": "float32"}


def compared(model: Path, engine: dict, *left_out: str) -> tuple[list[float], str | None]:
    """How far trainer and engine are apart at first and after an update, in a process of its own; what stopped it."""
    command = [sys.executable, Path(__file__).parent / "family_process.py", model, json.dumps(engine), *left_out]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    found = json.loads(done.stdout.splitlines()[-1])
    return found["apart"], found["said"]


# --- families ---


def test_the_page_lists_the_families_that_are_tried(root):
    lines = (root / "docs/models.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]
    assert {name: outcome for name, _, outcome in rows} == {
        name: "works" if family.refused is None else f"refused: {family.refused}" for name, family in FAMILIES.items()
    }
    assert {name: kind for name, kind, _ in rows} == {name: f"`{each.model_type}`" for name, each in FAMILIES.items()}


@pytest.mark.parametrize("name", WORKING)
def test_a_family_that_works_is_right(name, tmp_path):
    """The engine's log-probs are the trainer's, sampled token by token, at first and after new weights."""
    write_model(tmp_path, FAMILIES[name])
    check_model(tmp_path)
    apart, said = compared(tmp_path, EXACT)
    assert said is None
    assert len(apart) == 2
    assert max(apart) < 2e-5


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_does_not_work_is_refused(name, tmp_path):
    write_model(tmp_path, FAMILIES[name])
    with pytest.raises(DvpError) as raised:
        check_model(tmp_path)
    assert FAMILIES[name].refused in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path))
    assert "\n" not in str(raised.value)


# --- what no list of names tells, and a run sees ---


@pytest.mark.slow
@pytest.mark.nightly
def test_experts_that_new_weights_scramble_are_noticed(tmp_path):
    """Where `base` would let them pass."""
    _, said = compared(write_model(tmp_path, FAMILIES["Qwen3-MoE"]), EXACT)
    assert said is not None
    assert said.startswith("engine and trainer ")
    assert "Qwen3MoeForCausalLM" in said
    assert "\n" not in said


@pytest.mark.slow
@pytest.mark.nightly
def test_a_weight_that_does_not_arrive_is_noticed(tmp_path):
    model = write_model(tmp_path, FAMILIES["Llama"])
    _, said = compared(model, EXACT, "model.layers.1.mlp.down_proj.weight")
    assert said is not None
    assert said.startswith("engine and trainer changed differently with the first new weights, by ")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Qwen3", "GPT-2"])
def test_a_coarse_engine_passes_and_is_coarse(name, tmp_path):
    """Of GPT-2, whose matrices have no names with `layers`, nothing was rounded."""
    apart, said = compared(write_model(tmp_path, FAMILIES[name]), EXACT | {"weight_rounding": "int8"})
    assert said is None
    assert min(apart) > 1e-4


@pytest.mark.slow
def test_recomputation_has_no_dropout(tmp_path, root):
    """GPT-2's default is 0.1, and transformers recomputes in the mode in which dropout acts."""
    model = write_model(tmp_path, FAMILIES["GPT-2"])
    options = json.loads((root / "config/deepspeed/zero1.json").read_text())
    settings = {"steps": 1, "prompts_per_step": 1, "group_size": 1, "tokens_per_micro_batch": 64}
    settings |= {"max_response_tokens": 8, "learning_rate": 1e-3, "deepspeed": "zero1", "checkpoint_every": 1}
    prompts = [[20, 30, 40, 50, 60], [70, 80, 90]]
    trainer = Trainer(model, TrainingConfig(**settings, gradient_checkpointing=True), options, prompts)
    assert trainer.policy.model.training
    assert not [part for part in trainer.policy.modules() if isinstance(part, torch.nn.Dropout) and part.p > 0]


# --- folders ---


@pytest.fixture
def copied(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "model")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(copied):
    edit_config(copied, vocab_size=399)
    with pytest.raises(DvpError, match=r"config.json: vocab_size 399 is too small .* whose largest token id is 399"):
        check_model(copied)


def test_weights_of_another_vocabulary_are_refused(copied):
    weights = load_file(copied / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:-5].clone()
    save_file(weights, copied / "model.safetensors")
    message = r"weight model.embed_tokens.weight is \[395, 64\], but config.json makes it \[400, 64\]$"
    with pytest.raises(DvpError, match=message):
        check_model(copied)


def test_a_vocabulary_padded_beyond_the_tokenizer_is_fine(copied):
    """Qwen3 itself has 151,936 rows for 151,669 tokens."""
    model = AutoModelForCausalLM.from_pretrained(copied)
    model.resize_token_embeddings(448)
    model.save_pretrained(copied)
    check_model(copied)


def test_truncated_weights_are_refused(copied):
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(DvpError, match=r"model.safetensors: not a whole safetensors file"):
        check_model(copied)


def test_an_adapter_beside_a_model_is_refused(copied):
    (copied / "adapter_config.json").write_text("{}")
    with pytest.raises(
        DvpError, match=r"adapter_config.json: an adapter of another model \(PEFT\); expected a whole model"
    ):
        check_model(copied)


def test_an_adapter_in_place_of_a_model_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"lora": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        DvpError, match=r"adapter_config.json: an adapter of another model \(PEFT\); expected a whole model"
    ):
        check_model(tmp_path)


@pytest.fixture
def sharded(copied):
    """The tiny model in several files with an index."""
    model = AutoModelForCausalLM.from_pretrained(copied)
    (copied / "model.safetensors").unlink()
    model.save_pretrained(copied, max_shard_size="100KB")
    return copied


def test_a_model_in_several_files_is_taken(sharded):
    assert len(list(sharded.glob("*.safetensors"))) > 2
    check_model(sharded)


def test_a_missing_shard_is_refused(sharded):
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.unlink()
    with pytest.raises(DvpError, match=rf"model.safetensors.index.json: names {file.name}, which is not there"):
        check_model(sharded)


def test_a_missing_weight_is_refused(copied):
    weights = load_file(copied / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DvpError, match=r"weight model\.layers\.1\.mlp\.up_proj\.weight is not in its files"):
        check_model(copied)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors"])
def test_a_quantised_model_is_refused(copied, method):
    edit_config(copied, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(DvpError, match=rf"quantization_config: its weights are quantised \({method}\)"):
        check_model(copied)


def test_weights_of_8_bits_are_refused_without_a_word(copied):
    """The file says it, where config.json does not."""
    weights = load_file(copied / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DvpError, match=rf"weight {name} is quantised \(F8_E4M3\)"):
        check_model(copied)


def test_a_classifier_is_refused(copied):
    Qwen3ForSequenceClassification.from_pretrained(copied, num_labels=2).save_pretrained(copied)
    with pytest.raises(
        DvpError,
        match=r"architectures: \['Qwen3ForSequenceClassification'\] is no causal .*; expected 'Qwen3ForCausalLM'$",
    ):
        check_model(copied)


def test_a_kind_without_a_language_model_is_refused(copied):
    edit_config(copied, model_type="clip", architectures=["CLIPModel"])
    with pytest.raises(
        DvpError, match=r"architectures: \['CLIPModel'\] is no causal .*; clip has none in transformers$"
    ):
        check_model(copied)


@pytest.mark.parametrize("code", [{}, {"auto_map": {"AutoModelForCausalLM": "own.Model"}}])
def test_an_unknown_architecture_is_refused(copied, code):
    edit_config(copied, model_type="unheard_of", architectures=["UnheardOf"], **code)
    with pytest.raises(DvpError, match=r"model_type 'unheard_of' is none that transformers knows, and the code that"):
        check_model(copied)


def test_a_key_of_the_wrong_type_is_refused_in_a_line(copied):
    edit_config(copied, num_hidden_layers="many")
    with pytest.raises(DvpError) as raised:
        check_model(copied)
    assert "num_hidden_layers" in str(raised.value)
    assert "\n" not in str(raised.value)
