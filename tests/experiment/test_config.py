"""Experiments: what is read, what is refused and with which line, and what each stage's config_hash depends on."""

import copy
import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from dvp.analysis.parts import parts
from dvp.core.importance import PRESETS
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.config_hash import settings_of_stage
from dvp.experiment.grid import Run, parse_rho, rho_in_path, settings_path
from dvp.experiment.loading import (
    check_settings,
    dump_experiment,
    load_experiment,
    parse_experiment,
    read_resolved,
    read_settings,
    read_yaml,
    write_resolved,
)
from dvp.experiment.training import BF16_AUTOCAST
from dvp.files import write_text

ROOT = Path(__file__).parents[2]
SMOKE = load_experiment("smoke", ROOT / "config")
EXPERIMENTS = sorted(file.stem for file in (ROOT / "config" / "experiments").glob("*.yaml"))
REVISION = "0123456789abcdef0123456789abcdef01234567"
HUB = {"kind": "hub", "path": "a/b", "split": "test", "columns": {"problem": "problem", "answer": "answer"}}
PLAIN = {"label": "x", "advantage": "rloo"}
GONE = object()
LONG = {"training.tokens_per_micro_batch": 10000}
TOOLS = {"kind": "calculator", "max_answer_tokens": 20}
SPREAD = {"training.gpus": 2, "engines.fp32": {"dtype": "float32", "tensor_parallel": 2}}
STAGES = ("prepare", "base", "train", "convert", "evaluate")


def put(value: dict, changes: dict[str, object]) -> dict:
    """A copy with the values at dotted keys replaced, added or, for GONE, taken out."""
    value = copy.deepcopy(value)
    for key, new in changes.items():
        *above, last = key.split(".")
        inner = value
        for part in above:
            inner = inner[int(part)] if isinstance(inner, list) else inner.setdefault(part, {})
        last = int(last) if isinstance(inner, list) else last
        if new is GONE:
            del inner[last]
        else:
            inner[last] = new
    return value


@pytest.fixture
def config(tmp_path) -> Path:
    """A copy of the configuration, to be edited."""
    return shutil.copytree(ROOT / "config", tmp_path / "config")


@pytest.fixture
def edit(config):
    """Write experiment `smoke` with changes at dotted keys; what `load_experiment` makes of it."""

    def changed(changes: dict[str, object]) -> Experiment:
        value = put(read_yaml(ROOT / "config" / "experiments" / "smoke.yaml"), changes)
        text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
        (config / "experiments" / "smoke.yaml").write_text(text, encoding="utf-8")
        return load_experiment("smoke", config)

    return changed


@pytest.fixture
def refused(edit, config):
    """The message with which an experiment is refused: one line, after the file's name."""

    def message(changes: dict[str, object]) -> str:
        with pytest.raises(DvpError) as error:
            edit(changes)
        line = str(error.value)
        assert line.splitlines() == [line]
        start = f"{config / 'experiments' / 'smoke.yaml'}: "
        assert line.startswith(start)
        return line.removeprefix(start)

    return message


# --- what is read ---


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_survives_being_resolved(name, tmp_path):
    experiment = load_experiment(name, ROOT / "config")
    write_text(tmp_path / "config.yaml", dump_experiment(experiment))
    again = read_resolved(tmp_path / "config.yaml")
    assert again == experiment
    assert dump_experiment(again) == dump_experiment(experiment)
    for run in experiment.runs:
        for stage in STAGES:
            task = experiment.data.tasks[0]
            assert again.config_hash(stage, run, task) == experiment.config_hash(stage, run, task)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_is_written_has_what_the_experiment_uses_and_nothing_else(name, tmp_path):
    experiment = load_experiment(name, ROOT / "config")
    write_resolved(experiment, tmp_path)
    written = read_resolved(tmp_path / "config.yaml")
    assert written == experiment.used == written.used
    assert (written.runs, written.estimators) == (experiment.runs, experiment.estimators)
    assert written.config_hash("report") == experiment.config_hash("report")
    assert 0 < len(written.methods) < len(experiment.methods)
    assert 0 < len(written.sources) < len(experiment.sources)


def test_what_is_written_keeps_its_age_until_it_changes(tmp_path):
    experiment, file = load_experiment("smoke", ROOT / "config"), tmp_path / "config.yaml"
    write_resolved(experiment, tmp_path)
    os.utime(file, (1, 1))
    write_resolved(experiment, tmp_path)
    assert file.stat().st_mtime == 1
    write_resolved(experiment.model_copy(update={"scale": "another"}), tmp_path)
    assert file.stat().st_mtime > 1


def test_what_is_written_replaces_what_is_damaged_and_no_other_experiment(tmp_path):
    experiment, file = load_experiment("smoke", ROOT / "config"), tmp_path / "config.yaml"
    file.write_bytes(b"\xff\x00")
    write_resolved(experiment, tmp_path)
    written = file.read_bytes()
    with pytest.raises(
        DvpError, match=r"config.yaml: is of experiment 'smoke'; expected a folder of its own for 'tiny'"
    ):
        write_resolved(load_experiment("tiny", ROOT / "config"), tmp_path)
    assert file.read_bytes() == written


@pytest.mark.parametrize("name", ["evidence", "reference", "mlflow.db", "mlartifacts"])
def test_an_experiment_is_not_called_as_something_else_in_the_folder_of_results(config, name):
    (config / "experiments" / f"{name}.yaml").write_text(f"name: {name}\nextends: smoke\n")
    with pytest.raises(DvpError, match=rf"{name}.yaml: name: '{name}' is what something else in the folder of results"):
        load_experiment(name, config)


def test_resolving_keeps_every_kind_of_value(edit, tmp_path):
    (tmp_path / "rows.jsonl").touch()
    experiment = edit(
        {
            "sources.local": {
                "kind": "file",
                "path": str(tmp_path / "rows.jsonl"),
                "columns": {"problem": "p", "answer": "a.0"},
            },
            "sources.remote": HUB | {"revision": REVISION},
            "data.evaluation": ["local", "remote"],
            "data.limit": 10,
            "data.prompt_template": "ρ “{problem}”: #\n\n",
            "evaluation.samples_per_problem": {"held_out": 1, "local": 2, "remote": 3},
            "methods.masked": PLAIN | {"label": "yes", "importance": {"level": "token", "veto": 1e-9}},
            "methods.clipped": PLAIN | {"importance": "seq_tis", "loss": {"kind": "gspo", "clip_low": 0.1}},
            "methods.mass": PLAIN | {"safe_vocabulary": {"rule": "mass_budget", "delta": 0.1}},
            "grid.0.method": ["rloo", "masked", "clipped", "mass"],
            "grid.1.rho": ["exp(-13)", 0.123456789, "1e-2"],
        }
    )
    write_text(tmp_path / "config.yaml", dump_experiment(experiment))
    assert read_resolved(tmp_path / "config.yaml") == experiment
    assert experiment.methods["clipped"].importance == PRESETS["seq_tis"]
    assert [run.rho_value for run in experiment.runs if run.rho] == [math.exp(-13), 0.123456789, 0.01]


SLIP = {"kind": "file", "path": "no/such.jsonl", "columns": {"problem": "p", "answer": "a"}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sources.mine": SLIP, "data.train": "mine"}, "sources.mine.path: no/such.jsonl: no such file"),
        (
            {"sources.exam": SLIP, "data.evaluation": ["exam"], "evaluation.samples_per_problem.exam": 1},
            "sources.exam.path: no/such.jsonl: no such file",
        ),
        (
            {"base": {"kind": "local", "path": "no/model"}},
            "base.path: no/model: expected a Hugging Face model directory, found no config.json",
        ),
    ],
)
def test_a_file_that_is_named_and_is_not_there_is_refused(refused, changes, says):
    """Snakemake would take what an earlier version of the experiment made for results of this one."""
    assert refused(changes) == says


