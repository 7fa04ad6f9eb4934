"""Estimate of an experiment's cost before it is submitted: jobs, GPU-hours, wall time, disk, money.

Where this experiment has run (results/E), times are the recorded ones, which are also used for similar jobs; all others
are estimated. The plan says how many jobs have a time from each source. Finished jobs count like those to come.
Needs no GPU and no network.
"""

import csv
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from dvp.errors import DvpError
from dvp.experiment.base import TrainedBase, WheelBase
from dvp.experiment.config import Experiment
from dvp.experiment.data import FileSource, GeneratedSource
from dvp.experiment.folder import RESULTS
from dvp.experiment.grid import GridPoint, settings_as_read, whole_run
from dvp.experiment.jobs import Job, together
from dvp.files import read_json
from dvp.planning.costs import DEVICES
from dvp.planning.estimate import Estimate

RECORDED, INFERRED, ESTIMATED = SOURCES = "recorded", "inferred", "estimated"


@dataclass(frozen=True)
class Costed:
    """A job with its time, devices and disk."""

    job: Job
    gpus: int
    """Number of GPUs on all nodes, or of cores on a CPU; 0 for a job that needs none of the GPUs."""
    seconds: float
    source: str
    """Source of `seconds`: recorded (its own), inferred (from similar jobs), estimated."""
    disk: float = 0
    """Bytes that the job leaves."""
    slowest: float = 1
    """Upper end of the range of the time, as a multiple of its lower end; `seconds` is the middle of the range."""

    def scaled(self, share: float) -> "Costed":
        """Return this job with the time at a share of its range: 0 is the formula, 1 the upper end."""
        formula = 2 * self.seconds / (1 + self.slowest)
        return replace(self, seconds=formula * (1 + share * (self.slowest - 1)))

    @property
    def run(self) -> str:
        """Path of the run that the job trains or works on, without the step; empty if it belongs to none."""
        return "" if self.job.run is None else whole_run(self.job.run.path)


@dataclass(frozen=True)
class Records:
    """Results that earlier jobs of an experiment recorded below `folder` (results/E), which need not exist."""

    experiment: Experiment
    folder: Path

    def of(self, job: Job) -> dict[str, Any] | None:
        """Return the content of a job's JSON file; None if the job has not run, or ran with other settings."""
        path = self.folder / RESULTS[job.stage].replace("{of}", job.path)
        if not path.is_file():
            return None
        record = read_json(path, "config_hash", "seconds_stage")
        return record if record["config_hash"] == self.experiment.config_hash(job.stage, job.path) else None

    def took(self, job: Job) -> float | None:
        """Return the seconds of a finished job, start-up included; None if not known.

        This is the longest of the times of the stage, of its training steps and of Snakemake's job. Only the stage's
        includes the work if the result was copied from another experiment, and only the steps' is complete if training
        was resumed. The benchmark file of a killed job may hold anything, and is ignored if it cannot be read.
        """
        record, seconds = self.of(job), 0.0
        if record is None:
            return None
        path = self.folder / "benchmarks" / f"{'/'.join(filter(None, (job.stage, job.path)))}.tsv"
        with suppress(OSError, LookupError, TypeError, ValueError), open(path, encoding="utf-8", newline="") as file:
            seconds = float(list(csv.DictReader(file, delimiter="\t"))[-1]["s"])
        return max(record["seconds_stage"], record.get("seconds_training", 0.0), seconds)

    @cached_property
    def problems(self) -> dict[str, int]:
        """Number of evaluation problems by task, as `dvp prepare` counted them; empty before it has run."""
        record = self.of(self.experiment.job("prepare"))
        return {} if record is None else record["counts"]["evaluation"]

    def preflight(self, path: str) -> dict[str, Any] | None:
        """Return the record of a preflight; None if there is none with these settings and this number of GPUs."""
        job = self.experiment.job("preflight", path)
        record = self.of(job)
        return record if record and (record["gpus"], record["nodes"]) == (job.gpus, job.nodes) else None


