"""List the jobs of an experiment, here alone: rules, `dvp plan` and stages find theirs by stage and path."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dvp.experiment.grid import Measurement, Run, Sampler, whole_run

if TYPE_CHECKING:
    from dvp.experiment.config import Experiment

BASE = "base"  # in place of a run's path: the model before RL


@dataclass(frozen=True)
class Job:
    """One job of a stage."""

    stage: str
    path: str = ""
    """The path in its files' names (dvp.experiment.folder.RESULTS): the run, the measurement or the preflight; for an
    evaluation RUN/TASK or RUN/by~ENGINE/min_p~RHO/TASK. Empty if the stage has a single job."""
    after: tuple[tuple[str, str], ...] = ()
    """Stage and path of the jobs whose files it reads."""
    gpus: int = 0
    """GPUs of each node."""
    nodes: int = 1
    run: Run | None = None
    """The run whose model it makes or works on, after one of its steps or at the end; None: the base model."""
    engine: str | None = None
    """The engine that it samples with."""
    task: str | None = None
    """The task whose problems it samples; None: training problems."""
    sampler: Sampler | None = None
    """The sampler of an evaluation."""
    measurement: Measurement | None = None
    asked: bool = True
    """False for a job that is done by request or for another job alone: a preflight that no run waits for, and the
    conversion of a model along training, which may be deleted once it is evaluated."""

    @property
    def gres(self) -> str:
        """The GPUs of each node as Slurm asks for them; its plugin's own setting counts those of all nodes together."""
        return f"gpu:{self.gpus}"

    @property
    def accelerators(self) -> int:
        """The GPUs of all nodes."""
        return self.gpus * self.nodes


def together(stage: str, path: str) -> tuple[str, str]:
    """Return stage and path of the process that does a job: one evaluates a model on all tasks with one sampler."""
    return stage, path.rpartition("/")[0] if stage == "evaluate" else path


def list_jobs(experiment: "Experiment") -> Iterator[Job]:
    """Yield every job, each after those that it waits for."""
    if experiment.bases:  # each has its own jobs (Experiment.of_bases)
        yield Job("report")
        return
    training = experiment.training
    of_training = {"gpus": training.gpus, "nodes": training.nodes}
    problems, base = ("prepare", ""), ("base", "")
    yield Job("prepare")
    yield Job("base", after=(problems,))
    preflights = experiment.preflights
    for path, engine in {point.preflight: point.engine for point in experiment.points}.items():
        yield Job("preflight", path, (problems, base), **of_training, engine=engine, asked=path in preflights)
    for run in experiment.runs:
        waits = (("preflight", run.preflight),) if run.preflight in preflights else ()
        yield Job("train", run.path, (problems, base, *waits), **of_training, run=run, engine=run.engine)
    for run in (*experiment.runs, *experiment.snapshots):
        yield Job("convert", run.path, (base, ("train", whole_run(run.path))), run=run, asked=run.step is None)

    def sampling(run: Run | None, engine: str) -> dict:
        model = base if run is None else ("convert", run.path)
        gpus = experiment.engines[engine].tensor_parallel
        return {"after": (problems, model), "gpus": gpus, "run": run, "engine": engine}

    own = [(run, experiment.sampler, "") for run in (None, *experiment.runs, *experiment.snapshots)]
    also = [(run, sampler, f"/{sampler.path}") for run, sampler in experiment.further_evaluations]
    measured = [base, *(("train", run.path) for run in experiment.runs)]
    for run, sampler, by in (*own, *also):
        for task in experiment.data.tasks:
            path = f"{run.path if run else BASE}{by}/{task}"
            measured.append(("evaluate", path))
            yield Job("evaluate", path, **sampling(run, sampler.engine), task=task, sampler=sampler)
    for stage in ("mismatch", "bias"):
        for each in experiment.measurements(stage):
            measured.append((stage, each.path))
            yield Job(stage, each.path, **sampling(each.run, each.engine), task=each.task, measurement=each)
    yield Job("report", after=tuple(measured))
