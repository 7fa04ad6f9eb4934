"""What a training run survives, and what it says where it cannot: signals, damaged checkpoints, a full disk, errors.

The engine is scripted and lives in this process; tests/pipeline/test_bad_night.py kills the real thing.
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import threading
from dataclasses import replace
from enum import Enum
from pathlib import Path

import pytest
import torch
from test_loop import ScriptedEngine, rows

from dvp import files
from dvp.errors import DvpError, Stopped
from dvp.files import checksums
from dvp.training import checkpoint, ranks
from dvp.training.backend import _on_host
from dvp.training.loop import run_loop
from dvp.training.responses import RESPONSES, read_responses

pytestmark = pytest.mark.slow
WORK = {"settings": "aaa", "data": {"train.parquet": "d"}, "base": {"model.safetensors": "b"}}


def train(loop, folder: Path, on_step=lambda row: None):
    return run_loop(loop, folder, folder / "checkpoints", on_step)


def weights(loop) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in loop.trainer.weights()}


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def tell(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def on_call(monkeypatch, owner, name: str, number: int, act=tell) -> None:
    """Call `act` at the beginning of the n-th call of a method."""
    original, calls = getattr(owner, name), 0

    def method(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, method)


def rollout_of(step: int, synchronise_every: int = 1) -> int:
    """The call of the engine that samples for a step: others come at the start and after the first new weights."""
    return step + 1 + (step > synchronise_every)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    return tmp_path_factory.mktemp("whole"), {}


@pytest.fixture
def whole(make_loop, whole_run, tmp_path, monkeypatch):
    """A copy of the run that nothing happened to, with two checkpoints: its folder and its weights."""
    folder, known = whole_run
    if not known:
        monkeypatch.setattr(checkpoint, "KEEP_CHECKPOINTS", 2)  # one to go back to
        loop = make_loop()
        train(loop, folder)
        known |= weights(loop)
    return shutil.copytree(folder, tmp_path / "whole"), known


# --- signals ---


MOMENTS = {
    # What is called, the call in which the signal arrives, the step that is finished by then.
    "rollout": ("engine", "generate", rollout_of(2), 1, signal.SIGTERM),
    "slurm's warning": ("engine", "generate", rollout_of(3), 2, signal.SIGUSR1),
    "comparison with the trainer": ("engine", "generate", rollout_of(1) + 1, 1, signal.SIGTERM),
    "update": ("trainer", "forward_backward", 5, 3, signal.SIGTERM),
    "checkpoint": ("trainer", "parts", 1, 2, signal.SIGTERM),
}


@pytest.mark.parametrize(("part", "method", "call", "after", "number"), MOMENTS.values(), ids=MOMENTS)
def test_a_signal_saves_the_last_whole_step_and_leaves(
    make_loop, tmp_path, monkeypatch, whole, part, method, call, after, number
):
    """A rollout is given up, an update is finished; the checkpoint off the grid changes nothing in the end."""
    stopped, folder = make_loop(), tmp_path / "stopped"
    # A nervous scheduler that tells it twice changes nothing.
    on_call(monkeypatch, getattr(stopped, part), method, call, lambda: [tell(number) for _ in range(2)])
    with pytest.raises(
        Stopped, match=f"^stopped by {number.name} after step {after}; run again to continue$"
    ) as raised:
        train(stopped, folder)
    assert raised.value.code == 128 + number
    assert [row["step"] for row in rows(folder)] == list(range(1, after + 1))
    if after:
        assert checkpoint.checkpoints(folder / "checkpoints")[-1].name == f"step-{after:06d}"
    assert signal.getsignal(number) is signal.SIG_DFL
    resumed, seen = make_loop(), []
    train(resumed, folder, lambda row: seen.append(row["step"]))
    assert seen == [1, 2, 3, 4]
    assert rows(folder) == rows(whole[0])
    assert same(weights(resumed), whole[1])


def test_a_run_says_whether_there_is_time_to_leave(make_loop, tmp_path, capsys):
    """When it knows, and when that changes; a checkpoint may take as long as the longest has."""
    loop = make_loop()
    loop.stop.seconds = 600
    train(loop, tmp_path)
    first = [line for line in capsys.readouterr().err.splitlines() if "scheduler" in line]
    assert len(first) == 1  # of two checkpoints
    assert first[0].startswith("finishing a step takes up to ")
    for seconds, expected in ((500, ""), (400, "warning: finishing a step takes up to 101 s and a checkpoint 500 s; ")):
        loop.stop.saved(seconds, 90 if seconds == 500 else 101)
        said = capsys.readouterr().err
        assert said.startswith(expected)
        assert said.endswith("ask for stop_seconds: 780\n" if expected else "")


def test_between_two_updates_of_a_stale_engine_nothing_is_saved(make_loop, tmp_path, monkeypatch):
    """The engine has the weights of step 2, the trainer those of step 3: no checkpoint holds both."""
    loop = make_loop(synchronise_every=2)
    on_call(monkeypatch, loop.engine, "generate", rollout_of(4, synchronise_every=2))
    with pytest.raises(Stopped, match="stopped by SIGTERM after step 3; run again to continue from step 2"):
        train(loop, tmp_path)
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "checkpoints")] == ["step-000002"]


def test_workers_that_die_of_the_signal_are_part_of_the_stop(make_loop, tmp_path, monkeypatch):
    loop = make_loop()

    def die():
        with contextlib.suppress(BaseException):
            tell()
        raise RuntimeError("worker died")

    on_call(monkeypatch, loop.engine, "generate", rollout_of(2), die)
    with pytest.raises(Stopped, match="after step 1"):
        train(loop, tmp_path)


# --- a checkpoint that is being written ---


@pytest.fixture
def held_back(monkeypatch) -> threading.Event:
    """What is written of a checkpoint waits for this."""
    write, may = checkpoint._write_parts, threading.Event()

    def later(parts):
        assert may.wait(60)
        return write(parts)

    monkeypatch.setattr(checkpoint, "_write_parts", later)
    return may


def test_training_goes_on_while_a_checkpoint_is_written(make_loop, tmp_path, monkeypatch, whole, held_back):
    """It holds what the weights and the optimiser were before the next step, to the byte."""
    loop = make_loop()
    monkeypatch.setattr(checkpoint, "KEEP_CHECKPOINTS", 2)
    on_call(monkeypatch, loop.engine, "load_weights", 4, held_back.set)  # after the update of step 3
    train(loop, tmp_path / "run")
    assert held_back.is_set()
    for file in sorted((whole[0] / "checkpoints/step-000002").rglob("*.pt")):
        other = tmp_path / "run" / file.relative_to(whole[0])
        assert other.read_bytes() == file.read_bytes(), file.name
    assert rows(tmp_path / "run") == rows(whole[0])


@pytest.mark.parametrize("end", [Stopped, DvpError])
def test_a_run_that_ends_waits_for_its_checkpoint(make_loop, tmp_path, monkeypatch, held_back, end):
    loop = make_loop()

    def act():
        threading.Timer(0.5, held_back.set).start()
        if end is DvpError:
            raise RuntimeError("EngineCore died")
        tell()

    on_call(monkeypatch, loop.engine, "generate", rollout_of(3), act)
    with pytest.raises(end):
        train(loop, tmp_path)
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "checkpoints")] == ["step-000002"]
    checkpoint.verify(tmp_path / "checkpoints/step-000002")


# --- damaged checkpoints ---


def _flip(folder: Path) -> str:
    file = next(folder.rglob("*model_states.pt"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return f"{file}: altered since it was written"


def _other_settings(folder: Path) -> str:
    """Whole in itself, but written for another run and moved here."""
    state = folder / "state.json"
    state.write_text(state.read_text().replace("checkpoints", "elsewhere"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["state.json"] = checksums(folder)["state.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return f"{folder}: a checkpoint of other settings or data (elsewhere)"


@pytest.mark.parametrize("damage", [_flip, _other_settings])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(make_loop, whole, damage, capfd):
    folder, expected = whole
    before = rows(folder)
    newest = folder / "checkpoints/step-000004"
    problem = damage(newest)
    resumed, seen = make_loop(), []
    train(resumed, folder, lambda row: seen.append((row["step"], newest.is_dir())))
    (warning,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert warning.startswith(f"warning: {problem}")
    assert warning.endswith("; going back to step-000002")
    assert seen == [(1, False), (2, False), (3, False), (4, False)]
    assert rows(folder) == before
    assert same(weights(resumed), expected)
    # The damaged one was set aside, and went when a whole one had been written.
    assert checkpoint.checkpoints(folder / "checkpoints")[-1] == newest
    assert not list((folder / "checkpoints").glob("*.damaged"))


def test_each_rank_verifies_its_own_files(tmp_path, monkeypatch):
    """Of two ranks; together they leave none out, and what one finds damaged is damaged for both."""
    path, hashed = tmp_path / "step-000002", []
    (path / "deepspeed").mkdir(parents=True)
    own = [[f"zero_pp_rank_{rank}_mp_rank_00_{part}_states.pt" for part in ("model", "optim")] for rank in (0, 1)]
    for name in own[0] + own[1]:
        torch.save({}, path / "deepspeed" / name)
    for name, value in {
        "state.json": {"step": 2, "ranks": 2, "fingerprint": tmp_path.name},
        "metrics.jsonl": {},
    }.items():
        (path / name).write_text(json.dumps(value))
    (path / "manifest.json").write_text(json.dumps({"files": checksums(path)}))
    monkeypatch.setattr(
        files, "sha256_file", lambda file, real=files.sha256_file: hashed.append(file.name) or real(file)
    )
    monkeypatch.setattr(ranks, "count", lambda: 2)
    for rank, names in enumerate((["metrics.jsonl", "state.json", *own[0]], own[1])):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        assert checkpoint._verified(path)["step"] == 2
        assert sorted(hashed) == names
        hashed.clear()
    (path / "deepspeed" / own[1][1]).write_bytes(b"")
    monkeypatch.setattr(ranks, "gather", lambda value: [value] * 2)
    with pytest.raises(DvpError, match=r"no checkpoint is intact.*pp_rank_1_mp_rank_00_optim_states\.pt: altered"):
        checkpoint.restore(tmp_path, None)


def test_where_all_are_damaged_training_refuses_and_nothing_is_deleted(make_loop, whole):
    folder, _ = whole
    for path in checkpoint.checkpoints(folder / "checkpoints"):
        _flip(path)
    before = checksums(folder)
    message = r"checkpoints: no checkpoint is intact, nothing was deleted.*step-000004.*altered.*step-000002.*altered"
    with pytest.raises(DvpError, match=message):
        train(make_loop(), folder)
    assert checksums(folder) == before


# --- checkpoints of other work ---


def test_checkpoints_of_other_work_are_named_and_left(make_loop, tmp_path, capsys):
    def folder(**changes):
        found = checkpoint.folder_of(tmp_path / "checkpoints", **(WORK | changes))
        return found, capsys.readouterr().err

    first, said = folder()
    assert said == ""  # a folder without a checkpoint is not worth a word
    run_loop(make_loop(steps=2), tmp_path, first, lambda row: None)
    capsys.readouterr()
    assert folder() == (first, "")
    line = f"{first}/step-000002 is not continued: it differs in {{}}\n"
    assert folder(settings="bbb")[1] == line.format("settings")
    assert folder(settings="bbb", data={}, base={})[1] == line.format("settings, data, base model")
    assert len(checkpoint.checkpoints(first)) == 1


# --- a full disk ---


def test_a_full_disk_ends_training_in_a_line_and_the_old_checkpoint_goes_on(make_loop, tmp_path, whole):
    """Python ignores SIGXFSZ, so that writing beyond the limit fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = tmp_path / "run"

    def fill(row):
        if row["step"] == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, hard))

    loop = make_loop()
    loop.kept = []
    try:
        with pytest.raises(DvpError, match=rf"^{folder}/checkpoints/step-000004: the checkpoint cannot .*MiB free"):
            train(loop, folder, fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]
    resumed = make_loop()
    train(resumed, folder)
    assert rows(folder) == rows(whole[0])
    assert same(weights(resumed), whole[1])


