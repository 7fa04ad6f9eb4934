"""lm-eval really runs here; the engine is a script."""

import socket
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from dvp.core.safe_vocabulary import FixedRho
from dvp.data import verifier
from dvp.evaluation import runner
from dvp.evaluation.lm import sample_seed
from dvp.evaluation.runner import evaluate
from dvp.experiment.data import RewardFunction
from dvp.experiment.evaluation import EvaluationConfig
from dvp.experiment.loading import load_experiment
from dvp.experiment.tools import Calculator
from dvp.rollout.engine import Completion
from dvp.rollout.turns import ToolEngine
from dvp.tools import make_tool

ROOT = Path(__file__).parents[2]
PROBLEMS = {
    "held_out": [
        # With what looks like a template, a list and a number; prompts end in a newline, which must survive.
        ("p1", "What is 3 + 4? {{braces}}\n", "7"),
        ("p2", "Which interval?\n", "[1, 2]"),
        ("p3", "One half of one?\n", r"\frac{1}{2}"),
    ],
    "aime25": [("a1", "The largest?\n", "204")],
    "olympiad": [("o1", "No file of its own?\n", "5")],
}
RESPONSES = {
    "p1": [
        ("The answer is 7.\n", "stop"),
        (r"\boxed{7.0}", "stop"),
        ("Answer: 8\n", "stop"),
        ("Answer: 7", "length"),
    ],
    "p2": [(r"\boxed{[1,2]}", "stop"), (r"\boxed{[1,3]}", "stop"), ("no idea", "stop"), ("7", "stop")],
    "p3": [("Answer: 0.5\n", "stop"), ("Answer: 1/2\n", "stop"), (r"\boxed{2}", "stop"), ("", "stop")],
    "a1": [(r"\boxed{204}", "stop")] * 4,
    "o1": [("#### 5\n", "stop"), ("#### 6\n", "stop")] * 2,
}
CORRECT = {"p1": [1, 1, 0, 0], "p2": [1, 0, 0, 0], "p3": [1, 1, 0, 0]}


class Tokenizer:
    """A character a token."""

    name_or_path = "characters"
    chat_template = "yes"
    all_special_tokens = ["<user>"]
    eos_token = eos_token_id = None

    def __init__(self):
        self.encoded = []

    def __call__(self, prompt, **options):
        self.encoded.append(prompt)
        return {"input_ids": [ord(character) for character in prompt]}

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize, **variables):
        assert add_generation_prompt
        assert not tokenize
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


class ScriptedEngine:
    """Answers the n-th request of a prompt with the n-th response of its script."""

    max_model_len = 200

    def __init__(self):
        self.calls = []

    def generate(self, prompts, sampling, seeds):
        self.calls.append((prompts, sampling, seeds))
        counts = {}
        completions = []
        for prompt in prompts:
            text = "".join(map(chr, prompt))
            problem = next(id_ for rows in PROBLEMS.values() for id_, asked, _ in rows if asked in text)
            index = counts[problem] = counts.get(problem, -1) + 1
            response, reason = RESPONSES[problem][index]
            completions.append([Completion([1] * (len(response) + 1), [0.0] * (len(response) + 1), response, reason)])
        return completions

    def load_weights(self, weights):
        raise NotImplementedError


@pytest.fixture(name="eval_parquet")
def _eval_parquet(tmp_path):
    rows = [
        {"task": task, "id": id_, "problem": prompt.strip(), "answer": answer, "prompt": prompt}
        for task, problems in PROBLEMS.items()
        for id_, prompt, answer in problems
    ]
    path = tmp_path / "eval.parquet"
    pd.DataFrame(rows).to_parquet(path)
    return path


@pytest.fixture(name="experiment", scope="module")
def _experiment():
    evaluation = EvaluationConfig(
        engine="fp32",
        samples_per_problem=dict.fromkeys([*PROBLEMS, "absent"], 4),
        temperature=0.7,
        top_p=0.9,
        max_response_tokens=50,
        bootstrap_resamples=100,
        seed=3,
    )
    return load_experiment("tiny", ROOT / "config").model_copy(update={"evaluation": evaluation})


@pytest.fixture(name="run")
def _run(experiment, eval_parquet, tmp_path):
    def run(task, engine=None, tokenizer=None, experiment=experiment, **more):
        return evaluate(
            experiment,
            task,
            model_dir=tmp_path / "model",
            eval_parquet=eval_parquet,
            engine=engine or ScriptedEngine(),
            tokenizer=tokenizer or Tokenizer(),
            folder=tmp_path / task,
            **more,
        )

    return run


