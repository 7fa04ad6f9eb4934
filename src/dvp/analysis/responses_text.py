"""A recorded response in a terminal: coloured there, plain in a file or a pipe."""

import math
from collections.abc import Callable
from enum import StrEnum
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


class Colour(StrEnum):
    """What the colour of a token says."""

    LOG_RATIO = "log_ratio"
    P = "p"
    SAFE = "safe"
    WEIGHT = "weight"
    ADVANTAGE = "advantage"


def choose(runs: list[Recorded], step: int | None, response: int | None) -> tuple[Recorded, dict[str, Any]]:
    """The response to show: what is not asked for is where engine and trainer differ most. Raises DvpError."""
    places = [
        (float(run.largest[index]), run, index)
        for run in runs
        for index in range(len(run.table))
        if step is None or run.steps[index] == step
    ]
    if not places:
        known = sorted({value for run in runs for value in run.steps.tolist()})
        raise DvpError(f"--step {step}: no response of it was recorded; recorded are steps {_list(known)}")
    _, shown, index = max(places, key=lambda place: place[0])
    if response is None:
        return shown, shown.rows([index])[0]
    at = shown.steps[index]
    indices = {row: place for place, row in enumerate(shown.table["index"].to_pylist()) if shown.steps[place] == at}
    if response not in indices:
        raise DvpError(f"--response {response}: not recorded at step {at} of {shown.run.path}; {_list(indices)} are")
    return shown, shown.rows([indices[response]])[0]


def print_response(of: Recorded, row: dict[str, Any], colour: Colour, console: Console) -> None:
    """Print a response, its tokens coloured, a legend, and its worst tokens in numbers."""
    styles, legend = _styles(of, row, colour)
    same_step = [
        index
        for index, step in zip(of.table["index"].to_pylist(), of.steps.tolist(), strict=True)
        if step == row["step"]
    ]
    facts = [
        ("run", f"{of.label}   --run {of.run.path}"),
        ("step", f"{row['step']} of {_list(sorted(set(of.steps.tolist())))}{_collapse(of)}"),
        ("response", f"{row['index']} of {_list(same_step)}"),
        ("problem", row["problem"]),
        ("answer", f"{row['answer']}   reward {row['reward']:g}"),
        ("tokens", f"{sum(row['written'])}{', cut off' if row['truncated'] else ''}"),
        ("rejected", f"by {row['rejected']}" if row["rejected"] else "no"),
    ]
    if by_tool := row["written"].count(False):
        facts.append(("by a tool", f"{by_tool} tokens"))
    for name, value in facts:
        console.print(Text(f"{name:10}", "bold"), Text(visible(value)), soft_wrap=True)
    console.print(Text(f"\n{visible(row['prompt']).rstrip()}\n", "dim"), soft_wrap=True)
    text = Text()
    for piece, style in zip(row["text"], styles, strict=True):
        text.append(visible(piece).replace("\n", "↵\n") if console.is_terminal else visible(piece), style)
    console.print(text, soft_wrap=True)
    if console.is_terminal:
        console.print(Text("\n").join([Text(""), legend]), soft_wrap=True)
    table = Table(box=None, title="largest |log p − log q|, nats", title_justify="left", title_style="bold")
    trained = "p" if row["log_prob"] == row["pruned_log_prob"] else "p, pruned"
    for name in ("position", "token", "q", trained, "log p − log q", "weight", "advantage"):
        table.add_column(name, justify="left" if name == "token" else "right", no_wrap=True)
    ratio = log_ratios(row)
    for position in worst_tokens(row, WORST):
        table.add_row(
            str(position),
            Text(repr(visible(row["text"][position]))),
            f"{math.exp(row['infer_log_prob'][position]):.3g}",
            f"{math.exp(row['pruned_log_prob'][position]):.3g}",
            f"{ratio[position]:+.3g}",
            f"{row['weight'][position]:.3g}",
            f"{row['advantage'][position]:+.3g}",
        )
    console.print()
    console.print(table)
    if pruned := [position for position, safe in enumerate(row["in_safe"]) if not safe]:
        console.print(f"\noutside the safe vocabulary: {_list(pruned)}", soft_wrap=True, highlight=False)


