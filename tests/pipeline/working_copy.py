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
        shutil.copy(root / "Snakefile", folder)

    def snakemake(self, *arguments: str) -> subprocess.CompletedProcess:
        environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
        return subprocess.run(
            [Path(sys.executable).parent / "snakemake", *arguments, *self._last],
            cwd=self.folder,
            env=environment,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
        )
