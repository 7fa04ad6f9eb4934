"""The ages of results, put in the order in which they were made, as a copy of them (`cp -r`) does not keep it.

Snakemake makes again what is older than what it was made from. When a stage ended, its record says.
"""

import contextlib
import os
from pathlib import Path

from dvp.errors import DvpError
from dvp.experiment.folder import RESULTS
from dvp.files import read_json, verify_checksums
from dvp.tracking.record import KEY, STAGE, Record, read_records

LATE = 60.0  # seconds; Snakemake's own file comes after the stage has ended


def restore_order(folder: Path) -> None:
    """Date what is in `folder` by when its stage ended, where a file is newer than that.

    That holds for files that are as they were written, by the stage's last attempt. What was altered, or cannot be
    changed, is left as it is, for Snakemake to judge.
    """
    with contextlib.suppress(DvpError, OSError):
        for record in read_records(folder):
            with contextlib.suppress(DvpError, OSError):
                files = _outputs(folder, record)
                if files and max(file.lstat().st_mtime for file in files) > record.ended / 1000 + LATE:
                    verify_checksums(files[0].parent, read_json(files[0], "files")["files"])
                    for file in files:
                        os.utime(file, ns=(record.ended * 10**6,) * 2, follow_symlinks=False)


def _outputs(folder: Path, record: Record) -> list[Path]:
    """What a stage that ended has made: its JSON file, the files that this lists, and Snakemake's own of the job."""
    stage, result = record.tags.get(STAGE), folder / list(record.files or [""])[-1]
    if record.status != "FINISHED" or stage not in RESULTS or not result.is_file():
        return []
    content = read_json(result, KEY, "files")
    if content[KEY] != record.key:
        return []
    before, _, after = RESULTS[stage].partition("{of}")
    of = result.relative_to(folder).as_posix()[len(before) :].removesuffix(after or before)
    benchmark = folder / "benchmarks" / f"{stage}/{of}".rstrip("/")
    benchmark = benchmark.with_name(f"{benchmark.name}.tsv")
    return [result, *(result.parent / file for file in content["files"]), *[benchmark] * benchmark.is_file()]


def was_read(source: str, digest: str, manifest: Path) -> bool:
    """Whether `dvp prepare`, which wrote the manifest, has read a source's file with this SHA-256."""
    with contextlib.suppress(DvpError, LookupError, TypeError):
        return read_json(manifest)["sources"][source]["description"]["sha256"] == digest
    return False
