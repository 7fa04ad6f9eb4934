"""Run the stages `base` and `train`."""

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from dvp.experiment.config import Experiment
from dvp.experiment.folder import ExperimentDir
from dvp.experiment.grid import Run
from dvp.experiment.loading import stored_dtype
from dvp.experiment.training import EngineConfig, TrainingConfig
from dvp.files import only_writer, sha256_file
from dvp.gpus import claim
from dvp.progress import Progress
from dvp.stage import read_inputs, run_stage
from dvp.tools import make_tool
from dvp.tracking.record import COLLAPSED
from dvp.tracking.stage import StageRun
from dvp.training import launch

if TYPE_CHECKING:
    from dvp.rollout.engine import Engine
    from dvp.training.loop import Loop


def base(config: Path, threads: int) -> None:
    """Train the tiny base model, or fetch a pinned one → base/, an ordinary Hugging Face directory."""
    directory = ExperimentDir(config)
    experiment, inputs = directory.experiment, {"prepare": directory.result("prepare")}
    if experiment.base.kind == "trained":
        claim(1)
    else:
        from dvp.rollout.vllm import configure_environment

        configure_environment(threads)  # vLLM is asked which models it has
    import torch

    from dvp.training.base import make_base

    torch.set_num_threads(threads)
    if experiment.tools is not None:
        make_tool(experiment.tools)  # a tool that does not work on this machine is refused before hours of training
    with run_stage("base", directory, directory.result("base"), experiment.config_hash("base"), inputs) as stage:
        if stage.reuse():
            return
        manifest = make_base(experiment, directory.data, directory.base)
        stage.tracked.log_params({"base": experiment.base.model_dump(mode="json")})
        stage.tracked.log_result(
            {name: manifest[name] for name in ("parameters", "warm_start_final_loss") if name in manifest}
        )
        stage.tracked.log_model(directory.base)
        stage.finish(manifest)


def train(config: Path, path: str, threads: int, stop_seconds: int) -> None:
    """Train one run with RL → runs/RUN/train.json, metrics.jsonl, checkpoints/; on as many ranks as it asks for.

    stop_seconds : from a scheduler's warning to the end of the job; 0 if unknown.
    """
    directory = ExperimentDir(config)
    run = directory.experiment.job("train", path).run
    command = ["train", "--config", str(config), "--run", path, "--stop-seconds", str(stop_seconds)]
    folder, training = directory.result("train", path).parent, directory.experiment.training_of(run)
    if training.nodes == 1:  # on several nodes Slurm hands the GPUs out
        claim(training.gpus)
    launch.on_ranks(training, folder, command, threads, lambda: _train(directory, run, threads, stop_seconds))


def _train(directory: ExperimentDir, run: Run, threads: int, stop_seconds: int) -> None:
    """Train in this process, as the only rank or one of several. Rank 0 alone has the lock and writes files."""
    from dvp.rollout.vllm import configure_environment, prove_safe_vocabulary

    configure_environment(threads)  # before anything imports vllm or transformers
    import torch

    from dvp.training import checkpoint
    from dvp.training.checkpoint import PROBE, PROBE_PROMPTS
    from dvp.training.loop import run_loop
    from dvp.training.responses import RESPONSES

    torch.set_num_threads(threads)
    experiment, settings = directory.experiment, directory.experiment.training_of(run)
    result = directory.result("train", run.path)
    folder = result.parent
    inputs = {"prepare": directory.result("prepare"), "base": directory.result("base")}
    read = read_inputs(directory, inputs)
    data_files, base_files = (read[stage][0]["files"] for stage in inputs)
    config_hash = experiment.config_hash("train", run.path)

    with ExitStack() as stack:
        stage = None
        if os.environ.get("RANK", "0") == "0":
            stack.enter_context(only_writer(folder, "training this run"))
            # Every rank has verified the inputs.
            options = {"verify": False, "run": run.path, "metrics": folder / "metrics.jsonl"}
            stage = stack.enter_context(run_stage("train", directory, result, config_hash, inputs, **options))
            if settings.ranks == 1 and stage.reuse():
                return
            stage.tracked.log_params(
                {
                    "training": settings.model_dump(mode="json"),
                    "engine": experiment.engines[run.engine].model_dump(mode="json"),
                    "method": experiment.methods[run.method].model_dump(mode="json", exclude={"label"}),
                    **({"tools": experiment.tools.model_dump(mode="json")} if experiment.tools else {}),
                }
            )

        loop, too_long = set_up(directory, run)
        loop.stop.seconds = stop_seconds
        if loop.safe.engine is not None:
            prove_safe_vocabulary(loop.engine, loop.problems.prompts[:PROBE_PROMPTS], loop.safe.engine)

        checkpoints = checkpoint.folder_of(folder / "checkpoints", config_hash, data_files, base_files)
        final, rows = run_loop(loop, folder, checkpoints, reporter(loop, stage and stage.tracked))
        if stage is None:
            return
        shutil.copyfile(final / PROBE, folder / PROBE)
        if loop.collapse.collapsed_at is not None:
            stage.tracked.tag(COLLAPSED, f"at step {loop.collapse.collapsed_at}: {loop.collapse.reason}")
        stage.tracked.flush()
        stage.tracked.log_file(folder / "metrics.jsonl")
        last = checkpoint.checkpoints(checkpoints)[-1]
        stage.tracked.log_model(last)
        stage.finish(
            {
                "run": run.path,
                "steps": len(rows),
                "prompts_too_long": too_long,
                "skipped_steps": sum(row["skipped"] for row in rows),
                "collapsed_at": loop.collapse.collapsed_at,
                "collapse_reason": loop.collapse.reason,
                "seconds_training": sum(row["seconds"] for row in rows),
                "seconds_checkpoint": loop.stop.seconds_save,
                "checkpoint": str(last.relative_to(folder)),
                # A step is text, as in JSON.
                "kept": {
                    str(step): str(checkpoint.kept_weights(checkpoints, step).relative_to(folder)) for step in loop.kept
                },
                "files": {name: sha256_file(folder / name) for name in ("metrics.jsonl", RESPONSES, PROBE)},
            }
        )


