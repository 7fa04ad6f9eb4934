"""Roofline model of a stage's cost, from the sizes of model and batch and a device's data sheet; nothing is measured.

A forward pass over a sequence of n tokens takes 2·P·n + 2·L·A·n² FLOPs: P parameters that multiply (all but an input
embedding), L layers, A = heads × head_dim, and causal attention over (n + 1)/2 ≈ n/2 earlier tokens. A backward pass
costs two forward passes, and one more where activations are recomputed. Sampling takes the longest of its arithmetic,
its memory traffic (the weights once per decoding step, the KV cache once per token) and the launch of its kernels.

Units: seconds, bytes, FLOPs, tokens.
"""

import math
from dataclasses import dataclass

from dvp.experiment.training import EngineConfig, TrainingConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MASTER = 4
"""Bytes per weight in DeepSpeed, which keeps fp32 weights whatever the type of the matrix products."""
LOGITS = 2**28
"""Logits that the head holds at once on a GPU (dvp.core.head)."""
LIVE, BUCKET = 1e9, 5e8
"""DeepSpeed's defaults: parameters that ZeRO-3 gathers at once; gradients that are summed at once."""
RUNTIME = 4e9
"""Bytes of GPU memory that CUDA, NCCL and a sleeping engine with its graphs occupy."""
PARALLEL_SAMPLES = 256
"""Responses that an evaluation samples at once."""
SMALL_MODEL, LARGE_MODEL = 1.7e9, 8e9
"""Parameter counts up to which a model counts as small, and from which on as large, for a GPU's utilisation."""
SLOWEST = 1.6
"""Time of the best published system over this roofline: NeMo-RL 0.4 (docs, performance summary) reports 97.7 s for a
GRPO step of Llama-3.1-8B on 16 H100s, 2,048 sequences of 1,060 tokens; the formulas here give 61.6 s."""


@dataclass(frozen=True)
class Device:
    """One GPU, or one core of a CPU. Peaks are the vendor's for dense products; utilisation is the share assumed."""

    name: str
    peak_flops: dict[str, float]
    """FLOPs per second: float32 without tensor cores, which is PyTorch's default, and the 16-bit types."""
    bandwidth: float
    """Bytes per second of the device's memory."""
    memory: float
    """Bytes."""
    link: float
    """Bytes per second to the other GPUs of a node, one way."""
    network: float
    """Bytes per second to the GPUs of other nodes, one way."""
    compute_utilisation: float
    """Share of the peak that a large model reaches."""
    bandwidth_utilisation: float
    launch: float
    """Seconds per layer and decoding step to launch kernels without CUDA graphs."""
    startup: float
    """Seconds until a stage has loaded the model: imports, weights from disk, the engine."""
    replay: float | None = None
    """Seconds per decoding step to schedule it and replay its CUDA graph; None where there are none."""
    slowest: float = 1.0
    """Upper end of the range of an estimated time, as a multiple of the formula."""
    small_utilisation: float | None = None
    """Share of the peak that a small model reaches, as its kernels are short; None: as for a large one."""

    def peak(self, dtype: str) -> float:
        """Return the peak in FLOPs per second for products in this dtype."""
        return self.peak_flops["float32" if dtype == "float32" else "bfloat16"]

    def utilisation(self, parameters: float) -> float:
        """Return the share of the peak that a model of this size reaches, linear in the size's logarithm."""
        if self.small_utilisation is None:
            return self.compute_utilisation
        between = math.log(parameters / SMALL_MODEL) / math.log(LARGE_MODEL / SMALL_MODEL)
        gained = min(max(between, 0.0), 1.0) * (self.compute_utilisation - self.small_utilisation)
        return self.small_utilisation + gained

    def compute_seconds(self, flops: float, dtype: str, parameters: float) -> float:
        """Return the seconds that so many FLOPs take in a model of `parameters` parameters."""
        return flops / (self.peak(dtype) * self.utilisation(parameters))

    def memory_seconds(self, bytes_: float) -> float:
        """Return the seconds that reading or writing so many bytes of the device's memory takes."""
        return bytes_ / (self.bandwidth * self.bandwidth_utilisation)

    def launch_seconds(self, layers: int, engine: EngineConfig) -> float:
        """Return the seconds that a decoding step takes at least, for launching kernels or replaying a CUDA graph."""
        return layers * self.launch if self.replay is None or not engine.cuda_graphs else self.replay


