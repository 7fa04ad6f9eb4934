"""Use what is private in one version of vLLM: logits processors, and functions that run within its workers.

NoiseProcessor adds Gaussian noise to the logits, new at every position: the engine of the paper's Proposition 4.3. With
z the logits before temperature, the engine samples from, and reports, softmax((z + σ ξ) / T) with ξ ~ N(0, 1)
independent for each entry, position and response; or with σ = 0 where an entry is likely. The noise follows from the
request's seed and the position in the response, so that the same request gives the same response, whatever else is in
the batch.

SafeVocabularyProcessor applies a safe vocabulary that vLLM does not have: one whose ρ depends on the state, or whose
sets are reported. A fixed ρ alone needs none of this: it is vLLM's own min_p. vLLM's own report of sets
(return_sampling_mask, with its V2 model runner on a GPU) is not used: it lacks log Z', asks every request for a top_k,
then also returns the sets of requests that prune nothing, and has 36 bytes per id, as Python's numbers.

Both need vLLM's V1 model runner. `record_rows` keeps whole distributions with either runner; vLLM itself returns them
only as Python lists, 112 bytes per entry where a tensor has four. Import this only after
dvp.rollout.vllm.configure_environment.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import vllm
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from dvp.core.kept_sets import KeptSets
from dvp.core.safe_vocabulary import SafeVocabulary, safe_mask
from dvp.errors import DvpError
from dvp.experiment.training import Noise
from dvp.rollout.rounding import round_cached
from dvp.rollout.seeds import derived_seed

VERSION = "0.32."
# Keys in SamplingParams.extra_args: a Noise; a SafeVocabulary; the prompt's number, under which its sets, or the
# distributions that it was sampled from, are kept.
NOISE, RULE, REPORTED, RECORDED = "noise", "safe_vocabulary", "report_sets_as", "record_rows_as"

MASKS_HELD = 2**28
"""Mask entries of safe sets (one byte each) that the device collects before they are copied to the host."""

Response = tuple[int, int]
"""A response's key: the number of its prompt, and its seed."""


def check_version() -> None:
    """Check that vLLM has the version whose internals are used here. Raises DvpError."""
    if not vllm.__version__.startswith(VERSION):
        raise DvpError(f"vLLM is {vllm.__version__}; expected {VERSION}x, as in the lock (envs/): others differ within")


class NoiseProcessor(AdapterLogitsProcessor):
    """A logits processor that adds the noise that a request asks for, before temperature."""

    def is_argmax_invariant(self) -> bool:
        """Return False: noise may change the most likely entry."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable | None:
        """Return a function of a request's tokens so far and its logits (V,) that adds noise; None without noise."""
        noise = (params.extra_args or {}).get(NOISE)
        return noise and (lambda output, logits_V: with_noise(logits_V, noise, params.seed, len(output)))


def with_noise(logits_V: torch.Tensor, noise: Noise, seed: int, position: int) -> torch.Tensor:
    """Return z + σ ξ, (V,) fp32, at a position (0 is the first) of the response that is sampled with this seed.

    With `noise.below`, only entries that are less likely than that, relative to the most likely one, get noise.
    """
    generator = torch.Generator(logits_V.device).manual_seed(derived_seed(seed, position))
    noise_V = noise.sigma * torch.randn(logits_V.shape, generator=generator, device=logits_V.device)
    if noise.below is not None:
        noise_V = noise_V.where(logits_V - logits_V.max() < math.log(noise.below), 0.0)
    return logits_V.float() + noise_V


