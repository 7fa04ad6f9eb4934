"""The two tables that `prepare` writes, and how the stages after it read them: train.parquet and eval.parquet."""

from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from dvp.data.sources import UNREADABLE, first_line
from dvp.errors import DvpError

TRAIN_COLUMNS = ("id", "source", "problem", "answer", "prompt")
EVAL_COLUMNS = ("task", "id", "problem", "answer", "prompt")


def read_problems(path: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    """One of the tables. Raises DvpError, naming the file, unless it has rows and these columns, all of texts."""
    try:
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow.names
            if any(found.count(column) != 1 for column in columns):
                raise DvpError(f"{path}: expected columns {', '.join(columns)}, each once; found {', '.join(found)}")
            table = file.read(list(columns))
        texts = {column: table[column].to_pylist() for column in columns}
    except FileNotFoundError:
        raise DvpError(f"{path}: no such file; `dvp prepare` writes it") from None
    except UNREADABLE as error:
        raise DvpError(f"{path}: not a Parquet file that can be read ({first_line(error)})") from None
    for column, values in texts.items():
        for row, value in enumerate(values, start=1):
            if not isinstance(value, str):
                raise DvpError(f"{path}: row {row}: column '{column}': expected a text, found {repr(value)[:60]}")
    if not table.num_rows:
        raise DvpError(f"{path}: no rows")
    return pd.DataFrame(texts)


def read_task(path: Path, task: str) -> pd.DataFrame:
    """The rows of a task of eval.parquet, each with an id of its own. Raises DvpError."""
    problems = read_problems(path, EVAL_COLUMNS)
    rows = problems[problems["task"] == task]
    if rows.empty:
        raise DvpError(f"{path}: no rows of task '{task}'; it has {', '.join(sorted(set(problems['task'])))}")
    twice = rows["id"][rows["id"].duplicated()]
    if len(twice):
        raise DvpError(f"{path}: task '{task}' has two rows of the same id, '{twice.iloc[0]}'")
    return rows
