"""Run the RL loop: rollouts by the engine, rewards by the verifier, updates by the trainer, weights back to the engine.

By default each step draws fresh responses from the current weights and takes one optimiser step (fully on-policy):
whatever differs between trainer and engine then differs because of the engine's numerics. metrics.jsonl is the source
of truth; MLflow is fed from the same rows.

Read from the top: `run_loop` is a run, `Loop.step` a step, and what a step does follows in its order.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch

from dvp import node
from dvp.core.advantages import ADVANTAGES, otb_variance_readouts
from dvp.core.batch import Rollout, unflatten
from dvp.core.collapse import CollapseDetector
from dvp.core.diagnostics import mismatch_metrics, rollout_metrics
from dvp.core.head import TokenStatistics
from dvp.core.length_decay import LearningRateShare
from dvp.core.objective import gradient_at_rollout, policy_loss
from dvp.core.update import Update, make_update
from dvp.data.reward import VERIFIER, Grader
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.grid import Run
from dvp.files import append_line, write_text
from dvp.rollout.engine import Completion, Engine, Sampling
from dvp.rollout.seeds import derived_seed
from dvp.rollout.turns import turn_metrics
from dvp.training import checkpoint, ranks
from dvp.training.agreement import Agreement
from dvp.training.backend import Trainer
from dvp.training.drift import Drift
from dvp.training.responses import RESPONSES, ResponseRecorder
from dvp.training.rollouts import Problems, in_a_line, prompt_rows, with_sets
from dvp.training.stopping import Abandoned, Lost, StopRequest

UPDATE_METRICS = (
    *("gradient_norm", "clipped_fraction", "left_safe_fraction"),
    *("otb_signal", "otb_power", "otb_noise"),
)
NOISE_RESPONSES = 16
"""Responses on which the trainer's own noise is measured: all of them would take longer than the rest of a step."""


def run_loop(
    loop: "Loop",
    folder: Path,
    checkpoints: Path,
    on_step: Callable[[dict], None],
) -> tuple[Path, list[dict]]:
    """Train to the last step, from the newest checkpoint below `checkpoints` if there is one.

    folder : the run's folder, where metrics.jsonl and responses.parquet grow.
    on_step : called with each row, restored ones included.
    Returns where the final weights are, and all rows. Stopped by a signal, the loop abandons a rollout or finishes an
    update, saves what is done and raises Stopped.
    Raises DvpError, naming the step, for an error in one, and leaves the responses up to it beside the checkpoints; if
    all checkpoints are damaged; if engine and trainer do not agree (see `Agreement`).
    """
    config, stop = loop.config, loop.stop
    metrics_file, responses_file = folder / "metrics.jsonl", folder / RESPONSES
    rows = _restore(loop, metrics_file, checkpoints)
    loop.restored = len(rows)
    for row in rows:
        loop.observe(row)
        on_step(row)
    loop.engine.load_weights(loop.trainer.weights())
    loop.agreement.check()
    folder.mkdir(parents=True, exist_ok=True)
    saved, saving = len(rows), None

    def save() -> None:
        nonlocal saved, saving
        if ranks.is_main():
            loop.recorder.write(responses_file)
            # The whole file, as a new Snakemake deletes a run's files before its job learns that the run resumes.
            write_text(metrics_file, "".join(f"{_line(row)}\n" for row in rows))
        growing, constant = [metrics_file, responses_file], [loop.drift.write] if loop.drift else []
        saving = checkpoint.Saving(checkpoints, len(rows), loop.trainer, growing, constant)
        saved = len(rows)

    def finish_saving() -> None:
        nonlocal saving
        if saving is not None:
            last, saving = saving, None
            last.finish()
            given_up = loop.engine.ranks == 1  # then a stop abandons a rollout at once
            seconds_step = max(row["seconds"] - (row["seconds_rollout"] if given_up else 0) for row in rows)
            stop.saved(last.seconds, seconds_step)

    with stop:
        while len(rows) < config.steps:
            row, lost = None, False
            try:
                row = _step(loop, len(rows) + 1)
            except Abandoned as error:
                lost = isinstance(error, Lost)
            except DvpError:
                # Not among the run's files: Snakemake deletes those of a job that failed.
                if ranks.is_main() and loop.recorder.rows:
                    loop.recorder.write(checkpoints / RESPONSES)
                if ranks.count() == 1:  # with several, other ranks may not get here
                    finish_saving()
                raise
            # The checkpoint was written during this step, whose rollout needs little of the machine.
            finish_saving()
            if row is not None:
                _append(metrics_file, row)
                rows.append(row)
                on_step(row)
                # Before the checkpoint, so that a run that resumes from it has these weights.
                if len(rows) in loop.kept:
                    checkpoint.keep_weights(
                        checkpoints, len(rows), loop.trainer, loop.problems.prompts[: checkpoint.PROBE_PROMPTS]
                    )
                if len(rows) % config.checkpoint_every == 0 or len(rows) == config.steps:
                    save()
            if stop.requested() and len(rows) < config.steps:
                # A run resumes with the trainer's weights in the engine, so it may only be saved where an engine with
                # stale weights has just got new ones.
                if len(rows) > saved and len(rows) % config.synchronise_every == 0 and not lost:
                    save()
                finish_saving()
                stop.leave(len(rows), saved)
        finish_saving()
    final = checkpoint.kept_weights(checkpoints, config.steps)
    if not final.is_dir():  # of a run that an older version of this code finished
        checkpoint.keep_weights(
            checkpoints, config.steps, loop.trainer, loop.problems.prompts[: checkpoint.PROBE_PROMPTS]
        )
    return final, rows


