"""Story arithmetic: tasks that a half-million-parameter model can learn on a laptop.

People, things and places are pseudo-words drawn from Zipf's law, so a small vocabulary fills up and has a tail. Answers
are positive whole numbers. A story has two to four steps, and a worked solution with one short equation a line:

    Bomira has 9 tesons. Lavu gives Bomira 5 more. Bomira sells 3 in Dorik. How many tesons are left?

    9 + 5 = 14.
    14 - 3 = 11.
    Answer: 11

tales: stories whose solutions begin each line with a meaningless sentence of seven words, each drawn by Zipf's law from
thousands. Unlikely words there were learned and are no error of the model. A vocabulary of 16,384 tokens fills up.
wide_tales have sixteen times the words: 60,000 tales fill a vocabulary of 151,936 tokens.

    Vemaly the kosuty fanet rimased the gody telanet of the sovet: 9 + 5 = 14.

products: numbers that a tiny model cannot multiply, a task for a calculator. Each step is a mark in GSM8K's format,
which becomes a call of the tool with its answer, or plain text if there is no tool.

    Bomira has 37 boxes of 48 tesons. Lavu gives Bomira 212 more. How many tesons are left?

    <<37 * 48=1776>>
    <<1776 + 212=1988>>
    Answer: 1988

chains: a long horizon of small sums. Three people change a number in turn, for seven to thirteen rounds.

    Bomira has 9 tesons. In each of 7 rounds Lavu gives 5, Doriko takes 2 and Kuku takes 4. How many tesons are left?

    Round 1
    Lavu 9 + 5 = 14.
    Doriko 14 - 2 = 12.
    Kuku 12 - 4 = 8.
    […]

For pretrained models, in plain English: english_stories are stories of one or two steps with common names and things;
sums are single sums and differences of numbers of one or two digits.

    Anna has 9 apples. Tom gives Anna 5 more. How many apples does Anna have?
    What is 34 + 12?
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from typing import NamedTuple

LARGEST = 19
"""No number of a correct solution exceeds this, except in products and in sums of two digits."""
PEOPLE = 3
"""People who act in each round of a chain, one step each."""
MARK = re.compile(r"<<(.+?)=(.+?)>>")
_STEP = re.compile(r"(.*?)(\d+) ([-+*]) (\d+) = \d+\.")
_SLIPS = (-2, -1, 1, 2)


@dataclass(frozen=True)
class Story:
    """A problem, its worked solution (which ends in the line `Answer: 42`) and its answer."""

    problem: str
    solution: str
    answer: str


@dataclass(frozen=True)
class Generator:
    """A generator of stories of one kind; `write` makes one of so many steps."""

    write: Callable[[random.Random, int], Story]
    steps: tuple[int, int]
    careless: Callable[[Story, float, random.Random], str]
    words: int = 0
    """Size of the lexicon of tales in units of 13,000 words; 0 for stories without such sentences."""

    def generate(self, count: int, seed: int, steps: Sequence[int] | None = None) -> Iterator[Story]:
        """Yield `count` stories of steps[0] to steps[1] steps.

        The same arguments give the same stories in every process; a larger count extends a smaller one.
        """
        rng, telling = random.Random(seed), random.Random(f"tales {seed}")
        for _ in range(count):
            story = self.write(rng, rng.randint(*steps or self.steps))
            if self.words:
                *lines, last = story.solution.splitlines()
                lines = [f"{sentence(telling, self.words)}: {line}" for line in lines]
                story = replace(story, solution="\n".join([*lines, last]))
            yield story


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
        """Draw a word."""
        return rng.choices(self.words, cum_weights=self.cumulative)[0]


NAMES = Lexicon(300, ending="", capital=True, seed=1)
THINGS = Lexicon(400, ending="ns", capital=False, seed=2)
PLACES = Lexicon(150, ending="k", capital=True, seed=3)
ENGLISH_NAMES = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Frank",
    "Grace",
    "Henry",
    "Julia",
    "Kate",
    "Leo",
    "Maria",
    "Nora",
    "Paul",
    "Rosa",
    "Sam",
    "Tom",
)
ENGLISH_THINGS = (
    "apples",
    "books",
    "pencils",
    "coins",
    "eggs",
    "shells",
    "cards",
    "stamps",
    "cookies",
    "oranges",
    "buttons",
    "cups",
)
ENGLISH_PLACES = ("London", "Paris", "Rome", "Boston", "Berlin", "Madrid", "Dublin", "Oslo", "Vienna")


@cache  # made on first use, as large ones take two seconds
def lexicons(times: int) -> tuple[Lexicon, ...]:
    """Return the lexicons of adverbs, adjectives, nouns and verbs, each of `times` its basic size."""
    kinds = ((1000, "ly", True), (4000, "y", False), (6000, "et", False), (2000, "sed", False))
    return tuple(Lexicon(size * times, *kind, seed) for seed, (size, *kind) in enumerate(kinds, start=4))


def sentence(rng: random.Random, times: int) -> str:
    """Return a meaningless sentence of seven drawn words."""
    adverb, adjective, noun, verb = (lexicon.draw for lexicon in lexicons(times))
    begin, act = adverb(rng), verb(rng)
    first, second = (f"the {adjective(rng)} {noun(rng)}" for _ in range(2))
    return f"{begin} {first} {act} {second} of the {noun(rng)}"


def apply(value: int, sign: str, number: int) -> int:
    """Return value + number, value - number or value * number."""
    return {"+": value + number, "-": value - number, "*": value * number}[sign]


def careless(story: Story, error_rate: float, rng: random.Random, habit: float = 1.0) -> str:
    """Write the worked solution with a share `habit` of careless steps, each wrong with probability `error_rate`.

    A careless writer says "9 + 5 is 14." where a careful one writes "9 + 5 = 14.": how a solution begins tells how it
    will go, so RL can choose a habit instead of only avoiding slips one by one. A wrong step is off by a little and
    later steps carry on from what it says; the stated answer is consistent with the lines above it. No number becomes
    negative. Two slips may cancel each other. What stands before a step stays.
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


