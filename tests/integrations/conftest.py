import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Make a folder of packages that has these distributions, what they require, and nothing else."""

    def make(*names: str) -> Path:
        folder = tmp_path_factory.mktemp("site")
        left, there = list(names), set()
        while left:
            found = distribution(left.pop())
            if found.metadata["Name"] in there:
                continue
            there.add(found.metadata["Name"])
            wanted = [Requirement(line) for line in found.requires or []]
            left += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
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
