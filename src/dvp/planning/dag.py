"""The jobs of an experiment as Snakemake itself sees them: its own dry run of everything, read event by event."""

import logging
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from graphlib import TopologicalSorter
from io import StringIO
from pathlib import Path

from dvp.errors import DvpError

WITHOUT_COST = ("all", "resolve")
"""Rules that only bundle others, or write a file of settings."""


@dataclass(frozen=True)
class Job:
    """One job of the DAG."""

    stage: str
    """The rule; `report` for all parts of a report."""
    wildcards: dict[str, str]
    gpus: int
    """0 where it needs none."""
    outputs: tuple[str, ...]
    """Relative to the experiment's folder, as is the next."""
    benchmark: str | None
    """Where Snakemake writes what the job took."""
    after: tuple[int, ...]
    """Indices of the jobs that it waits for."""


def read_jobs(settings: dict[str, str], snakefile: Path = Path("Snakefile")) -> list[Job]:
    """Every job of an experiment, done or not, each after those that it waits for.

    settings : `experiment` and `results`, as Snakemake's --config takes them.
    Raises DvpError with Snakemake's own words if it refuses.
    """
    from snakemake.api import SnakemakeApi
    from snakemake.logging import logger
    from snakemake.settings.types import ConfigSettings, DAGSettings, OutputSettings, ResourceSettings

    # What is there already makes no difference, but Snakemake would refuse to write to what is write-protected.
    folder = Path(settings["results"]) / "no such folder" / settings["experiment"]
    settings = settings | {"results": str(folder.parent)}
    events = _Events()
    output = StringIO()
    with redirect_stdout(output), redirect_stderr(output), SnakemakeApi(OutputSettings(dryrun=True)) as api:
        try:
            workflow = api.workflow(
                resource_settings=ResourceSettings(cores=1),
                config_settings=ConfigSettings(config=settings),
                snakefile=snakefile,
            )
            dag = workflow.dag(DAGSettings(forceall=True))
            logger.handlers = [events]
            dag.execute_workflow(pseudo_executor="dryrun")
        except Exception as error:
            raise DvpError(f"{snakefile}: {' '.join(str(error).split()) or type(error).__name__}") from None
    return _ordered([event for event in events.jobs if event.rule_name not in WITHOUT_COST], folder)


class _Events(logging.Handler):
    """Keeps Snakemake's JOB_INFO events and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        from snakemake_interface_logger_plugins.common import LogEvent

        if getattr(record, "event", None) == LogEvent.JOB_INFO:
            self.jobs.append(record)


def _ordered(events: list[logging.LogRecord], folder: Path) -> list[Job]:
    """Jobs in the order of their dependencies, and the same at every call; Snakemake's own list promises neither."""
    events = sorted(events, key=lambda event: (event.rule_name, list(event.output)))
    made_by = {file: index for index, event in enumerate(events) for file in event.output}
    needs = [{made_by[file] for file in event.input if file in made_by} for event in events]
    order = list(TopologicalSorter(dict(enumerate(needs))).static_order())
    position = {index: place for place, index in enumerate(order)}

    def relative(file: str) -> str:
        return Path(file).relative_to(folder).as_posix()

    return [
        Job(
            stage=events[index].rule_name.split("_")[0],
            wildcards={key: value for key, value in events[index].wildcards.items() if key != "experiment"},
            gpus=events[index].resources.get("accelerators", 0),
            outputs=tuple(map(relative, events[index].output)),
            benchmark=events[index].benchmark and relative(events[index].benchmark),
            after=tuple(sorted(position[before] for before in needs[index])),
        )
        for index in order
    ]
