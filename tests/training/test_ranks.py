"""Two ranks (gloo) against one: the same run, its checkpoints, and `dvp train` with an engine on each."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import rank_process
import torch
import yaml
from deepspeed.checkpoint import ds_to_universal
from filelock import FileLock
from safetensors.torch import load_file
from test_loop import TERMS, named, reference_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dvp import cli
from dvp.conversion import write_model
from dvp.errors import DvpError, Stopped
from dvp.experiment.training import BF16_AUTOCAST, EngineConfig, TrainingConfig
from dvp.training import backend, checkpoint, launch, ranks
from dvp.training.stage import sequences
from rounding import TINY_LOG_PROB, assert_same_steps, rounding

pytestmark = pytest.mark.slow
LAUNCH = [sys.executable, "-m", "dvp.training.launch"]
NAMES = ("zero1", "zero2", "zero3", "zero3_bf16")  # files of config/deepspeed
PATIENCE = 400  # seconds, on a machine that does much else
CLOSE = {"rel": rounding(TERMS), "abs": TINY_LOG_PROB}
OWN_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


def rows(folder: Path) -> list[dict]:
    """The metrics of a run without its times and what it has none of."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key and value is not None} for line in lines]


@pytest.fixture(scope="module")
def untied_model(tiny_model, tmp_path_factory) -> Path:
    """The tiny model with a head of its own."""
    folder = tmp_path_factory.mktemp("untied-model")
    config = AutoConfig.from_pretrained(tiny_model)
    config.tie_word_embeddings = False
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def two_checkpoints():
    """Keep the checkpoint before the last one, as rank_process.py does in processes of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "KEEP_CHECKPOINTS", 2)
        yield


def start_ranks(*arguments: Path) -> subprocess.Popen:
    """Start rank_process.py on two ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [*launcher, rank_process.__file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # torchrun's variables must not be those of this process, which is a world of one.
        env={key: value for key, value in OWN_THREAD.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.fixture(scope="module")
def runs(tiny_model, untied_model, tmp_path_factory) -> Path:
    """two/NAME of two ranks for each file of config/deepspeed, one/zero2 of one rank: the same experiment."""
    folder = tmp_path_factory.mktemp("ranks")
    two = start_ranks(tiny_model, untied_model, folder / "two")
    rank_process.train(tiny_model, folder / "one", ("zero2",))
    rank_process.replay(tiny_model, folder / "one")
    output, _ = two.communicate(timeout=PATIENCE)
    assert two.returncode == 0, output[-3000:]
    return folder


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_train_as_one_does(runs, stage, tiny_model):
    expected, found = rows(runs / "one/zero2"), rows(runs / f"two/zero{stage}")
    assert len(found) == 3
    # A rank's share was uneven in a step that rejected the responses to one of its prompts.
    assert 0 < min(row["kept_fraction"] for row in expected) < 1
    for one, two in zip(expected, found, strict=True):
        assert two == pytest.approx(one, **CLOSE)
    before = named(reference_of(tiny_model))
    one, two = (load_file(folder / "weights.safetensors") for folder in (runs / "one/zero2", runs / f"two/zero{stage}"))
    assert_same_steps(two, one, before, TERMS)
    assert all((value - before[name]).abs().max() > 1e-3 for name, value in two.items())


def test_two_ranks_replay_sets_as_one_does(runs):
    """That each has no others than it needs is seen in the ranks themselves."""
    one, two = (json.loads((runs / number / "replay.json").read_text()) for number in ("one", "two"))
    assert one["gradient_norm"] > 0
    assert two == pytest.approx(one, **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_continue_exactly(runs, name):
    """The weights are compared in the ranks themselves."""
    assert rows(runs / f"two/{name}/continued") == rows(runs / f"two/{name}")


@pytest.mark.parametrize("name", NAMES)
def test_each_rank_has_a_part_of_a_checkpoint_and_all_have_the_final_weights(
    runs, name, tiny_model, untied_model, tmp_path
):
    folder = runs / f"two/{name}"
    for final in checkpoint.checkpoints(folder / "checkpoints"):
        assert [name for name in (0, 1) if list(final.rglob(f"*pp_rank_{name}_*.pt"))] == [0, 1]
        checkpoint.verify(final)
    kept = checkpoint.kept_weights(folder / "checkpoints", 3)
    base = untied_model if "bf16" in name else tiny_model
    proof = write_model(kept, base, tmp_path / "model", temperature=1.0)
    assert proof["max_abs_delta_log_prob"] <= proof["tolerance"]
    trained, converted = load_file(folder / "weights.safetensors"), load_file(tmp_path / "model" / checkpoint.MODEL)
    assert proof["identical_weights"] == len(trained) == len(converted)
    assert all(torch.equal(converted[name], value) for name, value in trained.items())


def assert_continued(place: Path, origin: Path, tiny_model: Path) -> None:
    """Assert that a run resumed from its second step with its moments, and by the same steps up to rounding."""
    found, expected = (load_file(folder / "moments.safetensors") for folder in (place, origin))
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) and value.any() for name, value in found.items())
    for one, other in zip(rows(origin), rows(place), strict=True):
        assert other == pytest.approx(one, **CLOSE)
    found, expected = (load_file(folder / "weights.safetensors") for folder in (place, origin))
    assert_same_steps(found, expected, named(reference_of(tiny_model)), TERMS)
    written = [
        json.loads((path / "state.json").read_text())["ranks"] for path in sorted(place.glob("checkpoints/step-*"))
    ]
    assert sorted(written) == [1, 2]
    assert not list(place.glob("checkpoints/.*"))


@pytest.fixture
def cut(tmp_path):
    """Return a function that copies a run up to the checkpoint of its second step."""

    def cut(origin: Path) -> Path:
        shutil.copytree(origin / "checkpoints", tmp_path / "checkpoints")
        shutil.rmtree(tmp_path / "checkpoints/step-000003")
        return tmp_path

    return cut


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_a_run_of_two_ranks_resumes_as_one(runs, tiny_model, cut, name):
    """The moments exactly; the step after them up to another order of summation."""
    place = cut(runs / f"two/{name}")
    rank_process.resume(tiny_model, name, place)
    assert_continued(place, runs / f"two/{name}", tiny_model)


def test_a_run_of_one_rank_resumes_as_two(runs, tiny_model, cut):
    place = cut(runs / "one/zero2")
    two = start_ranks(tiny_model, place)
    output, _ = two.communicate(timeout=PATIENCE)
    assert two.returncode == 0, output[-3000:]
    assert_continued(place, runs / "one/zero2", tiny_model)


def test_a_disk_without_room_for_the_copy_is_one_line(tmp_path, monkeypatch):
    def full(asked):
        Path(asked.output_folder).mkdir(parents=True)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ds_to_universal, "main", full)
    with pytest.raises(DvpError, match=r"step-000002: no copy for another .*No space left.*as much room$"):
        backend._write_universal(tmp_path / "step-000002/deepspeed", tmp_path / ".step-000002.universal/deepspeed")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("gpu", "count", "parallel", "expected"),
    [(True, 1, 1, 40), (True, 4, 1, 16), (True, 4, 2, 24), (True, 8, 2, 16), (False, 4, 2, 16)],
)
def test_shares_are_disjoint_and_an_engine_has_room_for_its_own(monkeypatch, gpu, count, parallel, expected):
    """Five prompts of eight responses; on a CPU each rank has an engine."""
    settings = training(gpus=count, prompts_per_step=5, group_size=8)
    span = parallel if gpu else 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(ranks, "count", lambda: count)
    shares = []
    for rank in range(count):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        shares.append(ranks.share("abcde", span))
    assert (
        sequences(settings, EngineConfig(dtype="bfloat16", tensor_parallel=parallel)) == expected == 8 * len(shares[0])
    )
    monkeypatch.setattr(ranks, "gather", lambda mine: shares)
    assert ranks.join(shares[0], 5, span) == list("abcde")