class SafeVocabularyProcessor(LogitsProcessor):
    """A logits processor that sets entries outside a request's safe vocabulary to −inf and, if asked, keeps the sets.

    It comes after temperature, where min_p does, because it leaves the argmax alone. `apply` does not wait for the
    device: what it needs from Python is copied there when requests change, and masks are copied back many at a time.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        # By row: the rule; the response, if its sets are to be reported; its tokens so far, a list that vLLM extends.
        self._requests: dict[int, tuple[SafeVocabulary, Response | None, list[int]]] = {}
        self._device = device
        # Per rule: its rows; which of them are to have their sets reported; each such response with its tokens so far.
        self._groups: list[tuple[SafeVocabulary, torch.Tensor, torch.Tensor, list[tuple[Response, list[int]]]]] = []
        # Per step of the engine: its responses, each with its position, and their sets, at first as masks.
        self._masks: list[tuple[list[tuple[Response, int]], torch.Tensor, torch.Tensor]] = []
        self._sets: list[tuple[list[tuple[Response, int]], KeptSets]] = []

    def is_argmax_invariant(self) -> bool:
        """Return True: the most likely entry is always safe."""
        return True

    @staticmethod
    def rule(params: SamplingParams) -> SafeVocabulary | None:
        """Return the safe vocabulary that a request asks for; None if it asks for none."""
        return (params.extra_args or {}).get(RULE)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests that enter, leave and change rows; see LogitsProcessor.update_state."""

        def entry(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> tuple | None:
            asked, rule = params.extra_args or {}, self.rule(params)
            response = (asked[REPORTED], params.seed) if REPORTED in asked else None
            return None if rule is None else (rule, response, output)

        process_dict_updates(self._requests, batch_update, entry)
        if batch_update is None:
            return
        self._groups = []
        for rule in dict.fromkeys(rule for rule, *_ in self._requests.values()):
            of_rule = [(row, *of) for row, (own, *of) in self._requests.items() if own == rule]
            asked = [place for place, (_, response, _) in enumerate(of_rule) if response is not None]
            rows, places = (
                torch.tensor(numbers, dtype=torch.long, device=self._device)
                for numbers in ([row for row, *_ in of_rule], asked)
            )
            self._groups.append((rule, rows, places, [of_rule[place][1:] for place in asked]))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask the logits of requests that have a rule, in place; one row per request, (N, V)."""
        for rule, rows, places, asked in self._groups:
            logits_NV = logits[rows]
            safe_NV = safe_mask(logits_NV, rule)
            pruned_NV = logits_NV.masked_fill(~safe_NV, -torch.inf)
            logits[rows] = pruned_NV
            if asked:
                log_mass_N = (pruned_NV.logsumexp(dim=1) - logits_NV.logsumexp(dim=1))[places].float()
                at = [(response, len(output)) for response, output in asked]
                self._masks.append((at, safe_NV[places], log_mass_N))
        if sum(safe_NV.numel() for _, safe_NV, _ in self._masks) > MASKS_HELD:
            self._copy_masks()
        return logits

    def _copy_masks(self) -> None:
        if self._masks:
            at, safe, log_mass = zip(*self._masks, strict=True)
            safe_NV = torch.cat(safe)
            sets = KeptSets(safe_NV.nonzero()[:, 1].int(), safe_NV.sum(dim=1), torch.cat(log_mass))
            self._sets.append(([place for places in at for place in places], sets.to(torch.device("cpu"))))
            self._masks.clear()

    def take_sets(self) -> dict[Response, KeptSets]:
        """Return the sets of every response since the last call, one per position, in the order of positions."""
        self._copy_masks()
        every = KeptSets.cat([sets for _, sets in self._sets])
        # The last one counts: vLLM may repeat a position when it resumes a request that it had preempted.
        states: dict[Response, dict[int, int]] = {}
        for state, (response, position) in enumerate(place for places, _ in self._sets for place in places):
            states.setdefault(response, {})[position] = state
        self._sets.clear()
        order = [of_response[position] for of_response in states.values() for position in sorted(of_response)]
        parts = every.states(torch.tensor(order, dtype=torch.long)).split([len(part) for part in states.values()])
        return dict(zip(states, parts, strict=True))


class _Recorder:
    """A replacement for a sampler's `sample` that also copies the distributions of requests that ask for it.

    They are what vLLM reports for a token, after temperature, processors and pruning (`processed_logprobs`).
    """

    def __init__(self, runner: Any):
        self.rows: dict[Response, torch.Tensor] = {}
        self.lengths: dict[Response, int] = {}
        self._runner, self._sampler = runner, runner.sampler
        # The V2 runner does not keep its requests' parameters.
        self._params: dict[int, SamplingParams] = {}

    def add_request(self, index: int, params: SamplingParams) -> Any:
        """Note the parameters of a request by its index in the V2 runner's tables, and add it."""
        self._params[index] = params
        return type(self._sampler).add_request(self._sampler, index, params)

    def sample(self, logits: torch.Tensor, *metadata: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample and keep the log-probabilities that the V1 runner's sampler returns."""
        sampled, log_prob_NV = type(self._sampler).sample(self._sampler, logits, *metadata, **options)
        batch = self._runner.input_batch
        places = [
            (self._runner.requests[name].sampling_params, len(output))
            for name, output in zip(batch.req_ids, batch.req_output_token_ids, strict=True)
        ]
        self._keep(places, log_prob_NV)
        return sampled, log_prob_NV

    def sample_v2(self, logits: torch.Tensor, *metadata: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample and keep the logits that the V2 runner's sampler returns, as log-probabilities.

        metadata : the third entry has the requests' indices, the last one their numbers of tokens, prompt included.
        """
        sampled, logits_NV = type(self._sampler).sample(self._sampler, logits, *metadata, **options)
        prompts = self._runner.req_states.prompt_len.np
        places = [
            (self._params.get(index), tokens - int(prompts[index]))
            for index, tokens in zip(
                metadata[2].tolist(), metadata[-1].tolist(), strict=False
            )  # the last may be padded
        ]
        self._keep(places, logits_NV.log_softmax(dim=-1, dtype=torch.float32))
        return sampled, logits_NV

    def _keep(self, places: list[tuple[SamplingParams | None, int]], log_prob_NV: torch.Tensor) -> None:
        """Copy the rows of requests that are recorded.

        places : by row, its request's parameters and the number of tokens of its response so far, below 0 within the
            prompt.

        The last row of a position counts: vLLM may repeat one when it resumes a request that it had preempted, or after
        another part of a prompt. Rows that it samples beyond a response's end are kept as well.
        """
        for row, (params, position) in enumerate(places):
            number = None if params is None else (params.extra_args or {}).get(RECORDED)
            if number is None or not 0 <= position < params.max_tokens:
                continue
            response = (number, params.seed)
            if response not in self.rows:
                # Memory is only taken as it is written to, and most responses end early.
                with torch.inference_mode(False):
                    self.rows[response] = torch.empty(params.max_tokens, log_prob_NV.shape[1])
            self.rows[response][position] = log_prob_NV[row]
            self.lengths[response] = max(position + 1, self.lengths.get(response, 0))


# The functions below run within a worker, sent there by LLM.collective_rpc.


def record_rows(worker: Any) -> None:
    """Keep the distributions that requests with RECORDED are sampled from, from now until `take_rows`."""
    sampler, recorder = worker.model_runner.sampler, _Recorder(worker.model_runner)
    if hasattr(sampler, "add_request"):
        sampler.add_request, sampler.sample = recorder.add_request, recorder.sample_v2
    else:
        sampler.sample = recorder.sample


def take_rows(worker: Any) -> dict[Response, np.ndarray]:
    """Stop recording and return the log-probabilities of every response, (T, V) fp32; T may be beyond its end.

    They are arrays because another process would be sent the whole tensor instead of the part.
    """
    own = vars(worker.model_runner.sampler)
    own.pop("add_request", None)
    recorder = own.pop("sample").__self__
    return {response: rows[: recorder.lengths[response]].numpy() for response, rows in recorder.rows.items()}


def take_sets(worker: Any) -> dict[Response, KeptSets]:
    """Return the sets that this worker's SafeVocabularyProcessor has kept; see its `take_sets`."""
    processors = worker.model_runner.input_batch.logitsprocs.all
    return next(one for one in processors if isinstance(one, SafeVocabularyProcessor)).take_sets()


def load_weights(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Replace the weights of this worker's model and check that every layer got all of its values.

    Returns the first layer that did not, and how many values it lacks; None if none lacks any. vLLM itself keeps such a
    layer's old values, or leaves what the memory held, and says nothing.
    """
    model, lacking = worker.model_runner.get_model(), []

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        loaded = type(model).load_weights(model, weights)
        lacking.extend(_lacking(model))  # before vLLM forgets what each layer got
        return loaded

    model.load_weights = load
    try:
        worker.reload_weights(weights_iterator=weights)
    finally:
        del model.load_weights
    return lacking[0] if lacking else None


def _lacking(model: torch.nn.Module) -> Iterator[str]:
    """Yield each layer that got fewer values in this load than its parameters have, a vocabulary's padding aside."""
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        # vLLM drops the counts of complete layers; the scales of an attention's cache are in no model.
        if not info.can_load() or is_deferred_attention_layer(layer):
            continue
        values = sum(get_tensor_load_numel(parameter) for parameter in layer.parameters(recurse=False))
        if isinstance(layer, VocabParallelEmbedding):
            shard, (rows, width) = layer.shard_indices, layer.weight.shape
            values -= (rows - (shard.org_vocab_end_index - shard.org_vocab_start_index)) * width
        if info.load_numel < values:
            yield f"{name}: {values - info.load_numel:,} of {values:,} values"


def round_cache(worker: Any, form: str) -> None:
    """Round all keys and values before attention stores them and computes with them.

    Raises DvpError for a model of which no layer has keys and values, as nothing would be rounded.
    """

    def rounded(layer: torch.nn.Module, inputs: tuple) -> tuple:
        query, key, value, *others = inputs
        return query, round_cached(key, form), round_cached(value, form), *others

    layers = [module for module in worker.model_runner.model.modules() if isinstance(module, Attention)]
    if not layers:
        raise DvpError(
            f"kv_cache_dtype: {form} needs AVX-512 here, as the model's attention has no keys and values to round"
        )
    for layer in layers:
        layer.register_forward_pre_hook(rounded)