def reporter(loop: "Loop", tracked: StageRun | None) -> Callable[[dict], None]:
    """Return a function that passes each row of a run to MLflow and, now and then, to the terminal.

    tracked : None on a rank that does not report.
    """
    progress = Progress(loop.run.path, loop.config.steps)

    def on_step(row: dict) -> None:
        if tracked is None:
            return
        tracked.log_step(row["step"], row)
        if row["step"] <= loop.restored:
            return  # its time does not predict that of the steps to come
        details = f"reward {row['reward']:.2f}  k3 {row['k3']:.1e}  {row['seconds']:.1f} s/step"
        if progress.step(row["step"], f"{details}  {why}" if (why := why_skipped(row)) else details):
            tracked.flush()

    return on_step


def why_skipped(row: dict) -> str:
    """Return why a step (a row of metrics.jsonl) changed no weights; empty if it changed them."""
    if not row["skipped"]:
        return ""
    if row["mixed_groups_fraction"] == 0.0:
        return "skipped: all rewards of each group are equal"
    if row["masked_fraction"] == 1.0:
        return "skipped: every response is rejected"
    return "skipped: every response is rejected whose group has unequal rewards"


def sequences(training: TrainingConfig, engine: EngineConfig) -> int:
    """Return how many responses one engine samples in a step, for its share of the prompts (dvp.training.ranks)."""
    import torch

    engines = training.ranks // (engine.tensor_parallel if torch.cuda.is_available() else 1)
    return -(-training.prompts_per_step // engines) * training.group_size


def run_engine(experiment: Experiment, run: Run, model: Path, max_model_len: int) -> "Engine":
    """Start the engine that samples in a run, without a tool, on a Hugging Face directory."""
    from dvp.rollout.engine import make_engine

    settings, safe = experiment.training_of(run), experiment.sides_of(run)
    return make_engine(
        model,
        experiment.engines[run.engine],
        max_model_len=max_model_len,
        max_num_seqs=sequences(settings, experiment.engines[run.engine]),
        seed=run.seed,
        rules=[safe.engine],
        report_sets=settings.sets_reported(safe),
    )


def set_up(directory: ExperimentDir, run: Run, make_loop: "Callable[..., Loop] | None" = None) -> tuple["Loop", int]:
    """Set up the trainer, prompts and engine of a run, on every rank.

    make_loop : makes the loop of these parts; Loop by default.
    Returns the loop, and how many prompts were left out because they are too long for the run.
    """
    import torch
    from transformers import AutoTokenizer

    from dvp.data.prompts import before_response, encode_prompts, padding_token, read_problems, short_enough
    from dvp.data.reward import Grader
    from dvp.rollout.turns import ToolEngine
    from dvp.tools import make_tool
    from dvp.training import ranks
    from dvp.training.backend import Trainer
    from dvp.training.loop import Loop
    from dvp.training.responses import ResponseRecorder

    experiment, settings = directory.experiment, directory.experiment.training_of(run)
    tokenizer = AutoTokenizer.from_pretrained(directory.base)
    problems = read_problems(directory.data / "train.parquet")
    prompts = encode_prompts(tokenizer, problems, experiment.data.chat, "data/train.parquet")
    kept = short_enough(prompts, settings.max_prompt_tokens)
    too_long = len(prompts) - len(kept)
    problems, prompts = problems.iloc[kept], [prompts[index] for index in kept]
    tool = make_tool(experiment.tools) if experiment.tools else None
    grader = Grader(before_response(tokenizer, experiment.data), experiment.data.reward)

    torch.manual_seed(run.seed)
    trainer = Trainer(directory.base, settings, experiment.deepspeed, prompts)
    longest = max(map(len, prompts)) + settings.max_response_tokens
    said = experiment.swallowed_updates(stored_dtype(directory.base), [run.engine])
    if said and ranks.is_main():
        print(said, file=sys.stderr, flush=True)
    engine = run_engine(experiment, run, directory.base, min(longest, trainer.context))
    if experiment.tools:
        engine = ToolEngine(engine, tool, experiment.tools, tokenizer)

    recorder = ResponseRecorder(settings.keep_responses, settings.steps, tokenizer, tools=experiment.tools is not None)
    pad = padding_token(tokenizer)
    make_loop = make_loop or Loop
    return make_loop(experiment, run, problems, prompts, pad, trainer, engine, recorder, grader), too_long
