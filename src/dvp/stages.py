"""The stages: which files each reads and writes, its MLflow run, and nothing else. One function a verb of `dvp`.

Every stage writes a small JSON file last, so that a killed stage is never taken for a finished one; that file carries
the stage's config_hash, commit and the key of its MLflow run, which the next stage links to.
"""

import os
import time
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd

from dvp.errors import DvpError
from dvp.experiment.folder import BASE, ExperimentDir, finish
from dvp.experiment.grid import Run
from dvp.experiment.loading import dump_experiment, load_experiment, read_settings
from dvp.files import (
    dump_json,
    only_writer,
    read_json,
    sha256_file,
    sha256_json,
    verify_checksums,
    write_text,
)
from dvp.measuring import bias, mismatch  # noqa: F401 - verbs, too
from dvp.progress import Progress
from dvp.reuse import reuse
from dvp.tracking.record import COLLAPSED, read_records, read_rows
from dvp.tracking.store import create_store, store_name
from dvp.tracking.store import track as track_stage

PROBE_PROMPTS = 16


def resolve(name: str, folder: Path) -> None:
    """Validate an experiment, write it resolved, and create the tracking store."""
    from dvp.training.method import check_methods

    experiment = load_experiment(name)
    check_methods(experiment)
    create_store(folder.parent, experiment.name)
    write_text(folder / "config.yaml", dump_experiment(experiment))


def plan(config: list[str], json: bool, **options: Any) -> None:
    """Print what an experiment will take. `config` are settings as Snakemake's --config takes them."""
    from dvp.planning.dag import read_jobs
    from dvp.planning.plan import make_plan
    from dvp.planning.text import render

    settings = read_settings(config)
    experiment = load_experiment(settings["experiment"])
    folder = Path(settings["results"]) / experiment.name
    made = make_plan(experiment, read_jobs(settings), folder, **options)
    print(dump_json(made) if json else render(made))


def prepare(config: Path) -> None:
    """Raw problems → data/train.parquet, data/eval.parquet, data/manifest.json."""
    from dvp.data.prepare import prepare as run_prepare

    directory = ExperimentDir(config)
    config_hash = directory.experiment.config_hash("prepare")
    started = time.time()
    with directory.tracked("prepare", config_hash, {}) as tracked:
        manifest = run_prepare(directory.experiment.data, directory.experiment.sources, directory.data)
        tracked.log_params(directory.experiment.data.model_dump(mode="json"))
        tracked.log_result(manifest["counts"])
        finish(directory.data / "manifest.json", manifest, tracked, config_hash, started)


def base(config: Path, threads: int) -> None:
    """Train the tiny base model, or fetch a pinned one, into base/."""
    import torch

    from dvp.training.base import make_base

    torch.set_num_threads(threads)

    directory = ExperimentDir(config)
    config_hash = directory.experiment.config_hash("base")
    started = time.time()
    with directory.tracked("base", config_hash, {"prepare": directory.data / "manifest.json"}) as tracked:
        if reuse(directory.folder, directory.base / "manifest.json", tracked):
            return
        manifest = make_base(directory.experiment, directory.data, directory.base)
        tracked.log_params(directory.experiment.base.model_dump(mode="json"))
        tracked.log_result(
            {name: manifest[name] for name in ("parameters", "warm_start_final_loss") if name in manifest}
        )
        finish(directory.base / "manifest.json", manifest, tracked, config_hash, started)


