"""Models of many layouts: each is right in trainer and engine, or refused in a line that says what it is."""

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from families import FAMILIES, write_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3ForSequenceClassification
from transformers.modeling_layers import GradientCheckpointingLayer

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


# --- families ---


def test_the_page_lists_the_families_that_are_tried(root):
    page = (root / "docs/your_model.md").read_text(encoding="utf-8").partition("## Which models")[2]
    works = re.search(r"These work .*?: (.*?)\.\n", page, re.DOTALL)[1]
    assert " ".join(works.split()).split(", ") == [name for name in FAMILIES if name not in REFUSED]
    rows = re.findall(r"^\| (.*?) \|", page, re.MULTILINE)[1:]
    assert sorted(name for row in rows for name in row.split(", ")) == sorted(REFUSED)


@pytest.mark.parametrize("name", WORKING)
def test_a_family_that_works_is_right(name, tmp_path):
    """The engine's log-probs are the trainer's, sampled token by token, at first and after new weights."""
    write_model(tmp_path, FAMILIES[name])
    check_model(tmp_path)
    command = [sys.executable, Path(__file__).parent / "family_process.py", tmp_path]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    apart = json.loads(done.stdout.splitlines()[-1])
    assert len(apart) == 2
    assert max(apart) < 2e-5


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.refused is None])
def test_the_layers_of_a_family_are_gathered_whole(name, tmp_path):
    """By ZeRO-3, which is told so by their class."""
    write_model(tmp_path, FAMILIES[name])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    assert [type(layer).__name__ for layer in layers] == [*model._no_split_modules] * model.config.num_hidden_layers


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_does_not_work_is_refused(name, tmp_path):
    write_model(tmp_path, FAMILIES[name])
    with pytest.raises(DvpError) as raised:
        check_model(tmp_path)
    assert FAMILIES[name].refused in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path))
    assert "\n" not in str(raised.value)


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


def edit_weight(folder, name, change):
    weights = load_file(folder / "model.safetensors")
    weights[name] = change(weights[name])
    kept = {name: value for name, value in weights.items() if value is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def as_classifier(folder):
    Qwen3ForSequenceClassification.from_pretrained(folder, num_labels=2).save_pretrained(folder)


EMBEDDING, MATRIX = "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"
FOLDERS = {
    "in several files": (shard, None),
    "vocabulary": (
        partial(edit_config, vocab_size=399),
        "vocab_size 399 is too small .* whose largest token id is 399",
    ),
    "rows": (
        lambda folder: edit_weight(folder, EMBEDDING, lambda value: value[:-5].clone()),
        rf"weight {EMBEDDING} is \[395, 64\], but config.json makes it \[400, 64\]$",
    ),
    "truncated": (truncate, "model.safetensors: not a whole safetensors file"),
    "adapter": (
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
        "not a Hugging Face model directory: no config.json, which an adapter has not",
    ),
    "missing weight": (
        lambda folder: edit_weight(folder, MATRIX, lambda value: None),
        f"weight {MATRIX} is not in its files",
    ),
    "quantised": (
        partial(edit_config, quantization_config={"quant_method": "gptq", "bits": 4}),
        r"quantization_config: its weights are quantised \(gptq\)",
    ),
    "8 bits": (
        lambda folder: edit_weight(folder, MATRIX, lambda value: value.to(torch.float8_e4m3fn)),
        rf"weight {MATRIX} is quantised \(F8_E4M3\)",
    ),
    "classifier": (
        as_classifier,
        r"architectures: \['Qwen3ForSequenceClassification'\] is no causal .*'Qwen3ForCausalLM'$",
    ),
    "type of a key": (partial(edit_config, num_hidden_layers="many"), "num_hidden_layers"),
}


@pytest.mark.parametrize(("change", "message"), FOLDERS.values(), ids=FOLDERS)
def test_a_folder_is_taken_or_refused_in_a_line(copied, change, message):
    change(copied)
    if message is None:
        check_model(copied)
        return
    with pytest.raises(DvpError, match=message) as raised:
        check_model(copied)
    assert str(raised.value).startswith(str(copied))
    assert "\n" not in str(raised.value)
