"""The RL loop: rollouts by the engine, rewards by the verifier, one update by the trainer, weights back to the engine.

Each step draws fresh responses from the current weights (fully on-policy): whatever differs between trainer and engine
differs because of the engine's numerics. metrics.jsonl is the source of truth; MLflow is fed from the same rows.
"""

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from dvp.config import Experiment, Run
from dvp.core.advantages import rloo
from dvp.core.diagnostics import mismatch_metrics
from dvp.core.importance import ImportanceRule, importance_weights
from dvp.core.objective import reinforce_loss, zero_outside_safe
from dvp.data.verifier import grade
from dvp.errors import DvpError
from dvp.files import write_text
from dvp.rollout.engine import Completion, Engine, Sampling
from dvp.training import checkpoint
from dvp.training.backend import Batch, Trainer


@dataclass(frozen=True)
class Rollout:
    """B responses to one step's prompts, the responses to a prompt in consecutive rows."""

    batch: Batch
    infer_log_prob_BT: torch.Tensor
    """log q of each response token as the engine sampled it; 0 elsewhere. Aligned with batch.tokens_BT."""
    rewards_B: torch.Tensor
    truncated_B: torch.Tensor


class Loop:
    """Trains one run; everything that a step needs and nothing that outlives it."""

    def __init__(
        self,
        experiment: Experiment,
        run: Run,
        problems: pd.DataFrame,
        prompts: list[list[int]],
        pad: int,
        trainer: Trainer,
        engine: Engine,
    ):
        self.config = experiment.training
        self.run = run
        self.method = experiment.methods[run.method]
        self.rho = run.rho_value
        self.rule = ImportanceRule(**self.method.importance.model_dump())
        self.trainer = trainer
        self.engine = engine
        self.pad = pad
        self.answers = list(problems["answer"])
        self.prompts = prompts
        limit = engine.max_model_len - self.config.max_response_tokens
        for row, prompt in enumerate(self.prompts):
            if len(prompt) > limit:
                raise DvpError(
                    f"data/train.parquet: row {row} (id {problems['id'].iloc[row]}): its prompt has {len(prompt)} "
                    f"tokens; the model's context leaves {limit} beside max_response_tokens"
                )

    def step(self, step: int) -> dict:
        """One step (1-based); returns its row of metrics.jsonl."""
        started = time.perf_counter()
        rows = prompt_rows(len(self.prompts), self.config.prompts_per_step, step, self.run.seed)
        completions = self.engine.generate(
            [self.prompts[row] for row in rows],
            Sampling(
                max_tokens=self.config.max_response_tokens,
                n=self.config.group_size,
                temperature=self.config.temperature,
                min_p=self.rho,
            ),
            [derived_seed(self.run.seed, step, row) for row in rows],
        )
        rolled_out = time.perf_counter()
        rollout = self._graded(rows, completions)
        rewarded = time.perf_counter()
        metrics = self._update(rollout)
        updated = time.perf_counter()
        self.engine.load_weights(self.trainer.weights())
        synchronised = time.perf_counter()
        response_tokens = int(rollout.batch.response_BT.sum())
        return {
            "step": step,
            "reward": rollout.rewards_B.mean().item(),
            **metrics,
            "response_tokens_mean": response_tokens / len(rollout.rewards_B),
            "truncated_fraction": rollout.truncated_B.float().mean().item(),
            "tokens_per_second": response_tokens / (synchronised - started),
            "seconds_rollout": rolled_out - started,
            "seconds_reward": rewarded - rolled_out,
            "seconds_update": updated - rewarded,
            "seconds_sync": synchronised - updated,
            "seconds": synchronised - started,
        }

    def _graded(self, rows: list[int], completions: list[list[Completion]]) -> Rollout:
        """Responses side by side, each with its reward."""
        flat = [(row, one) for row, group in zip(rows, completions, strict=True) for one in group]
        batch = Batch.collate([self.prompts[row] for row, _ in flat], [one.token_ids for _, one in flat], self.pad)
        infer_log_prob_BT = torch.zeros(batch.tokens_BT.shape)
        infer_log_prob_BT[batch.response_BT] = torch.tensor([value for _, one in flat for value in one.log_probs])
        truncated = [one.finish_reason == "length" for _, one in flat]
        rewards = [
            float(grade(one.text, self.answers[row], truncated=cut))
            for (row, one), cut in zip(flat, truncated, strict=True)
        ]
        return Rollout(batch, infer_log_prob_BT, torch.tensor(rewards), torch.tensor(truncated))

    def _update(self, rollout: Rollout) -> dict:
        """One optimiser step on the batch, or none if every weight is zero. Returns the diagnostics."""
        mask_BT = rollout.batch.response_BT
        statistics = self.trainer.score(rollout.batch, self.rho)
        log_prob_BT = _unflatten(statistics.pruned_log_prob, mask_BT)
        safe_BT = _unflatten(statistics.target_in_safe, mask_BT)
        log_ratio_BT = log_prob_BT - rollout.infer_log_prob_BT
        weights = importance_weights(log_ratio_BT, mask_BT, self.rule)
        weight_BT = zero_outside_safe(weights.weight_BT, safe_BT) * mask_BT
        advantage_B = rloo(rollout.rewards_B, self.config.group_size)

        pruned_mass_BT = _unflatten(1 - statistics.retained_mass, mask_BT)
        tokens = mask_BT.sum().item()
        metrics = {
            # Between the policies that were sampled: pruned ones if the run has a safe vocabulary, else full ones. The
            # log-prob of a token outside V_S is a convention; such tokens are counted below, not averaged here.
            **mismatch_metrics(log_ratio_BT, mask_BT & safe_BT),
            "entropy": statistics.entropy.mean().item(),
            "sum_p_squared": statistics.sum_p_squared.mean().item(),
            "retained_mass": statistics.retained_mass.mean().item(),
            "pruned_mass_per_response": pruned_mass_BT.sum(dim=1).mean().item(),
            "safe_size": statistics.safe_size.mean().item(),
            "outside_safe_fraction": (mask_BT & ~safe_BT).sum().item() / tokens,
            "kept_fraction": weights.kept_B.float().mean().item(),
            "vetoed_fraction": weights.vetoed_B.float().mean().item(),
            "masked_fraction": (mask_BT & (weight_BT == 0)).sum().item() / tokens,
        }
        # A group whose rewards are all equal, and a rejected response, contribute exactly nothing: left out.
        useful_B = (weight_BT != 0).any(dim=1) & (advantage_B != 0)
        micro_batches = useful_B.nonzero().squeeze(1).split(self.config.micro_batch_size)
        skipped = not useful_B.any().item()
        if not skipped:
            for index, rows_b in enumerate(micro_batches):
                self.trainer.forward_backward(
                    rollout.batch.rows(rows_b),
                    self.rho,
                    self._loss(rows_b, rollout, weight_BT, advantage_B),
                    last=index == len(micro_batches) - 1,
                )
        norm = None if skipped else self.trainer.gradient_norm
        if norm is not None and not math.isfinite(norm):
            raise DvpError(f"the gradient's norm is {norm}: training diverged; lower training.learning_rate")
        return metrics | {"skipped": skipped, "gradient_norm": norm}

    def _loss(
        self, rows_b: torch.Tensor, rollout: Rollout, weight_BT: torch.Tensor, advantage_B: torch.Tensor
    ) -> Callable:
        """The loss of some rows as a function of their statistics, normalised over the whole batch."""
        mask_bT = rollout.batch.rows(rows_b).response_BT.to(self.trainer.device)
        weight_bT = weight_BT[rows_b, : mask_bT.shape[1]].to(self.trainer.device)
        advantage_b = advantage_B[rows_b].to(self.trainer.device)
        return lambda statistics: reinforce_loss(
            _unflatten(statistics.pruned_log_prob, mask_bT),
            weight_bT,
            advantage_b,
            mask_bT,
            denominator=len(advantage_B),
        )