def make_plan(
    experiment: Experiment,
    folder: Path,
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    price: float | None = None,
    response_tokens: float | None = None,
) -> dict[str, Any]:
    """Plan an experiment: return JSON-able totals by stage and by method in hours and bytes, and step times in seconds.

    folder : results/E, read for recorded times; it need not exist.
    gpu : a name of costs.DEVICES; by default a CPU for a base that is trained here or from a wheel, else an H200.
    gpus : how many may be used at once; by default as many as the largest job takes.
    price : money per GPU-hour.
    response_tokens : mean length of a response; by default half of the longest.
    Raises DvpError if the experiment has several base models, `gpus` are too few for a job, or the size of model or
    task is not known.
    """
    if experiment.bases:
        expected = f"expected one of {', '.join(experiment.of_bases)}"
        raise DvpError(f"{experiment.name}: a plan is of one base model; {expected}")
    # A base that the pipeline trains itself, or that fits into a wheel, is small enough for a CPU.
    device = DEVICES[gpu or ("cpu" if isinstance(experiment.base, TrainedBase | WheelBase) else "h200")]
    on_cpu = device is DEVICES["cpu"]
    records = Records(experiment, folder)
    estimates = {point.path: Estimate(experiment, device, response_tokens, point) for point in experiment.points}
    estimate = Estimate(experiment, device, response_tokens)
    costed = cost_jobs(estimate, estimates, records, at_least=1 if on_cpu else 0)
    largest = max(costed, key=lambda one: one.gpus)
    gpus = gpus or largest.gpus
    if gpus < largest.gpus:
        raise DvpError(f"--gpus {gpus}: a job of stage '{largest.job.stage}' takes {largest.gpus} at once")

    def gpu_hours(some: list[Costed]) -> float:
        return sum(one.gpus * one.seconds for one in some) / 3600

    def total(some: list[Costed]) -> dict[str, Any]:
        hours = gpu_hours(some)
        return {
            "jobs": len(some),
            "gpu_hours": hours,
            "money": None if price is None else hours * price,
            "disk": sum(one.disk for one in some),
            "from": {kind: sum(one.source == kind for one in some) for kind in SOURCES},
        }

    stages = []
    for stage in dict.fromkeys(one.job.stage for one in costed):
        some = [one for one in costed if one.job.stage == stage]
        hours = [one.seconds / 3600 for one in some]
        head = {"stage": stage, "gpus_each": some[0].gpus, "hours_each": [min(hours), max(hours)]}
        stages.append(head | total(some))
    methods = []
    for points in _by(experiment, "method", "engine").values():
        runs = {point.run(seed).path for point in points for seed in experiment.seeds}
        some = [one for one in costed if one.run in runs]
        method, engine = points[0].method, points[0].engine
        head = {"method": method, "label": experiment.methods[method].label, "engine": engine}
        methods.append(head | {"settings": experiment.settings_of(points[0]), "runs": len(runs)} | total(some))
    # One entry per engine, and per training settings where they differ.
    trainings = {", ".join(key): points[0] for key, points in _by(experiment, "engine").items()}
    on_gpus = {} if on_cpu else trainings
    ends = [[one.scaled(share) for one in costed] for share in (0, 1)]
    updates = [estimates[point.path].update_memory() for point in on_gpus.values()]
    return {
        "experiment": experiment.name,
        "device": device.name,
        "unit": "core" if on_cpu else "GPU",
        "gpus": gpus,
        "price": price,
        "stages": stages,
        "methods": methods,
        "shared": total([one for one in costed if not one.run]),
        "total": total(costed) | {"gpu_hours_range": list(map(gpu_hours, ends))},
        "slowest": device.slowest,
        "response_tokens": estimate.lengths().response,
        "response_tokens_from": "half of the longest is assumed" if response_tokens is None else "as given",
        "hours_wall": wall_seconds(costed, gpus) / 3600,
        "hours_wall_range": [wall_seconds(end, gpus) / 3600 for end in ends],
        "hours_longest_chain": wall_seconds(costed, float("inf")) / 3600,
        "checkpoint": estimate.checkpoint_bytes,
        "step": {name: estimates[point.path].step(point.engine) for name, point in trainings.items()},
        "update_memory": max(updates, key=lambda parts: sum(parts.values()), default={}),
        "rollout_memory": {name: estimates[point.path].rollout_memory(point.engine) for name, point in on_gpus.items()},
        "device_memory": None if on_cpu else device.memory,
        "preflights": {
            name: {
                "device": rehearsed["device"],
                "is_this_device": device.name.split(" GB")[0].rpartition(" ")[0] in rehearsed["device"],
                "step": _rehearsed_step(rehearsed, estimates[point.path]),
            }
            for name, point in trainings.items()
            if (rehearsed := records.preflight(point.preflight)) is not None
        },
        "assumptions": estimate.assumptions(),
    }


def _by(experiment: Experiment, *names: str) -> dict[tuple, list[GridPoint]]:
    """Group the grid points by the named values and by the training settings in which the grid differs, as text."""
    grouped = defaultdict(list)
    for point in experiment.points:
        settings = settings_as_read(experiment.settings_of(point))
        grouped[*(getattr(point, name) for name in names), *settings].append(point)
    return grouped


