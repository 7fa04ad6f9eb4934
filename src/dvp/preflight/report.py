"""Report of a preflight: the verdict on each check, and the checks that are pure arithmetic.

This module does not import torch, because the process that starts the others uses it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dvp.errors import DvpError
from dvp.files import read_json, write_json

SAMPLING = "sampling"
"""File in the scratch folder that exists once the second step samples and waits for SIGTERM."""
MEMORY_SHARE = 0.95
"""Share of the available memory that may be used."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of a check: whether it passed, a sentence, and the measured figures."""

    passed: bool
    says: str
    figures: dict = field(default_factory=dict)


class Report:
    """Report file of a preflight, to which several processes add one after the other.

    In a process group only rank 0 writes; the other ranks raise the same errors.
    """

    def __init__(self, work: Path):
        """Use the file report.json in the scratch folder `work`."""
        self._file = work / "report.json"

    def read(self) -> dict[str, Any]:
        """Return the verdicts (`checks`), the check begun last (`begun`), and the figures kept by `note`."""
        return read_json(self._file) if self._file.exists() else {"checks": [], "begun": "start"}

    def note(self, **figures: object) -> None:
        """Write figures into the report that no check judges."""
        if os.environ.get("RANK", "0") == "0":
            write_json(self._file, self.read() | figures)

    @contextmanager
    def asking(self, check: str) -> Iterator[Callable[[Verdict], None]]:
        """Run a check in the block, which passes its verdict to the function that it is given, if it reaches one.

        A DvpError in the block is a failure of the check. Raises DvpError, with the check's name, if the check fails.
        """
        self.note(begun=check)
        verdicts: list[Verdict] = []
        try:
            yield verdicts.append
        except DvpError as error:
            verdicts = [Verdict(False, str(error))]
        for verdict in verdicts:
            self.add(check, verdict)

    def add(self, check: str, verdict: Verdict) -> None:
        """Write and print a verdict. Raises DvpError, with the check's name, if it is a failure."""
        line = {"check": check, "passed": verdict.passed, "says": verdict.says, "measured": verdict.figures}
        self.note(checks=[*self.read()["checks"], line])
        if os.environ.get("RANK", "0") == "0":
            print(f"{'passed' if verdict.passed else 'FAILED'}  {check}: {verdict.says}", flush=True)
        if not verdict.passed:
            raise DvpError(f"{check}: {verdict.says}")

    def fail(self, says: str) -> None:
        """Raise DvpError for the check that has failed; if none has, fail the check begun last with this reason."""
        found = self.read()
        for verdict in found["checks"]:
            if not verdict["passed"]:
                raise DvpError(f"{verdict['check']}: {verdict['says']}")
        self.add(found["begun"], Verdict(False, says))


def check_steps(rows: list[dict], longest: int) -> Verdict:
    """Check the rows of metrics.jsonl: two steps, all responses `longest` tokens long, no gradient zero or skipped."""
    tokens = [row["response_tokens_mean"] for row in rows]
    norms = [0.0 if row["skipped"] else row["gradient_norm"] for row in rows]
    return Verdict(
        tokens == [longest] * 2 and min(norms) > 0,
        f"{len(rows)} steps on responses of {' and '.join(f'{mean:g}' for mean in tokens)} tokens, {longest} are the "
        f"longest; norms of the gradients {', '.join(f'{norm:.2g}' for norm in norms)}",
        {"steps": len(rows), "longest": longest}
        | {name: max(row[name] for row in rows) for name in ("k3", "max_abs_log_ratio")},
    )


def check_memory(peaks: dict, declared: float) -> Verdict:
    """Check peak memory: a host's against the declared bytes, a GPU's in each phase against its size.

    peaks : bytes, as recorded by the ranks.
    declared : bytes of host memory for the job on each node.
    """
    parts = [("the host's memory", peaks["host"], declared)]
    if peaks["gpu_total"]:
        for name in ("update", "rollout"):
            parts.append((f"a GPU's memory, in {name}s", peaks[name], peaks["gpu_total"]))
    says = "; ".join(
        f"{peak / 1e9:.3g} GB of {name}, {MEMORY_SHARE:.0%} of {there / 1e9:.3g} GB are allowed"
        for name, peak, there in parts
    )
    return Verdict(all(peak <= MEMORY_SHARE * there for _, peak, there in parts), says, peaks | {"declared": declared})


def check_save(seconds_leaving: float, seconds_update: float, stop_seconds: int) -> Verdict:
    """Check that a run can save and exit between the scheduler's SIGTERM and the end of the job.

    seconds_leaving : from SIGTERM during a rollout to the end of the last process, as measured.
    seconds_update : an update on a whole batch of the longest responses, which is finished if it has begun.
    stop_seconds : time that the scheduler gives; 0 if unknown.
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
