"""What `dvp mismatch` measures: of an engine whose noise is known, and of the real one."""

import json
import math
import shutil
from functools import cache

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dvp.data.prepare import TRAIN_COLUMNS
from dvp.data.reward import VERIFIER
from dvp.experiment.grid import parse_rho
from dvp.experiment.loading import dump_experiment, load_experiment, parse_experiment
from dvp.files import checksums, write_json, write_text
from dvp.measurement import mismatch
from dvp.measurement.files import TABLES, TOKENS
from dvp.measurement.problems import drawn
from dvp.training.rollouts import Problems
from made_up_problems import write_problems
from noisy_engine import NoisyEngine
from rounding import TINY_LOG_PROB

PROMPTS = [[20, 30, 40, 50], [60, 70], [80, 90, 100]]
RUN = "method~rloo/engine~fp32/rho~none/seed~5"
RESPONSES, LONGEST, VOCABULARY = 3, 8, 400


def experiment_of(root, engines=("fp32", "coarse")):
    value = load_experiment("mismatch", root / "config").model_dump(mode="json")
    value["seeds"] = [5]
    value["training"]["max_response_tokens"] = LONGEST
    value["mismatch"] = {
        "policies": ["base", {"method": "rloo", "engine": "fp32"}],
        "engines": list(engines),
        "problems": len(PROMPTS),
        "responses": RESPONSES,
        "rhos": [0.1, "exp(-3)"],
        "margins": [0.5],
    }
    return parse_experiment(value, root / "test.yaml")


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def measure(root, tiny_model, model, tmp_path_factory):
    """Diagnose the tiny model with a noise of σ: (the result, the tables)."""

    @cache
    def run(sigma):
        experiment = experiment_of(root)
        folder = tmp_path_factory.mktemp("measurement")
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        problems = Problems(["a", "b", "c"], ["7", "7", "8"], PROMPTS, tokenizer.pad_token_id, VERIFIER)
        measurement, engine = experiment.measurements("mismatch")[0], NoisyEngine(model, tokenizer, sigma)
        result = mismatch.measure_mismatch(experiment, measurement, list("abc"), problems, model, engine, folder)
        assert result["files"] == checksums(folder)
        return result, {name: pd.read_parquet(folder / f"{name}.parquet") for name in (*TABLES, TOKENS)}

    return run


def test_noise_of_a_known_size_is_measured_as_such(measure):
    sigma = 0.4
    result, tables = measure(sigma)
    noise = tables["noise"].groupby("source").sum(numeric_only=True)
    assert math.sqrt(noise.loc["engine", "epsilon_variance"] / result["positions"]) == pytest.approx(sigma, rel=0.05)
    assert noise.loc["shape", "kl"] < 1e-9 < noise.loc["bf16", "kl"] < noise.loc["engine", "kl"]
    assert result["sharp_violations"] == 0


def test_an_exact_engine_is_as_far_away_as_rounding(measure):
    _, tables = measure(0.0)
    own = tables["noise"].query("source == 'engine'")
    assert own["max_epsilon"].max() < 2e-5
    assert own["kl"].sum() / own["tokens"].sum() < 1e-11
    sets = tables["safe_sets"].query("side == 'none'")
    assert (sets["jaccard"] > 0.999).all()
    assert (sets["outside_train"] < 1e-6).all()


def test_the_log_ratios_of_the_responses_are_those_of_dense_scoring(root, tiny_model, model, measure):
    _, tables = measure(0.4)
    experiment = experiment_of(root)
    engine = NoisyEngine(model, AutoTokenizer.from_pretrained(tiny_model), 0.4)
    sampling = mismatch.Sampling(max_tokens=LONGEST, n=RESPONSES, whole_vocabulary=True)
    seed = mismatch.derived_seed(5, 0, 1)
    for response, one in enumerate(engine.generate([PROMPTS[1]], sampling, [seed])[0]):
        with torch.no_grad():
            logits = model(torch.tensor([PROMPTS[1] + one.token_ids])).logits[0, len(PROMPTS[1]) - 1 : -1].double()
        tokens = torch.tensor(one.token_ids)[:, None]
        log_q = sum(one.log_probs)
        rows = tables["safe_sets"].query(f"problem == 'b' and response == {response} and side == 'none'")
        assert list(rows["rho"]) == experiment.mismatch.rhos
        for row in rows.itertuples():
            log_p = logits.log_softmax(-1).gather(1, tokens).sum().item()
            assert row.log_ratio == pytest.approx(log_p - log_q, abs=len(tokens) * TINY_LOG_PROB)
            below = logits < logits.amax(-1, keepdim=True) + math.log(parse_rho(row.rho))
            pruned = logits.masked_fill(below, -math.inf).log_softmax(-1).gather(1, tokens).sum().item()
            assert row.pruned_log_ratio == pytest.approx(pruned - log_q, abs=len(tokens) * TINY_LOG_PROB)
            mass = logits.softmax(-1).masked_fill(~below, 0.0).sum().item()
            assert row.pruned_mass_sum == pytest.approx(mass, rel=TINY_LOG_PROB)


