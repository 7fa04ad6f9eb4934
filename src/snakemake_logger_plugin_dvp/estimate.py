"""About how long a workflow still takes, from what its jobs have taken so far."""

import csv
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

# What a job of a rule takes, as a multiple of `convert`'s: only ratios matter, and only until a job of it has ended.
SHARES = {
    "train": 9.0,
    "base": 8.0,
    "preflight": 8.0,
    "bias": 8.0,
    "mismatch": 4.0,
    "evaluate": 3.0,
    "convert": 1.0,
    "prepare": 0.7,
}
OTHER = 1.0


@dataclass
class _Job:
    rule: str
    threads: int
    started: float


class Estimate:
    """Counts jobs and the seconds that they take. Times are those of one clock, in seconds."""

    def __init__(self) -> None:
        self.cores: int | None = None
        """Of this machine, if jobs run on it."""
        self._waiting: Counter[str] = Counter()
        self._running: dict[int, _Job] = {}
        self._taken: dict[str, list[float]] = defaultdict(list)
        self._earlier: dict[str, list[float]] = {}
        self._threads: dict[str, int] = {}
        self._most_running = 1

    def planned(self, jobs: dict[str, int]) -> None:
        """So many jobs of each rule are to be run."""
        self._waiting = Counter(jobs)

    def remember(self, seconds: dict[str, list[float]]) -> None:
        """What jobs of each rule took in an earlier run; the first time counts."""
        self._earlier = self._earlier or seconds

    def begun(self, job: int, rule: str, threads: int, now: float) -> None:
        """A job has started."""
        self._waiting[rule] -= 1
        self._running[job] = _Job(rule, threads, now)
        self._threads[rule] = threads
        self._most_running = max(self._most_running, len(self._running))

    def ended(self, job: int, now: float) -> None:
        """A job is done."""
        done = self._running.pop(job)
        self._taken[done.rule].append(now - done.started)

    def failed(self, job: int) -> None:
        """A job came to nothing; it may be tried again."""
        self._waiting[self._running.pop(job).rule] += 1

    def left(self, now: float) -> float | None:
        """Seconds until all is done; None while nothing is known of any job."""
        unit = self._unit()
        if unit is None:
            return None
        # A job that has taken longer than expected is taken to be near its end.
        running = []
        for job in self._running.values():
            expected = self._seconds(job.rule, unit)
            running.append((job, max(expected - (now - job.started), 0.1 * expected)))
        work = sum(seconds * self._width(job.rule) for job, seconds in running)
        work += sum(count * self._seconds(rule, unit) * self._width(rule) for rule, count in self._waiting.items())
        return max([work / (self.cores or self._most_running), *(seconds for _, seconds in running)])

    def _width(self, rule: str) -> int:
        """How much of what can run at once a job takes: cores of this machine, or one job's place on a cluster."""
        return min(self._threads.get(rule, 1), self.cores) if self.cores else 1

    def _seconds(self, rule: str, unit: float) -> float:
        seconds = self._taken.get(rule) or self._earlier.get(rule)
        return fmean(seconds) if seconds else SHARES.get(rule, OTHER) * unit

    def _unit(self) -> float | None:
        """Seconds that a share of 1 takes, from all jobs that are known."""
        known = {**self._earlier, **self._taken}
        shares = sum(SHARES.get(rule, OTHER) * len(seconds) for rule, seconds in known.items())
        return sum(map(sum, known.values())) / shares if shares else None


def recorded_seconds(benchmarks: Path) -> dict[str, list[float]]:
    """What jobs of each rule took when they ran last, from Snakemake's benchmark files: BENCHMARKS/RULE/….tsv."""
    seconds = defaultdict(list)
    for file in sorted(benchmarks.rglob("*.tsv")):
        rule = file.relative_to(benchmarks).parts[0].removesuffix(".tsv")
        seconds[rule] += _seconds_in(file)
    return dict(seconds)


def _seconds_in(file: Path) -> Iterable[float]:
    try:
        with open(file, encoding="utf-8", newline="") as table:
            return [float(row["s"]) for row in csv.DictReader(table, delimiter="\t")]
    except (OSError, KeyError, TypeError, ValueError):
        return []  # of a job that was killed; it is an estimate
