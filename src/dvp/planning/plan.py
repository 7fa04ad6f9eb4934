"""Estimate of an experiment's cost before it is submitted: jobs, GPU-hours, time, disk, money.

All times are estimates; finished jobs count like those to come. Needs no GPU and no network.
"""

from dataclasses import dataclass
from typing import Any

from dvp.errors import DvpError
from dvp.experiment.base import TrainedBase, WheelBase
from dvp.experiment.config import Experiment
from dvp.experiment.data import FileSource, GeneratedSource
from dvp.experiment.grid import GridPoint, settings_as_read
from dvp.experiment.jobs import together
from dvp.planning.costs import DEVICES
from dvp.planning.estimate import Estimate


@dataclass
class Process:
    """A process that does one job, or evaluates a model on all tasks: its GPUs, seconds and bytes left on disk."""

    stage: str
    gpus: int
    """Number of GPUs on all nodes, or of cores on a CPU; 0 for a job that needs none of the GPUs."""
    seconds: float
    disk: float
    end: float
    """Seconds until its end, if every job starts as soon as those that it waits for have ended."""


def make_plan(
    experiment: Experiment,
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    price: float | None = None,
    response_tokens: float | None = None,
) -> dict[str, Any]:
    """Plan an experiment: return JSON-able totals by stage in hours and bytes, and step times in seconds.

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
    estimate = Estimate(experiment, device, response_tokens)
    estimates = {point.path: Estimate(experiment, device, response_tokens, point) for point in experiment.points}
    middle = (1 + device.slowest) / 2
    processes = list_processes(estimate, estimates, middle, at_least=1 if on_cpu else 0)
    largest = max(processes, key=lambda process: process.gpus)
    gpus = gpus or largest.gpus
    if gpus < largest.gpus:
        raise DvpError(f"--gpus {gpus}: a job of stage '{largest.stage}' takes {largest.gpus} at once")

    def total(some: list[Process]) -> dict[str, Any]:
        hours = sum(process.gpus * process.seconds for process in some) / 3600
        money = None if price is None else hours * price
        return {"jobs": len(some), "gpu_hours": hours, "money": money, "disk": sum(process.disk for process in some)}

    def range_of(hours: float) -> list[float]:
        return [hours / middle, hours / middle * device.slowest]

    stages = []
    for stage in dict.fromkeys(process.stage for process in processes):
        some = [process for process in processes if process.stage == stage]
        hours = [process.seconds / 3600 for process in some]
        stages.append({"stage": stage, "gpus_each": some[0].gpus, "hours_each": [min(hours), max(hours)]} | total(some))
    everything = total(processes)
    chain = max(process.end for process in processes) / 3600
    least = max(chain, everything["gpu_hours"] / gpus)
    trainings = _by_training(experiment)
    on_gpus = {} if on_cpu else trainings
    updates = [estimates[point.path].update_memory() for point in on_gpus.values()]
    return {
        "experiment": experiment.name,
        "device": device.name,
        "unit": "core" if on_cpu else "GPU",
        "gpus": gpus,
        "price": price,
        "stages": stages,
        "total": everything | {"gpu_hours_range": range_of(everything["gpu_hours"])},
        "slowest": device.slowest,
        "response_tokens": estimate.lengths().response,
        "response_tokens_from": "half of the longest is assumed" if response_tokens is None else "as given",
        "hours_least": least,
        "hours_least_range": range_of(least),
        "hours_longest_chain": chain,
        "checkpoint": estimate.checkpoint_bytes,
        "step": {name: estimates[point.path].step(point.engine) for name, point in trainings.items()},
        "update_memory": max(updates, key=lambda parts: sum(parts.values()), default={}),
        "rollout_memory": {name: estimates[point.path].rollout_memory(point.engine) for name, point in on_gpus.items()},
        "device_memory": None if on_cpu else device.memory,
        "assumptions": estimate.assumptions(),
    }


def _by_training(experiment: Experiment) -> dict[str, GridPoint]:
    """Return a grid point for each engine and training settings, by their names as text."""
    named = {}
    for point in experiment.points:
        named.setdefault(", ".join([point.engine, *settings_as_read(experiment.settings_of(point))]), point)
    return named


def list_processes(estimate: Estimate, estimates: dict[str, Estimate], middle: float, at_least: int) -> list[Process]:
    """List the processes of an experiment with their costs. One evaluates a model on all tasks, and starts only once.

    estimate : for jobs that belong to no grid point.
    estimates : by path of the grid point.
    middle : the time of a job as a multiple of the formula.
    at_least : devices that a job takes if it needs no GPU.
    """
    experiment = estimate.experiment
    problems = count_problems(experiment)
    of_preflight = {point.preflight: estimates[point.path] for point in experiment.points}
    processes: dict[tuple[str, str], Process] = {}
    for job in experiment.jobs.values():
        if job.stage == "preflight" and not job.asked:
            continue
        own = estimates[job.run.point.path] if job.stage == "train" else of_preflight.get(job.path, estimate)
        seconds, disk = own.job(job, problems)
        key = together(job.stage, job.path)
        if key in processes:
            process, seconds = processes[key], seconds - estimate.device.startup
        else:
            before = [processes[together(*other)].end for other in job.after]
            process = Process(job.stage, max(job.accelerators, at_least), 0.0, 0.0, max(before, default=0.0))
            processes[key] = process
        process.seconds += middle * seconds
        process.end += middle * seconds
        process.disk += disk
    return list(processes.values())


def count_problems(experiment: Experiment) -> dict[str, int]:
    """Count the evaluation problems by task, as the source says or has them. Raises DvpError if it does not say."""
    counted = {"held_out": experiment.data.held_out}
    for task in (task for task in experiment.data.tasks if task not in counted):
        source = experiment.sources[task]
        if isinstance(source, FileSource):
            from dvp.data.sources import load  # slow to import, and needed for files alone

            counted[task] = len({row.problem for row in load(source, f"sources.{task}")})
        else:
            counted[task] = source.count if isinstance(source, GeneratedSource) else source.problems
        if counted[task] is None:
            raise DvpError(f"sources.{task}.problems: a plan needs their number")
    return counted
