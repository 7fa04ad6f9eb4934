"""The benchmarks run, and what must stay cheap stays so, as ratios within one run: machines differ, and may be busy.

Bounds are wide: these tests find what became several times as expensive, not what became a little slower.
"""

import json
import os
import re
import subprocess
import sys
import time

import psutil
import pytest
import torch

from benchmarks import gpu, trl_step
from benchmarks.head import page_table
from benchmarks.step import ONE_PASS, TARGETS, format_table
from dvp.data.verifier import grade

# The packages of the environment that the head's benchmark must do without.
WITHOUT = ("pydantic", "tqdm", "transformers", "filelock", "pandas", "yaml", "safetensors", "deepspeed", "vllm")
BARE = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {WITHOUT}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
"""
TINY = """
from benchmarks import head
head.SIZES["cpu"] = (head.Size(24, 8, 300), head.Size(16, 8, 200))
head.main()
"""
TOKENS = 256  # enough for the ratios of the reference, which has eight times as many


def python(code: str, *arguments: str, cwd, **environment) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_head_is_measured_with_nothing_but_torch(tmp_path, root):
    output = tmp_path / "bench" / "cpu.json"
    lines = python(BARE + TINY, "--device", "cpu", "--output", output, "--rounds", "1", cwd=root).splitlines()
    cases = json.loads(output.read_text())["cases"]
    assert {case["dtype"] for case in cases} == {"float32", "bfloat16"}
    assert cases[-1]["shape"] == {"tokens": 16, "hidden": 8, "vocabulary": 200}
    assert all(next(iter(case["variants"].values()))["ratio"] == 1 for case in cases)
    assert sum(line.startswith("forward") for line in lines) == sum(len(case["variants"]) for case in cases)
    profile = python(TINY, "--device", "cpu", "--profile", cwd=root)
    assert all(re.search(r"aten::addmm .* \d+\.\d+[mu]s", part) for part in profile.split("forward + backward: "))


def test_the_page_has_the_kept_numbers_of_the_head(root):
    result = json.loads((root / "results/reference/bench/cpu.json").read_text())
    page = (root / "results/reference/bench/README.md").read_text()
    assert page.partition("<!--head-->\n")[2].partition("\n<!--/head-->")[0] == page_table(result)


def test_the_page_has_the_kept_numbers_of_a_step_beside_trl(root):
    result = json.loads((root / "results/reference/bench/trl_step.json").read_text())
    assert f"```text\n{trl_step.format_table(result)}\n```" in (root / "docs/performance.md").read_text()


@pytest.fixture
def measuring(tmp_path, root):
    """Starts the measurement of a GPU, at sizes for a CPU; it, and the file of its lines."""
    started = []

    def start(*arguments):
        file = tmp_path / "gpu.jsonl"
        command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--output", file, *arguments]
        environment = os.environ | {"PYTHONPATH": str(root / "src")}
        started.append(subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.DEVNULL))
        return started[-1], file

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_case_of_a_gpu_runs_at_tiny_sizes(measuring):
    process, file = measuring()
    assert process.wait() == 0
    found = {line["case"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert list(found) == list(gpu.CASES)
    skipped = {case for case, line in found.items() if line["status"] == "skipped: needs CUDA"}
    assert all(found[case]["status"] == "ok" for case in found if case not in skipped), found
    if not torch.cuda.is_available():
        assert {case.split(",")[0] for case in skipped} == {"tests of a GPU", "mismatch", "trainer"}
    assert found["preflight, fp32"]["passed"]
    assert set(found["decode, processor"]["tokens_per_second"]) == {"2", "4"}


@pytest.mark.slow
def test_a_killed_measurement_leaves_whole_lines_and_nothing_running(measuring):
    process, file = measuring()
    while not (file.exists() and file.stat().st_size):
        assert process.poll() is None
        time.sleep(0.05)
    [case] = psutil.Process(process.pid).children()  # the second one
    process.kill()
    process.wait()
    [line] = map(json.loads, file.read_text().splitlines())
    assert (line["case"], line["status"]) == ("environment", "ok")
    assert file.read_text().endswith("\n")
    case.wait(timeout=60)


def test_a_case_ends_at_its_limit_with_all_that_it_has_started(tmp_path):
    pid = tmp_path / "pid"
    code = "import subprocess, sys; print('begun', flush=True); subprocess.run(['sh', '-c', sys.argv[1]])"
    found = gpu.process([sys.executable, "-c", code, f"echo $$ >{pid}.part; mv {pid}.part {pid}; sleep 300"], 2)
    assert (found["status"], found["said"]) == ("timed out after 2 s", ["begun"])
    if pid.exists():  # a process that was killed is gone, or waits to be collected
        number = int(pid.read_text())
        assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_a_case_that_fails_says_why():
    found = gpu.process([sys.executable, "-c", "raise SystemExit('no kernel')"], 60)
    assert (found["status"], found["said"]) == ("failed with status 1", ["no kernel"])


def test_what_starts_the_cases_has_no_cuda(root):
    assert python("import sys, benchmarks.gpu; print('torch' in sys.modules)", cwd=root).strip() == "False"


@pytest.mark.slow
def test_the_dense_path_is_left_out_where_it_does_not_fit(tmp_path, monkeypatch, root):
    monkeypatch.syspath_prepend(root / "benchmarks")
    measured = {}
    for free in (0, 2**40):
        monkeypatch.setattr(gpu, "free_bytes", lambda free=free: free)
        measured[free] = gpu.head(gpu.Place(True, tmp_path), 8192, 4096, 151_936)
    assert measured[0]["variants"].keys() == measured[2**40]["variants"].keys() - {"dense"}
    assert measured[0]["left_out"] == "dense: needs 0 GB, free are 0"
    assert "left_out" not in measured[2**40]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.benchmark
def test_the_head_costs_what_the_reference_says(root):
    """In units of the bare matrix product, which any head must do; and its memory does not grow with the tokens."""
    cases = json.loads((root / "results/reference/bench/cpu.json").read_text())["cases"]
    [reference] = [case for case in cases if (case["name"], case["dtype"]) == ("forward", "float32")]
    code = f"""
