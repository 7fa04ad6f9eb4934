"""A rehearsal as a job of two ranks."""

import shutil

import pytest
import yaml

from dvp.files import read_json

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)]
TARGET = "results/smoke/preflight/engine~coarse/preflight.json"
RUN = "method~dvp_mis/engine~coarse/rho~0.01/seed~0"


def test_training_waits_for_a_rehearsal_on_two_ranks_and_is_not_begun_when_it_fails(finished, slurm, tmp_path):
    checkout = finished.copy(tmp_path / "checkout")
    shutil.rmtree(checkout.run_folder(RUN))
    file = checkout.folder / "config/experiments/smoke.yaml"
    settings = yaml.safe_load(file.read_text())
    settings["preflight"] = "always"
    settings["training"]["gpus"] = 2
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    profile = checkout.folder / "slurm/config.yaml"
    shipped = profile.read_text()
    profile.write_text(shipped.replace("stop_seconds: 600 ", "stop_seconds: 1 "))
    assert profile.read_text() != shipped

    status, output = checkout.snakemake(f"results/smoke/runs/{RUN}/train.json").finish(timeout=900)
    assert status == 1
    assert "dvp preflight: save: " in (checkout.smoke / "logs/preflight/coarse.log").read_text() + output
    assert not (checkout.folder / TARGET).exists()
    assert not checkout.run_folder(RUN).exists()
    job = slurm.accounts("AllocTRES", "State")[-1]
    assert (job["stage"], job["State"]) == ("preflight", "FAILED")
    assert "gres/gpu=2" in job["AllocTRES"].split(",")
    report = read_json((checkout.folder / TARGET).with_name("report.json"))
    refused = [line for line in report["checks"] if not line["passed"]]
    assert [line["check"] for line in refused] == ["save"]
    assert refused[0]["says"].endswith("; stop_seconds leaves 1 s")

    profile.write_text(shipped)
    status, _ = checkout.snakemake(TARGET).finish(timeout=900)
    assert status == 0
    passed = read_json(checkout.folder / TARGET)
    assert (passed["gpus"], passed["nodes"], passed["passed"]) == (2, 1, True)
    memory = next(line["measured"] for line in passed["checks"] if line["check"] == "memory")
    assert memory["declared"] == 2 * 96000 * 2**20  # as the profile asks for
