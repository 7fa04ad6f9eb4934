"""A plan as text."""

from textwrap import fill
from typing import Any

from tabulate import tabulate

from dvp.experiment.grid import setting_as_written, settings_as_read
from dvp.planning.costs import GATHERS, MASTER
from dvp.planning.kept import FEW
from dvp.planning.plan import ESTIMATED, INFERRED, RECORDED
from dvp.progress import setting_as_read


def render(plan: dict[str, Any]) -> str:
    """What `make_plan` returned, as tables by stage and by method, and what the numbers rest on."""
    unit, price, total = plan["unit"], plan["price"], plan["total"]
    money = [] if price is None else ["money"]
    head = [f"{unit}-hours", *money, "disk", RECORDED, INFERRED, ESTIMATED]

    def costs(row: dict[str, Any]) -> list[str]:
        paid = [] if price is None else [_number(row["money"])]
        sources = [str(row["from"][kind]) for kind in (RECORDED, INFERRED, ESTIMATED)]
        return [_number(row["gpu_hours"]), *paid, _size(row["disk"]), *sources]

    stages = [["stage", "jobs", f"{unit}s each", "time each", "memory", *head]]
    for row in plan["stages"]:
        times = dict.fromkeys(_time(hours) for hours in row["hours_each"])
        memory = "" if row["peak_memory"] is None else _size(row["peak_memory"])
        stages.append([row["stage"], str(row["jobs"]), str(row["gpus_each"]), " to ".join(times), memory, *costs(row)])
    stages.append(["all", str(total["jobs"]), "", "", "", *costs(total)])
    axes = list(plan["methods"][0]["settings"])
    methods = [["method", "engine", *map(setting_as_read, axes), "runs", "jobs", *head]]
    for row in plan["methods"]:
        methods.append([row["label"], row["engine"], *_settings(row), str(row["runs"]), str(row["jobs"]), *costs(row)])
    methods.append(["shared", "", *[""] * len(axes), "", str(plan["shared"]["jobs"]), *costs(plan["shared"])])
    kept = [_table(_kept(plan["kept"]), left=2), ""] if plan["kept"] else []

    summary = [
        f"{_time(plan['hours_wall'])} with {plan['gpus']} {unit}{'s' if plan['gpus'] > 1 else ''} at once",
        f"{_number(total['gpu_hours'])} {unit}-hours",
        *([] if price is None else [f"{_number(total['money'])} at {price:g} each"]),
        _size(total["disk"]),
    ]
    notes = [
        f"the longest chain of jobs takes {_time(plan['hours_longest_chain'])}, however many {unit}s there are",
        f"a run that writes a checkpoint needs {_size(plan['checkpoint'])} of disk more, for that time",
        *_steps(plan),
        *_memory(plan),
        *_preflights(plan),
        *_few(plan),
        "memory: of the machine, the most that a recorded job held",
        "recorded: the job's own times, on the machine that it ran on; inferred: from recorded times of jobs like it",
        *(f"estimated: {sentence}" for sentence in plan["assumptions"]),
    ]
    return "\n".join(
        [
            f"{plan['experiment']} on {plan['device']}: {', '.join(summary)}",
            "",
            _table(stages, left=1),
            "",
            _table(methods, left=2),
            "",
            *kept,
            *(fill(note, 118, initial_indent="- ", subsequent_indent="  ") for note in notes),
        ]
    )


def _steps(plan: dict[str, Any]) -> list[str]:
    """Seconds of a training step, and what ZeRO-3 exchanges in it."""
    lines = []
    for engine, step in plan["step"].items():
        line = (
            f"a training step with engine {engine}, estimated: rollout {step['rollout']:.3g} s, update "
            f"{step['update']:.3g} s, weights to the engine {step['synchronise']:.2g} s"
        )
        if step["exchange"]:
            count, weights = step["micro_batches"], _size(MASTER * plan["parameters"])
            line += (
                f"; in the update each GPU gathers the weights ({weights}) {GATHERS * count} times and scatters "
                f"gradients as large {count} times: {step['exchange']:.3g} s beside {step['arithmetic']:.3g} s of "
                f"arithmetic, which adds {step['update'] - step['arithmetic']:.3g} s"
            )
        lines.append(line)
    return lines