TEXT = st.one_of(
    st.text(),
    st.from_regex(r"[-+]?[0-9._:xoe]{1,6}([eE][-+]?[0-9]{1,3})?", fullmatch=True),
    st.text(alphabet="\x85\u2028\u2029\ufeff\r\n\t #:-'\"\\a", max_size=8),
)


@given(TEXT)
@example("1e-2")
@example("1e5")
@example("010")
@example("1:30")
@example("a\u2028b")
@example("a\x85b")
def test_any_text_is_the_same_text_after_it_is_written_and_read(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "text.yaml"
    experiment = SMOKE.model_copy(update={"scale": text, "deepspeed": {text: [text]}})
    write_text(path, dump_experiment(experiment))
    read = read_yaml(path)
    assert (read["scale"], read["deepspeed"]) == (text, {text: [text]})


def test_an_experiments_own_entry_replaces_that_of_the_catalogue(edit):
    experiment = edit({"engines": {"coarse": {"dtype": "float16"}}})
    assert experiment.engines["coarse"].dtype == "float16"
    assert experiment.engines["coarse"].weight_rounding == "none"
    assert experiment.engines["fp32"].dtype == "float32"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E6", 1e6),
        ("1.5e-4", 1.5e-4),
        ("-2e3", -2e3),
        (".5", 0.5),
        ("1.", 1.0),
        (".inf", math.inf),
        ("3", 3),
        ("010", 10),
        ("-08", -8),
        ("0o10", 8),
        ("0x1F", 31),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        ("1_000", "1_000"),
        ('"1e-6"', "1e-6"),
        ("exp(-13)", "exp(-13)"),
        ("1e-6x", "1e-6x"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_numbers_of_yaml(tmp_path, text, value):
    path = tmp_path / "x.yaml"
    path.write_text(f"a: {text}\n", encoding="utf-8")
    assert read_yaml(path) == {"a": value}
    assert type(read_yaml(path)["a"]) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "key 'a' is given twice .*line 3"),
        ("x:\n  a: 1\n  a: 1\n", "key 'a' is given twice .*line 3"),
        ("a: [1, 2\nb: 3\n", "not valid YAML: .*line 2"),
        ("a: b: c\n", "not valid YAML: .*line 1"),
        ("a: !!bool foo\n", "not valid YAML"),
        ('a: !!float ""\n', "not valid YAML"),
        ("a: !!timestamp foo\n", "not valid YAML"),
        ("\ta: 1\n", "not valid YAML: .*line 1"),
        ("{problem}: 1\n", "not valid YAML: .*unhashable key.*line 1"),
        ("? [a, b]\n: 1\n", "not valid YAML: .*unhashable key.*line 1"),
        ("a: 2024-13-45\n", "not valid YAML: month must be in"),
        ("a: " + "[" * 3000 + "]" * 3000, "not valid YAML: nested too deeply"),
        ("{a: " * 3000 + "1" + "}" * 3000, "not valid YAML: nested too deeply"),
        ("a: !!int x\n", "not valid YAML: invalid literal"),
        ("a: !!python/object/apply:os.getcwd []\n", "not valid YAML: .*line 1"),
        ("a: \x01\n", "not valid YAML: "),
        (b"a: \xff\n", "not valid YAML: .*can't decode"),
        ("", "expected a mapping"),
        ("- a\n", "expected a mapping"),
    ],
)
def test_what_is_no_mapping_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DvpError, match=message) as error:
        read_yaml(path)
    line = str(error.value)
    assert line.startswith(f"{path}: ")
    assert line.splitlines() == [line]


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(DvpError, match=rf"^{re.escape(str(tmp_path))}/x\.yaml: no such file$"):
        read_yaml(tmp_path / "x.yaml")
    with pytest.raises(DvpError, match=rf"^{re.escape(str(tmp_path))}: cannot be read \(Is a directory\)$"):
        read_yaml(tmp_path)


# --- what is refused ---


def test_unknown_keys_are_named(refused):
    assert refused({"sedes": [0], "seeds": GONE}) == "sedes: unknown key; did you mean seeds? (and 1 more)"
    assert refused({"sedes": [0]}) == "sedes: unknown key; did you mean seeds?"
    assert refused({"training.clip": 1e-3}).startswith(
        "training.clip: unknown key; known are steps, prompts_per_step, "
    )
    assert refused({"grid.0.rhoo": 1e-2}) == "grid.0.rhoo: unknown key; did you mean rho?"
    assert refused({"base.architecture.width": 3}).startswith("base.architecture.width: unknown key; known are ")
    line = refused({"sources.stories_small.sede": 3, "sources.stories_small.seed": GONE})
    assert line == "sources.stories_small.sede: unknown key; did you mean seed? (and 1 more)"
    assert refused({"engines.fast": {"dtype": "float32", "quick": True}}).startswith(
        "engines.fast.quick: unknown key; known are dtype, "
    )


def test_what_a_key_may_have_been_is_one_that_can_stand_there(refused):
    """Of a source of this kind; where a table's entry is called as a key is; of the file and not of the experiment."""
    assert refused({"sources.stories_small.split": "test"}) == (
        "sources.stories_small.split: unknown key; known are kind, generator, count, seed, steps"
    )
    found = refused({"engines.noise": {"dtyp": "float32"}})
    assert found == "engines.noise.dtyp: unknown key; did you mean dtype? (and 1 more)"
    assert refused({"mismatch": {"engine": ["fp32"]}}).startswith("mismatch.engine: unknown key; did you mean engines?")
    assert refused({"exends": "tiny"}) == "exends: unknown key; did you mean extends?"
    assert refused({"training.seed": 1}).startswith("training.seed: unknown key; known are ")


def test_a_misspelt_key_is_named_and_not_only_the_one_that_is_missing_for_it(refused):
    message = refused({"training.learning_rate": GONE, "training.learning_rte": 1e-3})
    assert message == "training.learning_rte: unknown key; did you mean learning_rate? (and 1 more)"


def test_a_fault_of_the_catalogue_names_the_catalogue(edit, config):
    path = config / "catalogue" / "engines.yaml"
    path.write_text(path.read_text(encoding="utf-8") + "odd: {dtype: float8}\n", encoding="utf-8")
    with pytest.raises(DvpError, match=rf"^{re.escape(str(path))}: engines\.odd\.dtype: .* found 'float8'$"):
        edit({})
    # An entry of the experiment's own is the experiment's fault, although the catalogue has one of that name.
    own = config / "experiments" / "smoke.yaml"
    with pytest.raises(DvpError, match=rf"^{re.escape(str(own))}: engines\.odd\.dtype: .* found 'float9'$"):
        edit({"engines.odd": {"dtype": "float9"}})