import json, torch
from benchmarks.head import Size, forward_variants, measure, problem
variants = forward_variants(*problem(Size({TOKENS}, {reference["shape"]["hidden"]}), torch.float32, "cpu"))
variants = {{name: variants[name] for name in ("bare product", "head", "dense")}}
print(json.dumps(measure("forward", torch.float32, variants, rounds=3, device="cpu")["variants"]))
"""
    # In a process that compiles, which the tests' own does not.
    environment = {key: value for key, value in os.environ.items() if key != "TORCHDYNAMO_DISABLE"}
    measured = json.loads(python(code, cwd=root, env=environment).splitlines()[-1])
    assert measured["head"]["ratio"] < 2 * reference["variants"]["head"]["ratio"]
    assert measured["head"]["ratio"] < 1.5 * measured["dense"]["ratio"]
    assert measured["head"]["extra_mib"] < 2 * reference["variants"]["head"]["extra_mib"]
    expected = reference["variants"]["dense"]["extra_mib"] * TOKENS / reference["shape"]["tokens"]
    assert expected / 2 < measured["dense"]["extra_mib"] < 2 * expected


@pytest.mark.parametrize(
    ("name", "value", "met"),
    [("update", 1.0, True), ("update", 0.99, False), ("step", 1.05, True), ("step", 1.06, False)],
)
def test_the_table_of_a_step_says_whether_each_target_is_met(name, value, met):
    def ratio(median: float) -> dict:
        return {"median": median, "values": [median - 0.01, median, 3.0]}

    values = {other: value if other == name else target.bound for other, target in TARGETS.items()}
    result = {
        **{"experiment": "tiny", "responses": 8, "threads": 1, "rounds": 3, "forward": ratio(0.33)},
        "ratios": {other: target.of(ratio(values[other])) for other, target in TARGETS.items()},
        "one_pass": {case: ratio(1.2) for case in ONE_PASS},
        "useful": {"advantage": 0.5, "mis": 0.25},
    }
    target = TARGETS[name]
    [line] = [line for line in format_table(result).splitlines() if line.startswith(target.title)]
    said = [f"{value:.3f}", f"({value - 0.01:.3f}–3.000)", target.sign, f"{target.bound:g}", "yes" if met else "no"]
    assert line.removeprefix(target.title).split() == said


def test_the_table_beside_trl_has_medians_and_ranges():
    result = {
        **{"experiment": "smollm2", "responses": 64, "threads": 1},
        "seconds": {"dvp": 10.0, "TRL": 30.0, "bare": 9.0},
        "over_dvp": {"TRL": [2.0, 3.0, 5.0], "bare": [0.5, 0.9, 1.0]},
    }
    _, own, trl, bare = trl_step.format_table(result).splitlines()
    assert own.split() == ["dvp", "10.0", "s/step"]
    assert trl.endswith("30.0 s/step  3.00 times dvp's (2.00 to 5.00)")
    assert bare.endswith("9.0 s/step  0.90 times dvp's (0.50 to 1.00)")


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.parametrize(
    "response",
    [
        lambda n: r"\boxed{" * n,
        lambda n: r"\boxed{" * n + "}" * n,
        lambda n: r"\boxed{" + "{" * n + "}" * n + "}",
        lambda n: r"\boxed{" + "1+" * n + "1}",
        lambda n: "Answer: " * n,
        lambda n: "the answer is " * n,
        lambda n: "answer" + " " * n + ":",
        lambda n: "Answer: " + "$" * n,
        lambda n: "Answer: " + "9" * n,
        lambda n: "Answer:" + "\n" * n,
        lambda n: "#### 1\n" * n + "x" * n,
        lambda n: "\\" * n,
        lambda n: r"\boxed{1}, " * n,
        lambda n: r"\boxed{1}" + " " * n + r", \boxed{2}",
        lambda n: r"\boxed{1}. " + "Wait, " * n,
    ],
)
def test_grading_takes_time_in_proportion_to_the_response(response):
    """Four times the length: 4 times the time if linear, 16 if quadratic. A millisecond is lost in the noise."""

    def seconds(length: int) -> float:
        text, best = response(length), float("inf")
        for _ in range(3):
            started = time.process_time()
            assert not grade(text, "70", truncated=True)
            best = min(best, time.process_time() - started)
        return max(best, 1e-3)

    assert seconds(100_000) < 10 * seconds(25_000)
