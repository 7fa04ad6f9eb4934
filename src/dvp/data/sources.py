"""Read problems from the hub, from a file, or from a generator. The same code maps hub rows and file rows."""

import math
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from functools import cache, partial
from json import JSONDecodeError
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from dvp.data import graph_color, stories
from dvp.data.verifier import unboxed
from dvp.errors import DvpError
from dvp.experiment.data import FileSource, GeneratedSource, HubSource
from dvp.files import parse_json
from dvp.strict import control_character

GENERATORS = {
    "stories": stories.STORIES,
    "english_stories": stories.ENGLISH_STORIES,
    "sums": stories.SUMS,
    "products": stories.PRODUCTS,
    "chains": stories.CHAINS,
    "tales": stories.TALES,
    "wide_tales": stories.WIDE_TALES,
    "graph_color": graph_color,
}
"""Generators by the name that a source gives; each has `generate` and `careless`, see dvp.data.stories."""
_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
LONGEST_NUMBER = 100  # digits
_FIELDS = {
    "problem": (str, "a text"),
    "answer": (str | int | float | Decimal, "an answer"),
    "solution": (str | None, "a text"),
    "id": (str | int, "a text or a number"),
}
"""For each field of a row its types, and what error messages call them."""
# A row is read whole: these bound the memory that a hostile or broken file can take.
LONGEST_LINE = 2**24  # characters
LARGEST_LIST = 2**28  # bytes
BLANK = object()  # stands for an empty line in place of a row
# Raised for a damaged file, for text that is not UTF-8 and for times that Python cannot represent.
_UNREADABLE = (OSError, ValueError, OverflowError, pa.ArrowException)


class Row(NamedTuple):
    """One problem. `number` is its line or row in the source, from 1."""

    id: str
    problem: str
    answer: str
    solution: str | None
    number: int


def load(source: GeneratedSource | HubSource | FileSource, where: str) -> list[Row]:
    """Return all rows of a source, duplicates included; `where` (such as `sources.gsm8k`) begins every message.

    Answers are brought to the form that the verifier reads but not parsed (dvp.data.prepare does, after deduplication).
    Raises DvpError, naming the file or data set, and the row and column at fault.
    """
    if isinstance(source, GeneratedSource):
        generated = GENERATORS[source.generator].generate(source.count, source.seed, source.steps)
        stories = enumerate(generated, start=1)
        return [Row(str(number), story.problem, story.answer, story.solution, number) for number, story in stories]
    name = locate(source, where)
    # The bar appears only if loading takes more than a few seconds.
    progress = tqdm(_rows(source, name), desc=f"reading {where}", unit=" rows", delay=3, mininterval=1)
    loaded = list(_mapped(progress, source, name))
    if not loaded:
        raise DvpError(f"{name}: no rows")
    return loaded


def locate(source: GeneratedSource | HubSource | FileSource, where: str) -> str:
    """Return what messages call the source: its file, hub name or generator."""
    if isinstance(source, GeneratedSource):
        return f"{where}: {source.generator}"
    if isinstance(source, HubSource):
        return f"{where}: {source.path} ({source.split})"
    return f"{where}: {source.path}"


# --- one row ---


def _mapped(rows: Iterable[tuple[int, Any]], source: HubSource | FileSource, name: str) -> Iterator[Row]:
    def read(field: str, value: Any) -> str | None:
        return _read(field, value, source)

    read_text = cache(read)  # millions of rows may repeat a few thousand problems
    for number, row in rows:
        at = f"{name}: row {number}"
        if not isinstance(row, dict):
            raise DvpError(f"{at}: expected an object with named columns, found {_short(row)}")
        found = {"id": str(number), "solution": None}
        for field, path in source.columns:
            if path is not None:
                value = _dig(row, path, at)
                try:
                    found[field] = (read_text if isinstance(value, str) else read)(field, value)
                except ValueError as error:
                    raise DvpError(f"{at}: column '{path}': {error}") from None
        yield Row(number=number, **found)


