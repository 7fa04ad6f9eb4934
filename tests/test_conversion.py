"""Real DeepSpeed checkpoints turned into Hugging Face models, and the refusals."""

import json
import os
import re
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from dvp.conversion import convert as conversion
from dvp.conversion.convert import _check_file, convert, tolerance
from dvp.core.batch import Batch
from dvp.errors import DvpError
from dvp.experiment.training import BF16_AUTOCAST, TrainingConfig
from dvp.files import checksums, read_json, write_json
from dvp.planning import costs
from dvp.planning.costs import Model
from dvp.training import checkpoint
from dvp.training.backend import TAG, Trainer
from dvp.training.probe import Probe, write_probe
from dvp.training.weights import MODEL, WEIGHTS, fingerprint, write_weights

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
    write_probe(folder / "probe.safetensors", trainer, [*PROMPTS, [11]])
    return trainer, path


@pytest.fixture(scope="module", params=[1, 2])
def run(request, tiny_model, root, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"zero{request.param}")
    return *trained(tiny_model, root, folder, request.param), folder


def test_the_converted_model_is_the_trained_one(run, tiny_model, tmp_path):
    trainer, path, folder = run
    proof = convert(path, tiny_model, folder / "probe.safetensors", tmp_path / "model", temperature=1.0)
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
    assert proof["max_abs_delta_log_prob"] <= 1e-5
    batch = Batch.collate([prompt[:1] for prompt in PROMPTS], [prompt[1:] for prompt in PROMPTS], pad=0)
    exact, rounded = trainer.score(batch, None, bf16=False)["log_prob"], trainer.score(batch, None)["log_prob"]
    assert 1e-4 < (exact - rounded).abs().max() < 1


@pytest.mark.parametrize(("device", "moved"), [("cpu", 3e-5), ("cuda", 3e-4)])
def test_a_model_that_scores_differently_is_refused_and_not_left_behind(run, tiny_model, tmp_path, device, moved):
    """What two devices may differ by is more than what one may differ by from itself."""
    _, path, folder = run
    probe = load_file(folder / "probe.safetensors")
    probe["log_prob"][3] += moved / 10
    save_file(probe, tmp_path / "probe.safetensors", metadata={"device": device})
    proof = convert(path, tiny_model, tmp_path / "probe.safetensors", tmp_path / "model", temperature=1.0)
    assert moved / 100 < proof["max_abs_delta_log_prob"] < proof["tolerance"]
    shutil.rmtree(tmp_path / "model")
    probe["log_prob"][3] += moved
    save_file(probe, tmp_path / "probe.safetensors", metadata={"device": device})
    with pytest.raises(DvpError, match=r"scores differently: the log-prob of a token of probe.safetensors differs by"):
        convert(path, tiny_model, tmp_path / "probe.safetensors", tmp_path / "model", temperature=1.0)
    assert not (tmp_path / "model").exists()


def test_the_tolerance_grows_with_the_model_and_holds_what_was_measured_between_two_orders_of_summation():
    """Of 36 layers of width 4,096 with random weights: 6e-4 nats at most, 3e-5 to 9e-5 root mean square."""
    config = Qwen3Config(num_hidden_layers=36, hidden_size=4096)
    allowed = {device: tolerance(config, Probe("", None, None, device)) for device in ("cpu", "cuda")}
    assert 9e-5 < allowed["cpu"] < 6e-4 < allowed["cuda"] < 3e-3


def test_a_weight_that_is_not_the_trainers_is_refused_by_name(copied, run, tiny_model, tmp_path):
    """One bit of a weight, in a checkpoint whose manifest was made to match."""
    file = sorted(copied.rglob("*optim_states.pt"))[0]
    state = torch.load(file, weights_only=False)
    state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data.view(torch.int32)[400 * 64 + 5] ^= 1
    torch.save(state, file)
    (copied / "manifest.json").unlink()
    write_json(copied / "manifest.json", {"files": checksums(copied)})
    name = r"model\.layers\.0\.self_attn\.q_proj\.weight"
    with pytest.raises(DvpError, match=rf"step-000001: its weights are not those .*: parameter '{name}': SHA-256"):
        convert(copied, tiny_model, run[2] / "probe.safetensors", tmp_path / "model", temperature=1.0)
    assert not (tmp_path / "model").exists()


