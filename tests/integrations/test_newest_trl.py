"""The package index's newest TRL, with this environment's other packages."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("trl", reason="TRL is not installed (envs/dev.txt has it)")
from dvp.integrations.trl import VERSION

TESTS = "projects_own or own_corrections or left_v_s or without_reward or table_of_completions or private_parts"


@pytest.mark.nightly
def test_the_newest_trl_trains_as_the_known_one(root, tmp_path):
    """It is refused until someone has looked: docs/trl.md. This says what there is to look at."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "newest", "trl"]
    asked = subprocess.run(pip, check=False, capture_output=True, text=True, timeout=300)
    if asked.returncode != 0:
        reason = f"the package index has no TRL, or cannot be reached: {asked.stderr.strip()[-300:]}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    [found] = (tmp_path / "newest").glob("trl-*.dist-info")
    if found.name.startswith(f"trl-{VERSION}"):
        pytest.skip(f"the newest is {found.name.removesuffix('.dist-info')}, of the version that all tests are with")
    folders = [tmp_path / "newest", root / "src", root / "tests/integrations"]
    tests = ["-p", "trl_of_any_version", root / "tests/integrations/test_trl.py", "-k", TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", tmp_path / "pytest", *tests],
        check=False,
        capture_output=True,
        text=True,
        timeout=800,
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
    )
    assert done.returncode == 0, f"{found.name}\n{done.stdout[-5000:]}{done.stderr[-2000:]}"
