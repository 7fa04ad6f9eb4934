"""Colour small graphs, from reasoning-gym, so that connected vertices differ. Every puzzle has several solutions.

    Vertices: [0, 1, 2, 3]
    Edges: [(0, 2), (1, 2), (2, 3)]
    Possible colors: [1, 2, 3]

    0 = 3.
    1 = 3.
    2 not 3 3 = 1.
    3 not 1 = 2.
    Answer: {"0": 3, "1": 3, "2": 1, "3": 2}

The problem is the graph alone, without reasoning-gym's instructions, which are the same for all.
"""

import json
import random
from collections.abc import Iterator, Sequence

from dvp.data.puzzles import Puzzle, generated, read
from dvp.data.stories import Story

EDGE = 0.4
"""Probability that two vertices are connected."""
COLORS = 3


def generate(count: int, seed: int, steps: Sequence[int] = (5, 6)) -> Iterator[Story]:
    """Yield `count` puzzles of steps[0] to steps[1] vertices.

    Their solutions colour one vertex after the other, with any colour that its neighbours leave.
    """
    sizes = dict(zip(("min_num_vertices", "max_num_vertices"), steps, strict=True))
    return generated("graph_color", count, seed, _story, num_colors=COLORS, edge_probability=EDGE, **sizes)


def _story(entry: dict, rng: random.Random) -> Story:
    graph = entry["metadata"]["puzzle"]
    puzzle = Puzzle("graph_color", json.dumps(entry["metadata"]["possible_answer"]), {"puzzle": graph})
    problem = f"Vertices: {graph['vertices']}\nEdges: {graph['edges']}\nPossible colors: {graph['color_options']}"
    return Story(problem, _solution(graph, rng), puzzle.reference())


def careless(puzzle: Story, error_rate: float, rng: random.Random) -> str:
    """Write another solution, with "is" for "=" and, with probability `error_rate`, a neighbour's colour for a vertex.

    A vertex without a coloured neighbour cannot be wrong; one whose neighbours leave no colour always is. Later lines
    build on what was written.
    """
    return _written(_attempt(read(puzzle.answer).metadata["puzzle"], error_rate, rng), "is")


def _solution(graph: dict, rng: random.Random) -> str:
    while True:
        steps = _attempt(graph, 0.0, rng)
        if all(color not in taken for _, taken, color in steps):  # otherwise a vertex had no colour left: try again
            return _written(steps, "=")


def _attempt(graph: dict, error_rate: float, rng: random.Random) -> list[tuple[int, list[int], int]]:
    """Return each vertex, the colours of its neighbours before it, and its own, drawn one after the other."""
    colors: dict[int, int] = {}
    steps = []
    for vertex in graph["vertices"]:
        neighbours = [
            second if first == vertex else first for first, second in graph["edges"] if vertex in (first, second)
        ]
        taken = [colors[other] for other in neighbours if other in colors]
        free = [color for color in graph["color_options"] if color not in taken]
        wrong = bool(taken) and (rng.random() < error_rate or not free)
        colors[vertex] = rng.choice(taken if wrong else free)
        steps.append((vertex, taken, colors[vertex]))
    return steps


def _written(steps: list[tuple[int, list[int], int]], sign: str) -> str:
    lines = [
        " ".join(map(str, [vertex, *(["not", *taken] if taken else []), sign, f"{color}."]))
        for vertex, taken, color in steps
    ]
    return "\n".join([*lines, f"Answer: {json.dumps({vertex: color for vertex, _, color in steps})}"])
