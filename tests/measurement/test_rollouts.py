"""Responses that other trainers have dumped."""

import json
from math import log

import numpy as np
import pandas as pd
import pytest

from dvp.cli import main
from dvp.errors import DvpError
from dvp.measurement.rollouts import read_rollouts

VERL = ("rollout_log_probs", "old_log_probs", "responses", "response_mask", "uid")
TRL = ("sampling_per_token_logps", "old_per_token_logps", "completion_ids", "completion_mask", "prompt")
PRIME_RL = ("inference_logprobs", "trainer_logprobs", "input_ids", "loss_mask", "problem")
RESPONSES = (([-1.0, -0.5, 0.0], [-1.1, -0.4, 0.0], [7, 8, 0], [1, 1, 0], "a"), ([-2.0], [-2.0], [9], [1], "b"))


def write(file, rows) -> None:
    if file.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("names", [VERL, TRL, PRIME_RL])
def test_the_columns_of_other_trainers_are_read(tmp_path, names, suffix):
    file = tmp_path / f"dump.{suffix}"
    write(file, [dict(zip(names, one, strict=True)) | {"reward": 1.0} for one in RESPONSES])
    tokens = read_rollouts(file)
    expected = {
        "response": [0, 0, 1],
        "position": [0, 1, 0],
        "token": [7, 8, 9],
        "log_q": [-1.0, -0.5, -2.0],
        "log_p": [-1.1, -0.4, -2.0],
        "problem": ["a", "a", "b"],
    }
    assert {name: tokens[name].tolist() for name in expected} == expected


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_ids_that_are_equal_as_numbers_stay_different(tmp_path, suffix):
    file, ids = tmp_path / f"dump.{suffix}", ["01", "1", "1.0"]
    write(file, [{"uid": name, "rollout_log_probs": [-1.0], "old_log_probs": [-1.1]} for name in ids])
    assert read_rollouts(file)["problem"].tolist() == ids


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"rollout_log_probs": [-1.0]},
            "expected one of trainer_logprobs, old_log_probs, old_per_token_logps; found r",
        ),
        (
            {"rollout_log_probs": [-1.0], "inference_logprobs": [-1.0], "old_log_probs": [-1.0]},
            "found rollout_log_probs, inference_logprobs",
        ),
        (
            {"rollout_log_probs": [-1.0, -2.0], "old_log_probs": [-1.0]},
            "row 1: old_log_probs: expected a list of numbers",
        ),
        ({"rollout_log_probs": [-1.0], "old_log_probs": ["x"]}, "row 1: old_log_probs: expected a list of numbers"),
        ({"rollout_log_probs": [0.5], "old_log_probs": [-1.0]}, "row 1: rollout_log_probs: expected log-probs"),
        ({"rollout_log_probs": [None], "old_log_probs": [-1.0]}, "row 1: rollout_log_probs: expected log-probs"),
        ({"rollout_log_probs": [-1.0], "old_log_probs": [-1.0], "response_mask": [0]}, "no token counts by response_m"),
    ],
)
def test_what_is_no_dump_is_refused_in_one_line(tmp_path, row, says):
    file = tmp_path / "dump.jsonl"
    write(file, [row])
    with pytest.raises(DvpError) as refused:
        read_rollouts(file)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("name", "text"), [("x.csv", "a"), ("x.jsonl", ""), ("x.jsonl", "{"), ("x.parquet", "no")])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(
        DvpError, match=r"x\.(csv: expected a file|jsonl: (no rows|expected one of|cannot)|parquet: can)"
    ):
        read_rollouts(tmp_path / name)


def test_a_dump_becomes_the_page(tmp_path, monkeypatch, capsys, root):
    """Half of the tokens twice as likely for the trainer: k3 is the mean of 2 − log 2 − 1 and 0."""
    monkeypatch.chdir(root)
    rows = [
        {"engine_logprobs": [-1.0] * 40, "trainer_logprobs": list(np.where(np.arange(40) % 2, -1.0, -1.0 + log(2)))}
        for _ in range(20)
    ]
    write(tmp_path / "dump.jsonl", rows)
    assert main(["diagnose-rollouts", str(tmp_path / "dump.jsonl"), "--output", str(tmp_path / "out")]) == 0
    assert f"{(1 - log(2)) / 2:.2g}" in capsys.readouterr().out
    page = (tmp_path / "out/mismatch.html").read_text()
    assert "KL by position" in page
    assert "800" in page
