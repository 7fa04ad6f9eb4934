"""Reading problems: from the hub, from a file, or generated. The same code maps hub rows and file rows."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from dvp.data.generators import GENERATORS
from dvp.data.verifier import unboxed
from dvp.errors import DvpError
from dvp.experiment.data import FileSource, GeneratedSource, HubSource
from dvp.files import parse_json
from dvp.strict import control_character

SUFFIXES = (".json", ".jsonl", ".parquet")
_BATCH = 10_000
_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
LONGEST_NUMBER = 100  # digits
_FIELDS = {
    "problem": (str, "a text"),
    "answer": (str | int | float | Decimal, "an answer"),
    "solution": (str | None, "a text"),
    "id": (str | int, "a text or a number"),
}
"""Of a row's fields the types, and what they are called."""
# A row is read whole: these bound what a hostile or broken file can make of memory.
LONGEST_LINE = 2**24  # characters
LARGEST_LIST = 2**28  # bytes
# What pyarrow raises for a damaged file, for text that is not UTF-8 and for times that Python does not have.
UNREADABLE = (OSError, ValueError, OverflowError, pa.ArrowException)


class Row(NamedTuple):
    """One problem. `number` is its line or row in the source, from 1."""

    id: str
    problem: str
    answer: str
    solution: str | None
    number: int


def load(source: GeneratedSource | HubSource | FileSource, where: str) -> list[Row]:
    """All rows of a source, duplicates included; `where` (such as `sources.gsm8k`) begins every message.

    Answers are brought to the form that the verifier reads but not parsed (dvp.data.prepare does, after
    deduplication). Raises DvpError, naming the file or data set, and the row and column at fault.
    """
    if isinstance(source, GeneratedSource):
        generated = GENERATORS[source.generator].generate(source.count, source.seed, source.steps)
        stories = enumerate(generated, start=1)
        return [Row(str(number), story.problem, story.answer, story.solution, number) for number, story in stories]
    name = locate(source, where)
    total = None
    if isinstance(source, HubSource):
        rows, total = _hub_rows(source, where)
    elif source.path.suffix == ".parquet":
        rows, total = _parquet_rows(source, name)
    else:
        rows = (_json_lines if source.path.suffix == ".jsonl" else _json_list)(source.path, name)
    # Nothing is shown for what loads in a few seconds.
    progress = tqdm(rows, desc=f"reading {where}", total=total, unit=" rows", delay=3, mininterval=1)
    loaded = list(_mapped(progress, source, name))
    if not loaded:
        raise DvpError(f"{name}: no rows")
    return loaded


def locate(source: GeneratedSource | HubSource | FileSource, where: str) -> str:
    """How messages call the source (file, hub name or generator). Raises DvpError for an unusable file."""
    if isinstance(source, GeneratedSource):
        return f"{where}: {source.generator}"
    if isinstance(source, HubSource):
        return f"{where}: {source.path} ({source.split})"
    if source.path.suffix not in SUFFIXES:
        raise DvpError(f"{where}: {source.path}: expected a file that ends in {', '.join(SUFFIXES)}")
    if not source.path.is_file():
        raise DvpError(f"{where}: {source.path}: no such file")
    return f"{where}: {source.path}"


# --- one row ---


def _mapped(rows: Iterable[tuple[int, Any]], source: HubSource | FileSource, name: str) -> Iterator[Row]:
    # Millions of rows may repeat a few thousand problems: each text is read and kept once.
    known: dict[tuple[str, str], str] = {}
    for number, row in rows:
        found = {"id": str(number), "solution": None}
        if not isinstance(row, dict):
            raise DvpError(f"{name}: row {number}: expected an object with named columns, found {_short(row)}")
        for field, path in source.columns:
            if path is None:
                continue
            at = f"{name}: row {number}"
            value = _dig(row, path, at)
            read = known.get((field, value)) if isinstance(value, str) else None
            if read is None:
                try:
                    read = _read(field, value, source)
                except ValueError as error:
                    raise DvpError(f"{at}: column '{path}': {error}") from None
                if isinstance(value, str):
                    known[field, value] = read
            found[field] = read
        yield Row(number=number, **found)