@pytest.mark.parametrize("rho", [0, 1, 1.5, -1, 0.0, 1.0, "abc", True, math.nan, "nan", math.inf, "exp(-0)", "e--1"])
@pytest.mark.parametrize("listed", [False, True])
def test_impossible_rho(refused, rho, listed):
    message = refused({"grid.1.rho": [1e-2, rho] if listed else rho})
    assert message == (f"grid.1.rho: ρ must lie in (0, 1), written like 0.01 or exp(-13); found {rho!r}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Every method says itself whether it takes a ρ.
        ({"grid.1.rho": GONE}, "grid[1]: method 'dvp_mis' needs rho"),
        ({"grid.0.rho": 1e-2}, "grid[0]: method 'rloo' takes no rho"),
        ({"grid.1.rho": []}, "grid.1.rho: expected at least 1 of them, found 0"),
        ({"grid.0.method": []}, "grid.0.method: expected at least 1 of them, found 0"),
        ({"grid.0.engine": []}, "grid.0.engine: expected at least 1 of them, found 0"),
        ({"grid": []}, "grid: expected at least 1 of them, found 0"),
        ({"seeds": []}, "seeds: expected at least 1 of them, found 0"),
        # Names that lead nowhere.
        ({"data.train": "nope"}, "data.train: 'nope' is not defined; known are "),
        ({"data.evaluation": ["nope"]}, "data.evaluation: 'nope' is not defined; known are "),
        ({"grid.0.method": "rlooo"}, "grid[0].method: 'rlooo' is not defined; did you mean rloo?"),
        ({"data.evaluation": ["stories_small"]}, "data: evaluation: 'stories_small' is the source that is trained on"),
        ({"base.source": "nope"}, "base.source: 'nope' is not defined; known are "),
        ({"base.source": "gsm8k"}, "base.source: expected a generated source, 'gsm8k' is not one"),
        ({"data.chat": True}, "data.chat: a base model that is trained here has no chat template; expected false"),
        ({"evaluation.engine": "nope"}, "evaluation.engine: 'nope' is not defined; known are "),
        ({"grid.0.engine": ["fp32", "nope"]}, "grid[0].engine: 'nope' is not defined; known are "),
        ({"grid.1.method": "nope"}, "grid[1].method: 'nope' is not defined; known are "),
        ({"report.task": "aime25"}, "report.task: 'aime25' is not defined; known are held_out"),
        ({"report.reference": "nope"}, "report.reference: 'nope' is not defined; known are "),
        ({"report.reference": "rloo_tis"}, "report.reference: method 'rloo_tis' is not in the grid"),
        ({"training.deepspeed": "zero9"}, "training.deepspeed: "),
        # Numbers that do not fit together.
        (
            {"training.tokens_per_micro_batch": 47},
            "training: tokens_per_micro_batch (47) must be at least max_response_tokens (48)",
        ),
        (
            {"training.tokens_per_micro_batch": 99, "training.max_prompt_tokens": 60},
            "training: tokens_per_micro_batch (99) must be at least max_prompt_tokens + max_response_tokens (108)",
        ),
        ({"training.gpus": 3}, "training: gpus × nodes (3) must divide prompts_per_step × group_size (16)"),
        (
            {"engines.coarse": {"dtype": "bfloat16", "tensor_parallel": 4}, "training.gpus": 2},
            "grid[1].engine: tensor_parallel of 'coarse' (4) must divide training.gpus (2)",
        ),
        ({"base.architecture.kv_heads": 3}, "base.architecture: heads (2) must be a multiple of kv_heads (3)"),
        ({"sources.stories_small.steps": [4, 2]}, "sources.stories_small: steps: expected [fewest, most], found"),
        (
            {"sources.stories_small.generator": "chains", "sources.stories_small.steps": [7, 14]},
            "sources.stories_small: steps: chains have at most 13 rounds, found [7, 14]",
        ),
        (
            {"sources.stories_small.generator": "shortest_path", "sources.stories_small.steps": [1, 4]},
            "sources.stories_small: steps: puzzles have sizes of 2 to 12, found [1, 4]",
        ),
        (
            {"sources.stories_small.generator": "graph_color", "sources.stories_small.steps": [4, 20]},
            "sources.stories_small: steps: puzzles have sizes of 2 to 12, found [4, 20]",
        ),
        (
            {"methods.odd": PLAIN | {"importance": {"lower": 3.0, "upper": 2.0}}},
            "methods.odd.importance: lower (3.0) must not exceed upper (2.0)",
        ),
        (
            {"methods.odd": PLAIN | {"importance": "icepop", "loss": "gspo"}},
            "methods.odd: loss gspo takes an importance correction of level none, sequence or geometric",
        ),
        (
            {"methods.odd": PLAIN | {"advantage": "otb", "loss": "gspo"}},
            "methods.odd: loss gspo takes one advantage a sequence; otb gives one a token",
        ),
        (
            {"methods.odd": PLAIN | {"loss": {"kind": "reinforce", "clip_low": 0.2}}},
            "methods.odd.loss.clip_low: unknown key",
        ),
        ({"methods.odd": PLAIN | {"loss": "ppo2"}}, "methods.odd.loss: no loss is called 'ppo2'; known are cispo"),
        (
            {"methods.odd": PLAIN | {"loss": {"kind": ["ppo"]}}},
            "methods.odd.loss: no loss is called ['ppo']; known are cispo",
        ),
        (
            {"methods.odd": PLAIN | {"importance": {"preset": ["mis"]}}},
            "methods.odd.importance: no correction is called ['mis']; known are geo_rs",
        ),
        ({"methods.odd": PLAIN | {"safe_vocabulary": {"rule": ["fixed"]}}}, "methods.odd.safe_vocabulary: "),
        (
            {"methods.odd": PLAIN | {"loss": {"clip_low": 0.1}}},
            "methods.odd.loss: kind is missing; expected one of cispo, clip_higher, gspo, ppo, reinforce",
        ),
        (
            {"methods.odd": PLAIN | {"safe_vocabulary": {}}},
            "methods.odd.safe_vocabulary: rule is missing; expected one of fixed, margin, engine_only",
        ),
        (
            {"methods.odd": PLAIN | {"mask": {}}},
            "methods.odd.mask: kind is missing; expected one of off_policy, divergence, spurious",
        ),
        ({"sources.odd": {}}, "sources.odd: kind is missing; expected one of generated, hub, file"),
        ({"methods.odd": PLAIN | {"importance": "mis2"}}, "methods.odd.importance: no correction is called 'mis2'"),
        ({"methods.odd": PLAIN | {"loss": {"kind": "clip_higher", "clip_low": 2.0}}}, "methods.odd.loss.clip_low: "),
        ({"methods.odd": PLAIN | {"importance": {"preset": "mis", "vet": 1e-4}}}, "methods.odd.importance.vet: "),
        ({"methods.odd": PLAIN | {"importance": {"level": "none", "upper": 2.0}}}, "methods.odd.importance: level"),
        ({"methods.odd": PLAIN | {"advantage": "best"}}, "methods.odd.advantage: no advantage is called 'best'; known"),
        ({"methods.odd": PLAIN | {"safe_vocabulary": "best"}}, "methods.odd.safe_vocabulary: "),
        ({"methods.odd": PLAIN | {"safe_vocabulary": "mass_budget"}}, "methods.odd.safe_vocabulary.delta: "),
        (
            {"methods.odd": PLAIN | {"safe_vocabulary": {"rule": "margin", "epsilon": -1.0}}},
            "methods.odd.safe_vocabulary.epsilon: ",
        ),
        (
            {"training.max_response_tokens": 2048} | LONG,
            "training.max_response_tokens: a prompt of 1 and a response of 2048 tokens are longer than the model's "
            "context, 2048 (base.architecture.max_position_embeddings)",
        ),
        (
            {"training.max_prompt_tokens": 1500, "training.max_response_tokens": 1000} | LONG,
            "training.max_response_tokens: a prompt of 1500 and a response of 1000 tokens are longer than",
        ),
        ({"data.limit": 3}, "training.prompts_per_step: 4 are more than the problems to train on, 3"),
        ({"sources.stories_small.count": 27}, "training.prompts_per_step: 4 are more than the problems to train on, 3"),
        ({"sources.stories_small.count": 9}, "training.prompts_per_step: 4 are more than the problems to train on, 0"),
        ({"data.prompt_template": "{{problem}}"}, "data.prompt_template: expected {problem} in one pair of braces"),
        (
            {"data.prompt_template": "{problem} Answer: \boxed{}"},
            "data.prompt_template: a control character, '\\x08', before 'oxed{}': most likely \\boxed with",
        ),
        ({"data.unreadable_answers": 1.1}, "data.unreadable_answers: Input should be less than or equal to 1"),
        (
            {"evaluation.temperature": 0.0},
            "evaluation: samples_per_problem: held_out: expected 1 at temperature 0 (greedy), found 2",
        ),
        ({"evaluation.max_response_tokens": 2048}, "evaluation.max_response_tokens: a prompt of 1 and a response of"),
        ({"training.minibatches": 3}, "training: minibatches (3) must divide prompts_per_step (4)"),
        (
            {"training.synchronise_every": 3},
            "training: checkpoint_every (2) must be a multiple of synchronise_every (3)",
        ),
        # Numbers that cannot be.
        ({"training.steps": 0}, "training.steps: "),
        ({"training.steps": 2.0}, "training.steps: "),
        ({"training.steps": "3"}, "training.steps: "),
        ({"training.steps": True}, "training.steps: "),
        ({"training.learning_rate": 0.0}, "training.learning_rate: "),
        ({"training.learning_rate": "fast"}, "training.learning_rate: "),
        ({"training.learning_rate": math.nan}, "training.learning_rate: "),
        ({"training.learning_rate": math.inf}, "training.learning_rate: "),
        ({"training.temperature": math.inf}, "training.temperature: "),
        ({"training.temperature": 0.009}, "training.temperature: Input should be greater than or equal to 0.01"),
        ({"evaluation.temperature": 0.009}, "evaluation.temperature: expected 0 or at least 0.01, found 0.009"),
        ({"training.adam_betas": [0.9]}, "training.adam_betas: "),
        ({"training.adam_betas": [0.9, 1.0]}, "training.adam_betas.1: "),
        ({"evaluation.top_p": 0.0}, "evaluation.top_p: "),
        ({"seeds": [-1]}, "seeds.0: "),
        ({"seeds": [2**32]}, "seeds.0: Input should be less than or equal to 4294967295, found 4294967296"),
        ({"evaluation.seed": -1}, "evaluation.seed: "),
        ({"evaluation.seed": 2**32}, "evaluation.seed: "),
        ({"base.seed": -1}, "base.seed: "),
        ({"base.seed": 2**32}, "base.seed: "),
        ({"sources.stories_small.seed": -1}, "sources.stories_small.seed: "),
        ({"sources.stories_small.seed": 2**32}, "sources.stories_small.seed: "),
        ({"training.learning_rate": 1e300}, "training.learning_rate: Input should be less than or equal to 1, found"),
        ({"base.warm_start.learning_rate": 1.5}, "base.warm_start.learning_rate: "),
        ({"base.architecture.head_dim": 33}, "base.architecture.head_dim: Input should be a multiple of 2, found 33"),
        (
            {"methods.odd": PLAIN | {"safe_vocabulary": {"rule": "top_k", "k": 2**31}}},
            "methods.odd.safe_vocabulary.k: Input should be less than or equal to 2147483647, found",
        ),
        # What stands in tables.
        (
            {"methods.odd": PLAIN | {"label": "a\nb"}},
            "methods.odd.label: expected one line without control characters, found 'a\\nb'",
        ),
        ({"methods.odd": PLAIN | {"label": "a\u2028b"}}, "methods.odd.label: expected one line without control"),
        ({"methods.odd": PLAIN | {"label": "a\x1bb"}}, "methods.odd.label: expected one line without control"),
        ({"scale": "One.\n"}, "scale: expected one line without control characters, found 'One.\\n'"),
        ({"report.declarations": ["a\tb"]}, "report.declarations.0: expected one line without control"),
        ({"base.warm_start.careless_error": 1.5}, "base.warm_start.careless_error: "),
        ({"base.kind": "magic"}, "base: "),
        ({"base.kind": GONE}, "base: kind is missing; expected one of trained, hub, local"),
        ({"seeds": GONE}, "seeds: is missing"),
        # What is there twice.
        ({"seeds": [0, 1, 0]}, "seeds: 0 is listed twice"),
        ({"grid.0.engine": ["fp32", "fp32"]}, "grid: run method~rloo/engine~fp32/rho~none/seed~0 is listed twice"),
        (
            {"grid.0.engine": "coarse", "grid.1.method": "rloo", "grid.1.rho": GONE},
            "grid: run method~rloo/engine~coarse/rho~none/seed~0 is listed twice",
        ),
        ({"grid.1.rho": [0.01, 1e-2]}, "grid.1.rho: ρ 0.01 is listed twice"),
        ({"grid.1.rho": ["exp(-13)", "exp(-13.0)"]}, "grid.1.rho: ρ exp(-13.0) is listed twice"),
        # Tasks.
        ({"evaluation.samples_per_problem.aime25": 4}, "evaluation.samples_per_problem: 'aime25' is not defined"),
        (
            {"evaluation.samples_per_problem": {}},
            "evaluation.samples_per_problem: 'held_out' is missing; expected a number for each of held_out",
        ),
        ({"evaluation.samples_per_problem.held_out": 0}, "evaluation.samples_per_problem.held_out: "),
        ({"data.held_out": 0}, "data: no evaluation task; set data.held_out or data.evaluation"),
        ({"data.evaluation": ["held_out"], "sources.held_out": HUB}, "data.evaluation: 'held_out' is reserved"),
        ({"data.evaluation": ["aime25", "aime25"]}, "data.evaluation: aime25 is listed twice"),
        # Sources and prompts.
        ({"data.prompt_template": "Solve it."}, "data.prompt_template: expected a text that contains {problem}"),
        ({"data.prompt_template": {"problem": None}}, "data.prompt_template: "),
        ({"sources.remote": HUB, "data.train": "remote"}, "sources.remote.revision: not pinned; set it to the "),
        ({"sources.remote": HUB | {"revision": REVISION[:7]}}, "sources.remote.revision: "),
        ({"sources.remote": HUB | {"revision": "main"}}, "sources.remote.revision: "),
        ({"base": {"kind": "hub", "path": "a/b"}}, "base.revision: is missing"),
        ({"base": {"kind": "hub", "path": "a/b", "revision": REVISION + "0"}}, "base.revision: "),
        ({"engines": None}, "engines: expected a mapping of names to entries"),
        ({"sources": ["stories"]}, "sources: expected a mapping of names to entries"),
        (
            {"engines.own": {"dtype": "float32"}},
            "engines.own: this name is reserved, as evaluation.also has a meaning for it",
        ),
        (
            {"engines.training": {"dtype": "float32"}},
            "engines.training: this name is reserved, as evaluation.also has a meaning for it",
        ),
        ({"engines": {"a/b": {"dtype": "float32"}}}, "engines.a/b.[key]: "),
        # Its own name.
        ({"name": "tiny"}, "name: expected 'smoke', as the file is called, found 'tiny'"),
        ({"name": GONE}, "name: expected 'smoke', as the file is called, found None"),
        ({"a\nb": 1}, "a b: unknown key"),
        # What could never act.
        (
            {"training.report_sets": True, "grid.1.method": "dvp_trainer_only", "grid.2.method": "rloo"},
            "training.report_sets: no method of the grid prunes in the engine; there are no sets",
        ),
        (
            {"training.steps": 8, "grid.0.method": "rloo_length_decay"},
            "grid[0]: method 'rloo_length_decay': learning_rate_decay.patience (8) must be below training.steps (8)",
        ),
        # A tool.
        ({"tools": {"kind": "shell"}}, "tools: kind: expected one of calculator, python, found shell"),
        ({"tools": {}}, "tools: kind is missing; expected one of calculator, python"),
        ({"tools": {"kind": "calculator", "seconds": 1.0}}, "tools.seconds: unknown key"),
        ({"tools": {"kind": "python", "processes": 1}}, "tools.processes: "),
        ({"tools": {"kind": "calculator", "max_turns": 1}}, "tools.max_turns: "),
        ({"tools": {"kind": "calculator", "call": ["<t>"]}}, "tools.call: "),
        ({"tools": {"kind": "calculator", "call": ["|", "|"]}}, "tools.call: expected two different texts, found '|'"),
        ({"tools": {"kind": "calculator"}}, "tools.max_answer_tokens (64) must be below training.max_response_tokens"),
        ({"tools": TOOLS, "evaluation.engine": "nope"}, "evaluation.engine: 'nope' is not defined"),
        ({"tools": TOOLS, "grid.0.engine": "nope"}, "grid[0].engine: 'nope' is not defined"),
        ({"tools": TOOLS} | SPREAD, "tools: engine 'fp32' is spread over several GPUs; expected tensor_parallel 1"),
    ],
)  # fmt: skip
def test_what_is_impossible_is_refused_in_one_line_that_names_the_key(refused, changes, message):
    assert refused(changes).startswith(message)


