"""The tables that `prepare` wrote are read by one reader."""

import re
from pathlib import Path

import pytest

import dvp
from dvp.data.prepared import EVAL_COLUMNS, TRAIN_COLUMNS, read_problems, read_task
from dvp.errors import DvpError
from made_up_problems import write_problems


def test_what_was_written_is_read_back_by_its_columns(tmp_path):
    prompts = ["a {}", "b \u2028 ρ\n", ""]
    write_problems(tmp_path / "train.parquet", (*TRAIN_COLUMNS, "more"), prompt=prompts)
    table = read_problems(tmp_path / "train.parquet", TRAIN_COLUMNS)
    assert list(table.columns) == list(TRAIN_COLUMNS)
    assert list(table["prompt"]) == prompts


def test_the_rows_of_a_task_keep_their_places(tmp_path):
    file = tmp_path / "eval.parquet"
    write_problems(file, EVAL_COLUMNS, task=["x", "y", "x"], id=["1", "1", "2"])
    rows = read_task(file, "x")
    assert list(rows["id"]) == ["1", "2"]
    assert list(rows.index) == [0, 2]
    with pytest.raises(DvpError, match=r"eval\.parquet: no rows of task 'z'; it has x, y$"):
        read_task(file, "z")


def test_no_stage_has_a_reader_of_its_own():
    """Sources, what `prepare` wrote, what training wrote and results: one reader each."""
    package = Path(dvp.__file__).parent
    reads = re.compile(r"read_parquet\(|read_table\(|ParquetFile\(")
    readers = [path for path in package.rglob("*.py") if reads.search(path.read_text(encoding="utf-8"))]
    found = sorted(path.relative_to(package).as_posix() for path in readers)
    reports = ["analysis/load.py", "analysis/report.py", "analysis/stage.py", "analysis/statistics.py"]
    assert found == [
        *reports,
        "data/prepared.py",
        "data/sources.py",
        "measurement/rollouts.py",
        "training/responses.py",
    ]
