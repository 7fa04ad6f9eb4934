"""Colourings of graphs, checked by plain loops."""

import ast
import json
import random
from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest

from dvp.data.graph_color import _solution, careless, generate
from dvp.data.puzzles import read
from dvp.data.stories import Story
from dvp.data.verifier import check_reference, grade

PUZZLES = list(generate(300, seed=7, steps=(4, 6)))
# Three lines meet in the last vertex, to which the first ones can leave no colour.
STAR = {"vertices": [0, 1, 2, 3], "edges": [(0, 3), (1, 3), (2, 3)], "color_options": [1, 2, 3]}


def drawn(puzzle: Story) -> SimpleNamespace:
    vertices, edges, colors = (line.split(": ", 1) for line in puzzle.problem.splitlines())
    assert (vertices[0], edges[0], colors[0]) == ("Vertices", "Edges", "Possible colors")
    return SimpleNamespace(
        vertices=ast.literal_eval(vertices[1]),
        edges=ast.literal_eval(edges[1]),
        colors=ast.literal_eval(colors[1]),
    )


def proper(edges, colors: dict[int, int]) -> bool:
    return all(colors[first] != colors[second] for first, second in edges)


def parted(solution: str, sign: str) -> tuple[list[tuple[int, list[int], int]], dict[int, int]]:
    """Each line's vertex, what it says of its neighbours' colours, and its colour; the answer."""
    *lines, last = solution.splitlines()
    steps = []
    for line in lines:
        left, color = line.removesuffix(".").split(f" {sign} ")
        vertex, *taken = left.split(" ")
        assert not taken or (taken.pop(0) == "not" and taken)
        steps.append((int(vertex), [int(other) for other in taken], int(color)))
    answer = json.loads(last.removeprefix("Answer: "))
    return steps, {int(vertex): color for vertex, color in answer.items()}


def assert_honest(puzzle: Story, solution: str, sign: str) -> list[tuple[int, list[int], int]]:
    """Each vertex has its line, each line says which colours the neighbours have so far, and the answer says it all."""
    graph = drawn(puzzle)
    steps, answer = parted(solution, sign)
    assert [vertex for vertex, _, _ in steps] == graph.vertices
    colors: dict[int, int] = {}
    for vertex, taken, color in steps:
        neighbours = []
        for first, second in graph.edges:
            if second == vertex and first in colors:
                neighbours.append(colors[first])
            if first == vertex and second in colors:
                neighbours.append(colors[second])
        assert sorted(taken) == sorted(neighbours)
        assert color in graph.colors
        colors[vertex] = color
    assert answer == colors
    assert grade(solution, puzzle.answer) == proper(graph.edges, colors)
    return steps


def test_worked_solutions_are_colourings_and_graded_right():
    for puzzle in PUZZLES:
        for _, taken, color in assert_honest(puzzle, puzzle.solution, "="):
            assert color not in taken
        assert proper(drawn(puzzle).edges, parted(puzzle.solution, "=")[1])
        assert grade(puzzle.solution, puzzle.answer)


def test_references_are_good_and_about_the_graph_of_the_problem():
    for puzzle in PUZZLES:
        check_reference(puzzle.answer)
        graph, given = drawn(puzzle), read(puzzle.answer).metadata["puzzle"]
        assert given["vertices"] == graph.vertices
        assert [tuple(edge) for edge in given["edges"]] == graph.edges
        assert given["color_options"] == graph.colors == [1, 2, 3]


def test_steps_are_the_fewest_and_most_vertices():
    assert {len(drawn(puzzle).vertices) for puzzle in PUZZLES} == {4, 5, 6}
    assert {len(drawn(puzzle).vertices) for puzzle in generate(40, seed=7, steps=(2, 3))} == {2, 3}
    pairs = sum(len(drawn(puzzle).vertices) * (len(drawn(puzzle).vertices) - 1) // 2 for puzzle in PUZZLES)
    # Those with no colouring are left out, which have more edges than others.
    assert sum(len(drawn(puzzle).edges) for puzzle in PUZZLES) / pairs == pytest.approx(0.38, abs=0.04)


def test_the_solutions_of_a_graph_are_all_that_there_are():
    colourings = {colors for colors in product([1, 2, 3], repeat=4) if proper(STAR["edges"], dict(enumerate(colors)))}
    assert len(colourings) == 24
    rng = random.Random(0)
    counts = Counter(tuple(parted(_solution(STAR, rng), "=")[1].values()) for _ in range(600))
    assert set(counts) == colourings
    assert max(counts.values()) < 100


def test_a_seed_gives_the_same_ones_and_a_larger_count_extends_them():
    assert list(generate(20, seed=7, steps=(4, 6))) == PUZZLES[:20]
    # With four vertices there are 64 graphs: two lists share some, but not in order.
    for seed in (6, 8):
        others = list(generate(100, seed=seed, steps=(4, 6)))
        for shift in (-1, 0, 1):
            pairs = zip(others[1:-1], PUZZLES[1 + shift :], strict=False)
            assert sum(one.problem == other.problem for one, other in pairs) < 10


def test_careless_solutions_are_wrong_with_a_colour_that_a_neighbour_has():
    rng = random.Random(0)
    slips = chances = wrong = 0
    for puzzle in PUZZLES:
        text = careless(puzzle, 0.35, rng)
        assert "=" not in text
        for _, taken, color in assert_honest(puzzle, text, "is"):
            if taken and len(set(taken)) < 3:
                chances += 1
                slips += color in taken
        wrong += not grade(text, puzzle.answer)
    assert slips / chances == pytest.approx(0.35, abs=0.05)  # more than three standard errors
    assert 100 < wrong < 290


def test_error_rates_zero_and_one():
    rng = random.Random(0)
    for puzzle in PUZZLES:
        for _, taken, color in assert_honest(puzzle, careless(puzzle, 0.0, rng), "is"):
            assert color not in taken or set(taken) == {1, 2, 3}  # the first ones left it no other
        for _, taken, color in assert_honest(puzzle, careless(puzzle, 1.0, rng), "is"):
            assert not taken or color in taken
