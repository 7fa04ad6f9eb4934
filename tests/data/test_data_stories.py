"""Story arithmetic: worked solutions are right and do what the problem says, careless ones are consistent.

That the texts stay what they are, to the byte, tests/golden sees.
"""

import random
import re
from collections import Counter
from itertools import pairwise

import pytest

from dvp.data.sources import GENERATORS
from dvp.data.stories import LARGEST, MARK, PEOPLE
from dvp.data.verifier import grade
from dvp.experiment.tools import Calculator
from dvp.tools import make_tool
from dvp.training.base import segments

STEPS = {"stories": (2, 4), "english_stories": (1, 2), "products": (1, 3), "chains": (7, 13), "tales": (2, 4)}
MADE = {kind: list(GENERATORS[kind].generate(400, seed=7)) for kind in STEPS}
LINE = re.compile(r"(?:<<|[\w ]+: |\w+ )?(?P<left>\d+ [-+*] \d+)(?P<word>=| = | is )(?P<right>\d+)(?:>>|\.)")
TOOLS = Calculator(kind="calculator", call=["[", "]"], answer=["{", "}"])
KINDS = pytest.mark.parametrize("kind", STEPS)


def steps(solution: str) -> list[tuple[str, str, int]]:
    """What each line computes, how it is written and what it says; each begins with what the line before it says."""
    *lines, last = (line for line in solution.splitlines() if not line.startswith("Round"))
    found = [LINE.fullmatch(line).group("left", "word", "right") for line in lines]
    for (_, _, before), (left, _, _) in pairwise(found):
        assert left.split()[0] == before
    assert last == f"Answer: {found[-1][2]}"
    return [(left, word.strip(), int(right)) for left, word, right in found]


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@KINDS
def test_worked_solutions_do_what_the_problem_says(kind):
    fewest, most = STEPS[kind]
    for story in MADE[kind]:
        found = steps(story.solution)
        assert all(eval(left) == right and word == "=" for left, word, right in found)
        assert min(right for *_, right in found) >= 1
        assert kind == "products" or max(right for *_, right in found) <= LARGEST
        assert int(story.answer) == found[-1][2]
        told = numbers(story.problem)
        if kind == "chains":
            start, rounds, *changes = told
            assert fewest <= rounds <= most
            assert story.solution.count("Round") == rounds
            told = [start, *changes * rounds]
            verbs = re.findall("gives|brings|adds|takes|wants|loses", story.problem)
            signs = ["-" if verb in ("takes", "wants", "loses") else "+" for verb in verbs] * rounds
            assert [left.split()[1] for left, _, _ in found] == signs
            assert all(found[end - 1][2] != int(found[end - PEOPLE][0].split()[0]) for end in (PEOPLE, 2 * PEOPLE))
        else:
            assert fewest <= len(found) <= most
        first, *others = found
        assert told == [*numbers(first[0]), *(numbers(left)[1] for left, _, _ in others)]
        assert grade(story.solution, story.answer)


@KINDS
@pytest.mark.parametrize("rate", [0.0, 0.35, 1.0])
def test_careless_solutions_are_consistent_and_graded(kind, rate):
    rng, words, wrong, different = random.Random(0), Counter(), 0, 0
    for story in MADE[kind]:
        written = GENERATORS[kind].careless(story, rate, rng)
        found, right = steps(written), steps(story.solution)
        assert [left.split()[1:] for left, _, _ in found] == [left.split()[1:] for left, _, _ in right]
        for left, word, value in found:
            assert value >= 1
            assert word == "is" or eval(left) == value
            assert kind == "products" or abs(eval(left) - value) <= 2
            words[word] += 1
            wrong += eval(left) != value
        different += found[-1][2] != int(story.answer)
        assert grade(written + "\n", story.answer) == (found[-1][2] == int(story.answer))
        assert rate or written.replace(" is ", " = ") == story.solution
    careless_lines = words.total() * (rate if kind == "products" else 0.5 if kind == "chains" else 1)
    assert words["is"] == pytest.approx(careless_lines, rel=0.15)
    assert wrong == pytest.approx(words["is"] * (1 if kind == "products" else rate), rel=0.15)
    assert not rate or different > 150


@pytest.mark.parametrize(("digits", "largest", "signs"), [(1, 18, {"+"}), (2, 90, {"+", "-"})])
def test_sums_have_numbers_of_so_many_digits(digits, largest, signs):
    sums = list(GENERATORS["sums"].generate(400, seed=7, steps=(digits, digits)))
    for story in sums:
        left, sign, right = re.fullmatch(r"What is (\d+) ([-+]) (\d+)\?", story.problem).groups()
        value = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert len(left) == digits
        assert 1 <= value <= largest
        assert story.answer == str(value)
        assert steps(story.solution) == [(f"{left} {sign} {right}", "=", value)]
        assert grade(story.solution, story.answer)
        assert grade(f"{left} {sign} {right} = {value}\n#### {value}\n", story.answer)
    assert {story.problem.split()[3] for story in sums} == signs


def test_the_calculator_says_what_a_product_says():
    marks = [MARK.fullmatch(line) for story in MADE["products"] for line in story.solution.splitlines()[:-1]]
    answers = make_tool(TOOLS).answers([mark[1] for mark in marks])
    assert [answer.text for answer in answers] == [mark[2] for mark in marks]


def test_a_solution_is_written_as_the_tool_wants_it():
    parts = segments("<<3 * 4=12>>\n<<12 + 5=17>>\nAnswer: 17", TOOLS)
    assert "".join(text for text, _ in parts) == "[3 * 4]{12}\n[12 + 5]{17}\nAnswer: 17"
    assert "".join(text for text, own in parts if own) == "[3 * 4]\n[12 + 5]\nAnswer: 17"
    assert segments("<<3 * 4=12>>\nAnswer: 12", None) == [("3 * 4 = 12.\nAnswer: 12", True)]
