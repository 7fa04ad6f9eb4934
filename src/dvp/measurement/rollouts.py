"""Read responses that another trainer has dumped, with log-probs of engine and trainer, as rows of sampled tokens."""

import json
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dvp.errors import DvpError


@dataclass(frozen=True)
class Format:
    """A trainer's names for the columns of a response: all present `masks` apply, of the others the first present one.

    Without token ids the ids are -1, without a mask all tokens count, without problems intervals are over responses.
    """

    log_q: str
    log_p: str
    token: tuple[str, ...]
    masks: tuple[str, ...]
    problem: tuple[str, ...]


FORMATS = (
    Format("engine_logprobs", "trainer_logprobs", ("token_ids",), ("mask",), ("problem",)),
    # verl 0.9.1. Its `loss_mask` and `input_ids` have the prompt, too.
    Format("rollout_log_probs", "old_log_probs", ("responses",), ("response_mask",), ("uid",)),
    # TRL 1.16. Its `tool_mask` is 1 in the padding.
    Format(
        *("sampling_per_token_logps", "old_per_token_logps"),
        *(("completion_ids",), ("completion_mask", "tool_mask"), ("prompt", "prompt_ids")),
    ),
    # prime-rl's token_exports, and its micro-batches.
    Format("inference_logprobs", "trainer_logprobs", ("token_ids", "input_ids"), ("loss_mask",), ()),
)
LOWEST, SLACK = -40.0, 1e-4
"""Bounds of a usable log-prob, nats: a lower one is sampled less than once in 10¹⁷; rounding can exceed 0 by SLACK."""
MOST_LEFT_OUT = 0.1


@dataclass(frozen=True)
class Rollouts:
    """The responses of one step."""

    name: str
    """Mode and step; empty if the file does not say."""
    tokens: pd.DataFrame
    """One row per token that counts, in order; columns as dvp.measurement.files.TOKENS, `response` the file's row."""
    left_out: str
    """A sentence on how many tokens had no usable log-prob, and where; empty if all had one."""


def read_rollouts(file: Path) -> list[Rollouts]:
    """Read the first and the last step of each mode; a file without `step` and `mode` counts as one step.

    If a step was rerun after a restart, its last run is read.

    Args:
        file: *.jsonl or *.parquet, one response per row, columns of one of FORMATS.

    Raises:
        DvpError: a file that cannot be read, no columns of a format, lists of unequal length, no token that counts, or
            more than MOST_LEFT_OUT of the tokens without a usable log-prob, or a step's rows that are not together.
    """
    rows = list(_rows(file))
    if not rows:
        raise DvpError(f"{file}: no rows")
    columns = dict.fromkeys(name for row in rows for name in row)
    formats = [one for one in FORMATS if one.log_q in columns]
    if len(formats) != 1 or formats[0].log_p not in columns:
        known = "; ".join(f"{one.log_q} and {one.log_p}" for one in FORMATS)
        raise DvpError(f"{file}: expected the columns of one trainer: {known}; found {', '.join(map(str, columns))}")
    return [
        _read(file, name, [(number, rows[number]) for number in numbers], _found(formats[0], columns))
        for name, numbers in _parts(file, rows)
    ]


def _found(own: Format, columns: Container[str]) -> Format:
    """Return the columns that are present: by the trainer's own names, or else by those of others."""

    def there(name: str) -> tuple[str, ...]:
        every = [getattr(one, name) for one in (own, *FORMATS)]
        return next((found for names in every if (found := tuple(one for one in names if one in columns))), ())

    return Format(own.log_q, own.log_p, there("token")[:1], there("masks"), there("problem")[:1])


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        try:
            yield from pd.read_parquet(file).to_dict("records")
        except (OSError, ValueError) as error:
            raise DvpError(f"{file}: cannot be read: {' '.join(str(error).split())[:200]}") from None
        return
    if file.suffix != ".jsonl":
        raise DvpError(f"{file}: expected a file that ends in .jsonl or .parquet")
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise DvpError(f"{file}: row {number}: no JSON, or cut: {error}") from None
                if not isinstance(row, dict):
                    raise DvpError(f"{file}: row {number}: expected an object, a response's lists by name")
                yield row
    except (OSError, UnicodeDecodeError) as error:
        raise DvpError(f"{file}: cannot be read: {error}") from None


