"""benchmarks/step.py: what its table says of a target, and the padding that it recorded."""

import json

import pytest
import torch

from benchmarks.step import ONE_PASS, TARGETS, format_table
from dvp.core.batch import Batch
from dvp.experiment.loading import load_experiment


@pytest.mark.parametrize(
    ("name", "value", "met"),
    [
        ("update", 1.0, True),
        ("update", 0.99, False),
        ("rollout", 0.9, True),
        ("step", 1.05, True),
        ("step", 1.06, False),
        ("padding", 0.058, False),
    ],
)
def test_the_table_says_beside_each_ratio_whether_its_median_is_what_it_should_be(name, value, met):
    def ratio(median: float) -> dict:
        return {"median": median, "values": [median - 0.01, median, 3.0]}

    result = {
        "experiment": "tiny",
        "responses": 8,
        "threads": 1,
        "rounds": 3,
        "ratios": {
            other: target.of(ratio(value if other == name else target.bound)) for other, target in TARGETS.items()
        },
        "one_pass": {case: ratio(1.2) for case in ONE_PASS},
        "forward": ratio(0.33),
        "useful": {"advantage": 0.5, "mis": 0.25},
    }
    [line] = [line for line in format_table(result).splitlines() if line.startswith(TARGETS[name].title)]
    rest = line.removeprefix(TARGETS[name].title).split()
    assert rest == [
        f"{value:.3f}",
        f"({value - 0.01:.3f}–3.000)",
        TARGETS[name].sign,
        f"{TARGETS[name].bound:g}",
        "yes" if met else "no",
    ]


def test_tiny_pads_several_percent_as_a_pass_holds_a_fifth_of_the_responses(root):
    """The lengths of a real step; with a quarter of the tokens a pass, its rows are more alike."""
    recorded = json.loads((root / "results/reference/bench/step.json").read_text())["last_round"]
    tokens = load_experiment("tiny", root / "config").training.tokens_per_micro_batch
    lengths_B = torch.tensor(recorded["lengths"])
    positions_T = torch.arange(int(lengths_B.max()))
    batch = Batch(torch.zeros(len(lengths_B), len(positions_T), dtype=torch.int64), positions_T < lengths_B[:, None])

    def padding(tokens: int) -> float:
        computed = sum(len(rows) * int(lengths_B[rows].max()) for rows in batch.micro_batches(tokens))
        return 1 - lengths_B.sum().item() / computed

    assert padding(tokens) == pytest.approx(recorded["padding"])
    assert padding(tokens // 4) < 0.03 < padding(tokens) < 0.08
