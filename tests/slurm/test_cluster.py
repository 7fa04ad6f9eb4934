"""The smoke experiment on a real Slurm: the jobs that it submits, what each asks for, what the detour costs."""

import json
import re
from collections import Counter
from datetime import datetime
from statistics import median

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
# The file that each stage writes last.
ENDS = ("manifest.json", "train.json", "conversion.json", "scores.json", "training.json")


@pytest.fixture(scope="module")
def jobs(finished):
    """What sacct says of the jobs of the whole experiment."""
    fields = (
        "Account",
        "Partition",
        "ReqCPUS",
        "ReqMem",
        "ReqTRES",
        "TimelimitRaw",
        "State",
        "Submit",
        "Start",
        "End",
        "SubmitLine",
    )
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


def test_the_overhead_of_a_job_is_measured(finished, jobs, say):
    """What a stage costs more for being a job: in the queue, inside the job, and until Snakemake sees its end."""
    submitted = re.findall(r"Job (\d+) has been submitted with SLURM jobid (\d+)", finished.log)
    seen_at = {
        job: datetime.strptime(when, "%a %b %d %H:%M:%S %Y")
        for when, job in re.findall(r"^\[(.*)\]\nFinished jobid: (\d+)", finished.log, flags=re.MULTILINE)
    }
    seen = {slurm_id: seen_at[job] for job, slurm_id in submitted}
    times = [[datetime.fromisoformat(job[name]) for name in ("Submit", "Start", "End")] for job in jobs]
    queued = [(start - submit).total_seconds() for submit, start, _ in times]
    ran = [(end - start).total_seconds() for _, start, end in times]
    unseen = [(seen[job["JobID"]] - end).total_seconds() for job, (_, _, end) in zip(jobs, times, strict=True)]
    written = [json.loads(file.read_text()) for name in ENDS for file in finished.smoke.rglob(name)]
    computing = [record["seconds_stage"] for record in written if "seconds_stage" in record]
    inside = (sum(ran) - sum(computing)) / len(jobs)
    say(
        f"Slurm's overhead, {len(jobs)} jobs: {median(queued):.0f} s (median) from submission to start, {inside:.0f} s "
        "(mean) inside a job for two Snakemakes and Python's imports, "
        f"{median(unseen):.0f} s (median; at most {max(unseen):.0f}) from its end until Snakemake sees it"
    )
    assert len(jobs) == len(computing) == len(seen) == 10
    assert min(queued) >= 0
    assert inside > 0
    assert min(unseen) >= 0