def _stays_positive(value: int, steps: Sequence[tuple[str, int]]) -> bool:
    return min(accumulate(steps, lambda value, step: apply(value, *step), initial=value)) >= 1


def guessed(story: Story, error_rate: float, rng: random.Random) -> str:
    """Write a product's solution with each step guessed, and wrong, with probability `error_rate`.

    Such a step says "37 * 48 is 1802.", off by up to a fifth, and later steps carry on from there.
    """
    value, lines = None, []
    for expression, _ in MARK.findall(story.solution):
        left, sign, right = expression.split()
        before = int(left) if value is None else value
        value = apply(before, sign, int(right))
        line = PRODUCT.step.format(before, sign, right, value)
        if rng.random() < error_rate:
            guess = max(1, round(value * rng.uniform(0.8, 1.2)))
            value = guess + (guess == value)
            line = f"{before} {sign} {right} is {value}."
        lines.append(line)
    return "\n".join([*lines, f"Answer: {value}"])


class Plot(NamedTuple):
    """The sentences that a story is told in, and what happens in it."""

    starts: Sequence[str]
    changes: dict[str, Sequence[str]]
    questions: Sequence[str]
    change: Callable[[random.Random, int], tuple[str, int]]
    """Draws an operation and its number, given the value so far."""
    step: str
    """A line of the solution: value, operation, number, result."""
    cast: Callable[[random.Random], dict]
    """Draws its words: person, other, things, place."""

    def write(self, rng: random.Random, steps: int) -> Story:
        """Write a story of so many steps; the first step of a product is its multiplication."""
        words, lines = self.cast(rng), []
        if self is PRODUCT:
            words |= {"a": rng.randint(12, 99), "b": rng.randint(12, 99)}
            value, steps = words["a"] * words["b"], steps - 1
            lines.append(self.step.format(words["a"], "*", words["b"], value))
        else:
            value = words["n"] = rng.randint(2, 9)
        sentences = [rng.choice(self.starts).format(**words)]
        for _ in range(steps):
            sign, number = self.change(rng, value)
            sentences.append(rng.choice(self.changes[sign]).format(**words | {"n": number}))
            before, value = value, apply(value, sign, number)
            lines.append(self.step.format(before, sign, number, value))
        sentences.append(rng.choice(self.questions).format(**words))
        return Story(" ".join(sentences), "\n".join([*lines, f"Answer: {value}"]), str(value))


def _cast(rng: random.Random) -> dict:
    """Draw the words of a story: two people, things and a place."""
    person, other = _people(rng, 2)
    return {"person": person, "other": other, "things": THINGS.draw(rng), "place": PLACES.draw(rng)}


def _english_cast(rng: random.Random) -> dict:
    """Draw the words of a story in plain English."""
    person, other = rng.sample(ENGLISH_NAMES, 2)
    return {"person": person, "other": other, "things": rng.choice(ENGLISH_THINGS), "place": rng.choice(ENGLISH_PLACES)}


