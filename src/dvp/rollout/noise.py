"""Gaussian noise on vLLM's logits, new at every position: the engine of the paper's Proposition 4.3.

With z the logits before temperature, the engine samples from, and reports, softmax((z + σ ξ) / T) with ξ ~ N(0, 1)
independent for each entry, position and response; or with σ = 0 where an entry is likely. The noise follows from the
request's seed and the position in the response, so that the same request gives the same response, whatever else is in
the batch. Import this only after dvp.rollout.vllm.configure_environment.
"""

import math
from typing import Any

import torch
from pydantic import ValidationError
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from dvp.experiment.training import Noise
from dvp.rollout.seeds import derived_seed

ARGUMENT = "noise"  # the key in SamplingParams.extra_args


def noise_arguments(noise: Noise | None) -> dict[str, Any]:
    """What SamplingParams.extra_args needs."""
    return {} if noise is None else {ARGUMENT: noise.model_dump()}


def with_noise(logits_V: torch.Tensor, noise: Noise, seed: int, position: int) -> torch.Tensor:
    """z + σ ξ at a position (0 is the first) of the response that is sampled with this seed, fp32."""
    generator = torch.Generator(logits_V.device).manual_seed(derived_seed(seed, position))
    noise_V = noise.sigma * torch.randn(logits_V.shape, generator=generator, device=logits_V.device)
    if noise.below is not None:
        noise_V = noise_V.where(logits_V - logits_V.max() < math.log(noise.below), 0.0)
    return logits_V.float() + noise_V


class NoiseProcessor(LogitsProcessor):
    """Adds the noise that a request asks for. It needs vLLM's V1 model runner, which calls it before temperature."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        # Of each row the noise, the request's seed, and the tokens that it has so far, a list that vLLM extends.
        self._requests: dict[int, tuple[Noise, int, list[int]]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request whose noise cannot be read or repeated. Raises ValueError, as vLLM wants it."""
        if _requested(sampling_params) is not None and sampling_params.seed is None:
            raise ValueError("noise: expected a request with a seed")

    def is_argmax_invariant(self) -> bool:
        """Noise may change the most likely entry."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests as they enter, leave and change rows."""

        def entry(params: SamplingParams, prompt: list[int] | None, output: list[int]):
            noise = _requested(params)
            return None if noise is None else (noise, params.seed, output)

        process_dict_updates(self._requests, batch_update, entry)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Add noise to the rows (one a request) of the requests that ask for it, in place."""
        for row, (noise, seed, output) in self._requests.items():
            logits[row] = with_noise(logits[row], noise, seed, len(output))
        return logits


def _requested(params: SamplingParams) -> Noise | None:
    """Raises ValueError for what is no noise."""
    args = (params.extra_args or {}).get(ARGUMENT)
    try:
        return None if args is None else Noise.model_validate(args)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ValueError(f"noise: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