def train(config: Path, run_path: str, threads: int) -> None:
    """RL of one grid point → runs/RUN/train.json, metrics.jsonl, checkpoints/; on as many ranks as it asks for."""
    from dvp.training import launch

    directory = ExperimentDir(config)
    run = directory.experiment.run(run_path)
    settings = directory.experiment.training
    if settings.ranks == 1:
        _train(directory, run, threads)
    elif launch.is_rank():
        with launch.reported():
            _train(directory, run, threads)
    else:
        arguments = ["--config", str(config), "--run", run_path, "--threads", str(max(1, threads // settings.gpus))]
        launch.run(settings, directory.run_folder(run), ["train", *arguments])


def _train(directory: ExperimentDir, run: Run, threads: int) -> None:
    """`train` in one process, all of it or one of its ranks. Rank 0 alone has the lock and writes files."""
    from dvp.rollout.vllm import VllmEngine, configure_environment, prove_safe_vocabulary

    configure_environment(threads)
    import torch
    from transformers import AutoTokenizer

    from dvp.conversion import write_probe
    from dvp.data.prompts import encode_prompts, short_enough
    from dvp.training import checkpoint
    from dvp.training.backend import Trainer
    from dvp.training.loop import Loop, run_loop

    experiment, settings = directory.experiment, directory.experiment.training
    main = os.environ.get("RANK", "0") == "0"
    folder = directory.run_folder(run)
    data_manifest = read_json(directory.data / "manifest.json", "files")
    base_manifest = read_json(directory.base / "manifest.json", "files")
    verify_checksums(directory.data, data_manifest["files"])
    verify_checksums(directory.base, base_manifest["files"])
    config_hash = experiment.config_hash("train", run)
    torch.set_num_threads(threads)
    started = time.time()
    upstream = {"prepare": directory.data / "manifest.json", "base": directory.base / "manifest.json"}
    with ExitStack() as stack:
        if main:
            stack.enter_context(only_writer(folder, "training this run"))
            tracked = stack.enter_context(
                directory.tracked("train", config_hash, upstream, run=run.path, metrics=folder / "metrics.jsonl")
            )
            if settings.ranks == 1 and reuse(directory.folder, folder / "train.json", tracked):
                return
            tracked.log_params(
                {
                    "run": run.model_dump(mode="json"),
                    "training": settings.model_dump(mode="json"),
                    "engine": experiment.engines[run.engine].model_dump(mode="json"),
                    "method": experiment.methods[run.method].model_dump(mode="json", exclude={"label"}),
                }
            )
        torch.manual_seed(run.seed)
        trainer = Trainer(directory.base, settings, experiment.deepspeed)
        tokenizer = AutoTokenizer.from_pretrained(directory.base)
        problems = pd.read_parquet(directory.data / "train.parquet")
        encoded = encode_prompts(tokenizer, problems, experiment.data.chat, "data/train.parquet")
        kept = short_enough(encoded, settings.max_prompt_tokens)
        too_long = len(encoded) - len(kept)
        problems, encoded = problems.iloc[kept], [encoded[index] for index in kept]
        longest = max(len(prompt) for prompt in encoded) + settings.max_response_tokens
        engine = VllmEngine(
            directory.base,
            experiment.engines[run.engine],
            max_model_len=min(longest, trainer.context),
            max_num_seqs=settings.prompts_per_step * settings.group_size,
            seed=run.seed,
        )
        # Padding is never attended to nor scored, so the end token serves where there is no other.
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        loop = Loop(experiment, run, problems, encoded, pad, trainer, engine)
        if loop.safe.engine is not None:
            prove_safe_vocabulary(engine, encoded[:PROBE_PROMPTS], loop.safe.engine)
        progress = Progress(run.path, settings.steps)

        def on_step(row: dict) -> None:
            if not main:
                return
            tracked.log_step(row["step"], row)
            details = f"reward {row['reward']:.2f}  k3 {row['k3']:.1e}  {row['seconds']:.1f} s/step"
            if progress.step(row["step"], details):
                tracked.flush()

        checkpoints = checkpoint.folder_of(
            folder / "checkpoints", config_hash, data_manifest["files"], base_manifest["files"]
        )
        final, rows = run_loop(loop, folder, checkpoints, on_step)
        write_probe(folder / "probe.safetensors", trainer, encoded[:PROBE_PROMPTS])
        if not main:
            return
        if loop.collapse.collapsed_at is not None:
            tracked.tag(COLLAPSED, f"at step {loop.collapse.collapsed_at}: {loop.collapse.reason}")
        tracked.flush()
        tracked.log_file(folder / "metrics.jsonl")
        result = {
            "run": run.path,
            "steps": len(rows),
            "prompts_too_long": too_long,
            "skipped_steps": sum(row["skipped"] for row in rows),
            "collapsed_at": loop.collapse.collapsed_at,
            "collapse_reason": loop.collapse.reason,
            "seconds_training": sum(row["seconds"] for row in rows),
            "checkpoint": str(final.relative_to(folder)),
            "files": {name: sha256_file(folder / name) for name in ("metrics.jsonl", "probe.safetensors")},
        }
        finish(folder / "train.json", result, tracked, config_hash, started)


def convert(config: Path, run_path: str, threads: int) -> None:
    """The run's final checkpoint → models/RUN/ and conversion.json in it, with the proof."""
    import torch

    from dvp.conversion import convert as run_convert

    torch.set_num_threads(threads)
    directory = ExperimentDir(config)
    run = directory.experiment.run(run_path)
    folder = directory.run_folder(run)
    trained = read_json(folder / "train.json", "checkpoint", "files")
    verify_checksums(folder, trained["files"])
    verify_checksums(directory.base, read_json(directory.base / "manifest.json", "files")["files"])
    config_hash = directory.experiment.config_hash("convert", run)
    started = time.time()
    with directory.tracked("convert", config_hash, {"train": folder / "train.json"}, run=run.path) as tracked:
        model = directory.model(run.path)
        if reuse(directory.folder, model / "conversion.json", tracked):
            return
        result = run_convert(
            folder / trained["checkpoint"],
            directory.base,
            folder / "probe.safetensors",
            model,
            directory.experiment.training.temperature,
        )
        tracked.log_result({key: result[key] for key in ("max_abs_delta_log_prob", "max_abs_delta_log_prob_live")})
        finish(model / "conversion.json", {"run": run.path, **result}, tracked, config_hash, started)


def evaluate(config: Path, run_path: str, task: str, threads: int) -> None:
    """Samples of a model on a task → evals/RUN/TASK/samples.parquet and scores.json."""
    from dvp.rollout.vllm import VllmEngine, configure_environment

    configure_environment(threads)
    import torch
    from transformers import AutoConfig, AutoTokenizer

    from dvp.data.prompts import encode_prompts
    from dvp.evaluation.runner import evaluate as run_evaluate
    from dvp.training.base import check_vocabulary

    directory = ExperimentDir(config)
    experiment = directory.experiment
    run = None if run_path == BASE else experiment.run(run_path)
    if task not in experiment.data.tasks:
        raise DvpError(f"task '{task}' is not in experiment '{experiment.name}': {', '.join(experiment.data.tasks)}")
    model, source, made_by = directory.verified_model(run)
    check_vocabulary(model)
    config_hash = experiment.config_hash("evaluate", run, task)
    torch.set_num_threads(threads)
    started = time.time()
    upstream = {made_by: source, "prepare": directory.data / "manifest.json"}
    with directory.tracked("evaluate", config_hash, upstream, run=run and run.path, task=task) as tracked:
        folder = directory.folder / "evals" / run_path / task
        if reuse(directory.folder, folder / "scores.json", tracked):
            return
        settings = experiment.evaluation
        tracked.log_params(
            settings.model_dump(mode="json", exclude={"samples_per_problem"})
            | {"samples_per_problem": settings.samples_per_problem[task]}
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        problems = pd.read_parquet(directory.data / "eval.parquet")
        encoded = encode_prompts(
            tokenizer, problems[problems["task"] == task], experiment.data.chat, "data/eval.parquet"
        )
        longest = max(map(len, encoded), default=0)
        engine = VllmEngine(
            model,
            experiment.engines[settings.engine],
            max_model_len=min(
                longest + settings.max_response_tokens, AutoConfig.from_pretrained(model).max_position_embeddings
            ),
            max_num_seqs=256,
            seed=settings.seed,
        )
        scores = run_evaluate(
            experiment,
            task,
            model_dir=model,
            eval_parquet=directory.data / "eval.parquet",
            engine=engine,
            tokenizer=tokenizer,
            folder=folder,
        )
        tracked.log_result({name: metric["value"] for name, metric in scores["metrics"].items()})
        tracked.log_file(folder / "samples.parquet")
        scores["files"] = {"samples.parquet": sha256_file(folder / "samples.parquet")}
        finish(folder / "scores.json", {"run": run_path, **scores}, tracked, config_hash, started)


def report(config: Path, part: str) -> None:
    """A part of what was measured (dvp.analysis.parts) → figures/, tables/ and, last, report/PART.json."""
    from dvp.analysis.inputs import evaluation_folder
    from dvp.analysis.output import record, write
    from dvp.analysis.parts import parts

    directory = ExperimentDir(config)
    experiment = directory.experiment
    if part not in parts(experiment):
        raise DvpError(f"--part {part}: the report of '{experiment.name}' has {', '.join(parts(experiment))}")
    upstream: dict[str, Path | list[Path]] = {}
    if part in ("training", "sweep"):
        upstream["train"] = [directory.run_folder(run) / "train.json" for run in experiment.runs]
        upstream["evaluate"] = [
            evaluation_folder(directory.folder, run, experiment.report.task) / "scores.json"
            for run in [None, *experiment.runs]
        ]
    if part == "mismatch":
        upstream["mismatch"] = [
            directory.folder / "mismatch" / measurement.path / "mismatch.json"
            for measurement in experiment.measurements("mismatch")
        ]
    if part in ("bias", "sweep"):
        upstream["bias"] = [
            directory.folder / "bias" / measurement.path / "bias.json"
            for measurement in experiment.measurements("bias")
        ]
    config_hash = experiment.config_hash("report")
    started = time.time()
    with directory.tracked(f"report_{part}", config_hash, upstream) as tracked:
        if part == "training":
            from dvp.analysis.report import report as run_report

            measured = run_report(experiment, directory.folder, directory.folder)
            tracked.log_file(directory.folder / "provenance.json")
        else:
            measured = import_module(f"dvp.analysis.{part}").measured(experiment, directory.folder)
            write(measured, directory.folder)
        for folder, names in (("tables", measured.tables), ("figures", measured.figures)):
            for file in sorted((directory.folder / folder).glob("*")):
                if file.stem in names:
                    tracked.log_file(file, folder)
        result = {"experiment": experiment.name, "part": part, **record(measured, directory.folder)}
        finish(directory.folder / "report" / f"{part}.json", result, tracked, config_hash, started)


def claims(experiments: list[str], output: Path) -> None:
    """The reports of some experiments, and config/claims.yaml → claims.md, claims.html and, last, claims.json."""
    from dvp.analysis.claims import CLAIMS
    from dvp.analysis.verdicts import answer, to_html, to_markdown
    from dvp.tracking.stage import stage_run

    answered = answer(experiments)
    config_hash = sha256_json([experiments, sha256_file(CLAIMS)])[:12]
    inputs = sha256_json([one["files"] for one in answered["experiments"].values()])[:12]
    upstream = {key: list(one["reports"].values()) for key, one in answered["experiments"].items()}
    output = output.resolve()
    started = time.time()
    with stage_run(
        output, output.name, "evidence", config_hash=config_hash, inputs=inputs, upstream=upstream
    ) as tracked:
        write_text(output / "claims.md", to_markdown(answered, output))
        write_text(output / "claims.html", to_html(answered))
        for one in answered["claims"]:
            tracked.tag(f"claim.{one['id']}", one["verdict"])
        for name in ("claims.md", "claims.html"):
            tracked.log_file(output / name)
        finish(output / "claims.json", answered, tracked, config_hash, started)
    for one in answered["claims"]:
        print(f"{one['verdict']:22} {one['text']}")
    print(f"\n{output / 'claims.md'}, {output / 'claims.html'}")


def show(config: Path) -> None:
    """Print the main table and where report and tracking store are."""
    from dvp.analysis.report import print_table

    directory = ExperimentDir(config)
    print(f"{directory.experiment.description}\n")
    print(print_table(directory.folder))
    print(f"\ntables, figures   {directory.folder}/tables, {directory.folder}/figures")
    if (directory.folder / "report.html").is_file():
        print(f"report            {directory.folder}/report.html")
    print(f"from which runs   {directory.folder}/provenance.json")
    print(f"MLflow            {store_name(directory.results)}   (make mlflow opens it)")


def track(config: Path) -> None:
    """Bring into the tracking store what it lacks of every stage that has begun, from the files."""
    directory = ExperimentDir(config)
    # Everything is read before anything is sent.
    stages = [
        (record, read_rows(directory.folder / record.metrics) if record.metrics else [])
        for record in read_records(directory.folder)
    ]
    create_store(directory.results, directory.experiment.name)
    for record, rows in stages:
        added = track_stage(directory.folder, record, rows)
        print(f"{record.name}: " + (", ".join(f"{name} +{count}" for name, count in added.items()) or "complete"))
    print(f"stages in {store_name(directory.results)}: {len(stages)}")
