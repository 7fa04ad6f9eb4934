"""Run vLLM as the engine: its CPU build on a laptop, its CUDA build on a GPU, the same code.

The engine lives in the trainer's process (no second copy of Python, weights handed over in memory), one per rank. On a
GPU it sleeps between rollouts, its memory free for the trainer. It reports log-probabilities after temperature, pruning
and renormalising (`processed_logprobs`; vLLM's default is before all three).
"""

import ctypes
import gc
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from dvp import node
from dvp.core.kept_sets import KeptSets
from dvp.core.safe_vocabulary import FixedRho, SafeVocabulary, settled
from dvp.errors import DvpError
from dvp.experiment.training import EngineConfig
from dvp.hub import go_offline
from dvp.rollout.engine import Completion, Engine, Sampling
from dvp.rollout.layout import Layout, read_layout, weight_files
from dvp.rollout.rounding import round_matrix

CONTROL = 0.3  # as ρ or as mass budget, prunes at nearly any position
PREFILL_TOKENS = 8192  # prefilled at once
CPU_CACHE, CPU_BLOCK = 2**30, 128  # bytes of keys and values, at most; tokens that vLLM gives to a sequence at a time
MALLOC = {-3: 2**27, -1: 2**31 - 1}  # malloc.h's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, bytes
QUANTIZATION = {None: None, "fp8": "fp8_per_tensor"}  # vLLM's names; its `fp8` is for weights that are stored in 8 bits
HOPPER = 9  # major compute capability; there vLLM's FlashAttention 3 reads an 8-bit cache
TOLERANCE = 1e-3  # nats; logits of two calls may differ in the last bits of a low precision


def configure_environment(threads: int) -> None:
    """Set the variables that vLLM reads at import; call this before anything imports vllm.

    threads : CPU threads of the process.
    Variables that the user has set stay as they are. Raises DvpError as `keep_caches_here`.
    """
    # Engines on several GPUs start a process for each. A fork of this one could not use CUDA, because asking whether
    # there is a GPU, as below and in torch, has already initialised it.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: weights are handed over in memory
        # On a GPU, vLLM's attention for float32 is written in Triton, which would multiply in TF32 (10-bit mantissas).
        "TRITON_F32_DEFAULT": "ieee",
        # Two jobs on one machine must not bind the same core; the number of threads is what matters.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1" if not torch.cuda.is_available() else "0",
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
    node.keep_caches_here()
    if not torch.cuda.is_available():
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Have glibc reuse large freed blocks instead of returning them to the kernel at once.

    A decoding step of 128 responses allocates and frees some 32 MB over a vocabulary of 16,384 tokens. To get every
    page of it anew from the kernel took a quarter of the rollout's time. The distributions of a whole response are
    larger, and are returned. The kept memory splits into holes in which later blocks do not fit: see
    `dvp.node.return_freed_memory`. Other C libraries have no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, size in MALLOC.items():
            mallopt(option, size)


def _allow_amx() -> None:
    """Ask the kernel for AMX, whose tiles Linux gives only to a process that has asked.

    vLLM's CPU attention in bf16 uses them where the processor has them, but does not ask, and dies of an illegal
    instruction if nothing else in the process has. Elsewhere this changes nothing.
    """
    initialize = getattr(torch.cpu, "_init_amx", None)
    if initialize is not None:
        initialize()


def cache_dtype(config: EngineConfig) -> str:
    """Return the dtype of vLLM's cache: the configured one, or `auto` on a CPU that cannot read 8 bits.

    vLLM's CPU attention reads 8 bits only with AVX-512, which few laptops have. It computes with them in the engine's
    dtype, so keys and values that are rounded to 8 bits before they enter a cache of that dtype are the same numbers,
    at twice the size or more.
    """
    if torch.cuda.is_available() or "AVX512" in torch.backends.cpu.get_cpu_capability():
        return config.kv_cache_dtype
    return "auto"


def _cache_bytes(model: Path, config: EngineConfig, sequences: int, longest: int) -> int:
    """Return the bytes of a CPU cache in which so many sequences have room at their longest, at most CPU_CACHE.

    Where config.json does not say how many heads share keys and values, none do: the cache is then larger than needed.
    The size matters, as vLLM takes seconds to clear a gigabyte: a fifth of what the evaluation of a tiny model costs.
    """
    from transformers import AutoConfig

    sizes = AutoConfig.from_pretrained(model).get_text_config()
    head = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    size = 1 if cache_dtype(config) != "auto" else getattr(torch, config.dtype).itemsize
    heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
    token = 2 * sizes.num_hidden_layers * heads * head * size
    blocks = 1 + sequences * math.ceil(longest / CPU_BLOCK)  # vLLM keeps one block empty
    return min(blocks * CPU_BLOCK * token, CPU_CACHE)


