"""From which code and which commit a result comes. It is recorded, and decides nothing: see dvp.versions."""

import hashlib
import subprocess
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent


@cache
def git_commit() -> str:
    """The commit of the source tree, with `+changes` if files differ from it; "unknown" outside a git checkout."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@cache
def code_hash() -> str:
    """Hash (12 hex digits) of the package's source: every .py and .yaml file of it, with its name."""
    digest = hashlib.sha256()
    for file in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.yaml")]):
        digest.update(f"{file.relative_to(PACKAGE)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, check=True, timeout=30)
    return result.stdout.strip()
