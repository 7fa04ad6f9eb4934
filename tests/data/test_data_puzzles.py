"""Puzzles of reasoning-gym: worked and careless solutions against plain loops; any solution is right."""

import ast
import json
import random

import pytest

from dvp.data import graph_color
from dvp.data.puzzles import Puzzle, is_puzzle, read
from dvp.data.stories import Story
from dvp.data.verifier import check_reference, grade
from dvp.errors import DvpError

# * O O
# X O #
GRID = [list("*OO"), list("XO#")]
PATH = Puzzle("shortest_path", "right right down", {"matrix": GRID})
CLOSED = Puzzle("shortest_path", "infeasible", {"matrix": [list("*X#")]})
LINE = {"vertices": [0, 1, 2], "edges": [[0, 1], [1, 2]], "color_options": [1, 2, 3]}
COLORS = Puzzle("graph_color", '{"0": 1, "1": 2, "2": 3}', {"puzzle": LINE})
PUZZLES = pytest.mark.parametrize("puzzle", [PATH, CLOSED, COLORS])
GRAPHS = list(graph_color.generate(300, seed=7, steps=(4, 6)))


def text(**fields) -> str:
    """A reference, of which some fields are others; None: it lacks them."""
    found = {"reasoning_gym": PATH.dataset, "answer": PATH.answer, "metadata": PATH.metadata} | fields
    return json.dumps({key: value for key, value in found.items() if value is not None})


# --- references ---


@PUZZLES
def test_a_puzzle_is_read_again_from_its_reference(puzzle):
    reference = puzzle.reference()
    for laid_out in (reference, "  " + reference, reference.replace("{", "{ ", 1)):
        assert is_puzzle(laid_out)
        assert read(laid_out) == puzzle
        check_reference(laid_out)
    assert "\n" not in reference
    assert PATH.reference() == text()


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (text(reasoning_gym="countdown"), "no data set 'countdown' of reasoning-gym; expected shortest_path or graph_"),
        (text(reasoning_gym=["x"]), "a puzzle of reasoning-gym: reasoning_gym: expected a text, found"),
        (text(answer=None), "a puzzle of reasoning-gym: answer: expected a text, found None"),
        (text(question="Where?"), r"a puzzle of reasoning-gym: expected .*, found also \['question'\]"),
        ('{"reasoning_gym"', "a puzzle of reasoning-gym: not valid JSON: Expecting"),
        *((PATH._replace(answer=moves).reference(), "does not solve it") for moves in ("", "right down", "infeasible")),
        (PATH._replace(answer="right left right right down").reference(), "does not solve it"),
        (CLOSED._replace(answer="right right").reference(), "does not solve it"),
        (COLORS._replace(answer='{"0": 1, "1": 1, "2": 3}').reference(), "does not solve it"),
        (PATH._replace(metadata={}).reference(), "a grid of"),
        (CLOSED._replace(metadata={"matrix": [["*", "O", "O"]]}).reference(), "one \\* and one #"),
        (PATH._replace(metadata={"matrix": [["*", "#", ["O"]]]}).reference(), "a grid of"),
        (COLORS._replace(metadata={"puzzle": LINE | {"edges": [[0, 9]]}}).reference(), "puzzle"),
    ],
    ids=lambda value: value[:40],
)
def test_what_is_no_puzzle_is_an_error_of_one_line(reference, message):
    with pytest.raises(DvpError, match=message) as caught:
        check_reference(reference)
    assert "\n" not in str(caught.value)


# --- answers ---


@pytest.mark.parametrize(
    ("puzzle", "answers"),
    [
        (PATH, ["right right down", "right down right", " right  down right "]),
        (CLOSED, ["infeasible"]),
        (COLORS, [COLORS.answer, '{"0": 1, "1": 2, "2": 1}', '{"2":3,"1":1,"0":2}']),
    ],
)
def test_any_solution_is_right_where_it_is_stated(puzzle, answers):
    reference = puzzle.reference()
    for answer in answers:
        for response in (f"Answer: {answer}", f"0 0 to 1 2.\nAnswer: {answer}.\n", rf"So \boxed{{{answer}}}"):
            assert grade(response, reference)
        # Of a response that was cut off, only if the statement is closed.
        assert grade(f"Answer: {answer}\n", reference, truncated=True)
        assert not grade(f"Answer: {answer}", reference, truncated=True)
        assert not grade(answer, reference)
        assert not grade(f"Answer: {answer}\nNo. Answer: left", reference)
        assert not grade(f"Answer: {answer}", "70")


