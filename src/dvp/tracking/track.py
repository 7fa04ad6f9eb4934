"""`dvp track`: the tracking store brought up to date from the files."""

from pathlib import Path

from dvp.experiment.folder import ExperimentDir
from dvp.tracking import store
from dvp.tracking.record import read_records, read_rows
from dvp.tracking.views import view_tags


def track(config: Path) -> None:
    """Bring into the tracking store what it lacks of every stage that has begun, from the files. Raises DvpError."""
    directory = ExperimentDir(config)
    # Everything is read before anything is sent.
    stages = [
        (record, read_rows(directory.folder / record.metrics) if record.metrics else [])
        for record in read_records(directory.folder)
    ]
    store.create_store(directory.results, directory.experiment.name, view_tags(directory.experiment))
    for record, rows in stages:
        added = store.track(directory.folder, record, rows)
        print(f"{record.name}: " + (", ".join(f"{name} +{count}" for name, count in added.items()) or "complete"))
    print(f"stages in {store.store_name(directory.results)}: {len(stages)}")
