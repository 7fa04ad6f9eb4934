"""A working copy of the workflow: configuration and rules of its own, the installed package shared."""

import os
import shutil
import subprocess
import sys
from pathlib import Path


class Copy:
    """Runs Snakemake in `folder`, always with the arguments `last` at the end."""

    def __init__(self, folder: Path, root: Path, *last: str):
        self.folder, self.results, self._last = folder, folder / "results", last
        for name in ("config", "envs", "profiles", "workflow"):
            shutil.copytree(root / name, folder / name)
        for name in ("Snakefile", "Makefile"):
            shutil.copy(root / name, folder)

    def snakemake(self, *arguments: str) -> subprocess.CompletedProcess:
        return self._run(Path(sys.executable).parent / "snakemake", *arguments, *self._last)

    def make(self, *arguments: str) -> subprocess.CompletedProcess:
        """With the environment that the tests have, which is not installed again."""
        return self._run("make", "--no-print-directory", "--old-file=install", f"VENV={sys.prefix}", *arguments)

    def _run(self, *command: str | Path) -> subprocess.CompletedProcess:
        # Of a make that runs the tests, this one is no part.
        left_out = ("MLFLOW_TRACKING_URI", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")
        return subprocess.run(
            command,
            cwd=self.folder,
            env={key: value for key, value in os.environ.items() if key not in left_out},
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
        )
