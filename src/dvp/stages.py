"""The stages: which files each reads and writes, its MLflow run, and nothing else. One function a verb of `dvp`.

Every stage writes a small JSON file last, so that a killed stage is never taken for a finished one; that file carries
the stage's identity, commit and the key of its MLflow run, which the next stage links to.
"""

import os
import time
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd

from dvp.errors import DvpError
from dvp.experiment_files import dump_experiment, load_experiment, read_settings
from dvp.files import (
    dump_json,
    only_writer,
    read_json,
    sha256_file,
    sha256_json,
    verify_checksums,
    write_text,
)
from dvp.grid import Run
from dvp.measuring import bias, diagnose  # noqa: F401 - verbs, too
from dvp.place import BASE, Place, finish
from dvp.progress import Progress
from dvp.provenance import code_hash
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
    from dvp.planning.plan import make_plan
    from dvp.planning.text import render

    settings = read_settings(config)
    experiment = load_experiment(settings["experiment"])
    made = make_plan(experiment, Path(settings["results"]) / experiment.name, **options)
    print(dump_json(made) if json else render(made))


def prepare(config: Path) -> None:
    """Raw problems → data/train.parquet, data/eval.parquet, data/manifest.json."""
    from dvp.data.prepare import prepare as run_prepare

    place = Place(config)
    identity = place.experiment.identity("prepare")
    started = time.time()
    with place.tracked("prepare", identity, {}) as tracked:
        manifest = run_prepare(place.experiment.data, place.experiment.sources, place.data)
        tracked.log_params(place.experiment.data.model_dump(mode="json"))
        tracked.log_result(manifest["counts"])
        finish(place.data / "manifest.json", manifest, tracked, identity, started)


def base(config: Path, threads: int) -> None:
    """Train the tiny base model, or fetch a pinned one, into base/."""
    import torch

    from dvp.training.base import make_base

    torch.set_num_threads(threads)

    place = Place(config)
    identity = place.experiment.identity("base")
    started = time.time()
    with place.tracked("base", identity, {"prepare": place.data / "manifest.json"}) as tracked:
        if reuse(place.folder, place.base / "manifest.json", tracked):
            return
        manifest = make_base(place.experiment, place.data, place.base)
        tracked.log_params(place.experiment.base.model_dump(mode="json"))
        tracked.log_result(
            {name: manifest[name] for name in ("parameters", "warm_start_final_loss") if name in manifest}
        )
        finish(place.base / "manifest.json", manifest, tracked, identity, started)