def _gpu(name: str, bf16: float, fp32: float, bandwidth: float, memory: float, link: float) -> Device:
    peaks = {"bfloat16": bf16, "float32": fp32}
    # 400 Gbit/s of network per GPU; eager decoding of a 7 B model with 28 layers takes about 20 ms per step.
    # Utilisation: prime-rl's trainer reports 15 % (sequences of 16k) to 36 % (65k) for Qwen3-4B on H200s, IBM's
    # fms-fsdp 46 % for 7 B on H100s.
    return Device(name, peaks, bandwidth, memory, link, 50e9, 0.4, 0.6, 5e-4, 180, 2e-3, SLOWEST, 0.15)


# From NVIDIA's data sheets, bf16 without sparsity and with fp32 sums; PCIe 4.0 where there is no NVLink.
DEVICES = {
    "rtx3090": _gpu("RTX 3090 24 GB", 71e12, 35.6e12, 0.936e12, 24e9, 32e9),
    "rtx4090": _gpu("RTX 4090 24 GB", 165.2e12, 82.6e12, 1.008e12, 24e9, 32e9),
    "a6000": _gpu("RTX A6000 48 GB", 154.8e12, 38.7e12, 0.768e12, 48e9, 32e9),
    "l40s": _gpu("L40S 48 GB (PCIe)", 362e12, 91.6e12, 0.864e12, 48e9, 32e9),
    "a100-40": _gpu("A100 40 GB (SXM)", 312e12, 19.5e12, 1.555e12, 40e9, 300e9),
    "a100": _gpu("A100 80 GB (SXM)", 312e12, 19.5e12, 2.04e12, 80e9, 300e9),
    "h100": _gpu("H100 80 GB (SXM)", 989e12, 67e12, 3.35e12, 80e9, 450e9),
    "h200": _gpu("H200 141 GB (SXM)", 989e12, 67e12, 4.8e12, 141e9, 450e9),
    # AVX-512, two fused multiply-adds per cycle at 3 GHz, and its bf16; small matrices reach little of it.
    "cpu": Device("CPU core", {"bfloat16": 2e11, "float32": 1e11}, 1e10, math.inf, 1e10, 1e9, 0.2, 0.6, 5e-4, 20),
}


