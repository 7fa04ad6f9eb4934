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
from functools import partial
from itertools import accumulate

from dvp.data import stories
from dvp.data.stories import LARGEST, NAMES, THINGS, Story, drawn

PEOPLE = 3  # steps of a round
_CHANGES = {"+": ("gives", "brings", "adds"), "-": ("takes", "wants", "loses")}
_QUESTIONS = ("How many {things} are left?", "How many {things} is that?")

# Half of the lines, at random: a response is a long row of choices of which no single one decides.
careless = partial(stories.careless, habit=0.5)


def _chain(rng: random.Random, rounds: int) -> Story:
    things = THINGS.draw(rng)
    people: dict[str, None] = {}
    while len(people) < 1 + PEOPLE:
        people[NAMES.draw(rng)] = None
    owner, *others = people
    while True:
        start = rng.randint(1, LARGEST)
        changes = [rng.choice((1, -1)) * rng.randint(2, 5) for _ in range(PEOPLE)]
        values = list(accumulate(changes * rounds, initial=start))
        # If a round came back to where it began, whole rounds could be copied.
        if sum(changes) and min(values) >= 1 and max(values) <= LARGEST:
            break
    acts = [(name, "+" if change > 0 else "-", abs(change)) for name, change in zip(others, changes, strict=True)]
    *first, last = (f"{name} {rng.choice(_CHANGES[sign])} {number}" for name, sign, number in acts)
    question = rng.choice(_QUESTIONS).format(things=things)
    problem = f"{owner} has {start} {things}. In each of {rounds} rounds {', '.join(first)} and {last}. {question}"
    lines = []
    for step, (name, sign, number) in enumerate(acts * rounds):
        if step % PEOPLE == 0:
            lines.append(f"Round {step // PEOPLE + 1}")
        lines.append(f"{name} {values[step]} {sign} {number} = {values[step + 1]}.")
    return Story(problem, "\n".join([*lines, f"Answer: {values[-1]}"]), str(values[-1]))


generate = drawn(_chain, steps=(7, 13))