def test_a_layout_that_is_not_deepspeeds_is_refused_in_a_line(copied, run, tiny_model, tmp_path):
    """As another version of DeepSpeed might write."""
    file = sorted(copied.rglob("*optim_states.pt"))[0]
    state = torch.load(file, weights_only=False)
    flat = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    for change, message in (
        (lambda: flat.__setitem__(0, flat[0][:1000].clone()), "RuntimeError: shape '.400, 64.' is invalid"),
        (lambda: state["optimizer_state_dict"].pop("single_partition_of_fp32_groups"), "KeyError: 'single_partition"),
    ):
        change()
        torch.save(state, file)
        (copied / "manifest.json").unlink()
        write_json(copied / "manifest.json", {"files": checksums(copied)})
        with pytest.raises(DvpError, match=rf"deepspeed: not a ZeRO checkpoint as DeepSpeed .*{message}"):
            convert(copied, tiny_model, run[2] / "probe.safetensors", tmp_path / "model", temperature=1.0)


def test_what_is_read_back_is_held_against_what_the_trainer_had(run, tiny_model, tmp_path):
    _, path, folder = run
    convert(path, tiny_model, folder / "probe.safetensors", tmp_path / "model", temperature=1.0)
    expected = json.loads((path / "weights.json").read_text())
    _check_file(tmp_path / "model/model.safetensors", expected)
    content = bytearray((tmp_path / "model/model.safetensors").read_bytes())
    content[-3] ^= 1
    (tmp_path / "model/model.safetensors").write_bytes(content)
    with pytest.raises(DvpError, match=r"not what is read back: parameter 'model.norm.weight': SHA-256"):
        _check_file(tmp_path / "model/model.safetensors", expected)


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


def synthetic_checkpoint(folder, stage, names, size):
    """The files of two ranks that hold the weights, as DeepSpeed writes them, and weights.json; numbers are random."""
    weights = {name: torch.rand(size, 1) for name in names}
    values = list(weights.values())
    if stage == 3:
        flat = [torch.cat([value.flatten()[rank * size // 2 :][: size // 2] for value in values]) for rank in (0, 1)]
        states = [{"fp32_flat_groups": [part]} for part in flat]
    else:
        flat = [part.clone() for part in torch.cat(values).flatten().tensor_split([size * len(names) // 3])]
        paddings = [[0] * len(names)]
        states = [{"single_partition_of_fp32_groups": [part], "param_alignment_paddings": paddings} for part in flat]
    (folder / TAG).mkdir(parents=True)
    shapes = {f"model.{name}": value.shape for name, value in weights.items()}
    torch.save({"param_shapes": [shapes]}, folder / TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    for rank, state in enumerate(states):
        file = folder / TAG / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state | {"zero_stage": stage}}, file)
    write_json(folder / WEIGHTS, {name: fingerprint(value) for name, value in weights.items()})


def memory_of_the_weights(folder, file):
    """Bytes that reading, writing and reading back took at most while a weight was held, files in memory left out."""

    def taken():
        return int(re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    expected, before, peaks = read_json(folder / WEIGHTS), taken(), []

    def watched(value):
        peaks.append(taken() - before)
        return fingerprint(value)

    with patch.object(conversion, "fingerprint", watched):
        write_weights(file, expected, conversion._read(expected, folder))
        conversion._check_file(file, expected)
    assert len(peaks) == 2 * len(expected)
    return max(peaks)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux how much memory this process has")
def test_the_model_is_not_in_memory_while_its_weights_are_read_and_written(tmp_path):
    """Of 256 MiB in 32 weights, in a process of its own; fewer than half of them, as much of what was freed is kept."""
    size = 2 * 2**20
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        for stage in (2, 3):
            folder = tmp_path / f"zero{stage}"
            synthetic_checkpoint(folder, stage, [f"weight_{index}" for index in range(32)], size)
            assert other.submit(memory_of_the_weights, folder, folder / MODEL).result() < 16 * 4 * size


@pytest.fixture
def copied(run, tmp_path):
    shutil.copytree(run[1], tmp_path / "checkpoints/step-000001")
    return tmp_path / "checkpoints/step-000001"


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