def _styles(of: Recorded, row: dict[str, Any], colour: Colour) -> tuple[list[Style], Text]:
    """A style for each token, and the legend."""
    safe, weight, advantage = (np.array(row[name]) for name in ("in_safe", "weight", "advantage"))
    scale: Callable[[float], Style] = _diverging
    levels = {-1.0: "−", -0.5: "−", 0.0: "", 0.5: "+", 1.0: "+"}
    if colour == Colour.LOG_RATIO:
        ratio = np.where(safe, log_ratios(row), 0.0)
        end = of.range
        # A few tokens have most of the mismatch: the square root keeps the others in sight.
        values = np.sign(ratio) * np.sqrt(np.abs(ratio) / end)
        levels = {level: f"{sign}{level**2 * end:g}" for level, sign in levels.items()}
        meaning = "log p − log q, nats"
    elif colour == Colour.P:
        scale = _sequential
        values = -np.array(row["log_prob"]) / math.log(10) / LOWEST_LOG10
        levels = {step / LOWEST_LOG10: f"{10.0**-step:g}" for step in range(LOWEST_LOG10 + 1)}
        meaning = "p of the trainer, over the full vocabulary"
    elif colour == Colour.SAFE:
        values = np.where(safe, 0.0, 1.0)
        levels = {0.0: "in the safe vocabulary", 1.0: "pruned"}
        meaning = "by the trainer"
    elif colour == Colour.WEIGHT:
        values = np.log2(np.where(weight > 0, weight, 1.0))
        levels = {-1.0: "½", 0.0: "1", 1.0: "2"}
        meaning = "importance weight"
    else:
        end = float(np.abs(advantage).max()) or 1.0
        values = advantage / end
        levels = {level: f"{sign}{abs(level) * end:.3g}" for level, sign in levels.items()}
        meaning = "advantage"
    styles = [
        scale(value) + Style(underline=not is_safe, strike=not kept) if own else TOOLS
        for value, is_safe, kept, own in zip(
            values.tolist(), safe.tolist(), (weight != 0).tolist(), row["written"], strict=True
        )
    ]
    legend = Text.assemble(
        *((f" {label} ", scale(level)) for level, label in levels.items()),
        f"  {meaning};  ",
        ("pruned", Style(underline=True)),
        "  ",
        ("weight 0", Style(strike=True)),
        *(() if all(row["written"]) else ("  ", ("a tool's answer", TOOLS))),
    )
    return styles, legend


def _diverging(value: float) -> Style:
    """From blue (−1) over nothing to orange (1)."""
    return _shade(POSITIVE if value > 0 else NEGATIVE, abs(value))


def _sequential(value: float) -> Style:
    """From nothing to purple (1)."""
    return _shade(RARE, value)


def _shade(full: tuple[int, int, int], size: float) -> Style:
    """A background between white and a full colour; black or white text on it, whichever can be read."""
    if size < FAINTEST:  # the terminal's own background may be dark
        return Style()
    red, green, blue = (round(255 - (255 - part) * min(1.0, size)) for part in full)
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 128
    return Style(color="#ffffff" if dark else "#000000", bgcolor=f"#{red:02x}{green:02x}{blue:02x}")


def _collapse(of: Recorded) -> str:
    if of.collapsed_at is None:
        return ""
    return f"   the run collapsed at step {of.collapsed_at}"


def _list(values: Any) -> str:
    return ", ".join(map(str, values))


def show_responses(
    directory: ExperimentDir, run: str | None, step: int | None, response: int | None, colour: Colour
) -> None:
    """Print a recorded response of a run that has begun; see `choose`. Raises DvpError."""
    experiment, folder = directory.experiment, directory.folder
    asked = experiment.runs if run is None else [experiment.run(run)]
    begun = [each for each in asked if run or responses_files(folder, each)]
    if not begun:
        raise DvpError(f"{folder}/runs: no run has recorded responses yet; the first ones come with a checkpoint")
    shown, row = choose([recorded(experiment, folder, each) for each in begun], step, response)
    print_response(shown, row, colour, Console(highlight=False))
