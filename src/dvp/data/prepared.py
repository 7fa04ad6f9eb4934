"""The two tables that `prepare` writes, and how the stages after it read them: train.parquet and eval.parquet."""

from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from dvp.data.sources import UNREADABLE, first_line
from dvp.errors import DvpError

TRAIN_COLUMNS = ("id", "source", "problem", "answer", "prompt")
EVAL_COLUMNS = ("task", "id", "problem", "answer", "prompt")


def read_problems(path: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    """One of the tables. Raises DvpError, naming the file, unless it has rows and these columns."""
    try:
        problems = pq.ParquetFile(path).read().to_pandas(ignore_metadata=True)
    except FileNotFoundError:
        raise DvpError(f"{path}: no such file; `dvp prepare` writes it") from None
    except UNREADABLE as error:
        raise DvpError(f"{path}: not a Parquet file that can be read ({first_line(error)})") from None
    if not set(columns) <= set(problems):
        raise DvpError(f"{path}: expected columns {', '.join(columns)}; found {', '.join(problems)}")
    if problems.empty:
        raise DvpError(f"{path}: no rows")
    return problems[list(columns)]


def read_task(path: Path, task: str) -> pd.DataFrame:
    """The rows of a task of eval.parquet. Raises DvpError."""
    problems = read_problems(path, EVAL_COLUMNS)
    rows = problems[problems["task"] == task]
    if rows.empty:
        raise DvpError(f"{path}: no rows of task '{task}'; it has {', '.join(sorted(set(problems['task'])))}")
    return rows