def _kept(rows: list[dict[str, Any]]) -> list[list[str]]:
    table = [["method", "engine", *map(setting_as_read, rows[0]["settings"]), "nats a token", "kept of tokens"]]
    for row in rows:
        nats = " / ".join(f"{kl:.2g}" for kl in row["kl"]) + ("" if row["recorded"] else " (assumed)")
        shares = (
            f"{' / '.join(f'{100 * share:.0f}' for share in row[name]['share'])} % of {row[name]['tokens']:,.0f}"
            for name in ("mean", "longest")
        )
        table.append([row["label"], row["engine"], *_settings(row), nats, ", ".join(shares)])
    return table


def _settings(row: dict[str, Any]) -> list[str]:
    return list(map(setting_as_written, row["settings"].values()))


def _few(plan: dict[str, Any]) -> list[str]:
    """What the kept shares rest on, and which are small."""
    if not plan["kept"]:
        return []
    lines = [
        "kept: the share of tokens that a correction does not reject where trainer and engine differ by Gaussian noise "
        "with this KL, recorded (k3) where a run of the method, or of the engine, has steps, or by the preflight, else "
        "assumed"
    ]
    for row in plan["kept"]:
        few = [(share, kl) for share, kl in zip(row["mean"]["share"], row["kl"], strict=True) if share < FEW]
        if few:
            lines.append(
                f"warning: {', '.join([row['label'], *settings_as_read(row['settings'])])} with engine "
                f"{row['engine']} would keep {few[0][0]:.0%} of the responses of {row['mean']['tokens']:,.0f} tokens "
                f"at {'the recorded' if row['recorded'] else 'a'} KL of {few[0][1]:.2g}; "
                "long responses are then hardly trained on"
            )
    return lines


def _preflights(plan: dict[str, Any]) -> list[str]:
    """What was measured of a step, of memory and of the time that leaving takes."""
    lines = []
    for engine, measured in plan["preflights"].items():
        step, checks, share = measured["step"], measured["checks"], measured["utilisation"]
        reached = "" if share is None else f" ({share:.0%} of the GPUs' peak)"
        lines.append(
            f"a training step with engine {engine}, by its preflight on {measured['device']}: rollout "
            f"{step['rollout']:.3g} s, update {step['update']:.3g} s{reached}, weights to the engine "
            f"{step['synchronise']:.2g} s; memory: {checks['memory']['says']}; to save and leave: "
            f"{checks['save']['says']}"
        )
    return lines


def _memory(plan: dict[str, Any]) -> list[str]:
    """What an update and a rollout need of each GPU."""
    if not plan["update_memory"]:
        return []
    parts, room = plan["update_memory"], plan["device_memory"]
    updating = sum(parts.values())
    named = "; ".join(f"{name} {_size(part)}" for name, part in parts.items() if part)
    lines = [f"memory of a GPU in an update: {_size(updating)} of {_size(room)}: {named}"]
    for engine, sampling in plan["rollout_memory"].items():
        lines.append(
            f"in a rollout with engine {engine}: {_size(sampling['bytes'])}; its cache holds "
            f"{max(sampling['cached_sequences'], 0):.0f} of the longest sequences"
        )
        # A preflight that has passed on such a GPU has shown that it fits.
        rehearsed = plan["preflights"].get(engine, {"is_this_device": False})
        if not rehearsed["is_this_device"] and (
            max(updating, sampling["bytes"]) > room or sampling["cached_sequences"] < 1
        ):
            lines.append(f"warning: training with engine {engine} does not fit on this GPU")
    return lines


def _table(rows: list[list[str]], left: int) -> str:
    """With the first `left` columns flush left, the others flush right."""
    align = ["left"] * left + ["right"] * (len(rows[0]) - left)
    return tabulate(rows, tablefmt="plain", colalign=align, disable_numparse=True)


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