# --- the command line ---


def training(**settings) -> TrainingConfig:
    return TrainingConfig(**(rank_process.SETTINGS | {"deepspeed": "zero3"} | settings))


def test_one_node_is_one_torchrun_and_several_need_an_allocation(monkeypatch):
    command = launch.command(training(gpus=2), Path("logs"), ["train", "--run", "a b; rm -rf /"])
    assert command[: len(LAUNCH)] == LAUNCH
    assert {"--standalone", "--nproc-per-node=2", "--max-restarts=0", "--shutdown-timeout=1800"} < set(command)
    assert command[-6:] == ["-m", "--", "dvp.cli", "train", "--run", "a b; rm -rf /"]
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(DvpError, match=r"training\.nodes is 2: several nodes need a Slurm allocation"):
        launch.command(training(gpus=1, nodes=2), Path("logs"), ["train"])


def test_ranks_know_the_nodes_own_disk_and_nothing_of_the_jobs_first_step(monkeypatch):
    for name in ("SLURM_TMPDIR", "SLURM_JOB_ID", "SLURM_STEP_NODELIST"):
        monkeypatch.setenv(name, "x")
    assert {name for name in launch._environment() if name.startswith("SLURM_")} == {"SLURM_TMPDIR", "SLURM_JOB_ID"}


