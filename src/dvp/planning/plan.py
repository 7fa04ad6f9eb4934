"""What an experiment will take, before anything is submitted: jobs, GPU-hours, wall time, disk, money.

Times are recorded ones where this experiment has run (results/E), carried over to jobs like them, and estimates where
nothing was recorded; the plan says how many jobs each kind stands for. Jobs that have run count like those to come.
Needs no GPU and no network.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from dvp.analysis.parts import parts
from dvp.data.sources import load
from dvp.errors import DvpError
from dvp.experiment.config import Experiment, FileSource, GeneratedSource, TrainedBase
from dvp.experiment.grid import Run
from dvp.planning.costs import DEVICES
from dvp.planning.estimate import Estimate
from dvp.planning.records import Records

STAGES = ("prepare", "base", "train", "convert", "evaluate", "mismatch", "bias", "report")
T = TypeVar("T")
RECORDED, INFERRED, ESTIMATED = "recorded", "inferred", "estimated"


@dataclass(frozen=True)
class Job:
    """One job of the DAG."""

    stage: str
    run: str
    """Its path, `base` for the model before RL, empty before and after the grid."""
    gpus: int
    """0 where it needs none."""
    seconds: float
    source: str
    """Of `seconds`: recorded (its own), inferred (from jobs like it), estimated."""
    disk: float
    after: tuple[int, ...]
    """Indices of the jobs that it waits for."""


def make_plan(
    experiment: Experiment,
    folder: Path,
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    price: float | None = None,
    response_tokens: float | None = None,
) -> dict[str, Any]:
    """The plan as JSON-able numbers: hours, bytes, seconds of a step.

    folder : results/E, read for recorded times; it need not exist.
    gpu : a name of costs.DEVICES; by default a CPU for a base that the pipeline trains itself, else an H200.
    gpus : how many may be used at once; by default as many as the largest job takes.
    price : money for a GPU-hour.
    response_tokens : mean length of a response; by default as recorded, else half of the longest.
    Raises DvpError if `gpus` are too few for a job, or the size of model or task is not known.
    """
    device = DEVICES[gpu or ("cpu" if isinstance(experiment.base, TrainedBase) else "h200")]
    on_cpu = device is DEVICES["cpu"]
    records = Records(experiment, folder)
    if response_tokens is None and records.training:
        response_tokens = fmean(tokens for _, tokens in records.training.values())
    estimate = Estimate(experiment, device, response_tokens)
    # A stage that needs no GPU takes a core.
    jobs = make_jobs(experiment, estimate, records, beside=1 if on_cpu else 0)
    largest = max(jobs, key=lambda job: job.gpus)
    gpus = gpus or largest.gpus
    if gpus < largest.gpus:
        raise DvpError(f"--gpus {gpus}: a job of stage '{largest.stage}' takes {largest.gpus} at once")

    def cost(some: list[Job]) -> dict[str, Any]:
        hours = sum(job.gpus * job.seconds for job in some) / 3600
        return {
            "jobs": len(some),
            "gpu_hours": hours,
            "money": None if price is None else hours * price,
            "disk": sum(job.disk for job in some),
            "from": {kind: sum(job.source == kind for job in some) for kind in (RECORDED, INFERRED, ESTIMATED)},
        }

    stages = []
    for stage in STAGES:
        some = [job for job in jobs if job.stage == stage]
        if not some:
            continue
        hours = [job.seconds / 3600 for job in some]
        stages.append({"stage": stage, "gpus_each": some[0].gpus, "hours_each": [min(hours), max(hours)]} | cost(some))
    methods = []
    for method, engine in dict.fromkeys((run.method, run.engine) for run in experiment.runs):
        runs = {run.path for run in experiment.runs if (run.method, run.engine) == (method, engine)}
        label = experiment.methods[method].label
        row = {"method": method, "label": label, "engine": engine, "runs": len(runs)}
        methods.append(row | cost([job for job in jobs if job.run in runs]))
    grid = {run.path for run in experiment.runs}
    return {
        "experiment": experiment.name,
        "device": device.name,
        "unit": "core" if on_cpu else "GPU",
        "gpus": gpus,
        "price": price,
        "stages": stages,
        "methods": methods,
        "shared": cost([job for job in jobs if job.run not in grid]),
        "total": cost(jobs),
        "hours_wall": wall_seconds(jobs, gpus) / 3600,
        "hours_longest_chain": wall_seconds(jobs, float("inf")) / 3600,
        "parameters": estimate.model.parameters,
        "checkpoint": estimate.checkpoint_bytes,
        "step": {run.engine: asdict(estimate.step(run.engine)) for run in experiment.runs},
        "memory": {} if on_cpu else {run.engine: estimate.memory(run.engine) for run in experiment.runs},
        "device_memory": None if on_cpu else device.memory,
        "assumptions": estimate.assumptions(),
    }


def make_jobs(experiment: Experiment, estimate: Estimate, records: Records, beside: int) -> list[Job]:
    """Every job of the DAG, after those that it waits for. Stages that need no GPU take `beside` of them."""
    jobs: list[Job] = []
    training = experiment.training
    made = isinstance(experiment.base, TrainedBase)

    def add(stage: str, run: str, gpus: int, time: tuple[float, str], disk: float, after: list[int]) -> int:
        jobs.append(Job(stage, run, gpus, *time, disk, tuple(after)))
        return len(jobs) - 1

    def once(stage: str, file: str, guess: float) -> tuple[float, str]:
        recorded = records.seconds(file, experiment.config_hash(stage))
        return (guess, ESTIMATED) if recorded is None else (recorded, RECORDED)

    prepare = add("prepare", "", beside, once("prepare", "data/manifest.json", estimate.prepare()), 0, [])
    time = once("base", "base/manifest.json", estimate.base())
    base = add("base", "", 1 if made else beside, time, estimate.base_bytes, [prepare])

    times = _alike(
        {
            run: (f"models/{run.path}/conversion.json", experiment.config_hash("convert", run))
            for run in experiment.runs
        },
        records,
        estimate.convert,
    )
    models: dict[Run | None, int] = {None: base}
    last = []
    for run in experiment.runs:
        disk = training.keep_checkpoints * estimate.checkpoint_bytes
        time = _training_time(experiment, estimate, records, run)
        last.append(add("train", run.path, training.ranks, time, disk, [prepare, base]))
        models[run] = add("convert", run.path, beside, times[run], estimate.model_bytes, [base, last[-1]])

    gpus = experiment.engines[experiment.evaluation.engine].tensor_parallel
    for task, problems in count_problems(experiment, records).items():
        samples = experiment.evaluation.samples_per_problem[task]
        disk = estimate.samples_bytes(problems, samples)
        folders = {run: f"evals/{run.path if run else 'base'}/{task}" for run in models}
        times = _alike(
            {
                run: (f"{folder}/scores.json", experiment.config_hash("evaluate", run, task))
                for run, folder in folders.items()
            },
            records,
            lambda problems=problems, samples=samples: estimate.evaluate(problems, samples),
        )
        for run, model in models.items():
            last.append(add("evaluate", run.path if run else "base", gpus, times[run], disk, [prepare, model]))
    for stage, folder in (("mismatch", "mismatch"), ("bias", "bias")):
        measurements = experiment.measurements(stage)
        if not measurements:
            continue
        times = _alike(
            {
                measurement: (
                    f"{folder}/{measurement.path}/{stage}.json",
                    experiment.config_hash(stage, measurement=measurement),
                )
                for measurement in measurements
            },
            records,
            getattr(estimate, stage),
        )
        for measurement in measurements:
            gpus = experiment.engines[measurement.engine].tensor_parallel
            last.append(add(stage, measurement.path, gpus, times[measurement], 0, [prepare, models[measurement.run]]))
    for part in parts(experiment):
        add("report", part, beside, once("report", f"report/{part}.json", estimate.report()), 0, last)
    return jobs


def _alike(files: dict[T, tuple[str, str]], records: Records, guess: Callable[[], float]) -> dict[T, tuple[float, str]]:
    """Seconds, and their source, of jobs that differ by their run alone; `files` are their records and identities."""
    recorded = {run: seconds for run, place in files.items() if (seconds := records.seconds(*place)) is not None}
    other = (fmean(recorded.values()), INFERRED) if recorded else (guess(), ESTIMATED)
    return {run: (recorded[run], RECORDED) if run in recorded else other for run in files}


def _training_time(experiment: Experiment, estimate: Estimate, records: Records, run: Run) -> tuple[float, str]:
    """Of one run: by its own seconds per token, else by those of runs with its engine, its method's first."""
    training = experiment.training
    startups = [seconds for other in experiment.runs if (seconds := records.startup(other)) is not None]
    startup = fmean(startups) if startups else estimate.device.startup
    for source, is_alike in (
        (RECORDED, lambda other: other == run),
        (INFERRED, lambda other: (other.engine, other.method) == (run.engine, run.method)),
        (INFERRED, lambda other: other.engine == run.engine),
    ):
        alike = [
            records.training[other.path]
            for other in experiment.runs
            if is_alike(other) and other.path in records.training
        ]
        if alike:
            responses = training.steps * training.prompts_per_step * training.group_size
            return startup + responses * fmean(seconds * tokens for seconds, tokens in alike), source
    return startup + training.steps * estimate.step(run.engine).total, ESTIMATED


