"""Tables of problems in the format of `prepare`, of which a test gives only the columns that matter to it."""

from pathlib import Path

import pandas as pd


def write_problems(path: Path, columns: tuple[str, ...], **values: list[str] | str) -> None:
    """Write a table with these columns; those that are not given hold the text `made up`."""
    length = next(len(given) for given in values.values() if isinstance(given, list))
    pd.DataFrame({name: values.get(name, "made up") for name in columns}, index=range(length)).to_parquet(path)
