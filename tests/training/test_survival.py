"""What a training run survives, and what it says where it cannot: signals, damaged checkpoints, a full disk, errors.

The engine is scripted and lives in this process; tests/pipeline/test_bad_night.py kills the real thing.
"""
# ruff: noqa: F811 (a fixture of another module is an argument here)

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_loop import ScriptedEngine, make_loop  # noqa: F401

from dvp import provenance
from dvp.errors import DvpError, Stopped
from dvp.files import checksums
from dvp.training import checkpoint, rollouts
from dvp.training.loop import run_loop
from dvp.training.responses import RESPONSES, read_responses
from dvp.versions import STAGE_VERSIONS

pytestmark = pytest.mark.slow
TIMINGS = ("seconds", "seconds_rollout", "seconds_reward", "seconds_update", "seconds_sync", "tokens_per_second")


def rows(folder: Path) -> list[dict]:
    """metrics.jsonl but for the clock's part, which no two runs share."""
    if not (folder / "metrics.jsonl").exists():
        return []
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in lines]


def train(loop, folder: Path, on_step=lambda row: None):
    return run_loop(loop, folder, folder / "checkpoints", on_step)


def weights(loop) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in loop.trainer.weights()}


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def on_call(monkeypatch, owner, name: str, number: int, act) -> None:
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


@pytest.fixture
def whole(make_loop, tmp_path):
    """The run that nothing happened to: its folder and its weights."""
    loop = make_loop()
    train(loop, tmp_path / "whole")
    return tmp_path / "whole", weights(loop)


# --- signals ---


MOMENTS = {
    # What is called, the call in which the signal arrives, the step that is finished by then.
    "rollout": ("engine", "generate", rollout_of(2), 1),
    "first rollout": ("engine", "generate", rollout_of(1), 0),
    "comparison with the trainer": ("engine", "generate", rollout_of(1) + 1, 1),
    "update": ("trainer", "forward_backward", 5, 3),
    "checkpoint": ("trainer", "save", 1, 2),
}


@pytest.mark.parametrize(("part", "method", "call", "after"), MOMENTS.values(), ids=MOMENTS)
def test_sigterm_saves_the_last_whole_step_and_leaves(
    make_loop, tmp_path, monkeypatch, whole, part, method, call, after
):
    """A rollout is given up, an update is finished; the checkpoint off the grid changes nothing in the end."""
    stopped, folder = make_loop(), tmp_path / "stopped"

    def twice():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a nervous scheduler changes nothing

    on_call(monkeypatch, getattr(stopped, part), method, call, twice)
    with pytest.raises(Stopped, match=f"^stopped by SIGTERM after step {after}; run again to continue$") as raised:
        train(stopped, folder)
    assert raised.value.code == 143
    assert [row["step"] for row in rows(folder)] == list(range(1, after + 1))
    if after:
        assert checkpoint.checkpoints(folder / "checkpoints")[-1].name == f"step-{after:06d}"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    resumed = make_loop()
    seen = []
    train(resumed, folder, lambda row: seen.append(row["step"]))
    assert seen == [1, 2, 3, 4]
    assert rows(folder) == rows(whole[0])
    assert same(weights(resumed), whole[1])


def test_slurms_warning_signal_is_sigterms_equal(make_loop, tmp_path, monkeypatch):
    loop = make_loop()
    on_call(monkeypatch, loop.engine, "generate", rollout_of(3), lambda: os.kill(os.getpid(), signal.SIGUSR1))
    with pytest.raises(Stopped, match="stopped by SIGUSR1 after step 2") as raised:
        train(loop, tmp_path)
    assert raised.value.code == 138


def test_a_signal_in_the_last_step_does_not_stop_a_run_that_is_done(make_loop, tmp_path, monkeypatch, whole):
    loop = make_loop()
    on_call(monkeypatch, loop.trainer, "forward_backward", 8, lambda: os.kill(os.getpid(), signal.SIGTERM))
    train(loop, tmp_path / "run")
    assert rows(tmp_path / "run") == rows(whole[0])


