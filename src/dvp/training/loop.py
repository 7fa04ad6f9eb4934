"""The RL loop: rollouts by the engine, rewards by the verifier, updates by the trainer, weights back to the engine.

By default each step draws fresh responses from the current weights and takes one optimiser step (fully on-policy):
whatever differs between trainer and engine then differs because of the engine's numerics. metrics.jsonl is the source
of truth; MLflow is fed from the same rows.
"""

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd
import torch

from dvp.core.advantages import ADVANTAGES, Responses, optimal_token_proxy, otb_variance_readouts
from dvp.core.collapse import CollapseDetector
from dvp.core.diagnostics import mismatch_metrics, pruned_mass_metrics, self_noise, tail_mismatch
from dvp.core.head import TokenStatistics
from dvp.core.importance import ImportanceWeights, importance_weights
from dvp.core.objective import policy_loss, zero_outside_safe
from dvp.data.verifier import grade
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.grid import Run
from dvp.files import append_line, write_text
from dvp.rollout.engine import Completion, Engine, Sampling
from dvp.training import checkpoint, ranks
from dvp.training.backend import Batch, Trainer
from dvp.training.method import SafeVocabularies, importance_rule, loss_rule
from dvp.training.stopping import Abandoned, StopRequest


@dataclass(frozen=True)
class Rollout:
    """B responses to one step's prompts, the responses to a prompt in consecutive rows."""

    batch: Batch
    infer_log_prob_BT: torch.Tensor
    """log q of each response token as the engine sampled it; 0 elsewhere. Aligned with batch.tokens_BT."""
    rewards_B: torch.Tensor
    truncated_B: torch.Tensor

    def rows(self, rows_b: torch.Tensor) -> "Rollout":
        """These responses only, at full width."""
        batch = Batch(self.batch.tokens_BT[rows_b], self.batch.response_BT[rows_b])
        return Rollout(batch, self.infer_log_prob_BT[rows_b], self.rewards_B[rows_b], self.truncated_B[rows_b])


