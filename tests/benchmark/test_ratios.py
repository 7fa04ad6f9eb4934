"""What must stay cheap, as ratios within one run: machines differ, and a busy one slows all that is compared.

Bounds are wide: these tests find what became several times as expensive, not what became a little slower.
"""

import json
import os
import subprocess
import sys
import time

import pytest

from dvp.data.verifier import grade

pytestmark = [pytest.mark.slow, pytest.mark.benchmark]
TOKENS = 256  # enough for the ratios of the reference, which has eight times as many


@pytest.fixture(scope="module")
def reference(root) -> dict:
    """The head's costs as `make bench` found them on a CPU, in fp32: `variants`, and the size of the problem."""
    result = json.loads((root / "results/reference/bench/cpu.json").read_text())
    [case] = [case for case in result["cases"] if (case["name"], case["dtype"]) == ("forward", "float32")]
    return case


@pytest.fixture(scope="module")
def measured(reference, root) -> dict:
    """The same at fewer tokens, here and now, in a process that compiles (the tests' own does not)."""
    code = f"""
import json, torch
from benchmarks.head import Size, forward_variants, measure, problem
variants = forward_variants(*problem(Size({TOKENS}, {reference["shape"]["hidden"]}), torch.float32, "cpu"))
variants = {{name: variants[name] for name in ("bare product", "head", "dense")}}
print(json.dumps(measure("forward", torch.float32, variants, rounds=3, device="cpu")["variants"]))
"""
    environment = {key: value for key, value in os.environ.items() if key != "TORCHDYNAMO_DISABLE"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
def test_the_head_takes_as_long_as_the_reference_says(measured, reference):
    """In units of the bare matrix product, which any head must do; and the dense path is no faster."""
    assert measured["head"]["ratio"] < 2 * reference["variants"]["head"]["ratio"]
    assert measured["head"]["ratio"] < 1.5 * measured["dense"]["ratio"]


@pytest.mark.nightly
def test_the_head_holds_one_chunk_of_logits_and_the_dense_path_all_of_them_several_times(measured, reference):
    """The head's memory does not grow with the tokens, the dense path's does."""
    assert measured["head"]["extra_mib"] < 2 * reference["variants"]["head"]["extra_mib"]
    expected = reference["variants"]["dense"]["extra_mib"] * TOKENS / reference["shape"]["tokens"]
    assert expected / 2 < measured["dense"]["extra_mib"] < 2 * expected


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
    ],
)
def test_grading_takes_time_in_proportion_to_the_response(response):
    """Four times the length: 4 times the time if linear, 16 if quadratic. A millisecond is lost in the noise."""

    def seconds(length: int) -> float:
        text, best = response(length), float("inf")
        for _ in range(3):
            started = time.process_time()
            grade(text, "70", truncated=True)
            best = min(best, time.process_time() - started)
        return max(best, 1e-3)

    assert seconds(100_000) < 10 * seconds(25_000)
