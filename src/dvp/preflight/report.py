"""The report of a preflight: its checks, a verdict on each, and those checks that are arithmetic.

Imports no torch: the process that starts the others keeps it.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dvp.errors import DvpError
from dvp.files import append_line

CHECKS = {
    "start": "trainer and engine start together, with every rank, on the model of the experiment",
    "safe vocabulary": "the engine samples from the safe vocabularies of its runs, and reports that distribution",
    "forward": "the trainer's log-probs are those of the model's own forward pass",
    "mismatch": "trainer and engine agree over the whole vocabulary as well as the engine's precision allows",
    "steps": "two optimiser steps on responses of the longest length",
    "memory": "the largest memory of these steps against what there is",
    "save": "on SIGTERM an update is finished and saved in the time that the scheduler leaves",
    "resume": "what the checkpoint gives back is bit-identical to what was saved",
    "convert": "the checkpoint becomes a Hugging Face model, with its proof",
    "synchronise": "an engine that was handed the weights in memory equals one freshly started from them",
    "evaluate": "four problems are sampled, graded and summarised",
}
"""Every line of the report, in the order in which they are asked."""

SAMPLING = "sampling"
"""In the scratch folder: the file that says that the second step samples, and waits for SIGTERM."""
MEMORY_SHARE = 0.95
"""Of what there is."""


@dataclass(frozen=True)
class Verdict:
    """The answer of a check."""

    passed: bool
    says: str
    figures: dict = field(default_factory=dict)


class Report:
    """The report of a preflight as it grows: a file of JSON lines, to which several processes add one after the other.

    Of the ranks of a process group rank 0 alone writes; the others pass and fail with it.
    """

    def __init__(self, work: Path):
        self._file = work / "report.jsonl"

    @contextmanager
    def asking(self, check: str) -> Iterator[None]:
        """Ask a check in this block. A DvpError in it is the check's failure, and carries its name from here on."""
        self._write({"check": check, "begun": True})
        try:
            yield
        except DvpError as error:
            self.add(check, Verdict(False, str(error)))

    def add(self, check: str, verdict: Verdict) -> None:
        """Write a verdict. Raises DvpError, with the check's name, if it is a failure."""
        line = {"check": check, "asks": CHECKS[check], "passed": verdict.passed, "says": verdict.says}
        self._write(line | {"measured": verdict.figures})
        if not verdict.passed:
            raise DvpError(f"{check}: {verdict.says}")

    def fail(self, says: str) -> None:
        """Raise DvpError, for the check that has failed; if none has, the one that was begun last does."""
        verdicts, _, begun = self.read()
        for verdict in verdicts:
            if not verdict["passed"]:
                raise DvpError(f"{verdict['check']}: {verdict['says']}")
        self.add(begun or "start", Verdict(False, says))

    def note(self, name: str, value: object) -> None:
        """Keep a figure that no check judges."""
        self._write({"note": name, "value": value})

    def _write(self, line: dict) -> None:
        if os.environ.get("RANK", "0") == "0":
            append_line(self._file, json.dumps(line, allow_nan=False))

    def read(self) -> tuple[list[dict], dict, str | None]:
        """The verdicts, the notes by name, and the check that was begun last and has no verdict."""
        text = self._file.read_text(encoding="utf-8") if self._file.exists() else ""
        entries = [json.loads(line) for line in text.splitlines()]
        verdicts = [entry for entry in entries if "passed" in entry]
        notes = {entry["note"]: entry["value"] for entry in entries if "note" in entry}
        answered = {entry["check"] for entry in verdicts}
        open_ = [entry["check"] for entry in entries if "begun" in entry and entry["check"] not in answered]
        return verdicts, notes, open_[-1] if open_ else None


def check_steps(rows: list[dict], longest: int) -> Verdict:
    """The rows of metrics.jsonl of the steps that were taken."""
    tokens = [row["response_tokens_mean"] for row in rows]
    norms = [0.0 if row["skipped"] else row["gradient_norm"] for row in rows]
    return Verdict(
        tokens == [longest] * 2 and min(norms) > 0,
        f"{len(rows)} steps on responses of {' and '.join(f'{mean:g}' for mean in tokens)} tokens, {longest} are the "
        f"longest; norms of the gradients {', '.join(f'{norm:.2g}' for norm in norms)}",
        {"steps": len(rows), "longest": longest}
        | {name: max(row[name] for row in rows) for name in ("k3", "max_abs_log_ratio")},
    )


def check_memory(peaks: dict, declared: float, planned: dict[str, float] | None) -> Verdict:
    """The host's memory against what the job may take, and the GPU's against what it has, with the plan's beside it.

    declared : bytes of host memory for the job on each node.
    planned : bytes of a GPU in an update and in a rollout, as `dvp plan` estimates them; None without a plan.
    """
    parts = [("the host's memory", peaks["host"], declared)]
    if peaks["gpu_total"]:
        parts.append(("a GPU's memory", max(peaks["update"], peaks["rollout"]), peaks["gpu_total"]))
    says = "; ".join(
        f"{peak / 1e9:.3g} GB of {name}, {MEMORY_SHARE:.0%} of {there / 1e9:.3g} GB are allowed"
        for name, peak, there in parts
    )
    figures = {"host": peaks["host"], "declared": declared}
    if peaks["gpu_total"]:
        figures |= {name: peaks[name] for name in ("update", "rollout", "gpu_total")}
        if planned is not None:
            says += "; " + " and ".join(
                f"{peaks[name] / 1e9:.3g} GB in {phrase} (planned {planned[name] / 1e9:.3g})"
                for name, phrase in (("update", "an update"), ("rollout", "a rollout"))
            )
            figures["planned"] = planned
    return Verdict(all(peak <= MEMORY_SHARE * there for _, peak, there in parts), says, figures)


def check_save(seconds_leaving: float, seconds_update: float, stop_seconds: int) -> Verdict:
    """From SIGTERM to the end of the last process; an update that has begun is finished before.

    seconds_leaving : as measured, from a rollout.
    seconds_update : of a whole batch of the longest responses.
    stop_seconds : that the scheduler leaves; 0 if unknown.
    """
    needed = seconds_leaving + seconds_update
    says = (
        f"{seconds_leaving:.3g} s from SIGTERM to the end, and {seconds_update:.3g} s of an update that has just "
        f"begun: {needed:.3g} s"
    )
    return Verdict(
        not stop_seconds or needed <= stop_seconds,
        says + (f"; stop_seconds leaves {stop_seconds} s" if stop_seconds else ""),
        {"seconds_leaving": seconds_leaving, "seconds_update": seconds_update, "stop_seconds": stop_seconds},
    )
