"""Snakemake logger plugin that prints readable lines: what runs, how much is done, about how long it will take.

`snakemake --logger dvp` (profiles/default asks for it) prints

    [12/46] training dvp_mis · coarse · ρ e⁻¹³ · seed 0    2 running, about 7 min left

when a job starts and a line when it ends. Errors, warnings and dry runs look like Snakemake's own, and the log in
.snakemake/log is complete. Snakemake finds this package by its name.
"""

import logging
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean

from snakemake.logging import ColorizingTextHandler, DefaultFormatter
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

from dvp.progress import duration, readable

# Messages that do not help a user who waits for results. Other messages without an event are passed on.
CHATTER = ("Building DAG of jobs", "Select jobs to execute", "Assuming unrestricted shared filesystem", "Using shell")
# An error raised by a rule's input function, which Snakemake wraps in wildcards and a traceback.
REFUSED = re.compile(
    r"InputFunctionException in rule \w+ .*?\n  (?:DvpError|WorkflowError):\s+(.*?)\nWildcards:", re.DOTALL
)
# When memory runs out, the kernel kills the largest process: the exit status of a shell whose command was killed, or
# Snakemake's message if the shell itself was.
KILLED = re.compile(r"returned non-zero exit status 137\.|died with <Signals\.SIGKILL")
SILENT = (
    *(LogEvent.JOB_INFO, LogEvent.JOB_STARTED, LogEvent.JOB_FINISHED, LogEvent.PROGRESS, LogEvent.SHELLCMD),
    *(LogEvent.RULEGRAPH, LogEvent.WORKFLOW_STARTED, LogEvent.RESOURCES_INFO),
)


class LogHandler(LogHandlerBase):
    """Log handler that prints to standard error. Snakemake calls it with one record at a time, from one thread."""

    writes_to_stream = has_formatter = True
    writes_to_file = needs_rulegraph = False
    has_filter = False  # Snakemake's own filter obeys --quiet

    def __post_init__(self) -> None:
        """Set up Snakemake's own handler, for all that is passed on, and the state of the progress lines."""
        self._own = ColorizingTextHandler(
            nocolor=self.common_settings.nocolor,
            stream=sys.stdout if self.common_settings.stdout else sys.stderr,
            formatter=DefaultFormatter(self.common_settings.quiet, self.common_settings.show_failed_logs),
        )
        # A user who asks for details gets Snakemake's own output.
        self._details = self.common_settings.dryrun or self.common_settings.verbose
        self._running: dict[int, tuple[str, str, float]] = {}  # rule, name and start by job
        self._waiting: Counter[str] = Counter()
        self._taken: dict[str, list[float]] = defaultdict(list)  # seconds of each rule's jobs
        self._killed: list[str] = []  # errors, each with its job's command; the job's own record follows
        self._most_running = 1
        self._total = self._done = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record as a readable line, pass it on to Snakemake's own handler, or drop it."""
        event = getattr(record, "event", None)
        refused = None if self.common_settings.verbose else REFUSED.search(record.getMessage())
        if refused:
            self._own.stream.write(f"{refused[1]}\n")
            self._own.flush()
        elif self._details:
            self._own.emit(record)
        elif event == LogEvent.RUN_INFO:
            self._waiting = Counter({rule: n for rule, n in record.stats.items() if rule not in ("total", "all")})
            self._total = self._waiting.total()
            listed = ", ".join(f"{count} {rule}" for rule, count in self._waiting.items())
            self._say(f"{self._total} job{'s' * (self._total != 1)}: {listed}")
        elif event == LogEvent.JOB_INFO and record.rule_name != "all":
            self._begun(record)
        elif event == LogEvent.JOB_FINISHED and record.job_id in self._running:
            self._done += 1
            rule, name, started = self._running.pop(record.job_id)
            self._taken[rule].append(record.created - started)
            self._say(f"done in {duration(record.created - started)}: {name}{self._outlook(record.created)}")
        elif event == LogEvent.JOB_ERROR:
            left = [message for message in self._killed if not record.shellcmd or record.shellcmd not in message]
            killed, self._killed = len(left) < len(self._killed), left  # the next time it may fail otherwise
            if record.jobid in self._running:  # it may be tried again
                rule, name, _ = self._running.pop(record.jobid)
                self._waiting[rule] += 1
                self._say(f"killed: {name}; out of memory? {_reached(record.log)}" if killed else f"failed: {name}")
            if not killed:
                self._own.emit(record)
        elif event == LogEvent.ERROR and KILLED.search(record.getMessage()):
            self._killed.append(record.getMessage())
        elif event not in SILENT and not str(record.msg).startswith(CHATTER):
            self._own.emit(record)

    def _begun(self, record: logging.LogRecord) -> None:
        rule, name = record.rule_name, readable(record.rule_msg or record.rule_name)
        self._waiting[rule] -= 1
        self._running[record.jobid] = rule, name, record.created
        self._most_running = max(self._most_running, len(self._running))
        self._say(name + self._outlook(record.created))

    def _outlook(self, now: float) -> str:
        """Write how many jobs run and the time left, if each job takes the mean time of its rule's finished jobs."""
        waiting = +self._waiting
        if not self._running and not waiting:
            return ""
        rules = {*waiting, *(rule for rule, _, _ in self._running.values())}
        each = {rule: fmean(self._taken[rule] or [0.0]) for rule in rules}
        # A job that has run longer than expected is assumed to be near its end.
        left = [max(each[rule] - (now - started), 0.1 * each[rule]) for rule, _, started in self._running.values()]
        work = sum(left) + sum(count * each[rule] for rule, count in waiting.items())
        seconds = duration(max([work / self._most_running, *left]), rough=True)
        known = "about" if all(self._taken[rule] for rule in rules) else "at least"
        return f"    {len(self._running)} running{f', {known} {seconds} left' if work else ''}"

    def _say(self, line: str) -> None:
        self._own.stream.write(f"[{self._done}/{self._total}] {line}\n")
        self._own.flush()


def _reached(logs: list[str]) -> str:
    """Write the last line of a killed job's log, and how to continue."""
    lines = [line for log in logs if Path(log).is_file() for line in Path(log).read_text(errors="replace").split("\n")]
    last = next((line.strip() for line in reversed(lines) if line.strip()), None)
    where = f'It had reached "{readable(last)}". ' if last else ""
    return f"{where}Run the same again to continue: what is finished stays, training goes on from its last checkpoint"
