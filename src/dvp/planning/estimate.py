"""What each job of an experiment costs on one kind of device: one formula, and the amounts of work to put into it.

    seconds = start + sampling + 2 FLOPs a parameter and token for each forward pass + bytes / disk or network

with the parts of it in dvp.planning.costs.
"""

from copy import copy
from dataclasses import dataclass

from dvp.errors import DvpError
from dvp.experiment.base import Architecture, PretrainedArchitecture, TrainedBase
from dvp.experiment.config import Experiment
from dvp.experiment.data import GeneratedSource, HubSource
from dvp.experiment.grid import GridPoint
from dvp.experiment.jobs import Job
from dvp.experiment.training import EngineConfig
from dvp.planning import costs
from dvp.planning.costs import Device, Lengths, Model

# What is assumed beyond `costs`; `Estimate.assumptions` puts it into words.
RESPONSE_SHARE = 0.5
"""Mean length of a response as a share of the longest."""
PROMPT_TOKENS, STORY_TOKENS = 150, 32
"""Mean length of a prompt, and of a generated one."""
DOWNLOAD, DISK = 1e8, 5e8
"""Bytes a second from the hub, and of reading, checking and writing files."""
PREPARE_SECONDS, PREPARE_HUB_SECONDS, REPORT_SECONDS = 30, 600, 60
BF16 = EngineConfig(dtype="bfloat16")
TEXT_BYTES = 4
"""Of a response's token, kept as text."""


@dataclass(frozen=True)
class Work:
    """What a job does beside its start."""

    sampled: tuple[float, float] = (0, 0)
    """Prompts, and responses to them."""
    engine: EngineConfig = BF16
    longest: int | None = None
    """Tokens of a response at most; None: as in training."""
    forward: float = 0
    """Responses that pass forward through the trainer's fp32 model; a backward pass counts as two."""
    other: float = 0
    """Seconds of anything else."""
    disk: float = 0
    """Bytes that it leaves."""


