"""Chains: the worked solutions are right, every sentence is used, and the careless ones are consistent."""

import random

import pytest

from dvp.data.chains import LARGEST, careless, generate
from dvp.data.verifier import grade

CHAINS = list(generate(200, seed=7))


def parsed(solution: str) -> tuple[list[tuple[str, str, int, str, int, str, int]], str]:
    """(number, name, value, sign, change, word, result) of every line; and the last line."""
    *lines, last = solution.splitlines()
    words = [line.removesuffix(".").split() for line in lines]
    return [
        (number, name, int(value), sign, int(change), word, int(result))
        for number, name, value, sign, change, word, result in words
    ], last


def test_worked_solutions_are_right_and_use_every_sentence_in_order():
    for chain in CHAINS:
        steps, last = parsed(chain.solution)
        assert 20 <= len(steps) <= 40
        first, *sentences = chain.problem.replace("? ", "?").split(". ")
        value = int(first.split()[2])
        # "… takes 5. 3. Lavu gives 4. …": the numbers of the sentences fall between full stops.
        told = [part.split() for part in sentences if len(part.split()) == 3]
        assert len(told) == len(steps)
        for index, (number, name, before, sign, change, word, result) in enumerate(steps):
            assert (number, before, word) == (f"{index + 1}.", value, "=")
            assert [name, str(change)] == [told[index][0], told[index][2]]
            assert sign == ("+" if told[index][1] in ("gives", "brings", "adds") else "-")
            value = before + change if sign == "+" else before - change
            assert result == value
            assert 1 <= value <= LARGEST
        assert last == f"Answer: {value}" == f"Answer: {chain.answer}"
        assert grade(chain.solution, chain.answer)


def test_texts_vary_and_a_seed_gives_the_same_ones():
    assert len({chain.problem for chain in CHAINS}) == len(CHAINS)
    assert list(generate(5, seed=7)) == CHAINS[:5]
    assert list(generate(5, seed=8)) != CHAINS[:5]
    assert {len(chain.solution.splitlines()) for chain in generate(50, seed=1, steps=(3, 3))} == {4}


def test_careless_solutions_are_consistent_and_half_their_lines_careless():
    rng = random.Random(0)
    lines = sloppy = wrong = 0
    for chain in CHAINS:
        solution = careless(chain, 0.2, rng)
        steps, last = parsed(solution)
        right, _ = parsed(chain.solution)
        value = right[0][2]
        for step, true in zip(steps, right, strict=True):
            number, name, before, sign, change, word, result = step
            assert (number, name, sign, change) == (true[0], true[1], true[3], true[4])
            assert before == value
            off = result - (before + change if sign == "+" else before - change)
            assert abs(off) <= 2
            assert word == "is" or off == 0
            assert result >= 1
            lines, sloppy, wrong = lines + 1, sloppy + (word == "is"), wrong + (off != 0)
            value = result
        assert last == f"Answer: {value}"
        assert grade(solution, chain.answer) == (value == int(chain.answer))
    assert sloppy / lines == pytest.approx(0.5, abs=0.03)
    assert wrong / sloppy == pytest.approx(0.2, abs=0.03)


def test_without_errors_only_the_habit_is_left():
    rng = random.Random(0)
    for chain in CHAINS[:20]:
        assert careless(chain, 0.0, rng).replace(" is ", " = ") == chain.solution