def count_problems(experiment: Experiment, records: Records) -> dict[str, int]:
    """Problems by task: as `dvp prepare` counted them, else as the source says. Raises DvpError if it does not."""
    counted = records.problems()
    for task in experiment.data.tasks:
        if task in counted:
            continue
        if task == "held_out":
            counted[task] = experiment.data.held_out
            continue
        source = experiment.sources[task]
        if isinstance(source, GeneratedSource):
            counted[task] = source.count
        elif isinstance(source, FileSource):
            counted[task] = len({row.problem for row in load(source, f"sources.{task}")})
        elif source.problems is not None:
            counted[task] = source.problems
        else:
            raise DvpError(f"sources.{task}.problems: a plan needs their number until dvp prepare has counted them")
    return counted


def wall_seconds(jobs: list[Job], gpus: float) -> float:
    """Until the last job ends, each starting as soon as its inputs are there and enough of the `gpus` are free.

    Jobs that could start together do so in the order of the list. A job that needs no GPU never waits for one.
    """
    waiting, running, done = dict(enumerate(jobs)), {}, set()
    now, free = 0.0, gpus
    while waiting or running:
        for index, job in list(waiting.items()):
            if job.gpus <= free and done.issuperset(job.after):
                running[index] = now + job.seconds
                free -= job.gpus
                del waiting[index]
        index = min(running, key=running.__getitem__)
        now = running.pop(index)
        free += jobs[index].gpus
        done.add(index)
    return now