@dataclass(frozen=True)
class Update:
    """What an optimiser step is made of: a weight and an advantage for each token of some responses."""

    weights: ImportanceWeights
    weight_BT: torch.Tensor
    """The weights with those of tokens outside V_S set to 0."""
    responses: Responses
    advantage_BT: torch.Tensor


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
        method = experiment.methods[run.method]
        self.safe = SafeVocabularies(method, run.rho_value, self.config.max_response_tokens)
        self.rule = importance_rule(method.importance)
        self.loss_rule = loss_rule(method.loss)
        self.advantage = ADVANTAGES[method.advantage]
        self.collapse = CollapseDetector(**self.config.collapse.model_dump())
        self.trainer = trainer
        self.engine = engine
        self.stop = StopRequest()
        self.pad = pad
        self.ids = list(problems["id"])
        self.answers = list(problems["answer"])
        self.prompts = prompts
        limit = engine.max_model_len - self.config.max_response_tokens
        for row, prompt in enumerate(self.prompts):
            if len(prompt) > limit:
                raise DvpError(
                    f"data/train.parquet: row {row} (id {self.ids[row]}): its prompt has {len(prompt)} "
                    f"tokens; the model's context leaves {limit} beside max_response_tokens"
                )

    def step(self, step: int) -> dict:
        """One step (1-based); returns its row of metrics.jsonl."""
        started = time.perf_counter()
        rows = prompt_rows(len(self.prompts), self.config.prompts_per_step, step, self.run.seed)
        completions = self._sampled(step, rows)
        rolled_out = time.perf_counter()
        rollout = self._graded(rows, completions)
        rewarded = time.perf_counter()
        metrics = self._update(rollout, control=step == 1)
        updated = time.perf_counter()
        if step % self.config.synchronise_every == 0:
            self.engine.load_weights(self.trainer.weights())
        synchronised = time.perf_counter()
        response_tokens = int(rollout.batch.response_BT.sum())
        row = {
            "step": step,
            "reward": rollout.rewards_B.mean().item(),
            "rho": self.safe.rho,
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
        # Times differ between ranks; what is decided from a row must not.
        row = ranks.gather(row)[0]
        self.observe(row)
        return row | {"collapsed": self.collapse.collapsed_at is not None}

    def observe(self, row: dict) -> None:
        """Let what follows a run from step to step see a finished one: a step of now, or of a checkpoint."""
        self.safe.observe(row)
        self.collapse.observe(row["step"], row)

    def _sampled(self, step: int, rows: list[int]) -> list[list[Completion]]:
        """The group of responses to each prompt; every engine samples those to its share of the prompts.

        The longest part of a step. The weights are still those of the last one, so it may be given up.
        """
        mine = ranks.share(rows, self.engine.ranks)
        sampling = Sampling(
            max_tokens=self.config.max_response_tokens,
            n=self.config.group_size,
            temperature=self.config.temperature,
            safe_vocabulary=self.safe.engine,
        )
        seeds = [derived_seed(self.run.seed, step, row) for row in mine]
        # The ranks of one engine wait for each other all the time.
        with self.stop.abandonable(self.engine.ranks == 1):
            try:
                completions = self.engine.generate([self.prompts[row] for row in mine], sampling, seeds)
            except DvpError:
                raise
            except Exception as error:
                raise DvpError(f"the engine died in the rollout ({_line(error)}); run again to continue") from error
        return ranks.join(completions, len(rows), self.engine.ranks)

    def _grade(self, row: int, response: str, truncated: bool) -> float:
        try:
            return float(grade(response, self.answers[row], truncated=truncated))
        except Exception as error:
            where = f"data/train.parquet: row {row} (id {self.ids[row]})"
            raise DvpError(f"{where}: the verifier failed on a response ({_line(error)})") from error

    def _graded(self, rows: list[int], completions: list[list[Completion]]) -> Rollout:
        """Responses side by side, each with its reward; every rank grades its share of them."""
        flat = [(row, one) for row, group in zip(rows, completions, strict=True) for one in group]
        batch = Batch.collate([self.prompts[row] for row, _ in flat], [one.token_ids for _, one in flat], self.pad)
        infer_log_prob_BT = torch.zeros(batch.tokens_BT.shape)
        infer_log_prob_BT[batch.response_BT] = torch.tensor([value for _, one in flat for value in one.log_probs])
        if not infer_log_prob_BT.isfinite().all():
            raise DvpError("the engine's log-probs are not finite; is the model whole, is its precision enough?")
        truncated = [one.finish_reason == "length" for _, one in flat]
        rewards = [
            self._grade(row, one.text, cut) for (row, one), cut in ranks.share(list(zip(flat, truncated, strict=True)))
        ]
        rewards = ranks.join(rewards, len(flat))
        return Rollout(batch, infer_log_prob_BT, torch.tensor(rewards), torch.tensor(truncated))

    def _update(self, rollout: Rollout, control: bool) -> dict:
        """The step's optimiser steps, each on a minibatch of whole groups that is a batch of its own.

        A minibatch whose weights or advantages are all zero takes no step. Returns the diagnostics of the rollout as
        the trainer saw it before the first one. With `control` the trainer's own noise is among them.
        """
        statistics = self._score(rollout)
        metrics = self._diagnostics(rollout, statistics)
        if control:
            metrics |= self._noise(rollout, statistics)
        responses = torch.arange(len(rollout.rewards_B))
        done = []
        for index, rows_b in enumerate(responses.split(len(responses) // self.config.minibatches)):
            part = rollout.rows(rows_b)
            old = {name: values_BT[rows_b] for name, values_BT in statistics.items()}
            # REINFORCE knows no ratio to the policy of the rollout, so its weights must be those of the policy now.
            moved = index > 0 and self.loss_rule.kind == "reinforce"
            done.append(self._optimise(part, self._score(part) if moved else old))
        taken = [one for one in done if one]
        metrics |= {"skipped": not taken, "updates": len(taken)}
        for name in ("gradient_norm", "clipped_fraction", "otb_signal", "otb_power", "otb_noise"):
            values = [one[name] for one in taken if one[name] is not None]
            metrics[name] = fmean(values) if values else None
        return metrics

    def _score(self, rollout: Rollout, **options) -> dict[str, torch.Tensor]:
        """The statistics of every response token, each (B, T), 0 elsewhere."""
        statistics = self.trainer.score(rollout.batch, self.safe.trainer, **options)
        if not statistics.log_prob.isfinite().all():
            raise DvpError("the trainer's log-probs are not finite: training diverged; lower training.learning_rate")
        mask_BT = rollout.batch.response_BT
        return {one.name: _unflatten(getattr(statistics, one.name), mask_BT) for one in fields(TokenStatistics)}

    def _prepare(self, rollout: Rollout, statistics: dict[str, torch.Tensor]) -> Update:
        """Weights and advantages of some responses from the trainer's statistics of them."""
        mask_BT, log_prob_BT = rollout.batch.response_BT, statistics["pruned_log_prob"]
        weights = importance_weights(log_prob_BT - rollout.infer_log_prob_BT, mask_BT, self.rule)
        weight_BT = zero_outside_safe(weights.weight_BT, statistics["target_in_safe"]) * mask_BT
        proxy_BT = optimal_token_proxy(log_prob_BT, statistics["pruned_sum_p_squared"])
        responses = Responses(rollout.rewards_B, mask_BT, self.config.group_size, proxy_BT, weight_BT)
        return Update(weights, weight_BT, responses, self.advantage(responses))

    def _diagnostics(self, rollout: Rollout, statistics: dict[str, torch.Tensor]) -> dict:
        """The read-outs of METHOD.md, "Diagnostics", of a whole rollout."""
        mask_BT, safe_BT = rollout.batch.response_BT, statistics["target_in_safe"]
        update = self._prepare(rollout, statistics)
        log_ratio_BT = statistics["pruned_log_prob"] - rollout.infer_log_prob_BT
        means = {name: values_BT[mask_BT].float().mean().item() for name, values_BT in statistics.items()}
        tokens = mask_BT.sum().item()
        return {
            # Between the policies that were sampled: pruned ones if the run has a safe vocabulary, else full ones. The
            # log-prob of a token outside V_S is a convention; such tokens are counted below, not averaged here.
            **mismatch_metrics(log_ratio_BT, mask_BT & safe_BT),
            "tail_mismatch": tail_mismatch(log_ratio_BT, statistics["log_prob"], mask_BT & safe_BT),
            "entropy": means["entropy"],
            "pruned_entropy": means["pruned_entropy"],
            "sum_p_squared": means["sum_p_squared"],
            **pruned_mass_metrics(statistics["pruned_mass"], mask_BT),
            "safe_size": means["safe_size"],
            "outside_safe_fraction": (mask_BT & ~safe_BT).sum().item() / tokens,
            "kept_fraction": update.weights.kept_B.float().mean().item(),
            "vetoed_fraction": update.weights.vetoed_B.float().mean().item(),
            "filtered_fraction": update.weights.filtered_B.float().mean().item(),
            "masked_fraction": (mask_BT & (update.weight_BT == 0)).sum().item() / tokens,
        }

    def _noise(self, rollout: Rollout, statistics: dict[str, torch.Tensor]) -> dict:
        """The control without which no mismatch can be blamed on the engine: the trainer against itself.

        At another batch shape, and in bf16 (in fp32, if it trains in bf16).
        """
        mask_BT = rollout.batch.response_BT
        others = {"shape": {"micro_batch": 1}, "bf16": {"bf16": not self.trainer.bf16}}
        return {
            f"{name}_{kind}": value
            for kind, options in others.items()
            for name, value in self_noise(
                statistics["log_prob"], self._score(rollout, **options)["log_prob"], mask_BT
            ).items()
        }

    def _optimise(self, rollout: Rollout, statistics: dict[str, torch.Tensor]) -> dict | None:
        """One optimiser step on some responses; None if nothing would move the weights."""
        update = self._prepare(rollout, statistics)
        # A group whose rewards are all equal, and a rejected response, contribute exactly nothing: left out.
        useful_B = ((update.weight_BT != 0) & (update.advantage_BT != 0)).any(dim=1)
        if not useful_B.any():
            return None
        clipped = []
        micro_batches = useful_B.nonzero().squeeze(1).split(self.config.micro_batch_size)
        mine = [(rows_b, update.weight_BT) for rows_b in ranks.share(micro_batches)]
        # Every pass is one of all ranks: one that has no micro-batch left takes part with a response that weighs 0.
        rounds = ranks.rounds(len(micro_batches))
        mine += [(micro_batches[0][:1], torch.zeros_like(update.weight_BT))] * (rounds - len(mine))
        for index, (rows_b, weight_BT) in enumerate(mine):
            batch = rollout.batch.rows(rows_b)
            width = batch.tokens_BT.shape[1]
            mask_bT, old_bT, weight_bT, advantage_bT = (
                values_BT[rows_b, :width].to(self.trainer.device)
                for values_BT in (
                    rollout.batch.response_BT,
                    statistics["pruned_log_prob"],
                    weight_BT,
                    update.advantage_BT,
                )
            )

            def loss(
                statistics: TokenStatistics,
                mask_bT=mask_bT,
                old_bT=old_bT,
                weight_bT=weight_bT,
                advantage_bT=advantage_bT,
            ) -> torch.Tensor:
                result = policy_loss(
                    self.loss_rule,
                    _unflatten(statistics.pruned_log_prob, mask_bT),
                    old_bT,
                    weight_bT,
                    advantage_bT,
                    mask_bT,
                    update.weights.denominator,
                )
                clipped.append(result.clipped_BT.sum().item())
                return result.loss

            self.trainer.forward_backward(batch, self.safe.trainer, loss, last=index == rounds - 1)
        norm = self.trainer.gradient_norm
        if not math.isfinite(norm):
            raise DvpError(f"the gradient's norm is {norm}: training diverged; lower training.learning_rate")
        # OTB's read-outs are of the mean over all responses.
        mean_norm = norm * update.weights.denominator / len(rollout.rewards_B)
        return {
            "gradient_norm": norm,
            "clipped_fraction": sum(ranks.gather(sum(clipped))) / rollout.batch.response_BT.sum().item(),
            **otb_variance_readouts(update.advantage_BT, update.responses, mean_norm),
        }


def run_loop(
    loop: Loop,
    folder: Path,
    checkpoints: Path,
    on_step: Callable[[dict], None],
) -> tuple[Path, list[dict]]:
    """Train to the last step, from the newest checkpoint below `checkpoints` if there is one.

    folder : the run's folder, where metrics.jsonl grows.
    on_step : called with each row, restored ones included.
    Returns the final checkpoint and all rows. Told to stop by a signal, the loop gives up a rollout or finishes an
    update, saves what is done and raises Stopped.
    Raises DvpError, naming the step, for what goes wrong in one; if all checkpoints are damaged; if the disk is full.
    """
    config, stop = loop.config, loop.stop
    metrics_file = folder / "metrics.jsonl"
    rows = _restore(loop, metrics_file, checkpoints)
    for row in rows:
        loop.observe(row)
        on_step(row)
    loop.engine.load_weights(loop.trainer.weights())
    folder.mkdir(parents=True, exist_ok=True)
    saved = len(rows)

    def save() -> None:
        nonlocal saved
        # A step measures before it updates: what the last update broke would be seen in the next step only.
        if not all(value.isfinite().all() for _, value in loop.trainer.weights()):
            raise DvpError(
                f"step {len(rows)}: its update left weights that are not finite; lower training.learning_rate"
            )
        checkpoint.save(checkpoints, len(rows), loop.trainer, metrics_file, config.keep_checkpoints)
        saved = len(rows)

    with stop:
        while len(rows) < config.steps:
            try:
                row = _step(loop, len(rows) + 1)
            except Abandoned:
                pass
            else:
                if ranks.is_main():
                    _append(metrics_file, row)
                rows.append(row)
                on_step(row)
                if len(rows) % config.checkpoint_every == 0 or len(rows) == config.steps:
                    save()
            if stop.requested() and len(rows) < config.steps:
                # A run goes on with the engine's weights equal to the trainer's; between two of its updates, a stale
                # engine's are not.
                if len(rows) > saved and len(rows) % config.synchronise_every == 0:
                    save()
                stop.leave(len(rows), saved)
    return checkpoint.checkpoints(checkpoints)[-1], rows


def _step(loop: Loop, step: int) -> dict:
    """A step whose errors name it, and whose numbers are finite."""
    try:
        row = loop.step(step)
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise DvpError(f"{name} is {value}: training diverged; lower training.learning_rate")
    except DvpError as error:
        raise DvpError(f"step {step}: {error}") from error
    return row


def _append(metrics_file: Path, row: dict) -> None:
    if not ranks.is_main():
        return
    try:
        append_line(metrics_file, json.dumps(row, allow_nan=False))
    except OSError as error:
        raise DvpError(
            f"{metrics_file}: cannot be written ({error.strerror}); run again to continue from the last checkpoint"
        ) from error


def _restore(loop: Loop, metrics_file: Path, checkpoints: Path) -> list[dict]:
    """Load the newest whole checkpoint, if any, and put its copy of metrics.jsonl in place; the rows of it."""
    restored = checkpoint.restore(checkpoints, loop.trainer)
    if restored is None:
        if ranks.is_main():
            metrics_file.unlink(missing_ok=True)
        return []
    path, metrics = restored
    # The run's own file may be ahead of the checkpoint, or of other settings that were tried in between.
    if ranks.is_main():
        write_text(metrics_file, metrics)
        print(f"continuing from {path}", file=sys.stderr)
    return [json.loads(line) for line in metrics.splitlines()]


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


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _unflatten(values_N: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Per-token values back at their positions; 0 (False) elsewhere."""
    return torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=values_N.device).masked_scatter(mask_BT, values_N)
