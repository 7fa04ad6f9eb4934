"""What all stages share: inputs verified first, an MLflow run linked to theirs, the JSON file last or not at all."""

import pytest
from made_up_stages import contents

from dvp.errors import DvpError
from dvp.experiment.folder import ExperimentDir
from dvp.files import read_json, sha256_file, write_json
from dvp.stage import read_inputs, run_stage
from dvp.tracking.record import read_record


@pytest.fixture
def directory(folder) -> ExperimentDir:
    return ExperimentDir(folder / "config.yaml")


def prepared(directory: ExperimentDir, text: str = "problems") -> dict:
    """The stage `prepare`, made up: one file and the JSON file, which is returned."""
    config_hash = directory.experiment.config_hash("prepare")
    with run_stage("prepare", directory, directory.result("prepare"), config_hash, {}) as stage:
        directory.data.mkdir(exist_ok=True)
        (directory.data / "train.parquet").write_text(text)
        stage.finish({"files": {"train.parquet": sha256_file(directory.data / "train.parquet")}})
    return read_json(directory.result("prepare"))


def base(directory: ExperimentDir, **options):
    return run_stage(
        "base", directory, directory.result("base"), "1" * 12, {"prepare": directory.result("prepare")}, **options
    )


def test_the_json_file_comes_last_and_says_what_it_is_from(directory):
    upstream = prepared(directory)
    with base(directory) as stage:
        key = stage.tracked.key
        assert not stage.result.exists()
        stage.finish({"parameters": 3, "files": {}})
    record = read_json(directory.result("base"))
    assert set(record) == {"parameters", "files", "config_hash", "git_commit", "tracking_key", "seconds_stage"}
    assert record["config_hash"] == "1" * 12
    stored = contents(directory.folder)
    tags = stored[record["tracking_key"]]["tags"]
    assert tags["upstream.prepare"] == upstream["tracking_key"]
    assert tags["stage"] == "base"
    assert read_record(directory.folder / "tracking/base.json").files == {"base/manifest.json": ""}
    prepared(directory, "other problems")
    with base(directory) as stage:  # other contents of an input are other work
        assert stage.tracked.key != key


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: (data / "train.parquet").write_text("problemS"), "train.parquet: altered since it was written"),
        (lambda data: (data / "manifest.json").unlink(), "manifest.json: no such file; the stage that writes it"),
    ],
)
def test_an_input_that_is_not_as_it_was_written_is_refused_before_anything_is_written(directory, damage, message):
    prepared(directory)
    damage(directory.data)
    with pytest.raises(DvpError, match=message), base(directory):
        raise AssertionError("the stage has begun")
    assert not (directory.folder / "tracking/base.json").exists()


@pytest.mark.parametrize("stage", ["prepare", "base", "train", "convert"])
def test_no_input_of_other_settings_is_read(directory, stage):
    """What Snakemake takes for finished, as it could not make it again, may be of an earlier version of a file."""
    experiment = directory.experiment
    run = experiment.runs[0] if stage in ("train", "convert") else None
    path = directory.result(stage, experiment.runs[0].path)
    record = {
        "files": {},
        "tracking_key": f"{stage} 1",
        "config_hash": experiment.config_hash(stage, run.path if run else ""),
    }
    write_json(path, record)
    assert read_inputs(directory, {stage: path}, run and run.path) == {stage: [record]}
    write_json(path, record | {"config_hash": "0" * 12})
    with pytest.raises(DvpError, match=rf"{path.name}: written under other settings .*; run `dvp {stage}` again"):
        read_inputs(directory, {stage: path}, run and run.path)


def test_a_stage_that_reads_several_experiments_has_a_folder_of_its_own(directory):
    prepared(directory)
    folder = directory.folder.parent / "evidence"
    with run_stage("evidence", folder, folder / "claims.json", "2" * 12, {"a": [directory.result("prepare")]}) as stage:
        stage.finish({"claims": []})
    assert read_record(folder / "tracking/evidence.json").experiment == "evidence"
    assert read_json(folder / "claims.json")["config_hash"] == "2" * 12
