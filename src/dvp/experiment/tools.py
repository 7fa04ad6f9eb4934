"""Settings of the tool that a response may call while it is being written."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from dvp.strict import Positive, PositiveFloat, Strict

Delimiters = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=2, max_length=2)]


class _Tool(Strict):
    program: ClassVar[str]
    """The class that answers calls (dvp.tools.tool), made with these settings: MODULE:CLASS."""
    kind: str
    call: Delimiters = ["<tool>", "</tool>"]
    """What the model writes before and after the text of a call. It stops at the second one and gets the answer."""
    answer: Delimiters = ["<result>", "</result>"]
    """What is put before and after a tool's answer."""
    max_turns: Annotated[int, Field(ge=2)] = 4
    """Most turns of a response: one more than it has calls that are answered. It is cut off where its last turn ends in
    a call."""
    max_answer_tokens: Annotated[int, Field(ge=8)] = 64
    """Of a longer answer the beginning and the end are given, without the delimiters this many tokens."""

    @field_validator("call")
    @classmethod
    def _differ(cls, value: list[str]) -> list[str]:
        if value[0] == value[1]:
            raise ValueError(f"expected two different texts, found {value[0]!r} twice")
        return value


class Calculator(_Tool):
    """Evaluates one expression of numbers, + - * / ^ and parentheses, exactly."""

    program = "dvp.tools.calculator:CalculatorTool"
    kind: Literal["calculator"]


class Python(_Tool):
    """Runs a Python program and answers with what it prints, or with its error.

    Each call is a fresh process under bubblewrap (`bwrap`), in namespaces of its own: no network, no file of this
    machine but this environment's Python and the system's libraries, all read-only, and an empty home. Limits of memory
    and CPU time are those of each of its processes.
    """

    program = "dvp.tools.python:PythonTool"
    kind: Literal["python"]
    seconds: PositiveFloat = 10.0
    """Of wall time."""
    cpu_seconds: Positive = 5
    """Of CPU time, each process."""
    memory_mib: Annotated[int, Field(ge=128)] = 1024
    """Address space of each process, MiB."""
    processes: Annotated[int, Field(ge=2)] = 8
    """Most processes and threads at a time."""
    output_bytes: Positive = 16384
    """A program that prints more is stopped."""


Tools = Annotated[Calculator | Python, Field(discriminator="kind")]
