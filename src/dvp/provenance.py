"""From which code and which commit a result comes."""

import ast
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


# What each stage's result depends on; `dvp.stages` itself only moves files.
STAGE_MODULES = {
    "prepare": ("dvp.data.prepare",),
    "base": ("dvp.training.base",),
    "train": ("dvp.training.loop", "dvp.rollout.vllm", "dvp.data.prompts", "dvp.conversion"),
    "convert": ("dvp.conversion",),
    "evaluate": (
        "dvp.evaluation.runner",
        "dvp.evaluation.tasks",
        "dvp.evaluation.tasks.utils",
        "dvp.rollout.vllm",
        "dvp.training.base",  # check_vocabulary
    ),
    "mismatch": ("dvp.measurement.mismatch", "dvp.rollout.vllm", "dvp.data.prompts", "dvp.training.base"),
    "bias": ("dvp.measurement.bias",),
    "report_training": ("dvp.analysis.report",),
    "report_mismatch": ("dvp.analysis.mismatch",),
    "report_bias": ("dvp.analysis.bias",),
    "report_sweep": ("dvp.analysis.sweep",),
    "claims": ("dvp.analysis.verdicts",),
}


@cache
def code_hash(stage: str) -> str:
    """Hash (12 hex digits) of the modules that a stage runs, of all that they import here, and of their YAML files.

    Snakemake sees changes in a rule, not in the package that the rule runs; with this hash among a rule's params, an
    edited module re-runs the stages that depend on it, and no other.
    """
    digest = hashlib.sha256()
    for name in sorted(_closure(*STAGE_MODULES[stage])):
        file = _file(name)
        digest.update(file.read_bytes())
        if file.name == "__init__.py":
            for data in sorted(file.parent.glob("*.yaml")):
                digest.update(data.read_bytes())
    return digest.hexdigest()[:12]


def _closure(*modules: str) -> set[str]:
    found, waiting = set(), list(modules)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        # Of `from dvp.x import y`, y may be a module or not.
        waiting += [one for one in _imported(_file(name).read_text(encoding="utf-8")) if _exists(one)]
    return found


@cache  # most modules are part of several stages
def _imported(source: str) -> list[str]:
    """Everything of this package that a module imports, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dvp":
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if alias.name.split(".")[0] == "dvp"]
    return names


def _file(name: str) -> Path:
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _exists(name: str) -> bool:
    return _file(name).is_file()


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, check=True, timeout=30)
    return result.stdout.strip()