class Loop:
    """The training of one run: everything that a step needs and nothing that outlives the run."""

    def __init__(
        self,
        experiment: Experiment,
        run: Run,
        problems: pd.DataFrame,
        prompts: list[list[int]],
        pad: int,
        trainer: Trainer,
        engine: Engine,
        recorder: ResponseRecorder,
        grader: Grader = VERIFIER,
    ):
        """Set up a run that trains on `problems`, rows (id, answer) of data/train.parquet.

        prompts : the problems' token ids.
        Raises DvpError if a prompt and its response could be longer than the model's context.
        """
        self.config = experiment.training_of(run)
        self.kept = [*experiment.evaluated_steps(run), self.config.steps]
        """Steps after which the weights are evaluated."""
        self.run = run
        method = experiment.methods[run.method]
        self.safe = experiment.sides_of(run)
        self.importance, self.mask = method.importance, method.mask
        self.advantage = ADVANTAGES[method.advantage]
        self.loss = method.loss
        decay = method.learning_rate_decay
        self.learning_rate_share = None if decay is None else LearningRateShare(decay)
        self.tools = experiment.tools
        self.collapse = CollapseDetector()
        self.trainer = trainer
        self.engine = engine
        self.recorder = recorder
        self.stop = StopRequest()
        self.restored = 0
        """Steps in the checkpoint from which training resumed; 0 without one."""
        self.ids = list(problems["id"])
        places = [
            f"data/train.parquet: row {row} (id {name})" for row, name in zip(problems.index + 1, self.ids, strict=True)
        ]
        self.problems = Problems(places, list(problems["answer"]), prompts, pad, grader)
        self.problems.check_context(engine.max_model_len, self.config.max_response_tokens)
        self.agreement = Agreement(trainer, engine, prompts, run.seed, experiment.engines[run.engine])
        self.drift = Drift(trainer, engine, prompts, pad, run.seed) if self.config.drift_every else None

    def step(self, step: int) -> dict:
        """Take one step (1-based) and return its row of metrics.jsonl."""
        times = [time.perf_counter()]
        rows = self.rows(step)
        completions = self.sample(step, rows)
        times.append(time.perf_counter())

        rollout = self.graded(rows, completions)
        rollout = replace(rollout, batch=self.trainer.sharing_prompts(rollout.batch))
        times.append(time.perf_counter())

        metrics = self.learn(step, rows, rollout)
        times.append(time.perf_counter())

        if step % self.config.synchronise_every == 0:
            self.synchronise()
        times.append(time.perf_counter())

        seconds = [after - before for before, after in pairwise(times)]
        tokens = int(rollout.batch.response_BT.sum())
        row = {
            "step": step,
            "reward": rollout.rewards_B.mean().item(),
            "rho": self.safe.rho,
            **metrics,
            "response_tokens_mean": tokens / len(rollout.rewards_B),
            "truncated_fraction": rollout.truncated_B.float().mean().item(),
            **(turn_metrics([completion for group in completions for completion in group]) if self.tools else {}),
            "tokens_per_second": tokens / (times[-1] - times[0]),
            **dict(zip(("seconds_rollout", "seconds_reward", "seconds_update", "seconds_sync"), seconds, strict=True)),
            "seconds": times[-1] - times[0],
        }
        if self.drift is not None and (step == 1 or step % self.config.drift_every == 0):
            row |= self._drift()
        # Times differ between ranks; what is decided from a row must not.
        row = ranks.gather(row)[0]
        if metrics["updates"] and step % self.config.synchronise_every == 0:
            try:
                self.agreement.check_again()
            except Exception:
                # An engine's own processes die of a stop signal, too; the run is checked again when it resumes.
                if self.stop.signal is None:
                    raise
        self.observe(row)
        self.recorder.settle(step, self.collapse.collapsed_at)
        return row | {"collapsed": self.collapse.collapsed_at is not None}

    def _drift(self) -> dict:
        """Measure the drift. Raises Lost where an engine's own processes have died of a stop signal."""
        measured = None
        try:
            measured = self.drift.measure()
        except Exception:
            if self.stop.signal is None:
                raise
        if None in ranks.gather(measured):
            raise Lost
        return measured

    def observe(self, row: dict) -> None:
        """Update what follows a run from step to step with the row of a finished one, of now or of a checkpoint.

        That is the safe vocabulary, the share of the learning rate and the collapse detector.
        """
        self.safe.observe(row)
        if self.learning_rate_share is not None:
            self.learning_rate_share.observe(row)
            self.trainer.scale_learning_rate(self.learning_rate_share.value)
        self.collapse.observe(row["step"], row)

    def rows(self, step: int) -> list[int]:
        """Return the rows of the problems that a step trains on."""
        return prompt_rows(len(self.problems.prompts), self.config.prompts_per_step, step, self.run.seed)

    def sample(self, step: int, rows: list[int]) -> list[list[Completion]]:
        """Sample the group of responses to each prompt; every engine samples those to its share of the prompts.

        This is the longest part of a step, and may be abandoned, as the weights are still those of the last step. The
        ids of the sets that are reported stay on a rank of the engine that sampled from them.
        Raises DvpError if the engine fails, Abandoned if the run was told to stop.
        """
        mine = ranks.share(rows, self.engine.ranks)
        sampling = Sampling(
            max_tokens=self.config.max_response_tokens,
            n=self.config.group_size,
            temperature=self.config.temperature,
            safe_vocabulary=self.safe.engine,
            report_sets=self.config.sets_reported(self.safe),
        )
        seeds = [derived_seed(self.run.seed, step, row) for row in mine]
        # Ranks that share an engine wait for each other all the time, so none of them can leave alone.
        with self.stop.abandonable(self.engine.ranks == 1):
            try:
                completions = self.generate([self.problems.prompts[row] for row in mine], sampling, seeds)
            except DvpError:
                raise
            except Exception as error:
                raise DvpError(f"the engine died in the rollout ({in_a_line(error)}); run again to continue") from error
        self.rest(step)
        # Sets are a step's largest data: they stay here until it is known which rank computes with them.
        known = [[replace(one, kept=one.kept and one.kept.without_ids()) for one in group] for group in completions]
        everyone = ranks.join(known, len(rows), self.engine.ranks)
        if ranks.rank() % self.engine.ranks == 0:
            everyone[ranks.own(self.engine.ranks)] = completions
        return everyone

    def generate(self, prompts: list[list[int]], sampling: Sampling, seeds: list[int]) -> list[list[Completion]]:
        """Sample this engine's share of the responses."""
        return self.engine.generate(prompts, sampling, seeds)

    def graded(self, rows: list[int], completions: list[list[Completion]]) -> Rollout:
        """Reward the responses to these problems."""
        return self.problems.graded(rows, completions)

    def rest(self, step: int) -> None:
        """Put the engine to sleep while the trainer works; it keeps weights that this step does not replace."""
        self.engine.sleep(keep_weights=step % self.config.synchronise_every != 0)

    def synchronise(self) -> None:
        """Hand the trainer's weights to the engine."""
        self.engine.load_weights(self.trainer.weights())

    def learn(self, step: int, rows: list[int], rollout: Rollout) -> dict:
        """Score, diagnose and record the responses to these problems, and update the weights; return the metrics."""
        statistics = self.score(rollout)
        update = self.prepare(rollout, statistics)
        metrics = rollout_metrics(rollout, statistics, update)
        if self.learning_rate_share is not None:
            metrics["learning_rate"] = self.trainer.learning_rate
        if step == 1:
            metrics |= self._noise(rollout, statistics)
        if ranks.is_main():
            asked = [(self.ids[row], self.problems.answers[row]) for row in rows for _ in range(self.config.group_size)]
            self.recorder.record(step, asked, rollout, statistics, update)
        if self.trainer.device.type == "cpu":
            node.return_freed_memory()  # the update's blocks do not fit into the holes that scoring has left
        return metrics | self._update(rollout, statistics)

    def score(self, rollout: Rollout, **options) -> dict[str, torch.Tensor]:
        """Return the trainer's statistics of every response token, each (B, T), 0 elsewhere.

        This is a pass of its own, although the update's forward pass computes the same numbers again, because it says
        which responses the update needs. MIS rejects so many of any long ones that one pass over all of them would cost
        more (`make bench` measures both), and OTB needs the weights of the whole group before any gradient.

        options : of Trainer.score.
        Raises DvpError if a log-prob is not finite.
        """
        statistics = self.trainer.score(rollout.batch, self.safe.trainer, **options)
        if not statistics["log_prob"].isfinite().all():
            raise DvpError("the trainer's log-probs are not finite: training diverged; lower training.learning_rate")
        return statistics

    def prepare(self, rollout: Rollout, statistics: dict[str, torch.Tensor]) -> Update:
        """Compute weights and advantages of some responses by the run's method."""
        return make_update(
            rollout,
            statistics,
            importance=self.importance,
            advantage=self.advantage,
            group_size=self.config.group_size,
            mask=self.mask,
        )

    def _noise(self, rollout: Rollout, statistics: dict[str, torch.Tensor]) -> dict:
        """Measure the trainer against itself: the control without which no mismatch can be blamed on the engine.

        It scores some responses again at another batch shape, and in bf16 (in fp32, if it trains in bf16).
        """
        noise = {}
        rows_b = torch.arange(min(NOISE_RESPONSES, len(rollout.rewards_B)))
        rollout = rollout.rows(rows_b)
        for kind, options in {"shape": {"tokens": 1}, "bf16": {"bf16": not self.trainer.bf16}}.items():
            again_BT = self.score(rollout, **options)["log_prob"]
            values = mismatch_metrics(statistics["log_prob"][rows_b] - again_BT, rollout.batch.response_BT)
            noise |= {f"self_noise_{name}_{kind}": value for name, value in values.items()}
        return noise

    def _update(self, rollout: Rollout, statistics: dict[str, torch.Tensor]) -> dict:
        """Take the step's optimiser steps, each on a minibatch of whole groups that is a batch of its own.

        A minibatch whose weights or advantages are all zero takes no step. Returns metrics, as means over the steps
        taken.
        """
        responses = torch.arange(len(rollout.rewards_B))
        taken = []
        for index, rows_b in enumerate(responses.split(len(responses) // self.config.minibatches)):
            part = rollout.rows(rows_b)
            # A loss without a ratio to the rollout's policy needs importance weights of the current policy.
            if index > 0 and not self.loss.has_ratio:
                old = self.score(part)
            else:
                old = {name: values_BT[rows_b] for name, values_BT in statistics.items()}
            metrics = self._optimise(part, old, statistics["target_in_safe"][rows_b], moved=index > 0)
            if metrics is not None:
                taken.append(metrics)
        result: dict = {"skipped": not taken, "updates": len(taken)}
        for name in UPDATE_METRICS:
            values = [metrics[name] for metrics in taken if metrics.get(name) is not None]
            result[name] = fmean(values) if values else None
        return result

    def _optimise(
        self, rollout: Rollout, statistics: dict[str, torch.Tensor], safe_before_BT: torch.Tensor, *, moved: bool
    ) -> dict | None:
        """Take one optimiser step on some responses and return its metrics; None if nothing would move the weights.

        safe_before_BT : which of their tokens were inside V_S when the whole rollout was scored.
        moved : whether the weights have moved since.
        """
        # Tokens that have left V_S since the rollout was scored: scored anew, they have weight 0 already.
        gone_BT = rollout.batch.response_BT & safe_before_BT & ~statistics["target_in_safe"]
        update = self.prepare(rollout, statistics)
        # A group whose rewards are all equal, and a rejected response, contribute exactly nothing, and are left out.
        useful_B = ((update.weight_BT != 0) & (update.advantage_BT != 0)).any(dim=1)
        if not useful_B.any():
            return None
        micro_batches = rollout.batch.micro_batches(self.config.tokens_per_micro_batch, useful_B.nonzero()[:, 0])
        # All ranks take part in every pass: one that has no micro-batch left computes a response of weight 0.
        dealt = ranks.deal([(rows_b, True) for rows_b in micro_batches], (micro_batches[0][:1], False))
        mine = dealt[ranks.rank()]
        whole = replace(rollout.batch, kept=None)
        if self.safe.replayed:
            whole = with_sets(rollout.batch, [[rows_b for rows_b, _ in of_rank] for of_rank in dealt])
        counts = {"clipped": 0, "left": 0}
        constants = (update.weight_BT, update.advantage_BT, rollout.batch.response_BT)
        # Until the weights have moved the ratio is 1. (The scoring's log-probs, of other micro-batches, differ by
        # rounding, in bf16 by more than GSPO's bounds.)
        gradient_BT = None
        if not (moved and self.loss.has_ratio):
            gradient_BT = gradient_at_rollout(self.loss, *constants, update.weights.denominator)
        for index, (rows_b, counted) in enumerate(mine):
            batch = whole.rows(rows_b)
            width = batch.tokens_BT.shape[1]
            if gradient_BT is None:
                tensors = (statistics["pruned_log_prob"], counted * update.weight_BT, *constants[1:])
                parts = [values_BT[rows_b, :width].to(self.trainer.device) for values_BT in tensors]
                loss, gradient_N = partial(self._loss, counts, update.weights.denominator, *parts), None
            else:
                gradient_bT = counted * gradient_BT[rows_b, :width]
                batch = batch.only(gradient_bT != 0)
                loss, gradient_N = partial(_objective, counts), gradient_bT[batch.response_BT]
            self.trainer.forward_backward(batch, self.safe.trainer, loss, index == len(mine) - 1, gradient_N)
        norm = self.trainer.gradient_norm
        if not math.isfinite(norm):
            raise DvpError(f"the gradient's norm is {norm}: training diverged; lower training.learning_rate")
        tokens = rollout.batch.response_BT.sum().item()
        every = ranks.gather({name: int(count) for name, count in counts.items()})
        result = {
            "gradient_norm": norm,
            "clipped_fraction": sum(of_rank["clipped"] for of_rank in every) / tokens,
            "left_safe_fraction": (gone_BT.sum().item() + sum(of_rank["left"] for of_rank in every)) / tokens,
        }
        if self.loss.by_token:
            # OTB's read-outs are about the gradient of the mean over all responses.
            mean_norm = norm * update.weights.denominator / len(rollout.rewards_B)
            result |= otb_variance_readouts(update.advantage_BT, update.weight_BT, update.responses, mean_norm)
        return result

    def _loss(
        self,
        counts: dict[str, int],
        denominator: int,
        old_bT: torch.Tensor,
        weight_bT: torch.Tensor,
        advantage_bT: torch.Tensor,
        mask_bT: torch.Tensor,
        now: TokenStatistics,
    ) -> torch.Tensor:
        """Return the loss of one micro-batch, and add to `counts` its clipped tokens and those now outside V_S.

        V_S has moved with the weights since the scoring.
        old_bT : log π_old.
        """
        log_prob_bT, safe_bT = (unflatten(values, mask_bT) for values in (now.pruned_log_prob, now.target_in_safe))
        counts["left"] += (mask_bT & (weight_bT != 0) & ~safe_bT).sum()
        weight_bT = torch.where(safe_bT, weight_bT, 0.0)
        result = policy_loss(self.loss, log_prob_bT, old_bT, weight_bT, advantage_bT, mask_bT, denominator)
        counts["clipped"] += result.clipped_BT.sum()
        return result.loss


def _objective(counts: dict[str, int], now: TokenStatistics) -> torch.Tensor:
    """Return the loss of one micro-batch whose gradient is known, and count its tokens outside V_S in `counts`.

    V_S moves with the batch's rounding alone.
    """
    counts["left"] += (~now.target_in_safe).sum()
    return now.objective


def _step(loop: Loop, step: int) -> dict:
    """Take a step, name it in errors, and check that its numbers are finite. Raises DvpError."""
    try:
        row = loop.step(step)
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise DvpError(f"{name} is {value}: training diverged; lower training.learning_rate")
    except DvpError as error:
        raise DvpError(f"step {step}: {error}") from error
    return row


def _append(metrics_file: Path, row: dict) -> None:
    try:
        if ranks.is_main():
            append_line(metrics_file, _line(row))
    except OSError as error:
        raise DvpError(
            f"{metrics_file}: cannot be written ({error.strerror}); run again to continue from the last checkpoint"
        ) from error


def _line(row: dict) -> str:
    return json.dumps(row, allow_nan=False)


def _restore(loop: Loop, metrics_file: Path, checkpoints: Path) -> list[dict]:
    """Load the newest whole checkpoint, if any, put its metrics.jsonl and responses in place, and return its rows."""
    restored = checkpoint.restore(checkpoints, loop.trainer)
    if loop.drift is not None:
        loop.drift.start() if restored is None else loop.drift.restore(restored[0])
    if restored is None:
        if ranks.is_main():
            metrics_file.unlink(missing_ok=True)
        return []
    path, metrics = restored
    # The run's own file may be ahead of the checkpoint, or come from other settings that were tried in between.
    if ranks.is_main():
        write_text(metrics_file, metrics)
        loop.recorder.restore(path / RESPONSES)
        loop.recorder.write(metrics_file.with_name(RESPONSES))
        print(f"continuing from {path}", file=sys.stderr)
    return [json.loads(line) for line in metrics.splitlines()]
