"""benchmarks/head.py on tiny sizes: that it runs, with nothing but torch, and what its table has."""

import json
import re
import subprocess
import sys

import pytest
import torch

# The packages of the environment that the benchmark must do without.
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


@pytest.mark.slow
def test_it_runs_with_nothing_but_torch(tmp_path, root):
    output = tmp_path / "bench" / "cpu.json"
    arguments = ["--device", "cpu", "--output", str(output), "--rounds", "1"]
    command = [sys.executable, "-c", BARE + TINY, *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cases = json.loads(output.read_text())["cases"]
    assert {case["dtype"] for case in cases} == {"float32", "bfloat16"}
    assert cases[-1]["shape"] == {"tokens": 16, "hidden": 8, "vocabulary": 200}
    for case in cases:
        assert ("head, logits in float32" in case["variants"]) == (case["dtype"] == "bfloat16")
        assert next(iter(case["variants"].values()))["ratio"] == 1
    lines = done.stdout.splitlines()
    assert sum(line.startswith("forward") for line in lines) == sum(len(case["variants"]) for case in cases)
    assert any("Liger's fused head 24.9 ms and 1.3 GiB" in line for line in lines)


@pytest.mark.slow
def test_the_profile_names_the_heads_products(root):
    arguments = ["--device", "cpu", "--profile"]
    done = subprocess.run(
        [sys.executable, "-c", TINY, *arguments], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    forward, both = done.stdout.split("forward + backward: ")
    assert all(re.search(r"aten::addmm .* \d+\.\d+[mu]s", part) for part in (forward, both))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_one_line(root):
    done = subprocess.run(
        [sys.executable, root / "benchmarks/head.py", "--device", "cuda"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "error: --device cuda: torch finds no GPU here\n")
