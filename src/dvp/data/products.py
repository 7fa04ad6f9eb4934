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

from dvp.data.stories import Plot, Story, apply, cast, drawn

MARK = re.compile(r"<<(.+?)=(.+?)>>")
_STEP = "<<{} {} {}={}>>"


def careless(story: Story, error_rate: float, rng: random.Random) -> str:
    """The worked solution with each step done in the head, and wrong, with probability `error_rate`.

    Such a step says "37 * 48 is 1802.", off by up to a fifth, and later steps carry on from there. The stated answer is
    consistent with the lines above it.
    """
    value, lines = None, []
    for expression, _ in MARK.findall(story.solution):
        left, sign, right = expression.split()
        before = int(left) if value is None else value
        value = apply(before, sign, int(right))
        if rng.random() < error_rate:
            guess = max(1, round(value * rng.uniform(0.8, 1.2)))
            value = guess + (guess == value)
            lines.append(f"{before} {sign} {right} is {value}.")
        else:
            lines.append(_STEP.format(before, sign, right, value))
    return "\n".join([*lines, f"Answer: {value}"])


def _problem(rng: random.Random, steps: int) -> Story:
    words, a, b = cast(rng), rng.randint(12, 99), rng.randint(12, 99)
    return _PLOT.told(rng, words | {"a": a, "b": b}, steps - 1, a * b, [_STEP.format(a, "*", b, a * b)])


def _change(rng: random.Random, value: int) -> tuple[str, int]:
    sign = rng.choices("+-*", weights=(2, 2, 1))[0]
    return sign, rng.randint(12, 99) if sign != "-" or value > 1000 else rng.randint(2, value // 2)


_PLOT = Plot(
    starts=("{person} has {a} boxes of {b} {things}.", "{person} finds {a} bags of {b} {things} in {place}."),
    changes={
        "+": ("{other} gives {person} {n} more.", "{person} buys {n} more in {place}."),
        "-": ("{person} gives {n} to {other}.", "{person} sells {n} in {place}."),
        "*": ("{person} gets {n} times as many.", "{other} makes them {n} times as many."),
    },
    questions=("How many {things} does {person} have?", "How many {things} are left?"),
    change=_change,
    step=_STEP,
)
generate = drawn(_problem, steps=(1, 3))  # the product included
