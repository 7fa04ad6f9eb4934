"""The recorded responses of an experiment's runs, and a page on which to read them token by token.

The page is one file that loads nothing from anywhere: data, style and script are in it, and its content security
policy allows nothing else. What a model wrote enters it as JSON and as text, never as markup.
"""

import base64
import hashlib
import json
import math
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jinja2 import Environment, PackageLoader, StrictUndefined

from dvp.analysis.formats import rho_text
from dvp.experiment.config import Experiment
from dvp.experiment.grid import Run, settings_as_read
from dvp.files import expect_keys, read_json, verify_checksums, write_text
from dvp.tracking.record import read_rows
from dvp.training.responses import RESPONSES, read_responses

# Bytes of data on the page. Snakemake's report holds the page as text within text.
PAGE_BYTES = 5_000_000
# Of a longer response the page shows both ends and the surroundings of its worst tokens.
END_TOKENS = 500
WORST_SHOWN = 5
AROUND = 50
SMALLEST_RANGE = 1e-7  # nats; below is rounding
STEP_METRICS = ("reward", "k3", "gradient_norm", "entropy")


@dataclass(frozen=True)
class Recorded:
    """The responses that were kept of a run."""

    run: Run
    label: str
    table: pa.Table
    """As `dvp.training.responses.read_responses` gives it."""
    metrics: dict[int, dict[str, Any]]
    """The finished steps' rows of metrics.jsonl."""

    @property
    def collapsed_at(self) -> int | None:
        return min((step for step, row in self.metrics.items() if row["collapsed"]), default=None)

    @cached_property
    def steps(self) -> np.ndarray:
        """Of each response."""
        return self.table["step"].to_numpy()

    @cached_property
    def sizes(self) -> np.ndarray:
        """|log p − log q| of all tokens one after the other, nats; 0 outside the safe vocabulary and at a tool's."""
        trained, sampled, safe = (
            self.table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            for name in ("pruned_log_prob", "infer_log_prob", "in_safe")
        )
        return np.where(safe, np.abs(trained - sampled), 0.0)

    @cached_property
    def largest(self) -> np.ndarray:
        """The largest |log p − log q| of each response's tokens in the safe vocabulary, nats; 0 without any."""
        ends = np.cumsum(pc.list_value_length(self.table["token_id"]).to_numpy())
        return np.maximum.reduceat(self.sizes, [0, *ends[:-1]])

    @property
    def range(self) -> float:
        """Where the colours of log p − log q end, nats: 1, 2 or 5 times a power of ten, with 99 % of tokens below."""
        written = self.table["written"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        high = max(float(np.quantile(self.sizes[written], 0.99)), SMALLEST_RANGE)
        power = 10.0 ** math.floor(math.log10(high))
        return float(f"{next((step * power for step in (1, 2, 5) if high <= step * power), 10 * power):g}")

    def rows(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        return self.table.take(pa.array(indices, pa.int64())).to_pylist()


def recorded(experiment: Experiment, folder: Path, run: Run) -> Recorded:
    """What was kept of `run` so far, or before it failed; `folder` is results/E. Raises DvpError."""
    place = folder / "runs" / run.path
    file, *_ = [*responses_files(folder, run), place / RESPONSES]
    metrics = place / "metrics.jsonl"
    rows = read_rows(metrics) if metrics.exists() else []
    for number, row in enumerate(rows, start=1):
        expect_keys(row, {"collapsed": "true or false"}, f"{metrics}: line {number}: ")
    parts = [experiment.methods[run.method].label, run.engine]
    if run.rho is not None:
        parts.append(f"ρ {rho_text(run.rho)}")
    parts += settings_as_read(experiment.settings_of(run))
    return Recorded(
        run,
        " · ".join([*parts, f"seed {run.seed}"]),
        read_responses(file),
        {row["step"]: row for row in rows},
    )


def responses_files(folder: Path, run: Run) -> list[Path]:
    """What a run has recorded, the newest first: its own file, and what it left beside its checkpoints as it failed."""
    place = folder / "runs" / run.path
    own = [file for file in [place / RESPONSES] if file.exists()]
    if (place / "train.json").exists():
        return own
    failed = place.glob(f"checkpoints/*/{RESPONSES}")
    return sorted([*own, *failed], key=lambda file: file.stat().st_mtime, reverse=True)


def log_ratios(row: dict[str, Any]) -> np.ndarray:
    """log p − log q of a response's tokens, nats: of the policies that were sampled, pruned if the run prunes."""
    return np.subtract(row["pruned_log_prob"], row["infer_log_prob"])


def worst_tokens(row: dict[str, Any], count: int) -> list[int]:
    """Positions of the tokens with the largest |log p − log q|, the largest first.

    Outside the safe vocabulary log p is a convention (dvp.core.head), and a tool's tokens have none: neither are among
    them.
    """
    size = np.where(np.logical_and(row["in_safe"], row["written"]), np.abs(log_ratios(row)), -1.0)
    return [int(position) for position in np.argsort(-size, kind="stable")[:count] if size[position] >= 0]


def visible(text: str) -> str:
    """Text in which nothing acts on whatever shows it: control and format characters are made visible.

    Line breaks and tabs stay; a terminal's escape sequences and changes of the writing direction do not.
    """
    return "".join(character if character in "\n\t" else _visible(character) for character in text)


def _visible(character: str) -> str:
    # Control, format, surrogate: also what joins emoji, which then fall apart.
    return f"⟨U+{ord(character):04X}⟩" if unicodedata.category(character) in ("Cc", "Cf", "Cs") else character


def write_page(experiment: Experiment, folder: Path, path: Path) -> None:
    """Write the page of responses of all runs, which have finished. Raises DvpError if a file was altered since."""
    for run in experiment.runs:
        place = folder / "runs" / run.path
        listed = read_json(place / "train.json", "files")["files"]
        verify_checksums(place, {name: listed.get(name, "") for name in (RESPONSES, "metrics.jsonl")})
    write_text(path, page(experiment, [recorded(experiment, folder, run) for run in experiment.runs]))


def page(experiment: Experiment, runs: list[Recorded], limit: int = PAGE_BYTES) -> str:
    """The page as HTML. Its data take at most `limit` bytes: what is left out is said on it."""
    data = page_data(runs, limit)
    templates = files("dvp.analysis") / "templates"
    style, script = ((templates / f"responses.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    environment = Environment(loader=PackageLoader("dvp.analysis"), undefined=StrictUndefined, autoescape=True)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
    return environment.get_template("responses.html.j2").render(
        title=f"Responses of {experiment.name}",
        description=experiment.description,
        data=data,
        recorded=sum(len(run.table) for run in runs),
        shown=sum(len(run["responses"]) for run in data["runs"]),
        shortened=sum("ranges" in response for run in data["runs"] for response in run["responses"]),
        end_tokens=END_TOKENS,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def page_data(runs: list[Recorded], limit: int) -> dict[str, Any]:
    """What the page's script reads, of at most about `limit` bytes as JSON.

    `tokens` lists each pair of id and text once; a response has their places in it.
    """
    tokens: dict[tuple[int, str], int] = {}
    shown: list[list[dict[str, Any]]] = [[] for _ in runs]
    size = 0
    for number, index in _evenly(runs):
        response = _response(runs[number].rows([index])[0], tokens)
        size += len(json.dumps(response, ensure_ascii=False, separators=(",", ":")).encode())
        if size > limit:
            break
        shown[number].append(response)
    return {
        "tokens": [[token_id, visible(text)] for token_id, text in tokens],
        "runs": [
            {
                "path": run.run.path,
                "label": run.label,
                "collapsed_at": run.collapsed_at,
                "range": run.range,
                "metrics": {
                    step: {name: run.metrics[step].get(name) for name in STEP_METRICS}
                    for step in sorted({response["step"] for response in responses})
                    if step in run.metrics
                },
                "responses": sorted(responses, key=lambda response: (response["step"], response["index"])),
            }
            for run, responses in zip(runs, shown, strict=True)
            if responses
        ],
    }


def _evenly(runs: list[Recorded]) -> Iterable[tuple[int, int]]:
    """Every response as (run, row), in an order of which any beginning is spread evenly over runs and steps."""
    orders = [[(number, index) for index in _spread(run)] for number, run in enumerate(runs)]
    return (place for places in zip_longest(*orders) for place in places if place is not None)


def _spread(run: Recorded) -> list[int]:
    """A response of each step, the one with the largest mismatch first, then the second ones, and so on.

    The steps come in the order: that of a collapse, the last, the first, then those halfway between earlier ones.
    """
    steps = sorted(set(run.steps.tolist()))
    order = dict.fromkeys([step for step in steps if step == run.collapsed_at] + steps[-1:] + steps[:1])
    gaps = [(0, len(steps) - 1)]
    for low, high in gaps:  # it grows
        if high - low > 1:
            middle = (low + high) // 2
            order.setdefault(steps[middle])
            gaps += [(low, middle), (middle, high)]
    by_step = {
        step: sorted(np.flatnonzero(run.steps == step).tolist(), key=lambda index: -run.largest[index])
        for step in order
    }
    return [index for turn in zip_longest(*by_step.values()) for index in turn if index is not None]


def _response(row: dict[str, Any], tokens: dict[tuple[int, str], int]) -> dict[str, Any]:
    """A response as the page's script reads it; adds to `tokens` what is new among its own."""
    ranges = _ranges(row)
    kept = [position for low, high in ranges for position in range(low, high)]
    ratio = log_ratios(row)

    def rounded(values: Iterable[float], digits: int) -> list[float | None]:
        return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]

    response = {
        "step": row["step"],
        "index": row["index"],
        "chosen": row["chosen"],
        "problem": row["problem"],
        "prompt": visible(row["prompt"]),
        "answer": visible(row["answer"]),
        "reward": row["reward"],
        "truncated": row["truncated"],
        "rejected": row["rejected"],
        "length": len(row["token_id"]),
        "tokens": [
            tokens.setdefault((row["token_id"][position], row["text"][position]), len(tokens)) for position in kept
        ],
        "infer_log_prob": rounded((row["infer_log_prob"][position] for position in kept), 4),
        "log_ratio": rounded((ratio[position] for position in kept), 3),
        "outside": [place for place, position in enumerate(kept) if not row["in_safe"][position]],
    }
    if not all(row["written"]):
        response["own_length"] = sum(row["written"])
        response["by_tool"] = [place for place, position in enumerate(kept) if not row["written"][position]]
    if len(kept) < len(ratio):
        response["ranges"] = ranges
    # Without a safe vocabulary this is infer_log_prob + log_ratio.
    if row["log_prob"] != row["pruned_log_prob"]:
        response["log_prob"] = rounded((row["log_prob"][position] for position in kept), 4)
    for name in ("weight", "advantage"):
        values = rounded((row[name][position] for position in kept), 4)
        response[name] = values[0] if len(set(values)) == 1 else values
    return response


def _ranges(row: dict[str, Any]) -> list[tuple[int, int]]:
    """Which tokens of a response the page shows, as [from, to): all, unless it is long."""
    length = len(row["token_id"])
    wanted = [(0, END_TOKENS), (length - END_TOKENS, length)]
    wanted += [(position - AROUND, position + AROUND + 1) for position in worst_tokens(row, WORST_SHOWN)]
    ranges: list[tuple[int, int]] = []
    for low, high in sorted((max(0, low), min(length, high)) for low, high in wanted):
        if ranges and low <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(high, ranges[-1][1]))
        else:
            ranges.append((low, high))
    return ranges


def _hash(text: str) -> str:
    """As a content security policy names an inline style or script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
