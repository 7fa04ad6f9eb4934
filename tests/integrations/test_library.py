"""The method as a library: its names, and an installation that has nothing else."""

import importlib
import re
import subprocess

import pytest

from dvp import core


@pytest.fixture(scope="module")
def alone(environment):
    return environment()


@pytest.mark.slow
def test_the_core_needs_torch_and_pydantic(wheel):
    """torch as verl 0.9.1 (2.11) and prime-rl (2.9) have it, too."""
    assert sorted(wheel[1]) == ["pydantic", "torch"]
    assert list(wheel[1]["torch"].filter(["2.8.0", "2.9.1", "2.11.0", "2.13.0"])) == ["2.9.1", "2.11.0", "2.13.0"]


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


@pytest.mark.slow
def test_the_core_alone_says_what_the_pipeline_needs(alone, isolated):
    program = "import sys; sys.argv = ['dvp', 'list']; from dvp.cli import main; main()"
    done = subprocess.run(isolated(alone, program), check=False, capture_output=True, text=True, timeout=300, cwd=alone)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "dvp: the pipeline is not installed; pip install '.[pipeline]'\n"