def _dig(row: dict, path: str, at: str) -> Any:
    """Return the value at a dotted path: names reach into objects, numbers into lists. Raises DvpError."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) and part.isdecimal() else value[part]
        except (LookupError, TypeError):
            raise DvpError(f"{at}: no column '{path}'; found {', '.join(row) or 'none'}") from None
    return value


def _read(field: str, value: Any, source: HubSource | FileSource) -> str | None:
    """Return the checked value of a field, None for a missing solution. Raises ValueError."""
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


def _rows(source: HubSource | FileSource, name: str) -> Iterator[tuple[int, Any]]:
    """Yield numbered rows. Raises DvpError, naming the row, for what cannot be read."""
    readers = {".json": _json_list, ".jsonl": _json_lines, ".parquet": _parquet_rows}
    read = _hub_rows if isinstance(source, HubSource) else readers.get(source.path.suffix)
    if read is None:
        raise DvpError(f"{name}: expected a file that ends in {', '.join(readers)}")
    number = 0
    try:
        for number, row in enumerate(read(source), start=1):
            if row is not BLANK:
                yield number, row
    except FileNotFoundError:
        raise DvpError(f"{name}: no such file") from None
    except JSONDecodeError as error:
        at = f"row {number + 1}: not valid JSON: {error.msg}, column {error.colno}"
        of_list = f"not valid JSON: {error}; JSON lines are called .jsonl"
        raise DvpError(f"{name}: {of_list if read is _json_list else at}") from None
    except _UNREADABLE as error:
        problem = error if type(error) is ValueError else first_line(error)
        after = f" after row {number}" if number else ""
        raise DvpError(f"{name}: cannot be read{after}: {problem}") from None


def _json_lines(source: FileSource) -> Iterator[Any]:
    with open(source.path, encoding="utf-8-sig") as file:
        while line := file.readline(LONGEST_LINE + 1):
            if len(line) > LONGEST_LINE:
                raise ValueError(f"longer than {LONGEST_LINE} characters; no problem is")
            yield parse_json(line) if line.strip() else BLANK


def _json_list(source: FileSource) -> Iterator[Any]:
    if source.path.stat().st_size > LARGEST_LIST:
        raise ValueError(f"larger than {LARGEST_LIST} bytes, which are read at once; make it JSON lines (.jsonl)")
    rows = parse_json(source.path.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list):
        raise ValueError(f"expected a list of objects, found {type(rows).__name__}; JSON lines are called .jsonl")
    yield from rows


def _parquet_rows(source: FileSource) -> Iterator[Any]:
    file = pq.ParquetFile(source.path)
    names = file.schema_arrow.names
    if len(set(names)) < len(names):
        raise ValueError(f"duplicate column: {', '.join(sorted(names))}")
    for batch in file.iter_batches(columns=_top_level(source, names)):
        yield from batch.to_pylist()


def _hub_rows(source: HubSource) -> Iterator[Any]:
    import datasets

    if not source.revision.strip("0"):
        raise ValueError('revision: a placeholder; expected the commit under "Files and versions" of the hub\'s page')
    load = partial(datasets.load_dataset, source.path, source.name, split=source.split, revision=source.revision)
    try:
        try:
            dataset = load()
        except datasets.exceptions.DatasetGenerationError:
            # Parquet files that disagree on the type of another column can be read without it.
            dataset = load(columns=sorted({path.split(".")[0] for _, path in source.columns if path}))
    except Exception as error:
        raise ValueError(
            f"revision {source.revision} cannot be loaded from the Hugging Face hub: {first_line(error)}; where nodes "
            "have no internet, make data/manifest.json on one that has (docs/cluster.md), or take "
            "{kind: file, path: FILE.parquet, columns: …} with the same columns"
        ) from None
    columns = _top_level(source, dataset.column_names)
    for batch in dataset.select_columns(columns).with_format("arrow").iter(batch_size=10_000):
        yield from batch.to_pylist()


def _top_level(source: HubSource | FileSource, present: list[str]) -> list[str]:
    """Return the columns to read: those that are named, or all if one is missing (the message then lists them)."""
    paths = [path for _, path in source.columns if path]
    needed = {path if path in present else path.split(".")[0] for path in paths}
    return sorted(needed) if needed <= set(present) else present


def first_line(error: Exception) -> str:
    """Return type and first line of an exception from foreign code."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