class Estimate:
    """Seconds and bytes of an experiment's jobs."""

    def __init__(self, experiment: Experiment, device: Device, response_tokens: float | None):
        """`response_tokens` is a response's mean length; None assumes half of the longest.

        Raises DvpError if the sizes of a pretrained base are not given.
        """
        self.experiment, self.device = experiment, device
        self.training = experiment.training
        self.model = _model(experiment)
        self._zero: dict = experiment.deepspeed["zero_optimization"]
        self._response_tokens = response_tokens
        generated = isinstance(experiment.sources[experiment.data.train], GeneratedSource)
        self._prompt_tokens = STORY_TOKENS if generated else PROMPT_TOKENS

    def of(self, point: GridPoint) -> "Estimate":
        """The same with the training settings of a grid point or a run."""
        own = copy(self)
        own.training = self.experiment.training_of(point)
        return own

    def lengths(self, longest: int | None = None) -> Lengths:
        """Of sequences whose responses have at most `longest` tokens, by default as in training."""
        longest = longest or self.training.max_response_tokens
        mean = RESPONSE_SHARE * longest if self._response_tokens is None else min(self._response_tokens, longest)
        return Lengths(self._prompt_tokens, mean, longest)

    def seconds(self, work: Work) -> float:
        """Of a job that does `work`, on one engine's GPUs."""
        lengths = self.lengths(work.longest)
        prompts, responses = work.sampled
        total = work.other
        if responses or work.forward:
            total += self.device.startup
        if responses:
            total += costs.sampling_seconds(
                self.model,
                work.engine,
                self.device,
                lengths,
                prompts=prompts,
                responses=responses,
                at_once=costs.PARALLEL_SAMPLES,
            )
        forward = self.model.forward_flops(lengths.sequence, lengths.sequence_squared)
        return total + self.device.compute_seconds(work.forward * forward, "float32")

    def step(self, engine: str) -> costs.StepSeconds:
        """Of a training step with this engine."""
        return costs.step_seconds(
            self.model,
            self.training,
            self.experiment.engines[engine],
            self.device,
            self.lengths(),
            zero_stage=self._zero["stage"],
            dtype=self.experiment.trainer_dtype,
        )

    def work(self, job: Job, problems: dict[str, int]) -> Work:
        """Of a job; `problems` are there by task."""
        experiment, model, stage = self.experiment, self.model, job.stage
        whole = costs.MASTER * model.parameters
        if stage == "prepare":
            used = (experiment.data.train, *experiment.data.evaluation)
            hub = any(isinstance(experiment.sources[name], HubSource) for name in used)
            return Work(other=PREPARE_HUB_SECONDS if hub else PREPARE_SECONDS)
        if stage == "base":
            if not isinstance(experiment.base, TrainedBase):
                downloaded = costs.BYTES["bfloat16"] * model.parameters
                return Work(other=downloaded / DOWNLOAD, disk=downloaded)
            warm = experiment.base.warm_start
            return Work(forward=3 * warm.steps * warm.batch_size, disk=whole)
        if stage == "preflight":  # four processes; three batches of the longest responses
            step = self.step(job.engine)
            return Work(other=4 * self.device.startup + 3 * step.rollout + 2 * step.synchronise)
        if stage == "train":
            steps, kept = self.training.steps * self.step(job.engine).total, len(experiment.evaluated_steps(job.run))
            checkpoints = self.training.keep_checkpoints * self.checkpoint_bytes
            return Work(other=self.device.startup + steps + kept * whole / DISK, disk=checkpoints + kept * whole)
        if stage == "convert":  # the checkpoint is checked; its weights read, written, read back, scored and hashed
            if job.run.step is not None:  # a run keeps the weights of its steps; the model is the same file
                return Work(other=self.device.startup + 4 * whole / DISK)
            return Work(other=self.device.startup + (self.checkpoint_bytes + 5 * whole) / DISK, disk=whole)
        if stage == "evaluate":
            settings = experiment.evaluation
            longest, count = settings.max_response_tokens, problems[job.task]
            responses = count * settings.samples_per_problem[job.task]
            text = responses * self.lengths(longest).response * TEXT_BYTES
            return Work((count, responses), experiment.engines[job.engine], longest, disk=text)
        if stage == "mismatch":  # the engine samples, the trainer scores three times
            settings = experiment.mismatch
            responses = settings.problems * settings.responses
            return Work((settings.problems, responses), forward=3 * responses)
        if stage == "bias":  # samples for every safe vocabulary; a gradient of each response for every estimator
            settings, estimators = experiment.bias, experiment.estimators
            batch = settings.problems * self.training.group_size
            sampled = len({rho for _, rho in estimators}) * settings.batches + settings.reference_batches
            passes = 1 + 2 * (len(settings.position_bins) + 1)
            forward = (passes * len(estimators) * settings.batches + 3 * settings.reference_batches) * batch
            oracles = sum(experiment.methods[method].true_norms for method, _ in estimators)
            tokens = self.lengths(self.training.max_response_tokens).response
            # The norm of each token's gradient takes a backward pass.
            forward += (1 + 2 * tokens) * (settings.norm_responses + oracles * settings.batches * batch)
            return Work((sampled * settings.problems, sampled * batch), forward=forward)
        return Work(other=REPORT_SECONDS)

    @property
    def checkpoint_bytes(self) -> int:
        return costs.checkpoint_bytes(self.model, self._zero["stage"])

    def update_memory(self) -> dict[str, float]:
        """Bytes on each GPU in an update, part by part."""
        experiment = self.experiment
        return costs.update_bytes(
            self.model,
            self.training,
            self._zero,
            prompt_tokens=self.training.max_prompt_tokens or self._prompt_tokens,
            dtype=experiment.trainer_dtype,
        )

    def rollout_memory(self, engine: str) -> dict[str, float]:
        """Bytes on each GPU in a rollout with this engine, and how many of the longest sequences its cache holds."""
        training, settings = self.training, self.experiment.engines[engine]
        longest = (training.max_prompt_tokens or self._prompt_tokens) + training.max_response_tokens
        return {
            "bytes": costs.state_bytes(self.model, training.ranks, self._zero["stage"])
            + settings.gpu_memory_utilization * self.device.memory
            + costs.RUNTIME,
            "cached_sequences": costs.cache_room(self.model, settings, self.device) / longest,
        }

    def assumptions(self) -> list[str]:
        """What the estimates rest on."""
        device, training, dtype = self.device, self.training, self.experiment.trainer_dtype
        lengths = self.lengths()
        link = device.link if training.nodes == 1 else device.network
        linked = f"; GPUs exchange {link / 1e9:.0f} GB/s each way while they compute" if training.ranks > 1 else ""
        return [
            f"{device.name}: {device.compute_utilisation:.0%} of {device.peak(dtype) / 1e12:g} TFLOP/s in the "
            f"trainer's {dtype}, {device.bandwidth_utilisation:.0%} of {device.bandwidth / 1e12:g} TB/s{linked}",
            f"{_millions(self.model.parameters)} parameters; for each, 2 FLOPs a token to score and "
            f"{8 if training.gradient_checkpointing else 6} to train, attention on top; no padding, and every response "
            "is trained on",
            f"prompts of {lengths.prompt:.0f} tokens, responses of {lengths.response:.0f} (at most {lengths.longest}), "
            "and in every batch one that is as long as can be",
            f"{device.launch * 1e3:g} ms a layer to launch the kernels of a decoding step"
            + (f"; {device.replay * 1e3:g} ms a step where an engine uses CUDA graphs" if device.replay else ""),
            f"{device.startup:.0f} s until a model is loaded; downloads at {DOWNLOAD / 1e6:.0f} MB/s, files at "
            f"{DISK / 1e6:.0f} MB/s; no failures, no queue",
        ]


def _model(experiment: Experiment) -> Model:
    base = experiment.base
    if isinstance(base, TrainedBase):
        return Model(**_shape(base.architecture), vocabulary_size=base.tokenizer.vocabulary_size)
    if base.architecture is None:
        raise DvpError(
            f"experiment '{experiment.name}': base.architecture: a plan needs the sizes of {base.path}, as its "
            "config.json has them; see config/experiments/paper_8b.yaml"
        )
    return Model(**_shape(base.architecture))


def _shape(architecture: Architecture | PretrainedArchitecture) -> dict:
    return architecture.model_dump(exclude={"max_position_embeddings"})


def _millions(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"
