"""Responses that another trainer has dumped, with log-probs of engine and trainer, as rows of sampled tokens."""

from pathlib import Path

import numpy as np
import pandas as pd

from dvp.data.sources import first_line
from dvp.errors import DvpError

COLUMNS = {
    "log_q": ("engine_logprobs", "rollout_log_probs", "sampling_per_token_logps", "inference_logprobs"),
    "log_p": ("trainer_logprobs", "old_log_probs", "old_per_token_logps"),
    "token": ("token_ids", "responses", "completion_ids", "input_ids"),
    "mask": ("mask", "response_mask", "completion_mask", "loss_mask"),
    "problem": ("problem", "uid", "prompt"),
}
"""What a response's lists, and its problem, are called here and in verl, TRL and prime-rl. Of the first two each file
has one; without token ids tokens are numbered -1, without a mask all count, without problems intervals are over
responses."""
NEEDED = ("log_q", "log_p")
SLACK = 1e-4  # nats above 0 that rounding takes a log-prob to


def read_rollouts(file: Path) -> pd.DataFrame:
    """The tokens that count (dvp.measurement.files.TOKENS, as far as they are known), a row each, in their order.

    Args:
        file: *.jsonl or *.parquet, a response a row.

    Raises:
        DvpError: a file that cannot be read, a column that is missing or there under two names, lists of unequal
            length, or what is no log-prob.
    """
    read = {".jsonl": lambda: pd.read_json(file, lines=True, dtype=False), ".parquet": lambda: pd.read_parquet(file)}
    if file.suffix not in read:
        raise DvpError(f"{file}: expected a file that ends in {' or '.join(read)}")
    try:
        table = read[file.suffix]()
    except (OSError, ValueError) as error:
        raise DvpError(f"{file}: cannot be read: {first_line(error)}") from None
    found = {}
    for name, known in COLUMNS.items():
        there = [column for column in known if column in table]
        if len(there) > 1 or (name in NEEDED and not there):
            expected = "expected one of" if name in NEEDED else "expected at most one of"
            raise DvpError(f"{file}: {expected} {', '.join(known)}; found {', '.join(there or table.columns)}")
        if there:
            found[name] = there[0]
    if table.empty:
        raise DvpError(f"{file}: no rows")
    responses = [
        _tokens(row, found, f"{file}: row {number + 1}") for number, row in enumerate(table.to_dict("records"))
    ]
    tokens = pd.concat([one.assign(response=number) for number, one in enumerate(responses)], ignore_index=True)
    if tokens.empty:
        raise DvpError(f"{file}: no token counts by {found['mask']}")
    return tokens


def _tokens(row: dict, found: dict[str, str], at: str) -> pd.DataFrame:
    """Of one response."""
    values = {}
    for name, column in found.items():
        if name == "problem":
            continue
        try:
            values[name] = np.asarray(row[column], dtype=float)
        except (TypeError, ValueError):
            values[name] = np.empty((0, 0))
        if values[name].ndim != 1 or len(values[name]) != len(values["log_q"]):
            raise DvpError(f"{at}: {column}: expected a list of numbers, as long as {found['log_q']}")
    counted = values.pop("mask", np.ones(len(values["log_q"]))) != 0
    table = pd.DataFrame({"token": np.full(len(counted), -1)} | values)[counted]
    for name in NEEDED:
        if not (table[name].between(-np.inf, SLACK, inclusive="right")).all():
            raise DvpError(f"{at}: {found[name]}: expected log-probs, finite and not above 0")
    table = table.assign(position=np.arange(len(table)), token=table["token"].astype(int))
    return table if "problem" not in found else table.assign(problem=str(row[found["problem"]]))
