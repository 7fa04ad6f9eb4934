"""Reading and writing: experiments, YAML, the catalogue, DeepSpeed's options, the settings of the command line."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from changed import CONFIG, EXPERIMENTS, HUB, PLAIN, REVISION, put
from hypothesis import example, given
from hypothesis import strategies as st

from dvp.cli import main
from dvp.core.importance import PRESETS
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.loading import (
    check_settings,
    dump_experiment,
    load_experiment,
    read_resolved,
    read_settings,
    read_yaml,
    write_resolved,
)
from dvp.experiment.training import BF16_AUTOCAST
from dvp.files import write_text
from hashes import hash_of

SMOKE = load_experiment("smoke", CONFIG)


@pytest.fixture
def config(tmp_path) -> Path:
    """A copy of the configuration, to be edited."""
    return shutil.copytree(CONFIG, tmp_path / "config")


@pytest.fixture
def edit(config):
    """Write experiment `smoke` with changes at dotted keys; what `load_experiment` makes of it."""

    def changed(changes: dict[str, object]) -> Experiment:
        value = put(read_yaml(CONFIG / "experiments" / "start" / "smoke.yaml"), changes)
        (config / "experiments" / "start" / "smoke.yaml").write_text(
            yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
        )
        return load_experiment("smoke", config)

    return changed


# --- what is written and read again ---


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_survives_being_resolved(name, tmp_path):
    experiment = load_experiment(name, CONFIG)
    write_text(tmp_path / "config.yaml", dump_experiment(experiment))
    again = read_resolved(tmp_path / "config.yaml")
    assert again == experiment
    write_resolved(experiment, tmp_path)
    written = read_resolved(tmp_path / "config.yaml")
    assert written == experiment.used == written.used
    assert (written.runs, written.estimators) == (experiment.runs, experiment.estimators)
    assert written.config_hash("report") == experiment.config_hash("report")
    assert 0 < len(written.methods) < len(experiment.methods)
    assert 0 < len(written.sources) < len(experiment.sources)


def test_what_is_written_keeps_its_age_until_it_changes(tmp_path):
    file = tmp_path / "config.yaml"
    write_resolved(SMOKE, tmp_path)
    os.utime(file, (1, 1))
    write_resolved(SMOKE, tmp_path)
    assert file.stat().st_mtime == 1
    write_resolved(SMOKE.model_copy(update={"scale": "another"}), tmp_path)
    assert file.stat().st_mtime > 1


def test_what_is_written_replaces_no_other_experiment(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_bytes(b"\xff\x00")  # damaged: of no use
    write_resolved(SMOKE, tmp_path)
    written = file.read_bytes()
    with pytest.raises(DvpError, match=r"is of experiment 'smoke'; expected a folder of its own for 'tiny'"):
        write_resolved(load_experiment("tiny", CONFIG), tmp_path)
    assert file.read_bytes() == written


def test_resolving_keeps_every_kind_of_value(edit, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    experiment = edit(
        {
            "sources.local": {"kind": "file", "path": str(rows), "columns": {"problem": "p", "answer": "a.0"}},
            "sources.remote": HUB | {"revision": REVISION},
            "data.evaluation": ["local", "remote"],
            "data.limit": 10,
            "data.prompt_template": "ρ “{problem}”: #\n\n",
            "evaluation.samples_per_problem": {"held_out": 1, "local": 2, "remote": 3},
            "methods.masked": PLAIN | {"label": "yes", "importance": {"level": "token", "veto": 1e-9}},
            "methods.clipped": PLAIN | {"importance": "seq_tis", "loss": {"kind": "gspo", "clip_low": 0.1}},
            "methods.mass": PLAIN | {"safe_vocabulary": {"rule": "mass_budget", "delta": 0.1}},
            "engines.coarse": {"dtype": "float16"},  # in place of the catalogue's
            "grid.0.method": ["rloo", "masked", "clipped", "mass"],
            "grid.1.rho": ["exp(-13)", 0.123456789, "1e-2"],
        }
    )
    write_text(tmp_path / "config.yaml", dump_experiment(experiment))
    assert read_resolved(tmp_path / "config.yaml") == experiment
    assert experiment.methods["clipped"].importance == PRESETS["seq_tis"]
    assert experiment.engines["coarse"].weight_rounding == "none"
    assert [run.rho_value for run in experiment.runs if run.rho] == [math.exp(-13), 0.123456789, 0.01]


TEXT = st.one_of(
    st.text(),
    st.from_regex(r"[-+]?[0-9._:xoe]{1,6}([eE][-+]?[0-9]{1,3})?", fullmatch=True),
    st.text(alphabet="\x85\u2028\u2029\ufeff\r\n\t #:-'\"\\a", max_size=8),
)


@pytest.mark.slow
@given(TEXT)
@example("1e-2")
@example("010")
@example("1:30")
@example("a\u2028b")
@example("a\x85b")
def test_any_text_is_the_same_text_after_yaml(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "text.yaml"
    experiment = SMOKE.model_copy(update={"scale": text, "deepspeed": {text: [text]}})
    write_text(path, dump_experiment(experiment))
    read = read_yaml(path)
    assert (read["scale"], read["deepspeed"]) == (text, {text: [text]})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-6", 1e-6), ("1E6", 1e6), ("-2e3", -2e3), (".5", 0.5), ("1.", 1.0), (".inf", math.inf), ("3", 3)),
        *(("010", 10), ("-08", -8), ("0o10", 8), ("0x1F", 31), ("1:30", "1:30"), ("1_000", "1_000")),
        *(('"1e-6"', "1e-6"), ("exp(-13)", "exp(-13)"), ("1e-6x", "1e-6x"), ("1.2.3", "1.2.3")),
    ],
)
def test_numbers_are_those_of_yaml_1_2(tmp_path, text, value):
    path = tmp_path / "x.yaml"
    path.write_text(f"a: {text}\n", encoding="utf-8")
    assert read_yaml(path) == {"a": value}
    assert type(read_yaml(path)["a"]) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x:\n  a: 1\n  a: 1\n", "key 'a' is a duplicate .*line 3"),
        ("a: [1, 2\nb: 3\n", "not valid YAML: .*line 2"),
        ("{problem}: 1\n", "not valid YAML: .*unhashable key.*line 1"),
        ("a: 2024-13-45\n", "not valid YAML: month must be in"),
        ("a: " + "[" * 300_000, "not valid YAML: expected at most 100 levels, found more at line 1"),
        (b"a: \xff\n", "not valid YAML: .*can't decode"),
        ("", "expected a mapping"),
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


# --- files that an experiment names ---


@pytest.mark.parametrize("name", ["evidence", "mlflow.db"])
def test_a_name_that_the_folder_of_results_has_is_refused(config, name):
    (config / "experiments" / f"{name}.yaml").write_text(f"name: {name}\nextends: smoke\n")
    with pytest.raises(DvpError, match=rf"{name}.yaml: name: expected another one than '{name}', which the folder of"):
        load_experiment(name, config)


@pytest.mark.parametrize("name", ["tiny", None])
def test_an_experiment_is_called_as_its_file(edit, name):
    with pytest.raises(DvpError, match=rf"smoke.yaml: name: expected 'smoke', as the file is called, found {name!r}"):
        edit({"name": name})


SLIP = {"kind": "file", "path": "no/such.jsonl", "columns": {"problem": "p", "answer": "a"}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sources.mine": SLIP, "data.train": "mine"}, "sources.mine.path: no/such.jsonl: no such file"),
        (
            {"base": {"kind": "local", "path": "no/model"}},
            "base.path: no/model: expected a Hugging Face model, found no",
        ),
        ({"training.deepspeed": "zero9"}, "training.deepspeed: "),
        ({"engines": None}, "engines: expected a mapping of names to entries"),
        ({"deepspeed": {}}, "deepspeed: unknown key; training.deepspeed names a file"),
        ({"exends": "tiny"}, "exends: unknown key; did you mean extends?"),
    ],
)
def test_a_fault_of_the_file_names_the_file(edit, config, changes, says):
    """Of a file that is not there, Snakemake would take what was made of an earlier one."""
    with pytest.raises(
        DvpError, match=rf"^{re.escape(str(config / 'experiments/start/smoke.yaml'))}: {re.escape(says)}"
    ):
        edit(changes)


# --- the trainer's precision follows from the base ---


@pytest.fixture
def stored(config, tmp_path):
    """An experiment that extends `tiny` with a local base of a dtype."""

    def made(dtype: str | None, **training: str) -> Experiment:
        base = tmp_path / "base"
        base.mkdir(exist_ok=True)
        (base / "config.json").write_text(json.dumps({} if dtype is None else {"dtype": dtype}))
        value = {"name": "mine", "extends": "tiny", "base": {"kind": "local", "path": str(base)}}
        value |= {"grid": [{"method": "rloo", "engine": ["bf16", "fp32"]}]} | (
            {"training": training} if training else {}
        )
        (config / "experiments/mine.yaml").write_text(yaml.safe_dump(value))
        return load_experiment("mine", config)

    return made


def test_a_pretrained_base_has_a_bf16_trainer_unless_a_file_is_named(stored, capsys):
    assert SMOKE.training.deepspeed == "zero2"
    assert load_experiment("tiny", CONFIG).training.deepspeed == "zero1"
    assert stored("bfloat16").trainer_dtype == "bfloat16"
    assert stored("float32", deepspeed="zero1").trainer_dtype == "float32"
    assert not capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_fp32_trainer_of_16_bit_weights_is_warned_of_once(stored, capsys, monkeypatch, tmp_path, dtype):
    """When it is resolved, and not each time that it is read."""
    stored(dtype, deepspeed="zero1")
    assert capsys.readouterr().err == ""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dvp.tracking.store.create_store", lambda *_: None)
    assert main(["resolve", "--experiment", "mine", "--folder", "results/mine"]) == 0
    line = capsys.readouterr().err
    assert f"warning: the base is stored in {dtype}, the trainer computes in fp32" in line
    assert "the engine (bf16) gets only what survives rounding to 16 bits" in line
    assert "take `training: {deepspeed: zero1_bf16}` or an fp32 engine" in line
    assert line.count("\n") == 1


def test_a_fault_of_the_catalogue_names_the_catalogue(edit, config):
    path = config / "catalogue" / "engines.yaml"
    path.write_text(path.read_text(encoding="utf-8") + "odd: {dtype: float8}\n", encoding="utf-8")
    with pytest.raises(DvpError, match=rf"^{re.escape(str(path))}: engines\.odd\.dtype: .* found 'float8'$"):
        edit({})
    # An entry of the experiment's own is the experiment's fault, although the catalogue has one of that name.
    with pytest.raises(DvpError, match=r"/smoke\.yaml: engines\.odd\.dtype: "):
        edit({"engines.odd": {"dtype": "float9"}})


def test_an_unknown_experiment_and_a_missing_catalogue_are_named(config):
    known = ", ".join(EXPERIMENTS)
    with pytest.raises(DvpError, match=rf"/config/experiments/nope\.yaml: no such experiment; known are {known}$"):
        load_experiment("nope", config)
    (config / "catalogue" / "methods.yaml").unlink()
    with pytest.raises(DvpError, match=r"/config/catalogue/methods\.yaml: no such file$"):
        load_experiment("smoke", config)


def test_a_name_is_that_of_one_experiment(config):
    shutil.copy(config / "experiments/start/smoke.yaml", config / "experiments")
    with pytest.raises(DvpError, match=r"experiments/start/smoke\.yaml: .*experiments/smoke\.yaml has the same name"):
        load_experiment("tiny", config)


@pytest.mark.parametrize("name", ["start/smoke", "tests/smoke_axes"])
def test_what_is_not_resolved_is_no_results(name):
    with pytest.raises(DvpError, match=r"yaml: not a resolved experiment; expected one that dvp wrote, results/NAME/"):
        read_resolved(CONFIG / "experiments" / f"{name}.yaml")


# --- DeepSpeed ---


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"zero_optimization": {"stage": 0}}', "zero_optimization.stage: Input should be greater than"),
        ('{"zero_optimization": {"stage": 1, "compute_grad_norm": false}}', "zero_optimization.compute_grad_norm: Inp"),
        (
            '{"zero_optimization": {"stage": 3}, "torch_autocast": {"enabled": true, "dtype": "bfloat16"}}',
            "torch_autocast: expected {'enabled': True, 'dtype': 'bfloat16', 'lower_precision_safe_modules': []} or no",
        ),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "not valid JSON (key 'stage' is a duplicate)"),
        ('{"zero_optimization": {"stage": 1}, "gradient_clipping": 2}', "gradient_clipping: unknown key"),
    ],
)
def test_a_deepspeed_file_that_cannot_be_run_is_named(config, content, message):
    file = config / "deepspeed" / "zero1.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(DvpError, match=f"^{re.escape(f'{file}: {message}')}"):
        load_experiment("tiny", config)


def test_a_deepspeed_file_is_part_of_a_training(config):
    before = load_experiment("tiny", config)
    options = {"zero_optimization": {"stage": 1}, "torch_autocast": BF16_AUTOCAST}
    (config / "deepspeed" / "zero1.json").write_text(json.dumps(options), encoding="utf-8")
    after = load_experiment("tiny", config)
    assert (before.trainer_dtype, after.trainer_dtype) == ("float32", "bfloat16")
    assert after.config_hash("base") == before.config_hash("base")
    assert hash_of(after, "train", before.runs[0]) != hash_of(before, "train", before.runs[0])


# --- settings, as Snakemake's --config takes them ---


def test_settings_on_the_command_line_replace_those_of_the_file(config):
    assert read_settings([], config) == {"experiment": "tiny", "results": "results"}
    assert read_settings(["experiment=smoke", "results=a=b"], config) == {"experiment": "smoke", "results": "a=b"}


@pytest.mark.parametrize(
    ("pairs", "text", "message"),
    [
        (["experimnt=tiny"], "", "experimnt: unknown key; did you mean experiment?"),
        (["results="], "", "results: String should have at least 1 character, found ''"),
        ([], "experiment: tiny\nresult: results", "result: unknown key; did you mean results? (and 1 more)"),
    ],
)
def test_a_setting_that_is_missing_or_misspelt_is_named(config, pairs, text, message):
    text = text or "experiment: tiny\nresults: results"
    (config / "config.yaml").write_text(text + "\nevidence: {tiny: tiny}", encoding="utf-8")
    with pytest.raises(DvpError, match=f"^{re.escape(f'{config}/config.yaml or --config: {message}')}$"):
        read_settings(pairs, config)


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
    folder = folder.replace("HOME", str(tmp_path))
    assert read_settings([f"results={written}"], config)["results"] == folder
    assert check_settings({"experiment": "x", "results": written, "evidence": {"a": "b"}}).results == folder


@pytest.mark.parametrize("folder", ["a{b}", "a}", ".", "/", "~nobody_here/x", "a\nb"])
def test_a_folder_that_results_cannot_have_is_refused(config, folder):
    with pytest.raises(DvpError, match=r"config.yaml or --config: results: expected .*$"):
        read_settings([f"results={folder}"], config)
    with pytest.raises(DvpError, match=r"--configfile or --config: results: expected .*$"):
        check_settings({"experiment": "tiny", "results": folder, "evidence": {"tiny": "tiny"}})
