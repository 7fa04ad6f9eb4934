"""Snakemake's messages as lines that a person can read: what runs, how much is done, about how long it will take.

`snakemake --logger dvp` (profiles/default asks for it) prints

    [12/46] training DVP + MIS · coarse · ρ e⁻¹³ · seed 0    2 running, about 7 min left

when a job starts and a line when it ends. Errors, warnings and dry runs look as Snakemake's own; the log that Snakemake
keeps in .snakemake/log is whole. Snakemake finds this package by its name.
"""

import logging
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from snakemake.logging import ColorizingTextHandler, DefaultFormatter
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

from dvp.progress import duration, readable
from snakemake_logger_plugin_dvp.estimate import Estimate, recorded_seconds

if TYPE_CHECKING:
    from dvp.experiment.config import Experiment

TARGETS = ("all",)  # rules that only collect
BENCHMARKS = "benchmarks"  # the folder of an experiment's results in which each rule has one
# Of no use to somebody who waits for results. All else that is said without an event is passed on.
CHATTER = ("Building DAG of jobs", "Select jobs to execute", "Assuming unrestricted shared filesystem", "Using shell")
# What a function of a rule refuses, which Snakemake wraps in wildcards and a traceback.
REFUSED = re.compile(
    r"InputFunctionException in rule \w+ .*?\n  (?:DvpError|WorkflowError):\s+(.*?)\nWildcards:", re.DOTALL
)
SILENT = (LogEvent.JOB_STARTED, LogEvent.PROGRESS, LogEvent.SHELLCMD, LogEvent.RULEGRAPH, LogEvent.WORKFLOW_STARTED)


class LogHandler(LogHandlerBase):
    """Writes to standard error. Receives records one by one, from a thread of its own."""

    writes_to_stream = has_formatter = True
    writes_to_file = needs_rulegraph = False
    has_filter = False  # Snakemake's own obeys --quiet

    def __post_init__(self) -> None:
        self._own = ColorizingTextHandler(
            nocolor=self.common_settings.nocolor,
            stream=sys.stdout if self.common_settings.stdout else sys.stderr,
            formatter=DefaultFormatter(self.common_settings.quiet, self.common_settings.show_failed_logs),
        )
        # Who asks for details gets Snakemake's.
        self._details = self.common_settings.dryrun or self.common_settings.verbose
        self._estimate = Estimate()
        self._started: dict[int, tuple[str, float]] = {}
        self._seen: set[Path] = set()
        self._total = self._done = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Print what the record means, if anything."""
        event = getattr(record, "event", None)
        refused = None if self.common_settings.verbose else REFUSED.search(record.getMessage())
        if refused:
            self._own.stream.write(f"{refused[1]}\n")
            self._own.flush()
        elif self._details:
            self._own.emit(record)
        elif event == LogEvent.RUN_INFO:
            self._planned(record.stats)
        elif event == LogEvent.RESOURCES_INFO:
            self._estimate.cores = getattr(record, "cores", None) or self._estimate.cores
            limits = getattr(record, "provided_resources", None) or {}
            self._estimate.gpus = limits.get("accelerators") or self._estimate.gpus
        elif event == LogEvent.JOB_INFO:
            self._begun(record)
        elif event == LogEvent.JOB_FINISHED:
            self._ended(record)
        elif event == LogEvent.JOB_ERROR:
            self._failed(record)
        elif event not in SILENT and not str(record.msg).startswith(CHATTER):
            self._own.emit(record)

    def _planned(self, stats: dict[str, int]) -> None:
        counts = {rule: count for rule, count in stats.items() if rule not in ("total", *TARGETS)}
        self._total, self._done = sum(counts.values()), 0
        self._estimate.planned(counts)
        listed = ", ".join(f"{count} {rule}" for rule, count in counts.items())
        self._say(f"{self._total} job{'s' * (self._total != 1)}: {listed}")

    def _begun(self, record: logging.LogRecord) -> None:
        if record.rule_name in TARGETS:
            return
        experiment = _experiment(record.wildcards.get("experiment"))
        for folder in Path(record.benchmark or "").parents:
            if folder.name == BENCHMARKS:
                self._expect(experiment, folder)
        labels = {} if experiment is None else {name: method.label for name, method in experiment.methods.items()}
        name = readable(record.rule_msg or record.rule_name, labels)
        self._started[record.jobid] = name, record.created
        gpus = record.resources.get("accelerators", 0)
        self._estimate.begun(record.jobid, record.rule_name, record.created, threads=record.threads, gpus=gpus)
        self._say(f"{name}    {self._outlook(record.created)}")

    def _expect(self, experiment: "Experiment | None", benchmarks: Path) -> None:
        """Once for each experiment: what its jobs took before, and what they take by plan, if one can be made."""
        if benchmarks in self._seen:
            return
        self._seen.add(benchmarks)
        by_plan = {}
        if experiment is not None:
            from dvp.errors import DvpError
            from dvp.planning.plan import seconds_by_stage

            with suppress(DvpError):  # sizes of the model are not given, or an earlier record is unreadable
                by_plan = seconds_by_stage(experiment, benchmarks.parent, "h200" if self._estimate.gpus else None)
        self._estimate.expect(recorded_seconds(benchmarks), by_plan)

    def _ended(self, record: logging.LogRecord) -> None:
        name, started = self._started.pop(record.job_id, (None, 0.0))
        if name is None:
            return
        self._done += 1
        self._estimate.ended(record.job_id, record.created)
        outlook = "" if self._done == self._total else f"    {self._outlook(record.created)}"
        self._say(f"done in {duration(record.created - started)}: {name}{outlook}")

    def _failed(self, record: logging.LogRecord) -> None:
        name, _ = self._started.pop(record.jobid, (None, 0.0))
        if name is not None:
            self._estimate.failed(record.jobid)
            self._say(f"failed: {name}")
        self._own.emit(record)

    def _outlook(self, now: float) -> str:
        running = f"{len(self._started)} running"
        seconds = self._estimate.left(now)
        return running if seconds is None else f"{running}, about {duration(seconds, rough=True)} left"

    def _say(self, line: str) -> None:
        self._own.stream.write(f"[{self._done}/{self._total}] {line}\n")
        self._own.flush()


@cache
def _experiment(name: str | None) -> "Experiment | None":
    """What a job is of; None if it is of none that can be read."""
    from dvp.errors import DvpError
    from dvp.experiment.loading import load_experiment

    try:
        return load_experiment(name)
    except (DvpError, TypeError):
        return None
