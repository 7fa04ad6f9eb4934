"""Real DeepSpeed checkpoints turned into Hugging Face models, and the refusals."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dvp.conversion.convert import convert
from dvp.core.batch import Batch
from dvp.errors import DvpError
from dvp.experiment.training import BF16_AUTOCAST, TrainingConfig
from dvp.files import checksums, write_json
from dvp.planning import costs
from dvp.planning.costs import Model
from dvp.training import checkpoint
from dvp.training.backend import Trainer
from dvp.training.probe import write_probe

pytestmark = pytest.mark.slow
PROMPTS = [[20, 30, 40, 50, 60], [7, 8, 9], list(range(10, 40))]


def trained(tiny_model, root, folder, stage, **options):
    """A trainer after one real update, its checkpoint, and its probe. `options` are more of DeepSpeed's."""
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
    (folder / "metrics.jsonl").write_text("{}\n")
    path = checkpoint.save(folder / "checkpoints", 1, trainer, [folder / "metrics.jsonl"], keep=1)
    write_probe(folder / "probe.safetensors", trainer, PROMPTS)
    return trainer, path


@pytest.fixture(scope="module", params=[1, 2])
def run(request, tiny_model, root, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"zero{request.param}")
    return *trained(tiny_model, root, folder, request.param), folder


def test_the_converted_model_is_the_trained_one(run, tiny_model, tmp_path):
    trainer, path, folder = run
    proof = convert(path, tiny_model, folder / "probe.safetensors", tmp_path / "model", temperature=1.0)
    assert proof["max_abs_delta_log_prob"] <= 1e-5
    assert proof["max_abs_delta_log_prob_live"] <= 1e-5
    assert proof["tokens_scored"] == sum(len(prompt) - 1 for prompt in PROMPTS)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for name, value in trainer.weights():
        assert torch.equal(model.get_parameter(name), value)
    assert not torch.equal(model.model.embed_tokens.weight, before.model.embed_tokens.weight)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (tmp_path / "model/model.safetensors").is_file()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == len(AutoTokenizer.from_pretrained(tiny_model))


def test_a_checkpoint_is_as_large_as_the_plan_says(run):
    trainer, path, _ = run
    model = Model(64, 2, 2, 1, 32, 96, True, 400)
    written = sum(file.stat().st_size for file in path.rglob("*.pt"))
    assert written == pytest.approx(costs.checkpoint_bytes(model, trainer._engine.zero_optimization_stage()), rel=0.05)


def test_a_trainer_that_multiplies_in_bf16_is_held_to_the_same_proof(tiny_model, root, tmp_path):
    """The proof is about weights, which are fp32: the trainer scores the probe without its autocast."""
    trainer, path = trained(tiny_model, root, tmp_path, 2, torch_autocast=BF16_AUTOCAST)
    proof = convert(path, tiny_model, tmp_path / "probe.safetensors", tmp_path / "model", temperature=1.0)
    assert proof["max_abs_delta_log_prob_live"] <= 1e-5
    batch = Batch.collate([prompt[:1] for prompt in PROMPTS], [prompt[1:] for prompt in PROMPTS], pad=0)
    exact, rounded = trainer.score(batch, None, bf16=False)["log_prob"], trainer.score(batch, None)["log_prob"]
    assert 1e-4 < (exact - rounded).abs().max() < 1


def test_a_model_that_scores_differently_is_refused_and_not_left_behind(run, tiny_model, tmp_path):
    _, path, folder = run
    probe = load_file(folder / "probe.safetensors")
    probe["log_prob"][3] += 3e-5
    save_file(probe, tmp_path / "probe.safetensors")
    with pytest.raises(DvpError, match=r"the converted model differs: max_abs_delta_log_prob_live is .*at most 1e-05"):
        convert(path, tiny_model, tmp_path / "probe.safetensors", tmp_path / "model", temperature=1.0)
    assert not (tmp_path / "model").exists()


def test_a_base_of_another_shape_is_refused(run, tiny_model, tmp_path):
    _, path, folder = run
    shutil.copytree(tiny_model, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.config.num_hidden_layers = 1
    model.config.layer_types = model.config.layer_types[:1]
    smaller = type(model)(model.config)
    smaller.save_pretrained(tmp_path / "base")
    with pytest.raises(DvpError, match=r"parameter 'model.layers.1.* does not fit the base model"):
        convert(path, tmp_path / "base", folder / "probe.safetensors", tmp_path / "model", temperature=1.0)


@pytest.fixture
def copied(run, tmp_path):
    shutil.copytree(run[1], tmp_path / "step-000001")
    return tmp_path / "step-000001"


@pytest.mark.parametrize("pattern", ["*model_states.pt", "*optim_states.pt", "state.json"])
def test_a_missing_or_altered_file_is_named(copied, pattern):
    file = next(copied.rglob(pattern))
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(DvpError, match=f"{file.name}: altered"):
        checkpoint.verify(copied)
    file.unlink()
    with pytest.raises(DvpError, match=f"{file.name}: missing"):
        checkpoint.verify(copied)
    assert copied.is_dir()


class Evil:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_posing_as_a_checkpoint_is_refused_and_never_run(copied, tmp_path):
    """Even with a manifest that matches it."""
    torch.save({"module": Evil(str(tmp_path / "executed"))}, next(copied.rglob("*model_states.pt")))
    (copied / "manifest.json").unlink()
    write_json(copied / "manifest.json", {"files": checksums(copied)})
    with pytest.raises(DvpError, match=r"model_states.pt: refuses to be loaded: it would call posix.mkdir"):
        checkpoint.verify(copied)
    assert not (tmp_path / "executed").exists()


def test_a_file_that_the_manifest_does_not_list_is_refused(copied):
    torch.save({}, copied / "deepspeed" / "extra.pt")
    with pytest.raises(DvpError, match=r"extra.pt: not listed"):
        checkpoint.verify(copied)
