"""What the rest of the program knows of a tool: text in, text out.

A new tool is a file here with a class that has `answers`, and a strict model of its settings in dvp.experiment.tools,
which names the class.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Answer:
    """What a tool says to a call."""

    text: str
    failed: bool = False
    """The call was a mistake, and the text says which."""


class Tool(Protocol):
    """Something that a model may call while it writes a response."""

    def answers(self, calls: Sequence[str]) -> list[Answer]:
        """An answer to each call, in their order. A call that fails has an answer too; nothing is raised."""
