"""Responses that other trainers have dumped: their columns, what is left out, and what is refused."""

import json
from math import log, nan
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from dvp.cli import main
from dvp.errors import DvpError
from dvp.measurement.rollouts import read_rollouts

OURS = ("engine_logprobs", "trainer_logprobs")
PROMPT = [3, 4]
# Two responses, of three tokens and of two with one of padding; the second token of the first is a tool's.
RESPONSES = {
    "ids": ([7, 8, 9], [5, 6, 0]),
    "log_q": ([-1.0, 0.0, -0.5], [-2.0, -0.25, 0.0]),
    "log_p": ([-1.1, -8.0, -0.4], [-2.0, -0.3, 0.0]),
    "mask": ([1, 0, 1], [1, 1, 0]),
}


def verl(ids, log_q, log_p, mask):
    """A row of the batch that verl 0.9.1 trains on (verl/experimental/agent_loop, trainer/ppo/v1/trainer_base.py)."""
    return {
        "uid": "u0",
        "prompts": PROMPT,
        "responses": ids,
        "input_ids": PROMPT + ids,
        "attention_mask": [1] * 5,
        "position_ids": list(range(5)),
        "response_mask": mask,
        "loss_mask": [0, 0, *mask],
        "rollout_log_probs": log_q,
        "old_log_probs": log_p,
        "ref_log_prob": [-9.0] * 3,
        "entropy": [0.1] * 3,
        "rm_scores": [0.0, 0.0, 1.0],
        "advantages": [0.5] * 3,
        "returns": [0.5] * 3,
        "problem": "1 + 1",
    }


def trl(ids, log_q, log_p, mask):
    """A row of the batch that TRL 1.16 trains on (GRPOTrainer._generate_and_score_completions), with its input."""
    padding = [int(one != 0) for one in ids]
    return {
        "prompt": [{"role": "user", "content": "1 + 1"}],
        "answer": "2",
        "prompt_ids": PROMPT,
        "prompt_mask": [1, 1],
        "completion_ids": ids,
        "completion_mask": padding,
        "tool_mask": [1 if pad == 0 else one for one, pad in zip(mask, padding, strict=True)],
        "sampling_per_token_logps": log_q,
        "old_per_token_logps": log_p,
        "ref_per_token_logps": [-9.0] * 3,
        "importance_sampling_ratio": [1.0],
        "advantages": 0.5,
        "num_items_in_batch": 4,
    }


def prime_rl(ids, log_q, log_p, mask):
    """A line of token_exports/step_N/rank_N.jsonl (prime_rl/trainer/rl/token_export.py, schema_version 1)."""
    streams = ("rl_weights", "ce_weights", "ref_kl_weights", "is_masked", "is_masked_high", "is_masked_low")
    return {
        "schema_version": 1,
        "step": 5,
        "rank": 0,
        "micro_step": 0,
        "micro_sequence_idx": 0,
        "export_sequence_idx": 0,
        "env_name": "math",
        "token_ids": PROMPT + ids,
        "position_ids": list(range(5)),
        "loss_mask": [False, False, *map(bool, mask)],
        "advantages": [0.5] * 5,
        "inference_logprobs": [0.0, 0.0, *log_q],
        "trainer_logprobs": [-10.8, -3.0, *log_p],
        "entropy": [0.1] * 5,
        **dict.fromkeys(("mismatch_kl", "log_importance_ratio", "importance_ratio", "prob_delta"), [0.0] * 5),
        **dict.fromkeys(streams, [None] * 5),
    }


def write(file, rows) -> None:
    if file.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("row", [verl, trl, prime_rl])
def test_whole_rows_of_other_trainers_are_read(tmp_path, row, suffix):
    """One framework's columns count, and the product of its masks."""
    file = tmp_path / f"dump.{suffix}"
    write(file, [row(*one) for one in zip(*RESPONSES.values(), strict=True)])
    [read] = read_rollouts(file)
    expected = {
        "response": [0, 0, 1, 1],
        "position": [0, 1, 0, 1],
        "token": [7, 9, 5, 6],
        "log_q": [-1.0, -0.5, -2.0, -0.25],
        "log_p": [-1.1, -0.4, -2.0, -0.3],
    }
    assert {name: read.tokens[name].tolist() for name in expected} == expected
    assert read.left_out == ""
    assert read.name == ("step 5" if row is prime_rl else "")
    assert ("problem" in read.tokens) == (row is not prime_rl)


def test_columns_of_another_trainer_serve_where_its_own_are_missing(tmp_path):
    row = {"rollout_log_probs": [-1.0, -2.0], "old_log_probs": [-1.1, -2.0], "completion_mask": [1, 0], "problem": "a"}
    write(tmp_path / "dump.jsonl", [row])
    [read] = read_rollouts(tmp_path / "dump.jsonl")
    assert read.tokens[["log_q", "token", "problem"]].to_numpy().tolist() == [[-1.0, -1, "a"]]


