"""Record which commit and device a result comes from. Nothing is decided by this: see dvp.versions."""

import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = Path(__file__).parent
PROCESSORS = Path("/proc/cpuinfo")
VECTORS = {"amx_bf16": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}  # by the kernel's name, the widest first


@cache
def git_commit() -> str:
    """Return the source tree's commit, with `+changes` if files differ from it; "unknown" outside a checkout of dvp.

    An installed package may lie within somebody else's repository: only one that tracks this file counts.
    """
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        commit = _git("rev-parse", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def describe_version() -> str:
    """Return the installed version and the commit, as `dvp --version` prints them."""
    try:
        number = version("dvp")
    except PackageNotFoundError:  # as in envs/dvp.def, which has the sources alone
        number = "(not installed)"
    return f"dvp {number}, commit {git_commit()}"


def device() -> str:
    """Return the name of the GPU, or else of the processor with its widest vectors: each rounds in its own way."""
    # A stage that has not imported torch computes with no GPU.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return processor()


@cache
def processor() -> str:
    """Return the processor's name and, on x86, its widest vectors: they decide how sums round and what vLLM can do."""
    found = {}
    for line in PROCESSORS.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    flags = found.get("flags", "").split()
    vectors = next((name for flag, name in VECTORS.items() if flag in flags), None)
    name = found.get("model name") or platform.processor() or platform.machine()
    return f"{name} ({vectors})" if vectors else name


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, check=True, timeout=30)
    return result.stdout.strip()
