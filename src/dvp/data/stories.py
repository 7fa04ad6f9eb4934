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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

LARGEST = 19
"""No number of a correct solution exceeds this."""

_STARTS = (
    "{person} has {n} {things}.",
    "{person} brings {n} {things}.",
    "{person} finds {n} {things} in {place}.",
    "{person} buys {n} {things} in {place}.",
)
_CHANGES = {
    "+": (
        "{other} gives {person} {n} more.",
        "{person} buys {n} more.",
        "{person} finds {n} more in {place}.",
    ),
    "-": (
        "{person} gives {n} to {other}.",
        "{person} shares {n} with {other}.",
        "{person} loses {n}.",
        "{person} sells {n} in {place}.",
    ),
    "*": (
        "{person} gets {n} times as many.",
        "{other} makes them {n} times as many.",
    ),
}
_QUESTIONS = (
    "How many {things} does {person} have?",
    "How many {things} are left?",
    "How many {things} is that?",
)
_STEP = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)\.")
_SLIPS = (-2, -1, 1, 2)


@dataclass(frozen=True)
class Story:
    """A problem, its worked solution (which ends in the line `Answer: 42`) and its answer."""

    problem: str
    solution: str
    answer: str


def generate(count: int, seed: int, steps: Sequence[int] = (2, 4)) -> Iterator[Story]:
    """Yield `count` stories of steps[0] to steps[1] steps.

    The same arguments give the same stories in every process; a larger count extends a smaller one.
    """
    rng = random.Random(seed)
    fewest, most = steps
    for _ in range(count):
        yield _story(rng, rng.randint(fewest, most))


def careless(story: Story, error_rate: float, rng: random.Random) -> str:
    """The worked solution with each step wrong with probability `error_rate`.

    A careless writer says "9 + 5 is 14." where a careful one writes "9 + 5 = 14.": how a solution begins tells how it
    will go, so there is a habit for RL to choose, and not only slips to avoid one by one. A wrong step is off by a
    little and later steps carry on from what it says; the stated answer is consistent with the lines above it. No
    number becomes negative. Two slips may cancel each other.
    """
    steps = [(sign, int(number)) for _, sign, number, _ in _STEP.findall(story.solution)]
    value = int(_STEP.match(story.solution)[1])
    lines = []
    for index, (sign, number) in enumerate(steps):
        result = _apply(value, sign, number)
        if rng.random() < error_rate:
            rest = steps[index + 1 :]
            result += rng.choice([slip for slip in _SLIPS if _stays_positive(result + slip, rest)])
        lines.append(f"{value} {sign} {number} is {result}.")
        value = result
    return "\n".join([*lines, f"Answer: {value}"])


def _story(rng: random.Random, steps: int) -> Story:
    person, other = NAMES.draw(rng), NAMES.draw(rng)
    while other == person:
        other = NAMES.draw(rng)
    words = {"person": person, "other": other, "things": THINGS.draw(rng), "place": PLACES.draw(rng)}
    value = rng.randint(2, 9)
    sentences = [rng.choice(_STARTS).format(n=value, **words)]
    lines = []
    for _ in range(steps):
        sign, number = _change(rng, value)
        sentences.append(rng.choice(_CHANGES[sign]).format(n=number, **words))
        result = _apply(value, sign, number)
        lines.append(f"{value} {sign} {number} = {result}.")
        value = result
    sentences.append(rng.choice(_QUESTIONS).format(**words))
    return Story(" ".join(sentences), "\n".join([*lines, f"Answer: {value}"]), str(value))


def _change(rng: random.Random, value: int) -> tuple[str, int]:
    """An operation that keeps the value between 1 and LARGEST."""
    while True:
        sign = rng.choices("+-*", weights=(5, 5, 1))[0]
        number = 2 if sign == "*" else rng.randint(2, 5)
        if 1 <= _apply(value, sign, number) <= LARGEST:
            return sign, number


def _apply(value: int, sign: str, number: int) -> int:
    return {"+": value + number, "-": value - number, "*": value * number}[sign]


def _stays_positive(value: int, steps: list[tuple[str, int]]) -> bool:
    for sign, number in steps:
        if value < 1:
            return False
        value = _apply(value, sign, number)
    return value >= 1


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
