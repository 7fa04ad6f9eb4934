"""A recorded response in a terminal: coloured there, plain in a file or a pipe."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from dvp.analysis.responses import Recorded, log_ratios, recorded, responses_files, visible, worst_tokens
from dvp.errors import DvpError
from dvp.experiment.folder import ExperimentDir

# As on the page: blue and orange about white, one purple from white on.
POSITIVE, NEGATIVE, RARE = (230, 97, 1), (33, 102, 172), (118, 42, 131)
LOWEST_LOG10 = 4
FAINTEST = 0.1
WORST = 8
TOOLS = Style(dim=True, italic=True)


def show_responses(
    directory: ExperimentDir, run: str | None, step: int | None, response: int | None, colour: str
) -> None:
    """Print a recorded response of a run that has begun; see `choose`. Raises DvpError."""
    experiment, folder = directory.experiment, directory.folder
    asked = experiment.runs if run is None else [experiment.run(run)]
    begun = [each for each in asked if run or responses_files(folder, each)]
    if not begun:
        raise DvpError(f"{folder}/runs: no run has recorded responses yet; the first ones come with a checkpoint")
    shown, row = choose([recorded(experiment, folder, each) for each in begun], step, response)
    print_response(shown, row, colour, Console(highlight=False))


def choose(runs: list[Recorded], step: int | None, response: int | None) -> tuple[Recorded, dict[str, Any]]:
    """The response to show: what is not asked for is where engine and trainer differ most. Raises DvpError."""
    places = [(size, run, index) for run in runs for index, size in enumerate(run.largest)]
    places = [place for place in places if step is None or place[1].steps[place[2]] == step]
    if not places:
        known = sorted({value for run in runs for value in run.steps.tolist()})
        raise DvpError(f"--step {step}: no response of it was recorded; recorded are steps {_list(known)}")
    _, shown, index = max(places, key=lambda place: place[0])
    if response is not None:
        at = shown.steps[index]
        indices = {shown.table["index"][place].as_py(): place for place in np.flatnonzero(shown.steps == at)}
        if response not in indices:
            raise DvpError(
                f"--response {response}: not recorded at step {at} of {shown.run.path}; {_list(indices)} are"
            )
        index = indices[response]
    return shown, shown.rows([index])[0]


def print_response(of: Recorded, row: dict[str, Any], colour: str, console: Console) -> None:
    """Print a response, its tokens coloured, a legend, and its worst tokens in numbers."""
    styles, legend = _styles(of, row, colour)
    same_step = np.asarray(of.table["index"])[of.steps == row["step"]]
    collapse = "" if of.collapsed_at is None else f"   the run collapsed at step {of.collapsed_at}"
    facts = {
        "run": f"{of.label}   --run {of.run.path}",
        "step": f"{row['step']} of {_list(np.unique(of.steps))}{collapse}",
        "response": f"{row['index']} of {_list(same_step)}",
        "problem": row["problem"],
        "answer": f"{row['answer']}   reward {row['reward']:g}",
        "tokens": f"{sum(row['written'])}{', cut off' if row['truncated'] else ''}",
        "rejected": f"by {row['rejected']}" if row["rejected"] else "no",
    }
    if by_tool := row["written"].count(False):
        facts["by a tool"] = f"{by_tool} tokens"
    for name, value in facts.items():
        console.print(Text(f"{name:10}", "bold"), Text(visible(value)), soft_wrap=True)
    console.print(Text(f"\n{visible(row['prompt']).rstrip()}\n", "dim"), soft_wrap=True)
    breaks = "↵\n" if console.is_terminal else "\n"
    pieces = (visible(piece).replace("\n", breaks) for piece in row["text"])
    console.print(Text.assemble(*zip(pieces, styles, strict=True)), soft_wrap=True)
    if console.is_terminal:
        console.print(Text("\n").join([Text(""), legend]), soft_wrap=True)
    table = Table(box=None, title="largest |log p − log q|, nats", title_justify="left", title_style="bold")
    trained = "p" if row["log_prob"] == row["pruned_log_prob"] else "p, pruned"
    for name in ("position", "token", "q", trained, "log p − log q", "weight", "advantage"):
        table.add_column(name, justify="left" if name == "token" else "right", no_wrap=True)
    for position in worst_tokens(row, WORST):
        log_q, log_p = row["infer_log_prob"][position], row["pruned_log_prob"][position]
        numbers = f"{math.exp(log_q):.3g} {math.exp(log_p):.3g} {log_p - log_q:+.3g}"
        numbers += f" {row['weight'][position]:.3g} {row['advantage'][position]:+.3g}"
        table.add_row(str(position), Text(repr(visible(row["text"][position]))), *numbers.split())
    console.print()
    console.print(table)
    if pruned := np.flatnonzero(~np.array(row["in_safe"])).tolist():
        console.print(f"\noutside the safe vocabulary: {_list(pruned)}", soft_wrap=True, highlight=False)


def _styles(of: Recorded, row: dict[str, Any], colour: str) -> tuple[list[Style], Text]:
    """A style for each token, and the legend."""
    safe, weight, advantage = (np.array(row[name]) for name in ("in_safe", "weight", "advantage"))
    ratio, end = np.where(safe, log_ratios(row), 0.0), float(np.abs(advantage).max()) or 1.0
    halves = (-1.0, -0.5, 0.0, 0.5, 1.0)
    powers = range(LOWEST_LOG10 + 1)
    # Of each colour how strong it is, from −1 to 1, in the legend as well, and what it says. A few tokens have most of
    # the mismatch: the square root keeps the others in sight.
    values, levels, meaning = {
        "log_ratio": (
            np.sign(ratio) * np.sqrt(np.abs(ratio) / of.range),
            {_signed(half * abs(half) * of.range): half for half in halves},
            "log p − log q, nats",
        ),
        "p": (
            -np.array(row["log_prob"]) / math.log(10) / LOWEST_LOG10,
            {f"{10.0**-power:g}": power / LOWEST_LOG10 for power in powers},
            "p of the trainer, over the full vocabulary",
        ),
        "safe": (np.where(safe, 0.0, 1.0), {"in the safe vocabulary": 0.0, "pruned": 1.0}, "by the trainer"),
        "weight": (np.log2(np.where(weight > 0, weight, 1.0)), {"½": -1.0, "1": 0.0, "2": 1.0}, "importance weight"),
        "advantage": (advantage / end, {_signed(half * end): half for half in halves}, "advantage"),
    }[colour]
    positive = RARE if colour == "p" else POSITIVE
    styles = [
        _shade(value, positive) + Style(underline=not is_safe, strike=not kept) if own else TOOLS
        for value, is_safe, kept, own in zip(values, safe.tolist(), (weight != 0).tolist(), row["written"], strict=True)
    ]
    legend = Text.assemble(
        *((f" {label} ", _shade(level, positive)) for label, level in levels.items()),
        *(f"  {meaning};  ", ("pruned", Style(underline=True)), "  ", ("weight 0", Style(strike=True))),
        *(() if all(row["written"]) else ("  ", ("a tool's answer", TOOLS))),
    )
    return styles, legend


def _shade(value: float, positive: tuple[int, int, int]) -> Style:
    """A background between white and a full colour; black or white text on it, whichever can be read."""
    if abs(value) < FAINTEST:  # the terminal's own background may be dark
        return Style()
    full = positive if value > 0 else NEGATIVE
    red, green, blue = (round(255 - (255 - part) * min(1.0, abs(value))) for part in full)
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 128
    return Style(color="#ffffff" if dark else "#000000", bgcolor=f"#{red:02x}{green:02x}{blue:02x}")


def _signed(value: float) -> str:
    return f"{value:+.3g}".replace("-", "−", 1) if value else "0"


def _list(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
