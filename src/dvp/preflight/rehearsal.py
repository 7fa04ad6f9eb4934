"""Processes of a preflight: two steps of the real training loop under the worst case, then conversion and evaluation.

The loop is that of training with four changes. Prompts are the longest ones, and every response has the maximum length.
Rewards are made up, half of them 1. No correction rejects a response, so that all are trained on. A step trains on two
micro-batches per rank, while the engines sample as many responses as in training. The learning rate is at least 1e-4:
every weight then moves in each of Adam's first steps, so that a weight that was not handed to the engine is noticed.
"""

import resource
import socket
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dvp.core.importance import ImportanceRule
from dvp.core.safe_vocabulary import SafeVocabulary
from dvp.errors import Stopped
from dvp.experiment.config import Experiment
from dvp.experiment.folder import ExperimentDir
from dvp.experiment.grid import Run
from dvp.files import read_json, sha256_file, write_text
from dvp.preflight.checks import (
    POSITIONS,
    check_compilers,
    check_forward,
    check_mismatch,
    check_same_engine,
)
from dvp.preflight.report import SAMPLING, Report, Verdict, check_steps
from dvp.rollout.engine import Completion, Engine, Sampling
from dvp.rollout.vllm import needs_processor, prove_safe_vocabulary
from dvp.training import checkpoint, ranks
from dvp.training.agreement import compare, shortest
from dvp.training.backend import TAG
from dvp.training.loop import Loop, run_loop
from dvp.training.stage import run_engine, set_up
from dvp.training.stopping import StopRequest

LEARNING_RATE = 1e-4
STEPS = 2
WAIT = 120
"""Seconds after which a rank that received no stop signal continues."""
CHECKPOINTS, AGAIN = "checkpoints", "again"
MODEL = "model"
EVALUATED = 4
"""Number of evaluation problems."""
BEFORE, RELOADED = "before.safetensors", "reloaded.safetensors"
ANSWER = "7"


def rehearsed_run(experiment: Experiment, engine: str) -> Run:
    """Select the run of an engine that the preflight trains: the first of those that need most of the engine.

    The order is: a run that replays kept sets, one whose kept sets are reported, one with a safe vocabulary, any run.
    """

    def asks(run: Run) -> tuple[bool, bool, bool]:
        safe = experiment.sides_of(run)
        pruned = experiment.methods[run.method].safe_vocabulary is not None
        return safe.replayed, experiment.training.sets_reported(safe), pruned

    return max((run for run in experiment.runs if run.engine == engine), key=asks)


def rules(experiment: Experiment, engine: str) -> list[SafeVocabulary]:
    """List the distinct safe vocabularies of an engine's runs that it can apply when started for the preflight's run.

    The others are checked when their own run starts, as all are.
    """
    of_rehearsed = experiment.sides_of(rehearsed_run(experiment, engine))
    by_processor = experiment.training.sets_reported(of_rehearsed) or needs_processor(of_rehearsed.engine)
    every = dict.fromkeys(experiment.sides_of(run).engine for run in experiment.runs if run.engine == engine)
    return [rule for rule in every if rule is not None and (by_processor or not needs_processor(rule))]


def rehearsed(experiment: Experiment) -> Experiment:
    """Return the experiment with the preflight's settings, from which engine and trainer are built as for training."""
    training = experiment.training.model_copy(
        update={
            "steps": STEPS,
            "checkpoint_every": STEPS,
            "synchronise_every": 1,
            "warmup_steps": 0,
            "learning_rate": max(experiment.training.learning_rate, LEARNING_RATE),
        }
    )
    evaluation = experiment.evaluation.model_copy(update={"at": None})
    return experiment.model_copy(update={"training": training, "evaluation": evaluation})


class LongestResponses:
    """Engine whose responses all have the maximum length; every other one states the correct answer.

    It samples as many responses as in a step of training, and returns only as many as were asked for.
    """

    def __init__(self, engine: Engine, responses: int, stop: StopRequest, waiting: Path | None):
        """Wrap an engine.

        responses : number of responses that one engine samples in a step of training.
        stop : the loop's stop request.
        waiting : a file that the second call of `generate` writes before it samples until a stop is requested, or until
            WAIT seconds are over if the engine has one rank; None: it does not wait.
        """
        self.engine, self.stop = engine, stop
        self._responses, self._waiting = responses, waiting
        self._calls = 0
        self.tokens = 0
        """Number of tokens that this engine sampled in its last complete call."""
        self._asleep = False
        self.gpu = {"update": 0, "rollout": 0, "gpu_total": 0}
        """Peak bytes of this rank's GPU by phase, and the GPU's size; 0 on a CPU."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # earlier peaks do not belong to training

    def generate(self, prompts: list[list[int]], sampling: Sampling, seeds: list[int]) -> list[list[Completion]]:
        """Sample responses of maximum length and return as many as Engine.generate does, their texts made up."""
        self._calls += 1
        if self._waiting is not None and self._calls == 2:
            if ranks.is_main():
                write_text(self._waiting, "")
            end = time.monotonic() + WAIT
            # A stop ends an engine of one rank during a call. Engines of several ranks must all make the same calls.
            while time.monotonic() < end if self.ranks == 1 else not self.stop.requested():
                self._generate(prompts, sampling, seeds)
        return self._generate(prompts, sampling, seeds)

    def _generate(self, prompts: list[list[int]], sampling: Sampling, seeds: list[int]) -> list[list[Completion]]:
        copies = max(1, self._responses // (len(prompts) * sampling.n))
        groups = self.engine.generate(
            prompts * copies,
            replace(sampling, to_the_end=True),
            [seed + copy * 2**40 for copy in range(copies) for seed in seeds],
        )
        self.tokens = sum(len(completion.token_ids) for group in groups for completion in group)
        return [
            [
                replace(completion, text=f"Answer: {int(ANSWER) + index % 2}", finish_reason="stop")
                for index, completion in enumerate(group)
            ]
            for group in groups[: len(prompts)]
        ]

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)  # everything else comes from the wrapped engine

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load weights as Engine.load_weights does, and record the peak memory of the phase that ends."""
        # The first weights come before any rollout, while the engine is awake with its cache in memory.
        self._see("update" if self._asleep else "rollout")
        self._asleep = False
        self.engine.load_weights(weights)

    def sleep(self, *, keep_weights: bool) -> None:
        """Free GPU memory as Engine.sleep does, and record the peak memory of the rollout."""
        self._see("rollout")
        self.engine.sleep(keep_weights=keep_weights)
        self._asleep = True

    def _see(self, phase: str) -> None:
        """Record the peak GPU memory of the phase that ends: what is in use now plus what tensors took above it.

        Blocks that torch only caches are not counted: it frees them before it runs out of memory.
        """
        if torch.cuda.is_available():
            # torch does not see what an engine maps and unmaps; it is part of what is in use now.
            freed = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            free, total = torch.cuda.mem_get_info()
            self.gpu |= {phase: max(self.gpu[phase], total - free + freed), "gpu_total": total}