def needs_processor(rule: SafeVocabulary | None) -> bool:
    """Return whether a rule needs a logits processor of ours; a fixed ρ does not, as it is vLLM's own min_p."""
    return rule is not None and not isinstance(rule, FixedRho)


class VllmEngine:
    """An Engine (see engine.py) over vllm.LLM."""

    _asleep: int | None = None
    """vLLM's level of sleep: 1 keeps the weights in the machine's memory, 2 nowhere; None while awake."""

    def __init__(
        self,
        model: Path,
        config: EngineConfig,
        *,
        max_model_len: int,
        max_num_seqs: int,
        seed: int,
        rules: Iterable[SafeVocabulary | None] = (),
        report_sets: bool = False,
    ):
        """Start the engine on a Hugging Face directory. One engine per process.

        max_model_len : most tokens of prompt and response together.
        max_num_seqs : most responses sampled at once.
        rules : the safe vocabularies that it will be asked for; those with a fixed ρ need not be named.
        report_sets : whether it will be asked for the sets that it samples from.
        Raises DvpError if vLLM refuses the model or the precision, or has no weights to round.
        """
        from vllm import LLM

        from dvp.rollout import private

        private.check_version()
        go_offline()  # the model is a folder
        logging.getLogger("vllm").setLevel(logging.ERROR)
        _allow_amx()
        # vLLM collects garbage several times while it starts; it need not search what was imported.
        gc.freeze()
        options: dict[str, Any] = {"enforce_eager": True, "enable_chunked_prefill": False}
        if config.head_dtype != "auto":
            options["hf_overrides"] = {"head_dtype": config.head_dtype}
        self._reports_sets = report_sets
        self._by_state = report_sets or any(map(needs_processor, rules))
        if self._by_state or config.noise is not None:
            # A fixed ρ is vLLM's own min_p, which its default model runner (V2) applies after temperature too, before
            # it samples and reports. But V2 calls logits processors before temperature, and through another interface.
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
            options["logits_processors"] = [private.NoiseProcessor, private.SafeVocabularyProcessor]
        if not torch.cuda.is_available():
            options["kv_cache_memory_bytes"] = _cache_bytes(model, config, max_num_seqs, max_model_len)
        self._layout = read_layout(model)
        if config.weight_rounding != "none" and not self._layout.matrices:
            raise DvpError(f"weight_rounding: {config.weight_rounding}: {model} has no linear layer to round")
        beside_trainer = torch.distributed.is_initialized()
        if beside_trainer:
            # vLLM then splits the trainer's ranks into groups; with another executor it would be rank 0 on every rank.
            options["distributed_executor_backend"] = "external_launcher"
        if torch.cuda.is_available():
            options["gpu_memory_utilization"] = config.gpu_memory_utilization
            options["tensor_parallel_size"] = config.tensor_parallel
            options["enable_sleep_mode"] = beside_trainer
            options["enforce_eager"] = not config.cuda_graphs
            # After a part of a prompt vLLM's V1 runner rewinds the seeded sampler, which torch's CPU generator cannot
            # do; its CUDA generator can, and V2 draws a token's noise from seed, position and token alone.
            options["enable_chunked_prefill"] = True
            if config.kv_cache_dtype != "auto" and torch.cuda.get_device_capability()[0] != HOPPER:
                # vLLM would choose FlashInfer, which compiles its kernels with nvcc, and that may not be installed.
                options["attention_backend"] = "TRITON_ATTN"
        try:
            self.llm = LLM(
                str(model),
                dtype=config.dtype,
                kv_cache_dtype=cache_dtype(config),
                quantization=QUANTIZATION[config.quantization],
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max(PREFILL_TOKENS, max_model_len),
                logprobs_mode="processed_logprobs",
                seed=seed,
                disable_log_stats=True,
                use_tqdm_on_load=False,
                **options,
            )
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise DvpError(f"vLLM does not start on {model}: {' '.join(str(error).split())[:300]}") from error
        self.max_model_len = max_model_len
        self.ranks = options.get("tensor_parallel_size", 1)
        self._config = config
        self._sleeps = options.get("enable_sleep_mode", False)
        if cache_dtype(config) != config.kv_cache_dtype:
            kept = f"keys and values are rounded to {config.kv_cache_dtype} and kept in {config.dtype}"
            print(f"note: without AVX-512 vLLM has no 8-bit cache; {kept}", file=sys.stderr)
            self.llm.collective_rpc(private.round_cache, args=(config.kv_cache_dtype,))
        if config.weight_rounding != "none":
            # vLLM has loaded the weights unrounded. Each of its processes reads them again and rounds them.
            self.llm.collective_rpc(_reload_rounded, args=(str(model), config.weight_rounding, self._layout))

    def generate(self, prompts: list[list[int]], sampling: Sampling, seeds: list[int]) -> list[list[Completion]]:
        """See Engine.generate."""
        from vllm import SamplingParams

        from dvp.rollout.private import RECORDED, record_rows, take_rows, take_sets

        limits = sampling.limits or (sampling.max_tokens,) * len(prompts)
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            if len(prompt) + limit > self.max_model_len:
                raise DvpError(
                    f"prompt {index} has {len(prompt)} tokens; with {limit} tokens of response it exceeds the "
                    f"engine's {self.max_model_len}"
                )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [
            SamplingParams(
                n=sampling.n,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=limit,
                ignore_eos=sampling.to_the_end,
                seed=seed % 2**62,  # vLLM adds the response's index
                logprobs=0,  # of the sampled token only
                # By default vLLM makes an object and a text for each number, and decodes responses token by token: a
                # quarter of the time of a small model's rollout. Only to find `stop` does it need that text.
                flat_logprobs=True,
                detokenize=sampling.stop is not None,
                stop=sampling.stop,
                include_stop_str_in_output=sampling.stop is not None,
                **self._arguments(
                    sampling.safe_vocabulary,
                    number if sampling.report_sets else None,
                    {RECORDED: number} if sampling.whole_vocabulary else {},
                ),
            )
            for number, (seed, limit) in enumerate(zip(seeds, limits, strict=True))
        ]
        self._wake()
        if sampling.whole_vocabulary:
            self.llm.collective_rpc(record_rows)
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        rows = self.llm.collective_rpc(take_rows)[0] if sampling.whole_vocabulary else {}
        sets = self.llm.collective_rpc(take_sets)[0] if sampling.report_sets else {}
        return [
            [
                self._completion(response, rows.get(key := (number, asked.seed + response.index)), sets.get(key))
                for response in output.outputs
            ]
            for number, (output, asked) in enumerate(zip(outputs, params, strict=True))
        ]

    def _completion(self, output: Any, rows_TV: np.ndarray | None, kept: KeptSets | None) -> Completion:
        """Make a Completion from vLLM's output with flat log-probabilities."""
        token_ids, reported = list(output.token_ids), output.logprobs
        return Completion(
            token_ids=token_ids,
            # The sampled token comes first at its position.
            log_probs=[reported.logprobs[start] for start in reported.start_indices],
            text=self.llm.get_tokenizer().decode(
                token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
            # An end-of-sequence token is named by its id.
            finish_reason="string" if isinstance(output.stop_reason, str) else output.finish_reason,
            vocabulary_log_probs_TV=None if rows_TV is None else torch.from_numpy(rows_TV[: len(token_ids)]),
            # Sets that were reported beyond the response's end belong to no sampled token.
            kept=None if kept is None else kept.states(torch.arange(len(token_ids))),
        )

    def _arguments(self, rule: SafeVocabulary | None, report_as: int | None, extra: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of SamplingParams for a rule and the noise.

        report_as : the prompt's number, under which its responses' sets are reported; None if they are not.
        extra : further entries of `extra_args`, which private.py reads.
        Raises DvpError for a rule that vLLM would ignore.
        """
        from dvp.rollout.private import NOISE, REPORTED, RULE

        if needs_processor(rule) and not self._by_state:
            raise DvpError(f"the engine was not started for {rule}; name it in VllmEngine(rules=…)")
        arguments: dict[str, Any] = {}
        if self._config.noise is not None:
            extra = extra | {NOISE: self._config.noise}
        # The code that `prove_safe_vocabulary` checks must be the code that samples, even if nothing is reported.
        if needs_processor(rule) or (rule is not None and self._reports_sets):
            extra |= {RULE: rule} if report_as is None else {RULE: rule, REPORTED: report_as}
        elif rule is not None:
            arguments["min_p"] = rule.rho
        return arguments | ({"extra_args": extra} if extra else {})

    def sleep(self, *, keep_weights: bool) -> None:
        """Sleep as Engine.sleep says; on a CPU, return freed memory to the kernel.

        Level 2 discards whatever was allocated while the model was loaded: parameters, which the next load brings;
        buffers, which vLLM copies to the machine's memory and back; and the sampler's tables of requests that are gone.
        """
        if not self._sleeps:
            self.llm.reset_prefix_cache()
            if not torch.cuda.is_available():
                node.return_freed_memory()
        elif self._asleep is None:
            self._asleep = 1 if keep_weights else 2
            self.llm.sleep(level=self._asleep)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace every weight as Engine.load_weights says; round the blocks' matrices if the configuration says so.

        Raises DvpError if vLLM does not take a weight, or if a layer of its model did not get all of its values. So
        nothing of the old weights is left, whatever the precision and however little they have changed.
        """
        from dvp.rollout import private

        asleep, self._asleep = self._asleep, None
        if asleep is not None:
            self.llm.wake_up(tags=["weights"])
        # A generator, as a trainer on many GPUs never holds all of its weights in one place.
        prepared = _prepared(weights, self._config.weight_rounding, self._layout)
        try:
            found = self.llm.collective_rpc(private.load_weights, args=(prepared,))
        except (ValueError, KeyError, AttributeError, AssertionError) as error:
            raise DvpError(
                f"vLLM does not take the trainer's weights ({' '.join(str(error).split())[:300]})"
            ) from error
        if asleep is not None:
            # Only now, as the trainer's gathered weights have used the cache's memory until here.
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()
        for lacking in found:
            if lacking is not None:
                raise DvpError(f"not all weights reached the engine: its layer {lacking} were left out")

    def _wake(self) -> None:
        if self._asleep == 2:
            raise DvpError("the engine slept without its weights: load weights before anything else")
        if self._asleep is not None:
            self.llm.wake_up()
            self._asleep = None

    def log_probs(self, prompt: list[int], rule: SafeVocabulary | None) -> torch.Tensor:
        """See Engine.log_probs."""
        self._wake()
        # A prompt that is partly in the cache is computed in another shape, which rounds differently.
        self.llm.reset_prefix_cache()
        sampling = Sampling(max_tokens=1, safe_vocabulary=rule, whole_vocabulary=True)
        values_TV = self.generate([prompt], sampling, [0])[0][0].vocabulary_log_probs_TV
        assert values_TV is not None  # as it was asked for
        return values_TV[0]


def prove_safe_vocabulary(engine: Engine, prompts: list[list[int]], rule: SafeVocabulary) -> None:
    """Check that an engine samples from the safe vocabulary and reports the log-probabilities of doing so.

    At each prompt, with a control of the same kind that must prune and with the run's own rule, what the engine reports
    must be its full distribution restricted to the rule's set and renormalised, to 1e-3 nats.
    Raises DvpError if it is not.
    """
    for prompt in prompts:
        _prove_at(engine, prompt, rule)


def _prove_at(engine: Engine, prompt: list[int], rule: SafeVocabulary) -> None:
    full_V = engine.log_probs(prompt, None)
    if abs(full_V.logsumexp(0).item()) > TOLERANCE:
        raise DvpError("the engine's full log-probabilities do not sum to 1; refusing to train on them")
    control = rule.control(CONTROL)
    for asked in (control, rule):
        reported_V = engine.log_probs(prompt, asked)
        # Two passes of the engine may differ by the tolerance each.
        inside_V, outside_V = settled(full_V, asked, 2 * TOLERANCE)
        if asked is control and not outside_V.any():
            raise DvpError(f"the check of pruning needs a position where {asked} prunes; choose another prompt")
        if reported_V[outside_V].isfinite().any():
            raise DvpError(f"the engine ignores {asked}: it gives probability to tokens outside the safe vocabulary")
        expected_V = full_V[inside_V] - full_V[reported_V.isfinite()].logsumexp(0)
        error = (reported_V[inside_V] - expected_V).abs().max().item()
        if not error <= TOLERANCE:
            raise DvpError(
                f"the engine does not report log-probabilities after {asked} and renormalising "
                f"(they are off by {error:.2g} nats); is logprobs_mode 'processed_logprobs'?"
            )


def _prepared(
    weights: Iterable[tuple[str, torch.Tensor]], form: str, layout: Layout
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights as the engine gets them: rounded, except embeddings, head, norms and biases (common practice).

    Raises DvpError at the end if a matrix that is to be rounded was not among them.
    """
    left = set(layout.matrices)
    for name, weight in weights:
        value, known = weight.detach(), layout.known(name)
        left.discard(known)
        by_column = layout.matrices.get(known)
        if form == "none" or by_column is None:
            yield name, value
        else:
            yield name, round_matrix(value, form, by_column)
        # vLLM packs the head of a tied model on its own and would silently keep the old one.
        for other in layout.shared.get(known, ()):
            yield other, value
    if form != "none" and left:
        raise DvpError(f"weight_rounding: {form}: no weight {min(left)} came to be rounded")


def _reload_rounded(worker: Any, model: str, form: str, layout: Layout) -> None:
    weights = (pair for file in weight_files(Path(model)) for pair in load_file(file).items())
    worker.reload_weights(weights_iterator=_prepared(weights, form, layout))
