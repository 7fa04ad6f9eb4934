"""Work that another experiment has done already.

A stage's key names its version, its settings and the contents of its inputs; where another experiment beside this one
has finished a stage of the same key, its files are the ones that would be made here.
"""

import contextlib
import shutil
from pathlib import Path
from typing import Any

from dvp.errors import DvpError
from dvp.files import atomic_path, read_json, verify_checksums, write_json
from dvp.tracking.record import KEY
from dvp.tracking.stage import StageRun


def reuse(folder: Path, path: Path, tracked: StageRun) -> bool:
    """Copy the stage's files from another experiment of the same results, `path` (its JSON file) last.

    Whether there was such an experiment, with all of the files unaltered. The JSON file keeps commit and seconds of the
    work itself and says in `reused_from` where that was done.
    """
    for other in sorted(folder.parent.iterdir()):
        there = other / path.relative_to(folder)
        if other == folder or not there.is_file():
            continue
        # Of no use, then; or on its way out, or there is no room: the work itself will say so.
        with contextlib.suppress(DvpError, OSError):
            record = read_json(there, KEY, "files")
            if record[KEY] != tracked.key_in(other.name):
                continue
            verify_checksums(there.parent, record["files"])
            for name in _files(record):
                _copy(there.parent / name, path.parent / name)
            tracked.adopt(other)
            tracked.tag("reused_from", f"{other.name} {record[KEY]}")
            print(f"the same as in {other}: copied", flush=True)
            write_json(path, record | {KEY: tracked.key, "reused_from": f"{other.name} {record[KEY]}"})
            tracked.log_file(path)
            return True
    return False


def _files(record: dict[str, Any]) -> list[str]:
    return [*record["files"], *([record["checkpoint"]] if "checkpoint" in record else [])]


def _copy(source: Path, target: Path) -> None:
    with atomic_path(target) as temporary:
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, temporary)
