"""An experiment as `costs` sees it: its model, its lengths and its stages, on one kind of device."""

from dvp.errors import DvpError
from dvp.experiment.config import EngineConfig, Experiment, GeneratedSource, HubSource, TrainedBase
from dvp.planning import costs
from dvp.planning.costs import Device, Lengths, Model

# What is assumed beyond `costs`; `Estimate.assumptions` puts it into words.
RESPONSE_SHARE = 0.5
"""Mean length of a response as a share of the longest."""
PROMPT_TOKENS, STORY_TOKENS = 150, 32
"""Mean length of a prompt, and of a generated one."""
DOWNLOAD = 1e8
DISK = 5e8
"""Bytes a second, of reading and checking as well as of writing."""
PREPARE_SECONDS, PREPARE_HUB_SECONDS, REPORT_SECONDS = 30, 600, 60
TEXT_BYTES = 4
"""Of a response's token, kept as text."""


class Estimate:
    """Seconds and bytes of each stage."""

    def __init__(self, experiment: Experiment, device: Device, response_tokens: float | None):
        """`response_tokens` is a response's mean length; None assumes half of the longest.

        Raises DvpError if the sizes of a pretrained base are not given.
        """
        self.experiment, self.device = experiment, device
        self.model = _model(experiment)
        self._zero_stage: int = experiment.deepspeed["zero_optimization"]["stage"]
        self._response_tokens = response_tokens
        generated = isinstance(experiment.sources[experiment.data.train], GeneratedSource)
        self._prompt_tokens = STORY_TOKENS if generated else PROMPT_TOKENS

    def lengths(self, longest: int) -> Lengths:
        """Of sequences whose responses have at most `longest` tokens."""
        mean = RESPONSE_SHARE * longest if self._response_tokens is None else min(self._response_tokens, longest)
        return Lengths(self._prompt_tokens, mean, longest)

    # --- seconds ---

    def prepare(self) -> float:
        data = self.experiment.data
        sources = [self.experiment.sources[name] for name in (data.train, *data.evaluation)]
        return PREPARE_HUB_SECONDS if any(isinstance(one, HubSource) for one in sources) else PREPARE_SECONDS

    def base(self) -> float:
        """Of the warm start, or of the download in bf16."""
        base = self.experiment.base
        if not isinstance(base, TrainedBase):
            return self.base_bytes / DOWNLOAD
        lengths = self.lengths(self.experiment.training.max_response_tokens)
        forward = self.model.forward_flops(lengths.sequence, lengths.sequence_squared)
        documents = base.warm_start.steps * base.warm_start.batch_size
        return self.device.startup + self.device.compute_seconds(3 * documents * forward, "float32")

    def step(self, engine: str) -> costs.StepSeconds:
        """Of a training step with this engine."""
        training = self.experiment.training
        return costs.step_seconds(
            self.model,
            training,
            self.experiment.engines[engine],
            self.device,
            self.lengths(training.max_response_tokens),
            zero_stage=self._zero_stage,
            dtype=self.experiment.trainer_dtype,
        )

    def convert(self) -> float:
        """The checkpoint is verified and read; the base is read, the model written, read and checked."""
        return self.device.startup + (2 * self.checkpoint_bytes + 4 * self.model_bytes) / DISK

    def evaluate(self, problems: int, samples: int) -> float:
        """Of `samples` responses to each problem."""
        settings = self.experiment.evaluation
        return self.device.startup + costs.sampling_seconds(
            self.model,
            self.experiment.engines[settings.engine],
            self.device,
            self.lengths(settings.max_response_tokens),
            prompts=problems,
            responses=problems * samples,
            at_once=costs.PARALLEL_SAMPLES,
        )

    def mismatch(self) -> float:
        """One measurement: the engine samples, the trainer scores three times."""
        settings = self.experiment.mismatch
        responses = settings.problems * settings.responses
        return self.device.startup + self._sample(settings.problems, responses) + 3 * self._forward(responses)

    def bias(self) -> float:
        """One measurement: samples for every safe vocabulary, and a gradient of each response for every estimator."""
        settings, group = self.experiment.bias, self.experiment.training.group_size
        estimators = self.experiment.estimators
        sampled = len({rho for _, rho in estimators}) * settings.batches + settings.reference_batches
        gradients = len(estimators) * settings.batches + settings.reference_batches
        problems, responses = sampled * settings.problems, sampled * settings.problems * group
        scored = gradients * settings.problems * group
        return self.device.startup + self._sample(problems, responses) + 3 * self._forward(scored)

    def _sample(self, prompts: int, responses: int) -> float:
        training = self.experiment.training
        return costs.sampling_seconds(
            self.model,
            EngineConfig(dtype="bfloat16"),
            self.device,
            self.lengths(training.max_response_tokens),
            prompts=prompts,
            responses=responses,
            at_once=costs.PARALLEL_SAMPLES,
        )

    def _forward(self, responses: int) -> float:
        lengths = self.lengths(self.experiment.training.max_response_tokens)
        forward = self.model.forward_flops(lengths.sequence, lengths.sequence_squared)
        return self.device.compute_seconds(responses * forward, "float32")

    def report(self) -> float:
        return REPORT_SECONDS

    # --- bytes ---

    @property
    def base_bytes(self) -> int:
        made = isinstance(self.experiment.base, TrainedBase)
        return self.model_bytes if made else costs.BYTES["bfloat16"] * self.model.parameters

    @property
    def checkpoint_bytes(self) -> int:
        return costs.checkpoint_bytes(self.model, self._zero_stage)

    @property
    def model_bytes(self) -> int:
        """Of a converted model."""
        return costs.MASTER * self.model.parameters

    def samples_bytes(self, problems: int, samples: int) -> float:
        longest = self.experiment.evaluation.max_response_tokens
        return problems * samples * self.lengths(longest).response * TEXT_BYTES

    def memory(self, engine: str) -> dict[str, float]:
        """Bytes on each GPU that trains with this engine, and how many of the longest sequences its cache holds."""
        training, settings = self.experiment.training, self.experiment.engines[engine]
        prompt = training.max_prompt_tokens or self._prompt_tokens
        longest = prompt + training.max_response_tokens
        return {
            "states": costs.state_bytes(self.model, training.ranks, self._zero_stage),
            "activations": costs.activation_bytes(self.model, training, prompt, self.experiment.trainer_dtype),
            "engine": settings.gpu_memory_utilization * self.device.memory,
            "cached_sequences": costs.cache_room(self.model, settings, self.device) / longest,
        }

    def assumptions(self) -> list[str]:
        """What the estimates rest on."""
        device, training, dtype = self.device, self.experiment.training, self.experiment.trainer_dtype
        lengths = self.lengths(training.max_response_tokens)
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
            f"{device.launch * 1e3:g} ms a layer to launch the kernels of a decoding step, as vLLM runs without CUDA "
            "graphs",
            f"{device.startup:.0f} s until a model is loaded; downloads at {DOWNLOAD / 1e6:.0f} MB/s, files at "
            f"{DISK / 1e6:.0f} MB/s; no failures, no queue",
        ]


def _model(experiment: Experiment) -> Model:
    base = experiment.base
    if isinstance(base, TrainedBase):
        made = base.architecture.model_dump(exclude={"max_position_embeddings"})
        return Model(**made, vocabulary_size=base.tokenizer.vocabulary_size)
    if base.architecture is None:
        raise DvpError(
            f"experiment '{experiment.name}': base.architecture: a plan needs the sizes of {base.path}, as its "
            "config.json has them; see config/experiments/paper_8b.yaml"
        )
    return Model(**base.architecture.model_dump())


def _millions(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"