def _dig(row: dict, path: str, at: str) -> Any:
    """The value at a dotted path: names reach into objects, numbers into lists."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) and part.isdecimal() else value[part]
        except (LookupError, TypeError):
            raise DvpError(f"{at}: no column '{path}'; found {', '.join(_names(row)) or 'none'}") from None
    return value


def _names(value: Any, prefix: str = "") -> list[str]:
    """The dotted names of all values of a row."""
    if isinstance(value, dict) and value:
        return [name for key, inner in value.items() for name in _names(inner, f"{prefix}{key}.")]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return _names(value[0], f"{prefix}0.")
    return [prefix.removesuffix(".")] if prefix else []


def _read(field: str, value: Any, source: HubSource | FileSource) -> str | None:
    """What a row has in a field. Raises ValueError."""
    kinds, expected = _FIELDS[field]
    if not isinstance(value, kinds) or isinstance(value, bool) or (value is not None and not str(value).strip()):
        raise ValueError(f"expected {expected}, found {_short(value)}")
    if field in ("problem", "answer") and (wrong := control_character(str(value))):
        raise ValueError(wrong)
    if field == "answer":
        return _answer(value, source.answer_format)
    if field == "problem":
        for text in source.strip:
            value = value.replace(text, "")
        if not (value := value.strip()):
            raise ValueError("the problem is empty")
    return value if value is None else str(value)


def _answer(value: str | int | float | Decimal, answer_format: str) -> str:
    text = str(value).strip()
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            raise ValueError(f"expected an answer, found {_short(value)}")
        text = f"{Decimal(text):f}"  # the verifier would read the e of an exponent as Euler's number
    if answer_format == "gsm8k":
        before, hashes, result = text.rpartition("####")
        if not hashes or not result.strip():
            raise ValueError(f"expected a result after ####, found {_short(before or result)}")
        return result.strip().replace(",", "")
    if answer_format == "number":
        number = Decimal(text) if _NUMBER.fullmatch(text) else None
        if number is None or abs(number.adjusted()) > LONGEST_NUMBER or number != number.to_integral_value():
            raise ValueError(f"expected a number that means an integer, such as 27.0, found {_short(value)}")
        return str(int(number))
    return unboxed(text)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


# --- where rows come from: (number, row) pairs ---


def _json_lines(path: Path, name: str) -> Iterator[tuple[int, Any]]:
    with open(path, encoding="utf-8-sig") as file:
        number = 0
        try:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), ""), start=1):
                if len(line) > LONGEST_LINE:
                    raise DvpError(f"{name}: row {number}: longer than {LONGEST_LINE} characters; no problem is")
                if line.strip():
                    yield number, parse_json(line)
        except UnicodeDecodeError as error:
            raise DvpError(f"{name}: not UTF-8 text ({error.reason} at byte {error.start})") from None
        except ValueError as error:
            raise DvpError(f"{name}: row {number}: not valid JSON: {error}") from None


def _json_list(path: Path, name: str) -> Iterator[tuple[int, Any]]:
    if path.stat().st_size > LARGEST_LIST:
        raise DvpError(f"{name}: larger than {LARGEST_LIST} bytes, which are read at once; make it JSON lines (.jsonl)")
    try:
        rows = parse_json(path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DvpError(f"{name}: not valid JSON ({error}); is it JSON lines? Then call it .jsonl") from None
    except ValueError as error:
        raise DvpError(f"{name}: not valid JSON ({error})") from None
    if not isinstance(rows, list):
        raise DvpError(f"{name}: expected a list of objects, found {type(rows).__name__}")
    yield from enumerate(rows, start=1)


def _parquet_rows(source: FileSource, name: str) -> tuple[Iterator[tuple[int, Any]], int]:
    try:
        file = pq.ParquetFile(source.path)
        present = file.schema_arrow.names
    except UNREADABLE as error:
        raise DvpError(f"{name}: not a Parquet file ({first_line(error)})") from None
    if twice := [column for column, count in Counter(present).items() if count > 1]:
        raise DvpError(f"{name}: column '{twice[0]}' is there twice")
    batches = file.iter_batches(batch_size=_BATCH, columns=_top_level(source, present))
    return _numbered(batches, name), file.metadata.num_rows


def _hub_rows(source: HubSource, where: str) -> tuple[Iterator[tuple[int, Any]], int]:
    import datasets

    try:
        dataset = datasets.load_dataset(source.path, source.name, split=source.split, revision=source.revision)
    except Exception as error:
        raise DvpError(
            f"{where}: cannot load {source.path} ({source.split}, revision {source.revision}) from the "
            f"Hugging Face hub: {first_line(error)}; without the hub, get its file some other way and "
            f"replace the source by {{kind: file, path: FILE.parquet, columns: …}} with the same columns"
        ) from None
    read = dataset.select_columns(_top_level(source, dataset.column_names)).with_format("arrow")
    return _numbered(read.iter(batch_size=_BATCH), where), len(dataset)


def _top_level(source: HubSource | FileSource, present: list[str]) -> list[str]:
    """The columns to read: those that are named, or all if one is missing (the message then lists them)."""
    paths = [path for _, path in source.columns if path]
    needed = {path if path in present else path.split(".")[0] for path in paths}
    return sorted(needed) if needed <= set(present) else present


def _numbered(batches: Iterable[pa.RecordBatch | pa.Table], name: str) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except UNREADABLE as error:
        raise DvpError(f"{name}: cannot be read after row {number} ({first_line(error)})") from None


def first_line(error: Exception) -> str:
    """Type and first line of an exception of somebody else's code."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