def cost_jobs(estimate: Estimate, estimates: dict[str, Estimate], records: Records, at_least: int) -> list[Costed]:
    """Assign each job its time, source, devices and disk: recorded if possible, else inferred, else estimated.

    estimate : for jobs that belong to no grid point.
    estimates : by path of the grid point.
    at_least : devices that a job takes if it needs no GPU.
    """
    experiment = records.experiment
    problems = count_problems(experiment, records)
    jobs = [job for job in experiment.jobs.values() if job.asked]
    took = {job: records.took(job) for job in jobs}
    alike = defaultdict(list)  # recorded seconds of similar jobs
    for job, seconds in took.items():
        for key in _alike(job) if seconds is not None else ():
            alike[key].append(seconds)
    of_preflight = {point.preflight: estimates[point.path] for point in experiment.points}
    costed = []
    for job, recorded in took.items():
        trains = job.stage == "train"
        own = estimates[job.run.point.path] if trains else of_preflight.get(job.path, estimate)
        (seconds, disk), source = own.job(job, problems), ESTIMATED
        if recorded is not None:
            seconds, source = recorded, RECORDED
        elif known := next((alike[key] for key in _alike(job) if key in alike), None):
            seconds, source = fmean(known), INFERRED
        elif trains and (rehearsed := records.preflight(job.run.preflight)) is not None:
            seconds, source = own.train_seconds(sum(_rehearsed_step(rehearsed, own).values())), INFERRED
        slowest = estimate.device.slowest if source == ESTIMATED else 1
        seconds *= (1 + slowest) / 2
        costed.append(Costed(job, max(job.gpus * job.nodes, at_least), seconds, source, disk, slowest))
    return _together(costed, estimate.device.startup)


def _alike(job: Job) -> list[tuple]:
    """Return keys by which similar jobs are found, the most similar first; jobs that share a key take about as long.

    A training run is similar to those with its engine, training settings and method, then to those with any method. A
    job of another stage is similar to all with its stage and task, whatever the policy, seed or sampler.
    """
    if job.stage == "train":
        return [(job.stage, job.run.preflight, job.run.method), (job.stage, job.run.preflight)]
    return [(job.stage, job.task)]


def _together(costed: list[Costed], startup: float) -> list[Costed]:
    """Merge the jobs that one process does (all tasks of a model) into one, which starts up only once."""
    merged: dict[tuple[str, str], Costed] = {}
    for one in costed:
        process = together(one.job.stage, one.job.path)
        first = merged.setdefault(process, one)
        if first is not one:
            seconds = first.seconds + one.seconds - startup * (1 + one.slowest) / 2 * (one.source == ESTIMATED)
            source = max(first.source, one.source, key=SOURCES.index)
            changed = {"seconds": seconds, "source": source, "disk": first.disk + one.disk}
            merged[process] = replace(first, slowest=max(first.slowest, one.slowest), **changed)
    return list(merged.values())


def _rehearsed_step(rehearsed: dict[str, Any], estimate: Estimate) -> dict[str, float]:
    """Scale the times that a preflight measured per token to the parts of a training step, in seconds.

    A rollout takes as many decoding steps as its longest response has tokens; an update is proportional to all tokens.
    """
    training, lengths, seconds = estimate.training, estimate.lengths(), rehearsed["seconds"]
    responses = training.prompts_per_step * training.group_size
    return {
        "rollout": responses * lengths.longest * seconds["rollout_token"],
        "update": responses * lengths.response * seconds["update_token"],
        "synchronise": seconds["synchronise"],
    }


def count_problems(experiment: Experiment, records: Records) -> dict[str, int]:
    """Count the evaluation problems by task: as `dvp prepare` did, or else as the source says or has them.

    Raises DvpError if a source does not say and `dvp prepare` has not run.
    """
    counted = {"held_out": experiment.data.held_out} | records.problems
    for task in (task for task in experiment.data.tasks if task not in counted):
        source = experiment.sources[task]
        if isinstance(source, FileSource):
            from dvp.data.sources import load  # slow to import, and needed for files alone

            counted[task] = len({row.problem for row in load(source, f"sources.{task}")})
        else:
            counted[task] = source.count if isinstance(source, GeneratedSource) else source.problems
        if counted[task] is None:
            raise DvpError(f"sources.{task}.problems: a plan needs their number until dvp prepare has counted them")
    return counted


def wall_seconds(costed: list[Costed], gpus: float) -> float:
    """Simulate the schedule and return the seconds until the last job ends.

    A job starts as soon as its inputs exist and enough of the `gpus` are free; of several that could start, the first
    in the list does. A job that needs no GPU never waits for one.
    """
    waiting, running, done = {together(one.job.stage, one.job.path): one for one in costed}, {}, set()
    now, free = 0.0, gpus
    while waiting or running:
        for name, one in list(waiting.items()):
            if one.gpus <= free and done.issuperset(together(*other) for other in one.job.after):
                running[name] = now + one.seconds, waiting.pop(name).gpus
                free -= one.gpus
        ended = min(running, key=lambda name: running[name][0])
        now, freed = running.pop(ended)
        free += freed
        done.add(ended)
    return now
