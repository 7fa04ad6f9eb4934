"""Shortest paths: the worked ones against a breadth-first search of their own."""

import random
from collections import Counter
from itertools import product

import pytest

from dvp.data.puzzles import read
from dvp.data.shortest_path import _solution, careless, generate
from dvp.data.stories import Story
from dvp.data.verifier import check_reference, grade

PUZZLES = list(generate(300, seed=7))
STEP = {"right": (0, 1), "down": (1, 0), "left": (0, -1), "up": (-1, 0)}


def drawn(puzzle: Story) -> list[list[str]]:
    return [line.split(" ") for line in puzzle.problem.splitlines()]


def places(grid, mark: str) -> list[tuple[int, int]]:
    return [(i, j) for i, row in enumerate(grid) for j, cell in enumerate(row) if cell == mark]


def moved(grid, cell, name: str) -> tuple[int, int] | None:
    """Where a move leads, or None if that is blocked or outside."""
    i, j = cell[0] + STEP[name][0], cell[1] + STEP[name][1]
    inside = i in range(len(grid)) and j in range(len(grid[0]))
    return (i, j) if inside and grid[i][j] != "X" else None


def arrives(grid, names) -> bool:
    (cell,) = places(grid, "*")
    for name in names:
        cell = cell and moved(grid, cell, name)
    return [cell] == places(grid, "#")


def distance(grid) -> int | None:
    """The fewest moves from * to #."""
    reached, count = set(places(grid, "*")), 0
    while not reached & set(places(grid, "#")):
        further = reached | {after for cell in reached for name in STEP if (after := moved(grid, cell, name))}
        if further == reached:
            return None
        reached, count = further, count + 1
    return count


def parted(solution: str, sign: str) -> tuple[str, list[tuple[str, str, str]], str]:
    """The first line, each move's cell, direction and next cell, and the answer."""
    first, *lines, last = solution.splitlines()
    moves = []
    for line in lines:
        left, after = line.removesuffix(".").split(f" {sign} ")
        moves.append((*left.rsplit(" ", 1), after))
    return first, moves, last.removeprefix("Answer: ")


def test_worked_solutions_are_shortest_paths_and_graded_right():
    for puzzle in PUZZLES:
        grid = drawn(puzzle)
        first, moves, answer = parted(puzzle.solution, "=")
        (start,), (goal,) = places(grid, "*"), places(grid, "#")
        assert first == "{} {} to {} {}.".format(*start, *goal)
        cell = start
        for before, name, after in moves:
            assert before == "{} {}".format(*cell)
            cell = moved(grid, cell, name)
            assert cell, "a way through a blocked cell"
            assert after == "{} {}".format(*cell)
        if distance(grid) is None:
            assert (moves, answer) == ([], "infeasible")
        else:
            assert cell == goal
            assert len(moves) == distance(grid)
            assert answer.split(" ") == [name for _, name, _ in moves]
        assert grade(puzzle.solution, puzzle.answer)


def test_where_nothing_leads_to_the_goal_no_path_is_right():
    closed = [puzzle for puzzle in PUZZLES if distance(drawn(puzzle)) is None]
    assert 2 < len(closed) < 60
    for puzzle in closed:
        assert careless(puzzle, 1.0, random.Random(0)) == puzzle.solution
        assert not grade("Answer: right down", puzzle.answer)
    assert not any(grade("Answer: infeasible", puzzle.answer) for puzzle in PUZZLES if puzzle not in closed)


def test_references_are_good_and_about_the_grid_of_the_problem():
    for puzzle in PUZZLES:
        check_reference(puzzle.answer)
        assert read(puzzle.answer).metadata == {"matrix": drawn(puzzle)}
        assert {cell for row in drawn(puzzle) for cell in row} <= set("*#OX")


def test_steps_are_the_fewest_and_most_rows_and_columns():
    shapes = {(len(drawn(puzzle)), len(drawn(puzzle)[0])) for puzzle in PUZZLES}
    assert shapes == {(4, 4), (4, 5), (5, 4), (5, 5)}
    assert {len(drawn(puzzle)) for puzzle in generate(40, seed=7, steps=(2, 3))} == {2, 3}
    blocked = [cell == "X" for puzzle in PUZZLES for row in drawn(puzzle) for cell in row]
    # Of 20 cells, two are the start and the goal.
    assert sum(blocked) / len(blocked) == pytest.approx(0.2 * 18 / 20, abs=0.02)


@pytest.mark.parametrize("rows", ["*OO OOO OO#", "OXO*O OOOOO O#OXO", "*OOO OXOO OOO#"])
def test_each_shortest_path_is_as_likely(rows):
    grid = [list(row) for row in rows.split()]
    shortest = {names for names in product(STEP, repeat=distance(grid)) if arrives(grid, names)}
    assert len(shortest) > 2
    draws = 3000
    rng = random.Random(0)
    counts = Counter(tuple(parted(_solution(grid, rng), "=")[2].split(" ")) for _ in range(draws))
    assert set(counts) == shortest
    for count in counts.values():
        assert count / draws == pytest.approx(1 / len(shortest), abs=0.03)  # more than three standard errors


def test_a_seed_gives_the_same_ones_and_a_larger_count_extends_them():
    assert list(generate(20, seed=7)) == PUZZLES[:20]
    problems = {puzzle.problem for puzzle in PUZZLES}
    assert len(problems) > 290
    for seed in (6, 8):
        assert len({puzzle.problem for puzzle in generate(100, seed=seed)} & problems) < 3


def test_careless_solutions_go_the_same_way_and_state_their_directions():
    rng = random.Random(0)
    slips = lines = wrong = 0
    for puzzle in PUZZLES:
        text = careless(puzzle, 0.35, rng)
        first, right, answer = parted(puzzle.solution, "=")
        assert "=" not in text
        written = parted(text, "is")
        assert written[0] == first
        assert [(before, after) for before, _, after in written[1]] == [(before, after) for before, _, after in right]
        names = [name for _, name, _ in written[1]]
        assert set(names) <= set(STEP)
        assert written[2] == (" ".join(names) or answer)
        slips += sum(one[1] != other[1] for one, other in zip(written[1], right, strict=True))
        lines += len(names)
        # As many moves as the shortest path has: right if they arrive.
        grid = drawn(puzzle)
        assert grade(text, puzzle.answer) == (not names or arrives(grid, names))
        wrong += not grade(text, puzzle.answer)
    assert slips / lines == pytest.approx(0.35, abs=0.06)  # more than three standard errors
    assert 100 < wrong < 290


def test_error_rates_zero_and_one():
    for puzzle in PUZZLES[:50]:
        assert careless(puzzle, 0.0, random.Random(0)) == puzzle.solution.replace(" = ", " is ")
        right = parted(puzzle.solution, "=")[1]
        slips = parted(careless(puzzle, 1.0, random.Random(0)), "is")[1]
        assert all(one[1] != other[1] for one, other in zip(slips, right, strict=True))
