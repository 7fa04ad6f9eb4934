"""A preflight as a job of two ranks."""

import shutil

import pytest
import yaml

from dvp.files import read_json

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1800)]
TARGET = "results/smoke/preflight/engine~coarse/preflight.json"
RUN = "method~dvp_mis/engine~coarse/rho~0.01/seed~0"


@pytest.fixture
def checkout(finished, tmp_path):
    """The experiment with a run to be trained on two GPUs, after a preflight."""
    checkout = finished.copy(tmp_path / "checkout")
    shutil.rmtree(checkout.run_folder(RUN))
    file = checkout.folder / "config/experiments/start/smoke.yaml"
    settings = yaml.safe_load(file.read_text())
    settings["preflight"] = "always"
    settings["training"]["gpus"] = 2
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return checkout


def test_a_preflight_on_two_ranks_knows_what_it_may_take(checkout, slurm):
    """What the profile asks for; training waits for it."""
    status, _ = checkout.snakemake(f"results/smoke/runs/{RUN}/train.json").finish(timeout=900)
    assert status == 0
    preflight, trained = slurm.accounts("AllocTRES", "State", "Start", "End")[-2:]
    assert (preflight["stage"], preflight["State"]) == ("preflight", "COMPLETED")
    assert "gres/gpu=2" in preflight["AllocTRES"].split(",")
    assert (trained["stage"], trained["State"]) == ("train", "COMPLETED")
    assert trained["Start"] >= preflight["End"]
    passed = read_json(checkout.folder / TARGET)
    assert (passed["gpus"], passed["nodes"], passed["passed"]) == (2, 1, True)
    measured = {line["check"]: line["measured"] for line in passed["checks"]}
    # As the profile says and asks for.
    assert measured["save"]["stop_seconds"] == 600
    assert measured["memory"]["declared"] == 2 * 96000 * 2**20


@pytest.mark.nightly
def test_where_the_preflight_fails_nothing_is_trained(checkout, slurm):
    profile = checkout.folder / "slurm/config.yaml"
    shipped = profile.read_text()
    profile.write_text(shipped.replace("stop_seconds: 600 ", "stop_seconds: 1 "))  # no process saves and leaves in that
    assert profile.read_text() != shipped
    status, output = checkout.snakemake(f"results/smoke/runs/{RUN}/train.json").finish(timeout=900)
    assert status == 1
    assert "dvp preflight: save: " in (checkout.smoke / "logs/preflight/coarse.log").read_text() + output
    assert not (checkout.folder / TARGET).exists()
    assert not checkout.run_folder(RUN).exists()
    job = slurm.accounts("State")[-1]
    assert (job["stage"], job["State"]) == ("preflight", "FAILED")
    report = read_json((checkout.folder / TARGET).with_name("report.json"))
    refused = [line for line in report["checks"] if not line["passed"]]
    assert [line["check"] for line in refused] == ["save"]
    assert refused[0]["says"].endswith("; stop_seconds leaves 1 s")
