"""The ages of results, put in the order in which they were made, as a copy of them (`cp -r`) does not keep it.

Snakemake makes again what is older than what it was made from. When a stage ended and what it read, its record says.
"""

import contextlib
import os
import time
from pathlib import Path

from dvp.errors import DvpError
from dvp.experiment.folder import RESULTS
from dvp.files import read_json, verify_checksums
from dvp.tracking.record import KEY, STAGE, UPSTREAM, Record, read_records


def restore_order(folder: Path) -> None:
    """Date what is in `folder` by when its stage ended, if an output is older than what it needs, or not of the past.

    That holds for files that are as they were written, by the stage's last attempt. What was altered, or cannot be
    changed, is left as it is, for Snakemake to judge. So are reports, which take seconds.
    """
    with contextlib.suppress(DvpError, OSError):
        made = {record.key: (record, files) for record in read_records(folder) if (files := _outputs(folder, record))}
        ages = {key: [file.lstat().st_mtime for file in files] for key, (_, files) in made.items()}
        for key, (record, _) in made.items():
            read = {key for name, keys in record.tags.items() if name.startswith(UPSTREAM) for key in keys.split()}
            if record.tags[STAGE] == "train":  # which waits for a preflight, and reads nothing of it
                ended = [other for other, _ in made.values() if other.ended <= record.started]
                read |= {other.key for other in ended if other.tags[STAGE] == "preflight"}
            read = [age for other in read for age in ages.get(other, ())]
            if not max(read, default=0) <= min(ages[key]) <= max(ages[key]) <= time.time():
                break
        else:
            return
        for record, files in made.values():
            with contextlib.suppress(DvpError, OSError):
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
