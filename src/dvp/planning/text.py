"""Text of a plan: a heading, a table by stage, and notes."""

from collections.abc import Callable, Iterator
from textwrap import fill
from typing import Any

from tabulate import tabulate


def render(plan: dict[str, Any]) -> str:
    """Write the plan that `make_plan` returned: a heading, a table by stage, and notes on what the numbers rest on."""
    unit, price, total = plan["unit"], plan["price"], plan["total"]

    def costs(row: dict[str, Any]) -> dict[str, str]:
        paid = {} if price is None else {"money": _number(row["money"])}
        return {f"{unit}-hours": _number(row["gpu_hours"])} | paid | {"disk": _size(row["disk"])}

    stages = [
        {
            "stage": row["stage"],
            "jobs": str(row["jobs"]),
            f"{unit}s each": str(row["gpus_each"]),
            "time each": " to ".join(dict.fromkeys(map(_time, row["hours_each"]))),
            **costs(row),
        }
        for row in plan["stages"]
    ]
    stages.append(dict.fromkeys(stages[0], "") | {"stage": "all", "jobs": str(total["jobs"])} | costs(total))
    hours = total["gpu_hours_range"]
    summary = [
        f"responses of {plan['response_tokens']:,.0f} tokens ({plan['response_tokens_from']})",
        f"{_number(total['gpu_hours'])} {unit}-hours{_between(hours, _number)}",
        *([] if price is None else [f"{_number(total['money'])}{_between(hours, _number, price)} at {price:g} each"]),
        f"at least {_time(plan['hours_least'])}{_between(plan['hours_least_range'], _time)} with {plan['gpus']} "
        f"{unit}{'s' if plan['gpus'] > 1 else ''} at once",
        _size(total["disk"]),
    ]
    notes = (fill(note, 118, initial_indent="- ", subsequent_indent="  ") for note in _notes(plan))
    heading = f"{plan['experiment']} on {plan['device']}: {'; '.join(summary)}"
    heading = fill(heading, 118, subsequent_indent="  ", break_on_hyphens=False)
    cells = [list(stages[0]), *(list(row.values()) for row in stages)]
    align = ["left"] + ["right"] * (len(stages[0]) - 1)
    table = tabulate(cells, tablefmt="plain", colalign=align, disable_numparse=True)
    return "\n\n".join([heading, table, "\n".join(notes)])


def _between(range_: list[float], write: Callable[[float], str], each: float = 1) -> str:
    """Write a range in brackets, each end times `each`; nothing if both ends read the same."""
    low, high = (write(each * end) for end in range_)
    return "" if low == high else f" ({low} to {high})"


def _notes(plan: dict[str, Any]) -> Iterator[str]:
    """Yield notes: the range, longest chain, disk, step times, memory, sources of the times, assumptions."""
    if plan["slowest"] > 1:
        yield (
            f"in brackets the range: the formula, and {plan['slowest']:g} times as long, which is what the best "
            "published system takes of it (NeMo-RL 0.4, Llama-3.1-8B on 16 H100: 97.7 s a step, 61.6 s by the "
            "formula); all else is the middle. The steps below are by the formula"
        )
    longest = _time(plan["hours_longest_chain"])
    yield f"the longest chain of jobs takes {longest}, however many {plan['unit']}s there are"
    yield f"a run that writes a checkpoint needs {_size(plan['checkpoint'])} of disk more, for that time"
    for engine, step in plan["step"].items():
        yield f"a training step with engine {engine}: {_step(step)}"
    yield from _memory(plan)
    yield from (f"assumed: {sentence}" for sentence in plan["assumptions"])


def _memory(plan: dict[str, Any]) -> Iterator[str]:
    """Yield notes on the GPU memory that updates and rollouts need, and a warning if it may not fit."""
    parts, room = plan["update_memory"], plan["device_memory"]
    updating = sum(parts.values())
    if parts:
        named = "; ".join(f"{name} {_size(part)}" for name, part in parts.items() if part)
        yield f"memory of a GPU in an update: at most {_size(updating)} of {_size(room)}: {named}"
    for engine, sampling in plan["rollout_memory"].items():
        yield (
            f"in a rollout with engine {engine}: at most {_size(sampling['bytes'])}; its cache holds "
            f"{max(sampling['cached_sequences'], 0):.0f} of the longest sequences"
        )
        if max(updating, sampling["bytes"]) > room or sampling["cached_sequences"] < 1:
            yield f"warning: training with engine {engine} may not fit on this GPU; a preflight shows it"


def _step(step: dict[str, float]) -> str:
    rollout, update, weights = step["rollout"], step["update"], step["synchronise"]
    return f"rollout {rollout:.3g} s, update {update:.3g} s, weights to the engine {weights:.2g} s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:.1f} d"
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{hours * 60:.0f} min" if hours >= 1 / 30 else f"{hours * 3600:.0f} s"


def _size(bytes_: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if bytes_ >= size:
            return f"{bytes_ / size:.3g} {unit}"
    return f"{bytes_ / 1e3:.0f} kB" if bytes_ else "0"
