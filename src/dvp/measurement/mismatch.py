"""Measure the mismatch of trainer and engine at a fixed policy, over the whole vocabulary at the engine's positions.

The engine samples from its full distribution, at temperature 1; the trainer, fp32, scores the same positions. Two
controls show how much of the mismatch is not the engine's: the trainer at another batch shape (`shape`) and under bf16
autocast (`bf16`), each in the engine's place. Sums per problem are written, which suffice for intervals over problems,
and the log-probs of the sampled tokens.

The trainer's hidden states are kept and logits computed for some positions at a time, so that the engine's
distributions, four bytes per entry, take most of the memory.
"""

from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from dvp import node
from dvp.core.batch import Batch
from dvp.core.diagnostics import mismatch_metrics
from dvp.core.importance import PRESETS
from dvp.core.safe_vocabulary import FixedRho, SafeVocabulary, safe_mask, with_margin
from dvp.core.vocabulary_mismatch import epsilon, kl, normalised, outside
from dvp.experiment.config import Experiment
from dvp.experiment.grid import Measurement, parse_rho
from dvp.measurement.files import D_EDGES, ENGINE, SOURCES, TABLES, TOKENS, write_tables
from dvp.measurement.vocabulary_mismatch import (
    GAP_EDGES,
    POSITION_MEANS,
    PROBABILITY_EDGES,
    REST_EDGES,
    TOLERANCE,
    add,
    bounds,
    by_gap,
    histogram,
    prefixes,
    safe_sets,
)
from dvp.progress import Progress
from dvp.rollout.engine import Completion, Engine, Sampling
from dvp.rollout.seeds import derived_seed
from dvp.training.backend import Policy
from dvp.training.rollouts import Problems

ELEMENTS = 2**21
"""Entries of distributions compared at once, positions times vocabulary; each needs a dozen 64-bit numbers."""
MIS = PRESETS["mis"].model_copy(update={"veto": PRESETS["veto"].veto})
"""The rule of the catalogue's `rloo_mis`."""
EDGES = {
    "histogram": [("p", PROBABILITY_EDGES), ("d", D_EDGES)],
    "gaps": [("gap", GAP_EDGES)],
    "bounds": [("rest", REST_EDGES)],
}
"""The binned tables: name and bin edges of each of their dimensions."""


def measure_mismatch(
    experiment: Experiment,
    measurement: Measurement,
    ids: list[str],
    problems: Problems,
    model: PreTrainedModel,
    engine: Engine,
    folder: Path,
) -> dict:
    """Measure the mismatch and write the TABLES, and TOKENS, as NAME.parquet to `folder`.

    `model` is the trainer's policy, fp32. Returns counts, the main means, and the files' checksums.
    """
    settings = experiment.mismatch
    sampling = Sampling(max_tokens=experiment.training.max_response_tokens, n=settings.responses, whole_vocabulary=True)
    policy = Policy(model.eval())
    policy.check(problems.prompts)
    tables: dict[str, list[pd.DataFrame]] = {name: [] for name in (*TABLES, TOKENS)}
    progress = Progress(f"mismatch {measurement.path}", len(ids))
    truncated = 0
    for index, (name, prompt) in enumerate(zip(ids, problems.prompts, strict=True)):
        completions = engine.generate([prompt], sampling, [derived_seed(measurement.seed, 0, index)])[0]
        batch = Batch.collate(
            [prompt] * len(completions), [completion.token_ids for completion in completions], problems.pad
        )
        truncated += sum(completion.finish_reason == "length" for completion in completions)
        rewards = [problems.reward(index, completion) for completion in completions]
        for table, rows in _measured(experiment, completions, _Scores(policy, batch), rewards).items():
            tables[table].append(rows.assign(problem=name))
        if model.device.type == "cpu":
            node.return_freed_memory()  # each response has other shapes: 384 took 8.4 GB where 1 takes 4
        progress.step(index + 1, f"{sum(len(completion.token_ids) for completion in completions)} tokens")
    written = {name: pd.concat(frames, ignore_index=True) for name, frames in tables.items()}
    return {
        "measurement": measurement.path,
        "problems": len(ids),
        "responses": len(ids) * settings.responses,
        "truncated": truncated,
        "vocabulary": model.config.vocab_size,
        "tolerance": TOLERANCE,
        **_headline(written),
        "files": write_tables(written, folder),
    }


