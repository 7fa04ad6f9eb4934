"""The method as a library: its names, and an installation that has nothing else."""

import importlib
import re
import shutil
import subprocess
import sys
from email.parser import Parser

import pytest

from dvp import core


@pytest.fixture(scope="module")
def alone(root, tmp_path_factory, environment):
    """The package as it is installed without extras, with what it requires and nothing else."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(root / "src" / "dvp", source / "src" / "dvp", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    wheels = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, source], check=True, timeout=300)
    (wheel,) = wheels.iterdir()
    unpacked = tmp_path_factory.mktemp("unpacked")
    subprocess.run([*pip, "install", "--no-deps", "--target", unpacked, wheel], check=True, timeout=300)
    (metadata,) = unpacked.glob("dvp-*.dist-info/METADATA")
    needed = Parser().parsestr(metadata.read_text(encoding="utf-8")).get_all("Requires-Dist")
    names = [re.match(r"[\w-]+", line)[0] for line in needed if "extra ==" not in line]
    assert sorted(names) == ["numpy", "pydantic", "torch"]
    site = environment(*names)
    shutil.copytree(unpacked / "dvp", site / "dvp")
    return site


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
