import shutil
import subprocess
import sys
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement


@pytest.fixture(scope="session")
def wheel(root, tmp_path_factory):
    """The package as pip installs it, in a folder; and the names of what it requires, by extra, "" being none."""
    source, built, unpacked = (tmp_path_factory.mktemp(name) for name in ("source", "wheel", "unpacked"))
    shutil.copytree(root / "src" / "dvp", source / "src" / "dvp", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", built, source], check=True, timeout=300)
    subprocess.run([*pip, "install", "--no-deps", "--target", unpacked, *built.iterdir()], check=True, timeout=300)
    (metadata,) = unpacked.glob("dvp-*.dist-info/METADATA")
    needed = Parser().parsestr(metadata.read_text(encoding="utf-8")).get_all("Requires-Dist")
    names = {extra: [] for extra in ("", "diagnose", "mismatch", "pipeline")}
    for one in map(Requirement, needed):
        [extra] = [name for name in names if one.marker is None or one.marker.evaluate({"extra": name})][:1]
        names[extra] += [*names[next(iter(one.extras))], *names[""]] if one.name == "dvp" else [one.name]
    return unpacked / "dvp", names


@pytest.fixture(scope="session")
def environment(wheel, tmp_path_factory):
    """Make a folder of packages that has the package, these distributions, what all require, and nothing else."""

    def make(*names: str) -> Path:
        # dill, with which TRL's data sets are told apart, takes other folders' modules for a script's own.
        folder = tmp_path_factory.mktemp("environment") / "site-packages"
        shutil.copytree(wheel[0], folder / "dvp")
        left, there = [Requirement(name) for name in (*names, *wheel[1][""])], set()
        while left:
            asked = left.pop()
            try:
                found = distribution(asked.name)
            except PackageNotFoundError:  # the locks leave out what an engine requires and has no use for here
                continue
            if (key := (found.metadata["Name"], frozenset(asked.extras))) in there:
                continue
            there.add(key)
            extras = ["", *asked.extras]
            left += [
                one
                for one in map(Requirement, found.requires or [])
                if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras)
            ]
            for top in {Path(file).parts[0] for file in found.files} - {"..", "__pycache__"}:
                if not (folder / top).exists():
                    (folder / top).symlink_to(found.locate_file(top))
        return folder

    return make


@pytest.fixture(scope="session")
def isolated():
    """The command that runs a program in a Python with the standard library and a folder of packages."""

    def command(folder: Path, program: str) -> list[str]:
        start = f"import sys; sys.path.append({str(folder)!r}); exec(sys.argv[1])"
        return [sys.executable, "-I", "-S", "-c", start, program]

    return command
