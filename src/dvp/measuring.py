"""The stages that measure at a fixed policy: see dvp.stages."""

import time
from pathlib import Path

import pandas as pd

from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.folder import ExperimentDir, finish
from dvp.experiment.loading import load_experiment
from dvp.files import write_json
from dvp.provenance import git_commit


def mismatch(config: Path, measurement_path: str, threads: int) -> None:
    """The mismatch between trainer and engine at a fixed policy → mismatch/MEASUREMENT/*.parquet and mismatch.json."""
    from dvp.rollout.vllm import VllmEngine, configure_environment

    configure_environment(threads)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dvp.data.prompts import encode_prompts, short_enough
    from dvp.measurement import mismatch
    from dvp.training.base import check_vocabulary

    directory = ExperimentDir(config)
    experiment = directory.experiment
    measurement = experiment.measurement("mismatch", measurement_path)
    model, source, made_by = directory.verified_model(measurement.run)
    check_vocabulary(model)
    config_hash = experiment.config_hash("mismatch", measurement=measurement)
    torch.set_num_threads(threads)
    started = time.time()
    upstream = {made_by: source, "prepare": directory.data / "manifest.json"}
    task = f"by~{measurement.engine}-seed~{measurement.seed}"
    with directory.tracked(
        "mismatch", config_hash, upstream, run=measurement.run and measurement.run.path, task=task
    ) as tracked:
        tracked.log_params(
            {
                "mismatch": experiment.mismatch.model_dump(mode="json", exclude={"policies", "engines"}),
                "engine": experiment.engines[measurement.engine].model_dump(mode="json"),
            }
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        problems = pd.read_parquet(directory.data / "train.parquet")
        encoded = encode_prompts(tokenizer, problems, experiment.data.chat, "data/train.parquet")
        kept = short_enough(encoded, experiment.training.max_prompt_tokens)
        drawn = mismatch.drawn_problems(len(kept), experiment.mismatch.problems, measurement.seed)
        rows = [kept[index] for index in drawn]
        prompts = [encoded[row] for row in rows]
        trainer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        longest = max(map(len, prompts)) + experiment.training.max_response_tokens
        engine = VllmEngine(
            model,
            experiment.engines[measurement.engine],
            max_model_len=min(longest, trainer.config.max_position_embeddings),
            max_num_seqs=experiment.mismatch.responses,
            seed=measurement.seed,
        )
        folder = directory.folder / "mismatch" / measurement.path
        result = mismatch.measure_mismatch(
            experiment,
            measurement,
            problems=problems.iloc[rows],
            prompts=prompts,
            pad=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            model=trainer.to("cuda" if torch.cuda.is_available() else "cpu"),
            engine=engine,
            folder=folder,
        )
        tracked.log_result({name: value for name, value in result.items() if name not in ("measurement", "files")})
        finish(folder / "mismatch.json", result, tracked, config_hash, started)


def bias(
    config: Path | None,
    measurement_path: str | None,
    model: Path | None,
    engine: str | None,
    name: str,
    problems: Path | None,
    seed: int,
    output: Path,
    threads: int,
) -> None:
    """Every gradient estimator against the exact gradient: a measurement of an experiment (config), or any model."""
    given = [option is not None for option in (config, measurement_path, model, engine)]
    if given not in ([True, True, False, False], [False, False, True, True]):
        raise DvpError("expected --config FILE --measurement MEASUREMENT, or --model DIR --engine NAME")
    from dvp.rollout.vllm import configure_environment

    configure_environment(threads)
    import torch

    torch.set_num_threads(threads)
    if config is None:
        _bias_of_model(model, engine, load_experiment(name), problems, seed, output)
    else:
        _bias_of_measurement(ExperimentDir(config), measurement_path)


def _bias_of_measurement(directory: ExperimentDir, path: str) -> None:
    """A policy of the experiment → bias/MEASUREMENT/estimators.parquet, jackknife.parquet and bias.json."""
    from dvp.measurement.bias import measure_bias, write_tables

    experiment, measurement = directory.experiment, directory.experiment.measurement("bias", path)
    model, source, made_by = directory.verified_model(measurement.run)
    config_hash = experiment.config_hash("bias", measurement=measurement)
    started = time.time()
    upstream = {made_by: source, "prepare": directory.data / "manifest.json"}
    run, task = measurement.run and measurement.run.path, f"by~{measurement.engine}-seed~{measurement.seed}"
    with directory.tracked("bias", config_hash, upstream, run=run, task=task) as tracked:
        tracked.log_params(
            {"measurement": measurement.path, "bias": experiment.bias.model_dump(mode="json", exclude={"estimators"})}
        )
        problems = pd.read_parquet(directory.data / "train.parquet")
        where = "data/train.parquet"
        measured = measure_bias(
            experiment, model, measurement.engine, problems, where=where, seed=measurement.seed, name=path
        )
        tracked.log_result(measured.results())
        folder = directory.folder / "bias" / path
        result = {"measurement": path, **measured.summary, "files": write_tables(measured, folder)}
        tracked.log_file(folder / "estimators.parquet")
        finish(folder / "bias.json", result, tracked, config_hash, started)


def _bias_of_model(
    model: Path, engine: str, experiment: Experiment, problems: Path | None, seed: int, output: Path
) -> None:
    """Any Hugging Face directory: prints the table, and writes the same files to `output`."""
    from dvp.analysis.bias import format_estimators
    from dvp.analysis.formats import to_text
    from dvp.experiment.data import Columns, FileSource
    from dvp.measurement.bias import measure_bias, write_tables
    from dvp.measurement.problems import source_problems

    if experiment.bias is None:
        raise DvpError(f"experiment '{experiment.name}' has no `bias`, which says what to measure")
    if engine not in experiment.engines:
        raise DvpError(f"--engine: '{engine}' is not defined; known are {', '.join(sorted(experiment.engines))}")
    if not (model / "config.json").is_file():
        raise DvpError(f"--model: {model}: not a Hugging Face model directory (no config.json)")
    where, source = f"sources.{experiment.data.train}", experiment.sources[experiment.data.train]
    if problems is not None:
        columns = Columns(problem="problem", answer="answer")
        where, source = "--problems", FileSource(kind="file", path=problems, columns=columns)
    started = time.time()
    read = source_problems(source, where, experiment.data.prompt_template)
    where = where if problems is None else str(problems)
    measured = measure_bias(experiment, model, engine, read, where=where, seed=seed, name=str(model))
    result = {
        "model": str(model),
        "engine": engine,
        "experiment": experiment.name,
        "seed": seed,
        **measured.summary,
        "files": write_tables(measured, output),
        "git_commit": git_commit(),
        "seconds_stage": round(time.time() - started, 2),
    }
    write_json(output / "bias.json", result)
    title = f"{model}, engine {engine}: estimators of the policy gradient against the exact one"
    print(to_text(format_estimators(measured.estimators, measured.summary, title), width=120))
    print(f"\nfull precision, and what the intervals are made from: {output}")