class _Scores:
    """The trainer's log-probs at the positions of each response: as it is ("train"), and as either control."""

    @torch.no_grad()
    def __init__(self, policy: Policy, batch: Batch):
        self._policy, self.device = policy, next(policy.parameters()).device
        batch = batch.to(self.device)
        every = torch.arange(len(batch.tokens_BT), device=self.device)
        lengths = batch.response_BT.sum(dim=1).tolist()
        hidden = {"train": policy.scored(batch)[0], "shape": torch.cat([self._alone(batch, row) for row in every])}
        with self._precision("bf16"):
            hidden["bf16"] = policy.scored(batch)[0]
        self._hidden = {source: hidden_NH.split(lengths) for source, hidden_NH in hidden.items()}

    def _alone(self, batch: Batch, row: torch.Tensor) -> torch.Tensor:
        return self._policy.scored(batch.rows(row[None]))[0]

    def _precision(self, source: str) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=source == "bf16")

    @torch.no_grad()
    def log_probs(self, source: str, response: int, positions: slice) -> torch.Tensor:
        """Return log-probs (N, V) of some of a response's positions, float64.

        The control `shape` also splits the head's matrix product.
        """
        hidden_NH = self._hidden[source][response][positions]
        parts = hidden_NH.tensor_split(2) if source == "shape" else [hidden_NH]
        with self._precision(source):
            return normalised(torch.cat([self._policy.logits(part_nH) for part_nH in parts]))


