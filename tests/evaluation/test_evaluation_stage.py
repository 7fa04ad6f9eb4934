"""All tasks of a model in one process: inputs verified once, one engine, and a task that fails takes no other along."""

import json

import pytest
import transformers

from dvp.data import prompts
from dvp.errors import DvpError
from dvp.evaluation import runner
from dvp.evaluation import stage as evaluation
from dvp.experiment.folder import ExperimentDir
from dvp.experiment.loading import dump_experiment, load_experiment
from dvp.files import read_json, sha256_file
from dvp.stage import run_stage
from dvp.tracking.record import read_record
from dvp.tracking.store import create_store

pytestmark = pytest.mark.slow  # a tracking store

TASKS = ["held_out", "chains_1", "chains_2", "chains_3", "chains_5", "chains_9"]


@pytest.fixture
def directory(tmp_path, monkeypatch) -> ExperimentDir:
    """With problems and a base model, made up."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "results/bias_length"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_experiment(load_experiment("bias_length")))
    create_store(folder.parent, "bias_length")
    made = ExperimentDir(folder / "config.yaml")
    for stage, file, before in (("prepare", "eval.parquet", []), ("base", "weights", ["prepare"])):
        inputs = {name: made.result(name) for name in before}
        result = made.result(stage)
        with run_stage(stage, made, result, made.experiment.config_hash(stage), inputs) as running:
            result.parent.mkdir()
            (result.parent / file).write_text("made up")
            running.finish({"files": {file: sha256_file(result.parent / file)}})
    return made


@pytest.fixture
def sampled(monkeypatch) -> list[str]:
    """The tasks that were sampled; put "fails" into it for a task to fail."""
    asked: list[str] = []

    def sample(task, folder):
        asked.append(task)
        if task == "chains_2" and "fails" in asked:
            raise DvpError("chains_2 fails")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "samples.parquet").write_text(f"{task} sampled as number {len(asked)}")
        return {"samples": 20, "metrics": {"pass@1": {"value": len(asked) / 10}}}

    monkeypatch.setattr(evaluation, "sampling", lambda *_: sample)
    return asked


def evaluate(directory: ExperimentDir) -> None:
    evaluation.evaluate(directory.folder / "config.yaml", "base", 1)


def test_a_task_that_fails_keeps_no_other_from_being_done(directory, sampled):
    """And is all that the next attempt samples; the store's record of the others is whole."""
    sampled.append("fails")
    with pytest.raises(DvpError, match="chains_2 fails"):
        evaluate(directory)
    assert sampled == ["fails", *TASKS]
    manifest = directory.folder / "evals/base/manifest.json"
    assert not manifest.exists()
    sampled.clear()
    kept = read_record(directory.folder / "tracking/evaluate-chains_3.json")
    evaluate(directory)
    assert sampled == ["chains_2"]
    again = read_record(directory.folder / "tracking/evaluate-chains_3.json")
    assert (again.status, again.results, again.files) == ("FINISHED", kept.results, kept.files)
    assert list(again.files)[-1] == "evals/base/chains_3/scores.json"
    results = {f"{task}/scores.json" for task in TASKS}
    assert read_json(manifest) == {"files": {name: sha256_file(manifest.parent / name) for name in results}}


@pytest.mark.parametrize(("right", "said"), [(0.0, "none"), (0.05, None), (1.0, "all")])
def test_a_base_that_gives_no_signal_is_named(directory, sampled, monkeypatch, capsys, right, said):
    sample = evaluation.sampling()
    scores = {"samples": 20, "metrics": {"pass@1": {"value": right}}}
    monkeypatch.setattr(evaluation, "sampling", lambda *_: lambda *asked: sample(*asked) and scores)
    evaluate(directory)
    warning = f"warning: of the base model's 20 samples of chains_3 {said} are right: if training's problems are alike"
    assert (warning in capsys.readouterr().err) == (said is not None)


@pytest.mark.parametrize("damage", ["samples", "key", "missing"])
def test_what_is_not_as_it_was_written_is_sampled_again(directory, sampled, damage):
    evaluate(directory)
    sampled.clear()
    folder = directory.folder / "evals/base/chains_5"
    if damage == "samples":
        (folder / "samples.parquet").write_text("altered")
    elif damage == "key":
        (folder / "scores.json").write_text(json.dumps(read_json(folder / "scores.json") | {"tracking_key": "old"}))
    else:
        (folder / "scores.json").unlink()
    evaluate(directory)
    assert sampled == ["chains_5"]


def test_the_files_of_a_model_are_read_once(directory, sampled, monkeypatch):
    import dvp.stage

    read, verify = [], dvp.stage.verify_checksums
    monkeypatch.setattr(
        dvp.stage, "verify_checksums", lambda folder, files: read.append(folder) or verify(folder, files)
    )
    evaluate(directory)
    assert read.count(directory.base) == 1
    (directory.base / "weights").write_text("altered")
    sampled.clear()
    with pytest.raises(DvpError, match="weights: altered since it was written"):
        evaluate(directory)
    assert sampled == []


def test_all_tasks_have_one_engine_with_room_for_the_longest(monkeypatch, tmp_path):
    started = []
    lengths = {"held_out": [3, 5], "chains_9": [9]}
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: None)
    monkeypatch.setattr(
        transformers.AutoConfig, "from_pretrained", lambda _: type("C", (), {"max_position_embeddings": 999})
    )
    monkeypatch.setattr(prompts, "read_problems", lambda _, task: lengths[task])
    monkeypatch.setattr(prompts, "encode_prompts", lambda _, of_task, *__: [[0] * length for length in of_task])
    monkeypatch.setattr(runner, "evaluate", lambda *_, engine, **__: {"engine": engine})
    monkeypatch.setattr(evaluation, "make_engine", lambda *_, **options: started.append(options) or len(started))
    experiment = load_experiment("bias_length")
    sample = evaluation.sampling(experiment, list(lengths), tmp_path, tmp_path / "eval.parquet")
    assert started == []  # nothing may be left to do
    assert [sample(task, tmp_path)["engine"] for task in lengths] == [1, 1]
    assert started[0]["max_model_len"] == 9 + experiment.evaluation.max_response_tokens