def train(config: Path, run_path: str, threads: int) -> None:
    """RL of one grid point → runs/RUN/train.json, metrics.jsonl, checkpoints/; on as many ranks as it asks for."""
    from dvp.training import launch

    place = Place(config)
    run = place.experiment.run(run_path)
    settings = place.experiment.training
    if settings.ranks == 1:
        _train(place, run, threads)
    elif launch.is_rank():
        with launch.reported():
            _train(place, run, threads)
    else:
        arguments = ["--config", str(config), "--run", run_path, "--threads", str(max(1, threads // settings.gpus))]
        launch.run(settings, place.run_folder(run), ["train", *arguments])


def _train(place: Place, run: Run, threads: int) -> None:
    """`train` in one process, all of it or one of its ranks. Rank 0 alone has the lock and writes files."""
    from dvp.rollout.vllm import VllmEngine, configure_environment, prove_safe_vocabulary

    configure_environment(threads)
    import torch
    from transformers import AutoTokenizer

    from dvp.conversion import write_probe
    from dvp.data.prompts import encode_prompts, short_enough
    from dvp.training.backend import Trainer
    from dvp.training.loop import Loop, run_loop

    experiment, settings = place.experiment, place.experiment.training
    main = os.environ.get("RANK", "0") == "0"
    folder = place.run_folder(run)
    data_manifest = read_json(place.data / "manifest.json", "files")
    base_manifest = read_json(place.base / "manifest.json", "files")
    verify_checksums(place.data, data_manifest["files"])
    verify_checksums(place.base, base_manifest["files"])
    identity = experiment.identity("train", run)
    # Checkpoints of other settings, data or code are never continued; they stay where they are. Those of another number
    # of ranks are the same run's: it says that it cannot go on with them.
    fingerprint = sha256_json([identity, data_manifest["files"], base_manifest["files"], code_hash("train")])[:12]
    torch.set_num_threads(threads)
    started = time.time()
    upstream = {"prepare": place.data / "manifest.json", "base": place.base / "manifest.json"}
    with ExitStack() as stack:
        if main:
            stack.enter_context(only_writer(folder, "training this run"))
            tracked = stack.enter_context(
                place.tracked("train", identity, upstream, run=run.path, metrics=folder / "metrics.jsonl")
            )
            if settings.ranks == 1 and reuse(place.folder, folder / "train.json", tracked):
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
        trainer = Trainer(place.base, settings, experiment.deepspeed)
        tokenizer = AutoTokenizer.from_pretrained(place.base)
        problems = pd.read_parquet(place.data / "train.parquet")
        encoded = encode_prompts(tokenizer, problems, experiment.data.chat, "data/train.parquet")
        kept = short_enough(encoded, settings.max_prompt_tokens)
        too_long = len(encoded) - len(kept)
        problems, encoded = problems.iloc[kept], [encoded[index] for index in kept]
        longest = max(len(prompt) for prompt in encoded) + settings.max_response_tokens
        engine = VllmEngine(
            place.base,
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

        final, rows = run_loop(loop, folder, folder / "checkpoints" / fingerprint, on_step)
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
        finish(folder / "train.json", result, tracked, identity, started)


def convert(config: Path, run_path: str, threads: int) -> None:
    """The run's final checkpoint → models/RUN/ and conversion.json in it, with the proof."""
    import torch

    from dvp.conversion import convert as run_convert

    torch.set_num_threads(threads)
    place = Place(config)
    run = place.experiment.run(run_path)
    folder = place.run_folder(run)
    trained = read_json(folder / "train.json", "checkpoint", "files")
    verify_checksums(folder, trained["files"])
    verify_checksums(place.base, read_json(place.base / "manifest.json", "files")["files"])
    identity = place.experiment.identity("convert", run)
    started = time.time()
    with place.tracked("convert", identity, {"train": folder / "train.json"}, run=run.path) as tracked:
        model = place.model(run.path)
        if reuse(place.folder, model / "conversion.json", tracked):
            return
        result = run_convert(
            folder / trained["checkpoint"],
            place.base,
            folder / "probe.safetensors",
            model,
            place.experiment.training.temperature,
        )
        tracked.log_result({key: result[key] for key in ("max_abs_delta_log_prob", "max_abs_delta_log_prob_live")})
        finish(model / "conversion.json", {"run": run.path, **result}, tracked, identity, started)


def evaluate(config: Path, run_path: str, task: str, threads: int) -> None:
    """Samples of a model on a task → evals/RUN/TASK/samples.parquet and scores.json."""
    from dvp.rollout.vllm import VllmEngine, configure_environment

    configure_environment(threads)
    import torch
    from transformers import AutoConfig, AutoTokenizer

    from dvp.data.prompts import encode_prompts
    from dvp.evaluation.runner import evaluate as run_evaluate
    from dvp.training.base import check_vocabulary

    place = Place(config)
    experiment = place.experiment
    run = None if run_path == BASE else experiment.run(run_path)
    if task not in experiment.data.tasks:
        raise DvpError(f"task '{task}' is not in experiment '{experiment.name}': {', '.join(experiment.data.tasks)}")
    model, source, made_by = place.verified_model(run)
    check_vocabulary(model)
    identity = experiment.identity("evaluate", run, task)
    torch.set_num_threads(threads)
    started = time.time()
    upstream = {made_by: source, "prepare": place.data / "manifest.json"}
    with place.tracked("evaluate", identity, upstream, run=run and run.path, task=task) as tracked:
        folder = place.folder / "evals" / run_path / task
        if reuse(place.folder, folder / "scores.json", tracked):
            return
        settings = experiment.evaluation
        tracked.log_params(
            settings.model_dump(mode="json", exclude={"samples_per_problem"})
            | {"samples_per_problem": settings.samples_per_problem[task]}
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        problems = pd.read_parquet(place.data / "eval.parquet")
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
            eval_parquet=place.data / "eval.parquet",
            engine=engine,
            tokenizer=tokenizer,
            folder=folder,
        )
        tracked.log_result({name: metric["value"] for name, metric in scores["metrics"].items()})
        tracked.log_file(folder / "samples.parquet")
        scores["files"] = {"samples.parquet": sha256_file(folder / "samples.parquet")}
        finish(folder / "scores.json", {"run": run_path, **scores}, tracked, identity, started)


def report(config: Path, part: str) -> None:
    """A part of what was measured (dvp.analysis.parts) → figures/, tables/ and, last, report/PART.json."""
    from dvp.analysis.inputs import evaluation_folder
    from dvp.analysis.output import record, write
    from dvp.analysis.parts import parts

    place = Place(config)
    experiment = place.experiment
    if part not in parts(experiment):
        raise DvpError(f"--part {part}: the report of '{experiment.name}' has {', '.join(parts(experiment))}")
    upstream: dict[str, Path | list[Path]] = {}
    if part in ("training", "sweep"):
        upstream["train"] = [place.run_folder(run) / "train.json" for run in experiment.runs]
        upstream["evaluate"] = [
            evaluation_folder(place.folder, run, experiment.report.task) / "scores.json"
            for run in [None, *experiment.runs]
        ]
    if part == "mismatch":
        upstream["diagnose"] = [
            place.folder / "diagnostics" / cell.path / "diagnose.json" for cell in experiment.cells("diagnose")
        ]
    if part in ("bias", "sweep"):
        upstream["bias"] = [place.folder / "bias" / cell.path / "bias.json" for cell in experiment.cells("bias")]
    identity = experiment.identity("report")
    started = time.time()
    with place.tracked(f"report_{part}", identity, upstream) as tracked:
        if part == "training":
            from dvp.analysis.report import report as run_report

            measured = run_report(experiment, place.folder, place.folder)
            tracked.log_file(place.folder / "provenance.json")
        else:
            measured = import_module(f"dvp.analysis.{part}").measured(experiment, place.folder)
            write(measured, place.folder)
        for folder, names in (("tables", measured.tables), ("figures", measured.figures)):
            for file in sorted((place.folder / folder).glob("*")):
                if file.stem in names:
                    tracked.log_file(file, folder)
        result = {"experiment": experiment.name, "part": part, **record(measured, place.folder)}
        finish(place.folder / "report" / f"{part}.json", result, tracked, identity, started)


def claims(experiments: list[str], output: Path) -> None:
    """The reports of some experiments, and config/claims.yaml → claims.md, claims.html and, last, claims.json."""
    from dvp.analysis.claims import CLAIMS
    from dvp.analysis.verdicts import answer, to_html, to_markdown
    from dvp.tracking.stage import stage_run

    answered = answer(experiments)
    identity = sha256_json([experiments, sha256_file(CLAIMS)])[:12]
    inputs = sha256_json([one["files"] for one in answered["experiments"].values()])[:12]
    upstream = {key: list(one["reports"].values()) for key, one in answered["experiments"].items()}
    output = output.resolve()
    started = time.time()
    with stage_run(output, output.name, "claims", identity=identity, inputs=inputs, upstream=upstream) as tracked:
        write_text(output / "claims.md", to_markdown(answered, output))
        write_text(output / "claims.html", to_html(answered))
        for one in answered["claims"]:
            tracked.tag(f"claim.{one['id']}", one["verdict"])
        for name in ("claims.md", "claims.html"):
            tracked.log_file(output / name)
        finish(output / "claims.json", answered, tracked, identity, started)
    for one in answered["claims"]:
        print(f"{one['verdict']:22} {one['text']}")
    print(f"\n{output / 'claims.md'}, {output / 'claims.html'}")


def show(config: Path) -> None:
    """Print the main table and where report and tracking store are."""
    from dvp.analysis.report import print_table

    place = Place(config)
    print(f"{place.experiment.description}\n")
    print(print_table(place.folder))
    print(f"\ntables, figures   {place.folder}/tables, {place.folder}/figures")
    if (place.folder / "report.html").is_file():
        print(f"report            {place.folder}/report.html")
    print(f"from which runs   {place.folder}/provenance.json")
    print(f"MLflow            {store_name(place.results)}   (make mlflow opens it)")


def track(config: Path) -> None:
    """Bring into the tracking store what it lacks of every stage that has begun, from the files."""
    place = Place(config)
    # Everything is read before anything is sent.
    stages = [
        (record, read_rows(place.folder / record.metrics) if record.metrics else [])
        for record in read_records(place.folder)
    ]
    create_store(place.results, place.experiment.name)
    for record, rows in stages:
        added = track_stage(place.folder, record, rows)
        print(f"{record.name}: " + (", ".join(f"{name} +{count}" for name, count in added.items()) or "complete"))
    print(f"stages in {store_name(place.results)}: {len(stages)}")