# --- errors in a step ---


def _poison_weights(loop):
    with torch.no_grad():
        next(loop.trainer.policy.parameters())[5] = torch.nan


def _poison_loss(loop):
    loop.advantage = lambda responses: torch.full(responses.mask_BT.shape, torch.nan)


def _poison_log_probs(loop):
    def generate(*arguments):
        groups = ScriptedEngine.generate(loop.engine, *arguments)
        groups[0][0].log_probs[0] = float("nan")
        return groups

    loop.engine.generate = generate


def _kill_engine(loop):
    def generate(*_):
        raise RuntimeError("EngineCore died\nwith many lines")

    loop.engine.generate = generate


def _break_verifier(loop):
    loop.problems = replace(loop.problems, answers=[None] * 6)


ERRORS = {
    "a verifier that raises": (
        _break_verifier,
        r"step 4: data/train.parquet: row \d \(id \d\): the verifier failed on a response \(\w+Error: ",
    ),
    "NaN weights": (_poison_weights, "step 4: the trainer's log-probs are not finite: training diverged; lower"),
    "NaN loss": (_poison_loss, "step 4: the gradient's norm is (nan|inf): training diverged; lower"),
    "NaN from the engine": (_poison_log_probs, "step 4: the engine's log-probs are not finite"),
    "dead engine": (_kill_engine, r"step 4: the engine died in the rollout \(RuntimeError: EngineCore died with many"),
}


