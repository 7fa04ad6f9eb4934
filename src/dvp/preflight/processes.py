"""Processes of a preflight: two steps of training, with a stop and a resumption, then conversion and evaluation."""

import resource
import socket
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dvp.errors import Stopped
from dvp.experiment.config import Experiment
from dvp.experiment.folder import ExperimentDir
from dvp.files import read_json, sha256_file
from dvp.preflight.brief import FullLength, GpuMemory, chosen_run, rules
from dvp.preflight.checks import (
    POSITIONS,
    check_compilers,
    check_forward,
    check_mismatch,
    check_same_engine,
)
from dvp.preflight.report import SAMPLING, Report, Verdict, check_steps
from dvp.rollout.engine import Engine
from dvp.rollout.vllm import prove_safe_vocabulary
from dvp.training import checkpoint, ranks
from dvp.training.agreement import compare, shortest
from dvp.training.backend import TAG
from dvp.training.loop import Loop, run_loop
from dvp.training.stage import run_engine, set_up

CHECKPOINTS, AGAIN = "checkpoints", "again"
MODEL = "model"
EVALUATED = 4
"""Number of evaluation problems."""
BEFORE, RELOADED = "before.safetensors", "reloaded.safetensors"


def check_engine(loop: Loop, experiment: Experiment, engine: str, report: Report, work: Path) -> None:
    """Run the checks that compare trainer and engine before any step. Raises DvpError naming the check that fails."""
    prompts = shortest(loop.problems.prompts)
    with report.asking("safe vocabulary") as answer:
        asked = rules(experiment, engine)
        for rule in asked:
            prove_safe_vocabulary(loop.engine, loop.problems.prompts[: checkpoint.PROBE_PROMPTS], rule)
        proved = ", ".join(map(str, asked)) or "no run with this engine has one"
        answer(Verdict(True, proved, {"rules": len(asked)}))
    with report.asking("forward") as answer:
        answer(check_forward(loop.trainer, prompts, experiment.training.temperature))
    with report.asking("mismatch") as answer:
        configured, model = experiment.engines[engine], loop.trainer.policy.model
        tokens = min(POSITIONS, loop.config.max_response_tokens)  # the engine has room for no more
        options = {"seed": loop.run.seed, "tokens": tokens, "bf16": loop.trainer.bf16}
        compared = compare(model, loop.engine, configured, prompts, **options)
        answer(check_mismatch(compared, experiment.training.max_response_tokens))
    before_NV = next_tokens(loop.engine, prompts)
    if ranks.is_main():
        save_file({"log_probs": before_NV}, work / BEFORE)
        report.note(device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # memory that training itself would not have used
    ranks.gather(None)


def train(directory: ExperimentDir, engine: str, work: Path) -> None:
    """Run the first process group: start, compare, take one step, then save and exit on SIGTERM in the second step.

    directory : holds the experiment with the preflight's settings.
    Raises Stopped on the signal, and DvpError naming the check that fails.
    """
    report, experiment = Report(work), directory.experiment
    run = chosen_run(experiment, engine)
    started = time.time()
    with report.asking("start") as answer:
        check_compilers()
        loop, _ = set_up(directory, run, partial(FullLength, waiting=work / SAMPLING))
        figures = {"seconds": time.time() - started, "ranks": experiment.training.ranks}
        says = f"trainer and engine work after {figures['seconds']:.0f} s; ranks: {figures['ranks']}"
        answer(Verdict(True, says, figures))
    check_engine(loop, experiment, engine, report, work)
    with report.asking("steps"):
        try:
            run_loop(loop, work, work / CHECKPOINTS, lambda row: None)
        except Stopped:
            _note_peaks(report, loop.memory)
            raise


def resume(directory: ExperimentDir, engine: str, work: Path) -> None:
    """Run the second process group: resume from the checkpoint, check that it is what was saved, take the last step."""
    report = Report(work)
    with report.asking("resume") as answer:
        loop, _ = set_up(directory, chosen_run(directory.experiment, engine), FullLength)
        path, _ = checkpoint.restore(work / CHECKPOINTS, loop.trainer)
        answer(_same_when_saved_again(loop, path, work / AGAIN))
    prompts = shortest(loop.problems.prompts)
    with report.asking("steps") as answer:
        _, rows = run_loop(loop, work, work / CHECKPOINTS, lambda row: None)
        answer(check_steps(rows, loop.config.max_response_tokens))
    _note_peaks(report, loop.memory)
    # Of the last step, as the first one also measures the trainer's own noise.
    report.note(seconds={name: rows[-1][f"seconds_{name}"] for name in ("rollout", "update", "sync")})
    reloaded_NV = next_tokens(loop.engine, prompts)
    if ranks.is_main():
        save_file({"log_probs": reloaded_NV}, work / RELOADED)
        report.note(asked={"prompts": prompts, "max_model_len": loop.engine.max_model_len})
    ranks.gather(None)


def _same_when_saved_again(loop: Loop, path: Path, again: Path) -> Verdict:
    """Check that saving the restored trainer again writes the same bytes: if not, something was not restored."""
    sums = {}
    for file, write in loop.trainer.parts(again):
        write()
        sums[f"{TAG}/{file.name}"] = sha256_file(file)
    saved = {name: digest for of_rank in ranks.gather(sums) for name, digest in of_rank.items()}
    listed = read_json(path / checkpoint.MANIFEST)["files"]
    first = {name: digest for name, digest in listed.items() if name.endswith(".pt")}
    differing = [name for name in first | saved if first.get(name) != saved.get(name)]
    says = f"{len(first)} files of weights, optimiser and schedule are the same when saved again"
    if differing:
        says = f"{differing[0]} is another one when saved again ({len(differing)} of {len(first)} differ)"
    return Verdict(not differing, says, {"files": len(first)})


def next_tokens(engine: Engine, prompts: list[list[int]]) -> torch.Tensor:
    """Return an engine's log-probs (N, V) of the token after each of N prompts."""
    return torch.stack([engine.log_probs(prompt, None) for prompt in prompts])


def _note_peaks(report: Report, memory: GpuMemory) -> None:
    """Record the ranks' peak memory so far: of a host's processes together, and of a GPU. All ranks must call this."""
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    every = ranks.gather((socket.gethostname(), rss, memory.peaks))
    hosts: Counter[str] = Counter()
    for host, of_rank, _ in every:
        hosts[host] += of_rank
    peaks = {"host": max(hosts.values())} | {name: max(gpu[name] for *_, gpu in every) for name in memory.peaks}
    before = report.read().get("peaks", peaks)
    report.note(peaks={name: max(peak, before[name]) for name, peak in peaks.items()})


def convert(directory: ExperimentDir, engine: str, work: Path) -> None:
    """Run the third process: convert the last checkpoint, start an engine from it, compare it with the reloaded one."""
    from dvp.conversion import write_model

    report, experiment = Report(work), directory.experiment
    with report.asking("convert") as answer:
        started = time.time()
        weights = max((work / CHECKPOINTS).glob(f"{checkpoint.KEPT}*"))
        proof = write_model(weights, directory.base, work / MODEL, experiment.training.temperature)
        figures = {name: value for name, value in proof.items() if isinstance(value, int | float)}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        says = ", ".join(f"{name} {value:.3g}" for name, value in figures.items()) + f"; {peak / 1e9:.3g} GB of memory"
        answer(Verdict(True, says, figures | {"host": peak, "seconds": time.time() - started}))
    with report.asking("synchronise") as answer:
        asked, run = report.read()["asked"], chosen_run(experiment, engine)
        fresh = run_engine(experiment, run, work / MODEL, asked["max_model_len"])
        reloaded_NV, before_NV = (load_file(work / name)["log_probs"] for name in (RELOADED, BEFORE))
        answer(check_same_engine(reloaded_NV, next_tokens(fresh, asked["prompts"]), before_NV))


def evaluate(directory: ExperimentDir, engine: str, work: Path) -> None:
    """Run the fourth process: evaluate the converted model on a few problems of the report's task.

    The responses are sampled by the experiment's default sampler, whatever `engine` is.
    """
    from dvp.data.prompts import read_problems
    from dvp.evaluation.stage import sampling

    report, task = Report(work), directory.experiment.report.task
    with report.asking("evaluate") as answer:
        started = time.time()
        problems = read_problems(directory.data / "eval.parquet", task).head(EVALUATED)
        problems.to_parquet(work / "eval.parquet", index=False)
        scores = sampling(directory.experiment, [task], work / MODEL, work / "eval.parquet")(task, work)
        figures = {name: scores[name] for name in ("problems", "samples", "mean_response_tokens", "truncated_fraction")}
        says = f"{scores['samples']} samples of {scores['problems']} problems of {task}, graded and summarised"
        answer(Verdict(True, says, figures | {"seconds": time.time() - started}))
