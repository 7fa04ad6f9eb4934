"""Settings of the inference engine and of the RL loop."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from dvp.core.safe_vocabulary import SafeVocabularies
from dvp.strict import LOWEST_TEMPERATURE, LearningRate, Name, Positive, PositiveFloat, Strict, optional

BF16_AUTOCAST = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
"""`torch_autocast` of a DeepSpeed file: the trainer multiplies in bf16, and all else stays fp32.

That is: the weights, also where ZeRO-3 gathers them; the sums of gradients over micro-batches and over ranks; and the
optimiser. One micro-batch's gradient of a linear layer is itself a bf16 product, as in plain PyTorch.
Without the empty list DeepSpeed sends the weights and gradients of linear layers from rank to rank in bf16: the trainer
could then not be scored in fp32, and gradients would be summed in bf16. The price is twice the bytes: with N ranks, a
pass of a micro-batch over the whole model brings 4 (N - 1)/N bytes a parameter to every rank, 29 GB for 8B on 8 ranks.
That is 80 ms at 350 GB/s, hidden behind a forward pass of more than 2,000 tokens at 400 TFLOP/s.
"""
KEEP_CHECKPOINTS = 1
"""Most recent checkpoints kept of a run; the one before them stays until the next one is complete."""


class Noise(Strict):
    """Gaussian noise on the engine's logits, independent at every entry and position: a mismatch of a known size."""

    sigma: PositiveFloat
    """σ, nats, before temperature."""
    below: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Only on entries less likely than this share of the likeliest one, at temperature 1; none is all entries."""


ENGINES = {"vllm": "dvp.rollout.vllm:VllmEngine"}
"""The class of each kind of engine (dvp.rollout.engine), as MODULE:CLASS."""


def _is_engine(kind: str) -> str:
    if kind not in ENGINES:
        raise ValueError(f"no kind of engine is called {kind!r}; known are {', '.join(sorted(ENGINES))}")
    return kind


class EngineConfig(Strict):
    """The inference engine and its precision. The trainer is fp32; what differs here is the mismatch under study."""

    kind: Annotated[str, AfterValidator(_is_engine)] = optional("vllm")
    """The program."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Of weights and activations."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Of keys and values; auto is `dtype`. vLLM rounds them to the nearest number on a GPU, toward zero on a CPU."""
    weight_rounding: Literal["none", "fp8_e4m3", "fp8_e5m2", "int8", "int4_g128", "int4", "int3"] = "none"
    """Matrices are rounded to nearest through this format before they enter the engine, which then multiplies in
    `dtype`. One scale an output row; int4_g128: one for every 128 weights of a row, as AWQ and GPTQ have."""
    quantization: Literal["fp8"] | None = optional()
    """fp8: on a GPU vLLM multiplies in 8 bits; it rounds weights as it loads them, with a scale each, and activations
    as they come."""
    head_dtype: Literal["auto", "float32"] = optional("auto")
    """Of its logits. auto: as `dtype`. float32: the sums of the head's products are not rounded."""
    noise: Noise | None = optional()
    """Added to its logits; log-probs are those of what is sampled from."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a GPU's memory that the engine may take; unused on a CPU."""
    tensor_parallel: Positive = 1
    """GPUs that one engine is spread over."""
    cuda_graphs: bool = True
    """Compile the model and replay its decoding steps as CUDA graphs; no effect on a CPU."""

    @property
    def in_words(self) -> str:
        """Return its numerics as figures call them: `fp32`, `int4 + fp8-KV`."""
        short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[self.dtype]
        parts = [self.quantization or (short if self.weight_rounding == "none" else self.weight_rounding)]
        parts += [] if self.kv_cache_dtype == "auto" else [f"{self.kv_cache_dtype}-KV"]
        parts += [] if self.head_dtype == "auto" else ["fp32 head"]
        text = " + ".join(parts)
        if self.noise is None:
            return text
        return f"{text}, noise σ {self.noise.sigma:g}{'' if self.noise.below is None else ' in the tail'}"

    @model_validator(mode="after")
    def _rounded_once(self) -> "EngineConfig":
        if self.quantization and (self.weight_rounding != "none" or self.dtype == "float32"):
            raise ValueError("quantization: expected a dtype of 16 bits and no weight_rounding beside it")
        return self


