"""The stages that measure at a fixed policy, `mismatch` and `bias`, and the same measurements of a user's model."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dvp.data.sources import load
from dvp.errors import DvpError
from dvp.experiment.base import HubBase, LocalBase, WheelBase
from dvp.experiment.config import Experiment
from dvp.experiment.data import Columns, FileSource
from dvp.experiment.folder import ExperimentDir
from dvp.experiment.grid import Measurement, MismatchConfig
from dvp.experiment.loading import read_bases
from dvp.files import atomic_path, write_json
from dvp.gpus import claim
from dvp.hub import download
from dvp.provenance import device, git_commit
from dvp.rollout.vllm import configure_environment
from dvp.stage import Stage, run_stage

if TYPE_CHECKING:
    from pandas import DataFrame

    from dvp.measurement.bias import BiasTables
    from dvp.measurement.problems import FixedProblems


def mismatch(config: Path, path: str, threads: int) -> None:
    """Measure the mismatch of trainer and engine at a policy of the experiment.

    Writes mismatch/MEASUREMENT/*.parquet and mismatch.json.
    """
    with _measuring("mismatch", config, path, threads) as (directory, measurement, model, stage):
        from dvp.data.prompts import read_problems
        from dvp.measurement.mismatch import measure_mismatch
        from dvp.measurement.problems import FixedProblems, drawn

        experiment, settings = directory.experiment, directory.experiment.mismatch
        engine = experiment.engines[measurement.engine].model_dump(mode="json")
        chosen = settings.model_dump(mode="json", exclude={"policies", "engines"})
        stage.tracked.log_params({"mismatch": chosen, "engine": engine})
        fixed = FixedProblems(
            experiment,
            model,
            read_problems(directory.data / "train.parquet"),
            where="data/train.parquet",
            count=settings.problems,
            seed=measurement.seed,
            draw=drawn,
        )
        # The engine starts first: it takes a share of the GPU memory that is free then.
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
    """Compare every gradient estimator with the exact gradient at a policy of the experiment.

    Writes bias/MEASUREMENT/*.parquet (the tables of dvp.measurement.bias.BiasTables) and bias.json.
    """
    with _measuring("bias", config, path, threads) as (directory, measurement, model, stage):
        from dvp.data.prompts import read_problems
        from dvp.measurement.bias import measure_bias
        from dvp.measurement.problems import FixedProblems

        experiment, settings = directory.experiment, directory.experiment.bias
        chosen = settings.model_dump(mode="json", exclude={"estimators"})
        stage.tracked.log_params({"measurement": path, "bias": chosen})
        if measurement.task is None:
            problems, where = read_problems(directory.data / "train.parquet"), "data/train.parquet"
        else:
            problems = read_problems(directory.data / "eval.parquet", measurement.task)
            where = f"data/eval.parquet, task '{measurement.task}'"
        fixed = FixedProblems(experiment, model, problems, where=where, count=settings.problems, seed=measurement.seed)
        measured = measure_bias(experiment, fixed, measurement.engine, path)
        stage.tracked.log_result(measured.results())
        files = measured.write(stage.result.parent)
        for name in ("estimators.parquet", "variance.parquet", "proxy.parquet"):
            stage.tracked.log_file(stage.result.parent / name)
        stage.finish({"measurement": path, **measured.summary, "files": files})


def bias_of_model(
    model: Path, engine: str, experiment: Experiment, problems: Path | None, seed: int, output: Path, threads: int
) -> "BiasTables":
    """Compare every gradient estimator with the exact gradient at any Hugging Face directory.

    Writes the files of the stage `bias` to `output`. `experiment` gives estimators, batches and sampling, and the
    problems unless `problems` is a file of them. Raises DvpError for unfit input before anything starts.
    """
    if experiment.bias is None:
        raise DvpError(f"experiment '{experiment.name}' has no `bias`, which says what to measure")
    started = time.time()
    folder, where, read = _opened(model, [engine], experiment, problems and str(problems), threads)
    from dvp.measurement.bias import measure_bias
    from dvp.measurement.problems import FixedProblems

    fixed = FixedProblems(experiment, folder, read, where=where, count=experiment.bias.problems, seed=seed)
    measured = measure_bias(experiment, fixed, engine, str(model))
    about = {"model": str(model), "engine": engine, "experiment": experiment.name, "seed": seed, **measured.summary}
    about |= {"files": measured.write(output), "git_commit": git_commit()}
    write_json(output / "bias.json", about | {"seconds_stage": round(time.time() - started, 2)})
    return measured


def mismatch_of_model(
    model: str,
    engines: list[str],
    experiment: Experiment,
    problems: str | None,
    settings: dict[str, Any],
    output: Path,
    threads: int,
) -> None:
    """Measure the mismatch of any model; write ENGINE/*.parquet and ENGINE/mismatch.json of each engine to `output`.

    A process holds one engine, so that this program is called once per engine if there are several.

    model : a Hugging Face directory, a name in config/catalogue/bases.yaml, or one on the hub, whose newest revision is
        taken.
    experiment : gives the prompt template, and the problems unless others are given.
    problems : a source of the catalogue, or a file.
    settings : count (of problems), responses (per problem), response_tokens, rho (a list) and seed.
    Raises DvpError for unfit input before anything starts.
    """
    if len(engines) > 1:
        _check_engines(experiment, engines)
        options = {"model": model, "experiment": experiment.name, "problems": problems, "output": output} | settings
        given = {"threads": threads} | {key: value for key, value in options.items() if value is not None}
        for name in engines:
            command = [sys.executable, "-m", "dvp.cli", "mismatch", "--engine", name]
            for key, value in given.items():
                for one in value if isinstance(value, list) else [value]:
                    command += [f"--{key.replace('_', '-')}", str(one)]
            if status := subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
                raise SystemExit(status)  # the call has printed the reason
        return
    [engine], started = engines, time.time()
    folder, fixed, experiment = _compared(model, engines, experiment, problems, settings, threads)
    import transformers
    import vllm

    from dvp.measurement.mismatch import measure_mismatch
    from dvp.training.agreement import TOKENS, compare, shortest

    config = experiment.engines[engine]
    measurement = Measurement(policy="base", engine=engine, seed=settings["seed"])
    running, network = fixed.engine(engine, settings["responses"]), fixed.network()
    place = output / engine
    # First, as it takes seconds, and what it fails at would lose the measurement.
    prompts, tokens = shortest(fixed.problems.prompts), min(TOKENS, settings["response_tokens"])
    held = compare(network, running, config, prompts, seed=measurement.seed, tokens=tokens, bf16=False)
    result = measure_mismatch(experiment, measurement, fixed.ids, fixed.problems, network, running, place)
    named = None if folder == Path(model) else read_bases().get(model)
    versions = {"vLLM": vllm, "transformers": transformers, "torch": sys.modules["torch"]}
    about = {
        "model": model,
        "revision": folder.name if folder != Path(model) else "a local folder",
        **({"credit": named.credit} if isinstance(named, WheelBase) else {}),
        "architecture": f"{type(network).__name__}, {network.num_parameters():,} parameters",
        "device": device(),
        "engine": ", ".join(f"{name} {module.__version__}" for name, module in versions.items()),
        "trainer": "transformers, fp32",
        "problems": _amounts(settings, problems or experiment.data.train),
        "dvp": git_commit(),
        "seconds": f"{time.time() - started:.0f}",
        f"engine {engine}": ", ".join(
            f"{key} {value}" for key, value in config.model_dump(exclude_defaults=True).items()
        ),
    }
    found = {"error": held.error, "limit": held.limit}
    write_json(place / "mismatch.json", result | found | {"folder": str(folder), "about": about})


def rollouts_of_server(
    model: str,
    url: str,
    experiment: Experiment,
    problems: str | None,
    settings: dict[str, Any],
    output: Path,
    threads: int,
) -> tuple[Path, dict[str, str]]:
    """Sample responses from a running server of a model and score them with the trainer.

    Returns a file that `dvp diagnose-rollouts` reads, and a description of the measurement for the page.

    Arguments as in `mismatch_of_model`, except `url`, the server's. Raises DvpError likewise, and for a server that
    does not answer, or not with token ids and log-probs.
    """
    from dvp.measurement.server import Server, rollouts

    server = Server(url)
    _, fixed, _ = _compared(model, [], experiment, problems, settings, threads)
    file = output / "rollouts.parquet"
    with atomic_path(file) as part:
        rollouts(server, fixed, settings["responses"], settings["response_tokens"]).to_parquet(part)
    return file, {
        "server": f"{server.url}, {server.model}",
        "model": model,
        "trainer": f"transformers, fp32, {device()}",
        "problems": _amounts(settings, problems or experiment.data.train),
        "dvp": git_commit(),
    }


def _amounts(settings: dict[str, Any], source: str) -> str:
    count, responses, tokens, seed = (settings[key] for key in ("count", "responses", "response_tokens", "seed"))
    return f"{count} of {source}, {responses} responses of at most {tokens} tokens each, seed {seed}"


def _opened(
    model: str | Path, engines: list[str], experiment: Experiment, problems: str | None, threads: int
) -> tuple[Path, str, "DataFrame"]:
    """Return the folder of a user's model, the origin of the problems, and the distinct problems as a table.

    model : a folder, or a text that may also be a name in config/catalogue/bases.yaml or on the hub.
    """
    _check_engines(experiment, engines)
    # Downloads come first: an engine's environment has no access to the hub.
    folder = Path(model)
    base = None if folder.is_dir() else read_bases().get(str(model))
    if isinstance(base, LocalBase):
        folder = Path(base.path)
    elif isinstance(base, HubBase):
        folder = download(base.path, base.revision, "expected a model that is there")
    elif isinstance(model, str) and base is None and not folder.is_dir():
        folder = download(model, None, "expected a folder, a name in config/catalogue/bases.yaml or one on the hub")
    name = problems or experiment.data.train
    where, source = f"sources.{name}", experiment.sources.get(name)
    if source is None:
        columns = Columns(problem="problem", answer="answer")
        where, source = "--problems", FileSource(kind="file", path=Path(name), columns=columns)
    rows = load(source, where)
    _claim(experiment, engines, threads)
    from dvp.measurement.problems import rendered
    from dvp.training.models import check_model
    from dvp.training.wheel import convert_wheel

    if isinstance(base, WheelBase):
        folder = convert_wheel(base)
    check_model(folder)
    return folder, where, rendered(list({row.problem: row for row in rows}.values()), experiment.data.prompt_template)


def _compared(
    model: str,
    engines: list[str],
    experiment: Experiment,
    problems: str | None,
    settings: dict[str, Any],
    threads: int,
) -> tuple[Path, "FixedProblems", Experiment]:
    """Return the folder of a user's model, its problems for a measurement, and the experiment with the settings.

    Raises DvpError if the responses would not fit into the model's context.
    """
    folder, where, read = _opened(model, engines, experiment, problems, threads)
    from transformers import AutoConfig

    from dvp.measurement.problems import FixedProblems, drawn

    context, tokens = AutoConfig.from_pretrained(folder).max_position_embeddings, settings["response_tokens"]
    if context <= tokens:
        raise DvpError(f"--response-tokens: expected less than the model's context, {context}, found {tokens}")
    chosen = MismatchConfig.model_construct(
        policies=["base"],
        engines=engines,
        problems=settings["count"],
        responses=settings["responses"],
        rhos=settings["rho"],
        margins=[],
    )
    lengths = {"max_response_tokens": tokens, "max_prompt_tokens": context - tokens, "temperature": 1.0}
    training = experiment.training.model_copy(update=lengths)
    experiment = experiment.model_copy(update={"mismatch": chosen, "training": training})
    fixed = FixedProblems(
        experiment, folder, read, where=where, count=settings["count"], seed=settings["seed"], draw=drawn
    )
    return folder, fixed, experiment


def _check_engines(experiment: Experiment, engines: list[str]) -> None:
    for name in engines:
        if name not in experiment.engines:
            raise DvpError(f"--engine: '{name}' is not defined; known are {', '.join(sorted(experiment.engines))}")


@contextmanager
def _measuring(
    name: str, config: Path, path: str, threads: int
) -> Iterator[tuple[ExperimentDir, Measurement, Path, Stage]]:
    """Open the stage of a measurement; yields the experiment's folder, the measurement, the policy's, and the stage."""
    directory = ExperimentDir(config)
    measurement = directory.experiment.job(name, path).measurement
    _claim(directory.experiment, [measurement.engine], threads)
    made_by, model_result = directory.model(measurement.run)
    with run_stage(
        name,
        directory,
        directory.result(name, path),
        directory.experiment.config_hash(name, path),
        {made_by: model_result, "prepare": directory.result("prepare")},
        run=measurement.run and measurement.run.path,
        task=path.removeprefix(f"{measurement.policy_path}/").replace("/", "-"),
    ) as stage:
        yield directory, measurement, model_result.parent, stage


def _claim(experiment: Experiment, engines: list[str], threads: int) -> None:
    """Reserve GPUs (one without an engine, for the trainer) and set threads before an import can take others."""
    claim(max((experiment.engines[engine].tensor_parallel for engine in engines), default=1))
    configure_environment(threads)
    import torch

    torch.set_num_threads(threads)
