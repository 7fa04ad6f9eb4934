"""What is recorded of a step, which steps are kept, and the file."""

from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dvp.errors import DvpError
from dvp.experiment.training import KeepResponses
from dvp.training.responses import SCHEMA, Pieces, ResponseRecorder, read_responses

PROMPT = 3


class Characters:
    """A tokenizer of one character a token."""

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        return "".join(map(chr, ids))


@pytest.fixture
def step():
    """The arguments of `record` for 6 responses of 1 to 4 tokens after 3 of prompt."""
    generator = torch.Generator().manual_seed(0)
    lengths = [4, 1, 3, 4, 2, 4]
    width = PROMPT + max(lengths)
    mask_BT = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask_BT[row, PROMPT : PROMPT + length] = True

    def noise():
        return torch.rand(len(lengths), width, generator=generator)

    # Padding holds anything: nothing of it may be recorded.
    rollout = SimpleNamespace(
        batch=SimpleNamespace(
            tokens_BT=torch.randint(97, 120, mask_BT.shape, generator=generator), response_BT=mask_BT
        ),
        infer_log_prob_BT=-noise(),
        rewards_B=torch.tensor([0.0, 1.0, 0.25, 0.0, 1.0, 0.0]),
        truncated_B=torch.tensor([True, False, False, False, False, True]),
    )
    safe_BT = noise() > 0.2
    safe_BT[3, PROMPT:] = torch.tensor([True, False, True, True])
    statistics = {"log_prob": -noise(), "pruned_log_prob": -noise(), "target_in_safe": safe_BT}
    # Outside the safe vocabulary the log-prob is a convention, however far it is from the engine's.
    statistics["pruned_log_prob"][3, PROMPT + 1] = -50.0
    statistics["pruned_log_prob"][5, PROMPT + 3] = -7.0
    safe_BT[5, PROMPT + 3] = True
    update = SimpleNamespace(
        weight_BT=noise(),
        advantage_BT=noise() - 0.5,
        weights=SimpleNamespace(
            dropped_B={
                "veto": torch.tensor([False, True, False, False, False, False]),
                "trust_region": torch.tensor([False, True, False, False, False, True]),
                "k3": torch.tensor([False, True, False, True, False, False]),
            },
            kept_B=torch.tensor([True, False, True, False, False, False]),
        ),
    )
    return [(f"id{row}", row) for row in range(6)], rollout, statistics, update


def recorder(steps=20, tools=False, **settings) -> ResponseRecorder:
    return ResponseRecorder(KeepResponses(**settings), steps, Characters(), tools=tools)


def test_each_number_is_that_of_its_token(step):
    problems, rollout, statistics, update = step
    taken = recorder(per_step=6)
    taken.record(7, *step)
    assert [row["index"] for row in taken.rows] == list(range(6))
    for index, row in enumerate(taken.rows):
        at = [(index, PROMPT + place) for place in range(len(row["token_id"]))]
        assert (row["step"], row["problem"], row["answer"]) == (7, problems[index][0], str(index))
        assert row["reward"] == rollout.rewards_B[index]
        assert row["truncated"] == rollout.truncated_B[index]
        assert row["prompt"] == "".join(chr(rollout.batch.tokens_BT[index, place]) for place in range(PROMPT))
        assert row["text"] == [chr(token_id) for token_id in row["token_id"]]
        for name, values_BT in {
            "token_id": rollout.batch.tokens_BT,
            "infer_log_prob": rollout.infer_log_prob_BT,
            "log_prob": statistics["log_prob"],
            "pruned_log_prob": statistics["pruned_log_prob"],
            "in_safe": statistics["target_in_safe"],
            "weight": update.weight_BT,
            "advantage": update.advantage_BT,
        }.items():
            assert row[name] == [values_BT[place].item() for place in at], name
    assert [row["rejected"] for row in taken.rows] == [None, "veto", None, "k3", "bounds", "trust_region"]


@pytest.mark.parametrize(
    ("per_step", "chosen"),
    [(1, {0: "first"}), (2, {0: "first", 5: "worst"}), (3, {0: "first", 1: "first", 5: "worst"})],
)
def test_half_are_the_first_and_half_have_the_largest_mismatch(step, per_step, chosen):
    """Response 5 has it: response 3's is at a token outside the safe vocabulary, where log p means nothing."""
    taken = recorder(per_step=per_step)
    taken.record(1, *step)
    assert {row["index"]: row["chosen"] for row in taken.rows} == chosen


