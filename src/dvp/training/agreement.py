"""Engine and trainer side by side, at positions of sampled responses: how far apart they are, and how far they may be.

A preflight asks at many positions. Every run asks at a few: when it starts, and when the first new weights have
arrived, as weights that go astray on the way to the engine are otherwise seen in no number but the mismatch itself.
"""

import math

import torch

from dvp.core.batch import Batch
from dvp.core.vocabulary_mismatch import epsilon, kl, normalised
from dvp.errors import DvpError
from dvp.experiment.training import EngineConfig
from dvp.rollout.engine import Engine, Sampling
from dvp.rollout.seeds import derived_seed
from dvp.training import ranks
from dvp.training.backend import Trainer

KL_LIMITS = {"exact": 1e-5, "rounded": 0.01, "coarse": 0.5}
"""Nats a token, by the engine's precision: fp32 beside an fp32 trainer; 16 bits on either side; less than that."""
PROMPTS, TOKENS = 8, 4
"""Prompts that every run is asked at, and tokens of a response to each."""
ERRORS, FLOOR = 3.0, 1e-5
MOVED_SHARES = {"exact": 1e-3, "rounded": 0.05, "coarse": 0.25}
"""How far the engine's change may be from the trainer's: so many times what was between them before, so many nats, and
this share of the trainer's change, by the engine's precision. What rounding does to a log-prob changes with the weights
and stays as large; of a weight that was left out, the engine lacks all that it has changed."""


@torch.no_grad()
def own_logits(trainer: Trainer, batch: Batch, bf16: bool) -> torch.Tensor:
    """The logits (N, V) of the response tokens by the model's own forward pass, with all that it does to them.

    By all ranks, each with a batch of its own.
    """
    batch = batch.to(trainer.device)
    with torch.autocast(trainer.device.type, torch.bfloat16, enabled=bf16):
        logits_BTV = trainer.policy.model(batch.tokens_BT[:, :-1], use_cache=False).logits
    return logits_BTV[batch.response_BT[:, 1:]].float()


def precision_class(engine: EngineConfig, trainer_dtype: str) -> str:
    """The key of KL_LIMITS."""
    if engine.weight_rounding != "none" or engine.kv_cache_dtype != "auto" or engine.quantization is not None:
        return "coarse"
    return "exact" if engine.dtype == trainer_dtype == "float32" else "rounded"


def kl_of_noise(engine: EngineConfig) -> float:
    """The most that an engine's own noise adds to the KL on average, nats per token: σ².

    With δ = σ ξ on the logits, KL(q‖p) = E_q[δ] − log E_p[e^δ]. The mean of the second term is ≥ 0 (Jensen), that of
    the first σ² E[1 − Σ_a q_a²] (Stein), at most σ²; noise on some entries alone has less.
    """
    return 0.0 if engine.noise is None else engine.noise.sigma**2


def shortest(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts of real problems, short ones: logits of the whole vocabulary at each of their tokens are held at once."""
    return sorted(prompts[:100], key=len)[:PROMPTS]


Compared = tuple[torch.Tensor, torch.Tensor]
"""Log-probs of trainer and engine over the whole vocabulary, (N, V) each, at N positions of sampled responses."""


def compare(
    trainer: Trainer, engine: Engine, prompts: list[list[int]], seed: int, tokens: int
) -> tuple[Compared, list[list[int]]]:
    """Engine against trainer at so many tokens after each prompt, which the engine samples and which are returned.

    They are of its full distribution, at temperature 1. Nothing that training computes depends on this.
    """
    sampling = Sampling(max_tokens=tokens, whole_vocabulary=True, to_the_end=True)
    seeds = [derived_seed(seed, 0, index) for index in range(len(prompts))]
    completions = [group[0] for group in engine.generate(prompts, sampling, seeds)]
    engine.sleep(keep_weights=True)  # the trainer needs the room
    responses = [completion.token_ids for completion in completions]
    train_NV = normalised(own_logits(trainer, Batch.collate(prompts, responses, pad=0), trainer.bf16)).cpu()
    infer_NV = normalised(torch.cat([completion.vocabulary_log_probs_TV for completion in completions]))
    return (train_NV, infer_NV), responses


def distance(train_NV: torch.Tensor, infer_NV: torch.Tensor) -> dict[str, float]:
    """Mean KL (nats per token) and largest |ε| (nats) of what was compared, over all ranks."""
    kl_N = kl(infer_NV, train_NV)
    worst_N, _ = epsilon(train_NV, infer_NV)
    every = ranks.gather((kl_N.mean().item(), worst_N.max().item()))
    return {"kl": sum(mean for mean, _ in every) / len(every), "worst_token": max(worst for _, worst in every)}


class Agreement:
    """Whether a run's engine has its trainer's model, at first and after the first new weights."""

    def __init__(self, trainer: Trainer, engine: Engine, prompts: list[list[int]], seed: int, config: EngineConfig):
        """The engine is asked with its full distribution, without a tool."""
        self._trainer, self._engine, self._prompts, self._seed = trainer, engine, shortest(prompts), seed
        self._kind = precision_class(config, "bfloat16" if trainer.bf16 else "float32")
        self._limit = KL_LIMITS[self._kind] + kl_of_noise(config)
        self._tokens = min(TOKENS, engine.max_model_len - max(map(len, self._prompts)))
        self._before: Compared | None = None

    def check(self) -> None:
        """At the start of a run, with the trainer's weights in the engine. By all ranks. Raises DvpError."""
        self._before = self._ask()
        self._agree(self._before, "")

    def check_again(self) -> None:
        """After new weights have arrived; later calls do nothing. By all ranks. Raises DvpError."""
        if self._before is None:
            return
        before, now = self._before, self._ask()
        self._before = None
        # The first position of each response is the same one again.
        (first, own), (then, new) = ([values_NV[:: self._tokens] for values_NV in of] for of in (before, now))
        error, later = own - first, new - then
        apart, moved, were = (
            max(ranks.gather((first.exp() * change_NV.square()).sum(dim=1).mean().sqrt().item()))
            for change_NV in (later - error, then - first, error)
        )
        if not math.isfinite(moved):
            return  # training diverged, which the next step says
        allowed = ERRORS * were + MOVED_SHARES[self._kind] * moved + FLOOR
        if not apart <= allowed:
            raise DvpError(
                f"engine and trainer changed differently with the first new weights, by {apart:.2g} nats where the "
                f"trainer's log-probs changed by {moved:.2g} and {allowed:.2g} is rounding: not all weights of "
                f"{self._name} reach the engine as they are; use a model of another architecture (docs/your_model.md)"
            )
        self._agree(now, " after new weights")

    @property
    def _name(self) -> str:
        return type(self._trainer.policy.model).__name__

    def _ask(self) -> Compared:
        return compare(self._trainer, self._engine, self._prompts, self._seed, self._tokens)[0]

    def _agree(self, compared: Compared, when: str) -> None:
        found = distance(*compared)["kl"]
        if not found <= self._limit:
            raise DvpError(
                f"engine and trainer do not agree{when}: KL {found:.2g} nats per token, at most {self._limit:.2g} is "
                f"rounding of this engine: vLLM computes another {self._name} than transformers, or did not get all of "
                "its weights; use a model of another architecture (docs/your_model.md)"
            )