def rehearse(loop: Loop, waiting: Path | None) -> LongestResponses:
    """Change a training loop into that of a preflight, as this module describes; return its wrapped engine.

    waiting : see LongestResponses.
    """
    config, engines = loop.config, ranks.count() // loop.engine.ranks
    forced = LongestResponses(loop.engine, config.prompts_per_step * config.group_size // engines, loop.stop, waiting)
    loop.engine = forced
    every = loop.problems.prompts
    count = max(2, engines)
    rows = sorted(range(len(every)), key=lambda row: len(every[row]), reverse=True)[:count]
    loop.ids = [loop.ids[row] for row in rows]
    loop.problems = replace(
        loop.problems,
        places=[loop.problems.places[row] for row in rows],
        answers=[ANSWER] * len(rows),
        prompts=[every[row] for row in rows],
    )
    loop.importance, loop.mask = ImportanceRule(), None
    longest = len(loop.problems.prompts[0]) + config.max_response_tokens
    trained = 2 * ranks.count() * max(1, config.tokens_per_micro_batch // longest)
    batch = {"prompts_per_step": count, "group_size": max(2, trained // count), "minibatches": 1}
    loop.config = config.model_copy(update=batch)
    return forced


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
    run = rehearsed_run(experiment, engine)
    started = time.time()
    with report.asking("start") as answer:
        check_compilers()
        loop, _ = set_up(directory, run)
        figures = {"seconds": time.time() - started, "ranks": experiment.training.ranks}
        says = f"trainer and engine work after {figures['seconds']:.0f} s; ranks: {figures['ranks']}"
        answer(Verdict(True, says, figures))
    check_engine(loop, experiment, engine, report, work)
    forced = rehearse(loop, work / SAMPLING)
    with report.asking("steps"):
        try:
            run_loop(loop, work, work / CHECKPOINTS, lambda row: None)
        except Stopped:
            _note_peaks(report, forced)
            raise


def resume(directory: ExperimentDir, engine: str, work: Path) -> None:
    """Run the second process group: resume from the checkpoint, check that it is what was saved, take the last step."""
    report = Report(work)
    with report.asking("resume") as answer:
        loop, _ = set_up(directory, rehearsed_run(directory.experiment, engine))
        path, _ = checkpoint.restore(work / CHECKPOINTS, loop.trainer)
        answer(_same_when_saved_again(loop, path, work / AGAIN))
    prompts = shortest(loop.problems.prompts)
    forced = rehearse(loop, None)
    with report.asking("steps") as answer:
        _, rows = run_loop(loop, work, work / CHECKPOINTS, lambda row: None)
        answer(check_steps(rows, loop.config.max_response_tokens))
    _note_peaks(report, forced)
    responses = int(loop.config.prompts_per_step * loop.config.group_size)
    trained = responses * loop.config.max_response_tokens
    sampled = sum(ranks.gather(forced.tokens)[:: forced.ranks])
    last = rows[-1]  # the first step also measures the trainer's own noise
    report.note(
        seconds={
            "rollout_token": last["seconds_rollout"] / sampled,
            "update_token": last["seconds_update"] / trained,
            "synchronise": last["seconds_sync"],
        }
    )
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


def _note_peaks(report: Report, forced: LongestResponses) -> None:
    """Record the ranks' peak memory so far: of a host's processes together, and of a GPU. All ranks must call this."""
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    every = ranks.gather((socket.gethostname(), rss, forced.gpu))
    hosts: Counter[str] = Counter()
    for host, of_rank, _ in every:
        hosts[host] += of_rank
    peaks = {"host": max(hosts.values())} | {name: max(gpu[name] for *_, gpu in every) for name in forced.gpu}
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
        asked, run = report.read()["asked"], rehearsed_run(experiment, engine)
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