def test_a_response_may_fill_the_context_and_that_of_a_pretrained_model_counts_where_it_is_known(edit, refused):
    assert edit({"training.max_response_tokens": 2047} | LONG).training.max_response_tokens == 2047
    hub = {"kind": "hub", "path": "a/b", "revision": REVISION}
    edit({"base": hub, "training.max_response_tokens": 9000} | LONG)
    shape = load_experiment("paper_8b", ROOT / "config").base.architecture.model_dump()
    stated = hub | {"architecture": shape | {"max_position_embeddings": 8192}}
    message = refused({"base": stated, "training.max_response_tokens": 8192} | LONG)
    assert message.endswith("longer than the model's context, 8192 (base.architecture.max_position_embeddings)")


def test_an_unpinned_source_that_is_not_used_does_no_harm(edit):
    edit({"sources.remote": HUB})


def test_a_missing_deepspeed_file_is_named(refused, config):
    assert refused({"training.deepspeed": "zero9"}) == (
        f"training.deepspeed: {config / 'deepspeed' / 'zero9.json'} does not exist"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON with zero_optimization.stage"),
        ("{}", "expected JSON with zero_optimization.stage"),
        ('{"zero_optimization": {"stage": 0}}', "zero_optimization.stage: expected 1, 2 or 3, found 0"),
        ('{"zero_optimization": {"stage": true}}', "zero_optimization.stage: expected 1, 2 or 3, found True"),
        (
            '{"zero_optimization": {"stage": 1, "compute_grad_norm": false}}',
            "zero_optimization.compute_grad_norm: a step reports the norm of its gradient; remove it",
        ),
        (
            '{"zero_optimization": {"stage": 3}, "torch_autocast": {"enabled": true, "dtype": "bfloat16"}}',
            'torch_autocast: expected {"enabled": true, "dtype": "bfloat16", "lower_precision_safe_modules": []} or no '
            "such key",
        ),
        (
            '{"zero_optimization": {"stage": 1, "stage": 2}}',
            "expected JSON with zero_optimization.stage (ValueError: key 'stage' is there twice)",
        ),
        (
            '{"zero_optimization": {"stage": 1}, "gradient_clipping": 2}',
            "gradient_clipping: expected zero_optimization and torch_autocast alone; `training` sets the rest",
        ),
        (
            '{"zero_optimization": {"stage": 1}, "gradient_cliping": 2}',
            "gradient_cliping: expected zero_optimization and torch_autocast alone; `training` sets the rest",
        ),
    ],
)
def test_a_deepspeed_file_that_cannot_be_run_is_named(config, content, message):
    file = config / "deepspeed" / "zero1.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(DvpError) as error:
        load_experiment("tiny", config)
    assert str(error.value).startswith(f"{file}: {message}")


