"""Record of a stage for the tracking store: a file from which the store can be filled at any time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from dvp.errors import DvpError
from dvp.files import sha256_json

FOLDER = "tracking"  # below the experiment's folder
# Names of tags.
KEY = "tracking_key"
STAGE = "stage"
POLICY_TAG = "policy"  # title of the policy, on runs that make one
MODEL = "model"  # path of the weights that the stage wrote
FAILURE, COLLAPSED = OUTCOMES = ("failure", "collapsed")  # removed if a later attempt does not set them
UPSTREAM = "upstream."  # followed by a stage: the keys of its runs that the input came from


def _inside(path: str) -> str:
    # A record may come from another machine, and the files that it names are sent to the store: none from outside.
    if Path(path).is_absolute() or ".." in Path(path).parts or "\0" in path:
        raise ValueError(f"expected a relative path without '..', found {path!r}")
    return path


Inside = Annotated[str, AfterValidator(_inside)]


class _Row(TypedDict, extra_items=Any):
    step: Annotated[int, Field(strict=True)]


ROW = TypeAdapter(_Row)


class Record(BaseModel):
    """All that the store shows of a stage except its steps, which are in metrics.jsonl.

    Paths are relative to the experiment's folder, times are milliseconds since 1970.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    experiment: Inside
    name: str
    title: str = ""
    """Title of the policy that the stage makes or works on (names.policy_title)."""
    parent: str | None = None
    """Key of the run below which this one is nested: the run of the stage that trained the policy."""
    tags: dict[str, str]
    params: dict[str, str] = {}
    results: dict[str, float] = {}
    step: int = 0
    """Step of training after which the results were measured."""
    files: dict[Inside, Inside] = {}
    """Files to keep with the run, each with its folder among the run's artifacts; the stage's JSON file is the last."""
    metrics: Inside | None = None
    """Path of metrics.jsonl, as soon as it has rows of this run."""
    description: str | None = None
    """Markdown for the experiment's own page."""
    status: Literal["RUNNING", "FINISHED", "FAILED", "KILLED"] = "RUNNING"
    started: int
    ended: int | None = None

    @property
    def key(self) -> str:
        """Key of the run in any store, as a store's own run ids are lost with it."""
        return self.tags[KEY]


def key_of(*parts: object) -> str:
    """Hash JSON-able parts to a key of 12 hex digits."""
    return sha256_json(parts)[:12]


def read_record(path: Path) -> Record:
    """Read a stage's record. Raises DvpError, naming file and key, if it is malformed."""
    with _one_line(path):
        return Record.model_validate_json(path.read_bytes())


def read_records(folder: Path) -> list[Record]:
    """Read all records of an experiment, in the order in which the stages ended; those without an end come last.

    Raises DvpError if a record is malformed.
    """
    records = [read_record(path) for path in sorted((folder / FOLDER).rglob("*.json"))]
    return sorted(records, key=lambda record: (record.ended is None, record.ended or record.started))


def read_rows(path: Path) -> list[dict]:
    """Read the rows of a metrics.jsonl, without a last line that a killed process left unfinished.

    Raises DvpError, naming the line, if the file cannot be read or a line is not a JSON object with a `step`.
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
    """Turn a read or validation error in the block into a one-line DvpError that names `where` and the key."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        key = "".join(f"{part}: " for part in first["loc"][:1])
        raise DvpError(f"{where}: {key}{first['msg'].removeprefix('Value error, ')}") from None
    except OSError as error:
        raise DvpError(f"{where}: cannot be read ({error.strerror})") from None
