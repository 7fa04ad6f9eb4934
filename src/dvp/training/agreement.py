"""Compare engine and trainer at positions of sampled responses.

Two questions are kept apart. Does the engine compute the trainer's model? It is compared with a forward pass of the
trainer that has the engine's own weights (dvp.training.engine_rounding); how much it may differ is measured on the same
model, as the effect of the engine's other rounding. And how far are engine and trainer apart? That is the mismatch,
whatever its size; above TOO_COARSE there is nothing left to train with.

A preflight asks at many positions. Every run asks at a few: when it starts, and when the first new weights have
arrived. That each weight arrives is checked whenever weights are loaded (VllmEngine.load_weights).
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from dvp.core.batch import Batch
from dvp.core.vocabulary_mismatch import kl, normalised
from dvp.errors import DvpError
from dvp.experiment.training import EngineConfig
from dvp.rollout.engine import Engine, Sampling
from dvp.rollout.seeds import derived_seed
from dvp.training import ranks
from dvp.training.backend import Trainer
from dvp.training.engine_rounding import engine_rounding

TOO_COARSE = 0.5
"""The largest KL to train with, in nats per token. Engines in real use have below 0.05, with small models, too."""
TIMES, FLOOR = 10.0, 1e-9
"""Limit of an engine's KL from the forward pass with its weights: TIMES the KL that its other rounding and another
order of summation cause, plus FLOOR in nats per token."""
DRAWN = 1000
"""Tokens to draw from the engine's distribution at each position: enough that rare ones are among them."""
PROMPTS, TOKENS = 8, 16
"""Prompts at which every run compares engine and trainer, and tokens of the response to each: of 20,000 samples of 128
positions of an 8-bit cache none was above the limit; of 32, 0.4 %."""


@torch.no_grad()
def own_logits(model: PreTrainedModel, batch: Batch, *, bf16: bool = False) -> torch.Tensor:
    """Return the logits (N, V), float32, of the response tokens by the model's own forward pass, nothing left out.

    All ranks call this, each with a batch of its own.
    """
    batch = batch.to(model.device)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
        logits_BTV = model(batch.tokens_BT[:, :-1], use_cache=False).logits
    return logits_BTV[batch.response_BT[:, 1:]].float()


def kl_of_noise(engine: EngineConfig) -> float:
    """Return the most that an engine's own noise adds to the KL on average, nats per token: σ².

    With δ = σ ξ on the logits, KL(q‖p) = E_q[δ] − log E_p[e^δ]. The mean of the second term is ≥ 0 (Jensen), that of
    the first σ² E[1 − Σ_a q_a²] (Stein), at most σ²; noise on some entries alone has less.
    """
    return 0.0 if engine.noise is None else engine.noise.sigma**2


def shortest(prompts: list[list[int]]) -> list[list[int]]:
    """Return the shortest of some prompts: logits of the whole vocabulary at each of their tokens are held at once.

    They are PROMPTS of the first 100.
    """
    return sorted(prompts[:100], key=len)[:PROMPTS]


@dataclass(frozen=True)
class Compared:
    """The comparison of an engine with a trainer at N positions of all ranks; KL in nats per token."""

    kl: float
    """KL(engine‖trainer), the mean over positions: the mismatch."""
    error: float
    """KL of the engine from the trainer's forward pass in fp32 with the engine's own weights, the squared mean of √KL.

    One value that rounds the other way in an 8-bit cache makes up to a thousand times the KL of other positions, in the
    engine or in the estimate of its rounding, by chance. The mean KL of few positions would be that of one.
    """
    rounding: float
    """KL of that pass, with the engine's other rounding added and in another batch shape, from itself without them;
    likewise."""
    positions: int
    config: EngineConfig
    architecture: str
    log_ratio_N: torch.Tensor
    """log p − log q of trainer p and engine q for tokens drawn from q, DRAWN per position, on this rank only."""

    @property
    def limit(self) -> float:
        """Return the largest error that rounding and the engine's own noise explain, in nats per token."""
        return TIMES * self.rounding + FLOOR + kl_of_noise(self.config)

    def problem(self) -> str | None:
        """Return, in one line, why nothing can be trained with this engine; None if it can be used."""
        if not self.error <= self.limit:
            return (
                f"vLLM computes another {self.architecture} than transformers with the same weights: KL "
                f"{self.error:.2g} nats per token, at most {self.limit:.2g} is rounding; use a model of another "
                "architecture (docs/your_model.md)"
            )
        if not self.kl <= TOO_COARSE + kl_of_noise(self.config):
            scales = ", one scale a row" if self.config.weight_rounding in ("int4", "int3") else ""
            return (
                f"the engine ({self.config.in_words}{scales}) is too coarse for this model: KL {self.kl:.2g} nats per "
                f"token from the trainer, {TOO_COARSE:g} at most; take 8-bit weights, bfloat16 or float16"
            )
        return None