def test_a_deepspeed_file_is_nested_as_deeply_as_can_be_written_down(config, tmp_path):
    """From 256 levels on, pydantic writes nothing down; from some thousand on, Python reads nothing."""
    file = config / "deepspeed" / "zero1.json"
    for levels, message in (
        (32, "nested too deeply, expected at most 32 levels"),
        (300, "nested too deeply, expected at most 32 levels"),
        (2000, "expected JSON with zero_optimization.stage (ValueError: nested too deeply)"),
    ):
        file.write_text('{"zero_optimization": {"stage": 1, "x": %s}}' % ("[" * levels + "]" * levels))
        with pytest.raises(DvpError) as error:
            load_experiment("tiny", config)
        assert str(error.value) == f"{file}: {message}"
    file.write_text('{"zero_optimization": {"stage": 1, "x": %s}}' % ("[" * 30 + "]" * 30))
    experiment = load_experiment("tiny", config)
    write_resolved(experiment, tmp_path / "written")
    assert read_resolved(tmp_path / "written" / "config.yaml").deepspeed == experiment.deepspeed


def test_a_deepspeed_file_says_in_which_type_the_trainer_multiplies(config):
    assert load_experiment("tiny", config).trainer_dtype == "float32"
    (config / "deepspeed" / "zero1.json").write_text(
        json.dumps({"zero_optimization": {"stage": 1}, "torch_autocast": BF16_AUTOCAST}), encoding="utf-8"
    )
    assert load_experiment("tiny", config).trainer_dtype == "bfloat16"


def test_an_edited_deepspeed_file_is_another_training_and_the_same_base(config):
    before = load_experiment("tiny", config)
    (config / "deepspeed" / "zero1.json").write_text(
        '{"zero_optimization": {"stage": 1, "overlap_comm": false}}', encoding="utf-8"
    )
    after = load_experiment("tiny", config)
    run = before.runs[0]
    assert after.config_hash("base") == before.config_hash("base")
    assert after.config_hash("train", run) != before.config_hash("train", run)


@pytest.mark.parametrize(
    "name", ["../x", "../experiments/tiny", "/etc/passwd", "a/b", "", ".tiny", "Tiny", "tiny\n", "tiny.yaml"]
)
def test_an_experiments_name_is_no_path(name, config):
    with pytest.raises(DvpError, match=r"expected the name of a file in .*, without \.yaml"):
        load_experiment(name, config)


def test_an_unknown_experiment_and_a_missing_catalogue_are_named(config):
    known = ", ".join(EXPERIMENTS)
    with pytest.raises(DvpError, match=rf"/config/experiments/nope\.yaml: no such experiment; known are {known}$"):
        load_experiment("nope", config)
    (config / "catalogue" / "methods.yaml").unlink()
    with pytest.raises(DvpError, match=r"/config/catalogue/methods\.yaml: no such file$"):
        load_experiment("smoke", config)
    with pytest.raises(DvpError, match="no such experiment; run this in the repository's root"):
        load_experiment("smoke", Path("elsewhere"))


