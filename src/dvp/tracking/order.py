"""The ages of results, put in the order in which they were made, as a copy of them (`cp -r`) does not keep it.

Snakemake makes again what is older than what it was made from. When a stage ended and what it read, its record says.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

from dvp.errors import DvpError
from dvp.experiment.folder import RESULTS
from dvp.files import read_json, verify_checksums
from dvp.tracking.record import KEY, STAGE, UPSTREAM, read_records


def restore_order(folder: Path) -> None:
    """Have no output of an experiment in `folder` be older than what it was made from, nor from the future.

    That holds for files that are as they were written, of a stage that began when what it read was done. What is not
    so, was altered, or cannot be changed, is left as it is, for Snakemake to judge. Reports, which take seconds, too.
    """
    with contextlib.suppress(DvpError, OSError):
        made = _made(folder)
        finished = (record for record in read_records(folder) if record.status == "FINISHED")
        records = {record.key: record for record in finished if record.key in made}
        now = time.time_ns()
        for record in records.values():  # what is read comes before what reads it
            of_tags = [value.split() for name, value in record.tags.items() if name.startswith(UPSTREAM)]
            read = [key for keys in of_tags for key in keys]
            if not records.keys() >= {*read} or any(records[key].ended > record.started for key in read):
                continue
            if record.tags.get(STAGE) == "train":  # which waits for a preflight, and reads nothing of it
                preflights = [key for key, other in records.items() if other.tags.get(STAGE) == "preflight"]
                read += [key for key in preflights if records[key].ended <= record.started]
            newest = max((_age(file) for key in read for file in made[key].all), default=0)
            late = [file for file in made[record.key].all if not newest <= _age(file) <= now]
            if late:
                for each in (made[record.key], *(made[key] for key in read)):
                    verify_checksums(each.folder, each.files)
            for file in late:
                os.utime(file, ns=(now, max(newest, min(_age(file), now))), follow_symlinks=False)


def was_read(source: str, digest: str, manifest: Path) -> bool:
    """Whether `dvp prepare`, which wrote the manifest, has read a source's file with this SHA-256."""
    with contextlib.suppress(DvpError, LookupError, TypeError):
        return read_json(manifest)["sources"][source]["description"]["sha256"] == digest
    return False


class _Made(NamedTuple):
    """What a stage has made."""

    folder: Path
    files: dict[str, str]
    """Checksums, by the name in `folder`."""
    all: list[Path]
    """The JSON file and Snakemake's own of what the job took, too."""


def _made(folder: Path) -> dict[str, _Made]:
    """By the key of the stage's record."""
    made = {}
    for stage, pattern in RESULTS.items():
        before, _, after = pattern.partition("{of}")
        parts = Path(pattern).parts
        for result in folder.glob(f"{parts[0]}/**/{parts[-1]}") if stage != "report" else ():
            with contextlib.suppress(DvpError):  # a file of no use is of no stage
                content, name = read_json(result, KEY), result.relative_to(folder).as_posix()
                of = name[len(before) : len(name) - len(after)]
                benchmark = folder / "benchmarks" / f"{stage}/{of}.tsv".replace("/.tsv", ".tsv")
                files = content.get("files", {})
                every = [result, *(result.parent / file for file in files)]
                made[content[KEY]] = _Made(result.parent, files, every + [benchmark] * benchmark.is_file())
    return made


def _age(file: Path) -> int:
    return file.lstat().st_mtime_ns