def run_loop(
    loop: Loop,
    folder: Path,
    checkpoints: Path,
    on_step: Callable[[dict], None],
) -> tuple[Path, list[dict]]:
    """Train to the last step, from the newest checkpoint below `checkpoints` if there is one.

    folder : the run's folder, where metrics.jsonl grows.
    on_step : called with each row, restored ones included.
    Returns the final checkpoint and all rows. Raises DvpError for a damaged checkpoint.
    """
    config = loop.config
    metrics_file = folder / "metrics.jsonl"
    rows = _restore(loop, metrics_file, checkpoints)
    for row in rows:
        on_step(row)
    loop.engine.load_weights(loop.trainer.weights())
    folder.mkdir(parents=True, exist_ok=True)
    with open(metrics_file, "a", encoding="utf-8") as file:
        for step in range(len(rows) + 1, config.steps + 1):
            row = loop.step(step)
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            rows.append(row)
            on_step(row)
            if step % config.checkpoint_every == 0 or step == config.steps:
                os.fsync(file.fileno())
                checkpoint.save(checkpoints, step, loop.trainer, metrics_file, config.keep_checkpoints)
    return checkpoint.checkpoints(checkpoints)[-1], rows


def _restore(loop: Loop, metrics_file: Path, checkpoints: Path) -> list[dict]:
    """Load the newest checkpoint, if any, and put its copy of metrics.jsonl in place; the rows of it."""
    saved = checkpoint.checkpoints(checkpoints)
    if not saved:
        metrics_file.unlink(missing_ok=True)
        return []
    state = checkpoint.verify(saved[-1])
    # The run's own file may be ahead of the checkpoint, or of other settings that were tried in between.
    metrics = (saved[-1] / checkpoint.METRICS).read_text(encoding="utf-8")
    rows = [json.loads(line) for line in metrics.splitlines()]
    if len(rows) != state["step"]:
        raise DvpError(f"{saved[-1]}: expected {state['step']} rows of metrics, found {len(rows)}")
    loop.trainer.load(saved[-1])
    write_text(metrics_file, metrics)
    print(f"continuing from {saved[-1]}", file=sys.stderr)
    return rows


def prompt_rows(count: int, batch: int, step: int, seed: int) -> list[int]:
    """The rows of the training set used at a step (1-based), in an order of its own for each pass.

    No row is used twice in a pass; the count % batch rows that do not fill a batch sit it out.

    Raises DvpError if the set is smaller than a batch, which would put a problem into it twice.
    """
    if count < batch:
        raise DvpError(f"data/train.parquet: {count} problems are fewer than training.prompts_per_step ({batch})")
    per_epoch = count // batch
    epoch, position = divmod(step - 1, per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(count)
    return order[position * batch : (position + 1) * batch].tolist()


def derived_seed(*parts: int) -> int:
    """A seed for the sampler (62 bits) from a run's seed, the step and the problem: the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 2


def _unflatten(values_N: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Per-token values back at their positions; 0 (False) elsewhere."""
    return torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=values_N.device).masked_scatter(mask_BT, values_N)
