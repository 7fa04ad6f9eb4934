"""About how long a workflow still takes, from what its jobs have taken so far."""

import csv
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import fmean

PLAN_COUNTS = 300.0
"""Seconds that count as if they had gone by plan: short jobs alone tell little of a machine's pace."""


class Estimate:
    """Counts jobs and the seconds that they take. Times are those of one clock, in seconds."""

    def __init__(self) -> None:
        self.cores: int | None = None
        """Of this machine, if jobs run on it."""
        self.gpus: int | None = None
        """Of this machine, if jobs that run on it are limited by them."""
        self._waiting: Counter[str] = Counter()
        self._running: dict[int, tuple[str, float]] = {}
        self._taken: dict[str, list[float]] = defaultdict(list)
        self._earlier: dict[str, list[float]] = defaultdict(list)
        self._by_plan: dict[str, list[float]] = defaultdict(list)
        self._takes: dict[str, tuple[int, int]] = {}
        self._most_running = 1

    def planned(self, jobs: dict[str, int]) -> None:
        """So many jobs of each rule are to be run."""
        self._waiting = Counter(jobs)

    def expect(self, earlier: dict[str, list[float]], by_plan: dict[str, float]) -> None:
        """Of an experiment: what jobs of each rule took in an earlier run, and what one takes by `dvp plan`."""
        for rule, seconds in earlier.items():
            self._earlier[rule] += seconds
        for rule, planned in by_plan.items():
            self._by_plan[rule].append(planned)

    def begun(self, job: int, rule: str, now: float, *, threads: int = 1, gpus: int = 0) -> None:
        """A job has started, with so many cores and GPUs."""
        self._waiting[rule] -= 1
        self._running[job] = rule, now
        self._takes[rule] = threads, gpus
        self._most_running = max(self._most_running, len(self._running))

    def ended(self, job: int, now: float) -> None:
        """A job is done."""
        rule, started = self._running.pop(job)
        self._taken[rule].append(now - started)

    def failed(self, job: int) -> None:
        """A job came to nothing; it may be tried again."""
        self._waiting[self._running.pop(job)[0]] += 1

    def left(self, now: float) -> float | None:
        """Seconds until all is done; None while there is a rule of whose jobs nothing is known."""
        pace, waiting = self._pace(), +self._waiting
        each = {rule: self._seconds(rule, pace) for rule in {*waiting, *(rule for rule, _ in self._running.values())}}
        if None in each.values():
            return None
        # A job that has taken longer than expected is taken to be near its end.
        running = [
            (rule, max(each[rule] - (now - started), 0.1 * each[rule])) for rule, started in self._running.values()
        ]
        work = sum(seconds * self._share(rule) for rule, seconds in running)
        work += sum(count * each[rule] * self._share(rule) for rule, count in waiting.items())
        return max([work, *(seconds for _, seconds in running)])

    def _share(self, rule: str) -> float:
        """How much a job takes of what can run at once: of this machine's cores or GPUs, or one of a cluster's jobs."""
        if not self.cores:
            return 1 / self._most_running
        threads, gpus = self._takes.get(rule, (1, 1))
        shares = [threads / self.cores, gpus / self.gpus if self.gpus else 0.0]
        return min(max(shares), 1.0)

    def _seconds(self, rule: str, pace: float) -> float | None:
        known = self._taken.get(rule) or self._earlier.get(rule)
        if known:
            return fmean(known)
        # A plan leaves out what takes seconds.
        return fmean(self._by_plan.get(_stage(rule), [0.0])) * pace if self._by_plan else None

    def _pace(self) -> float:
        """How long the jobs that are known took, over how long they take by plan."""
        known = {**self._earlier, **self._taken}
        known = {rule: seconds for rule, seconds in known.items() if seconds and self._by_plan.get(_stage(rule))}
        taken = sum(map(sum, known.values()))
        planned = sum(len(seconds) * fmean(self._by_plan[_stage(rule)]) for rule, seconds in known.items())
        return (taken + PLAN_COUNTS) / (planned + PLAN_COUNTS)


def _stage(rule: str) -> str:
    """As a plan counts rules: `report` for `report_training`."""
    return rule.split("_", maxsplit=1)[0]


def recorded_seconds(benchmarks: Path) -> dict[str, list[float]]:
    """What jobs of each rule took when they ran last, from Snakemake's benchmark files: BENCHMARKS/RULE/….tsv."""
    seconds = defaultdict(list)
    for file in sorted(benchmarks.rglob("*.tsv")):
        rule = file.relative_to(benchmarks).parts[0].removesuffix(".tsv")
        # A file of a job that was killed may hold anything; it is an estimate.
        with suppress(OSError, KeyError, TypeError, ValueError), open(file, encoding="utf-8", newline="") as table:
            seconds[rule] += [float(row["s"]) for row in csv.DictReader(table, delimiter="\t")]
    return dict(seconds)
