"""What a model thinks before it answers is not graded: the setting and the reward. Of evaluation: test_runner."""

from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from dvp.data.prepare import TRAIN_COLUMNS
from dvp.data.prompts import before_response
from dvp.errors import DvpError
from dvp.experiment.data import DataConfig
from dvp.experiment.folder import ExperimentDir
from dvp.experiment.loading import load_experiment, parse_experiment, write_resolved
from dvp.rollout.engine import Completion
from dvp.training.stage import set_up
from made_up_problems import write_problems

PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
CLOSED = PLAIN + "{% if enable_thinking is defined %}<think>\n\n</think>{% endif %}"
OPENED = PLAIN + "{% if add_generation_prompt %}<think>\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "settings", "expected"),
    [
        (None, {}, None),
        (PLAIN, {"chat": True}, None),
        (CLOSED, {"chat": True}, ""),
        (OPENED, {"chat": True}, "<think>"),
        (OPENED, {"chat": True, "answer_after_thinking": False}, None),
        (None, {"answer_after_thinking": True, "prompt_template": "{problem}\n<think>\n"}, "<think>"),
    ],
)
def test_what_stands_before_a_response(tiny_model, template, settings, expected):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = template
    assert before_response(tokenizer, DataConfig(train="x", **settings)) == expected


def test_tags_that_responses_do_not_show_are_refused(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = OPENED
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    with pytest.raises(DvpError, match=r"^data.answer_after_thinking: </think> is a special token"):
        before_response(tokenizer, DataConfig(train="x", chat=True))


def test_a_faulty_reward_is_told_before_a_trainer_is_made(root, tiny_model, tmp_path, monkeypatch):
    (tmp_path / "rewards.py").touch()
    value = load_experiment("smoke", root / "config").model_dump(mode="json")
    value["data"]["reward"] = {"file": str(tmp_path / "rewards.py"), "function": "score"}
    write_resolved(parse_experiment(value, tmp_path), tmp_path / "own")
    directory = ExperimentDir(tmp_path / "own" / "config.yaml")
    directory.base.symlink_to(tiny_model)
    directory.data.mkdir()
    write_problems(directory.data / "train.parquet", TRAIN_COLUMNS, id=["1"], answer="7", prompt=["bafi\n"])
    monkeypatch.setattr("dvp.training.backend.Trainer", lambda *_: pytest.fail("a trainer was made"))
    with pytest.raises(DvpError, match=r"rewards\.py: expected a function score\("):
        set_up(directory, directory.experiment.runs[0])


@pytest.mark.parametrize(("asked", "rewards"), [(True, [1, 0, 0]), (False, [1, 1, 1]), (None, [1, 1, 1])])
def test_training_rewards_what_follows_the_thinking(root, tiny_model, tmp_path, monkeypatch, asked, rewards):
    """As its stage sets a run up, but for trainer and engine."""
    value = load_experiment("smoke", root / "config").model_dump(mode="json")
    value["data"] |= {"answer_after_thinking": asked, "prompt_template": "{problem}\n<think>"}
    write_resolved(parse_experiment(value, tmp_path), tmp_path / "thinking")
    directory = ExperimentDir(tmp_path / "thinking" / "config.yaml")
    directory.base.symlink_to(tiny_model)
    directory.data.mkdir()
    write_problems(directory.data / "train.parquet", TRAIN_COLUMNS, id=["1"], answer="7", prompt=["bafi\n<think>"])
    monkeypatch.setattr("dvp.training.backend.Trainer", lambda *_: SimpleNamespace(context=512, bf16=False))
    monkeypatch.setattr("dvp.rollout.vllm.VllmEngine", lambda *_, **__: SimpleNamespace(max_model_len=512))
    loop, _ = set_up(directory, directory.experiment.runs[0])
    texts = (r"Is it \boxed{8}?</think> \boxed{7}", r"It is \boxed{7}.", r"\boxed{8}? <think> \boxed{7}")
    assert [loop.problems.reward(0, Completion([1], [0.0], text, "stop")) for text in texts] == rewards