def _parts(file: Path, rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[int]]]:
    """Yield name and rows of each mode's first and last step; a step is a run of consecutive rows of a mode."""

    def step_of(number: int) -> int | float | None:
        step = rows[number].get("step")
        return step if isinstance(step, int | float) else None

    modes: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        modes.setdefault(str(row.get("mode") or ""), []).append(number)
    for mode, numbers in modes.items():
        together = [(step, list(own)) for step, own in groupby(numbers, step_of)]
        steps = dict(together)  # a rerun replaces the earlier one
        order = [step for step, _ in together if step is not None]
        known = sorted(set(order))
        for place, step in enumerate(order[1:], start=1) if len(known) < len(order) else ():
            # After a restart the steps rise again, one by one.
            if step < order[place - 1] and order[place + 1 : place + 2] != [known[known.index(step) + 1]]:
                raise DvpError(f"{file}: rows of step {step:g} are not together; sort the file by step")
        first = min(known, default=None)
        for step in dict.fromkeys([first, step_of(numbers[-1])]):
            yield ", ".join(filter(None, [mode, "" if step is None else f"step {step:g}"])), steps[step]


def _read(file: Path, name: str, rows: list[tuple[int, dict[str, Any]]], columns: Format) -> Rollouts:
    parts = [_tokens(row, columns, f"{file}: row {number + 1}").assign(response=number) for number, row in rows]
    tokens = pd.concat(parts, ignore_index=True)
    if tokens.empty:
        by = f" by {' and '.join(columns.masks)}" if columns.masks else ""
        raise DvpError(f"{file}: no token counts{by}")
    of_engine = is_log_prob(tokens["log_q"])
    usable, left_out = of_engine & is_log_prob(tokens["log_p"]), ""
    if not usable.all():
        first, count = next(tokens[~usable].itertuples()), int((~usable).sum())
        column = "log_p" if of_engine[first.Index] else "log_q"
        left_out = (
            f"{count:,} of {len(tokens):,} tokens have no usable log-prob (a number from {LOWEST:g} to 0) and are left "
            f"out, the first in row {first.response + 1}, token {first.position + 1}: {getattr(columns, column)} "
            f"{getattr(first, column):g}. Constants such as −9999 (vLLM's JSON for −∞), −50 or NaN stand for tokens "
            "without one."
        )
        if count > MOST_LEFT_OUT * len(tokens):
            raise DvpError(f"{file}: {left_out} At most {100 * MOST_LEFT_OUT:g} % may be left out")
    return Rollouts(name, tokens[usable].reset_index(drop=True), left_out)


def is_log_prob(values: pd.Series) -> pd.Series:
    """Return whether each value can be the log-prob of a sampled token, nats."""
    return values.between(LOWEST, SLACK)


def _tokens(row: dict[str, Any], columns: Format, at: str) -> pd.DataFrame:
    """Return the tokens of one response that count, one per row. Raises DvpError, which begins with `at`."""
    log_q_N = _numbers(row, columns.log_q, at)

    def beside(column: str) -> np.ndarray:
        values_N = _numbers(row, column, at)
        if len(values_N) != len(log_q_N):
            raise DvpError(
                f"{at}: {column}: expected a list as long as {columns.log_q}, {len(log_q_N)}, found {len(values_N)}"
            )
        return values_N

    counted_N = np.ones(len(log_q_N), dtype=bool)
    for column in columns.masks:
        counted_N &= np.nan_to_num(beside(column)) != 0
    table = {"log_q": log_q_N, "log_p": beside(columns.log_p), "token": np.full(len(log_q_N), -1.0)}
    for column in columns.token:
        table["token"] = beside(column)
    tokens = pd.DataFrame(table)[counted_N].assign(position=range(counted_N.sum()))
    wrong = ~((tokens["token"] >= -1) & (tokens["token"] % 1 == 0))
    if wrong.any():
        raise DvpError(
            f"{at}: {columns.token[0]}: token {wrong.argmax() + 1}: expected an id, "
            f"found {tokens['token'][wrong].iloc[0]:g}"
        )
    tokens = tokens.astype({"token": int})
    return tokens.assign(problem=_text(row.get(columns.problem[0]))) if columns.problem else tokens


def _text(value: Any) -> str:
    """Return what tells a problem from others: whole, where numpy would leave out the middle of a long array."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=lambda one: getattr(one, "tolist", one.__str__)())


def _numbers(row: dict[str, Any], column: str, at: str) -> np.ndarray:
    """Return a row's list as floats, (N,), NaN for null. Raises DvpError for anything else."""
    values = row.get(column)
    try:
        if not isinstance(values, list | np.ndarray) or any(isinstance(value, str) for value in values):
            raise TypeError
        values_N = np.asarray(values, dtype=float)
        if values_N.ndim != 1:
            raise TypeError
    except (TypeError, ValueError):
        raise DvpError(f"{at}: {column}: expected a list of numbers") from None
    return values_N
