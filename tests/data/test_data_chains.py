"""Chains: the worked solutions are right and do what the problem says, and the careless ones are consistent."""

import random
import re

import pytest

from dvp.data.chains import LARGEST, PEOPLE, careless, generate
from dvp.data.verifier import grade

CHAINS = list(generate(200, seed=7))
PROBLEM = re.compile(r"\w+ has (\d+) \w+\. In each of (\d+) rounds (.+?)\. How many .+\?")


def parsed(solution: str) -> tuple[list[list[tuple[str, int, str, int, str, int]]], str]:
    """Of every round its lines: name, value, sign, change, word, result; and the solution's last line."""
    rounds: list[list[tuple[str, int, str, int, str, int]]] = []
    *lines, last = solution.splitlines()
    for line in lines:
        if line.startswith("Round "):
            rounds.append([])
            assert line == f"Round {len(rounds)}"
        else:
            name, value, sign, change, word, result = line.removesuffix(".").split()
            rounds[-1].append((name, int(value), sign, int(change), word, int(result)))
    return rounds, last


def test_worked_solutions_do_what_the_problem_says():
    for chain in CHAINS:
        start, count, acts = PROBLEM.fullmatch(chain.problem).groups()
        told = [act.split() for act in re.split(r", | and ", acts)]
        rounds, last = parsed(chain.solution)
        assert 7 <= len(rounds) == int(count) <= 13
        value = int(start)
        for steps in rounds:
            assert len(steps) == len(told) == PEOPLE
            before = value
            for (name, verb, number), (written, left, sign, change, word, result) in zip(told, steps, strict=True):
                assert (written, left, change, word) == (name, value, int(number), "=")
                assert sign == ("+" if verb in ("gives", "brings", "adds") else "-")
                value = left + change if sign == "+" else left - change
                assert result == value
                assert 1 <= value <= LARGEST
            assert value != before
        assert last == f"Answer: {value}" == f"Answer: {chain.answer}"
        assert grade(chain.solution, chain.answer)


def test_texts_vary_and_a_seed_gives_the_same_ones():
    assert len({chain.problem for chain in CHAINS}) == len(CHAINS)
    assert list(generate(5, seed=7)) == CHAINS[:5]
    assert list(generate(5, seed=8)) != CHAINS[:5]
    assert {len(parsed(chain.solution)[0]) for chain in generate(50, seed=1, steps=(2, 2))} == {2}


def test_careless_solutions_are_consistent_and_half_their_lines_careless():
    rng = random.Random(0)
    lines = sloppy = wrong = 0
    for chain in CHAINS:
        solution = careless(chain, 0.2, rng)
        (rounds, last), (right, _) = parsed(solution), parsed(chain.solution)
        value = right[0][0][1]
        for steps, true_steps in zip(rounds, right, strict=True):
            for (name, left, sign, change, word, result), true in zip(steps, true_steps, strict=True):
                assert (name, sign, change) == (true[0], true[2], true[3])
                assert left == value
                off = result - (left + change if sign == "+" else left - change)
                assert abs(off) <= 2
                assert word == "is" or (word, off) == ("=", 0)
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
