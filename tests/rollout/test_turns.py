"""Turns with a scripted engine: which ids the model sees, what counts as its own, and where a response ends."""

import re

import pytest
from transformers import AutoTokenizer

from dvp.experiment.tools import Calculator
from dvp.rollout.engine import Completion, Sampling
from dvp.rollout.turns import ToolEngine, turn_metrics
from dvp.tools import make_tool
from dvp.tools.tool import Answer

SETTINGS = Calculator(kind="calculator", max_turns=3, max_answer_tokens=40)


class Script:
    """Writes, turn by turn, what its script has for a prompt; a text that ends in the stop string stops there."""

    max_model_len, ranks = 200, 1

    def __init__(self, tokenizer, script):
        self.tokenizer, self.script, self.calls = tokenizer, script, []

    def generate(self, prompts, sampling, seeds):
        self.calls.append((prompts, sampling, seeds))
        limits = sampling.limits or (sampling.max_tokens,) * len(prompts)
        return [
            [self.write(tuple(prompt), index, limit, sampling.stop) for index in range(sampling.n)]
            for prompt, limit in zip(prompts, limits, strict=True)
        ]

    def write(self, prompt, index, limit, stop):
        name = self.tokenizer.decode(prompt[:1])
        turn = self.tokenizer.decode(prompt).count("</result>")
        text = self.script[name][index][turn] if turn < 9 else ""
        ids = self.tokenizer(text)["input_ids"]
        stopped = stop is not None and stop in text
        if not stopped:
            ids.append(self.tokenizer.eos_token_id)
        reason = "length" if len(ids) > limit else "string" if stopped else "stop"
        ids = ids[:limit]
        return Completion(
            ids, [-0.1 * len(prompt)] * len(ids), self.tokenizer.decode(ids, skip_special_tokens=True), reason
        )


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def run(tokenizer):
    def run(script, tool=None, settings=SETTINGS, max_tokens=150, seeds=None):
        engine = Script(tokenizer, script)
        prompts = [tokenizer(name)["input_ids"][:1] for name in script]
        n = len(next(iter(script.values())))
        wrapped = ToolEngine(engine, tool or make_tool(settings), settings, tokenizer)
        groups = wrapped.generate(prompts, Sampling(max_tokens=max_tokens, n=n), seeds or list(range(len(prompts))))
        return groups, engine

    return run


def test_a_response_is_what_was_written_and_answered_in_ids(run, tokenizer):
    first, second = "So <tool>12*34</tool>", " and\nAnswer: 408\n"
    ((response,),), engine = run({"a": [[first, second]]})
    ids = {text: tokenizer(text)["input_ids"] for text in (first, second, "<result>", "408", "</result>")}
    answer = ids["<result>"] + ids["408"] + ids["</result>"]
    assert response.token_ids == ids[first] + answer + ids[second] + [tokenizer.eos_token_id]
    expected = [True] * len(ids[first]) + [False] * len(answer) + [True] * (len(ids[second]) + 1)
    assert response.written == expected
    assert len(response.log_probs) == sum(expected)
    prompt = tokenizer("a")["input_ids"][:1]
    assert engine.calls[1][0] == [prompt + ids[first] + answer]
    # Each with what it was sampled with: the second turn's after a longer prompt.
    assert response.log_probs[-1] == pytest.approx(-0.1 * len(engine.calls[1][0][0]))
    assert response.text == "So \n and\nAnswer: 408\n"
    assert response.transcript == f"{first}<result>408</result>{second}"
    assert (response.finish_reason, response.calls, response.failed_calls) == ("stop", 1, 0)