def _people(rng: random.Random, count: int) -> list[str]:
    people: dict[str, None] = {}
    while len(people) < count:
        people[NAMES.draw(rng)] = None
    return list(people)


def _small_change(rng: random.Random, value: int) -> tuple[str, int]:
    """Draw an operation that keeps the value between 1 and LARGEST."""
    while True:
        sign = rng.choices("+-*", weights=(5, 5, 1))[0]
        number = 2 if sign == "*" else rng.randint(2, 5)
        if 1 <= apply(value, sign, number) <= LARGEST:
            return sign, number


def _large_change(rng: random.Random, value: int) -> tuple[str, int]:
    sign = rng.choices("+-*", weights=(2, 2, 1))[0]
    return sign, rng.randint(12, 99) if sign != "-" or value > 1000 else rng.randint(2, value // 2)


_MULTIPLIED = ("{person} gets {n} times as many.", "{other} makes them {n} times as many.")
_QUESTIONS = ("How many {things} does {person} have?", "How many {things} are left?", "How many {things} is that?")
STORY = Plot(
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
        "*": _MULTIPLIED,
    },
    questions=_QUESTIONS,
    change=_small_change,
    step="{} {} {} = {}.",
    cast=_cast,
)
PRODUCT = Plot(
    starts=("{person} has {a} boxes of {b} {things}.", "{person} finds {a} bags of {b} {things} in {place}."),
    changes={
        "+": ("{other} gives {person} {n} more.", "{person} buys {n} more in {place}."),
        "-": ("{person} gives {n} to {other}.", "{person} sells {n} in {place}."),
        "*": _MULTIPLIED,
    },
    questions=_QUESTIONS[:2],
    change=_large_change,
    step="<<{} {} {}={}>>",
    cast=_cast,
)
_ACTS = {"+": ("gives", "brings", "adds"), "-": ("takes", "wants", "loses")}


def _chain(rng: random.Random, rounds: int) -> Story:
    things, (owner, *others) = THINGS.draw(rng), _people(rng, 1 + PEOPLE)
    while True:
        start = rng.randint(1, LARGEST)
        changes = [rng.choice((1, -1)) * rng.randint(2, 5) for _ in range(PEOPLE)]
        values = list(accumulate(changes * rounds, initial=start))
        # If a round returned to its first number, whole rounds could be copied.
        if sum(changes) and min(values) >= 1 and max(values) <= LARGEST:
            break
    acts = [(name, "+" if change > 0 else "-", abs(change)) for name, change in zip(others, changes, strict=True)]
    *first, last = (f"{name} {rng.choice(_ACTS[sign])} {number}" for name, sign, number in acts)
    question = rng.choice(_QUESTIONS[1:]).format(things=things)
    problem = f"{owner} has {start} {things}. In each of {rounds} rounds {', '.join(first)} and {last}. {question}"
    lines = []
    for step, (name, sign, number) in enumerate(acts * rounds):
        if step % PEOPLE == 0:
            lines.append(f"Round {step // PEOPLE + 1}")
        lines.append(f"{name} {values[step]} {sign} {number} = {values[step + 1]}.")
    return Story(problem, "\n".join([*lines, f"Answer: {values[-1]}"]), str(values[-1]))


def _sum(rng: random.Random, digits: int) -> Story:
    """Write a sum of two numbers of one digit; for `digits` 2, a sum or difference of numbers up to 60."""
    left, sign, right = rng.randint(1, 9), "+", rng.randint(1, 9)
    if digits == 2:
        sign = rng.choice("+-")
        left = rng.randint(10, 60)
        right = rng.randint(1, 30 if sign == "+" else left - 1)
    value = apply(left, sign, right)
    return Story(f"What is {left} {sign} {right}?", f"{left} {sign} {right} = {value}.\nAnswer: {value}", str(value))


SUMS = Generator(_sum, (1, 2), careless)
ENGLISH_STORIES = Generator(STORY._replace(cast=_english_cast).write, (1, 2), careless)
STORIES = Generator(STORY.write, (2, 4), careless)
TALES = replace(STORIES, words=1)
WIDE_TALES = replace(STORIES, words=16)
PRODUCTS = Generator(PRODUCT.write, (1, 3), guessed)  # steps, the product included
# habit 0.5: half of a chain's lines, at random, are careless, so that no single choice decides a response.
CHAINS = Generator(_chain, (7, 13), partial(careless, habit=0.5))
