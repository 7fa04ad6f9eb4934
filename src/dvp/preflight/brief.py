"""The experiment of a preflight: an ordinary one of two steps, on the longest prompts and responses.

Its loop is that of training; what differs is said by the methods that `FullLength` overrides. Rewards are made up, half
of them 1, and no correction rejects a response, so that all are trained on. The learning rate is at least 1e-4: every
weight then moves in each of Adam's first steps, so that a weight that was not handed to the engine is noticed.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dvp.core.batch import Rollout
from dvp.core.importance import ImportanceRule
from dvp.core.safe_vocabulary import SafeVocabulary
from dvp.experiment.config import Experiment
from dvp.experiment.grid import Run
from dvp.files import write_text
from dvp.rollout.engine import Completion, Sampling
from dvp.rollout.vllm import needs_processor
from dvp.training import ranks
from dvp.training.loop import Loop

LEARNING_RATE = 1e-4
STEPS = 2
WAIT = 120
"""Seconds after which a rank that received no stop signal continues."""


def chosen_run(experiment: Experiment, engine: str) -> Run:
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
    of_chosen = experiment.sides_of(chosen_run(experiment, engine))
    by_processor = experiment.training.sets_reported(of_chosen) or needs_processor(of_chosen.engine)
    every = dict.fromkeys(experiment.sides_of(run).engine for run in experiment.runs if run.engine == engine)
    return [rule for rule in every if rule is not None and (by_processor or not needs_processor(rule))]


def brief(experiment: Experiment) -> Experiment:
    """Return the experiment with two steps and methods without corrections."""
    training = experiment.training.model_copy(
        update={
            "steps": STEPS,
            "checkpoint_every": STEPS,
            "synchronise_every": 1,
            "warmup_steps": 0,
            "drift_every": None,
            "learning_rate": max(experiment.training.learning_rate, LEARNING_RATE),
        }
    )
    uncorrected = {"importance": ImportanceRule(), "mask": None}
    methods = {name: method.model_copy(update=uncorrected) for name, method in experiment.methods.items()}
    evaluation = experiment.evaluation.model_copy(update={"at": None})
    return experiment.model_copy(update={"training": training, "methods": methods, "evaluation": evaluation})


class FullLength(Loop):
    """A loop that trains on the longest prompts, with responses of the maximum length and made-up rewards."""

    def __init__(self, *parts: Any, waiting: Path | None = None):
        """Set up the loop as Loop does.

        waiting : a file that the rollout of the second step writes before it samples until a stop is requested, or
            until WAIT seconds are over if the engine has one rank; None: it does not wait.
        """
        super().__init__(*parts)
        self.memory = GpuMemory()
        self._waiting, self._waits = waiting, False

    def rows(self, step: int) -> list[int]:
        """Return the rows of the longest prompts, in every step the same."""
        lengths = [len(prompt) for prompt in self.problems.prompts]
        return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)[: self.config.prompts_per_step]

    def sample(self, step: int, rows: list[int]) -> list[list[Completion]]:
        """Sample as Loop.sample; earlier peaks of memory do not belong to the rollout."""
        self.memory.reset()
        if self._waiting is not None and step == STEPS:
            self._waits = True
            if ranks.is_main():
                write_text(self._waiting, "")
        return super().sample(step, rows)

    def generate(self, prompts: list[list[int]], sampling: Sampling, seeds: list[int]) -> list[list[Completion]]:
        """Sample responses of the maximum length."""
        sampling = replace(sampling, to_the_end=True)
        if self._waits:
            end = time.monotonic() + WAIT
            # A stop ends an engine of one rank during a call. Engines of several ranks must all make the same calls.
            while time.monotonic() < end if self.engine.ranks == 1 else not self.stop.requested():
                super().generate(prompts, sampling, seeds)
        return super().generate(prompts, sampling, seeds)

    def graded(self, rows: list[int], completions: list[list[Completion]]) -> Rollout:
        """Grade the responses, and reward every other one."""
        rollout = super().graded(rows, completions)
        return replace(rollout, rewards_B=(torch.arange(len(rollout.rewards_B)) + 1).remainder(2).float())

    def rest(self, step: int) -> None:
        """Record the memory of the rollout that ends."""
        self.memory.record("rollout")
        super().rest(step)

    def synchronise(self) -> None:
        """Record the memory of the update that ends."""
        self.memory.record("update")
        super().synchronise()


class GpuMemory:
    """Peak bytes of this rank's GPU by phase, and the GPU's size (`gpu_total`); 0 on a CPU."""

    def __init__(self):
        """Begin with no phase."""
        self.peaks = {"update": 0, "rollout": 0, "gpu_total": 0}

    def reset(self) -> None:
        """Begin a phase."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def record(self, phase: str) -> None:
        """Record the phase that ends, and begin the next: what is in use now plus what tensors took above it.

        Blocks that torch only caches are not counted: it frees them before it runs out of memory.
        """
        if torch.cuda.is_available():
            # torch does not see what an engine maps and unmaps; it is part of what is in use now.
            freed = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
            self.reset()
            free, total = torch.cuda.mem_get_info()
            self.peaks |= {phase: max(self.peaks[phase], total - free + freed), "gpu_total": total}
