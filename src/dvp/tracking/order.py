"""Restoring the modification times of results, which a copy (`cp -r`) does not keep in order.

Snakemake reruns a job whose outputs are older than its inputs. The tracking record says when a stage ended.
"""

import contextlib
import os
from pathlib import Path

from dvp.errors import DvpError
from dvp.experiment.folder import RESULTS
from dvp.files import read_json, verify_checksums
from dvp.tracking.record import KEY, STAGE, Record, read_records

LATE = 60.0  # seconds; Snakemake writes its own file after the stage has ended


def restore_order(folder: Path) -> None:
    """Set the modification times of each stage's outputs in `folder` to the stage's end where one of them is newer.

    Only outputs that are unchanged since the stage's last attempt are touched. All others, and files whose times cannot
    be set, are left for Snakemake to judge; nothing is raised.
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
    """List a finished stage's outputs: its JSON file, the files that this names, and Snakemake's benchmark file.

    The list is empty if the stage did not finish, or its JSON file is missing or from another attempt.
    """
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
