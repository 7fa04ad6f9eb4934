"""What a report shows (shown.yaml): of each table and figure what it is called, and its caption."""

from functools import cache
from pathlib import Path

from dvp.experiment.loading import read_yaml


@cache
def shown(kind: str) -> dict[str, dict[str, str]]:
    """By name, of `tables` or `figures` title and caption, in which {experiment} stands for the experiment's name."""
    return read_yaml(Path(__file__).with_name("shown.yaml"))[kind]
