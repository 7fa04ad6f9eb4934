"""One run on two nodes."""

import json
import shutil

import pytest
import yaml

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.nightly]
RUN = "method~rloo/engine~fp32/rho~none/seed~0"


def test_a_run_on_two_nodes_has_a_rank_on_each(finished, slurm, tmp_path):
    if "idle" not in slurm("sinfo", "-h", "-n", "another", "-o", "%t"):
        pytest.skip("there is no second node: namespaces cannot be made here")
    checkout = finished.copy(tmp_path / "checkout")
    shutil.rmtree(checkout.run_folder(RUN))
    experiment = checkout.folder / "config/experiments/start/smoke.yaml"
    settings = yaml.safe_load(experiment.read_text())
    settings["training"]["nodes"] = 2
    experiment.write_text(yaml.safe_dump(settings, sort_keys=False))
    profile = checkout.folder / "slurm/config.yaml"
    profile.write_text(profile.read_text().replace("gpu_partition: gpu", "gpu_partition: pair"))

    status, _ = checkout.snakemake(f"results/smoke/runs/{RUN}/train.json").finish()
    assert status == 0
    job = slurm.accounts("NNodes", "AllocTRES", "State")[-1]
    assert (job["stage"], job["State"], job["NNodes"]) == ("train", "COMPLETED", "2")
    assert "gres/gpu=2" in job["AllocTRES"].split(",")
    rows = [json.loads(row) for row in (checkout.run_folder(RUN) / "metrics.jsonl").read_text().splitlines()]
    alone = [json.loads(row) for row in (finished.run_folder(RUN) / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for name in ("reward", "entropy", "response_tokens_mean"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in alone], rel=1e-4)
