"""Products: the worked solutions are right, the careless ones consistent, and both can be read as calls of a tool."""

import random
from itertools import pairwise

import pytest

from dvp.data.products import MARK, careless, generate
from dvp.data.verifier import grade
from dvp.experiment.tools import Calculator
from dvp.tools import make_tool
from dvp.training.base import segments

PROBLEMS = list(generate(400, seed=7))
TOOLS = Calculator(kind="calculator", call=["[", "]"], answer=["{", "}"])
CALCULATOR = make_tool(TOOLS)


def test_worked_solutions_are_what_the_calculator_says():
    for problem in PROBLEMS:
        *lines, last = problem.solution.splitlines()
        marks = [MARK.fullmatch(line) for line in lines]
        assert 1 <= len(lines) <= 3
        answers = CALCULATOR.answers([mark[1] for mark in marks])
        assert [answer.text for answer in answers] == [mark[2] for mark in marks]
        for before, after in pairwise(marks):
            assert after[1].split()[0] == before[2]
        assert last == f"Answer: {marks[-1][2]}" == f"Answer: {problem.answer}"
        assert int(problem.answer) >= 1
        # Every number of the problem is used, in its order.
        numbers = [word.strip(".") for word in problem.problem.split() if word.strip(".").isdigit()]
        first = marks[0][1].split()
        assert numbers == [first[0], first[2], *(mark[1].split()[2] for mark in marks[1:])]


def test_texts_vary_and_a_seed_gives_the_same_ones():
    assert len({problem.problem for problem in PROBLEMS}) == len(PROBLEMS)
    assert {sign for problem in PROBLEMS for sign in "+-*" if f" {sign} " in problem.solution} == set("+-*")
    assert list(generate(5, seed=7)) == PROBLEMS[:5]
    assert list(generate(5, seed=8)) != PROBLEMS[:5]
    assert {len(problem.solution.splitlines()) for problem in generate(50, seed=1, steps=(2, 2))} == {3}


def test_careless_solutions_are_consistent_and_graded_by_their_answer():
    rng = random.Random(0)
    guessed = steps = 0
    for problem in PROBLEMS:
        *lines, last = careless(problem, 0.35, rng).splitlines()
        carried = None
        for line in lines:
            mark = MARK.fullmatch(line)
            left, right = (mark[1], mark[2]) if mark else line.removesuffix(".").split(" is ")
            assert carried is None or left.split()[0] == carried
            assert (CALCULATOR.answers([left])[0].text == right) == bool(mark)
            guessed += mark is None
            steps += 1
            carried = right
        assert last == f"Answer: {carried}"
        assert grade(last + "\n", problem.answer) == (carried == problem.answer)
    assert guessed / steps == pytest.approx(0.35, abs=0.06)
    assert careless(PROBLEMS[0], 0.0, rng) == PROBLEMS[0].solution


def test_a_solution_is_written_as_the_tool_wants_it():
    solution = "<<3 * 4=12>>\n<<12 + 5=17>>\nAnswer: 17"
    parts = segments(solution, TOOLS)
    assert "".join(text for text, _ in parts) == "[3 * 4]{12}\n[12 + 5]{17}\nAnswer: 17"
    assert "".join(text for text, own in parts if own) == "[3 * 4]\n[12 + 5]\nAnswer: 17"
    assert segments(solution, None) == [("3 * 4 = 12.\n12 + 5 = 17.\nAnswer: 17", True)]
    assert segments("9 + 5 = 14.\nAnswer: 14", TOOLS) == [("9 + 5 = 14.\nAnswer: 14", True)]
