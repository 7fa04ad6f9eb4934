"""The whole DAG, for real, on the smoke experiment: run, re-run, traced back, and on AIME25."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import yaml
from mlflow.tracking import MlflowClient
from working_copy import Copy

from dvp.tracking.names import metric_name
from dvp.tracking.store import store_uri, track
from lineage import lineage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
DVP_MIS = "method~dvp_mis/engine~coarse/rho~0.01/seed~0"


class Smoke(Copy):
    """One of the smoke experiment."""

    def __init__(self, folder: Path, root: Path):
        super().__init__(folder, root, "--config", "experiment=smoke")
        self.smoke = self.results / "smoke"

    def edit(self, change) -> None:
        path = self.folder / "config/experiments/start/smoke.yaml"
        value = yaml.safe_load(path.read_text())
        change(value)
        path.write_text(yaml.safe_dump(value, sort_keys=False))


@pytest.fixture(scope="module")
def copy(tmp_path_factory, root) -> Smoke:
    copy = Smoke(tmp_path_factory.mktemp("pipeline"), root)
    started = time.monotonic()
    done = copy.snakemake()
    assert done.returncode == 0, done.stdout[-3000:]
    print(f"the smoke experiment took {time.monotonic() - started:.0f} s")
    return copy


def test_a_second_run_has_nothing_to_do(copy):
    done = copy.snakemake()
    assert done.returncode == 0
    assert "Nothing to be done" in done.stdout


def test_the_table_has_a_row_per_method_with_seeds_and_intervals(copy):
    table = pd.read_csv(copy.smoke / "tables/main_table.csv")
    assert list(table["label"]) == [
        "base model",
        "RLOO (naive)",
        "DVP + MIS",
        "OTB + MIS, mass budget",
    ]
    assert (table["score_low"] <= table["score"]).all()
    assert (table["score"] <= table["score_high"]).all()
    assert (table["seeds"].iloc[1:].astype(str) != "").all()
    for name in ("main_table", "mismatch_table"):
        for suffix in ("csv", "md", "tex", "html"):
            assert (copy.smoke / f"tables/{name}.{suffix}").stat().st_size > 100
    for name in ("scores", "learning_curves", "mismatch_curves", "gradient_norm"):
        assert (copy.smoke / f"figures/{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (copy.smoke / f"figures/{name}.svg").read_text()


def test_the_report_is_one_self_contained_file(copy):
    done = copy.snakemake("--report", "report.html")
    assert done.returncode == 0, done.stdout[-2000:]
    report = (copy.folder / "report.html").read_text()
    for text in ("Learning curves", "Mismatch KL", "Scores by method", "Held-out scores"):
        assert text in report
    assert "<script src=" not in report


def test_sampled_responses_are_recorded_and_shown(copy):
    recorded = pd.read_parquet(copy.smoke / "runs" / DVP_MIS / "responses.parquet")
    assert recorded["step"].tolist() == [1] * 4 + [3] * 4
    assert "DVP + MIS · coarse · ρ" in (copy.smoke / "report/responses.html").read_text()
    done = subprocess.run(
        [sys.executable, "-m", "dvp.cli", "show", "--config", "results/smoke/config.yaml", "--responses"],
        cwd=copy.folder,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "responses         results/smoke/responses.html\n"
    page = (copy.smoke / "responses.html").read_text()
    assert page == (copy.smoke / "report/responses.html").read_text()


def test_the_last_word_is_the_table_and_where_everything_is(copy):
    done = subprocess.run(
        [sys.executable, "-m", "dvp.cli", "show", "--config", "results/smoke/config.yaml"],
        cwd=copy.folder,
        check=True,
        capture_output=True,
        text=True,
    )
    for text in ("DVP + MIS", "Scale: ", "provenance.json", "mlflow.db"):
        assert text in done.stdout


def test_the_reference_result_shows_that_rl_lifts_the_control(root):
    """The result that is kept: the exact engine's held-out score is at least 15 points above the base model's."""
    table = pd.read_csv(root / "results/reference/tiny/tables/main_table.csv").set_index("role")
    assert table.loc["control", "score"] - table.loc["base", "score"] >= 0.15
    assert len(str(table.loc["control", "seeds"]).split()) >= 2


def test_metrics_say_what_they_should_and_mlflow_has_every_row(copy):
    rows = [json.loads(line) for line in (copy.smoke / "runs" / DVP_MIS / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    control = copy.smoke / "runs/method~rloo/engine~fp32/rho~none/seed~0/metrics.jsonl"
    # The control: an exact engine and an fp32 trainer agree to rounding; a coarse engine does not.
    assert all(abs(json.loads(line)["max_abs_log_ratio"]) < 1e-4 for line in control.read_text().splitlines())
    assert all(row["max_abs_log_ratio"] > 1e-3 for row in rows)
    assert all(0 < row["pruned_mass_mean"] < 0.5 and 1 <= row["safe_size"] < 512 for row in rows)
    client = MlflowClient(tracking_uri=store_uri(copy.results))
    key = json.loads((copy.smoke / "runs" / DVP_MIS / "train.json").read_text())["tracking_key"]
    [run_id] = lineage(copy.results, key)["train"]
    for name in set().union(*rows) - {"step"}:
        history = client.get_metric_history(run_id, metric_name(name))
        expected = [(row["step"], float(row[name])) for row in rows if row.get(name) is not None]
        assert [(metric.step, metric.value) for metric in history] == expected, name


def test_a_table_cell_is_traced_to_every_stage_that_made_it(copy):
    provenance = json.loads((copy.smoke / "provenance.json").read_text())
    arm = next(name for name in provenance["tables"]["main_table"] if "dvp_mis" in name)
    sources = {provenance["files"][name]["tracking_key"] for name in provenance["tables"]["main_table"][arm]["score"]}
    assert len(sources) == 1  # one seed
    found = lineage(copy.results, sources.pop())
    assert set(found) == {"prepare", "base", "train", "convert", "evaluate"}
    client = MlflowClient(tracking_uri=store_uri(copy.results))
    for stage, (run_id,) in found.items():
        run = client.get_run(run_id)
        assert run.info.status == "FINISHED"
        assert run.data.tags["stage"] == stage
        assert {"config_hash", "mlflow.source.git.commit", "run"} <= set(run.data.tags)
        assert stage in ("prepare", "base") or run.data.tags["run"] == DVP_MIS
    assert client.get_run(*found["train"]).data.params["seed"] == "0"


def test_the_report_is_linked_to_all_runs_and_the_files_hold_what_mlflow_has(copy, monkeypatch):
    key = json.loads((copy.smoke / "report/manifest.json").read_text())["tracking_key"]
    assert "provenance.json" in json.loads((copy.smoke / "tracking/report.json").read_text())["files"]
    runs = len(list((copy.smoke / "runs").rglob("train.json")))
    expected = {"prepare": 1, "base": 1, "train": runs, "convert": runs, "evaluate": runs + 1, "report": 1}
    ids = lineage(copy.results, key)
    assert {stage: len(found) for stage, found in ids.items()} == expected
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{copy.folder}/another.db")
    track(copy.smoke / "config.yaml")
    others = lineage(copy.results, key)
    assert {stage: len(found) for stage, found in others.items()} == expected
    assert all(set(ids[stage]).isdisjoint(others[stage]) for stage in expected)


def benchmark(name, copy, root, tmp_path):
    """Run a benchmark for one round; its process and the result."""
    output = tmp_path / f"{name}.json"
    arguments = ["--config", copy.smoke / "config.yaml", "--output", output, "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)],
        cwd=root,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done, json.loads(output.read_text())


def test_the_benchmark_of_a_step_measures_this_experiment(copy, root, tmp_path):
    """Not how large its ratios are: a small run on a busy machine cannot say that."""
    done, result = benchmark("step", copy, root, tmp_path)
    assert set(result["ratios"]) == {"update", "rollout", "step", "padding"}
    for ratio in [*result["ratios"].values(), *result["one_pass"].values(), result["forward"]]:
        assert ratio["median"] == ratio["values"][0] >= 0
    # What is compared does the same work: as many responses in both updates, one gradient whether in one pass or two.
    assert result["useful"]["plain"] == result["useful"]["full"] == result["useful"]["advantage"]
    assert result["gradient_difference"] < 1e-3
    lines = done.stdout.splitlines()
    [line] = [line for line in lines if "DVP + OTB + diagnostics over plain log-probs" in line]
    assert "≤ 1.05" in line
    assert line.endswith("yes" if result["ratios"]["step"]["median"] <= 1.05 else "no")
    assert sum("one pass over" in line for line in lines) == 2


def test_a_step_is_timed_beside_trls(copy, root, tmp_path):
    pytest.importorskip("trl", reason="TRL is not installed")
    _, result = benchmark("trl_step", copy, root, tmp_path)
    assert result["over_dvp"] == {
        name: [result["seconds"][name] / result["seconds"]["dvp"]] for name in ("TRL", "bare")
    }
    assert all(0 < tokens <= result["responses"] * 64 for tokens in result["tokens"].values())


def test_an_altered_model_is_refused_and_named(copy, dvp):
    weights = copy.smoke / "models" / DVP_MIS / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    scores = copy.smoke / "evals" / DVP_MIS / "held_out/scores.json"
    before = scores.read_bytes()
    status, line, everything = dvp(
        "evaluate", "--config", copy.smoke / "config.yaml", "--run", DVP_MIS, cwd=copy.folder
    )
    weights.write_bytes(whole)
    assert status == 2
    assert line.startswith("dvp evaluate: ")
    assert "model.safetensors: altered since it was written" in line
    assert "Traceback" not in everything
    assert scores.read_bytes() == before


@pytest.fixture
def aime25(tmp_path) -> Path:
    """As many problems as AIME25 has, of the same form."""
    path = tmp_path / "aime25.jsonl"
    problems = [f"Find $m+n$ where $\\frac mn$ is the sum of $\\frac1{{{k}}}$ and ${k}$." for k in range(2, 32)]
    rows = [{"id": str(i), "problem": problem, "answer": str(33 * i)} for i, problem in enumerate(problems)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_thirty_problems_are_sampled_four_times_each(copy, aime25):
    """Last, as it changes the data: the model before RL on AIME25, every sample kept."""

    def use_aime25(value):
        columns = {"problem": "problem", "answer": "answer", "id": "id"}
        value["sources"]["aime25"] = {"kind": "file", "path": str(aime25), "columns": columns}
        value["data"]["evaluation"] = ["aime25"]
        value["evaluation"]["samples_per_problem"]["aime25"] = 4

    copy.edit(use_aime25)
    done = copy.snakemake("results/smoke/evals/base/manifest.json")
    assert done.returncode == 0, done.stdout[-3000:]
    folder = copy.smoke / "evals/base/aime25"
    scores = json.loads((folder / "scores.json").read_text())
    samples = pd.read_parquet(folder / "samples.parquet")
    assert (scores["problems"], scores["samples_per_problem"], scores["samples"], len(samples)) == (30, 4, 120, 120)
    assert set(samples.groupby("problem_id").size()) == {4}
    truth = [json.loads(line) for line in aime25.read_text().splitlines()]
    assert dict(zip(samples["problem_id"], samples["reference"], strict=True)) == {r["id"]: r["answer"] for r in truth}
    value = scores["metrics"]["avg@4"]
    assert value["value"] == samples["correct"].mean()
    assert value["low"] <= value["value"] <= value["high"]
    assert {"pass@1", "pass@2", "pass@4", "maj@4"} <= set(scores["metrics"])


def test_a_slip_in_a_path_does_not_train_on_the_old_data(copy):
    """Neither is the graph built without the file, nor does a stage read what was made of the one before."""
    copy.edit(lambda value: value["sources"]["aime25"].update(path="no/such.jsonl"))
    done = copy.snakemake("--dry-run")
    assert done.returncode == 1
    assert "config/experiments/start/smoke.yaml: sources.aime25.path: no/such.jsonl: no such file" in done.stdout
    assert "Traceback" not in done.stdout
