"""Chains: a long horizon that a tiny model can learn, sums with a running state, a numbered line a step.

Twenty to forty steps make a solution of about 300 to 600 tokens. Each is easy: its number finds the sentence that it
carries out, and the value stands at the end of the line above.

    Bomira has 9 tesons. 1. Lavu gives 5. 2. Doriko takes 3. How many tesons are left?

    1. Lavu 9 + 5 = 14.
    2. Doriko 14 - 3 = 11.
    Answer: 11
"""

import random
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate

from dvp.data.stories import NAMES, THINGS, Story

LARGEST = 19
"""No number of a correct solution exceeds this."""

_CHANGES = {"+": ("gives", "brings", "adds"), "-": ("takes", "wants", "loses")}
_QUESTIONS = ("How many {things} are left?", "How many {things} is that?")
_STEP = re.compile(r"\d+\. (\w+) (\d+) ([-+]) (\d+) = (\d+)\.")
_SLIPS = (-2, -1, 1, 2)


def generate(count: int, seed: int, steps: Sequence[int] = (20, 40)) -> Iterator[Story]:
    """Yield `count` chains of steps[0] to steps[1] steps.

    The same arguments give the same chains in every process; a larger count extends a smaller one.
    """
    rng = random.Random(seed)
    fewest, most = steps
    for _ in range(count):
        yield _chain(rng, rng.randint(fewest, most))


def careless(chain: Story, error_rate: float, rng: random.Random) -> str:
    """The worked solution of a writer who is careless in one line of two, at random; such a line is wrong with
    probability `error_rate`.

    A careless line says "9 + 5 is 14." where a careful one says "9 + 5 = 14.", so a response is a long row of choices
    that each matter a little, and no single one decides. A wrong line is off by a little and later ones carry on from
    what it says; the stated answer is consistent with the lines above it. No number falls below 1. Two slips may cancel
    each other.
    """
    steps = [(name, sign, int(number)) for name, _, sign, number, _ in _STEP.findall(chain.solution)]
    value = int(_STEP.search(chain.solution)[2])
    lines = []
    for index, (name, sign, number) in enumerate(steps):
        result, word = _apply(value, sign, number), "="
        if rng.random() < 0.5:
            word = "is"
            if rng.random() < error_rate:
                rest = [number if sign == "+" else -number for _, sign, number in steps[index + 1 :]]
                lowest = min(accumulate(rest, initial=result))
                result += rng.choice([slip for slip in _SLIPS if lowest + slip >= 1])
        lines.append(f"{index + 1}. {name} {value} {sign} {number} {word} {result}.")
        value = result
    return "\n".join([*lines, f"Answer: {value}"])


def _chain(rng: random.Random, steps: int) -> Story:
    things, value = THINGS.draw(rng), rng.randint(2, 9)
    sentences, lines = [f"{NAMES.draw(rng)} has {value} {things}."], []
    for index in range(1, steps + 1):
        name = NAMES.draw(rng)
        sign, number = _change(rng, value)
        result = _apply(value, sign, number)
        sentences.append(f"{index}. {name} {rng.choice(_CHANGES[sign])} {number}.")
        lines.append(f"{index}. {name} {value} {sign} {number} = {result}.")
        value = result
    sentences.append(rng.choice(_QUESTIONS).format(things=things))
    return Story(" ".join(sentences), "\n".join([*lines, f"Answer: {value}"]), str(value))


def _change(rng: random.Random, value: int) -> tuple[str, int]:
    """A step that keeps the value between 1 and LARGEST."""
    while True:
        sign, number = rng.choice("+-"), rng.randint(2, 5)
        if 1 <= _apply(value, sign, number) <= LARGEST:
            return sign, number


def _apply(value: int, sign: str, number: int) -> int:
    return value + number if sign == "+" else value - number
