"""What happens at night: Snakemake is killed, a second one is started, somebody cancels a job, Slurm is away."""

import json
import shutil
from collections.abc import Iterator

import pytest
import yaml

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.nightly]
RUN = "method~dvp_mis/engine~coarse/rho~0.01/seed~0"
TRAINED = f"results/smoke/runs/{RUN}/train.json"


def set_steps(checkout, steps: int) -> None:
    path = checkout.folder / "config/experiments/start/smoke.yaml"
    experiment = yaml.safe_load(path.read_text())
    experiment["training"]["steps"] = steps
    path.write_text(yaml.safe_dump(experiment, sort_keys=False))


@pytest.fixture(scope="module")
def untrained(finished, tmp_path_factory):
    """The finished experiment, but for one run that is to be trained again."""
    checkout = finished.copy(tmp_path_factory.mktemp("night") / "checkout")
    shutil.rmtree(checkout.run_folder(RUN))
    return checkout


@pytest.fixture(scope="module")
def training(untrained, wait_until) -> Iterator:
    """The Snakemake whose job trains that run, for longer than these tests last."""
    set_steps(untrained, 5000)
    snakemake = untrained.snakemake(TRAINED)
    wait_until((untrained.folder / TRAINED).with_name("metrics.jsonl").exists, "training begins")
    yield snakemake
    snakemake.interrupt()


def test_a_second_snakemake_on_the_same_results_says_so_and_stops(untrained, training, finished, tmp_path):
    other = finished.copy(tmp_path / "other")
    results = untrained.folder / "results"
    for snakemake in (untrained.snakemake(TRAINED), other.snakemake(str(untrained.folder / TRAINED), results=results)):
        status, output = snakemake.finish()
        assert status == 1
        assert "results/smoke: another process is running this experiment; wait for it or stop it" in output
        assert "Traceback" not in output
        assert "submitted" not in output
    assert training.process.poll() is None


def test_a_job_that_outlived_its_snakemake_is_not_joined_by_a_second_writer(untrained, training, slurm, wait_until):
    training.process.kill()
    (orphan,) = slurm.jobs("RUNNING")
    snakemake = untrained.snakemake(TRAINED)
    refusal = f"runs/{RUN}: another process is training this run; wait for it or stop it"
    wait_until(lambda: refusal in snakemake.output(), "the second job is refused")
    snakemake.process.kill()
    assert slurm.jobs("RUNNING") == [orphan]
    slurm("scancel", orphan)
    wait_until(lambda: orphan not in slurm.jobs("RUNNING", "COMPLETING"), "the orphan ends")


def test_a_cancelled_job_is_reported_and_the_same_command_goes_on(untrained, slurm, wait_until):
    """The second time with Slurm's daemons away for a while: failed queries lose no job."""
    set_steps(untrained, 3)
    snakemake = untrained.snakemake(TRAINED)
    (job,) = wait_until(lambda: slurm.jobs("RUNNING"), "a job runs")
    slurm("scancel", job)
    status, output = snakemake.finish()
    assert status == 1
    assert f"SLURM-job '{job}' failed, SLURM status is: 'CANCELLED'" in output
    assert slurm.accounts("State")[-1]["State"].startswith("CANCELLED")

    snakemake = untrained.snakemake(TRAINED, "--verbose")
    wait_until(lambda: ".0" in slurm("squeue", "-h", "-s", "-o", "%i"), "a job has got as far as its step")
    with slurm.outage():
        wait_until(lambda: "SLURM query command failed" in snakemake.output(), "Snakemake cannot ask Slurm")
    status, output = snakemake.finish()
    assert status == 0
    rows = (untrained.run_folder(RUN) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3]
