"""Cost of each job of an experiment on one kind of device: its amount of work, put into the roofline of costs.py."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from dvp.errors import DvpError
from dvp.experiment.base import LocalBase, TrainedBase, stored_sizes
from dvp.experiment.config import Experiment
from dvp.experiment.data import GeneratedSource, HubSource
from dvp.experiment.grid import GridPoint
from dvp.experiment.jobs import Job
from dvp.experiment.training import KEEP_CHECKPOINTS, EngineConfig
from dvp.planning import costs
from dvp.planning.costs import Device, Lengths, Model

# Assumptions beyond those of `costs`; `Estimate.assumptions` puts them into words.
RESPONSE_SHARE = 0.5
"""Mean length of a response as a share of the longest."""
PROMPT_TOKENS, STORY_TOKENS = 150, 32
"""Mean length of a prompt, and of a generated one."""
DOWNLOAD, DISK = 1e8, 5e8
"""Bytes per second of a download from the hub, and of reading, checking and writing files."""
PREPARE_SECONDS, PREPARE_HUB_SECONDS, REPORT_SECONDS = 30, 600, 60
USEFUL = 0.6
"""Share of the responses that an update trains on; the others are rejected, or their group has equal rewards."""
RESTART = 24 * 3600
"""Seconds after which a scheduler ends a training job, which writes its last step and resumes in another job."""
BF16 = EngineConfig(dtype="bfloat16")
TEXT_BYTES = 4
"""Bytes of text per token."""


def _sizes(experiment: Experiment) -> dict[str, Any]:
    """Return the sizes of the base model: the experiment's, or else those in a local model's config.json.

    Raises DvpError if a size is not given.
    """
    base = experiment.base
    sizes = base.architecture.model_dump() if base.architecture else {}
    if not sizes and isinstance(base, LocalBase):
        sizes = stored_sizes(Path(base.path))
    sizes.pop("max_position_embeddings", None)
    if missing := [key for key, value in sizes.items() if value is None] or ([] if sizes else ["sizes"]):
        raise DvpError(
            f"experiment '{experiment.name}': base.architecture: a plan needs {missing[0]} of {base.path}, as its "
            "config.json has them; see config/experiments/paper/paper_8b.yaml"
        )
    return sizes


class Estimate:
    """Estimates of the seconds and bytes of an experiment's jobs on one kind of device."""

    def __init__(
        self,
        experiment: Experiment,
        device: Device,
        response_tokens: float | None = None,
        point: GridPoint | None = None,
    ):
        """Prepare the estimates of an experiment.

        response_tokens : mean length of a response; None: half of the longest.
        point : grid point whose training settings are used; None: those of the section `training`.
        Raises DvpError if the sizes of a pretrained base are not given.
        """
        self.experiment, self.device, self.response_tokens = experiment, device, response_tokens
        self.training = experiment.training_of(point) if point else experiment.training
        base = experiment.base
        sizes = _sizes(experiment)
        made = {"vocabulary_size": base.tokenizer.vocabulary_size} if isinstance(base, TrainedBase) else {}
        self.model = Model(**sizes, **made)
        self._zero: dict = experiment.deepspeed["zero_optimization"]
        self.checkpoint_bytes = costs.checkpoint_bytes(self.model, self._zero["stage"])
        generated = isinstance(experiment.sources[experiment.data.train], GeneratedSource)
        examples = len(experiment.data.prompt_template.replace("{problem}", "")) // TEXT_BYTES
        self._prompt_tokens = STORY_TOKENS + examples if generated else PROMPT_TOKENS

    def lengths(self, longest: int | None = None) -> Lengths:
        """Return the lengths of sequences whose responses have at most `longest` tokens, by default as in training."""
        longest = longest or self.training.max_response_tokens
        mean = RESPONSE_SHARE * longest if self.response_tokens is None else min(self.response_tokens, longest)
        return Lengths(self._prompt_tokens, mean, longest)

    def step(self, engine: str, *, longest: bool = False) -> dict[str, float]:
        """Return the seconds of a training step with this engine, by part (costs.step_seconds).

        longest : whether all responses have the maximum length and are trained on.
        """
        zero, dtype, lengths = self._zero["stage"], self.experiment.trainer_dtype, self.lengths()
        if longest:
            lengths = replace(lengths, response=lengths.longest)
        return costs.step_seconds(
            self.model,
            self.training,
            self.experiment.engines[engine],
            self.device,
            lengths,
            zero,
            dtype,
            useful=1.0 if longest else USEFUL,
        )

    def train_seconds(self, step: float) -> float:
        """Return the seconds of a run whose steps take `step` seconds: start, steps, checkpoints, restarts."""
        training, written = self.training, self.checkpoint_bytes / DISK
        working = training.steps * step + math.ceil(training.steps / training.checkpoint_every) * written
        return self.device.startup + working + working // RESTART * (self.device.startup + 2 * written)

    def _sample(self, prompts: int, responses: int, engine: EngineConfig = BF16, longest: int | None = None) -> float:
        lengths = self.lengths(longest)
        return costs.sampling_seconds(
            self.model, engine, self.device, lengths, prompts, responses, costs.PARALLEL_SAMPLES
        )

    def _forward(self, responses: float) -> float:
        """Return the seconds of forward passes of so many responses through the trainer's fp32 model.

        A backward pass counts as two forward passes.
        """
        lengths = self.lengths()
        flops = self.model.forward_flops(lengths.sequence, lengths.sequence_squared)
        return self.device.compute_seconds(responses * flops, "float32", self.model.parameters)

    def job(self, job: Job, problems: dict[str, int]) -> tuple[float, float]:
        """Return the seconds that a job takes and the bytes that it leaves on disk.

        problems : number of evaluation problems by task.
        """
        experiment, start, whole = self.experiment, self.device.startup, costs.MASTER * self.model.parameters
        match job.stage:
            case "prepare":
                used = (experiment.data.train, *experiment.data.evaluation)
                hub = any(isinstance(experiment.sources[name], HubSource) for name in used)
                return PREPARE_HUB_SECONDS if hub else PREPARE_SECONDS, 0
            case "base" if isinstance(experiment.base, TrainedBase):
                warm = experiment.base.warm_start
                return start + self._forward(3 * warm.steps * warm.batch_size), whole
            case "base":
                downloaded = costs.BYTES["bfloat16"] * self.model.parameters
                return downloaded / DOWNLOAD, downloaded
            case "preflight":  # four processes sample three batches of the longest responses and train on two
                step = self.step(job.engine, longest=True)
                return 4 * start + 3 * step["rollout"] + 2 * (step["update"] + step["synchronise"]), 0
            case "train":
                kept = len(experiment.evaluated_steps(job.run)) * whole
                seconds = self.train_seconds(sum(self.step(job.engine).values())) + kept / DISK
                return seconds, KEEP_CHECKPOINTS * self.checkpoint_bytes + kept
            case "convert" if job.run.step is None:  # the checkpoint is checked; its weights are handled five times
                return start + (self.checkpoint_bytes + 5 * whole) / DISK, whole
            case "convert":  # the run has kept the weights of this step; the model hard-links them
                return start + 4 * whole / DISK, 0
            case "evaluate":
                longest, count = experiment.evaluation.max_response_tokens, problems[job.task]
                responses = count * experiment.evaluation.samples_per_problem[job.task]
                seconds = start + self._sample(count, responses, experiment.engines[job.engine], longest)
                return seconds, responses * self.lengths(longest).response * TEXT_BYTES
            case "mismatch":  # the engine samples, the trainer scores three times
                count = experiment.mismatch.problems
                responses = count * experiment.mismatch.responses
                return start + self._sample(count, responses) + self._forward(3 * responses), 0
            case "bias":  # samples for every safe vocabulary; a gradient of each response for every estimator
                settings, estimators = experiment.bias, experiment.estimators
                batch = settings.problems * self.training.group_size
                sampled = len({rho for _, rho in estimators}) * settings.batches + settings.reference_batches
                passes = 1 + 2 * (len(settings.position_bins) + 1)
                forward = (passes * len(estimators) * settings.batches + 3 * settings.reference_batches) * batch
                oracles = sum(experiment.methods[method].true_norms for method, _ in estimators)
                # The norm of each token's gradient takes one backward pass.
                norms = settings.norm_responses + oracles * settings.batches * batch
                forward += (1 + 2 * self.lengths().response) * norms
                return start + self._sample(sampled * settings.problems, sampled * batch) + self._forward(forward), 0
        return REPORT_SECONDS, 0

    def update_memory(self) -> dict[str, float]:
        """Return an upper bound on the bytes on each GPU in an update, by part (costs.update_bytes)."""
        prompt = self.training.max_prompt_tokens or self._prompt_tokens
        return costs.update_bytes(self.model, self.training, self._zero, prompt, self.experiment.trainer_dtype)

    def rollout_memory(self, engine: str) -> dict[str, float]:
        """Return an upper bound on each GPU's bytes in a rollout, and how many longest sequences its cache holds."""
        training, settings = self.training, self.experiment.engines[engine]
        longest = (training.max_prompt_tokens or self._prompt_tokens) + training.max_response_tokens
        state = costs.state_bytes(self.model, training.ranks, self._zero["stage"])
        return {
            "bytes": state + settings.gpu_memory_utilization * self.device.memory + costs.RUNTIME,
            "cached_sequences": costs.cache_room(self.model, settings, self.device) / longest,
        }

    def assumptions(self) -> list[str]:
        """Describe the assumptions of the estimates, one sentence each."""
        device, training, dtype = self.device, self.training, self.experiment.trainer_dtype
        lengths, count = self.lengths(), self.model.parameters
        link = device.link if training.nodes == 1 else device.network
        linked = f"; GPUs exchange {link / 1e9:.0f} GB/s each way while they compute" if training.ranks > 1 else ""
        return [
            f"{device.name}: {device.utilisation(count):.0%} of {device.peak(dtype) / 1e12:g} TFLOP/s in the "
            f"trainer's {dtype}, {device.bandwidth_utilisation:.0%} of {device.bandwidth / 1e12:g} TB/s (data "
            f"sheet){linked}",
            f"{f'{count / 1e9:.3g} billion' if count >= 1e9 else f'{count / 1e6:.3g} million'} parameters; for each, 2 "
            f"FLOPs a token to score and {8 if training.gradient_checkpointing else 6} to train, attention on top; no "
            f"padding; {USEFUL:.0%} of the responses have a weight and are trained on",
            f"prompts of {lengths.prompt:.0f} tokens, responses of {lengths.response:.0f} (at most {lengths.longest}), "
            "and in every batch one that is as long as can be",
            f"{device.launch * 1e3:g} ms a layer to launch the kernels of a decoding step"
            + (f"; {device.replay * 1e3:g} ms a step where an engine uses CUDA graphs" if device.replay else ""),
            f"{device.startup:.0f} s until a model is loaded; downloads at {DOWNLOAD / 1e6:.0f} MB/s, files at "
            f"{DISK / 1e6:.0f} MB/s, checkpoints while training waits; a restart every {RESTART / 3600:.0f} h of a "
            "run; no failures, no queue",
        ]
