"""Interface of a tool: text in, text out.

A new tool is a file here with a class that has `answers`, and a strict model of its settings in dvp.experiment.tools,
which names the class.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Answer:
    """Answer of a tool to one call."""

    text: str
    failed: bool = False
    """Whether the call failed; the text then says why."""


class Tool(Protocol):
    """Tool that a model may call while it writes a response."""

    def answers(self, calls: Sequence[str]) -> list[Answer]:
        """Return an answer to each call, in order. A call that fails gets an answer, too; nothing is raised."""
