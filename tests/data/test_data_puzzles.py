"""Puzzles of reasoning-gym: their verifier takes any solution, and nothing that a response says upsets it."""

import json

import pytest

from dvp.data.puzzles import Puzzle, is_puzzle, read
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


def text(**fields) -> str:
    """A reference, of which some fields are others; None: it lacks them."""
    found = {"reasoning_gym": PATH.dataset, "answer": PATH.answer, "metadata": PATH.metadata} | fields
    return json.dumps({key: value for key, value in found.items() if value is not None})


@PUZZLES
def test_a_reference_is_a_line_from_which_the_puzzle_is_read_again(puzzle):
    reference = puzzle.reference()
    assert "\n" not in reference
    assert is_puzzle(reference)
    assert read(reference) == puzzle
    assert read(reference).reference() == reference
    check_reference(reference)


def test_a_reference_says_these_things():
    assert PATH.reference() == text()
    assert json.loads(PATH.reference())["metadata"] == {"matrix": GRID}


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (text(reasoning_gym="countdown"), "no data set 'countdown' of reasoning-gym; expected shortest_path or graph_"),
        (
            text(reasoning_gym=["shortest_path"]),
            "a puzzle of reasoning-gym: reasoning_gym: expected a text, found .'shortest_path'.",
        ),
        (text(reasoning_gym="a\nb"), r"no data set 'a\\nb' of reasoning-gym"),
        (text(answer=None), "a puzzle of reasoning-gym: answer: expected a text, found nothing"),
        (text(metadata=None), "a puzzle of reasoning-gym: metadata: expected an object, found nothing"),
        (
            text(question="Where?"),
            r"a puzzle of reasoning-gym: expected answer and metadata, found also \['question'\]",
        ),
        (text()[:-1], "a puzzle of reasoning-gym: not valid JSON: Expecting"),
        (text()[:-1] + ', "answer": "down"}', "a puzzle of reasoning-gym: not valid JSON: .*answer"),
        ('{"reasoning_gym"', "a puzzle of reasoning-gym: not valid JSON: Expecting"),
        ("[1]", "a puzzle of reasoning-gym: expected an object, found"),
        ('{"reasoning_gym": ' + "[" * 100_000, "a puzzle of reasoning-gym: not valid JSON: nested too deeply"),
    ],
    ids=lambda value: value[:40],
)
def test_what_is_no_puzzle_is_an_error_of_one_line(reference, message):
    for function in (read, check_reference):
        if function is read or is_puzzle(reference):
            with pytest.raises(DvpError, match=message) as caught:
                function(reference)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("puzzle", "message"),
    [
        (PATH._replace(answer=""), "answer '' does not solve it"),
        (PATH._replace(answer="right down"), "answer 'right down' does not solve it"),
        (PATH._replace(answer="down right right"), "answer 'down right right' does not solve it"),
        (PATH._replace(answer="right left right right down"), "does not solve it"),
        (PATH._replace(answer="infeasible"), "does not solve it"),
        (CLOSED._replace(answer="right right"), "does not solve it"),
        (COLORS._replace(answer='{"0": 1, "1": 1, "2": 3}'), "does not solve it"),
        (COLORS._replace(answer="1"), "answer '1' does not solve it"),
        (COLORS._replace(answer="right " * 20), f"answer '{'right ' * 10}' does not solve it"),
        (PATH._replace(answer=5), "answer"),
        (COLORS._replace(answer={"0": 1, "1": 2, "2": 3}), "answer"),
        (PATH._replace(metadata={}), "puzzle"),
        (PATH._replace(metadata={"matrix": 5}), "puzzle"),
        (PATH._replace(answer="infeasible", metadata={"matrix": [["*", "O", "O"]]}), "one \\* and one #"),
        (PATH._replace(answer="right", metadata={"matrix": [["*", "#"], ["O"]]}), "a grid of"),
        (PATH._replace(answer="right", metadata={"matrix": [["*", "#", ["O"]]]}), "a grid of"),
        (PATH._replace(metadata={"matrix": [list("OO#")]}), "puzzle"),
        (PATH._replace(metadata=[GRID]), "puzzle"),
        (COLORS._replace(metadata={}), "puzzle"),
        (COLORS._replace(metadata={"puzzle": LINE | {"edges": [[0, 9]]}}), "puzzle"),
    ],
)
def test_a_puzzle_that_its_own_answer_does_not_solve_is_an_error_of_one_line(puzzle, message):
    with pytest.raises(DvpError, match=message) as caught:
        check_reference(puzzle.reference())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("puzzle", "answer"),
    [
        (PATH, "right right down"),
        (PATH, "right down right"),
        (PATH, " right  down right "),
        (CLOSED, "infeasible"),
        (COLORS, COLORS.answer),
        (COLORS, '{"0": 1, "1": 2, "2": 1}'),
        (COLORS, '{"2":3,"1":1,"0":2}'),
    ],
)
def test_any_solution_is_right(puzzle, answer):
    for response in (f"Answer: {answer}", f"0 0 to 1 2.\nAnswer: {answer}.\n", rf"So \boxed{{{answer}}}"):
        assert grade(response, puzzle.reference())
    # Of a response that was cut off, only if the statement is closed.
    assert grade(f"Answer: {answer}\n", puzzle.reference(), truncated=True)
    assert not grade(f"Answer: {answer}", puzzle.reference(), truncated=True)


