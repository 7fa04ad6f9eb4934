"""The stages that measure at a fixed policy: see dvp.stages."""

import time
from pathlib import Path

import pandas as pd

from dvp.config import Experiment
from dvp.errors import DvpError
from dvp.experiment_files import load_experiment
from dvp.files import write_json
from dvp.place import Place, finish
from dvp.provenance import git_commit


def diagnose(config: Path, cell_path: str, threads: int) -> None:
    """The mismatch between trainer and engine at a fixed policy → diagnostics/CELL/*.parquet and diagnose.json."""
    from dvp.rollout.vllm import VllmEngine, configure_environment

    configure_environment(threads)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dvp.data.prompts import encode_prompts, short_enough
    from dvp.measurement import mismatch
    from dvp.training.base import check_vocabulary

    place = Place(config)
    experiment = place.experiment
    cell = experiment.cell("diagnose", cell_path)
    model, source, made_by = place.verified_model(cell.run)
    check_vocabulary(model)
    identity = experiment.identity("diagnose", cell=cell)
    torch.set_num_threads(threads)
    started = time.time()
    upstream = {made_by: source, "prepare": place.data / "manifest.json"}
    task = f"by~{cell.engine}-seed~{cell.seed}"
    with place.tracked("diagnose", identity, upstream, run=cell.run and cell.run.path, task=task) as tracked:
        tracked.log_params(
            {
                "diagnose": experiment.diagnose.model_dump(mode="json", exclude={"policies", "engines"}),
                "engine": experiment.engines[cell.engine].model_dump(mode="json"),
            }
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        problems = pd.read_parquet(place.data / "train.parquet")
        encoded = encode_prompts(tokenizer, problems, experiment.data.chat, "data/train.parquet")
        kept = short_enough(encoded, experiment.training.max_prompt_tokens)
        drawn = mismatch.drawn_problems(len(kept), experiment.diagnose.problems, cell.seed)
        rows = [kept[index] for index in drawn]
        prompts = [encoded[row] for row in rows]
        trainer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        longest = max(map(len, prompts)) + experiment.training.max_response_tokens
        engine = VllmEngine(
            model,
            experiment.engines[cell.engine],
            max_model_len=min(longest, trainer.config.max_position_embeddings),
            max_num_seqs=experiment.diagnose.responses,
            seed=cell.seed,
        )
        folder = place.folder / "diagnostics" / cell.path
        result = mismatch.diagnose(
            experiment,
            cell,
            problems=problems.iloc[rows],
            prompts=prompts,
            pad=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            model=trainer.to("cuda" if torch.cuda.is_available() else "cpu"),
            engine=engine,
            folder=folder,
        )
        tracked.log_result({name: value for name, value in result.items() if name not in ("cell", "files")})
        finish(folder / "diagnose.json", result, tracked, identity, started)


def bias(
    config: Path | None,
    cell_path: str | None,
    model: Path | None,
    engine: str | None,
    name: str,
    problems: Path | None,
    seed: int,
    output: Path,
    threads: int,
) -> None:
    """Every gradient estimator against the exact gradient: a cell of an experiment (config), or any model."""
    given = [option is not None for option in (config, cell_path, model, engine)]
    if given not in ([True, True, False, False], [False, False, True, True]):
        raise DvpError("expected --config FILE --cell CELL, or --model DIR --engine NAME")
    from dvp.rollout.vllm import configure_environment

    configure_environment(threads)
    import torch

    torch.set_num_threads(threads)
    if config is None:
        _bias_of_model(model, engine, load_experiment(name), problems, seed, output)
    else:
        _bias_of_cell(Place(config), cell_path)


def _bias_of_cell(place: Place, path: str) -> None:
    """A policy of the experiment → bias/CELL/estimators.parquet, jackknife.parquet and bias.json."""
    from dvp.measurement.bias import measure_bias, write_tables

    experiment, cell = place.experiment, place.experiment.cell("bias", path)
    model, source, made_by = place.verified_model(cell.run)
    identity = experiment.identity("bias", cell=cell)
    started = time.time()
    upstream = {made_by: source, "prepare": place.data / "manifest.json"}
    run, task = cell.run and cell.run.path, f"by~{cell.engine}-seed~{cell.seed}"
    with place.tracked("bias", identity, upstream, run=run, task=task) as tracked:
        tracked.log_params({"cell": cell.path, "bias": experiment.bias.model_dump(mode="json", exclude={"estimators"})})
        problems = pd.read_parquet(place.data / "train.parquet")
        where = "data/train.parquet"
        measured = measure_bias(experiment, model, cell.engine, problems, where=where, seed=cell.seed, name=path)
        tracked.log_result(measured.results())
        folder = place.folder / "bias" / path
        result = {"cell": path, **measured.summary, "files": write_tables(measured, folder)}
        tracked.log_file(folder / "estimators.parquet")
        finish(folder / "bias.json", result, tracked, identity, started)


def _bias_of_model(
    model: Path, engine: str, experiment: Experiment, problems: Path | None, seed: int, output: Path
) -> None:
    """Any Hugging Face directory: prints the table, and writes the same files to `output`."""
    from dvp.analysis.bias import format_estimators
    from dvp.analysis.formats import to_text
    from dvp.config import Columns, FileSource
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