def test_a_few_positions_at_a_time_give_the_same_tables(measure, monkeypatch):
    """Sums, means over a response's positions, and maxima, of parts that do not divide a response."""
    _, whole = measure(0.4)
    monkeypatch.setattr(mismatch, "ELEMENTS", 3 * VOCABULARY)
    _, parted = measure.__wrapped__(0.4)  # past its cache
    for name in (*TABLES, TOKENS):
        tables = [parted[name], whole[name]]
        if "source" in tables[0]:  # what the controls have depends on the shape
            tables = [table[table["source"] == "engine"] for table in tables]
        if name in mismatch.EDGES:  # rounding may take a pair to the bin beside its own
            names = [column for column in tables[0] if column in ("pairs", "abs_d", "scaled", "infer", "train")]
            tables = [table.groupby("problem")[names].sum() for table in tables]
        parts, expected = (table.drop(columns=["log_p_shape"], errors="ignore") for table in tables)
        pd.testing.assert_frame_equal(parts, expected, rtol=1e-3, atol=1e-6)
    assert (parts["position"] == parts.groupby(["problem", "response"]).cumcount()).all()


def test_the_sampled_tokens_are_written_one_by_one(root, tiny_model, model, measure):
    _, tables = measure(0.4)
    tokens, ends = tables[TOKENS], tables["prefixes"].query("length == @LONGEST")
    log_ratio = (tokens["log_p"] - tokens["log_q"]).groupby([tokens["problem"], tokens["response"]]).sum()
    assert log_ratio.tolist() == pytest.approx(ends.set_index(["problem", "response"])["log_ratio"].tolist())
    noise = tables["noise"].set_index(["problem", "source"])
    assert tokens.groupby("problem")["kl"].sum().to_dict() == pytest.approx(noise.xs("engine", level=1)["kl"].to_dict())
    assert (tokens["log_p_bf16"] - tokens["log_p"]).abs().max() == pytest.approx(
        noise.xs("bf16", level=1)["max_abs_log_ratio"].max()
    )
    one = tokens.iloc[0]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0]])).logits[0, -1].double()
    assert one["log_p"] == pytest.approx(logits.log_softmax(-1)[int(one["token"])].item(), abs=TINY_LOG_PROB)


def test_problems_are_drawn_by_the_seed_without_repetition():
    draws = [drawn(50, 20, seed) for seed in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2]
    assert len(set(draws[0])) == 20


@pytest.fixture(scope="module")
def place(root, tiny_model, tmp_path_factory):
    """Results of the stages before, with the tiny model as base and, as if it were trained, as the run's."""
    results = tmp_path_factory.mktemp("results")
    folder, experiment = results / "mismatch", experiment_of(root)
    write_text(folder / "config.yaml", dump_experiment(experiment))
    shutil.copytree(tiny_model, folder / "base")
    shutil.copytree(tiny_model, folder / "models" / RUN)
    converted = {"tracking_key": "RUN", "config_hash": experiment.config_hash("convert", RUN)}
    write_json(folder / "models" / RUN / "conversion.json", converted | {"files": checksums(tiny_model)})
    (folder / "data").mkdir()
    problems = {"id": [f"p{n}" for n in range(1, 7)], "prompt": ["badu kefi " * n for n in range(1, 7)]}
    write_problems(folder / "data" / "train.parquet", TRAIN_COLUMNS, answer=list("123456"), **problems)
    for stage, part in (("base", "base"), ("prepare", "data")):
        record = {"tracking_key": part, "config_hash": experiment.config_hash(stage)}
        write_json(folder / part / "manifest.json", record | {"files": checksums(folder / part)})
    return folder


@pytest.mark.slow
def test_the_real_engine_in_fp32_differs_by_rounding_and_a_coarse_one_does_not(place, dvp, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    found = {}
    for policy, engine, run in (("base", "fp32", ""), (RUN.rsplit("/", 1)[0], "coarse", f"runs/{RUN}")):
        measurement = f"{policy}/by~{engine}/seed~5"
        status, _, everything = dvp(
            "mismatch", "--config", place / "config.yaml", "--measurement", measurement, "--threads", "1"
        )
        assert status == 0, everything
        folder = place / "mismatch" / measurement
        record = json.loads((folder / "mismatch.json").read_text())
        assert record["files"] == {
            name: digest for name, digest in checksums(folder).items() if name != "mismatch.json"
        }
        assert record["measurement"] == measurement
        assert record["responses"] == len(PROMPTS) * RESPONSES
        assert record["pairs"] == record["positions"] * VOCABULARY
        assert record["sharp_violations"] == 0
        assert record["kl"]["shape"] < 1e-9 < record["kl"]["bf16"]
        found[engine] = record, pd.read_parquet(folder / "noise.parquet").query("source == 'engine'")
        tracking = json.loads((place / "tracking" / run / f"mismatch-by~{engine}-seed~5.json").read_text())
        assert tracking["status"] == "FINISHED"
    assert found["fp32"][1]["max_epsilon"].max() < 1e-3
    assert found["fp32"][0]["kl"]["engine"] < 1e-8
    assert found["coarse"][1]["max_epsilon"].max() > 0.1
    assert found["coarse"][0]["kl"]["engine"] > 1e-3


@pytest.mark.slow
def test_a_cell_that_is_not_asked_for_and_an_altered_model_are_refused_in_one_line(place, dvp):
    config = place / "config.yaml"
    status, line, everything = dvp("mismatch", "--config", config, "--measurement", "base/by~bf16/seed~5")
    assert status == 2
    assert line.startswith("dvp mismatch: mismatch: 'base/by~bf16/seed~5' is not in experiment 'mismatch'; the nearest")
    assert everything == line + "\n"
    model = place / "base" / "model.safetensors"
    whole = model.read_bytes()
    try:
        model.write_bytes(whole[:-1] + b"\1")
        status, line, everything = dvp("mismatch", "--config", config, "--measurement", "base/by~fp32/seed~5")
    finally:
        model.write_bytes(whole)
    assert status == 2
    assert line.startswith("dvp mismatch: ")
    assert "model.safetensors: altered since it was written" in line
    assert everything == line + "\n"