def test_a_run_says_whether_there_is_time_to_leave_when_it_knows_and_when_that_changes(make_loop, tmp_path, capsys):
    loop = make_loop()
    loop.stop.seconds = 600
    train(loop, tmp_path)
    first = [line for line in capsys.readouterr().err.splitlines() if "scheduler" in line]
    assert len(first) == 1  # of two checkpoints
    assert first[0].startswith("finishing a step takes up to ")
    assert loop.stop.seconds_save > 0
    loop.stop.saved(500, 90)
    assert capsys.readouterr().err == ""
    loop.stop.saved(400, 101)  # a checkpoint may take as long as the longest has
    assert capsys.readouterr().err == (
        "warning: finishing a step takes up to 101 s and a checkpoint 500 s; 600 s lie between the scheduler's warning "
        "and the end: a stop costs the steps since the last checkpoint; ask for stop_seconds: 780\n"
    )


def test_a_rank_lost_while_a_checkpoint_is_written_is_not_taken_for_a_full_disk(make_loop, tmp_path, monkeypatch):
    loop = make_loop()

    def lose():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31537")

    on_call(monkeypatch, loop.trainer, "save", 1, lose)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        train(loop, tmp_path)


def test_between_two_updates_of_a_stale_engine_nothing_is_saved(make_loop, tmp_path, monkeypatch):
    """The engine has the weights of step 2, the trainer those of step 3: no checkpoint holds both."""
    loop = make_loop(synchronise_every=2)
    on_call(
        monkeypatch,
        loop.engine,
        "generate",
        rollout_of(4, synchronise_every=2),
        lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    with pytest.raises(Stopped, match="stopped by SIGTERM after step 3; run again to continue from step 2"):
        train(loop, tmp_path)
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "checkpoints")] == ["step-000002"]


@pytest.mark.parametrize("call", [rollout_of(2), rollout_of(1) + 1], ids=["rollout", "comparison with the trainer"])
def test_an_engine_whose_workers_die_of_the_same_signal_is_part_of_the_stop(make_loop, tmp_path, monkeypatch, call):
    loop = make_loop()

    def die(*_):
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("worker died")

    on_call(monkeypatch, loop.engine, "generate", call, die)
    with pytest.raises(Stopped, match="after step 1"):
        train(loop, tmp_path)


RANK = """
import os, signal, sys
import torch
from dvp.training.launch import reported
from dvp.training.stopping import Abandoned, StopRequest

rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
with reported(), StopRequest() as stop:  # as a rank of a run ends: in the ordinary way its group's threads may abort it
    assert not stop.requested()
    try:
        with stop.abandonable():
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                print("not abandoned")
        print("went on")
    except Abandoned:
        stop.leave(5, 5)
"""


def test_ranks_leave_together_though_one_alone_was_told(tmp_path):
    """The rank that was not told finishes its rollout, and then hears of it."""
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["", ""]
    assert [rank.returncode for rank in ranks] == [143, 143]


def test_nothing_random_depends_on_a_generators_state(make_loop, tmp_path, whole):
    """Which is why a checkpoint holds none: every global generator is disturbed after every step."""
    loop = make_loop()

    def disturb(row):
        seed = 1000 + row["step"]
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    train(loop, tmp_path / "disturbed", disturb)
    assert rows(tmp_path / "disturbed") == rows(whole[0])
    assert same(weights(loop), whole[1])


# --- damaged checkpoints ---


