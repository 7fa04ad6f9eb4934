"""`dvp mismatch --model`: what a user sees of a model of their own, by the real engine; and what is refused."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from families import FAMILIES, Family, write_model

from dvp.cli import main

ROOT = Path(__file__).parents[2]
SMALL = ["--count", "3", "--responses", "2", "--response-tokens", "24"]


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    file = tmp_path_factory.mktemp("problems") / "problems.jsonl"
    rows = [{"problem": "badu kefi " * number, "answer": str(number)} for number in range(1, 6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def measure(model, problems, output, *options, program=("-m", "dvp.cli")):
    """What is printed, and the page."""
    command = [sys.executable, *program, "mismatch", "--model", model, "--problems", problems, "--output", output]
    command += [*options, "--threads", "1"]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, check=True, capture_output=True, text=True, timeout=900)
    return done.stdout, (output / "mismatch.html").read_text(encoding="utf-8")


def paragraphs(page):
    return re.findall(r'<p class="verdict[\w ]*">(.*?)</p>', page)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3", "Llama", "GPT-2"])
def test_a_page_for_a_model_of_any_layout(family, problems, tmp_path):
    """Engines from exact to coarse: each has its paragraph, and the one in fp32 needs nothing."""
    model = write_model(tmp_path / "model", FAMILIES[family])
    engines = ["fp32", "coarse"] if family == "Llama" else ["fp32"]
    asked = [part for engine in engines for part in ("--engine", engine)]
    printed, page = measure(model, problems, tmp_path / "out", *SMALL, *asked, "--rho", "0.1", "--rho", "exp(-3)")
    for engine, text in zip(engines, paragraphs(page), strict=True):
        assert text.startswith(f"Engine {engine}: KL ")
        assert ("needs no correction" in text) == (engine == "fp32")
        record = json.loads((tmp_path / "out" / engine / "mismatch.json").read_text())
        assert (record["problems"], record["responses"]) == (3, 6)
        assert record["error"] < record["limit"]
        tokens = pd.read_parquet(tmp_path / "out" / engine / "tokens.parquet")
        assert len(tokens) == record["positions"]
        sets = pd.read_parquet(tmp_path / "out" / engine / "safe_sets.parquet")
        assert set(sets["rho"]) == {"0.1", "exp(-3)"}
        assert re.search(rf"^{engine} ", printed, flags=re.M)
    assert "vLLM 0.32" in page
    assert str(model) in page
    assert str(tmp_path / "out" / "mismatch.html") in printed.splitlines()[-1]


@pytest.mark.slow
def test_a_planted_engine_error_is_found_and_named(problems, tmp_path):
    """Positions count half in the engine alone: no rounding, and the page says which engine and what it is like."""
    model, broken = (
        write_model(tmp_path / "model", FAMILIES["Qwen3"]),
        Path(__file__).with_name("broken_engine_process.py"),
    )
    printed, page = measure(model, problems, tmp_path / "out", *SMALL, "--engine", "fp32", program=[broken])
    [text] = paragraphs(page)
    assert "This is an engine error: with its own weights the trainer is off it by 0." in text
    assert text.startswith("Engine fp32: KL ")
    assert re.search(r"look at (rotary scaling, positions|the weights)", text)
    assert 'class="verdict error"' in page
    assert re.search(r"^fp32 .* check first$", printed, flags=re.M)


@pytest.mark.slow
def test_a_wide_vocabulary_takes_little_memory(problems, tmp_path):
    """384 positions of 151,936 entries: as Python lists they would be 6.5 GB, with what is made of them far more."""
    model = write_model(
        tmp_path / "model", Family("qwen3", {"vocab_size": 151_936, "hidden_size": 32, "max_position_embeddings": 512})
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    options = ["--count", "1", "--responses", "4", "--response-tokens", "96", "--rho", "0.01"]
    measure(model, problems, tmp_path / "out", *options)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert max(peak, before) < 3.5 * 2**20  # KiB
    record = json.loads((tmp_path / "out/bf16/mismatch.json").read_text())
    assert record["vocabulary"] == 151_936
    assert record["positions"] > 300


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "expected --config FILE --measurement MEASUREMENT, or --model MODEL"),
        (["--model", "x", "--config", "y"], "expected --config FILE --measurement MEASUREMENT, or --model MODEL"),
        (["--model", ".", "--engine", "abacus"], "--engine: 'abacus' is not defined; known are bf16, "),
        (["--model", ".", "--rho", "2"], "--rho: ρ must lie in (0, 1), written like 0.01 or exp(-13); found '2'"),
        (["--model", ".", "--problems", "no.jsonl"], "--problems: no.jsonl: no such file"),
        (["--model", ".", "--problems", "stories", "--count", "2"], ".: not a Hugging Face model directory"),
        (["--model", "../no//model"], "../no//model cannot be downloaded from the hub (HFValidationError"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_line(options, line, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["mismatch", *options]) == 2
    assert capsys.readouterr().err.startswith(f"dvp mismatch: {line}")
