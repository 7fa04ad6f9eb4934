"""What the ranks do in a preflight: the loop of a training run itself, with two steps, all of them worst cases.

The loop is the real one with four changes: prompts are the longest ones, and every response is as long as it may be;
rewards are made up, half of them 1; no correction rejects a response, so that every one is trained on; and a step
trains on two micro-batches a rank, while the engines sample as many responses as in training. The learning rate is at
least 1e-4, by which every weight moves in each of Adam's first steps: a weight that was not handed over is seen.
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
"""Seconds after which a rank that was not told to stop goes on."""
CHECKPOINTS, AGAIN = "checkpoints", "again"
MODEL = "model"
EVALUATED = 4
"""Problems."""
BEFORE, RELOADED = "before.safetensors", "reloaded.safetensors"
ANSWER = "7"


def rehearsed_run(experiment: Experiment, engine: str) -> Run:
    """The run that is rehearsed for an engine.

    That is its first one that replays sets, as it asks most of the engine; else its first one whose sets are reported,
    else its first one with a safe vocabulary, else its first.
    """

    def asks(run: Run) -> tuple[bool, bool, bool]:
        safe = experiment.sides_of(run)
        pruned = experiment.methods[run.method].safe_vocabulary is not None
        return safe.replayed, experiment.training.sets_reported(safe), pruned

    return max((run for run in experiment.runs if run.engine == engine), key=asks)


def rules(experiment: Experiment, engine: str) -> list[SafeVocabulary]:
    """The safe vocabularies of runs with this engine that it can apply as the rehearsed run has it started.

    Any other is proved when its run starts, as each is.
    """
    of_rehearsed = experiment.sides_of(rehearsed_run(experiment, engine))
    by_processor = experiment.training.sets_reported(of_rehearsed) or needs_processor(of_rehearsed.engine)
    every = dict.fromkeys(experiment.sides_of(run).engine for run in experiment.runs if run.engine == engine)
    return [rule for rule in every if rule is not None and (by_processor or not needs_processor(rule))]


def rehearsed(experiment: Experiment) -> Experiment:
    """The experiment with the settings of the rehearsal; engine and trainer are built from them as for training."""
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
    """An engine whose responses are all as long as a response may be; every other one states the right answer.

    It samples as many responses as training would ask it for, and gives those that were asked for now.
    """

    def __init__(self, engine: Engine, responses: int, stop: StopRequest, waiting: Path | None):
        """responses : that one engine samples in a step of training.
        stop, waiting : if given a file, the second call writes it and samples until it is told to stop.
        """
        self.engine, self.stop = engine, stop
        self._responses, self._waiting = responses, waiting
        self._calls = 0
        self.tokens = 0
        """Sampled by this engine in its last whole call."""
        self._asleep = False
        self.gpu = {"update": 0, "rollout": 0, "gpu_total": 0}
        """Bytes of this rank's GPU that a phase needs, the largest seen; 0 on a CPU."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # what was before is none of training

    def generate(self, prompts: list[list[int]], sampling: Sampling, seeds: list[int]) -> list[list[Completion]]:
        """See Engine.generate."""
        self._calls += 1
        if self._waiting is not None and self._calls == 2:
            if ranks.is_main():
                write_text(self._waiting, "")
            end = time.monotonic() + WAIT
            # The signal ends an engine of one rank in the midst of this; the ranks of another one make the same calls.
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
        return getattr(self.engine, name)  # all else is the engine's own

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See Engine.load_weights."""
        # The first weights come before any rollout, when an engine is still awake, its cache in memory.
        self._see("update" if self._asleep else "rollout")
        self._asleep = False
        self.engine.load_weights(weights)

    def sleep(self, *, keep_weights: bool) -> None:
        """See Engine.sleep."""
        self._see("rollout")
        self.engine.sleep(keep_weights=keep_weights)
        self._asleep = True

    def _see(self, phase: str) -> None:
        """Note what the phase that ends here needed: what is held now, and what its tensors took on top at their most.

        Blocks that torch only caches are left out: it gives them back before it runs out of memory.
        """
        if torch.cuda.is_available():
            # What an engine maps and unmaps is in both, as torch does not hear of it.
            freed = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            free, total = torch.cuda.mem_get_info()
            self.gpu |= {phase: max(self.gpu[phase], total - free + freed), "gpu_total": total}


def rehearse(loop: Loop, waiting: Path | None) -> LongestResponses:
    """Change a loop as this module's first lines say."""
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
    """Trainer and engine side by side, before any step. Raises DvpError with the check that fails."""
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
        torch.cuda.empty_cache()  # what training would not have taken
    ranks.gather(None)


def train(directory: ExperimentDir, engine: str, work: Path) -> None:
    """The first process group: start, compare, one step; SIGTERM arrives in the second, and it saves and leaves.

    directory : with the rehearsed experiment.
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
    """The second process group: goes on from the checkpoint, proves that it is what was saved, takes the last step."""
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
    last = rows[-1]  # the first one also measures the trainer's noise
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
    """Save what was loaded: the same bytes, or something was not restored."""
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
    """Log-probs (N, V) of the token after each prompt."""
    return torch.stack([engine.log_probs(prompt, None) for prompt in prompts])


def _note_peaks(report: Report, forced: LongestResponses) -> None:
    """The largest memory of the ranks so far: of a host's processes together, and of a GPU. By all ranks."""
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    every = ranks.gather((socket.gethostname(), rss, forced.gpu))
    hosts: Counter[str] = Counter()
    for host, of_rank, _ in every:
        hosts[host] += of_rank
    peaks = {"host": max(hosts.values())} | {name: max(gpu[name] for *_, gpu in every) for name in forced.gpu}
    before = report.read().get("peaks", peaks)
    report.note(peaks={name: max(peak, before[name]) for name, peak in peaks.items()})


def convert(directory: ExperimentDir, engine: str, work: Path) -> None:
    """The third process: the last checkpoint as a model, and an engine that is started from it."""
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
    """The fourth process: a few problems of the report's task, by the model that was converted, whatever the engine."""
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