@pytest.mark.parametrize("name", ["smoke", "smoke_axes"])
def test_what_is_not_resolved_is_no_results(name, config):
    with pytest.raises(DvpError, match=r"yaml: not a resolved experiment; expected one that dvp wrote, results/NAME/"):
        read_resolved(config / "experiments" / f"{name}.yaml")


# --- settings, as Snakemake's --config takes them ---


def test_what_needs_more_problems_than_there_are_is_named():
    asked = load_experiment("mismatch", ROOT / "config")
    asked = asked.model_copy(update={"mismatch": asked.mismatch.changed(problems=99)})
    assert asked.problems_missing({None: 99, "held_out": 1}) is None
    assert asked.problems_missing({None: 98}) == "mismatch.problems: 99 are more than the problems to train on, 98"
    asked = load_experiment("bias_length", ROOT / "config")
    count, task = asked.bias.problems, asked.bias.tasks[-1]
    assert asked.problems_missing({None: 99, **dict.fromkeys(asked.data.tasks, count)}) is None
    line = f"bias.problems: {count} are more than the problems of task '{task}', {count - 1}"
    assert asked.problems_missing({task: count - 1}) == line


def test_settings_on_the_command_line_replace_those_of_the_file(config):
    assert read_settings([], config) == {"experiment": "tiny", "results": "results"}
    assert read_settings(["experiment=smoke", "results=a=b"], config) == {"experiment": "smoke", "results": "a=b"}