def test_a_safe_vocabulary_reaches_the_engine_and_changes_no_seed(run):
    full, pruned = ScriptedEngine(), ScriptedEngine()
    run("held_out", full)
    run("held_out", pruned, safe_vocabulary=FixedRho(0.01))
    ((_, of_full, seeds_full),), ((_, of_pruned, seeds_pruned),) = full.calls, pruned.calls
    assert of_full.safe_vocabulary is None
    assert of_pruned == replace(of_full, safe_vocabulary=FixedRho(0.01))
    assert seeds_pruned == seeds_full


def test_with_a_reward_of_ones_own_there_is_no_vote(run, experiment, tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("def score(response, reference): return 'answer' in response")
    data = experiment.data.model_copy(update={"reward": RewardFunction(file=file, function="score")})
    scores = run("held_out", experiment=experiment.model_copy(update={"data": data}))
    assert list(scores["metrics"]) == ["avg@4", "pass@1", "pass@2", "pass@4"]
    assert scores["metrics"]["avg@4"]["value"] == 1 / 12
    assert pd.read_parquet(tmp_path / "held_out/samples.parquet")["stated_answer"].isna().all()


def test_all_samples_reach_the_metric_and_the_table(run, tmp_path):
    engine, tokenizer = ScriptedEngine(), Tokenizer()
    scores = run("held_out", engine, tokenizer)
    samples = pd.read_parquet(tmp_path / "held_out" / "samples.parquet")

    assert list(samples.columns) == runner.SAMPLES.names
    assert len(samples) == 3 * 4
    for problem, group in samples.groupby("problem_id"):
        assert group["sample"].tolist() == [0, 1, 2, 3]
        assert list(zip(group["response"], group["finish_reason"], strict=True)) == RESPONSES[problem]
        assert group["correct"].tolist() == [bool(correct) for correct in CORRECT[problem]]
    assert samples["stated_answer"].isna().sum() == 4  # cut off; "no idea"; a number without a statement; nothing
    assert set(samples["reference"]) == {"7", "[1, 2]", r"\frac{1}{2}"}
    assert scores["metrics"]["avg@4"]["value"] == pytest.approx(5 / 12)
    assert scores["metrics"]["pass@1"]["value"] == pytest.approx(5 / 12)
    assert scores["metrics"]["pass@4"]["value"] == 1
    assert scores["metrics"]["maj@4"]["value"] == pytest.approx((1 + 1 / 2 + 2 / 3) / 3)
    assert (scores["problems"], scores["samples_per_problem"], scores["samples"]) == (3, 4, 12)
    assert scores["truncated_fraction"] == pytest.approx(1 / 12)
    assert scores["mean_response_tokens"] == samples["tokens"].mean()
    assert (scores["temperature"], scores["top_p"], scores["task"]) == (0.7, 0.9, "held_out")
    assert scores["task_version"] == 1.0

    ((prompts, sampling, seeds),) = engine.calls
    assert (sampling.n, sampling.temperature, sampling.top_p, sampling.max_tokens) == (1, 0.7, 0.9, 50)
    assert ["".join(map(chr, prompt)) for prompt in prompts[::4]] == [p for _, p, _ in PROBLEMS["held_out"]]
    assert len(tokenizer.encoded) == 3
    assert seeds == samples["seed"].tolist()
    assert seeds == [sample_seed(3, "held_out", id_, sample) for id_ in ("p1", "p2", "p3") for sample in range(4)]
    assert len(set(seeds)) == 12


def test_an_answer_is_graded_once(run, monkeypatch):
    graded, equal = [], verifier.equal
    monkeypatch.setattr(verifier, "equal", lambda *of: graded.append(of) or equal(*of))
    run("held_out")
    assert len(graded) == 8  # of twelve responses, four state no answer


class ThinkingTokenizer(Tokenizer):
    chat_template = "[assistant] <think>"

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize, **variables):
        text = super().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self(text) if tokenize else text


class ThinkingEngine(ScriptedEngine):
    texts = (
        r"<think>\boxed{1}</think> \boxed{204}",
        r"<think>\boxed{204}</think> \boxed{1}",
        r"<think>\boxed{204}",
        r"\boxed{204}",
    )

    def generate(self, prompts, sampling, seeds):
        groups = super().generate(prompts, sampling, seeds)
        return [[replace(one, text=text)] for (one,), text in zip(groups, self.texts, strict=True)]


