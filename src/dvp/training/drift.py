"""Measure how far updates have moved trainer and engine from the start of a run, and how far apart the two are.

An engine whose weights have 16 bits does not see an update that is smaller than their rounding, and the mismatch then
grows by what the trainer has moved. Measured at fixed contexts, over the whole vocabulary.
"""

import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from dvp.core.batch import Batch
from dvp.core.vocabulary_mismatch import kl, normalised, outside
from dvp.errors import DvpError
from dvp.rollout.engine import Engine, Sampling
from dvp.rollout.seeds import derived_seed
from dvp.training.backend import Trainer

CONTEXTS, TOKENS, TOGETHER = 128, 16, 8
"""Contexts, each of another prompt; most response tokens in one; contexts per forward pass of the trainer."""
FILE = "drift.safetensors"
"""A run's contexts and where it started, in each of its checkpoints: the engine need not sample the same again."""
LOG_RHO = -13.0
"""log ρ of the safe vocabulary for `drift_apart_outside`."""


class Drift:
    """Fixed contexts at which trainer and engine are compared: prompts, each with the beginning of a response."""

    def __init__(self, trainer: Trainer, engine: Engine, prompts: list[list[int]], pad: int, seed: int):
        """Choose some of a run's prompts (token ids); nothing is computed yet."""
        self._trainer, self._engine, self._pad, self._seed = trainer, engine, pad, seed
        rows = np.random.default_rng([seed, 0]).permutation(len(prompts))[:CONTEXTS]
        self._contexts = [prompts[row] for row in rows]

    def start(self) -> None:
        """Draw the beginnings of responses and measure where the run starts. All ranks call this, before any update."""
        tokens = min(TOKENS, self._engine.max_model_len - max(map(len, self._contexts)))
        seeds = [derived_seed(self._seed, 0, index) for index in range(len(self._contexts))]
        groups = self._engine.generate(self._contexts, Sampling(max_tokens=tokens), seeds)
        responses = [completions[0].token_ids for completions in groups]
        self._contexts = [
            context + response[: index % len(response)]
            for index, (context, response) in enumerate(zip(self._contexts, responses, strict=True))
        ]
        self._start = self._both()

    def write(self, folder: Path) -> None:
        """Write the contexts, one after the other, their lengths, and the log-probs at the start into a checkpoint."""
        contexts = [torch.tensor(context) for context in self._contexts]
        lengths, (trainer_NV, engine_NV) = torch.tensor([*map(len, contexts)]), self._start
        start = {"trainer": trainer_NV, "engine": engine_NV}
        save_file({"tokens": torch.cat(contexts), "lengths": lengths} | start, folder / FILE)

    def restore(self, checkpoint: Path) -> None:
        """Take over what `write` wrote, in the place of `start`. Raises DvpError if it is not there."""
        file = checkpoint / FILE
        if not file.is_file():
            folder = checkpoint.parent
            raise DvpError(f"{file}: missing (an older version did not write it); move {folder} away to start anew")
        kept = load_file(file)
        self._contexts = [context.tolist() for context in kept["tokens"].split(kept["lengths"].tolist())]
        self._start = kept["trainer"], kept["engine"]

    def measure(self) -> dict[str, float | None]:
        """Measure how far both have moved, in nats per token, means over contexts; `_se` is a standard error.

        Returns:
            drift_trainer, drift_engine: KL(now‖start) of each.
            drift_share: the engine's over the trainer's; None if the trainer has not moved.
            drift_apart: KL(engine‖trainer) now; drift_apart_start: at the start.
            drift_apart_outside: share of drift_apart outside V_S at ρ = e⁻¹³.
        """
        (trainer_NV, engine_NV), (trainer_before_NV, engine_before_NV) = self._both(), self._start
        moved_N, seen_N = kl(trainer_NV, trainer_before_NV), kl(engine_NV, engine_before_NV)
        moved, apart_N = moved_N.mean(), kl(engine_NV, trainer_NV)
        split = outside(trainer_NV, engine_NV, trainer_NV >= trainer_NV.amax(dim=1, keepdim=True) + LOG_RHO)
        share = seen_N.mean() / moved
        errors = {
            "trainer": moved_N,
            "engine": seen_N,
            "apart": apart_N,
            "share": (seen_N - share * moved_N) / moved,  # of a ratio of means, to first order
        }
        return {
            "drift_trainer": moved.item(),
            "drift_engine": seen_N.mean().item(),
            "drift_share": share.item() if moved > 0 else None,
            "drift_apart": apart_N.mean().item(),
            "drift_apart_start": kl(engine_before_NV, trainer_before_NV).mean().item(),
            "drift_apart_outside": split["kl_outside"] / split["kl"] if split["kl"] > 0 else None,
        } | {
            f"drift_{name}_se": (values_N.std() / math.sqrt(len(values_N))).item() if moved > 0 else None
            for name, values_N in errors.items()
        }

    @torch.no_grad()
    def _both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs (N, V) of trainer and engine after each context, float64; the trainer's as it multiplies."""
        policy, device = self._trainer.policy, self._trainer.device
        whole = Batch.collate(self._contexts, [[self._pad]] * len(self._contexts), self._pad)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._trainer.bf16):
            logits = [
                policy.logits(policy.scored(whole.rows(rows).to(device))[0]).float().cpu()
                for rows in torch.arange(len(self._contexts)).split(TOGETHER)
            ]
        asked = Sampling(max_tokens=1, whole_vocabulary=True)
        groups = self._engine.generate(self._contexts, asked, [0] * len(self._contexts))
        self._engine.sleep(keep_weights=True)  # the trainer needs the room
        return normalised(torch.cat(logits)), normalised(torch.cat([one.vocabulary_log_probs_TV for [one] in groups]))
