"""Products of numbers that a tiny model cannot multiply: a task for a calculator.

A problem is a product of two numbers of two digits, and up to a few changes of it. In a worked solution each step is a
mark «<<37 * 48=1776>>», as GSM8K has them, which becomes a call of the tool with its answer, or plain text without one:

    Bomira has 37 boxes of 48 tesons. Lavu gives Bomira 212 more. How many tesons are left?

    <<37 * 48=1776>>
    <<1776 + 212=1988>>
    Answer: 1988
"""

import random
import re
from collections.abc import Iterator, Sequence

from dvp.data.stories import NAMES, PLACES, THINGS, Story

_STARTS = ("{person} has {a} boxes of {b} {things}.", "{person} finds {a} bags of {b} {things} in {place}.")
_CHANGES = {
    "+": ("{other} gives {person} {n} more.", "{person} buys {n} more in {place}."),
    "-": ("{person} gives {n} to {other}.", "{person} sells {n} in {place}."),
    "*": ("{person} gets {n} times as many.", "{other} makes them {n} times as many."),
}
_QUESTIONS = ("How many {things} does {person} have?", "How many {things} are left?")
MARK = re.compile(r"<<(.+?)=(.+?)>>")
_STEP = re.compile(r"(\d+) ([-+*]) (\d+)")


def generate(count: int, seed: int, steps: Sequence[int] = (1, 3)) -> Iterator[Story]:
    """Yield `count` problems of steps[0] to steps[1] steps, the product included.

    The same arguments give the same problems in every process; a larger count extends a smaller one.
    """
    rng = random.Random(seed)
    fewest, most = steps
    for _ in range(count):
        yield _problem(rng, rng.randint(fewest, most))


def careless(story: Story, error_rate: float, rng: random.Random) -> str:
    """The worked solution with each step done in the head, and wrong, with probability `error_rate`.

    Such a step says "37 * 48 is 1802.", off by up to a fifth, and later steps carry on from there. The stated answer is
    consistent with the lines above it.
    """
    value, lines = None, []
    for expression, _ in MARK.findall(story.solution):
        left, sign, right = _STEP.fullmatch(expression).groups()
        value = int(left) if value is None else value
        result = _apply(value, sign, int(right))
        if rng.random() < error_rate:
            guess = max(1, round(result * rng.uniform(0.8, 1.2)))
            guess += guess == result
            lines.append(f"{value} {sign} {right} is {guess}.")
            value = guess
        else:
            lines.append(_mark(value, sign, int(right)))
            value = result
    return "\n".join([*lines, f"Answer: {value}"])


def _problem(rng: random.Random, steps: int) -> Story:
    person, other = NAMES.draw(rng), NAMES.draw(rng)
    while other == person:
        other = NAMES.draw(rng)
    words = {"person": person, "other": other, "things": THINGS.draw(rng), "place": PLACES.draw(rng)}
    a, b = rng.randint(12, 99), rng.randint(12, 99)
    sentences = [rng.choice(_STARTS).format(a=a, b=b, **words)]
    lines, value = [_mark(a, "*", b)], a * b
    for _ in range(steps - 1):
        sign = rng.choices("+-*", weights=(2, 2, 1))[0]
        number = rng.randint(12, 99) if sign != "-" or value > 1000 else rng.randint(2, value // 2)
        sentences.append(rng.choice(_CHANGES[sign]).format(n=number, **words))
        lines.append(_mark(value, sign, number))
        value = _apply(value, sign, number)
    sentences.append(rng.choice(_QUESTIONS).format(**words))
    return Story(" ".join(sentences), "\n".join([*lines, f"Answer: {value}"]), str(value))


def _mark(value: int, sign: str, number: int) -> str:
    return f"<<{value} {sign} {number}={_apply(value, sign, number)}>>"


def _apply(value: int, sign: str, number: int) -> int:
    return {"+": value + number, "-": value - number, "*": value * number}[sign]
