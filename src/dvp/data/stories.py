"""Story arithmetic: a task that a half-million-parameter model can learn on a laptop.

A story has two to four steps, a worked solution with one short equation a line, and a positive whole answer.
People, things and places are pseudo-words drawn from Zipf's law, so a small vocabulary fills up and has a
tail:

    Bomira has 9 tesons. Lavu gives Bomira 5 more. Bomira sells 3 in Dorik. How many tesons are left?

    9 + 5 = 14.
    14 - 3 = 11.
    Answer: 11
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

LARGEST = 19
"""No number of a correct solution exceeds this."""

_STEP = re.compile(r"(.*?)(\d+) ([-+*]) (\d+) = \d+\.")
_SLIPS = (-2, -1, 1, 2)


@dataclass(frozen=True)
class Story:
    """A problem, its worked solution (which ends in the line `Answer: 42`) and its answer."""

    problem: str
    solution: str
    answer: str


class Plot(NamedTuple):
    """The sentences that a story is told in, and what happens in it."""

    starts: Sequence[str]
    changes: dict[str, Sequence[str]]
    questions: Sequence[str]
    change: Callable[[random.Random, int], tuple[str, int]]
    """An operation and its number, for a value."""
    step: str
    """A line of the solution: value, operation, number, result."""

    def told(self, rng: random.Random, words: dict, steps: int, value: int, lines: Sequence[str] = ()) -> Story:
        """A story that begins at a value, to which its first `lines` lead, and takes so many steps from there."""
        sentences, lines = [rng.choice(self.starts).format(**words)], list(lines)
        for _ in range(steps):
            sign, number = self.change(rng, value)
            sentences.append(rng.choice(self.changes[sign]).format(**words | {"n": number}))
            before, value = value, apply(value, sign, number)
            lines.append(self.step.format(before, sign, number, value))
        sentences.append(rng.choice(self.questions).format(**words))
        return Story(" ".join(sentences), "\n".join([*lines, f"Answer: {value}"]), str(value))


def drawn(write: Callable[[random.Random, int], Story], steps: Sequence[int]) -> Callable[..., Iterator[Story]]:
    """`generate` for what writes one story of so many steps."""
    default = steps

    def generate(count: int, seed: int, steps: Sequence[int] = default) -> Iterator[Story]:
        """Yield `count` stories of steps[0] to steps[1] steps.

        The same arguments give the same stories in every process; a larger count extends a smaller one.
        """
        rng = random.Random(seed)
        for _ in range(count):
            yield write(rng, rng.randint(*steps))

    return generate


def careless(story: Story, error_rate: float, rng: random.Random, habit: float = 1.0) -> str:
    """The worked solution with each careless step wrong with probability `error_rate`; `habit`: the share of these.

    A careless writer says "9 + 5 is 14." where a careful one writes "9 + 5 = 14.": how a solution begins tells how it
    will go, so there is a habit for RL to choose, and not only slips to avoid one by one. A wrong step is off by a
    little and later steps carry on from what it says; the stated answer is consistent with the lines above it. No
    number becomes negative. Two slips may cancel each other. What stands before a step stays.
    """
    lines = story.solution.splitlines()[:-1]
    steps = {row: step for row, line in enumerate(lines) if (step := _STEP.fullmatch(line))}
    changes = [(step[3], int(step[4])) for step in steps.values()]
    value = int(next(iter(steps.values()))[2])
    for index, (row, step) in enumerate(steps.items()):
        before, value, word = value, apply(value, *changes[index]), "="
        if habit == 1.0 or rng.random() < habit:
            word, rest = "is", changes[index + 1 :]
            if rng.random() < error_rate:
                value += rng.choice([slip for slip in _SLIPS if _stays_positive(value + slip, rest)])
        lines[row] = f"{step[1]}{before} {step[3]} {step[4]} {word} {value}."
    return "\n".join([*lines, f"Answer: {value}"])


def apply(value: int, sign: str, number: int) -> int:
    """value + number, value - number or value * number."""
    return {"+": value + number, "-": value - number, "*": value * number}[sign]


def _stays_positive(value: int, steps: Sequence[tuple[str, int]]) -> bool:
    return min(accumulate(steps, lambda value, step: apply(value, *step), initial=value)) >= 1


class Lexicon:
    """`size` distinct pseudo-words, the r-th drawn with probability proportional to 1/r (Zipf's law)."""

    def __init__(self, size: int, ending: str, capital: bool, seed: int) -> None:
        rng = random.Random(seed)
        words: dict[str, None] = {}
        while len(words) < size:
            syllables = (rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))
            word = "".join(syllables) + ending
            words[word.capitalize() if capital else word] = None
        self.words = list(words)
        self.cumulative = list(accumulate(1 / rank for rank in range(1, size + 1)))

    def draw(self, rng: random.Random) -> str:
        return rng.choices(self.words, cum_weights=self.cumulative)[0]


NAMES = Lexicon(300, ending="", capital=True, seed=1)
THINGS = Lexicon(400, ending="ns", capital=False, seed=2)
PLACES = Lexicon(150, ending="k", capital=True, seed=3)


def cast(rng: random.Random) -> dict[str, str]:
    """The words of a story: two people, things and a place."""
    person, other = NAMES.draw(rng), NAMES.draw(rng)
    while other == person:
        other = NAMES.draw(rng)
    return {"person": person, "other": other, "things": THINGS.draw(rng), "place": PLACES.draw(rng)}


def _story(rng: random.Random, steps: int) -> Story:
    words, value = cast(rng), rng.randint(2, 9)
    return _PLOT.told(rng, words | {"n": value}, steps, value)


def _change(rng: random.Random, value: int) -> tuple[str, int]:
    """An operation that keeps the value between 1 and LARGEST."""
    while True:
        sign = rng.choices("+-*", weights=(5, 5, 1))[0]
        number = 2 if sign == "*" else rng.randint(2, 5)
        if 1 <= apply(value, sign, number) <= LARGEST:
            return sign, number


_PLOT = Plot(
    starts=(
        "{person} has {n} {things}.",
        "{person} brings {n} {things}.",
        "{person} finds {n} {things} in {place}.",
        "{person} buys {n} {things} in {place}.",
    ),
    changes={
        "+": ("{other} gives {person} {n} more.", "{person} buys {n} more.", "{person} finds {n} more in {place}."),
        "-": (
            "{person} gives {n} to {other}.",
            "{person} shares {n} with {other}.",
            "{person} loses {n}.",
            "{person} sells {n} in {place}.",
        ),
        "*": ("{person} gets {n} times as many.", "{other} makes them {n} times as many."),
    },
    questions=("How many {things} does {person} have?", "How many {things} are left?", "How many {things} is that?"),
    change=_change,
    step="{} {} {} = {}.",
)
generate = drawn(_story, steps=(2, 4))