HOSTILE = [
    *(puzzle.reference() for puzzle in (PATH, CLOSED, COLORS)),
    *("[" * 20_000, '{"0": ' * 10_000 + "1" + "}" * 10_000, "9" * 100_000, "-1e999", "NaN", "null", '"012"', "{}", ""),
    *('{"0": NaN, "1": 2, "2": 3}', '{"0": Infinity, "1": 2, "2": 3}', '{"0": [1], "1": {}, "2": 3}'),
    *('{"0": ' + "9" * 5_000 + ', "1": 2, "2": 3}', '{"0": 1, "1": 2, "2": "\\ud800"}', "{0: 1, 1: 2, 2: 3}"),
    *("right " * 20_000, "\0 ￿ ∞ 1", "__import__('os').abort()", "1 2 3", "right right forward"),
]
NO_SOLUTIONS = [
    *("right left right right down", "down right right", "right right down down", "up right right down down"),
    *('{"0": 1, "1": 2}', *(f'{{"0": 1, "1": 2, "2": {color}}}' for color in ("2", "4", '"3"', "null"))),
]


@PUZZLES
@pytest.mark.parametrize("answer", HOSTILE + NO_SOLUTIONS, ids=lambda answer: answer[:20])
def test_what_does_not_solve_it_and_hostile_answers_are_wrong(puzzle, answer):
    for response in (f"Answer: {answer}", rf"\boxed{{{answer}}}", answer):
        for truncated in (False, True):
            assert not grade(response, puzzle.reference(), truncated=truncated)


def test_the_same_solution_in_another_layout_is_one():
    assert PATH.solution(" right  down right") == PATH.solution("right down right") != PATH.solution("right right down")
    same = ('{"0": 1, "1": 2, "2": 1}', '{"2":1,"1":2,"0":1}', '{"0": true, "1": 2, "2": 1.0, "7": 3}')
    assert all(grade(f"Answer: {answer}", COLORS.reference()) for answer in same)
    assert {COLORS.solution(answer) for answer in same} == {"1 2 1"}


# --- what is generated ---


def coloured(puzzle: Story, solution: str, sign: str) -> list[tuple[list[int], int]]:
    """Each vertex's colour and those that its neighbours have so far, which its line has to say."""
    vertices, edges, _ = (ast.literal_eval(line.split(": ", 1)[1]) for line in puzzle.problem.splitlines())
    *lines, last = solution.splitlines()
    colors, steps = {}, []
    for vertex, line in zip(vertices, lines, strict=True):
        left, color = line.removesuffix(".").split(f" {sign} ")
        neighbours = [sum(edge) - vertex for edge in edges if vertex in edge]
        taken = [colors[neighbour] for neighbour in neighbours if neighbour in colors]
        assert left == " ".join(map(str, [vertex, *(["not", *taken] if taken else [])]))
        colors[vertex] = int(color)
        steps.append((taken, int(color)))
    assert {int(vertex): color for vertex, color in json.loads(last.removeprefix("Answer: ")).items()} == colors
    assert read(puzzle.answer).metadata["puzzle"]["edges"] == [list(edge) for edge in edges]
    assert grade(solution, puzzle.answer) == all(colors[first] != colors[second] for first, second in edges)
    return steps


def test_graphs_are_coloured_and_careless_ones_by_mistake():
    rng, slips, chances = random.Random(0), 0, 0
    assert {puzzle.problem.count(",", 0, puzzle.problem.index("\n")) + 1 for puzzle in GRAPHS} == {4, 5, 6}
    for puzzle in GRAPHS:
        assert all(color not in taken for taken, color in coloured(puzzle, puzzle.solution, "="))
        for rate in (0.0, 0.35, 1.0):
            for taken, color in coloured(puzzle, graph_color.careless(puzzle, rate, rng), "is"):
                if 0 < len(set(taken)) < 3:
                    assert rate == 0.35 or (color in taken) == bool(rate)
                    chances, slips = chances + (rate == 0.35), slips + (rate == 0.35 and color in taken)
    assert slips / chances == pytest.approx(0.35, abs=0.05)  # more than three standard errors
