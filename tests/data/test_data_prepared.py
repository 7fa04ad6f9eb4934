"""The tables that `prepare` wrote are read by one reader, which says what is wrong with a file."""

import re
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dvp
from dvp.data.prepared import EVAL_COLUMNS, TRAIN_COLUMNS, read_problems, read_task
from dvp.errors import DvpError
from made_up_problems import write_problems

GOOD = {name: ["a", "b", "c"] for name in TRAIN_COLUMNS}


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "train.parquet"


def write(file: Path, columns: dict) -> None:
    pq.write_table(pa.table(columns), file)


def twice(file: Path) -> None:
    columns = [pa.array(["a"])] * 6
    pq.write_table(pa.Table.from_arrays(columns, names=[*TRAIN_COLUMNS, "answer"]), file)


def not_utf8(file: Path) -> None:
    write(file, GOOD | {"prompt": ["a", "XYZ", "c"]})
    file.write_bytes(file.read_bytes().replace(b"XYZ", b"X\xffZ"))


def test_what_was_written_is_read_back_and_further_columns_do_no_harm(file):
    write(file, GOOD | {"prompt": ["a {}", "b \u2028 ρ\n", ""], "__index_level_0__": [3, 1, 2]})
    table = read_problems(file, TRAIN_COLUMNS)
    assert list(table.columns) == list(TRAIN_COLUMNS)
    assert list(table["prompt"]) == ["a {}", "b \u2028 ρ\n", ""]
    assert list(table.index) == [0, 1, 2]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: None, "no such file; `dvp prepare` writes it"),
        (lambda file: file.write_text("id,source"), "not a Parquet file that can be read (ArrowInvalid: "),
        (not_utf8, "not a Parquet file that can be read (UnicodeDecodeError: "),
        (
            lambda file: write(file, {name: GOOD[name] for name in TRAIN_COLUMNS if name != "answer"}),
            "expected columns id, source, problem, answer, prompt, each once; found id, source, problem, prompt",
        ),
        (twice, "expected columns id, source, problem, answer, prompt, each once; found id, source, problem, answer, "),
        (
            lambda file: write(file, GOOD | {"answer": ["7", "8", None]}),
            "row 3: column 'answer': expected a text, found None",
        ),
        (lambda file: write(file, {name: pa.array([], pa.string()) for name in TRAIN_COLUMNS}), "no rows"),
    ],
)
def test_what_is_wrong_with_a_table_is_one_line(file, damage, message):
    damage(file)
    with pytest.raises(DvpError) as error:
        read_problems(file, TRAIN_COLUMNS)
    line = str(error.value)
    assert line.startswith(f"{file}: {message}")
    assert line.splitlines() == [line]


def test_a_damaged_file_ends_in_a_table_or_in_one_line(file):
    """Cut off or changed anywhere; that it was altered, the manifest's checksum says."""
    write(file, GOOD)
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
    write_problems(file, EVAL_COLUMNS, task=["x", "y", "x"], id=["1", "2", "1"])
    with pytest.raises(DvpError, match=r"eval\.parquet: task 'x' has two rows of the same id, '1'$"):
        read_task(file, "x")


def test_no_stage_has_a_reader_of_its_own():
    """Sources, what `prepare` wrote, what training wrote and results: one reader each."""
    package = Path(dvp.__file__).parent
    reads = re.compile(r"read_parquet\(|read_table\(|ParquetFile\(")
    readers = [path for path in package.rglob("*.py") if reads.search(path.read_text(encoding="utf-8"))]
    found = sorted(path.relative_to(package).as_posix() for path in readers)
    assert found == ["analysis/load.py", "data/prepared.py", "data/sources.py", "training/responses.py"]
