"""What a stage says of itself for the tracking store: a file, from which the store can be fed at any time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, field_validator

from dvp.errors import DvpError
from dvp.files import expect, parse_json, sha256_json, write_json
from dvp.tracking.names import metric_name

FOLDER = "tracking"  # below the experiment's folder
KEY = "tracking_key"
STAGE = "stage"  # tag
POLICY_TAG = "policy"  # of what trains one: which
FAILURE, COLLAPSED = OUTCOMES = ("failure", "collapsed")  # tags that a later attempt may be without
UPSTREAM = "upstream."  # + stage: the keys of the runs that a stage's input came from


def _inside(path: str) -> str:
    # What a record names goes to the store, perhaps on another machine, into folders with the names that it gives.
    if Path(path).is_absolute() or ".." in Path(path).parts or "\0" in path:
        raise ValueError(f"expected a relative path without '..', found {path!r}")
    return path


Inside = Annotated[str, AfterValidator(_inside)]


class Dataset(BaseModel):
    """A file of problems that a stage reads."""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: Inside
    digest: str
    """The first 16 hex digits of its SHA-256."""
    context: Literal["training", "evaluation", "measurement"]

    @property
    def name(self) -> str:
        """What it is called in the store."""
        return Path(self.path).stem


class Model(BaseModel):
    """Weights that a stage writes. The store gets their path; they stay where they are."""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: Inside
    kind: Literal["base", "checkpoint", "converted"]


class Record(BaseModel):
    """A stage as it is to be seen in the store, but for its steps, which are in metrics.jsonl.

    Paths are relative to the experiment's folder, times are milliseconds since 1970.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

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
    files: dict[str, str] = {}
    """The folder, among the run's artifacts, of each file to keep with it."""
    metrics: Inside | None = None
    """The metrics.jsonl, as soon as it holds rows of this very run."""
    datasets: list[Dataset] = []
    model: Model | None = None
    description: str | None = None
    """Markdown for the experiment's own page."""
    status: Literal["RUNNING", "FINISHED", "FAILED", "KILLED"] = "RUNNING"
    started: int
    ended: int | None = None

    @field_validator("tags")
    @classmethod
    def _has_key(cls, value: dict[str, str]) -> dict[str, str]:
        if KEY not in value:
            raise ValueError(f"expected a {KEY}")
        return value

    @field_validator("files")
    @classmethod
    def _are_inside(cls, value: dict[str, str]) -> dict[str, str]:
        for path in (*value, *value.values()):
            _inside(path)
        return value

    @property
    def key(self) -> str:
        """The run's name in any store: a store's own run ids are gone when it is."""
        return self.tags[KEY]


def key_of(*parts: object) -> str:
    """Key (12 hex digits) of what `parts` (JSON-able) name."""
    return sha256_json(parts)[:12]


def write_record(path: Path, record: Record) -> None:
    """Write a record atomically."""
    write_json(path, record.model_dump())


def read_record(path: Path) -> Record:
    """Read a record. Raises DvpError, naming file and key, for a malformed one."""
    try:
        return Record.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise DvpError(f"{path}: {where + ': ' if where else ''}{message}") from None
    except OSError as error:
        raise DvpError(f"{path}: cannot be read ({error.strerror})") from None


def read_records(folder: Path) -> list[Record]:
    """The records of an experiment, in the order in which the stages ended; unended ones last. Raises DvpError."""
    records = [read_record(path) for path in sorted((folder / FOLDER).rglob("*.json"))]
    return sorted(records, key=lambda record: (record.ended is None, record.ended or record.started))


def read_rows(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl; a last line that a killed process left unfinished is no row.

    Raises DvpError, naming the line, if the file is missing or a line is no JSON object with a `step`.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        raise DvpError(f"{path}: no such file, although the stage's tracking record names it") from None
    except OSError as error:
        raise DvpError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise DvpError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DvpError(f"{path}: line {number}: not valid JSON ({error})") from None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise DvpError(f"{path}: line {number}: expected a JSON object with an integer 'step'")
        if "seconds" in row:
            expect("a finite number, 0 or more", row["seconds"], f"{path}: line {number}: seconds")
        rows.append(row)
    return rows


def points(rows: list[dict], started: int) -> Iterator[tuple[str, int, float, int]]:
    """(name, step, value, timestamp) of every number in `rows`.

    A step's time is the run's start plus the seconds of the steps up to it: a function of the files alone, so that two
    processes that feed one store at once write the same points, which a store keeps once.
    """
    seconds = 0.0
    for row in rows:
        seconds += row.get("seconds", 0.0)
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                yield metric_name(name), row["step"], float(value), started + round(1000 * seconds)
