"""What is read of what `prepare` wrote, what a prompt is for the model, and which are short enough to train on."""

import re
from pathlib import Path

import pandas as pd
import pytest
from tokenizers.normalizers import Lowercase
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import dvp
from dvp.data.prepare import EVAL_COLUMNS
from dvp.data.prompts import encode_prompts, read_problems, short_enough
from dvp.errors import DvpError
from made_up_problems import write_problems

QWEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_the_rows_of_a_task_keep_their_places(tmp_path):
    write_problems(tmp_path / "eval.parquet", EVAL_COLUMNS, task=["x", "y", "x"], id=["1", "1", "2"])
    rows = read_problems(tmp_path / "eval.parquet", "x")
    assert list(rows["id"]) == ["1", "2"]
    assert list(rows.index) == [0, 2]


def test_no_stage_has_a_reader_of_its_own():
    """Sources, what `prepare` wrote, what training wrote and results: one reader each."""
    package = Path(dvp.__file__).parent
    reads = re.compile(r"read_parquet\(|read_table\(|ParquetFile\(")
    readers = [path for path in package.rglob("*.py") if reads.search(path.read_text(encoding="utf-8"))]
    found = sorted(path.relative_to(package).as_posix() for path in readers)
    reports = ["analysis/load.py", "analysis/report.py", "analysis/stage.py", "analysis/statistics.py"]
    own = ["data/prompts.py", "data/sources.py", "measurement/rollouts.py", "training/responses.py"]
    assert found == [*reports, *own]


def test_prompts_of_at_most_the_limit_are_kept():
    prompts = [[1] * 5, [1] * 6, [1] * 7, [1]]
    assert short_enough(prompts, 6) == [0, 1, 3]
    assert short_enough(prompts, None) == short_enough(prompts, 7) == [0, 1, 2, 3]
    with pytest.raises(
        DvpError, match=r"^training\.max_prompt_tokens: all 2 prompts have more than 3 tokens; .* has 4$"
    ):
        short_enough([[1] * 5, [1] * 4], 3)


# --- what a model is asked ---


@pytest.fixture
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def encode(tokenizer, *prompts, chat=False):
    problems = pd.DataFrame({"id": [f"p{i}" for i in range(len(prompts))], "prompt": prompts})
    return encode_prompts(tokenizer, problems, chat, "data/train.parquet")


def test_a_chat_prompt_is_what_the_template_renders(tokenizer, capfd):
    tokenizer.chat_template = QWEN
    (ids,) = encode(tokenizer, "  What is $2^2$?\n\nAnswer:\n", chat=True)
    text = "<|im_start|>user\nWhat is $2^2$?\n\nAnswer:<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == text
    messages = [{"role": "user", "content": "  What is $2^2$?\n\nAnswer:\n"}]
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert not capfd.readouterr().err


DROPPED = "the chat template leaves out the prompt's text, and gives '"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", DROPPED),
        ("{{ messages[0]['content'][:8] }}", DROPPED),
        (QWEN + "{{ raise_exception('no x') }}", "the chat template fails: TemplateError: no x"),
        ("{% for %}", "the chat template fails: "),
        (
            "{% for m in messages %}User: {{ m['content'] }}{{ eos_token }}\n{% endfor %}",
            "the chat template ends the prompt with the end token '<|endoftext|>'; change it",
        ),
    ],
)
def test_a_template_that_no_prompt_can_have_is_refused(tokenizer, template, message):
    tokenizer.chat_template = template
    with pytest.raises(DvpError) as error:
        encode(tokenizer, "What is 1 + 1?", chat=True)
    assert str(error.value).startswith(f"data/train.parquet: row 1 (id p0): {message}")
    assert "\n" not in str(error.value)


def test_a_template_that_reads_the_clock_gives_one_date(tokenizer, capfd):
    """Prompts of another day would be other prompts under the same hash. Llama's own date, where it has no clock."""
    tokenizer.chat_template = "Today is {{ strftime_now('%A, %d %b %Y, %H:%M:%S') }}. " + QWEN
    first, second = encode(tokenizer, "What is 1 + 1?", "What is 2 + 2?", chat=True)
    assert tokenizer.decode(first).startswith(
        "Today is Friday, 26 Jul 2024, 00:00:00. <|im_start|>user\nWhat is 1 + 1?"
    )
    assert first != second
    assert capfd.readouterr().err == "warning: the chat template reads the clock; every prompt says 26 July 2024\n"


def test_an_end_token_after_every_text_is_left_out(tokenizer):
    plain = encode(tokenizer, "What is 1 + 1?")
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    assert tokenizer("What is 1 + 1?")["input_ids"] == [*plain[0], tokenizer.eos_token_id]
    assert encode(tokenizer, "What is 1 + 1?") == plain
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{end[0]} $A", special_tokens=[end])
    assert encode(tokenizer, "What is 1 + 1?") == [[tokenizer.eos_token_id, *plain[0]]]


@pytest.mark.parametrize("chat", [False, True])
def test_one_prompt_of_two_problems_is_refused(tokenizer, chat):
    """A tokenizer that folds case; a template may have the same fault, but it would leave out text."""
    tokenizer.chat_template = QWEN
    assert len(encode(tokenizer, "What is X?", "What is x?", "What is x?", "What is  x?", chat=chat)) == 4
    tokenizer.backend_tokenizer.normalizer = Lowercase()
    with pytest.raises(DvpError, match=r": row 3 \(id p2\): the prompt has the same tokens as that of row 2 "):
        encode(tokenizer, "What is one?", "What is X?", "What is x?", chat=chat)
