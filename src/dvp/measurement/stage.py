"""The stages that measure at a fixed policy: `mismatch` and `bias`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.data import Columns, FileSource
from dvp.experiment.folder import ExperimentDir
from dvp.experiment.grid import Measurement
from dvp.files import write_json
from dvp.gpus import claim
from dvp.provenance import git_commit
from dvp.rollout.vllm import configure_environment
from dvp.stage import Stage, run_stage

if TYPE_CHECKING:
    from dvp.measurement.bias import BiasTables


def mismatch(config: Path, path: str, threads: int) -> None:
    """The mismatch between trainer and engine at a fixed policy → mismatch/MEASUREMENT/*.parquet and mismatch.json."""
    with _measuring("mismatch", config, path, threads) as (directory, measurement, model, stage):
        from dvp.data.prepared import TRAIN_COLUMNS, read_problems
        from dvp.measurement.mismatch import measure_mismatch
        from dvp.measurement.problems import FixedProblems, drawn

        experiment, settings = directory.experiment, directory.experiment.mismatch
        engine = experiment.engines[measurement.engine].model_dump(mode="json")
        chosen = settings.model_dump(mode="json", exclude={"policies", "engines"})
        stage.tracked.log_params({"mismatch": chosen, "engine": engine})
        fixed = FixedProblems(
            experiment,
            model,
            read_problems(directory.data / "train.parquet", TRAIN_COLUMNS),
            where="data/train.parquet",
            count=settings.problems,
            seed=measurement.seed,
            draw=drawn,
        )
        # The engine first: it takes its share of what is free of a GPU's memory.
        engine = fixed.engine(measurement.engine, settings.responses)
        network = fixed.network()
        result = measure_mismatch(
            experiment, measurement, fixed.ids, fixed.problems, network, engine, stage.result.parent
        )
        stage.tracked.log_result(
            {name: value for name, value in result.items() if name not in ("measurement", "files")}
        )
        stage.finish(result)


def bias(config: Path, path: str, threads: int) -> None:
    """Every gradient estimator against the exact gradient at a policy of the experiment.

    Writes bias/MEASUREMENT/*.parquet (the tables of dvp.measurement.bias.BiasTables) and bias.json.
    """
    with _measuring("bias", config, path, threads) as (directory, measurement, model, stage):
        from dvp.data.prepared import TRAIN_COLUMNS, read_problems, read_task
        from dvp.measurement.bias import measure_bias
        from dvp.measurement.problems import FixedProblems

        experiment, settings = directory.experiment, directory.experiment.bias
        chosen = settings.model_dump(mode="json", exclude={"estimators"})
        stage.tracked.log_params({"measurement": path, "bias": chosen})
        if measurement.task is None:
            problems, where = read_problems(directory.data / "train.parquet", TRAIN_COLUMNS), "data/train.parquet"
        else:
            problems = read_task(directory.data / "eval.parquet", measurement.task)
            where = f"data/eval.parquet, task '{measurement.task}'"
        fixed = FixedProblems(experiment, model, problems, where=where, count=settings.problems, seed=measurement.seed)
        measured = measure_bias(experiment, fixed, measurement.engine, path)
        stage.tracked.log_result(measured.results())
        files = measured.write(stage.result.parent)
        for name in ("estimators.parquet", "variance.parquet", "proxy.parquet"):
            stage.tracked.log_file(stage.result.parent / name)
        stage.finish({"measurement": path, **measured.summary, "files": files})


def bias_of_model(
    model: Path,
    engine: str,
    experiment: Experiment,
    problems: Path | None,
    seed: int,
    output: Path,
    threads: int,
) -> "BiasTables":
    """Every gradient estimator against the exact gradient at any Hugging Face directory; the same files to `output`.

    experiment : whose estimators, batches and sampling are used, and problems unless a file of them is given.
    Raises DvpError before anything starts for input that is not fit for it.
    """
    if experiment.bias is None:
        raise DvpError(f"experiment '{experiment.name}' has no `bias`, which says what to measure")
    if engine not in experiment.engines:
        raise DvpError(f"--engine: '{engine}' is not defined; known are {', '.join(sorted(experiment.engines))}")
    _claim(experiment, engine, threads)
    from dvp.measurement.bias import measure_bias
    from dvp.measurement.problems import FixedProblems, source_problems
    from dvp.training.models import check_model

    check_model(model)
    where, source = f"sources.{experiment.data.train}", experiment.sources[experiment.data.train]
    if problems is not None:
        columns = Columns(problem="problem", answer="answer")
        where, source = "--problems", FileSource(kind="file", path=problems, columns=columns)
    started = time.time()
    read = source_problems(source, where, experiment.data.prompt_template)
    where = where if problems is None else str(problems)
    fixed = FixedProblems(experiment, model, read, where=where, count=experiment.bias.problems, seed=seed)
    measured = measure_bias(experiment, fixed, engine, str(model))
    result = {
        "model": str(model),
        "engine": engine,
        "experiment": experiment.name,
        "seed": seed,
        **measured.summary,
        "files": measured.write(output),
        "git_commit": git_commit(),
        "seconds_stage": round(time.time() - started, 2),
    }
    write_json(output / "bias.json", result)
    return measured


@contextmanager
def _measuring(
    name: str, config: Path, path: str, threads: int
) -> Iterator[tuple[ExperimentDir, Measurement, Path, Stage]]:
    """The stage of a measurement: its experiment, which one it is, the policy's folder, and what it writes to."""
    directory = ExperimentDir(config)
    measurement = directory.experiment.job(name, path).measurement
    _claim(directory.experiment, measurement.engine, threads)
    made_by, model_result = directory.model(measurement.run)
    with run_stage(
        name,
        directory,
        directory.result(name, path),
        directory.experiment.config_hash(name, path),
        {made_by: model_result, "prepare": directory.result("prepare")},
        run=measurement.run and measurement.run.path,
        task=path.removeprefix(f"{measurement.policy_path}/").replace("/", "-"),
        problems=None if measurement.task is None else "eval.parquet",
    ) as stage:
        yield directory, measurement, model_result.parent, stage


def _claim(experiment: Experiment, engine: str, threads: int) -> None:
    """GPUs and threads, before anything that would take others is imported."""
    claim(experiment.engines[engine].tensor_parallel)
    configure_environment(threads)
    import torch

    torch.set_num_threads(threads)