def test_several_nodes_are_one_step_of_the_allocation_with_a_torchrun_on_each(tmp_path, monkeypatch):
    """Slurm itself is not here: three programs answer as squeue, scontrol and, on the first node, srun do."""
    answers = {"squeue": {"30001": "node[3-4]"}, "scontrol": {"node[3-4]": "node3\nnode4"}}
    does = {name: f"print({answer!r}[sys.argv[-1]])" for name, answer in answers.items()}
    does["srun"] = "assert '--nodelist=node3' in sys.argv; exec(sys.argv[-1])"
    for name, line in does.items():
        script = tmp_path / name
        script.write_text(f"#!{sys.executable}\nimport sys\n{line}\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "30001")
    with socket.socket() as service:
        service.bind(("", 30001))  # what the job's number suggests
        command = launch.command(training(gpus=3, nodes=2), Path("logs"), ["train"])
        (address,) = [option for option in command if option.startswith("--rdzv-endpoint=node3:")]
        with socket.socket() as store:
            store.bind(("", int(address.partition(":")[2])))
    start = command.index(sys.executable)
    assert command[0] == "srun"
    assert {"--jobid=30001", "--overlap", "--nodes=2", "--ntasks-per-node=1"} < set(command[1:start])
    assert command[start : start + 3] == LAUNCH
    assert {"--nnodes=2", "--nproc-per-node=3", "--rdzv-backend=c10d", "--rdzv-id=dvp-30001"} < set(command)
    assert "--standalone" not in command
    monkeypatch.setenv("SLURM_JOB_ID", "30002")
    with pytest.raises(DvpError, match="Slurm does not name the nodes of job 30002"):
        launch.command(training(gpus=3, nodes=2), Path("logs"), ["train"])


def test_the_error_that_came_first_is_raised_and_no_other():
    known = {"timestamp": 2.0, "kind": "error", "signal": None, "message": "no room", "traceback": ""}
    bug = known | {"timestamp": 1.0, "kind": "other", "message": "RuntimeError: lost rank 1"}
    stopped = bug | {"timestamp": 0.5, "signal": 15, "message": "stopped after step 3"}
    killed, aborted, told = (
        launch._ended(1, number) | {"timestamp": 3} for number in (signal.SIGKILL, signal.SIGABRT, signal.SIGTERM)
    )
    for reports, kind, message in (
        ([stopped, bug, known, killed], DvpError, "^no room$"),
        (
            [stopped, bug, killed],
            DvpError,
            r"^rank 1 was ended by SIGKILL \(Killed\); out of memory\? run again to continue",
        ),
        ([stopped, bug, told], Stopped, "^stopped after step 3$"),
        ([stopped | {"timestamp": 3.0}, bug, aborted], RuntimeError, "^RuntimeError: lost rank 1$"),
        ([told], Stopped, "^stopped by SIGTERM; run again to go on$"),
        ([told, aborted], DvpError, r"^rank 1 was ended by SIGABRT \(Aborted\)$"),
        ([], DvpError, "no rank reported an error"),
    ):
        with pytest.raises(kind, match=message):
            launch.raise_first(reports)


# --- dvp train, an engine on each of two ranks ---

RUN = "method~rloo/engine~fp32/rho~none/seed~0"


@pytest.fixture(scope="module")
def experiment(untied_model, tmp_path_factory, root) -> Path:
    """An experiment as one of eight billion parameters is: two ranks, ZeRO-3, products in bf16, recomputed activations.

    Prepared for `dvp train`; its config.yaml.
    """
    folder = tmp_path_factory.mktemp("experiment")
    config = yaml.safe_load((root / "config/experiments/start/smoke.yaml").read_text())
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"q": f"bada {letter} mete", "a": "7"}) + "\n" for letter in "abcdefghijkl"))
    config["sources"]["rows"] = {"kind": "file", "path": str(file), "columns": {"problem": "q", "answer": "a"}}
    config["data"] |= {"train": "rows", "held_out": 2}
    config["base"] = {"kind": "local", "path": str(untied_model)}
    config["training"] |= {"gpus": 2, "steps": 12, "prompts_per_step": 3, "tokens_per_micro_batch": 40}
    config["training"] |= {"deepspeed": "zero3_bf16", "max_response_tokens": 12, "gradient_checkpointing": True}
    config["grid"] = [{"method": "rloo", "engine": "fp32"}]
    for name, text in {
        "experiments/start/smoke.yaml": yaml.safe_dump(config),
        # The tiny model's parameters are all small enough to be left whole otherwise.
        "deepspeed/zero3_bf16.json": json.dumps(
            {
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
                "torch_autocast": BF16_AUTOCAST,
            }
        ),
        **{f"catalogue/{n}.yaml": (root / f"config/catalogue/{n}.yaml").read_text() for n in TABLES},
    }.items():
        (folder / "config" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "config" / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        cli.resolve("smoke", Path("results/smoke"))
        cli.prepare(config=Path("results/smoke/config.yaml"))
        cli.base(config=Path("results/smoke/config.yaml"), threads=1)
    return folder / "results/smoke/config.yaml"


TABLES = ("sources", "engines", "methods")


def start(config: Path) -> subprocess.Popen:
    hidden = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MLFLOW_TRACKING_URI")
    return subprocess.Popen(
        [sys.executable, "-m", "dvp.cli", "train", "--config", config, "--run", RUN, "--threads", "2"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={key: value for key, value in OWN_THREAD.items() if key not in hidden},
    )


def rank_of(process: psutil.Process) -> str | None:
    """RANK of a process; None without, and of one that has ended."""
    with suppress(psutil.Error):
        return process.environ().get("RANK")


def ended(process: subprocess.Popen, pids: list[psutil.Process]) -> str:
    """What the process said, once it and those that it started are gone."""
    errors = process.communicate(timeout=PATIENCE)[1]
    psutil.wait_procs(pids, timeout=PATIENCE)
    assert not [one for one in pids if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    return errors


def test_an_error_on_one_rank_ends_both_with_one_line(experiment):
    """Rank 0 alone asks for the lock; the other one waits for it to train."""
    folder = experiment.parent / "runs" / RUN
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        process = start(experiment)
        errors = ended(process, [])
    assert process.returncode == 2
    lines = [line for line in errors.splitlines() if line.startswith("dvp")]
    assert lines == [f"dvp train: {folder}: another process is training this run; wait for it or stop it"]
    assert "Traceback" not in errors


def wait_for(process: subprocess.Popen, there) -> list[psutil.Process]:
    """All of its processes, once `there` is true."""
    until = time.monotonic() + PATIENCE
    while not there():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.05)
    return psutil.Process(process.pid).children(recursive=True)


def test_sigterm_to_dvp_train_makes_all_ranks_save_and_leave(experiment):
    folder = experiment.parent / "runs" / RUN
    process = start(experiment)
    everyone = wait_for(process, lambda: (folder / "metrics.jsonl").exists() and rows(folder))
    process.send_signal(signal.SIGTERM)
    errors = ended(process, everyone)
    assert process.returncode == 143, errors
    done = len(rows(folder))
    assert errors.splitlines()[-1] == f"dvp train: stopped by SIGTERM after step {done}; run again to continue"
    assert "Traceback" not in errors
    assert list(folder.glob(f"checkpoints/*/step-{done:06d}"))


@pytest.mark.nightly
def test_a_rank_that_is_killed_ends_the_other_and_the_run_goes_on(experiment):
    """It began with the checkpoint of the run that was stopped above."""
    folder = experiment.parent / "runs" / RUN
    process = start(experiment)
    everyone = wait_for(process, lambda: list(folder.glob("checkpoints/*/step-000004")))
    next(one for one in everyone if rank_of(one) == "1").send_signal(signal.SIGKILL)
    errors = ended(process, everyone)
    assert process.returncode == 2, errors
    assert errors.splitlines()[-1].startswith("dvp train: rank 1 was ended by SIGKILL (Killed)")
    assert "Traceback" not in errors
    assert 4 <= len(rows(folder)) < 12

    process = start(experiment)
    errors = ended(process, [])
    assert process.returncode == 0, errors
    assert "continuing from" in errors
    assert not list(folder.glob(".ranks-*"))
    metrics = rows(folder)
    assert [row["step"] for row in metrics] == list(range(1, 13))
    # The engines, in fp32, have the trainer's weights: its products in bf16 are all that differs, as it says itself.
    noise = metrics[0]["self_noise_max_abs_log_ratio_bf16"]
    assert metrics[0]["max_abs_log_ratio"] == pytest.approx(noise, abs=TINY_LOG_PROB)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        cli.convert(config=experiment, run=RUN, threads=1)
    proof = json.loads((experiment.parent / "models" / RUN / "conversion.json").read_text())
    assert proof["max_abs_delta_log_prob"] <= proof["tolerance"]
