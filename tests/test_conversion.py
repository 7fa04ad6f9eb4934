"""Weights of a real trainer turned into a Hugging Face model, and the refusals."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from dvp.conversion import _kept, tolerance, write_model
from dvp.core.batch import Batch
from dvp.errors import DvpError
from dvp.experiment.training import BF16_AUTOCAST, TrainingConfig
from dvp.files import checksums, write_json
from dvp.planning import costs
from dvp.planning.costs import Model
from dvp.training import checkpoint
from dvp.training.backend import Trainer
from dvp.training.checkpoint import MANIFEST, MODEL, PROBE

pytestmark = pytest.mark.slow
PROMPTS = [[20, 30, 40, 50, 60], [7, 8, 9], list(range(10, 40)), [11]]


def trained(tiny_model, root, folder, stage, **options):
    """A trainer after one real update, and its weights. `options` are more of DeepSpeed's."""
    settings = TrainingConfig(
        steps=1,
        prompts_per_step=1,
        group_size=2,
        tokens_per_micro_batch=32,
        learning_rate=1e-2,
        max_response_tokens=8,
        deepspeed=f"zero{stage}",
        checkpoint_every=1,
    )
    options |= json.loads((root / f"config/deepspeed/zero{stage}.json").read_text())
    trainer = Trainer(tiny_model, settings, options)
    batch = Batch.collate([[20, 30], [40]], [[50, 60], [70, 80, 90]], pad=1)
    trainer.forward_backward(batch, None, lambda statistics: -statistics.log_prob.mean(), last=True)
    return trainer, checkpoint.keep_weights(folder, 1, trainer, PROMPTS)


@pytest.fixture(scope="module")
def run(tiny_model, root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer, kept = trained(tiny_model, root, folder, 2)
    (folder / "metrics.jsonl").write_text("{}\n")
    return trainer, kept, checkpoint.Saving(folder, 1, trainer, [folder / "metrics.jsonl"]).finish()


def test_the_converted_model_is_the_trained_one(run, tiny_model, tmp_path):
    trainer, kept, _ = run
    proof = write_model(kept, tiny_model, tmp_path / "model", temperature=1.0)
    assert proof["max_abs_delta_log_prob"] <= proof["tolerance"] < 1e-5
    assert proof["identical_weights"] == len(list(trainer.weights())) == 24
    assert proof["devices"] == {"trained": "cpu", "converted": "cpu"}
    assert proof["tokens_scored"] == sum(len(prompt) - 1 for prompt in PROMPTS) + 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for name, value in trainer.weights():
        assert torch.equal(model.get_parameter(name), value)
    assert not torch.equal(model.model.embed_tokens.weight, before.model.embed_tokens.weight)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == len(AutoTokenizer.from_pretrained(tiny_model))
    # Weights take their space once; the model can be made again, beside those of other steps.
    assert os.path.samefile(kept / MODEL, tmp_path / "model" / MODEL)
    (tmp_path / "model/step~3").mkdir()
    (tmp_path / "model/stale.txt").touch()
    assert write_model(kept, tiny_model, tmp_path / "model", temperature=1.0) == proof
    assert set(proof["files"]) == {file.name for file in (tmp_path / "model").iterdir()} - {"step~3"}


def test_a_checkpoint_is_as_large_as_the_plan_says(run):
    trainer, _, path = run
    model = Model(64, 2, 2, 1, 32, 96, True, 400)
    written = sum(file.stat().st_size for file in path.rglob("*.pt"))
    assert written == pytest.approx(costs.checkpoint_bytes(model, trainer._engine.zero_optimization_stage()), rel=0.05)


def test_a_trainer_that_multiplies_in_bf16_is_held_to_the_same_proof(tiny_model, root, tmp_path):
    """The weights are fp32: the trainer scores the probe without its autocast."""
    trainer, kept = trained(tiny_model, root, tmp_path, 2, torch_autocast=BF16_AUTOCAST)
    proof = write_model(kept, tiny_model, tmp_path / "model", temperature=1.0)
    assert proof["max_abs_delta_log_prob"] <= 1e-5
    batch = Batch.collate([prompt[:1] for prompt in PROMPTS[:3]], [prompt[1:] for prompt in PROMPTS[:3]], pad=0)
    exact, rounded = trainer.score(batch, None, bf16=False)["log_prob"], trainer.score(batch, None)["log_prob"]
    assert 1e-4 < (exact - rounded).abs().max() < 1


@pytest.mark.parametrize(("device", "moved"), [("cpu", 3e-5), ("cuda", 3e-4)])
def test_a_model_that_scores_differently_is_refused(run, tiny_model, tmp_path, device, moved):
    """And not left behind. What two devices may differ by is more than what one may differ by from itself."""
    kept = shutil.copytree(run[1], tmp_path / run[1].parent.name / run[1].name)

    def move(by):
        probe = load_file(kept / PROBE)
        probe["log_prob"][3] += by
        save_file(probe, kept / PROBE, metadata={"device": device})
        (kept / MANIFEST).unlink()
        write_json(kept / MANIFEST, {"files": checksums(kept)})

    move(moved / 10)
    proof = write_model(kept, tiny_model, tmp_path / "model", temperature=1.0)
    assert moved / 100 < proof["max_abs_delta_log_prob"] < proof["tolerance"]
    shutil.rmtree(tmp_path / "model")
    move(moved)
    with pytest.raises(DvpError, match=r"scores differently: the log-prob of a token of probe.safetensors differs by"):
        write_model(kept, tiny_model, tmp_path / "model", temperature=1.0)
    assert not (tmp_path / "model").exists()


def test_the_tolerance_is_between_what_was_measured():
    """Of two orders of summation, 36 layers of width 4,096, random weights: 3e-5 to 9e-5 rms, 6e-4 at most."""
    config = Qwen3Config(num_hidden_layers=36, hidden_size=4096)
    allowed = {device: tolerance(config, device) for device in ("cpu", "cuda")}
    assert 9e-5 < allowed["cpu"] < 6e-4 < allowed["cuda"] < 3e-3


def test_an_altered_weight_is_named(run, tiny_model, tmp_path):
    kept = shutil.copytree(run[1], tmp_path / run[1].name)
    data = bytearray((kept / MODEL).read_bytes())
    data[-1] ^= 1
    (kept / MODEL).write_bytes(data)
    with pytest.raises(DvpError, match=r"model.safetensors: altered since it was written"):
        write_model(kept, tiny_model, tmp_path / "model", temperature=1.0)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("layers", [1, 3])
def test_a_base_of_another_shape_is_refused(run, tiny_model, tmp_path, layers):
    _, kept, _ = run
    shutil.copytree(tiny_model, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.config.num_hidden_layers = layers
    model.config.layer_types = ["full_attention"] * layers
    type(model)(model.config).save_pretrained(tmp_path / "base")
    with pytest.raises(DvpError, match=rf"parameter 'model.layers.{min(layers, 2)}.* does not fit the base model"):
        write_model(kept, tmp_path / "base", tmp_path / "model", temperature=1.0)


def test_weights_that_were_not_kept_are_named(tmp_path):
    write_json(tmp_path / "train.json", {"steps": 4, "kept": {"1": "weights"}})
    with pytest.raises(DvpError, match=r"train\.json: the weights after step 4 were not kept; `dvp train` writes"):
        _kept(tmp_path / "train.json", None)
