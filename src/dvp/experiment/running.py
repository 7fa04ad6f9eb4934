"""Begin to run experiments: lock their results, refuse clocks that disagree, and write what their jobs read."""

import contextlib
import time
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.data import FileSource
from dvp.experiment.folder import RESULTS
from dvp.experiment.loading import write_resolved
from dvp.files import only_writer, read_json, sha256_file

SKEW = 5.0
"""Seconds by which the clocks of machines may differ."""


def begin(experiments: Iterable[Experiment], results: Path) -> ExitStack:
    """Lock the folders of experiments, and write their config.yaml, which stays as it is while their jobs run.

    Returns what holds the locks. Other processes respect them, whatever their checkout; they end with this process.
    (Snakemake's own lock sees its working directory only, and outlives a Snakemake that was killed.)
    Raises DvpError if another process has a lock, or if a file is dated in the future.
    """
    with ExitStack() as locks:
        for experiment in experiments:
            folder = results / experiment.name
            made = [folder / RESULTS[stage].replace("{of}", path) for stage, path in experiment.jobs]
            refuse_future([*local_files(experiment).values(), *made])
            locks.enter_context(only_writer(folder, "running this experiment"))
            write_resolved(experiment, folder)
        return locks.pop_all()


def refuse_future(files: Iterable[Path]) -> None:
    """Raise DvpError if a file is dated in the future: what is made from it would seem to be older than it."""
    for file in files:
        with contextlib.suppress(OSError):  # a file that is missing
            if (dated := file.stat().st_mtime) > time.time() + SKEW:
                raise DvpError(
                    f"{file}: dated {datetime.fromtimestamp(dated):%Y-%m-%d %H:%M}, in the future; what is made from "
                    "it would seem to be older: `touch` it, or is this machine's clock wrong?"
                )


def local_files(experiment: Experiment) -> dict[str, Path]:
    """Return the files of this machine that problems come from, by source."""
    used = {name: experiment.sources[name] for name in (experiment.data.train, *experiment.data.evaluation)}
    return {name: source.path for name, source in used.items() if isinstance(source, FileSource)}


def checksums_of(experiment: Experiment) -> dict[str, str]:
    """Return the SHA-256 of each of `local_files`, by source."""
    return {source: sha256_file(file) for source, file in local_files(experiment).items()}


def were_read(experiment: Experiment, folder: Path) -> dict[str, bool]:
    """Return for each of `local_files`, by path, whether `dvp prepare` has read the same content of it.

    folder : the experiment's, with the manifest of `dvp prepare`.
    """
    read = {}
    with contextlib.suppress(DvpError):
        read = read_json(folder / RESULTS["prepare"], "sources")["sources"]
    known = {source: of.get("description", {}).get("sha256") for source, of in read.items()}
    sums = checksums_of(experiment)
    return {str(file): known.get(source) == sums[source] for source, file in local_files(experiment).items()}