@pytest.mark.parametrize(("harm", "message"), ERRORS.values(), ids=ERRORS)
def test_an_error_in_a_step_is_a_line_that_names_it_and_nothing_is_lost(make_loop, tmp_path, whole, harm, message):
    loop = make_loop()
    with pytest.raises(DvpError, match=message) as raised:
        train(loop, tmp_path / "run", lambda row: harm(loop) if row["step"] == 3 else None)
    assert "\n" not in str(raised.value)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    recorded = read_responses(tmp_path / "run" / "checkpoints" / RESPONSES)["step"].to_pylist()
    assert set(recorded) >= {1, 2, 3}
    resumed = make_loop()
    train(resumed, tmp_path / "run")
    assert rows(tmp_path / "run") == rows(whole[0])
    assert same(weights(resumed), whole[1])


def test_weights_that_an_update_broke_are_saved_nowhere(make_loop, tmp_path):
    loop = make_loop()
    with pytest.raises(DvpError, match=r"^step 4: its update left weights that are not finite; lower"):
        train(loop, tmp_path, lambda row: _poison_weights(loop) if row["step"] == 4 else None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()] == ["step-000002"]


def test_a_checkpoints_state_is_plain_and_shares_what_it_shared():
    """An enum would be a call of getattr in a file of Python 3.11.2, which `restore` refuses."""

    class Stage(int, Enum):
        first = 1

    whole = torch.arange(6.0)
    copied = _on_host({"stage": Stage.first, "parts": [whole[:2], whole[2:]]})
    assert type(copied["stage"]) is int
    whole.zero_()
    first, second = copied["parts"]
    assert (first.tolist(), second.tolist()) == ([0, 1], [2, 3, 4, 5])
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
