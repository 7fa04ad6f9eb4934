"""The package is to be halved: it has fewer lines than before, and is to have fewer still."""

import subprocess

MOST = 23_870


def test_src_does_not_grow(root):
    """Lines of src. The number is lowered at every step on the way to 15,000; what must raise it takes its own away."""
    files = subprocess.run(
        ["git", "ls-files", "src/*.py"], cwd=root, check=True, capture_output=True, text=True
    ).stdout.split()
    lines = sum(len((root / file).read_bytes().splitlines()) for file in files)
    assert 0 < lines <= MOST
