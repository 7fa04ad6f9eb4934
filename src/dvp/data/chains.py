"""Chains: a long horizon that a tiny model can learn, many small sums with a running state.

Three people change the same number in turn, for seven to thirteen rounds, and a solution writes every sum: 300 to 600
tokens. Each is easy: who is next and what they do stands in the round before, and the value in the line above.

    Bomira has 9 tesons. In each of 7 rounds Lavu gives 5, Doriko takes 2 and Kuku takes 4. How many tesons are left?

    Round 1
    Lavu 9 + 5 = 14.
    Doriko 14 - 2 = 12.
    Kuku 12 - 4 = 8.
    Round 2
    Lavu 8 + 5 = 13.
    […]
    Answer: 2
"""

import random
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate

from dvp.data.stories import NAMES, THINGS, Story

LARGEST = 19
"""No number of a correct solution exceeds this."""
PEOPLE = 3  # steps of a round

_CHANGES = {1: ("gives", "brings", "adds"), -1: ("takes", "wants", "loses")}
_QUESTIONS = ("How many {things} are left?", "How many {things} is that?")
_STEP = re.compile(r"^(\w+) (\d+) ([-+]) (\d+) = \d+\.$", re.MULTILINE)
_SLIPS = (-2, -1, 1, 2)


def generate(count: int, seed: int, steps: Sequence[int] = (7, 13)) -> Iterator[Story]:
    """Yield `count` chains of steps[0] to steps[1] rounds.

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
    steps = _STEP.findall(chain.solution)
    names = [name for name, *_ in steps]
    changes = [int(sign + number) for _, _, sign, number in steps]
    value, written = int(steps[0][1]), []
    for index, change in enumerate(changes):
        result, word = value + change, "="
        if rng.random() < 0.5:
            word = "is"
            if rng.random() < error_rate:
                lowest = min(accumulate(changes[index + 1 :], initial=result))
                result += rng.choice([slip for slip in _SLIPS if lowest + slip >= 1])
        written.append(_line(names[index], value, change, word, result))
        value = result
    return _solution(written, value)


def _chain(rng: random.Random, rounds: int) -> Story:
    things = THINGS.draw(rng)
    people: list[str] = []
    while len(people) < 1 + PEOPLE:
        name = NAMES.draw(rng)
        if name not in people:
            people.append(name)
    owner, *others = people
    while True:
        start = rng.randint(1, LARGEST)
        changes = [rng.choice((1, -1)) * rng.randint(2, 5) for _ in range(PEOPLE)]
        values = list(accumulate(changes * rounds, initial=start))
        # If a round came back to where it began, whole rounds could be copied.
        if sum(changes) and min(values) >= 1 and max(values) <= LARGEST:
            break
    *first, last = (
        f"{name} {rng.choice(_CHANGES[1 if change > 0 else -1])} {abs(change)}"
        for name, change in zip(others, changes, strict=True)
    )
    question = rng.choice(_QUESTIONS).format(things=things)
    problem = f"{owner} has {start} {things}. In each of {rounds} rounds {', '.join(first)} and {last}. {question}"
    lines = [
        _line(name, value, change, "=", value + change)
        for name, change, value in zip(others * rounds, changes * rounds, values[:-1], strict=True)
    ]
    return Story(problem, _solution(lines, values[-1]), str(values[-1]))


def _line(name: str, value: int, change: int, word: str, result: int) -> str:
    return f"{name} {value} {'+' if change > 0 else '-'} {abs(change)} {word} {result}."


def _solution(lines: list[str], value: int) -> str:
    """Lines of steps with a heading above every round, and the answer."""
    rounds = [lines[first : first + PEOPLE] for first in range(0, len(lines), PEOPLE)]
    parts = ["\n".join([f"Round {number}", *steps]) for number, steps in enumerate(rounds, 1)]
    return "\n".join([*parts, f"Answer: {value}"])
