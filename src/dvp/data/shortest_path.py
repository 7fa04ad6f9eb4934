"""Find shortest paths through a small grid, from reasoning-gym: from * to # on open cells. Many puzzles have several.

    O O O *
    X O O O
    O X O O
    O O # O

    0 3 to 3 2.
    0 3 left = 0 2.
    0 2 down = 1 2.
    1 2 down = 2 2.
    2 2 down = 3 2.
    Answer: left down down down

The problem is the grid alone, without reasoning-gym's instructions, which are the same for all. If no path leads to #,
the answer is `infeasible`.
"""

import math
import random
import re
from collections.abc import Iterator, Sequence

from dvp.data.puzzles import Puzzle, generated
from dvp.data.stories import Story

BLOCKED = 0.2
"""Probability that a cell is blocked."""
MOVES = {"right": (0, 1), "down": (1, 0), "left": (0, -1), "up": (-1, 0)}

Cell = tuple[int, int]
_MOVE = re.compile(r"(\d+ \d+) (\w+) = (\d+ \d+)\.")


def generate(count: int, seed: int, steps: Sequence[int] = (4, 5)) -> Iterator[Story]:
    """Yield `count` puzzles on grids of steps[0] to steps[1] rows and columns; any shortest path is a solution."""
    fewest, most = steps
    sizes = {"min_rows": fewest, "max_rows": most, "min_cols": fewest, "max_cols": most}
    return generated("shortest_path", count, seed, _story, p_blocked=BLOCKED, **sizes)


def _story(entry: dict, rng: random.Random) -> Story:
    grid = entry["metadata"]["matrix"]
    puzzle = Puzzle("shortest_path", entry["answer"], {"matrix": grid})
    return Story("\n".join(" ".join(row) for row in grid), _solution(grid, rng), puzzle.reference())


def careless(puzzle: Story, error_rate: float, rng: random.Random) -> str:
    """Write the worked solution with "is" for "=" and each direction wrong with probability `error_rate`.

    Later lines go on as though the direction had been right; the answer repeats the directions of the lines above it.
    """
    names = []

    def written(move: re.Match[str]) -> str:
        name = move[2]
        if rng.random() < error_rate:
            name = rng.choice([other for other in MOVES if other != name])
        names.append(name)
        return f"{move[1]} {name} is {move[3]}."

    *lines, answer = _MOVE.sub(written, puzzle.solution).splitlines()
    return "\n".join([*lines, f"Answer: {' '.join(names)}" if names else answer])


def _solution(grid: list[list[str]], rng: random.Random) -> str:
    import networkx

    marks = {(row, column): mark for row, line in enumerate(grid) for column, mark in enumerate(line)}
    cells = networkx.grid_2d_graph(len(grid), len(grid[0]))
    cells.remove_nodes_from([cell for cell, mark in marks.items() if mark == "X"])
    cell, goal = (next(place for place, mark in marks.items() if mark == wanted) for wanted in "*#")
    moves = networkx.single_source_shortest_path_length(cells, goal)
    ways: dict[Cell, int] = {}
    for near in moves:  # the nearest first
        ways[near] = sum(ways[nearer] for nearer in cells[near] if moves[nearer] < moves[near]) or 1
    lines, names = [f"{_text(cell)} to {_text(goal)}."], []
    while cell != goal and cell in moves:
        after = {name: (cell[0] + down, cell[1] + right) for name, (down, right) in MOVES.items()}
        nearer = {name: place for name, place in after.items() if moves.get(place, math.inf) < moves[cell]}
        (name,) = rng.choices(list(nearer), weights=[ways[place] for place in nearer.values()])
        lines.append(f"{_text(cell)} {name} = {_text(nearer[name])}.")
        names.append(name)
        cell = nearer[name]
    return "\n".join([*lines, f"Answer: {' '.join(names) or 'infeasible'}"])


def _text(cell: Cell) -> str:
    return f"{cell[0]} {cell[1]}"
