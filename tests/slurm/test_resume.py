"""A training job that Slurm ends, for whatever reason, goes on and is bit for bit the one that was left alone."""

import hashlib
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1500)]
RUN = "method~dvp_mis/engine~coarse/rho~0.01/seed~0"
TARGET = f"results/smoke/runs/{RUN}/train.json"
CLOCK = ("seconds", "seconds_rollout", "seconds_reward", "seconds_update", "seconds_sync", "tokens_per_second")


@pytest.fixture(scope="module")
def untrained(finished, tmp_path_factory):
    """The experiment with its data and base model, one run untrained and long enough to be caught half-way."""
    checkout = finished.copy(tmp_path_factory.mktemp("resume") / "checkout")
    shutil.rmtree(checkout.run_folder(RUN))
    file = checkout.folder / "config/experiments/start/smoke.yaml"
    value = yaml.safe_load(file.read_text())
    value["training"] |= {"steps": 24, "checkpoint_every": 12}
    file.write_text(yaml.safe_dump(value, sort_keys=False))
    return checkout


@pytest.fixture(scope="module")
def result(untrained, tmp_path_factory) -> dict:
    """What the run is when nothing happens to it."""
    checkout = untrained.copy(tmp_path_factory.mktemp("whole") / "checkout")
    status, _ = checkout.snakemake(TARGET).finish()
    assert status == 0
    return outcome(checkout)


@pytest.fixture(scope="module", autouse=True)
def time_to_leave(slurm):
    """Between SIGTERM and SIGKILL, as long as Slurm gives by default; other tests have no time to lose."""
    file = slurm.folder / "slurm.conf"
    shipped = file.read_text()
    file.write_text(shipped.replace("KillWait=2\n", "KillWait=30\n"))
    slurm("scontrol", "reconfigure")
    assert "KillWait                = 30 sec" in slurm("scontrol", "show", "config")
    yield
    file.write_text(shipped)
    slurm("scontrol", "reconfigure")


def outcome(checkout) -> dict:
    """metrics.jsonl but for the clock's part, and the SHA-256 of weights and optimiser at the end."""
    folder = checkout.run_folder(RUN)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = (folder / json.loads((folder / "train.json").read_text())["checkpoint"]).rglob("*.pt")
    return {
        "metrics": [{key: value for key, value in line.items() if key not in CLOCK} for line in lines],
        "weights": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
    }


def edit_profile(checkout, old: str, new: str) -> None:
    file = checkout.folder / "slurm/config.yaml"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def caught(checkout, after: int, wait_until: Callable) -> int:
    """Hold the training process three steps later than `after`; how many steps it has done."""
    metrics = checkout.run_folder(RUN) / "metrics.jsonl"
    wait_until(
        lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= after + 3,
        f"training is past step {after}",
    )
    for process in psutil.process_iter(["cmdline", "cwd"]):
        command = process.info["cmdline"] or []
        if process.info["cwd"] == str(checkout.folder) and {"train", RUN} <= set(command) and "python" in command[0]:
            process.send_signal(signal.SIGSTOP)
            break
    else:
        pytest.fail("there is no such process")
    return len(metrics.read_text().splitlines())


def continued_from(checkout) -> int:
    """The step from which the last job of the run went on."""
    log = (checkout.smoke / f"logs/runs/{RUN}/train.log").read_text()
    (line,) = [line for line in log.splitlines() if line.startswith("continuing from ")]
    return int(Path(line.removeprefix("continuing from ")).name.removeprefix("step-"))


def test_cancelled_warned_preempted_and_out_of_time_it_ends_as_if_it_had_been_left_alone(
    untrained, result, slurm, wait_until, tmp_path
):
    """Each in turn to the same run, which saves when it is told to leave and goes on from there."""
    checkout = untrained.copy(tmp_path / "checkout")
    edit_profile(checkout, "gpu_partition: gpu", "gpu_partition: preemptible")
    edit_profile(checkout, "stop_seconds: 600", "stop_seconds: 0")  # at its limit, nothing warns it
    snakemake = checkout.snakemake(TARGET, "--retries", "2")

    done = caught(checkout, 0, wait_until)
    (cancelled,) = slurm.jobs("RUNNING")
    slurm("scancel", cancelled)

    # As `--signal` does some time before the limit: the steps of the job get SIGTERM, its batch script does not.
    before, done = done, caught(checkout, done, wait_until)
    assert continued_from(checkout) >= before
    (warned,) = slurm.jobs("RUNNING")
    slurm("scancel", "--signal=TERM", warned)
    slurm("scancel", "--signal=CONT", warned)

    # Slurm starts the same job again.
    before, done = done, caught(checkout, done, wait_until)
    assert continued_from(checkout) >= before
    (preempted,) = slurm.jobs("RUNNING")
    slurm("sbatch", "--partition=gpu", "--gres=gpu:2", "--output=/dev/null", "--wrap=sleep 1")

    before, done = done, caught(checkout, done, wait_until)
    assert continued_from(checkout) >= before
    assert slurm.jobs("RUNNING") == [preempted]
    slurm("scontrol", "update", f"JobId={preempted}", "TimeLimit=1")  # as if it had been asked for: Slurm's shortest

    status, output = snakemake.finish()
    assert status == 1
    for job, state in ((cancelled, "CANCELLED"), (warned, "FAILED"), (preempted, "TIMEOUT")):
        assert f"SLURM-job '{job}' failed, SLURM status is: '{state}'" in output

    status, _ = checkout.snakemake(TARGET).finish()
    assert status == 0
    assert continued_from(checkout) >= done
    assert outcome(checkout) == result