class KeepResponses(Strict):
    """Which responses of a run are kept token by token (dvp.training.responses)."""

    every: Positive = 10
    """Steps between two that are kept; the first and the last step are kept as well."""
    per_step: Positive = 4
    """Responses kept of each step: half of them the first, half those with the largest mismatch."""
    before_collapse: Annotated[int, Field(ge=0)] = 5
    """Steps before a collapse that are kept, up to the step of the collapse."""


class TrainingConfig(Strict):
    """The RL loop: rollouts by the engine, updates by the trainer."""

    steps: Positive
    """Rollout batches."""
    prompts_per_step: Positive
    """Prompts of a rollout batch."""
    group_size: Positive
    """Responses per prompt."""
    tokens_per_micro_batch: Positive
    """Tokens per forward pass of one GPU: prompts and responses of like length, with what is padded between them.
    A prompt that its responses share, as they do where that is less work, counts once."""
    learning_rate: LearningRate
    """AdamW's."""
    adam_betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.99]
    """AdamW's β₁ and β₂."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimiser steps over which the learning rate rises linearly, the first with 1/warmup_steps of it; a training step
    takes one a minibatch."""
    gradient_clipping: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of a gradient."""
    temperature: Annotated[float, Field(ge=LOWEST_TEMPERATURE)] = 1.0
    """Of sampling; trainer and engine both divide logits by it."""
    max_response_tokens: Positive
    """Longest response."""
    report_sets: bool = optional(False)
    """Where the engine prunes, it reports the set that each token was sampled from, with log Z', so that the run has k3
    and ESS of the unpruned policies too; vLLM then samples through a logits processor and not by its own min-p. Mask
    replay needs the sets, and has them without being asked."""
    minibatches: Positive = 1
    """Optimiser steps per rollout batch, each on as many of its prompts."""
    synchronise_every: Positive = 1
    """Steps after which the engine gets the trainer's weights; above 1 it samples from stale ones."""
    drift_every: Positive | None = optional()
    """Steps after which, and after the first one, it is measured how far trainer and engine have moved since the start
    of the run, and from each other; docs/method.md names the metrics. null: never."""
    keep_responses: KeepResponses = KeepResponses()
    """Which responses are kept token by token."""
    max_prompt_tokens: Positive | None = None
    """Problems with longer prompts are not trained on. Evaluation leaves none out."""
    gpus: Positive = 1
    """GPUs of each node; without a GPU, processes."""
    nodes: Positive = 1
    """Machines."""
    gradient_checkpointing: bool = False
    """Recompute the layers' activations in the backward pass: a quarter more arithmetic, the memory of one layer."""
    deepspeed: Name | None = None
    """A file of config/deepspeed, without .json. If none is named: zero1, or zero1_bf16 where the base is not trained
    here: its weights are most likely stored in 16 bits, and a 16-bit engine sees little of what fp32 makes of
    them."""
    head_dtype: Literal["auto", "float32"] = "auto"
    """Of the trainer's logits. auto: as it multiplies, bf16 under `torch_autocast`. float32: the sums of the head's
    products are not rounded, though their factors still are bf16."""
    checkpoint_every: Positive
    """Steps."""

    @property
    def ranks(self) -> int:
        """Return the number of GPUs of all nodes together."""
        return self.gpus * self.nodes

    def sets_reported(self, safe: SafeVocabularies) -> bool:
        """Return whether the engine of a run with these safe vocabularies reports its sets."""
        return safe.replayed or (self.report_sets and safe.engine is not None)

    @model_validator(mode="after")
    def _divides(self) -> "TrainingConfig":
        longest = (self.max_prompt_tokens or 0) + self.max_response_tokens
        if self.tokens_per_micro_batch < longest:
            raise ValueError(f"tokens_per_micro_batch: expected a prompt and a response, {longest}, at least")
        for name, value, of, whole in (
            ("gpus × nodes", self.ranks, "prompts_per_step × group_size", self.prompts_per_step * self.group_size),
            ("minibatches", self.minibatches, "prompts_per_step", self.prompts_per_step),
            # A continued run starts with the engine's weights equal to the trainer's.
            ("synchronise_every", self.synchronise_every, "checkpoint_every", self.checkpoint_every),
        ):
            if whole % value:
                raise ValueError(f"{name} ({value}) must divide {of} ({whole})")
        return self