@pytest.mark.parametrize(
    ("puzzle", "answer"),
    [
        (PATH, "right left right right down"),
        (PATH, "down right right"),
        (PATH, "up right right down down"),
        (PATH, "right right"),
        (PATH, "right right down down"),
        (PATH, "right right forward"),
        (PATH, "infeasible"),
        (PATH, "1 2"),
        (CLOSED, "right right"),
        (COLORS, '{"0": 1, "1": 2}'),
        (COLORS, '{"0": 1, "1": 2, "2": 2}'),
        (COLORS, '{"0": 1, "1": 2, "2": 4}'),
        (COLORS, '{"0": 1, "1": 2, "2": "3"}'),
        (COLORS, '{"0": 1, "1": 2, "2": null}'),
        (COLORS, "{0: 1, 1: 2, 2: 3}"),
        (COLORS, "1 2 3"),
        (COLORS, "{}"),
    ],
)
def test_what_does_not_solve_it_is_wrong(puzzle, answer):
    assert not grade(f"Answer: {answer}", puzzle.reference())
    assert not grade(rf"\boxed{{{answer}}}", puzzle.reference())


@PUZZLES
def test_a_solution_that_is_not_stated_is_wrong(puzzle):
    assert not grade("", puzzle.reference())
    assert not grade(puzzle.answer, puzzle.reference())
    assert not grade(f"Answer: {puzzle.answer}\nNo. Answer: left", puzzle.reference())


@PUZZLES
@pytest.mark.parametrize(
    "answer",
    [
        PATH.reference(),
        CLOSED.reference(),
        COLORS.reference(),
        "[" * 20_000,
        "[" * 150 + "]" * 150,
        '{"0": ' * 10_000 + "1" + "}" * 10_000,
        "9" * 100_000,
        "-1e999",
        "NaN",
        "null",
        '"012"',
        '{"0": NaN, "1": 2, "2": 3}',
        '{"0": Infinity, "1": 2, "2": 3}',
        '{"0": [1], "1": {}, "2": 3}',
        '{"0": ' + "9" * 5_000 + ', "1": 2, "2": 3}',
        '{"0": 1, "1": 2, "2": "\\ud800"}',
        "right " * 20_000,
        "\0 ￿ ∞ 1",
        "__import__('os').abort()",
    ],
    ids=lambda answer: answer[:20],
)
def test_hostile_answers_are_simply_wrong(puzzle, answer):
    for response in (f"Answer: {answer}", rf"\boxed{{{answer}}}", answer):
        for truncated in (False, True):
            assert not grade(response, puzzle.reference(), truncated=truncated)


def test_mathematical_references_are_what_they_were():
    assert not is_puzzle("70")
    check_reference("70")
    assert grade("Answer: 70", "70")
    assert grade("Answer: 1,234.", "1234")
    assert not grade("Answer: 71", "70")
    assert not grade(f"Answer: {COLORS.reference()}", "70")
    assert not grade(f"Answer: {COLORS.answer}", "70")
    with pytest.raises(DvpError, match="the answer"):
        check_reference("shortest_path" * 50)


def test_the_same_solution_in_another_layout_is_one():
    assert PATH.solution(" right  down right") == PATH.solution("right down right") != PATH.solution("right right down")
    same = (
        '{"0": 1, "1": 2, "2": 1}',
        '{"2":1,"1":2,"0":1}',
        '{"0": 1, "1": 2, "2": 1.0, "7": 3}',
        '{"0": true, "1": 2, "2": 1}',
    )
    assert all(grade(f"Answer: {answer}", COLORS.reference()) for answer in same)
    assert {COLORS.solution(answer) for answer in same} == {"1 2 1"}
    assert COLORS.solution('{"0": 3, "1": 2, "2": 1}') == "3 2 1"


def test_puzzles_are_told_from_mathematics_however_they_are_laid_out():
    for reference in (PATH.reference(), "  " + PATH.reference(), PATH.reference().replace("{", "{ ", 1)):
        assert is_puzzle(reference)
        check_reference(reference)
        assert grade("Answer: right right down", reference)
    for reference in ("5", "{1, 2}", '{"answer": "reasoning_gym"}', r"\frac{1}{2}"):
        assert not is_puzzle(reference)