def test_first_and_last_step_of_each_mode_stand_alone(tmp_path):
    """Of a step that a restart repeats, the last time counts."""
    steps = [("train", 0), ("train", 1), ("eval", 1), ("train", 2), ("train", 1), ("train", 1), ("train", 2)]
    rows = [
        {"mode": mode, "step": step, OURS[0]: [-1.0 - number], OURS[1]: [-1.0]}
        for number, (mode, step) in enumerate(steps)
    ]
    write(tmp_path / "dump.jsonl", rows)
    read = {one.name: one.tokens["response"].tolist() for one in read_rollouts(tmp_path / "dump.jsonl")}
    assert read == {"train, step 0": [0], "train, step 2": [6], "eval, step 1": [2]}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_ids_that_are_equal_as_numbers_stay_different(tmp_path, suffix):
    file, ids = tmp_path / f"dump.{suffix}", ["01", "1", "1.0"]
    write(file, [{"uid": name, "rollout_log_probs": [-1.0], "old_log_probs": [-1.1]} for name in ids])
    assert read_rollouts(file)[0].tokens["problem"].tolist() == ids


@pytest.mark.parametrize(
    ("bad", "shown"),
    [(None, "nan"), (nan, "nan"), (-np.inf, "-inf"), (-9999.0, "-9999"), (-50.0, "-50"), (5e-4, "0.0005")],
)
def test_few_tokens_without_a_log_prob_are_left_out(tmp_path, bad, shown):
    log_q, log_p = [-1.0] * 20, [-1.1] * 20
    write(tmp_path / "dump.jsonl", [dict(zip(OURS, (log_q, log_p), strict=True))] * 2)
    [whole] = read_rollouts(tmp_path / "dump.jsonl")
    for place, column in ((3, 0), (7, 1)):
        row = [list(log_q), list(log_p)]
        row[column][place] = bad
        write(tmp_path / "dump.jsonl", [dict(zip(OURS, both, strict=True)) for both in ((log_q, log_p), row)])
        [read] = read_rollouts(tmp_path / "dump.jsonl")
        assert len(read.tokens) == len(whole.tokens) - 1
        assert read.left_out.startswith("1 of 40 tokens have no usable log-prob")
        assert f"row 2, token {place + 1}: {OURS[column]} {shown}" in read.left_out


@pytest.mark.parametrize(
    ("steps", "wrong"), [([1, 2, 1, 2, 3, 1], 1), ([1, 2, 1, 3, 2, 3], 1), ([0, 1, 2, 1, 2, 0], 0)]
)
def test_steps_that_are_interleaved_are_refused(tmp_path, steps, wrong):
    write(tmp_path / "dump.jsonl", [{"step": step, OURS[0]: [-1.0], OURS[1]: [-1.0]} for step in steps])
    line = f"dump\\.jsonl: rows of step {wrong} are not together; sort the file by step$"
    with pytest.raises(DvpError, match=line):
        read_rollouts(tmp_path / "dump.jsonl")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_long_prompts_that_differ_in_the_middle_differ(tmp_path, suffix):
    """numpy's text of an array of more than a thousand numbers leaves out the middle."""
    file, prompts = tmp_path / f"dump.{suffix}", [[7] * 2000, [7] * 1000 + [8] + [7] * 999]
    rows = [{"prompt_ids": ids, "rollout_log_probs": [-1.0], "old_log_probs": [-1.1]} for ids in prompts]
    write(file, rows)
    assert read_rollouts(file)[0].tokens["problem"].nunique() == 2


REFUSED = [
    ({"rollout_log_probs": [-1.0]}, "expected the columns of one trainer: engine_logprobs and trainer_logprobs; ro"),
    (
        {"rollout_log_probs": [-1.0], "inference_logprobs": [-1.0], "old_log_probs": [-1.0]},
        "found rollout_log_probs, inference_logprobs, old_log_probs",
    ),
    ({"rollout_log_probs": [-1.0, -2.0], "old_log_probs": [-1.0]}, "old_log_probs: expected a list as long as rollout"),
    ({"rollout_log_probs": [-1.0], "old_log_probs": ["x"]}, "row 1: old_log_probs: expected a list of numbers"),
    ({"rollout_log_probs": [-1.0], "old_log_probs": -1.0}, "row 1: old_log_probs: expected a list of numbers"),
    ({"rollout_log_probs": [0.5], "old_log_probs": [-1.0]}, "row 1, token 1: rollout_log_probs 0.5. "),
    ({"rollout_log_probs": [None], "old_log_probs": [-1.0]}, "row 1, token 1: rollout_log_probs nan. "),
    ({"engine_logprobs": [-0.5, -9999.0], "trainer_logprobs": [-0.5, -1.0]}, "1 of 2 tokens have no usable log-prob"),
    ({"rollout_log_probs": [-1.0], "old_log_probs": [-1.0], "response_mask": [0]}, "no token counts by response_mask"),
    ({"rollout_log_probs": [-1.0], "old_log_probs": [-1.0], "response_mask": [None]}, "no token counts by response_m"),
    ({"engine_logprobs": [], "trainer_logprobs": []}, "no token counts"),
    (
        {"engine_logprobs": [-1.0] * 2, "trainer_logprobs": [-1.0] * 2, "token_ids": [5, None]},
        "token 2: expected an id",
    ),
    ({"engine_logprobs": [-1.0], "trainer_logprobs": [-1.0], "token_ids": ["5"]}, "token_ids: expected a list of numb"),
]


