"""Puzzles with several solutions through the whole DAG, for real, on smoke_diversity."""

import json

import pandas as pd
import pytest
from working_copy import Copy

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1500)]
NAME = "smoke_diversity"


@pytest.fixture(scope="module")
def copy(tmp_path_factory, root) -> Copy:
    copy = Copy(tmp_path_factory.mktemp("puzzles"), root, "--config", f"experiment={NAME}")
    done = copy.snakemake()
    assert done.returncode == 0, done.stdout[-3000:]
    return copy


@pytest.fixture(scope="module")
def folder(copy):
    return copy.results / NAME


def solves(answer: object, graph: dict) -> bool:
    """Whether a text is a map of all vertices to colours of which no two that are connected share one."""
    try:
        colors = json.loads(answer)
    except (TypeError, ValueError):  # none is stated
        return False
    return (
        isinstance(colors, dict)
        and {str(vertex) for vertex in graph["vertices"]} <= colors.keys()
        and all(colors[str(vertex)] in graph["color_options"] for vertex in graph["vertices"])
        and all(colors[str(first)] != colors[str(second)] for first, second in graph["edges"])
    )


def test_samples_are_right_if_they_colour_the_graph(folder):
    samples = pd.concat(pd.read_parquet(file) for file in folder.glob("evals/**/samples.parquet"))
    assert 0 < samples["correct"].mean() < 1
    puzzles = samples["reference"].map(json.loads)
    for answer, puzzle, correct in zip(samples["stated_answer"], puzzles, samples["correct"], strict=True):
        assert correct == solves(answer, puzzle["metadata"]["puzzle"]), answer
    # Not only the solution that reasoning-gym has itself.
    assert (samples["correct"] & (samples["stated_answer"] != puzzles.map(lambda puzzle: puzzle["answer"]))).any()


def test_training_is_rewarded_by_the_verifier(folder):
    files = list(folder.glob("runs/*/*/*/seed~0/metrics.jsonl"))
    assert len(files) == 2
    rewards = [json.loads(line)["reward"] for file in files for line in file.read_text().splitlines()]
    assert len(rewards) == 6
    assert max(rewards) > 0


def test_the_table_counts_different_solutions(folder):
    table = pd.read_csv(folder / "tables/diversity_table.csv").set_index("point")
    samples = pd.read_parquet(folder / "evals/base/held_out/samples.parquet")
    right = samples[samples["correct"]]
    different = right.groupby("problem_id")["stated_answer"].nunique().sum() / samples["problem_id"].nunique()
    assert table.loc["base", "solutions"] == pytest.approx(different)
    assert (folder / "figures/solutions.png").read_bytes().startswith(b"\x89PNG")