def _truncate(folder: Path) -> str:
    file = next(folder.rglob("*optim_states.pt"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return f"{file}: altered since it was written"


def _flip(folder: Path) -> str:
    file = next(folder.rglob("*model_states.pt"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return f"{file}: altered since it was written"


def _remove(folder: Path) -> str:
    file = next(folder.rglob("*model_states.pt"))
    file.unlink()
    return f"{file}: missing, although its manifest lists it"


def _no_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text("{")
    return f"{folder}/manifest.json: not valid JSON"


def _other_settings(folder: Path) -> str:
    """Whole in itself, but written for another run and moved here."""
    state = folder / "state.json"
    state.write_text(state.read_text().replace("checkpoints", "elsewhere"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["state.json"] = checksums(folder)["state.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return f"{folder}: a checkpoint of other settings or data (elsewhere)"


@pytest.mark.parametrize("damage", [_truncate, _flip, _remove, _no_manifest, _other_settings])
def test_a_damaged_checkpoint_is_named_in_a_line_and_the_one_before_it_used(make_loop, tmp_path, whole, damage, capfd):
    folder, expected = whole
    before = rows(folder)
    newest = folder / "checkpoints/step-000004"
    problem = damage(newest)
    capfd.readouterr()
    resumed, seen = make_loop(), []
    train(resumed, folder, lambda row: seen.append((row["step"], newest.is_dir())))
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"warning: {problem}")
    assert warnings[0].endswith("; going back to step-000002")
    assert seen == [(1, False), (2, False), (3, False), (4, False)]
    assert rows(folder) == before
    assert same(weights(resumed), expected)
    # The damaged one was set aside, and went when a whole one had been written.
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000002", "step-000004"]


def test_where_all_are_damaged_training_refuses_and_nothing_is_deleted(make_loop, whole):
    folder, _ = whole
    for path in checkpoint.checkpoints(folder / "checkpoints"):
        _flip(path)
    before = checksums(folder)
    with pytest.raises(
        DvpError,
        match=r"checkpoints: no checkpoint is intact, nothing was deleted.*step-000004.*altered.*step-000002.*altered",
    ):
        train(make_loop(), folder)
    assert checksums(folder) == before


def test_a_trainer_that_does_not_have_the_weights_that_were_saved_refuses_to_go_on(make_loop, whole):
    """As it would if DeepSpeed read its files otherwise than they were written."""
    folder, _ = whole
    newest = folder / "checkpoints/step-000004"
    weights, manifest = (json.loads((newest / name).read_text()) for name in ("weights.json", "manifest.json"))
    weights["model.norm.weight"]["sha256"] = "0" * 64
    (newest / "weights.json").write_text(json.dumps(weights))
    manifest["files"]["weights.json"] = checksums(newest)["weights.json"]
    (newest / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DvpError, match=r"step-000004: .* has other weights: parameter 'model.norm.weight': SHA-256"):
        train(make_loop(), folder)


# --- checkpoints of other work ---


def test_a_run_whose_outputs_snakemake_has_deleted_goes_on(make_loop, tmp_path, whole, monkeypatch):
    """As it does before it starts a job again; meanwhile somebody has edited the code."""
    folder = tmp_path / "run"

    def checkpoints() -> Path:
        return checkpoint.folder_of(folder / "checkpoints", **WORK)

    def delete_and_go_on() -> tuple[list[int], dict]:
        for name in ("metrics.jsonl", "responses.parquet"):
            (folder / name).unlink()
        resumed, stepped = make_loop(), []
        monkeypatch.setattr(resumed, "step", lambda step, run=resumed.step: stepped.append(step) or run(step))
        run_loop(resumed, folder, checkpoints(), lambda row: None)
        return stepped, weights(resumed)

    loop = make_loop()
    on_call(monkeypatch, loop.engine, "generate", rollout_of(4), lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped, match="after step 3"):
        run_loop(loop, folder, checkpoints(), lambda row: None)
    monkeypatch.setattr(provenance, "code_hash", lambda: "0" * 12)
    for expected in ([4], []):  # stopped before the last step, and after it
        stepped, weights_now = delete_and_go_on()
        assert stepped == expected
        assert rows(folder) == rows(whole[0])
        assert same(weights_now, whole[1])
        assert (folder / "responses.parquet").read_bytes() == (whole[0] / "responses.parquet").read_bytes()


WORK = {"settings": "aaa", "data": {"train.parquet": "d"}, "base": {"model.safetensors": "b"}}


def test_checkpoints_of_other_work_are_named_with_what_differs_and_left_where_they_are(
    make_loop, tmp_path, monkeypatch, capsys
):
    def folder(**changes):
        return checkpoint.folder_of(tmp_path / "checkpoints", **(WORK | changes))

    first = folder()
    assert folder() == first
    assert capsys.readouterr().err == ""  # a folder without a checkpoint is not worth a word
    run_loop(make_loop(), tmp_path, first, lambda row: None)
    assert folder() == first
    assert capsys.readouterr().err == ""
    line = f"{first}: step-000004 is not continued: it differs in {{}}\n"
    second = folder(settings="bbb")
    assert capsys.readouterr().err == line.format("settings")
    folder(settings="bbb", data={}, base={})
    assert capsys.readouterr().err == line.format("settings, data, base model")
    run_loop(make_loop(), tmp_path, second, lambda row: None)
    capsys.readouterr()
    folder(settings="bbb")
    assert capsys.readouterr().err == ""  # there are some to continue
    monkeypatch.setitem(STAGE_VERSIONS, "train", STAGE_VERSIONS["train"] + 1)
    folder()
    assert line.format("stage version") in capsys.readouterr().err
    first.with_name(f"{first.name}.json").unlink()
    folder()
    assert f"{first}: step-000004 is not continued: {first}.json: no such file" in capsys.readouterr().err
    assert len(checkpoint.checkpoints(first)) == len(checkpoint.checkpoints(second)) == 2


# --- a full disk ---


@pytest.fixture(params=["tmpfs", "file size limit"])
def small_disk(request, tmp_path):
    """A folder whose disk gets full, and a function that makes it full or roomy."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder]
        done = subprocess.run(mount, check=False, capture_output=True)
        if done.returncode:
            pytest.skip("no right to mount; the limit on a file's size takes the same path")
        filler = folder / "filler"

        def fill(full: bool) -> None:
            if full:
                with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                    while True:
                        file.write(bytes(2**16))
                os.truncate(filler, filler.stat().st_size - 2**17)  # enough for the first files of a checkpoint
            else:
                filler.unlink()

        yield folder, fill, "No space left on device"
        subprocess.run(["umount", "--lazy", folder], check=True)  # torch maps what it has read
    else:
        # Python ignores SIGXFSZ, so that writing fails with EFBIG.
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

        def fill(full: bool) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**17 if full else soft, hard))

        yield folder, fill, "MiB free"
        fill(False)


def test_a_full_disk_ends_training_in_a_line_and_the_old_checkpoint_goes_on(make_loop, small_disk, whole):
    disk, fill, reason = small_disk
    folder = disk / "run"
    with pytest.raises(DvpError) as raised:
        train(make_loop(), folder, lambda row: fill(True) if row["step"] == 4 else None)
    assert f"{folder}/checkpoints/step-000004: the checkpoint cannot be written (" in str(raised.value)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]
    checkpoint.verify(folder / "checkpoints/step-000002")
    fill(False)
    resumed = make_loop()
    train(resumed, folder)
    assert rows(folder) == rows(whole[0])
    assert same(weights(resumed), whole[1])


def test_metrics_that_cannot_be_written_end_training_in_a_line(make_loop, tmp_path, monkeypatch):
    loop = make_loop()

    def fill():
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")

    on_call(monkeypatch, loop.engine, "generate", rollout_of(3), fill)
    with pytest.raises(DvpError, match=r"metrics.jsonl: cannot be written \(No space left on device\); run again"):
        train(loop, tmp_path)
    train(make_loop(), tmp_path)
    assert len(rows(tmp_path)) == 4


# --- errors in a step ---


def _poison_weights(loop):
    with torch.no_grad():
        next(loop.trainer.policy.parameters())[5] = torch.nan


def _poison_loss(loop):
    loop.advantage = lambda responses: torch.full(responses.mask_BT.shape, torch.nan)


def _poison_log_probs(loop):
    original = ScriptedEngine.generate

    def generate(*arguments):
        groups = original(loop.engine, *arguments)
        groups[0][0].log_probs[0] = float("nan")
        return groups

    loop.engine.generate = generate


def _kill_engine(loop):
    def generate(*_):
        raise RuntimeError("EngineCore died\nwith many lines")

    loop.engine.generate = generate


ERRORS = {
    "NaN weights": (_poison_weights, "step 4: the trainer's log-probs are not finite: training diverged; lower"),
    "NaN loss": (
        _poison_loss,
        "step 4: the gradient's norm is (nan|inf): training diverged; lower training.learning_rate",
    ),
    "NaN from the engine": (_poison_log_probs, "step 4: the engine's log-probs are not finite"),
    "dead engine": (
        _kill_engine,
        r"step 4: the engine died in the rollout \(RuntimeError: EngineCore died with many lines\); run again",
    ),
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


def test_weights_that_an_update_broke_are_in_no_checkpoint(make_loop, tmp_path):
    loop = make_loop()
    with pytest.raises(DvpError, match=r"^step 4: its update left weights that are not finite; lower"):
        train(loop, tmp_path, lambda row: _poison_weights(loop) if row["step"] == 4 else None)
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "checkpoints")] == ["step-000002"]


def test_a_verifier_that_raises_names_the_problem(make_loop, tmp_path, monkeypatch):
    def grade(response, reference, *, truncated, thinking):
        raise RecursionError("maximum depth\nexceeded")

    monkeypatch.setattr(rollouts, "grade", grade)
    with pytest.raises(
        DvpError,
        match=r"^step 1: data/train.parquet: row \d \(id \d\): the verifier failed on a response "
        r"\(RecursionError: maximum depth exceeded\)$",
    ):
        train(make_loop(), tmp_path)
