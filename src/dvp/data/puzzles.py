"""Puzzles of reasoning-gym as problems: any solution that its verifier accepts is right, and there can be many.

The reference of such a problem is the input of its verifier instead of an answer, as one line of JSON:

    {"reasoning_gym": "shortest_path", "answer": "down right", "metadata": {"matrix": …}}
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

from dvp.data.stories import Story
from dvp.errors import DvpError
from dvp.files import parse_json

VERIFIED = ("shortest_path", "graph_color")
"""Data sets whose verifiers run no code that a model wrote (that of countdown, for one, passes it to `eval`)."""

_START = re.compile(r'\s*\{\s*"reasoning_gym"')


class Puzzle(NamedTuple):
    """A puzzle as its verifier needs it."""

    dataset: str
    answer: str
    """One solution."""
    metadata: dict[str, Any]

    def reference(self) -> str:
        """Return the text that `read` turns into this puzzle again."""
        fields = {"reasoning_gym": self.dataset, "answer": self.answer, "metadata": self.metadata}
        return json.dumps(fields, separators=(", ", ": "))

    def solution(self, answer: str) -> str:
        """Return a correct answer in a form that is the same for equal solutions, whatever layout or extras it has."""
        if self.dataset == "graph_color":
            colors = json.loads(answer)
            if isinstance(colors, dict):
                return " ".join(str(int(colors[str(vertex)])) for vertex in self.metadata["puzzle"]["vertices"])
        return " ".join(answer.split())

    def solved_by(self, answer: str) -> bool:
        """Return whether the verifier gives full marks."""
        return _dataset(self.dataset).score_answer(answer, self._asdict()) == 1


def generated(
    dataset: str, count: int, seed: int, story: Callable[[dict, random.Random], Story], **settings: float
) -> Iterator[Story]:
    """Yield `count` puzzles of a data set, made by reasoning-gym and turned into stories by `story`.

    The same arguments give the same puzzles in every process; a larger count extends a smaller one.
    """
    import reasoning_gym  # takes two seconds, so only if there are puzzles

    rng = random.Random(f"{dataset} {seed}")
    # reasoning-gym adds a puzzle's number to the seed: neighbouring seeds would share all but a few puzzles.
    for entry in reasoning_gym.create_dataset(dataset, size=count, seed=rng.getrandbits(48), **settings):
        yield story(entry, rng)


def is_puzzle(reference: str) -> bool:
    """Return whether a reference is a puzzle's and not a mathematical expression."""
    return _START.match(reference) is not None


def read(reference: str) -> Puzzle:
    """Read a puzzle from its reference. Raises DvpError if it is malformed or no data set in VERIFIED."""
    try:
        found = parse_json(reference)
    except ValueError as error:
        raise DvpError(f"a puzzle of reasoning-gym: not valid JSON: {error}") from None
    kinds = {"reasoning_gym": (str, "a text"), "answer": (str, "a text"), "metadata": (dict, "an object")}
    for key, (kind, expected) in kinds.items():
        if not isinstance(found.get(key), kind):
            raise DvpError(f"a puzzle of reasoning-gym: {key}: expected {expected}, found {found.get(key)!r:.60}")
    if unknown := found.keys() - kinds:
        raise DvpError(f"a puzzle of reasoning-gym: expected answer and metadata, found also {sorted(unknown)}")
    if found["reasoning_gym"] not in VERIFIED:
        expected = " or ".join(VERIFIED)
        raise DvpError(f"no data set {found['reasoning_gym'][:60]!r} of reasoning-gym; expected {expected}")
    return Puzzle(found["reasoning_gym"], found["answer"], found["metadata"])


def check(reference: str) -> None:
    """Raise DvpError unless the reference is a puzzle's and its own answer solves it."""
    puzzle = searched = read(reference)
    try:
        if puzzle.dataset == "shortest_path":
            # The verifier trusts the puzzle's answer to be a shortest path: compare it with one that is searched here.
            moves = _dataset(puzzle.dataset)._get_answer(_checked_grid(puzzle.metadata.get("matrix")))
            searched = puzzle._replace(answer=" ".join(moves) or "infeasible")
        solved = searched.solved_by(puzzle.answer)
    except DvpError:
        raise
    except Exception as error:  # raised by the verifier, which trusts its metadata
        raise DvpError(f"reasoning-gym cannot verify the puzzle ({type(error).__name__}: {error})") from None
    if not solved:
        raise DvpError(f"the puzzle's own answer {puzzle.answer[:60]!r} does not solve it")


def _checked_grid(grid: Any) -> list[list[str]]:
    """Return the grid. Raises DvpError unless the verifier can follow any moves on it."""
    rows = grid if isinstance(grid, list) and all(isinstance(row, list) for row in grid) else []
    cells = [cell for row in rows for cell in row]
    whole = rows and len({len(row) for row in rows}) == 1 and all(cell in ("*", "#", "O", "X") for cell in cells)
    if not whole or cells.count("*") != 1 or cells.count("#") != 1:
        raise DvpError("a puzzle of reasoning-gym: metadata.matrix: expected a grid of * # O X with one * and one #")
    return grid


@cache
def _dataset(name: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name)
