"""The tables that `prepare` wrote are read by one reader, which says what is wrong with a file."""

import re
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest

import dvp
from dvp.data.prepared import EVAL_COLUMNS, TRAIN_COLUMNS, read_problems, read_task
from dvp.errors import DvpError
from made_up_problems import write_problems

GOOD = {name: ["a", "b", "c"] for name in TRAIN_COLUMNS}


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "train.parquet"


def test_what_was_written_is_read_back_by_its_columns(file):
    prompts = ["a {}", "b \u2028 ρ\n", ""]
    pd.DataFrame(GOOD | {"prompt": prompts, "__index_level_0__": [3, 1, 2]}).to_parquet(file)
    table = read_problems(file, TRAIN_COLUMNS)
    assert list(table.columns) == list(TRAIN_COLUMNS)
    assert list(table["prompt"]) == prompts
    assert list(table.index) == [0, 1, 2]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: None, "no such file; `dvp prepare` writes it"),
        (
            lambda file: file.write_text("id,source"),
            "not a Parquet file that can be read (ArrowInvalid: ",
        ),
        (
            lambda file: pd.DataFrame({"id": ["1"]}).to_parquet(file),
            "expected columns id, source, problem, answer, prompt; ",
        ),
        (lambda file: pd.DataFrame({name: [] for name in TRAIN_COLUMNS}).to_parquet(file), "no rows"),
    ],
)
def test_what_is_wrong_with_a_table_is_one_line(file, damage, message):
    damage(file)
    with pytest.raises(DvpError) as error:
        read_problems(file, TRAIN_COLUMNS)
    assert str(error.value).startswith(f"{file}: {message}")
    assert "\n" not in str(error.value)


def test_a_damaged_file_ends_in_a_table_or_in_one_line(file):
    """Cut off or changed anywhere; that it was altered, the manifest's checksum says."""
    pd.DataFrame(GOOD).to_parquet(file)
    content = file.read_bytes()
    for position in range(0, len(content), 7):
        for damaged in (content[:position], content[:position] + b"\xff" + content[position + 1 :]):
            file.write_bytes(damaged)
            with suppress(DvpError):
                read_problems(file, TRAIN_COLUMNS)


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
    reports = ["analysis/load.py", "analysis/report.py", "analysis/statistics.py"]
    assert found == [*reports, "data/prepared.py", "data/sources.py", "training/responses.py"]