def test_a_tools_answer_is_recorded_as_such(step, tmp_path):
    """Between the first and the last token of the model; whatever stands there in the numbers is not recorded."""
    problems, rollout, statistics, update = step
    rollout.batch.response_BT[0, PROMPT + 1 : PROMPT + 3] = False
    taken = recorder(per_step=1, tools=True)
    taken.record(1, problems, rollout, statistics, update)
    (row,) = taken.rows
    assert row["written"] == [True, False, False, True]
    assert row["token_id"] == rollout.batch.tokens_BT[0, PROMPT : PROMPT + 4].tolist()
    assert row["in_safe"][1:3] == [True, True]
    for name in ("infer_log_prob", "log_prob", "pruned_log_prob", "weight", "advantage"):
        assert row[name][1:3] == [0.0, 0.0]
        assert row[name][0] != 0.0 or name in ("weight", "advantage")
    taken.write(tmp_path / "responses.parquet")
    again = recorder(tools=True)
    again.restore(tmp_path / "responses.parquet")
    assert again.rows == taken.rows
    again.write(tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "responses.parquet").read_bytes()


def kept_steps(step, until, collapsed_at, **settings) -> list[int]:
    taken = recorder(23, per_step=1, every=10, **settings)
    for number in range(1, until + 1):
        taken.record(number, *step)
        taken.settle(number, collapsed_at if collapsed_at and number >= collapsed_at else None)
    return [row["step"] for row in taken.rows]


@pytest.mark.parametrize(
    ("before", "until", "collapsed_at", "kept"),
    [
        (5, 23, None, [1, 10, 20, 23]),
        (3, 17, None, [1, 10, 14, 15, 16, 17]),  # held back while nothing has collapsed
        (3, 23, 17, [1, 10, 14, 15, 16, 17, 20, 23]),
        (3, 23, 2, [1, 2, 10, 20, 23]),
    ],
)
def test_the_steps_that_are_kept(step, before, until, collapsed_at, kept):
    assert kept_steps(step, until, collapsed_at, before_collapse=before) == kept


def test_other_files_are_refused_by_name(step, tmp_path):
    taken, path = recorder(), tmp_path / "responses.parquet"
    taken.record(1, *step)
    refused = "responses.parquet: expected the responses that `dvp train` records"
    with pytest.raises(DvpError, match=r"responses.parquet: no such file; `dvp train` writes it"):
        read_responses(path)
    path.write_text("not parquet")
    with pytest.raises(DvpError, match=refused):
        read_responses(path)
    pq.write_table(pa.Table.from_pylist(taken.rows, schema=SCHEMA).drop(["weight"]), path)
    with pytest.raises(DvpError, match=f"{refused}.*weight"):
        read_responses(path)


TEXT = "Ein Apfel, 12 naïve 日本語 🦊👩‍🚀 √2 ≈ 1.41\n\tEnde"


def test_the_pieces_of_a_byte_level_tokenizer_make_up_the_text(tiny_model):
    """A tokenizer that knows nothing but bytes of most of this; a character is its first token's."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids, fox, good = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (TEXT, "🦊", "ab"))
    pieces = Pieces(tokenizer).of(ids)
    assert "".join(pieces) == TEXT
    assert len(pieces) == len(ids)
    assert pieces[pieces.index("🦊") + 1] == ""
    # Bytes that make no character are marked, and do no harm to what follows.
    mixed = Pieces(tokenizer).of([*good, *fox[1:], *good, *fox, tokenizer.eos_token_id])
    assert "".join(mixed).startswith("ab\ufffd")
    assert "".join(mixed).endswith(f"ab🦊{tokenizer.eos_token}")


def test_a_space_at_the_beginning_of_a_piece_is_not_lost():
    """As sentencepiece's tokenizers have it, which drop the space of the first token."""
    inner = Tokenizer(models.WordLevel({"a": 0, "▁two": 1, "▁words": 2, "[UNK]": 3}, unk_token="[UNK]"))
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert tokenizer.decode([1]) == "two"
    assert Pieces(tokenizer).of([1, 2]) == [" two", " words"]
