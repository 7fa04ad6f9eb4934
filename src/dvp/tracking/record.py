"""What a stage says of itself for the tracking store: a file, from which the store can be fed at any time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from dvp.errors import DvpError
from dvp.files import sha256_json

FOLDER = "tracking"  # below the experiment's folder
KEY = "tracking_key"
STAGE = "stage"  # tag
POLICY_TAG = "policy"  # of what trains one: which
MODEL = "model"  # tag: where the weights are that the stage wrote
FAILURE, COLLAPSED = OUTCOMES = ("failure", "collapsed")  # tags that a later attempt may be without
UPSTREAM = "upstream."  # + stage: the keys of the runs that a stage's input came from


def _inside(path: str) -> str:
    # What a record names goes to the store, perhaps on another machine, into folders with the names that it gives.
    if Path(path).is_absolute() or ".." in Path(path).parts or "\0" in path:
        raise ValueError(f"expected a relative path without '..', found {path!r}")
    return path


Inside = Annotated[str, AfterValidator(_inside)]


class _Row(TypedDict, extra_items=Any):
    step: Annotated[int, Field(strict=True)]


ROW = TypeAdapter(_Row)


class Record(BaseModel):
    """A stage as it is to be seen in the store, but for its steps, which are in metrics.jsonl.

    Paths are relative to the experiment's folder, times are milliseconds since 1970.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    experiment: Inside
    name: str
    title: str = ""
    """The policy that the stage makes or works on, in words."""
    parent: str | None = None
    """Key of the run below which this one is shown: that of the stage that trained the policy."""
    tags: dict[str, str]
    params: dict[str, str] = {}
    results: dict[str, float] = {}
    step: int = 0
    """Of training, after which the results were measured."""
    files: dict[Inside, Inside] = {}
    """The folder, among the run's artifacts, of each file to keep with it; the stage's JSON file is the last one."""
    metrics: Inside | None = None
    """The metrics.jsonl, as soon as it holds rows of this very run."""
    description: str | None = None
    """Markdown for the experiment's own page."""
    status: Literal["RUNNING", "FINISHED", "FAILED", "KILLED"] = "RUNNING"
    started: int
    ended: int | None = None

    @property
    def key(self) -> str:
        """The run's name in any store: a store's own run ids are gone when it is."""
        return self.tags[KEY]


def key_of(*parts: object) -> str:
    """Key (12 hex digits) of what `parts` (JSON-able) name."""
    return sha256_json(parts)[:12]


def read_record(path: Path) -> Record:
    """Read a record. Raises DvpError, naming file and key, for a malformed one."""
    with _one_line(path):
        return Record.model_validate_json(path.read_bytes())


def read_records(folder: Path) -> list[Record]:
    """The records of an experiment, in the order in which the stages ended; unended ones last. Raises DvpError."""
    records = [read_record(path) for path in sorted((folder / FOLDER).rglob("*.json"))]
    return sorted(records, key=lambda record: (record.ended is None, record.ended or record.started))


def read_rows(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl; a last line that a killed process left unfinished is no row.

    Raises DvpError, naming the line, if the file cannot be read or a line is no JSON object with a `step`.
    """
    rows, lines = [], b""
    with _one_line(path):
        lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        with _one_line(f"{path}: line {number}"):
            rows.append(ROW.validate_json(line))
    return rows


@contextmanager
def _one_line(where: object) -> Iterator[None]:
    """Raise DvpError, which names `where` and the key, for a file that cannot be read or is not of its kind."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        key = "".join(f"{part}: " for part in first["loc"][:1])
        raise DvpError(f"{where}: {key}{first['msg'].removeprefix('Value error, ')}") from None
    except OSError as error:
        raise DvpError(f"{where}: cannot be read ({error.strerror})") from None