@dataclass(frozen=True)
class Model:
    """Sizes of a Qwen3 model."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    tie_word_embeddings: bool
    vocabulary_size: int

    @property
    def parameters(self) -> int:
        """Number of parameters: layers, last norm, and one embedding matrix or two."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (queries + keys) + 2 * self.head_dim
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        matrices = 1 if self.tie_word_embeddings else 2
        return self.layers * layer + self.hidden_size + matrices * self.vocabulary_size * self.hidden_size

    @property
    def multiplying(self) -> int:
        """Number of parameters that each token is multiplied with; an embedding that is only looked up is excluded."""
        return self.parameters - (0 if self.tie_word_embeddings else self.vocabulary_size * self.hidden_size)

    def engine_bytes(self, engine: EngineConfig) -> int:
        """Return the bytes per weight in an engine."""
        return BYTES[engine.dtype] if engine.quantization is None else 1

    def forward_flops(self, tokens: float, tokens_squared: float) -> float:
        """Return the FLOPs of a forward pass from a sequence's n and n² or, in expectation, from E[n] and E[n²]."""
        return 2 * self.multiplying * tokens + 2 * self.layers * self.heads * self.head_dim * tokens_squared

    def cache_bytes(self, engine: EngineConfig) -> int:
        """Return the bytes of keys and values per token in an engine's cache."""
        size = BYTES[engine.dtype] if engine.kv_cache_dtype == "auto" else 1
        return 2 * self.layers * self.kv_heads * self.head_dim * size


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens of prompts and responses.

    Response lengths are uniform around their mean, as wide as [0, longest] allows.
    """

    prompt: float
    response: float
    longest: int

    @property
    def response_squared(self) -> float:
        """Second moment E[r²] of the response length r."""
        half_width = min(self.response, self.longest - self.response)
        return self.response**2 + half_width**2 / 3

    @property
    def sequence(self) -> float:
        """Mean length of prompt and response together."""
        return self.prompt + self.response

    @property
    def sequence_squared(self) -> float:
        """Second moment E[(prompt + r)²] of the length of a sequence."""
        return self.prompt**2 + 2 * self.prompt * self.response + self.response_squared

    @property
    def attended(self) -> float:
        """Expected number of earlier tokens attended to, summed over the tokens of a response."""
        return self.prompt * self.response + self.response_squared / 2


def cache_room(model: Model, engine: EngineConfig, device: Device) -> float:
    """Return how many tokens of KV cache fit beside the weights on an engine's GPUs; negative if the weights do not."""
    memory = engine.gpu_memory_utilization * device.memory * engine.tensor_parallel
    return (memory - model.parameters * model.engine_bytes(engine)) / model.cache_bytes(engine)


def sampling_seconds(
    model: Model,
    engine: EngineConfig,
    device: Device,
    lengths: Lengths,
    prompts: float,
    responses: float,
    at_once: float,
) -> float:
    """Return the seconds in which one engine (tensor_parallel GPUs) samples `responses` responses to `prompts` prompts.

    `at_once` responses are decoded together if the cache has room. A batch takes as many decoding steps as its longest
    response has tokens; every prompt is prefilled once.
    """
    room = cache_room(model, engine, device) / lengths.sequence
    at_once = min(at_once, responses, max(room, 1.0))
    steps = max(lengths.longest, responses * lengths.response / at_once)
    prefill = prompts * model.forward_flops(lengths.prompt, lengths.prompt**2)
    attention = 4 * model.layers * model.heads * model.head_dim * lengths.attended
    decode = responses * (2 * model.multiplying * lengths.response + attention)
    traffic = steps * model.multiplying * model.engine_bytes(engine) + responses * lengths.attended * model.cache_bytes(
        engine
    )
    return device.compute_seconds(prefill, engine.dtype, model.parameters) / engine.tensor_parallel + max(
        device.compute_seconds(decode, engine.dtype, model.parameters) / engine.tensor_parallel,
        device.memory_seconds(traffic) / engine.tensor_parallel,
        steps * device.launch_seconds(model.layers, engine),
    )


