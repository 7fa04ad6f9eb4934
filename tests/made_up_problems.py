"""Tables of problems as `prepare` writes them, for tests that make up what matters to them."""

from pathlib import Path

import pandas as pd


def write_problems(path: Path, columns: tuple[str, ...], **values: list[str] | str) -> None:
    """A table with these columns, those that are not given full of `made up`."""
    length = next(len(given) for given in values.values() if isinstance(given, list))
    pd.DataFrame({name: values.get(name, "made up") for name in columns}, index=range(length)).to_parquet(path)