@pytest.mark.parametrize("pair", ["experimnt=tiny", "experiment", "=tiny", ""])
def test_a_setting_that_does_not_exist_is_refused(config, pair):
    with pytest.raises(
        DvpError, match=f"^--config {pair}: expected KEY=VALUE with one of the keys experiment, results$"
    ):
        read_settings([pair], config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("experiment: tiny", "results: is missing"),
        ("experiment: tiny\nresults:", "results: Input should be a valid string, found None"),
        ("experiment: tiny\nresults: ''", "results: String should have at least 1 character, found ''"),
        ("experiment: [tiny]\nresults: results", "experiment: Input should be a valid string, found ['tiny']"),
        ("experiment: tiny\nresult: results", "result: unknown key; did you mean results? (and 1 more)"),
        ("experiment: tiny\nresults: results\nevidence: {a: 3}", "evidence.a: Input should be a valid string, found 3"),
    ],
)
def test_a_setting_that_is_missing_or_misspelt_is_named(config, text, message):
    if "evidence" not in text:
        text += "\nevidence: {tiny: tiny}"
    (config / "config.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(DvpError, match=f"^{re.escape(f'{config}/config.yaml: {message}')}$"):
        read_settings(["experiment=smoke"], config)


@pytest.mark.parametrize(
    ("written", "folder"),
    [
        *(("there/", "there"), ("./there//now/", "there/now"), ("/there/", "/there"), ("../there", "../there")),
        *(("~/there", "HOME/there"), ("a b/ü'~", "a b/ü'~")),
    ],
)
def test_a_folder_of_results_is_as_snakemake_has_it(config, monkeypatch, tmp_path, written, folder):
    """A slash too many is a warning for every file; `~` would be a folder of that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = folder.replace("HOME", str(tmp_path))
    assert read_settings([f"results={written}"], config)["results"] == folder
    settings = {"experiment": "tiny", "results": written, "evidence": {"tiny": "tiny"}}
    assert check_settings(settings).results == folder
    (config / "config.yaml").write_text(json.dumps(settings), encoding="utf-8")
    assert read_settings([], config)["results"] == folder


@pytest.mark.parametrize("folder", ["a{b}", "{experiment}", "a}", ".", "./", "/", "~nobody_here/x", "a\nb"])
def test_a_folder_that_results_cannot_have_is_refused(config, folder):
    with pytest.raises(DvpError, match=r"^--config: results: expected .*$"):
        read_settings([f"results={folder}"], config)
    with pytest.raises(DvpError, match=r"--configfile or --config: results: expected .*$"):
        check_settings({"experiment": "tiny", "results": folder, "evidence": {"tiny": "tiny"}})


def test_a_setting_without_a_value_is_refused(config):
    with pytest.raises(DvpError, match=r"^--config results=: expected KEY=VALUE, found no value$"):
        read_settings(["results="], config)


# --- ρ ---

OPEN_UNIT = st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True)


@given(OPEN_UNIT)
def test_rho_is_read_back_from_every_way_to_write_it(rho):
    assert parse_rho(rho) == rho
    assert parse_rho(repr(rho)) == rho
    assert parse_rho(f"{rho:.17e}") == rho


@given(st.decimals(min_value="0.001", max_value=700, places=3))
def test_rho_of_an_exponent(exponent):
    assert parse_rho(f"exp(-{exponent})") == pytest.approx(math.exp(-float(exponent)), rel=1e-12)


@given(st.one_of(st.floats().filter(lambda x: not 0 < x < 1), st.integers(), st.booleans(), st.none()))
def test_rho_outside_the_unit_interval(rho):
    with pytest.raises(ValueError, match=re.escape(repr(rho))):
        parse_rho(rho)


@given(st.text())
def test_rho_as_a_text_is_a_plain_number_or_refused(text):
    try:
        rho = parse_rho(text)
    except ValueError:
        return
    assert 0 < rho < 1
    # It becomes part of a path.
    assert re.fullmatch(r"[0-9a-zE.+-]+", rho_in_path(text))


@pytest.mark.parametrize(
    "text", [" 0.01", "0.01\n", "0.0_1", "٠.٥", "exp(-13) ", "1e-2/3", "exp(13)", "exp(-1e1)", "-0.5", ""]
)
def test_rho_texts_that_would_make_odd_paths(text):
    with pytest.raises(ValueError, match="ρ must lie in"):
        parse_rho(text)


@pytest.mark.parametrize("text", ["e-13", "exp-13"])
def test_e_13_is_a_keystroke_from_1e_13_and_refused(text, refused):
    line = f"grid.1.rho: ρ: write exp(-13), or 1e-13 if that is meant; found '{text}'"
    assert refused({"grid.1.rho": text}) == line


def test_rho_in_a_path_needs_no_quotes_in_a_shell():
    assert [rho_in_path(rho) for rho in ("exp(-13)", "exp(-0.5)", "1e-2", None)] == [
        "exp-13",
        "exp-0.5",
        "1e-2",
        "none",
    ]


def test_rho_keeps_all_its_digits(edit):
    experiment = edit({"grid.1.rho": [0.123456789, 0.12345678, 0.9999999]})
    assert [run.rho_value for run in experiment.runs if run.rho] == [0.123456789, 0.12345678, 0.9999999]


# --- runs ---


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_runs_path_says_what_it_is_and_finds_it(name):
    experiment = load_experiment(name, ROOT / "config")
    for run in experiment.runs:
        match = re.fullmatch(r"method~([^/]+)/engine~([^/]+)/rho~([^/]+)((?:/[a-z_]+~[^/]+)*)/seed~([0-9]+)", run.path)
        method, engine, rho, settings, seed = match.groups()
        assert settings == settings_path(run.training)
        assert (method, engine, int(seed)) == (run.method, run.engine, run.seed)
        assert rho == rho_in_path(run.rho)
        assert experiment.run(run.path) == run
        assert (run.rho_value is not None) == experiment.methods[run.method].takes_rho
    assert len({run.path for run in experiment.runs}) == len(experiment.runs)


def test_runs_of_tiny():
    runs = load_experiment("tiny", ROOT / "config").runs
    assert len(runs) == 10
    assert runs[0] == Run(method="rloo", engine="fp32", rho=None, seed=0)
    assert [run.path for run in runs if run.rho == "exp(-13)"] == [
        f"method~{method}/engine~coarse/rho~exp-13/seed~{seed}" for method in ("dvp", "dvp_mis") for seed in (0, 1)
    ]


@pytest.mark.parametrize("path", ["", "base", "method~rloo", "method~rloo/engine~fp32/rho~none/seed~2", "../x"])
def test_an_unknown_run_is_named(path):
    experiment = load_experiment("tiny", ROOT / "config")
    with pytest.raises(
        DvpError, match=rf"^run '{re.escape(path)}' is not in the grid of experiment 'tiny'; one that is: method~"
    ):
        experiment.run(path)


# --- config_hash ---

RUN = Run(method="rloo", engine="coarse", rho=None, seed=0)
PRUNED = Run(method="dvp_mis", engine="coarse", rho="0.01", seed=0)
BEFORE = {"prepare", "base", "evaluate base"}
OF_RUN = {"train", "convert", "evaluate"}
ALL = BEFORE | OF_RUN


def config_hashes(experiment: Experiment, run: Run) -> dict[str, str]:
    hashes = {stage: experiment.config_hash(stage, run, "held_out") for stage in OF_RUN}
    hashes |= {stage: experiment.config_hash(stage) for stage in ("prepare", "base")}
    return hashes | {"evaluate base": experiment.config_hash("evaluate", None, "held_out")}


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({}, set()),
        # How results are shown concerns no stage before the report.
        ({"description": "x"}, set()),
        ({"scale": "x"}, set()),
        ({"methods.rloo.label": "x"}, set()),
        ({"report.declarations": ["x"]}, set()),
        ({"report.reference": "dvp_mis"}, set()),
        # Nor do the other runs.
        ({"seeds": [0, 1]}, set()),
        ({"engines.bf16.dtype": "float16"}, set()),
        ({"engines.bf16.tensor_parallel": 2}, set()),
        ({"methods.dvp_mis.importance.upper": 3.0}, set()),
        ({"grid.1.rho": ["0.01", "0.02"]}, set()),
        ({"grid.0.engine": ["fp32", "coarse", "bf16"]}, set()),
        ({"sources.stories.seed": 7}, set()),
        # Over how many GPUs a run is spread is part of it: sums are taken in another order.
        ({"training.gpus": 2}, set()),
        # Its engine has no sets to report.
        ({"training.report_sets": True}, set()),
        # Its own engine and method.
        ({"engines.coarse.weight_rounding": "int3"}, OF_RUN),
        ({"methods.rloo.importance.level": "token"}, OF_RUN),
        ({"training.learning_rate": 2e-4}, OF_RUN),
        ({"training.deepspeed": "zero1"}, OF_RUN),
        # Evaluation.
        ({"evaluation.temperature": 0.5}, {"evaluate", "evaluate base"}),
        ({"evaluation.samples_per_problem.held_out": 3}, {"evaluate", "evaluate base"}),
        ({"evaluation.engine": "bf16"}, {"evaluate", "evaluate base"}),
        ({"engines.fp32.kv_cache_dtype": "fp8"}, {"evaluate", "evaluate base"}),
        # Upstream.
        ({"base.warm_start.steps": 31}, ALL - {"prepare"}),
        ({"base.seed": 1}, ALL - {"prepare"}),
        ({"base.source": "stories"}, ALL - {"prepare"}),
        ({"sources.stories_small.seed": 1}, ALL),
        ({"data.held_out": 23}, ALL),
        ({"data.prompt_template": "{problem}"}, ALL),
        ({"data.decontamination.ngram": 12}, ALL),
        # A base model that is trained here learns how a call is written.
        ({"tools": {"kind": "calculator", "max_answer_tokens": 20}}, ALL - {"prepare"}),
    ],
)
def test_a_stage_depends_on_its_own_parts_and_no_other(changes, changed):
    resolved = yaml.safe_load(dump_experiment(load_experiment("smoke", ROOT / "config")))
    before = config_hashes(parse_experiment(resolved, Path("x")), RUN)
    after = config_hashes(parse_experiment(put(resolved, changes), Path("x")), RUN)
    assert {stage for stage in before if before[stage] != after[stage]} == changed


def test_what_only_a_plan_uses_concerns_no_stage():
    resolved = yaml.safe_load(dump_experiment(load_experiment("paper_8b", ROOT / "config")))
    before = parse_experiment(resolved, Path("x"))
    changes = {"base.architecture": None, "sources.aime25.problems": 31, "sources.dapo_math_17k.problems": None}
    after = parse_experiment(put(resolved, changes), Path("x"))
    for stage in STAGES:
        run = before.runs[0]
        assert before.config_hash(stage, run, "aime25") == after.config_hash(stage, run, "aime25")


def test_the_base_models_source_counts_even_where_nothing_is_trained_on_it():
    resolved = yaml.safe_load(dump_experiment(load_experiment("smoke", ROOT / "config")))
    resolved["base"]["source"] = "stories"
    before = config_hashes(parse_experiment(resolved, Path("x")), RUN)
    after = config_hashes(parse_experiment(put(resolved, {"sources.stories.seed": 7}), Path("x")), RUN)
    assert {stage for stage in before if before[stage] != after[stage]} == ALL - {"prepare"}


def test_k_of_another_task_does_not_concern_this_one():
    resolved = yaml.safe_load(dump_experiment(load_experiment("smoke", ROOT / "config")))
    resolved = put(resolved, {"data.evaluation": ["aime25"], "evaluation.samples_per_problem.aime25": 4})
    before = parse_experiment(resolved, Path("x"))
    after = parse_experiment(put(resolved, {"evaluation.samples_per_problem.aime25": 8}), Path("x"))
    assert config_hashes(before, RUN) == config_hashes(after, RUN)
    assert before.config_hash("evaluate", RUN, "aime25") != after.config_hash("evaluate", RUN, "aime25")
    assert before.config_hash("evaluate", RUN, "aime25") != before.config_hash("evaluate", RUN, "held_out")


def test_a_preflight_depends_on_nothing_that_training_does_not_depend_on():
    """Training waits for it, and is made again where it is."""
    experiment = load_experiment("smoke", ROOT / "config")
    for run in experiment.runs:
        of_run = settings_of_stage(experiment, "train", run, None, None, None)
        for name, part in settings_of_stage(experiment, "preflight", None, None, None, run.engine).items():
            assert of_run[name] == part
    assert experiment.config_hash("preflight", engine="fp32") != experiment.config_hash("preflight", engine="coarse")


@pytest.mark.parametrize(
    ("name", "preflight", "engines"),
    [
        ("smoke", "auto", []),
        ("smoke", "always", ["fp32", "coarse"]),
        ("paper_8b", "auto", ["fp32", "bf16"]),
        ("paper_8b", "never", []),
    ],
)
def test_each_engine_of_the_grid_has_a_preflight_where_it_is_asked_for(name, preflight, engines):
    experiment = load_experiment(name, ROOT / "config").model_copy(update={"preflight": preflight})
    assert experiment.preflights == engines


def test_a_run_depends_on_whether_sets_are_reported_where_its_engine_would_not_report_them_in_any_case():
    asked = load_experiment("remedies", ROOT / "config")
    plain = asked.model_copy(update={"training": asked.training.changed(report_sets=False)})
    others = {run.method for run in asked.runs if asked.config_hash("train", run) != plain.config_hash("train", run)}
    assert others == {"dvp", "dvp_mis"}  # and not mask replay, nor what has no safe vocabulary


def test_runs_that_differ_have_different_config_hashes():
    experiment = load_experiment("tiny", ROOT / "config")
    for stage in OF_RUN:
        assert len({experiment.config_hash(stage, run, "held_out") for run in experiment.runs}) == 10
    for stage in ("prepare", "base"):
        assert len({experiment.config_hash(stage, run) for run in experiment.runs}) == 1


def test_a_base_model_depends_on_a_tools_delimiters_only():
    resolved = yaml.safe_load(dump_experiment(load_experiment("smoke", ROOT / "config")))
    tools = {"kind": "calculator", "max_answer_tokens": 20}
    before, turns, delimiters = (
        config_hashes(parse_experiment(put(resolved, {"tools": tools | changes}), Path("x")), RUN)
        for changes in ({}, {"max_turns": 3}, {"call": ["<<", ">>"]})
    )
    assert {stage for stage in before if before[stage] != turns[stage]} == {"evaluate base"} | OF_RUN
    assert {stage for stage in before if before[stage] != delimiters[stage]} == ALL - {"prepare"}
    assert "tools" not in resolved  # what there is not is not written


def test_any_change_concerns_the_report():
    resolved = yaml.safe_load(dump_experiment(load_experiment("smoke", ROOT / "config")))
    config_hash = parse_experiment(resolved, Path("x")).config_hash("report")
    assert re.fullmatch("[0-9a-f]{12}", config_hash)
    for changes in ({"methods.rloo.label": "x"}, {"scale": "x"}, {"evaluation.seed": 1}, {"training.steps": 4}):
        assert parse_experiment(put(resolved, changes), Path("x")).config_hash("report") != config_hash


MISMATCH = {"policies": ["base"], "engines": "coarse", "problems": 2, "responses": 2, "rhos": [1e-2], "margins": [0.1]}
BIAS = {
    "policies": ["base"],
    "engines": ["coarse"],
    "problems": 2,
    "batches": 4,
    "reference_batches": 4,
    "estimators": [{"method": "rloo"}, {"method": ["dvp"], "rho": 1e-2}],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mismatch": MISMATCH | {"engines": ["nope"]}}, "mismatch.engines: 'nope' is not defined; known are "),
        ({"mismatch": MISMATCH | {"engines": ["fp32", "fp32"]}}, "mismatch: base/by~fp32/seed~0 is listed twice"),
        ({"mismatch": MISMATCH | {"rhos": [2.0]}}, "mismatch.rhos: ρ must lie in (0, 1)"),
        ({"mismatch": MISMATCH | {"rhos": [0.1, 1e-2, 0.1]}}, "mismatch.rhos: ρ 0.1 is listed twice"),
        ({"mismatch": MISMATCH | {"margins": [0.0]}}, "mismatch.margins.0: "),
        ({"mismatch": MISMATCH | {"margins": [0.1, 0.2, 1e-1]}}, "mismatch.margins: 0.1 is listed twice"),
        (
            {"mismatch": MISMATCH, "training.temperature": 0.7},
            "training.temperature: `mismatch` measures at temperature 1, found 0.7",
        ),
        (
            {"mismatch": MISMATCH | {"policies": ["foo"]}},
            "mismatch.policies.0: expected base, or a grid point as {method: NAME, engine: NAME}, found 'foo'",
        ),
        ({"mismatch": MISMATCH | {"policies": [{"method": "rloo"}]}}, "mismatch.policies.0.engine: is missing"),
        (
            {"mismatch": MISMATCH | {"policies": [{"method": "rloo", "engine": "bf16"}]}},
            "mismatch.policies: method~rloo/engine~bf16/rho~none is not in the grid, which must train it",
        ),
        ({"bias": BIAS | {"batches": 3}}, "bias.batches: "),
        ({"bias": BIAS | {"estimators": [{"method": "nope"}]}}, "bias.estimators[0].method: 'nope' is not defined"),
        ({"bias": BIAS | {"estimators": [{"method": "dvp"}]}}, "bias.estimators[0]: method 'dvp' needs rho"),
        ({"bias": BIAS | {"estimators": [{"method": "gspo"}]}}, "method 'gspo': expected loss reinforce"),
        ({"bias": BIAS | {"estimators": [{"method": ["rloo", "rloo"]}]}}, "bias.estimators: rloo is listed twice"),
        ({"bias": BIAS | {"tasks": ["stories"]}}, "bias.tasks: 'stories' is not evaluated; tasks are held_out"),
        ({"bias": BIAS | {"tasks": ["held_out"] * 2}}, "bias: base/by~coarse/on~held_out/seed~0 is listed twice"),
        (
            {"bias": BIAS | {"tasks": ["held_out"], "position_bins": [2], "norm_responses": 1}},
            "bias: tasks and position_bins cannot be combined; give one",
        ),
        ({"tools": TOOLS, "bias": BIAS}, "bias: it measures responses without tools; remove `bias` or `tools`"),
    ],
)
def test_a_measurement_that_cannot_be_made_is_refused(refused, changes, message):
    assert message in refused(changes)


def test_a_task_is_measured_by_itself(edit):
    stories = {"kind": "generated", "generator": "stories", "count": 50, "seed": 1, "steps": [3, 3]}
    shared = {"sources.long": stories, "data.evaluation": ["long"], "evaluation.samples_per_problem.long": 1}
    one, both = (edit(shared | {"bias": BIAS | {"tasks": tasks}}) for tasks in (["held_out"], ["held_out", "long"]))
    assert [each.path for each in both.measurements("bias")] == [
        "base/by~coarse/on~held_out/seed~0",
        "base/by~coarse/on~long/seed~0",
    ]
    (first,), (again, other) = one.measurements("bias"), both.measurements("bias")
    assert one.config_hash("bias", measurement=first) == both.config_hash("bias", measurement=again)
    assert both.config_hash("bias", measurement=other) != both.config_hash("bias", measurement=again)
    assert [parts(each) for each in (one, both)] == [["training", "bias"], ["training", "bias", "bias_length"]]


def test_a_measurement_is_measured_again_when_what_it_depends_on_changes_and_no_other(edit):
    trained = {"method": "rloo", "engine": "fp32"}
    sections = {"mismatch": MISMATCH | {"policies": ["base", trained]}, "bias": BIAS}
    first = edit(copy.deepcopy(sections))

    def changed(changes):
        second = edit(copy.deepcopy(sections) | changes)
        pairs = [
            (stage, measurement, second.measurement(stage, measurement.path))
            for stage in ("mismatch", "bias")
            for measurement in first.measurements(stage)
        ]
        return {
            (stage, measurement.path.split("/by~")[0].split("/")[0])
            for stage, measurement, again in pairs
            if first.config_hash(stage, measurement=measurement) != second.config_hash(stage, measurement=again)
        }

    base, policy = ("mismatch", "base"), ("mismatch", "method~rloo")
    assert changed({"training.learning_rate": 0.5}) == {policy}
    assert changed({"mismatch.problems": 3}) == {base, policy}
    assert changed({"bias.estimators": [{"method": "rloo"}]}) == {("bias", "base")}
    # Its files name methods.
    twin = {
        "methods.twin": {"label": "RLOO", "advantage": "rloo"},
        "bias.estimators": [{"method": "twin"}, BIAS["estimators"][1]],
    }
    assert changed(twin) == {("bias", "base")}
    assert changed({"bias.engines": ["coarse", "fp32"]}) == set()
    assert changed({"report.declarations": ["Otherwise."]}) == set()
    assert changed({"training.group_size": 8}) == {policy, ("bias", "base")}
    # Problems with longer prompts are not drawn.
    assert changed({"training.max_prompt_tokens": 50}) == {base, policy, ("bias", "base")}