@pytest.mark.parametrize(
    ("chat", "asked", "correct"),
    [(True, None, [1, 0, 0, 1]), (True, False, [1, 0, 1, 1]), (False, None, [1, 0, 1, 1]), (False, True, [1, 0, 0, 1])],
)
def test_evaluation_grades_what_follows_the_thinking(run, experiment, tmp_path, chat, asked, correct):
    data = experiment.data.model_copy(update={"chat": chat, "answer_after_thinking": asked})
    tokenizer = ThinkingTokenizer()
    run("aime25", ThinkingEngine(), tokenizer, experiment.model_copy(update={"data": data}))
    assert tokenizer.encoded == ["<user>The largest?\n<assistant>" if chat else "The largest?\n"]
    samples = pd.read_parquet(tmp_path / "aime25" / "samples.parquet")
    assert samples["correct"].tolist() == [bool(right) for right in correct]
    assert samples["stated_answer"].isna().tolist() == [False, False, correct[2] == 0, False]


def test_a_source_without_a_task_file_runs_as_generic_mathematics(run):
    assert run("olympiad")["metrics"]["avg@4"]["value"] == 0.5


def test_the_network_is_not_asked(run, monkeypatch):
    asked = []

    def connect(self, address):
        asked.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: connect(None, args))
    assert run("aime25")["metrics"]["avg@4"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert asked == []


class Calling(ScriptedEngine):
    """Calls the tool in its first turn and states the right answer in its second."""

    ranks = 1

    def generate(self, prompts, sampling, seeds):
        self.calls.append((prompts, sampling, seeds))
        assert sampling.stop == "</tool>"
        completions = []
        for prompt in prompts:
            _, answered, rest = "".join(map(chr, prompt)).partition("<result>")
            turn = f"Answer: {rest.partition('</result>')[0]}\n" if answered else "<tool>3+4</tool>"
            reason = "stop" if answered else "string"
            completions.append([Completion([ord(character) for character in turn], [0.0] * len(turn), turn, reason)])
        return completions


class Decoding(Tokenizer):
    def __call__(self, prompt, add_special_tokens=True, split_special_tokens=False):
        return super().__call__(prompt)

    def decode(self, token_ids, skip_special_tokens, clean_up_tokenization_spaces):
        return "".join(map(chr, token_ids))


def test_a_tool_is_called_in_evaluation_as_in_training(run, experiment, tmp_path):
    tools = Calculator(kind="calculator", max_answer_tokens=20)
    engine, tokenizer = Calling(), Decoding()
    wrapped = ToolEngine(engine, make_tool(tools), tools, tokenizer)
    scores = run("held_out", wrapped, tokenizer, experiment.model_copy(update={"tools": tools}))
    samples = pd.read_parquet(tmp_path / "held_out" / "samples.parquet")
    assert list(samples.columns) == runner.TOOL_SAMPLES.names
    assert set(samples["response"]) == {"<tool>3+4</tool><result>7</result>Answer: 7\n"}
    assert set(samples["tokens"]) == {len("<tool>3+4</tool>Answer: 7\n")}
    assert set(samples["stated_answer"]) == {"7"}
    assert samples.groupby("problem_id")["correct"].mean().to_dict() == {"p1": 1.0, "p2": 0.0, "p3": 0.0}
    assert scores["metrics"]["avg@4"]["value"] == pytest.approx(1 / 3)
    assert (scores["turns_mean"], scores["failed_calls_fraction"], scores["called_fraction"]) == (2.0, 0.0, 1.0)
    assert scores["mean_response_tokens"] == samples["tokens"].mean()
    (first, second) = (seeds for _, _, seeds in engine.calls)
    assert first == samples["seed"].tolist()
    assert len(set(first + second)) == 24


def test_a_reward_of_the_users_own_counts_as_correct_from_one_on(run, experiment, tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("def score(response, reference):\n    return 1.0 if 'i' in response else 0.9\n")
    data = experiment.data.model_copy(update={"reward": RewardFunction(file=file, function="score")})
    run("held_out", experiment=experiment.model_copy(update={"data": data}))
    samples = pd.read_parquet(tmp_path / "held_out/samples.parquet")
    assert list(samples["correct"]) == ["i" in response for response in samples["response"]]
    assert 0 < samples["correct"].mean() < 1
