"""The two tables that `prepare` writes, and how the stages after it read them: train.parquet and eval.parquet.

That they are as they were written, a stage has verified by their checksums.
"""

from pathlib import Path

import pandas as pd

from dvp.errors import DvpError

TRAIN_COLUMNS = ("id", "source", "problem", "answer", "prompt")
EVAL_COLUMNS = ("task", "id", "problem", "answer", "prompt")


def read_problems(path: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    """One of the tables."""
    return pd.read_parquet(path, columns=list(columns))


def read_task(path: Path, task: str) -> pd.DataFrame:
    """The rows of a task of eval.parquet. Raises DvpError if it has none."""
    problems = read_problems(path, EVAL_COLUMNS)
    rows = problems[problems["task"] == task]
    if rows.empty:
        raise DvpError(f"{path}: no rows of task '{task}'; it has {', '.join(sorted(set(problems['task'])))}")
    return rows
