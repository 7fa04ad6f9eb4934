"""The smoke experiment on a real Slurm: the jobs that it submits, and what each asks for."""

import re
from collections import Counter

import pandas as pd
import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

# What a first attempt asks for: partition, cores (of prepare, base and convert: tests/slurm/site), GB, GPUs, minutes.
ASKED = {
    "prepare": ("cpu", 4, 16, 0, 120),
    "base": ("cpu", 2, 16, 0, 120),
    "train": ("gpu", 8, 96, 1, 1440),
    "convert": ("cpu", 1, 80, 0, 120),
    "evaluate": ("gpu", 8, 64, 1, 480),
    "report": ("cpu", 1, 16, 0, 120),
}


@pytest.fixture(scope="module")
def jobs(finished):
    """What sacct says of the jobs of the whole experiment."""
    fields = ("Account", "Partition", "ReqCPUS", "ReqMem", "ReqTRES", "TimelimitRaw", "State", "SubmitLine")
    known = set(re.findall(r"submitted with SLURM jobid (\d+)", finished.log))
    return [job for job in finished.slurm.accounts(*fields) if job["JobID"] in known]


def test_every_stage_is_a_job_that_asked_for_its_resources(jobs):
    assert {job["Account"] for job in jobs} == {"testacct"}
    assert Counter(job["stage"] for job in jobs) == {
        "prepare": 1,
        "base": 1,
        "train": 2,
        "convert": 2,
        "evaluate": 3,
        "report": 1,
    }
    for job in jobs:
        asked = dict(part.split("=") for part in job["ReqTRES"].split(","))
        found = (
            job["Partition"],
            int(job["ReqCPUS"]),
            round(gigabytes(job["ReqMem"])),
            int(asked.get("gres/gpu", 0)),
            int(job["TimelimitRaw"]),
        )
        assert (job["stage"], job["State"], found) == (job["stage"], "COMPLETED", ASKED[job["stage"]])
        assert ("--signal=TERM@600" in job["SubmitLine"]) == (job["stage"] == "train")


def gigabytes(text: str) -> float:
    """Slurm's units are powers of two, but for M, which is what sbatch was given: 16000M, 62.50G (64000 MB)."""
    return float(text[:-1]) * {"M": 1 / 1000, "G": 1.024}[text[-1]]


def test_training_knows_how_long_slurm_warns_before_the_end(finished):
    logs = list((finished.smoke / "logs/runs").rglob("train.log"))
    assert len(logs) == 2
    assert all("600 s lie between the scheduler's warning and the end" in log.read_text() for log in logs)


def test_the_experiment_is_whole_and_its_logs_are_beside_the_results(finished):
    table = pd.read_csv(finished.smoke / "tables/main_table.csv")
    assert list(table["label"]) == ["base model", "RLOO (naive)", "DVP + MIS"]
    assert len(list((finished.smoke / "logs").rglob("*.log"))) == 11
    assert not list((finished.folder / "results/logs").rglob("*.log"))  # Slurm's own are kept for failed jobs only


def test_a_second_run_submits_nothing(finished):
    status, output = finished.snakemake("--rerun-incomplete").finish()
    assert status == 0
    assert "Nothing to be done" in output
