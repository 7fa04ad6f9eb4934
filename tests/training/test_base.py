"""The base model: the tokenizer, a few real steps of warm start, and models that cannot be used."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from dvp.data import graph_color
from dvp.data.prepare import EVAL_COLUMNS
from dvp.data.stories import STORIES
from dvp.errors import DvpError
from dvp.experiment.base import HubBase, LocalBase, PretrainedArchitecture
from dvp.experiment.loading import load_experiment
from dvp.experiment.tools import Calculator
from dvp.files import verify_checksums
from dvp.rollout.turns import ToolEngine
from dvp.training import base
from dvp.training.base import make_base, train_tokenizer
from made_up_problems import write_problems


@pytest.fixture(scope="module")
def tokenizer():
    stories = STORIES.generate(2000, seed=0)
    return train_tokenizer((f"{story.problem}\n{story.solution}" for story in stories), 512)


def test_the_tokenizer_is_lossless_and_keeps_digits_apart(tokenizer):
    assert len(tokenizer) == 512
    for text in (
        "Bomira has 199 tesons.\n9 + 5 = 14.\nAnswer: 14",
        "π ≈ 3.14 — «naïve» 数学 \t\x00",
        "  two  spaces  ",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    tokens = [tokenizer.decode([token]) for token in tokenizer("Answer: 1234")["input_ids"]]
    assert tokens[-4:] == ["1", "2", "3", "4"]
    assert not [entry for entry in tokenizer.get_vocab() if sum(character.isdigit() for character in entry) > 1]


def test_documents_that_cannot_fill_the_vocabulary_are_refused():
    with pytest.raises(DvpError, match=r"fill only \d+ of 5000 entries; ask for more documents"):
        train_tokenizer(iter(["one two three"]), 5000)


@pytest.fixture
def experiment(root, tmp_path):
    """The smoke experiment with two steps of warm start, and one evaluation problem from its generator."""
    found = load_experiment("smoke", root / "config")
    warm_start = found.base.warm_start.model_copy(update={"steps": 2, "batch_size": 4})
    stories = STORIES.generate(3, seed=found.sources[found.base.source].seed + 1_000_003)
    write_problems(tmp_path / "eval.parquet", EVAL_COLUMNS, problem=[story.problem for story in stories])
    return found.model_copy(update={"base": found.base.model_copy(update={"warm_start": warm_start})})


def test_a_trained_base_is_an_ordinary_directory_and_the_same_every_time(experiment, tmp_path):
    manifests = [make_base(experiment, tmp_path, tmp_path / name) for name in ("one", "two")]
    assert manifests[0] == manifests[1]
    assert manifests[0]["kind"] == "trained"
    verify_checksums(tmp_path / "one", manifests[0]["files"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert (model.config.model_type, model.config.vocab_size) == ("qwen3", 512)
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert sum(parameter.numel() for parameter in model.parameters()) == manifests[0]["parameters"]


@pytest.mark.slow
def test_problems_that_are_evaluated_are_not_learnt_and_do_not_leave_the_warm_start_short(experiment):
    """Of two or three vertices there are but a few graphs."""
    source = experiment.sources[experiment.base.source].model_copy(update={"generator": "graph_color", "steps": [2, 3]})
    problems = {puzzle.problem for puzzle in graph_color.generate(2000, seed=1, steps=(2, 3))}
    evaluated = set(sorted(problems)[: len(problems) // 2])
    documents = base._fresh(source, experiment.base, evaluated)
    assert len(documents) == experiment.base.tokenizer.documents
    assert evaluated.isdisjoint(story.problem for story in documents)
    with pytest.raises(
        DvpError, match=r"^sources\.stories_small: of 20000 problems only 0 are not evaluated; evaluate fe"
    ):
        base._fresh(source, experiment.base, problems)


def test_a_base_model_learns_calls_in_the_ids_in_which_they_are_answered(tiny_model):
    """And not the answers: those are the tool's."""
    tools = Calculator(kind="calculator")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    parts = base.segments("<<37 * 48=1776>>\nAnswer: 1776", tools)
    (ids, plain), (written, all_written) = base._encoded([parts, [("9 + 5 = 14.", True)]], tokenizer)
    answer = ToolEngine(SimpleNamespace(max_model_len=9, ranks=1), None, tools, tokenizer)._encoded("1776")
    first, second = (tokenizer(text)["input_ids"] for text in ("<tool>37 * 48</tool>", "\nAnswer: 1776"))
    assert ids == [*first, *answer, *second, tokenizer.eos_token_id]
    assert written == [True] * len(first) + [False] * len(answer) + [True] * (len(second) + 1)
    assert plain == [*tokenizer("9 + 5 = 14.")["input_ids"], tokenizer.eos_token_id]
    assert all(all_written)


def test_a_local_base_is_taken_as_it_is(experiment, tiny_model, tmp_path):
    local = experiment.model_copy(update={"base": LocalBase(kind="local", path=str(tiny_model))})
    manifest = make_base(local, tmp_path, tmp_path / "base")
    verify_checksums(tmp_path / "base", manifest["files"])
    assert manifest["path"] == str(tiny_model)
    AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    (tmp_path / "empty").mkdir()
    nothing = experiment.model_copy(update={"base": LocalBase(kind="local", path=str(tmp_path / "empty"))})
    with pytest.raises(DvpError, match=r"empty: not a Hugging Face model directory"):
        make_base(nothing, tmp_path, tmp_path / "other")
    assert not (tmp_path / "other").exists()


SHAPE = {
    "hidden_size": 64,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 32,
    "intermediate_size": 96,
    "tie_word_embeddings": True,
    "vocabulary_size": 400,
}


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        ({}, None),
        ({"kv_heads": 2}, "num_key_value_heads 1"),
    ],
)
def test_a_base_has_the_shape_that_is_stated(experiment, tiny_model, tmp_path, stated, found):
    local = LocalBase(kind="local", path=str(tiny_model), architecture=PretrainedArchitecture(**SHAPE | stated))
    changed = experiment.model_copy(update={"base": local})
    if found is None:
        make_base(changed, tmp_path, tmp_path / "base")
        return
    ((key, value),) = stated.items()
    with pytest.raises(DvpError, match=rf"^base\.architecture\.{key}: {value}, but .*/config\.json has {found}$"):
        make_base(changed, tmp_path, tmp_path / "base")


def test_a_width_of_heads_that_is_not_written_follows(tmp_path):
    """As in the config.json of Qwen2.5."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=400, intermediate_size=96, tie_word_embeddings=True, **sizes)
    config.save_pretrained(tmp_path)
    base._check_architecture(PretrainedArchitecture(**SHAPE), tmp_path)
    with pytest.raises(DvpError, match=r"head_dim: 16, but .*/config\.json has head_dim 32$"):
        base._check_architecture(PretrainedArchitecture(**SHAPE | {"head_dim": 16}), tmp_path)


def test_a_hub_that_cannot_be_reached_is_one_line_with_a_way_out(experiment, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    hub = HubBase(kind="hub", path="Qwen/Qwen3-8B-Base", revision="49e3418fbbbca6ecbdf9608b4d22e5a407081db4")
    refused = r"base.path: Qwen/Qwen3-8B-Base at revision 49e3.* cannot be downloaded.*kind: local"
    with pytest.raises(DvpError, match=refused):
        make_base(experiment.model_copy(update={"base": hub}), tmp_path, tmp_path / "base")