def test_open_responses_go_on_together_and_the_others_are_done(run):
    script = {
        "a": [["<tool>1+1</tool>", "<tool>2+2</tool>", "end"], ["at once"]],
        "b": [["<tool>1/0</tool>", "end"], ["<tool>3</tool>", "end"]],
    }
    groups, engine = run(script, seeds=[5, 6])
    assert [len(prompts) for prompts, _, _ in engine.calls] == [2, 3, 1]
    assert [sampling.n for _, sampling, _ in engine.calls] == [2, 1, 1]
    assert [[one.calls for one in group] for group in groups] == [[2, 0], [1, 1]]
    assert [[one.failed_calls for one in group] for group in groups] == [[0, 0], [1, 0]]
    assert "<result>error: division by" in groups[1][0].transcript
    for prompts, sampling, _ in engine.calls[1:]:
        # What is left of the response, and no more, fits.
        assert all(len(prompt) - 1 + limit == 150 for prompt, limit in zip(prompts, sampling.limits, strict=True))
    seeds = [seed for _, _, turn in engine.calls for seed in turn]
    assert len(set(seeds)) == len(seeds)
    again, repeated = run(script, seeds=[5, 6])
    assert again == groups
    assert [call[2] for call in repeated.calls] == [call[2] for call in engine.calls]
    metrics = turn_metrics([one for group in groups for one in group])
    assert metrics["turns_mean"] == 2.0
    assert metrics["failed_calls_fraction"] == 0.25
    assert metrics["called_fraction"] == 0.75
    assert metrics["tool_tokens_mean"] == sum(one.written.count(False) for group in groups for one in group) / 4


def test_turns_and_room_cut_a_response_off(run, tokenizer):
    call = "<tool>1</tool>"
    ((response,),), engine = run({"a": [[call] * 9]})
    assert len(engine.calls) == 3
    assert (response.finish_reason, response.calls, response.written[-1]) == ("length", 2, True)
    room = sum(len(tokenizer(text)["input_ids"]) for text in (call, "<result>", "1", "</result>"))
    ((response,),), _ = run({"a": [[call, "end"]]}, max_tokens=room)
    assert (response.finish_reason, response.calls, all(response.written)) == ("length", 0, True)
    ((response,),), _ = run({"a": [[call, "end"]]}, max_tokens=room + 1)
    assert (response.finish_reason, response.calls, len(response.token_ids)) == ("length", 1, room + 1)


class Says:
    """A tool with one answer."""

    def __init__(self, text):
        self.text = text

    def answers(self, calls):
        return [Answer(self.text) for _ in calls]


def test_what_stands_in_a_call_or_an_answer_is_not_stated(run):
    script = {
        "a": [["<tool>Answer: 8\n</tool>", "ends here"]],
        "b": [["x <tool>Answer: 8\n"]],
        "c": [["Answer: 7<tool>1</tool>", "0"]],
    }
    ((asked,), (unfinished,), (over,)), _ = run(script, tool=Says("Answer: 9\n"))
    assert "Answer" not in asked.text
    assert unfinished.text == "x "
    assert over.text == "Answer: 7\n0"


def test_a_call_that_was_not_begun_is_a_mistake(run):
    ((response,),), _ = run({"a": [["12*34</tool>", "end"]]})
    assert (response.calls, response.failed_calls) == (1, 1)
    assert "<result>error" in response.transcript


def test_a_long_answer_keeps_both_ends_and_a_control_token_is_text(run, tokenizer):
    end = tokenizer.eos_token
    ((response,),), _ = run({"a": [["<tool>x</tool>", "end"]]}, tool=Says(f"{end}0123456789" * 9))
    assert re.search(rf"<result>{re.escape(end)}01\d*.*\.\.\..*89</result>", response.transcript)
    assert response.token_ids.count(tokenizer.eos_token_id) == 1
    most = SETTINGS.max_answer_tokens + sum(len(tokenizer(text)["input_ids"]) for text in SETTINGS.answer)
    assert response.written.count(False) <= most


def test_what_is_measured_by_position_calls_no_tool(run, tokenizer):
    engine = Script(tokenizer, {"a": [["<tool>1</tool>"]]})
    wrapped = ToolEngine(engine, make_tool(SETTINGS), SETTINGS, tokenizer)
    for options in ({"to_the_end": True}, {"whole_vocabulary": True}):
        ((response,),) = wrapped.generate([tokenizer("a")["input_ids"][:1]], Sampling(max_tokens=50, **options), [1])
        assert response.calls == 0
        assert response.written is None