def compare(
    model: PreTrainedModel,
    engine: Engine,
    config: EngineConfig,
    prompts: list[list[int]],
    *,
    seed: int,
    tokens: int,
    bf16: bool,
) -> Compared:
    """Compare an engine with the trainer's model at the `tokens` tokens that the engine samples after each prompt.

    They are sampled from its full distribution at temperature 1. Nothing that training computes depends on this. All
    ranks call this.

    prompts : token ids.
    bf16 : whether the trainer multiplies in bf16.
    """
    sampling = Sampling(max_tokens=tokens, whole_vocabulary=True, to_the_end=True)
    seeds = [derived_seed(seed, 0, index) for index in range(len(prompts))]
    completions = [group[0] for group in engine.generate(prompts, sampling, seeds)]
    engine.sleep(keep_weights=True)  # the trainer needs the room
    responses = [completion.token_ids for completion in completions]
    together = [Batch.collate(prompts, responses, pad=0)]
    alone = [Batch.collate([prompt], [response], pad=0) for prompt, response in zip(prompts, responses, strict=True)]
    engine_NV = normalised(torch.cat([completion.vocabulary_log_probs_TV for completion in completions]))

    def own(batches: list[Batch], *, bf16: bool = False) -> torch.Tensor:
        return normalised(torch.cat([own_logits(model, batch, bf16=bf16) for batch in batches])).cpu()

    trainer_NV = own(together, bf16=bf16)
    with engine_rounding(model, config, activations=False):
        reference_NV = own(together)
    with engine_rounding(model, config, activations=True):
        rounded_NV = own(alone)
    pairs = (engine_NV, trainer_NV), (engine_NV, reference_NV), (rounded_NV, reference_NV)
    drawn_NK = torch.multinomial(
        engine_NV.exp(), DRAWN, replacement=True, generator=torch.Generator().manual_seed(seed)
    )
    mismatch_N, error_N, rounding_N = (kl(*pair).clamp(min=0) for pair in pairs)
    every = ranks.gather([one_N.mean().item() for one_N in (mismatch_N, error_N.sqrt(), rounding_N.sqrt())])
    mismatch, error, rounding = (sum(of_ranks) / len(every) for of_ranks in zip(*every, strict=True))
    return Compared(
        kl=mismatch,
        error=error**2,
        rounding=rounding**2,
        positions=len(every) * len(engine_NV),
        config=config,
        architecture=type(model).__name__,
        log_ratio_N=(trainer_NV - engine_NV).gather(1, drawn_NK).flatten(),
    )


class Agreement:
    """A check that a run's engine computes its trainer's model, at the start and after the first new weights."""

    def __init__(self, trainer: Trainer, engine: Engine, prompts: list[list[int]], seed: int, config: EngineConfig):
        """Set up the check at the shortest of `prompts` (token ids).

        The engine will sample from its full distribution; one with a tool does not call it.
        """
        self._trainer, self._engine, self._prompts, self._seed = trainer, engine, shortest(prompts), seed
        self._config, self._again = config, True

    def check(self) -> None:
        """Compare the two at the start of a run, with the trainer's weights in the engine. All ranks call this.

        Raises DvpError if nothing can be trained with this engine.
        """
        room = self._engine.max_model_len - max(map(len, self._prompts))
        problem = compare(
            self._trainer.policy.model,
            self._engine,
            self._config,
            self._prompts,
            seed=self._seed,
            tokens=min(TOKENS, room),
            bf16=self._trainer.bf16,
        ).problem()
        if problem is not None:
            raise DvpError(problem)

    def check_again(self) -> None:
        """Repeat the check after the first new weights; later calls do nothing.

        All ranks call this. Raises DvpError as `check`.
        """
        if self._again:
            self._again = False
            self.check()
