"""What `make install` asks of pip and of Python, which are played; and the address that `make mlflow` prints."""

import re
import shutil
import subprocess
import sys

import pytest

PIP = '#!/bin/sh\necho "$@" >>"$0.log"\nexit 1\n'
OLD = '#!/bin/sh\ntest "$1" = --version && echo "Python 3.12.3"\nexit 1\n'


@pytest.fixture
def make(root, tmp_path):
    """Runs `make install` in a copy with an environment whose pip finds nothing."""
    shutil.copytree(root / "envs", tmp_path / "envs")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(root / name, tmp_path)

    def run(*arguments, pip=True):
        if pip:
            place = tmp_path / ".venv/bin"
            place.mkdir(parents=True)
            (place / "python").symlink_to(sys.executable)
            (place / "pip").write_text(PIP)
            (place / "pip").chmod(0o755)
        done = subprocess.run(
            ["make", "install", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        log = tmp_path / ".venv/bin/pip.log"
        return done.stderr, log.read_text().splitlines() if log.exists() else []

    return run


@pytest.mark.parametrize(("env", "pages"), [("cuda", [False]), ("cpu", [False, True])])
def test_only_the_cpu_lock_takes_builds_of_torchs_own_page(make, env, pages):
    _, calls = make(f"ENV={env}")
    assert all(f"envs/{env}.txt" in call for call in calls)
    assert ["download.pytorch.org" in call for call in calls] == pages


def test_another_python_is_told_where_3_11_comes_from(make, tmp_path):
    python = tmp_path / "python3"
    python.write_text(OLD)
    python.chmod(0o755)
    said, _ = make(f"PYTHON={python}", pip=False)
    assert "expected Python 3.11, of which the locks are, found Python 3.12.3" in said
    assert "apt install python3.11-venv python3.11-dev" in said
    assert "make PYTHON=$(uv python find 3.11)" in said


def test_the_kernels_are_tested_with_the_triton_of_a_gpu(root):
    """Its interpreter runs them where there is no GPU."""
    cpu, cuda = (
        dict(line.split("==") for line in (root / f"envs/{env}.txt").read_text().splitlines() if "==" in line)
        for env in ("cpu", "cuda")
    )
    assert cpu["triton"] == cuda["triton"]
    assert cpu["torch"].partition("+")[0] == cuda["torch"]


def test_the_pages_address_of_mlflow_is_the_one_that_make_prints(root):
    """Without its last part the address opens MLflow's page for GenAI, which has no metrics."""
    (told,) = re.findall(r"http://127\.0\.0\.1:5000/[^\s;]+", (root / "docs/browse.md").read_text(encoding="utf-8"))
    asked = ["make", "--dry-run", "mlflow"]
    printed = subprocess.run(asked, cwd=root, capture_output=True, text=True, check=True).stdout
    assert f"open {told}" in printed
    assert told.endswith("/#/experiments?workflowType=machine_learning")