def _measured(
    experiment: Experiment, completions: list[Completion], scores: _Scores, rewards: list[float]
) -> dict[str, pd.DataFrame]:
    """Return one problem's rows of every table."""
    # Summed at once: small arrays kept among short-lived blocks of 33 MB would fragment the memory.
    sums: dict[str, dict[str, dict]] = {name: defaultdict(dict) for name in (*EDGES, "noise")}
    sets, lengths, sampled = [], [], []
    for response, completion in enumerate(completions):
        own_sets, own_tokens = [], []
        size = max(1, ELEMENTS // completion.vocabulary_log_probs_TV.shape[1])
        for start in range(0, len(completion.token_ids), size):
            part = slice(start, start + size)
            tokens_N = torch.tensor(completion.token_ids[part], device=scores.device)
            log_p_NV = scores.log_probs("train", response, part)
            row = {"token": tokens_N, "log_p": _of(log_p_NV, tokens_N)}
            for source in SOURCES:
                if source == ENGINE:
                    log_q_NV = normalised(completion.vocabulary_log_probs_TV[part].to(scores.device))
                    own_sets += _safe_sets(experiment, log_p_NV, log_q_NV, tokens_N)
                    row |= {"log_q": _of(log_q_NV, tokens_N), "kl": kl(log_q_NV, log_p_NV)}
                    add(sums["bounds"][source], bounds(log_p_NV, log_q_NV))
                else:
                    log_q_NV = scores.log_probs(source, response, part)
                    row[f"log_p_{source}"] = _of(log_q_NV, tokens_N)
                add(sums["histogram"][source], histogram(log_p_NV, log_q_NV))
                add(sums["gaps"][source], by_gap(log_p_NV, log_q_NV))
                add(sums["noise"][source], _noise(log_p_NV, log_q_NV, tokens_N))
            own_tokens.append(pd.DataFrame({name: values.cpu().numpy() for name, values in row.items()}))
        tokens = pd.concat(own_tokens, ignore_index=True)
        sets.append(_whole(pd.DataFrame(own_sets)).assign(response=response, reward=rewards[response]))
        log_ratio_T, kl_T = (torch.tensor(tokens[name].to_numpy()) for name in ("log_p", "kl"))
        log_ratio_T = log_ratio_T - torch.tensor(tokens["log_q"].to_numpy())
        rows = prefixes(log_ratio_T, kl_T, _lengths(experiment.training.max_response_tokens), MIS)
        lengths.append(pd.DataFrame(rows).assign(response=response))
        sampled.append(tokens.assign(response=response, position=range(len(tokens))))
    tables = {
        name: pd.concat(_bins(whole, edges).assign(source=source) for source, whole in sums[name].items())
        for name, edges in EDGES.items()
    }
    tables |= {"safe_sets": pd.concat(sets), "prefixes": pd.concat(lengths), TOKENS: pd.concat(sampled)}
    return tables | {"noise": pd.DataFrame({"source": source} | whole for source, whole in sums["noise"].items())}


def _of(log_prob_NV: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
    return log_prob_NV.gather(1, tokens_N[:, None]).squeeze(1)


def _whole(parts: pd.DataFrame) -> pd.DataFrame:
    """Combine the safe-set rows of a response's parts into those of the response: sums, and means over positions."""
    means = list(POSITION_MEANS)
    weighted = parts.assign(**{name: parts[name] * parts["tokens"] for name in means})
    whole = weighted.groupby(["rho", "margin", "side"], sort=False).sum(min_count=1).reset_index()
    return whole.assign(**{name: whole[name] / whole["tokens"] for name in means})


def _lengths(longest: int) -> list[int]:
    """List the powers of two below the length of the longest response, and that length."""
    return [2**power for power in range((longest - 1).bit_length())] + [longest]


def _bins(sums: dict[str, np.ndarray], edges: list[tuple[str, tuple[float, ...]]]) -> pd.DataFrame:
    """Return one row per bin that holds a pair: its edges (NAME_low, NAME_high) and its sums."""
    filled = sums["pairs"].nonzero()
    columns = {}
    for (name, values), index in zip(edges, filled, strict=True):
        columns |= {f"{name}_low": np.array(values)[index], f"{name}_high": np.array(values)[index + 1]}
    return pd.DataFrame(columns | {name: value[filled] for name, value in sums.items()})


def _noise(log_p_TV: torch.Tensor, log_q_TV: torch.Tensor, tokens_T: torch.Tensor) -> dict[str, float]:
    """Return sums, and maxima, over some positions of one response."""
    log_ratio_T = (log_p_TV - log_q_TV).gather(1, tokens_T[:, None]).squeeze(1)
    tokens = len(tokens_T)
    metrics = mismatch_metrics(log_ratio_T[None], torch.ones_like(log_ratio_T, dtype=torch.bool)[None])
    largest_T, deviation_T = epsilon(log_p_TV, log_q_TV)
    return {
        "tokens": tokens,
        "kl": kl(log_q_TV, log_p_TV).sum().item(),
        "k3": metrics["k3"] * tokens,
        "ratio_outside": metrics["ratio_outside_0.9_1.1"] * tokens,
        "d_positive": (log_ratio_T < 0).sum().item(),
        "epsilon_variance": deviation_T.square().sum().item(),
        "max_epsilon": largest_T.max().item(),
        "max_abs_log_ratio": metrics["max_abs_log_ratio"],
    }


def _safe_sets(
    experiment: Experiment, log_p_TV: torch.Tensor, log_q_TV: torch.Tensor, tokens_T: torch.Tensor
) -> list[dict]:
    """Return, for each ρ, one row without a margin and one per margin and side."""
    log_p = log_p_TV.gather(1, tokens_T[:, None]).sum().item()
    log_q = log_q_TV.gather(1, tokens_T[:, None]).sum().item()

    @cache
    def mask(train: bool, rule: SafeVocabulary) -> torch.Tensor:
        return safe_mask(log_p_TV if train else log_q_TV, rule)

    rows = []
    for rho in experiment.mismatch.rhos:
        plain = FixedRho(parse_rho(rho))
        sides = [("none", 0.0, plain, plain)]
        for margin in experiment.mismatch.margins:
            wider = with_margin(plain.rho, margin)
            sides += [("trainer", margin, wider, plain), ("engine", margin, plain, wider)]
        for side, margin, train, infer in sides:
            compared = safe_sets(log_p_TV, log_q_TV, mask(True, train), mask(False, infer), tokens_T)
            pruned = compared.pop("pruned_log_prob")
            rows.append(
                {"rho": rho, "margin": margin, "side": side, "tokens": len(tokens_T)}
                | compared
                | (outside(log_p_TV, log_q_TV, mask(True, train)) if side == "none" else {})
                | {"log_ratio": log_p - log_q, "pruned_log_ratio": pruned - log_q}
            )
    return rows


def _headline(tables: dict[str, pd.DataFrame]) -> dict:
    """Return the main numbers over all problems."""
    noise = tables["noise"].groupby("source").sum(numeric_only=True)
    first = tables["safe_sets"].drop_duplicates(["problem", "response"])
    pairs = tables["bounds"]
    return {
        "positions": int(noise.loc[ENGINE, "tokens"]),
        "pairs": int(pairs["pairs"].sum()),
        "reward": float(first["reward"].mean()),
        "kl": {source: float(noise.loc[source, "kl"] / noise.loc[source, "tokens"]) for source in SOURCES},
        "literal_violations": int(pairs["literal_violations"].sum()),
        "sharp_violations": int(pairs["sharp_violations"].sum()),
    }
