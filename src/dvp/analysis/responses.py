"""Read the recorded responses of an experiment's runs, and make a page that shows them token by token.

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
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dvp.analysis.templating import TEMPLATES
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.grid import Run
from dvp.files import read_json, verify_checksums, write_text
from dvp.tracking.names import policy_title
from dvp.tracking.record import read_rows
from dvp.training.responses import RESPONSES, read_responses

# Bytes of data on the page. Snakemake's report embeds the page as text within text.
PAGE_BYTES = 5_000_000
# A longer response is shown by both ends and the surroundings of its worst tokens.
END_TOKENS = 500
WORST_SHOWN = 5
AROUND = 50
SMALLEST_RANGE = 1e-7  # nats; below is rounding
STEP_METRICS = ("reward", "k3", "gradient_norm", "entropy")


@dataclass(frozen=True)
class Recorded:
    """The recorded responses of a run."""

    run: Run
    label: str
    table: pa.Table
    """The table of `dvp.training.responses.read_responses`."""
    metrics: dict[int, dict[str, Any]]
    """The finished steps' rows of metrics.jsonl."""

    @property
    def collapsed_at(self) -> int | None:
        """Return the first step that collapsed, or None."""
        return min((step for step, row in self.metrics.items() if row.get("collapsed")), default=None)

    @cached_property
    def steps(self) -> np.ndarray:
        """Return the step of each response."""
        return self.table["step"].to_numpy()

    def tokens(self, name: str) -> np.ndarray:
        """Return a column of all tokens, one response after the other."""
        return self.table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Return |log p − log q| of all tokens, nats; 0 outside the safe vocabulary and for a tool's tokens."""
        sizes = np.abs(self.tokens("pruned_log_prob") - self.tokens("infer_log_prob"))
        return np.where(self.tokens("in_safe"), sizes, 0.0)

    @cached_property
    def largest(self) -> np.ndarray:
        """Return the largest |log p − log q| of each response, nats."""
        ends = np.cumsum(pc.list_value_length(self.table["token_id"]).to_numpy())
        return np.maximum.reduceat(self.sizes, [0, *ends[:-1]])

    @cached_property
    def range(self) -> float:
        """Return the end of the colour scale of log p − log q, nats: 1, 2 or 5 times a power of ten.

        At least 99 % of the model's tokens lie within it.
        """
        high = max(float(np.quantile(self.sizes[self.tokens("written")], 0.99)), SMALLEST_RANGE)
        power = 10.0 ** math.floor(math.log10(high))
        return float(f"{next(step * power for step in (1, 2, 5, 10) if high <= step * power or step == 10):g}")

    def rows(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return some responses, each by column name."""
        return self.table.take(pa.array(indices, pa.int64())).to_pylist()


def recorded(experiment: Experiment, folder: Path, run: Run) -> Recorded:
    """Read the responses that `run` has recorded so far, or before it failed; `folder` is results/E.

    Raises DvpError if they cannot be read.
    """
    place = folder / "runs" / run.path
    file, *_ = [*responses_files(folder, run), place / RESPONSES]
    metrics = place / "metrics.jsonl"
    rows = read_rows(metrics) if metrics.exists() else []
    return Recorded(run, policy_title(experiment, run), read_responses(file), {row["step"]: row for row in rows})


def responses_files(folder: Path, run: Run) -> list[Path]:
    """List the files of a run's responses, newest first: its own, and, unless it finished, those beside checkpoints."""
    place = folder / "runs" / run.path
    own = [file for file in [place / RESPONSES] if file.exists()]
    if (place / "train.json").exists():
        return own
    failed = place.glob(f"checkpoints/*/{RESPONSES}")
    return sorted([*own, *failed], key=lambda file: file.stat().st_mtime, reverse=True)


def log_ratios(row: dict[str, Any]) -> np.ndarray:
    """Return log p − log q of a response's tokens, nats, of the sampled policies: pruned if the run prunes."""
    return np.subtract(row["pruned_log_prob"], row["infer_log_prob"])


def worst_tokens(row: dict[str, Any], count: int) -> list[int]:
    """Return positions of the `count` tokens with the largest |log p − log q|, the largest first.

    Tokens outside the safe vocabulary, where log p is a convention (dvp.core.head), and a tool's tokens, which have no
    log p, are left out.
    """
    size = np.where(np.logical_and(row["in_safe"], row["written"]), np.abs(log_ratios(row)), -1.0)
    return [int(position) for position in np.argsort(-size, kind="stable")[:count] if size[position] >= 0]


def visible(text: str) -> str:
    """Replace control and format characters and surrogates by visible ones, so that text cannot affect its display.

    Line breaks and tabs stay; terminal escape sequences and changes of the writing direction do not, nor the characters
    that join emoji.
    """
    acting = {one for one in set(text) - set("\n\t") if unicodedata.category(one) in ("Cc", "Cf", "Cs")}
    return text.translate({ord(one): f"⟨U+{ord(one):04X}⟩" for one in acting})


def write_page(experiment: Experiment, folder: Path, path: Path) -> None:
    """Write the page of responses of all runs, which must have finished. Raises DvpError if a file was altered."""
    for run in experiment.runs:
        place = folder / "runs" / run.path
        listed = read_json(place / "train.json", "files")["files"]
        verify_checksums(place, {name: listed.get(name, "") for name in (RESPONSES, "metrics.jsonl")})
    write_text(path, page(experiment, [recorded(experiment, folder, run) for run in experiment.runs]))


def write_begun(experiment: Experiment, folder: Path) -> Path:
    """Write the page of what the runs have recorded so far, to responses.html. Raises DvpError if that is nothing."""
    begun = [run for run in experiment.runs if responses_files(folder, run)]
    if not begun:
        raise DvpError(f"{folder}/runs: no run has recorded responses yet; the first ones come with a checkpoint")
    path = folder / "responses.html"
    write_text(path, page(experiment, [recorded(experiment, folder, run) for run in begun]))
    return path


def page(experiment: Experiment, runs: list[Recorded], limit: int = PAGE_BYTES) -> str:
    """Return the page as HTML. Its data take at most `limit` bytes; the page says how much is left out."""
    data = page_data(runs, limit)
    style, script = (TEMPLATES.loader.get_source(TEMPLATES, f"responses.{kind}")[0] for kind in ("css", "js"))
    shown = [response for run in data["runs"] for response in run["responses"]]
    return TEMPLATES.get_template("responses.html.j2").render(
        title=f"Responses of {experiment.name}",
        description=experiment.description,
        data=data,
        recorded=sum(len(run.table) for run in runs),
        shown=len(shown),
        shortened=sum("ranges" in response for response in shown),
        end_tokens=END_TOKENS,
        **{"style": style, "style_hash": _hash(style), "script": script, "script_hash": _hash(script)},
    )


def page_data(runs: list[Recorded], limit: int) -> dict[str, Any]:
    """Return the data that the page's script reads, at most about `limit` bytes as JSON.

    `tokens` lists each pair of id and text once; a response has their places in it.
    """
    tokens: dict[tuple[int, str], int] = {}
    shown: list[list[dict[str, Any]]] = [[] for _ in runs]
    size = 0
    # Runs take turns, so that the responses that fit are spread evenly over runs, and over steps.
    orders = [[(number, index) for index in _spread(run)] for number, run in enumerate(runs)]
    for number, index in filter(None, chain(*zip_longest(*orders))):
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


def _spread(run: Recorded) -> list[int]:
    """Order a run's responses for the page: of each step the one with the largest mismatch, then the second, and so on.

    The steps come in the order: that of a collapse, the last, the first, then those halfway between earlier ones.
    """
    steps = sorted(set(run.steps.tolist()))
    halves = (np.linspace(len(steps) - 1, 0, 2**k + 1).astype(int) for k in range(len(steps).bit_length() + 1))
    order = dict.fromkeys([run.collapsed_at, *(steps[place] for place in chain(*halves))])
    of_step = {step: np.flatnonzero(run.steps == step) for step in order}
    by_step = (own[np.argsort(-run.largest[own], kind="stable")].tolist() for own in of_step.values())
    return [index for turn in zip_longest(*by_step) for index in turn if index is not None]


def _response(row: dict[str, Any], tokens: dict[tuple[int, str], int]) -> dict[str, Any]:
    """Return a response as the page's script reads it; adds its new tokens to `tokens`."""
    ranges = _ranges(row)
    kept = [position for low, high in ranges for position in range(low, high)]

    def of(name: str) -> list[Any]:
        return [row[name][position] for position in kept]

    def rounded(values: Iterable[float], digits: int) -> list[float | None]:
        return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]

    copied = ("step", "index", "chosen", "problem", "reward", "truncated", "rejected")
    response = {name: row[name] for name in copied} | {
        "prompt": visible(row["prompt"]),
        "answer": visible(row["answer"]),
        "length": len(row["token_id"]),
        "tokens": [tokens.setdefault(pair, len(tokens)) for pair in zip(of("token_id"), of("text"), strict=True)],
        "infer_log_prob": rounded(of("infer_log_prob"), 4),
        "log_ratio": rounded(log_ratios(row)[kept], 3),
        "outside": [place for place, safe in enumerate(of("in_safe")) if not safe],
    }
    if not all(row["written"]):
        response["own_length"] = sum(row["written"])
        response["by_tool"] = [place for place, written in enumerate(of("written")) if not written]
    if len(kept) < len(row["token_id"]):
        response["ranges"] = ranges
    # Without a safe vocabulary this is infer_log_prob + log_ratio.
    if row["log_prob"] != row["pruned_log_prob"]:
        response["log_prob"] = rounded(of("log_prob"), 4)
    for name in ("weight", "advantage"):
        values = rounded(of(name), 4)
        response[name] = values[0] if len(set(values)) == 1 else values
    return response


def _ranges(row: dict[str, Any]) -> list[tuple[int, int]]:
    """Return which tokens of a response the page shows, as [from, to): all, unless it is long."""
    length = len(row["token_id"])
    shown = {*range(END_TOKENS), *range(length - END_TOKENS, length)}
    for position in worst_tokens(row, WORST_SHOWN):
        shown |= {*range(position - AROUND, position + AROUND + 1)}
    inside = np.isin(np.arange(length), list(shown)).astype(int)
    ends = np.flatnonzero(np.diff(inside, prepend=0, append=0)).tolist()
    return list(zip(ends[::2], ends[1::2], strict=True))


def _hash(text: str) -> str:
    """Return the hash by which a content security policy allows an inline style or script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
