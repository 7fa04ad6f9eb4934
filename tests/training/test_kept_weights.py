"""Weights of single steps, kept for their evaluation: which, whatever happens to the run; what is made of them."""
# ruff: noqa: F811 (a fixture of another module is an argument here)

import os

import pytest
import torch
from test_loop import make_loop  # noqa: F401
from transformers import AutoModelForCausalLM

from dvp.conversion.convert import convert
from dvp.conversion.stage import _trained
from dvp.errors import DvpError
from dvp.files import read_json, write_json
from dvp.training import checkpoint
from dvp.training.loop import run_loop
from dvp.training.probe import PROBE
from dvp.training.weights import MODEL, WEIGHTS, fingerprints

pytestmark = pytest.mark.slow


def train(make_loop, folder, kept, on_step=lambda row: None, **settings):
    loop = make_loop(**({"checkpoint_every": 2, "keep_checkpoints": 1} | settings))
    loop.kept = kept
    run_loop(loop, folder, folder / "checkpoints", on_step)
    return loop


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def contents(folder, step):
    kept = checkpoint.kept_weights(folder / "checkpoints", step)
    return {path.name: path.read_bytes() for path in kept.iterdir()}


def test_the_asked_steps_are_kept_and_checkpoints_go_as_ever(make_loop, tmp_path):
    """Also a step that has no checkpoint, and one whose checkpoint is deleted; and the run is the same."""
    kept, plain = train(make_loop, tmp_path, [1, 2]), train(make_loop, tmp_path / "plain", [])
    assert fingerprints(kept.trainer) == fingerprints(plain.trainer)
    assert names(tmp_path) == ["step-000004", "weights-000001", "weights-000002"]
    for step in (1, 2):
        path = checkpoint.kept_weights(tmp_path / "checkpoints", step)
        assert checkpoint.verify(path) == {"step": step, "ranks": 1, "fingerprint": "checkpoints"}
        assert {file.name for file in path.iterdir()} == {MODEL, WEIGHTS, PROBE, "state.json", "manifest.json"}


def test_a_step_converts_to_the_model_of_a_run_that_ended_there(make_loop, tiny_model, tmp_path):
    whole = train(make_loop, tmp_path / "long", [3])
    short = train(make_loop, tmp_path / "short", [], steps=3)
    kept = checkpoint.kept_weights(tmp_path / "long/checkpoints", 3)
    models = tmp_path / "models"
    convert(checkpoint.checkpoints(tmp_path / "long/checkpoints")[-1], tiny_model, _probe(whole, tmp_path), models, 1.0)
    proof = convert(kept, tiny_model, kept / PROBE, models / "step~3", temperature=1.0)
    assert proof["max_abs_delta_log_prob"] <= proof["tolerance"]
    model = AutoModelForCausalLM.from_pretrained(models / "step~3", dtype=torch.float32)
    for name, value in short.trainer.weights():
        assert torch.equal(model.get_parameter(name), value)
    assert read_json(kept / WEIGHTS) == fingerprints(short.trainer)[0] != fingerprints(whole.trainer)[0]
    # The same bytes on the disk, as if written a moment ago.
    assert os.path.samefile(kept / MODEL, models / "step~3" / MODEL)
    # The whole run's model beside it can be made again at any time.
    last = checkpoint.checkpoints(tmp_path / "long/checkpoints")[-1]
    (models / "stale.txt").touch()
    again = convert(last, tiny_model, tmp_path / PROBE, models, temperature=1.0)
    assert set(again["files"]) == {file.name for file in models.iterdir()} - {"step~3"}
    assert (models / "step~3" / MODEL).is_file()
    # Where it was deleted, it is made again from what training kept.
    (models / "step~3" / MODEL).unlink()
    assert convert(kept, tiny_model, kept / PROBE, models / "step~3", temperature=1.0) == proof


def _probe(loop, folder):
    from dvp.training.probe import write_probe

    write_probe(folder / PROBE, loop.trainer, loop.problems.prompts)
    return folder / PROBE


@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_run_that_was_cut_off_keeps_the_same_weights(make_loop, tmp_path, last):
    """Killed after a step: before it was kept, after that but before its checkpoint, after both."""
    train(make_loop, tmp_path / "whole", [1, 3])

    def stop(row):
        if row["step"] == last:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(make_loop, tmp_path / "cut", [1, 3], stop)
    train(make_loop, tmp_path / "cut", [1, 3])
    assert names(tmp_path / "cut") == names(tmp_path / "whole")
    for step in (1, 3):
        assert contents(tmp_path / "cut", step) == contents(tmp_path / "whole", step)


def test_weights_that_are_missing_are_no_silent_hole(make_loop, tmp_path):
    train(make_loop, tmp_path, [1])
    kept = checkpoint.kept_weights(tmp_path / "checkpoints", 1)
    before = names(tmp_path)
    for file in kept.iterdir():
        file.unlink()
    kept.rmdir()
    with pytest.raises(
        DvpError, match=r"weights-000001: missing, although the run was trained beyond this step; to tr"
    ):
        train(make_loop, tmp_path, [1])
    assert names(tmp_path) == [name for name in before if name != kept.name]


def test_a_training_that_did_not_keep_a_step_is_named(tmp_path):
    write_json(tmp_path / "train.json", {"checkpoint": "checkpoints/0123/step-000004", "kept": {"1": "weights"}})
    with pytest.raises(DvpError, match=r"train.json: the weights after step 3 were not kept; train the run again"):
        _trained(tmp_path / "train.json", 3)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (None, "kept: expected an object, found null"),
        (["weights"], "kept: expected an object, found ['weights']"),
        ({"1": None}, "kept.1: expected a text, found null"),
        ({"3": 3}, "kept.3: expected a text, found 3"),
    ],
)
def test_what_does_not_say_where_the_weights_are_is_named(tmp_path, kept, message):
    write_json(tmp_path / "train.json", {"checkpoint": "checkpoints/0123/step-000004", "kept": kept})
    with pytest.raises(DvpError) as error:
        _trained(tmp_path / "train.json", 3)
    assert str(error.value) == f"{tmp_path}/train.json: {message}"


def test_an_altered_weight_is_named(make_loop, tiny_model, tmp_path):
    train(make_loop, tmp_path, [1], steps=2)
    kept = checkpoint.kept_weights(tmp_path / "checkpoints", 1)
    data = bytearray((kept / MODEL).read_bytes())
    data[-1] ^= 1
    (kept / MODEL).write_bytes(data)
    with pytest.raises(DvpError, match=r"model.safetensors: altered since it was written"):
        convert(kept, tiny_model, kept / PROBE, tmp_path / "model", temperature=1.0)
    assert not (tmp_path / "model").exists()


def test_weights_that_are_not_finite_are_not_kept(make_loop, tmp_path):
    loop = make_loop()
    loop.kept = [1]

    def harm(row):
        next(iter(loop.trainer.weights()))[1].fill_(torch.nan)

    with pytest.raises(DvpError, match="step 1: its update left weights that are not finite"):
        run_loop(loop, tmp_path, tmp_path / "checkpoints", harm)
    assert not (tmp_path / "checkpoints").exists()