def step_seconds(
    model: Model,
    training: TrainingConfig,
    engine: EngineConfig,
    device: Device,
    lengths: Lengths,
    zero_stage: int,
    dtype: str,
    useful: float,
) -> dict[str, float]:
    """Return the seconds of one step's parts on training.ranks GPUs: rollout, update (with scoring) and synchronise.

    zero_stage : stage of DeepSpeed's ZeRO.
    dtype : of the trainer's matrix products.
    useful : share of the responses that have a gradient and are trained on; every response is scored.
    The update takes the longer of arithmetic and communication, which overlap: for each micro-batch of a GPU ZeRO-3
    gathers the weights in fp32, once to score and twice to train, and scatters gradients. Not included are padding and
    the scoring passes of further minibatches.
    """
    responses = training.prompts_per_step * training.group_size
    engines = training.ranks / engine.tensor_parallel
    of_engine = responses / engines
    rollout = sampling_seconds(
        model, engine, device, lengths, training.prompts_per_step / engines, of_engine, at_once=of_engine
    )
    share = responses / training.ranks
    passes = 1 + useful * (3 + training.gradient_checkpointing)
    forward = share * model.forward_flops(lengths.sequence, lengths.sequence_squared)
    arithmetic = device.compute_seconds(passes * forward, dtype, model.parameters)
    link = device.link if training.nodes == 1 else device.network
    of_micro_batch = max(1, training.tokens_per_micro_batch // lengths.sequence)
    scored, trained = (math.ceil(count / of_micro_batch) for count in (share, useful * share))
    weights = model.parameters * MASTER
    gathered = training.ranks > 1 and zero_stage == 3
    exchange = (scored + 3 * trained) * weights / link if gathered else 0.0
    return {
        "rollout": rollout,
        "update": max(arithmetic, exchange),
        "synchronise": weights / link if training.ranks > 1 else device.memory_seconds(weights),
    }


def state_bytes(model: Model, ranks: int, zero_stage: int) -> float:
    """Return the bytes per GPU of weights, gradients and AdamW's state (DeepSpeed's fp32 weights, two moments)."""
    weights, gradients, optimiser = MASTER, MASTER, 3 * MASTER
    optimiser /= ranks
    gradients /= ranks if zero_stage >= 2 else 1
    weights /= ranks if zero_stage == 3 else 1
    return (weights + gradients + optimiser) * model.parameters


def layer_bytes(model: Model, dtype: str) -> int:
    """Return the bytes per token that a layer keeps for its backward pass: inputs of products, norms, non-linearities.

    In bf16, norms and residuals stay fp32, and autocast copies an input once for every product that reads it.
    """
    heads, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if dtype == "float32":
        return 24 * model.hidden_size + 16 * (model.intermediate_size + heads + keys) + 10 * model.heads
    return 26 * model.hidden_size + 8 * model.intermediate_size + 10 * (heads + keys) + 10 * model.heads


def update_bytes(
    model: Model, training: TrainingConfig, zero: dict, prompt_tokens: int, dtype: str
) -> dict[str, float]:
    """Return an upper bound on a GPU's memory in an update with full micro-batches, in bytes by part.

    The sum is a bound because the parts do not peak at the same moment. Not included are the temporary tensors of a
    layer's backward pass.
    zero : DeepSpeed's `zero_optimization`.
    prompt_tokens : length of the longest prompt.
    """
    narrow = dtype != "float32"
    tokens = max(training.tokens_per_micro_batch, prompt_tokens + training.max_response_tokens)
    head = model.vocabulary_size * model.hidden_size
    # Logits that are wider than their factors are cast down again for the backward products.
    logit = BYTES[dtype] + (MASTER if narrow and training.head_dtype == "float32" else 0)
    recomputed = training.gradient_checkpointing
    return {
        "weights, gradients and optimiser": state_bytes(model, training.ranks, zero["stage"]),
        "weights gathered by ZeRO-3": MASTER * min(model.parameters, zero.get("stage3_max_live_parameters", LIVE))
        if zero["stage"] == 3
        else 0.0,
        "the bucket of gradients": MASTER * zero.get("reduce_bucket_size", BUCKET),
        # Autocast keeps these copies from the first use to the end of the forward pass.
        "autocast's bf16 copies of the weights": BYTES[dtype] * model.multiplying if narrow else 0.0,
        "the layers' inputs": MASTER * tokens * model.layers * model.hidden_size if recomputed else 0.0,
        "activations of one layer" if recomputed else "activations": tokens
        * layer_bytes(model, dtype)
        * (1 if recomputed else model.layers),
        # Logits, the weight's gradient, hidden states and their gradient; in bf16 also copies of weight and states.
        "the head": logit * LOGITS
        + MASTER * (head + 2 * tokens * model.hidden_size)
        + (BYTES[dtype] * (head + tokens * model.hidden_size) if narrow else 0),
        "CUDA, NCCL and the sleeping engine": RUNTIME,
    }


def checkpoint_bytes(model: Model, zero_stage: int) -> int:
    """Return the bytes of a checkpoint: weights and moments in fp32; below ZeRO-3 the weights are written twice."""
    return (3 if zero_stage == 3 else 4) * MASTER * model.parameters
