"""The code and the commit that results are recorded with."""

import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dvp import provenance
from dvp.provenance import device, git_commit


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that nobody tracks."""
    copied = tmp_path / "dvp"
    copied.mkdir()
    shutil.copy(provenance.__file__, copied)
    monkeypatch.setattr(provenance, "PACKAGE", copied)
    git_commit.cache_clear()
    yield copied
    git_commit.cache_clear()


def git(folder, *arguments: str) -> str:
    options = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *options, *arguments], capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()


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
    (package / "provenance.py").write_text("x", encoding="utf-8")
    git_commit.cache_clear()
    assert git_commit() == f"{head}+changes"


@pytest.mark.parametrize("around", [[], ["init", "commit"], ["no git"]])
def test_outside_a_checkout_the_commit_is_unknown(package, monkeypatch, around):
    """Also in somebody else's repository, which does not track the package installed within it."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(package.parent.parent))
    for command in around:
        if command == "no git":
            monkeypatch.setenv("PATH", "")
        else:
            git(package.parent, command, "--quiet", *["--allow-empty", "--message=x"] * (command == "commit"))
    assert git_commit() == "unknown"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx avx2 avx512f avx512bw amx_bf16", "A CPU (AMX)"),
        ("fpu avx avx2 avx512f", "A CPU (AVX-512)"),
        ("fpu avx", "A CPU"),
    ],
)
def test_the_device_of_a_stage_without_a_gpu_is_its_processor(flags, expected, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(
        f"processor\t: 0\nmodel name\t: A CPU\nflags\t\t: {flags}\n\nprocessor\t: 1\nmodel name\t: Another\n"
    )
    monkeypatch.setattr(provenance, "PROCESSORS", tmp_path / "cpuinfo")
    monkeypatch.setitem(sys.modules, "torch", None)
    provenance.processor.cache_clear()
    assert device() == expected
    provenance.processor.cache_clear()


def test_a_gpu_is_named(monkeypatch):
    cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "NVIDIA H100")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert device() == "NVIDIA H100"
