"""A reward of the user's own, in the verifier's place."""

import pytest

from dvp.data.prepare import prepare
from dvp.data.reward import Grader
from dvp.errors import DvpError
from dvp.experiment.data import DataConfig, FileSource, RewardFunction
from dvp.experiment.loading import load_experiment
from dvp.files import sha256_file

SCORE = """
def score(response, reference):
    return len(set(response.split()) & set(reference.split())) / len(reference.split())
"""


@pytest.fixture
def own(tmp_path):
    """Write a file with a function; returns the settings that name it."""

    def write(text: str = SCORE, function: str = "score", **settings) -> RewardFunction:
        file = tmp_path / "rewards.py"
        file.write_text(text)
        return RewardFunction(file=file, function=function, **settings)

    return write


def test_a_function_rewards_text_against_reference(own):
    grader = Grader(own=own())
    assert grader.reward("the blue whale", "blue whale", truncated=False) == 1.0
    assert grader.reward("a whale", "blue whale", truncated=True) == 0.5


def test_the_verifier_rewards_where_no_function_is_named():
    assert Grader().reward("Answer: 7", "7", truncated=False) == 1.0
    assert Grader().reward("Answer: 7", "7", truncated=True) == 0.0  # the number may have gone on


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def score(response, reference): return None", "score: expected a finite number, found None for"),
        ("def score(response, reference): return float('nan')", "expected a finite number, found nan"),
        ("def score(response, reference): return 1 / 0", r"failed on the response 'x' \(ZeroDivisionError"),
        ("def score(response, reference): raise SystemExit(3)", r"failed on the response 'x' \(SystemExit: 3"),
        ("def score(response, reference): return 10**5000", "expected a finite number, found inf"),
        ("import numpy\ndef score(response, reference): return numpy.eye(2)", r"number, found array\(\[\[1"),
        ("score = 3", r"expected a function score\(response, reference\), found none"),
        ("import nothing_like_it", r"cannot be loaded \(ModuleNotFoundError"),
    ],
)
def test_what_is_wrong_with_a_function_is_one_line(own, text, message):
    with pytest.raises(DvpError, match=message) as error:
        Grader(own=own(text)).reward("x", "y", truncated=False)
    assert "\n" not in str(error.value)


def test_another_file_than_the_experiments_is_refused(own):
    with pytest.raises(DvpError, match=r"rewards\.py: has changed since the experiment was resolved"):
        Grader(own=own(sha256="0" * 64))


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = 3", r"expected a function score\("), ("raise SystemExit(3)", r"loaded \(SystemExit: 3\)")],
)
def test_what_cannot_be_loaded_fails_with_the_grader(own, text, message):
    with pytest.raises(DvpError, match=message):
        Grader(own=own(text))


@pytest.mark.parametrize("value", ["np.float32(0.5)", "np.float64(0.5)", "Fraction(1, 2)"])
def test_a_real_number_of_any_type_is_a_reward(own, value):
    text = f"import numpy as np\nfrom fractions import Fraction\ndef score(response, reference): return {value}"
    assert Grader(own=own(text)).reward("x", "y", truncated=False) == 0.5


LATE = """from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Judge:
    weight: float = 0.5

def score(response, reference): return Judge().weight
"""


@pytest.mark.parametrize("name", ["rewards.py", "rewards", "rewards.txt"])
def test_a_file_of_any_name_with_dataclasses_is_loaded(own, tmp_path, name):
    own(LATE).file.replace(tmp_path / name)
    settings = RewardFunction(file=tmp_path / name, function="score")
    assert Grader(own=settings).reward("x", "y", truncated=False) == 0.5


def test_references_are_left_to_the_function(own, tmp_path, write_rows):
    """Of a text that the verifier cannot read, nothing is dropped."""
    rows = [{"problem": f"Name whale {n}.", "answer": "x = {1, 2"} for n in range(3)]
    source: FileSource = write_rows("s", rows)
    data = DataConfig(train="s", reward=own())
    assert prepare(data, {"s": source}, tmp_path / "out")["counts"]["train"] == 3
    with pytest.raises(DvpError, match="unreadable_answers"):
        prepare(data.model_copy(update={"reward": None}), {"s": source}, tmp_path / "out")


def test_another_function_is_another_experiment(own, tmp_path, root):
    """The file's hash is in every stage's: an edit of it trains again."""
    config = tmp_path / "config"
    (config / "experiments").mkdir(parents=True)
    for name in ("catalogue", "deepspeed"):
        (config / name).symlink_to(root / "config" / name)
    smoke = (root / "config/experiments/start/smoke.yaml").read_text()
    hashes = []
    for text in (SCORE, SCORE + "\n"):
        settings = own(text)
        reward = f"  reward: {{file: {settings.file}, function: score}}\n"
        changed = smoke.replace("data:\n", f"data:\n{reward}", 1).replace("name: smoke", "name: mine")
        (config / "experiments/mine.yaml").write_text(changed)
        made = load_experiment("mine", config)
        assert made.data.reward.sha256 == sha256_file(settings.file)
        hashes.append(made.config_hash("train", made.runs[0].path))
    assert hashes[0] != hashes[1]
