"""The code that a stage depends on, and the commit."""

import re
import shutil
import subprocess

import pytest

from dvp import provenance
from dvp.provenance import code_hash, git_commit


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the package that `code_hash` reads, to be edited."""
    copied = shutil.copytree(provenance.PACKAGE, tmp_path / "dvp", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(provenance, "PACKAGE", copied)
    code_hash.cache_clear()
    git_commit.cache_clear()
    yield copied
    code_hash.cache_clear()
    git_commit.cache_clear()


def edit(path) -> None:
    path.write_text(path.read_text(encoding="utf-8") + "\n# edited\n", encoding="utf-8")
    code_hash.cache_clear()


def git(folder, *arguments: str) -> str:
    options = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *options, *arguments], capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()


def test_the_commit_is_one_with_a_mark_for_changes():
    assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?|unknown", git_commit())


def test_the_commit_of_a_checkout_before_and_after_a_change(package):
    git(package, "init", "--quiet")
    git(package, "add", ".")
    git(package, "commit", "--quiet", "--message", "x")
    head = git(package, "rev-parse", "HEAD")
    assert git_commit() == head
    # Results and notes that git does not know are no change of the code.
    (package / "notes.txt").write_text("x", encoding="utf-8")
    git_commit.cache_clear()
    assert git_commit() == head
    edit(package / "errors.py")
    git_commit.cache_clear()
    assert git_commit() == f"{head}+changes"


def test_outside_a_checkout_the_commit_is_unknown(package, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(package.parent))
    assert git_commit() == "unknown"
    git_commit.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert git_commit() == "unknown"


def test_the_hash_of_code_is_stable(package):
    first = code_hash("train")
    assert re.fullmatch("[0-9a-f]{12}", first)
    code_hash.cache_clear()
    assert code_hash("train") == first
    assert code_hash("report_training") != first


@pytest.mark.parametrize(
    ("module", "file", "changes"),
    [
        ("train", "training/loop.py", True),
        ("train", "core/advantages.py", True),
        ("train", "core/safe_vocabulary.py", True),  # imported by backend's head
        ("train", "training/checkpoint.py", True),  # from dvp.training import checkpoint
        ("train", "data/equality.py", True),  # from dvp.data import equality, in the verifier
        ("train", "rollout/rounding.py", True),
        ("train", "data/prompts.py", True),
        ("evaluate", "rollout/vllm.py", True),
        ("evaluate", "evaluation/tasks/_math.yaml", True),
        ("evaluate", "evaluation/tasks/utils.py", True),
        ("evaluate", "training/loop.py", False),
        ("train", "analysis/report.py", False),
        ("train", "evaluation/metrics.py", False),
        ("prepare", "data/stories.py", True),
        ("prepare", "training/loop.py", False),
        ("report_training", "analysis/bootstrap.py", True),
        ("report_training", "core/head.py", False),
    ],
)
def test_an_edited_module_counts_where_it_is_imported(package, module, file, changes):
    before = code_hash(module)
    edit(package / file)
    assert (code_hash(module) != before) is changes


def test_an_import_inside_a_function_counts(package, monkeypatch):
    monkeypatch.setitem(provenance.STAGE_MODULES, "lazy", ("dvp.lazy",))
    (package / "lazy.py").write_text("def f():\n    import dvp.core.importance\n", encoding="utf-8")
    before = code_hash("lazy")
    edit(package / "core" / "importance.py")
    assert code_hash("lazy") != before


def test_what_training_depends_on():
    modules = provenance._closure("dvp.training.loop")
    assert {
        "dvp.training.loop",
        "dvp.core.head",
        "dvp.rollout.engine",
        "dvp.experiment.config",
        "dvp.errors",
    } <= modules
    assert not {module for module in modules if module.startswith(("dvp.analysis", "dvp.evaluation", "dvp.cli"))}


@pytest.mark.parametrize("stage", provenance.STAGE_MODULES)
def test_modules_that_import_each_other_end(stage):
    assert all(provenance._exists(name) for name in provenance._closure(*provenance.STAGE_MODULES[stage]))