@pytest.mark.parametrize(("row", "says"), REFUSED)
def test_what_is_no_dump_is_refused_in_one_line(tmp_path, row, says):
    file = tmp_path / "dump.jsonl"
    write(file, [row])
    with pytest.raises(DvpError) as refused:
        read_rollouts(file)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


GOOD = '{"engine_logprobs": [-1.0], "trainer_logprobs": [-1.1]}\n'


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("x.csv", "a", "expected a file that ends in"),
        ("x.jsonl", "", "no rows"),
        ("x.jsonl", GOOD + GOOD[:30], "row 2: no JSON, or cut"),
        ("x.jsonl", f"[{GOOD.strip()}]", "row 1: expected an object"),
        ("x.jsonl", f"{GOOD}-0.5\n", "row 2: expected an object"),
        ("x.jsonl", "\xff", "cannot be read"),
        ("x.parquet", "no", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name, text, says):
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(DvpError, match=rf"{name}: {says}"):
        read_rollouts(tmp_path / name)


def test_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert len(read_rollouts(tmp_path / "x.jsonl")[0].tokens) == 1


def test_a_blank_line_is_skipped(tmp_path):
    (tmp_path / "x.jsonl").write_text(f"{GOOD}\n  \n{GOOD}\n")
    assert read_rollouts(tmp_path / "x.jsonl")[0].tokens["response"].tolist() == [0, 1]


def test_the_pages_export_from_verl_is_read(tmp_path, monkeypatch, root):
    """docs/examples/dump_verl.py with verl's nested tensors, of responses of unequal length."""
    exec((root / "docs/examples/dump_verl.py").read_text(encoding="utf-8"), made := {})
    nested = {
        name: torch.nested.as_nested_tensor([torch.tensor(value) for value in values], layout=torch.jagged)
        for name, values in {
            "responses": [[7, 8], [9]],
            "response_mask": [[1, 0], [1]],
            "rollout_log_probs": [[-1.0, 0.0], [-2.0]],
            "old_log_probs": [[-1.5, -8.0], [-2.5]],
        }.items()
    }
    data = nested | {"uid": np.array(["a", "b"], dtype=object)}
    queue = SimpleNamespace(kv_batch_get=lambda keys, partition_id, select_fields: {n: data[n] for n in select_fields})
    batch = SimpleNamespace(keys=["a_0_0", "b_0_0"], partition_id="train")
    monkeypatch.chdir(tmp_path)
    made["dump"](queue, batch, 3)
    [read] = read_rollouts(tmp_path / "rollouts.jsonl")
    assert read.name == "step 3"
    assert read.tokens[["log_q", "log_p", "token", "problem"]].to_numpy().tolist() == [
        [-1.0, -1.5, 7, "a"],
        [-2.0, -2.5, 9, "b"],
    ]


def test_a_dump_becomes_the_page(tmp_path, monkeypatch, capsys, root):
    """Of tokens that are a tenth more and less likely for the trainer, in turn: k3 follows by hand."""
    monkeypatch.chdir(root)
    log_q = np.log([0.5, 0.5, 0.25, 0.25] * 15)
    log_p = log_q + np.log([0.9, 1.1] * 30)
    rows = [{"engine_logprobs": list(log_q), "trainer_logprobs": list(log_p)}] * 20
    rows[0] = rows[0] | {"engine_logprobs": [-9999.0, *log_q[1:]]}
    write(tmp_path / "dump.jsonl", rows)
    assert main(["diagnose-rollouts", str(tmp_path / "dump.jsonl"), "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    k3 = -(log(0.9) + log(1.1)) / 2
    assert f"KL {k3:.2g} nats per token" in printed
    assert printed.index("1 of 1,200 tokens have no usable") < printed.index("It needs a correction")
    page = (tmp_path / "out/mismatch.html").read_text()
    assert "KL by position" in page
    assert "1,199 tokens" in page
