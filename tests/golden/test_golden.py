"""The numbers of every stage's first steps, on tiny shapes: when they move, the stage's version must be bumped.

A JSON file a stage, or a part of one, holds the numbers beside this file and the version that they were made with.
After a bump, `DVP_GOLDEN=make pytest tests/golden` writes them anew. The tolerance is wide enough for the rounding of
other machines.
"""

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import test_analysis_mismatch
import test_analysis_variance
import test_bias_length
import test_evidence_page
import test_sweep
import torch
from made_up_bias import bias_experiment, write_cell
from made_up_results import Results, make_experiment, measured_of, training_part
from test_loop import SETTINGS, ScriptedEngine
from test_mismatch import experiment_of
from test_runner import ScriptedEngine as RunnerEngine
from test_runner import _eval_parquet, _experiment, _run  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer

from dvp.analysis import claims
from dvp.conversion import write_model
from dvp.core.batch import Batch, Rollout
from dvp.core.safe_vocabulary import FixedRho
from dvp.data.prepare import EVAL_COLUMNS, TRAIN_COLUMNS, prepare
from dvp.data.reward import VERIFIER
from dvp.data.sources import GENERATORS
from dvp.data.verifier import grade
from dvp.evaluation.metrics import summarise
from dvp.experiment.folder import ExperimentDir
from dvp.experiment.loading import load_experiment, parse_experiment, write_resolved
from dvp.experiment.training import EngineConfig
from dvp.files import sha256_json
from dvp.measurement.bias import _fill
from dvp.measurement.estimator_bias import STATISTICS, gradient_statistics
from dvp.measurement.gradients import Estimator, Gradients, position_parts
from dvp.measurement.mismatch import measure_mismatch
from dvp.measurement.paired_bias import weight_diagnostics
from dvp.training import checkpoint
from dvp.training.backend import Policy, Trainer
from dvp.training.base import make_base
from dvp.training.loop import run_loop
from dvp.training.rollouts import Problems
from dvp.training.stage import set_up
from dvp.versions import STAGE_VERSIONS
from made_up_problems import write_problems
from noisy_engine import NoisyEngine

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent

TOLERANCE = 1e-3
"""Relative, and a hundredth of it absolute: processors round differently, and sums of small numbers show it."""
# Rounding error alone, and the clock.
LEFT_OUT = ("second", "noise", "shape", "bf16")
PROMPTS = [[20, 30, 40, 50, 60], [7, 8, 9], list(range(10, 40))]
WORDS = ["bafi", "dogu", "kelo", "mipa"]
ESTIMATORS = {
    None: ["rloo", "rloo_tis", "rloo_mis", "otb", "otb_oracle"],
    "0.004": ["dvp", "dvp_tis", "dvp_otb_mis"],
}
RESPONSES = ("Answer: 7", "7", "Answer: \\frac{14}{2}", "Answer: 7.0\n", "Answer: 8", "Answer: 7 or 8")


def check(stage: str, numbers: dict[str, float], part: str = "") -> None:
    file, version = HERE / f"{stage}{part and '-'}{part}.json", STAGE_VERSIONS[stage]
    if os.environ.get("DVP_GOLDEN") == "make":
        file.write_text(json.dumps({"version": version, "numbers": numbers}, indent=2) + "\n", encoding="utf-8")
    remake = f"remake them with: DVP_GOLDEN=make pytest tests/golden -k {stage}"
    if not file.exists():
        pytest.fail(f"no numbers of stage {stage} are kept in {file.name}; {remake}")
    golden = json.loads(file.read_text(encoding="utf-8"))
    if golden["version"] != version:
        pytest.fail(f"STAGE_VERSIONS['{stage}'] is {version}, the numbers of {golden['version']} are kept; {remake}")
    kept = golden["numbers"]
    moved = [
        f"{name}: {kept.get(name)} → {numbers.get(name)}"
        for name in kept | numbers
        if name not in kept
        or name not in numbers
        or numbers[name] != pytest.approx(kept[name], rel=TOLERANCE, abs=TOLERANCE / 100)
    ]
    if moved:
        pytest.fail(f"numbers of stage {stage} moved: bump STAGE_VERSIONS['{stage}'] and {remake}\n" + "\n".join(moved))


@pytest.fixture
def a_stage(tmp_path, monkeypatch):
    """A stage with one number, 1.5, of version 2, kept in a file."""
    monkeypatch.setattr(sys.modules[__name__], "HERE", tmp_path)
    monkeypatch.delenv("DVP_GOLDEN", raising=False)
    monkeypatch.setitem(STAGE_VERSIONS, "a_stage", 2)
    (tmp_path / "a_stage.json").write_text('{"version": 2, "numbers": {"loss": 1.5}}')


@pytest.mark.parametrize("numbers", [{"loss": 1.6}, {"loss": math.nan}, {}, {"loss": 1.5, "another": 0.0}])
def test_numbers_that_move_fail_and_say_what_to_do(a_stage, numbers):
    check("a_stage", {"loss": 1.5001})
    message = r"^numbers of stage a_stage moved: bump STAGE_VERSIONS\['a_stage'\] and remake them with: DVP_GOLDEN=make"
    with pytest.raises(pytest.fail.Exception, match=message):
        check("a_stage", numbers)


def test_another_version_and_a_part_without_numbers_fail(a_stage, monkeypatch):
    with pytest.raises(
        pytest.fail.Exception, match=r"^no numbers of stage a_stage are kept in a_stage-new.json; remake"
    ):
        check("a_stage", {"loss": 1.5}, "new")
    monkeypatch.setitem(STAGE_VERSIONS, "a_stage", 3)
    with pytest.raises(pytest.fail.Exception, match=r"STAGE_VERSIONS\['a_stage'\] is 3, the numbers of 2 are kept"):
        check("a_stage", {"loss": 1.5})


def test_every_stage_that_makes_numbers_has_some_here():
    """`resolve` writes an experiment down, and `preflight` measures the machine."""
    kept = {file.stem.partition("-")[0] for file in HERE.glob("*.json")} - {"config_hashes"}
    assert kept == set(STAGE_VERSIONS) - {"resolve", "preflight"}


def size_of(weights) -> float:
    return math.sqrt(sum(value.double().square().sum().item() for _, value in weights))


def experiment_with(root, generator: str):
    """The smoke test with problems of another generator; a small tokenizer where it has few words."""
    experiment = load_experiment("smoke", root / "config")
    source = experiment.sources[experiment.data.train].model_copy(update={"generator": generator})
    changes = {}
    if source.several_solutions or generator in ("sums", "english_stories"):
        source = source.model_copy(update={"steps": [5, 6] if source.several_solutions else [1, 2]})
        tokenizer = experiment.base.tokenizer.model_copy(update={"vocabulary_size": 270})
        changes["base"] = experiment.base.model_copy(update={"tokenizer": tokenizer})
    return experiment.model_copy(update=changes | {"sources": experiment.sources | {experiment.data.train: source}})


@pytest.mark.parametrize("generator", GENERATORS)
def test_prepare(root, tmp_path, generator):
    experiment = experiment_with(root, generator)
    manifest = prepare(experiment.data, experiment.sources, tmp_path)
    contents = [sha256_json(pd.read_parquet(tmp_path / name).to_dict("list")) for name in manifest["files"]]
    counts = manifest["counts"]
    check(
        "prepare",
        {"train": counts["train"], "held_out": counts["evaluation"]["held_out"]}
        # No rounding is in them: one digit more or less is another text.
        | {f"contents_{index}": int(digest[:4], 16) for index, digest in enumerate(contents)},
        generator,
    )


@pytest.mark.parametrize("generator", GENERATORS)
def test_base(root, tmp_path, generator):
    experiment = experiment_with(root, generator)
    warm_start = experiment.base.warm_start.model_copy(update={"steps": 2, "batch_size": 4})
    experiment = experiment.model_copy(update={"base": experiment.base.model_copy(update={"warm_start": warm_start})})
    problems = [story.problem for story in GENERATORS[generator].generate(3, seed=1)]
    write_problems(tmp_path / "eval.parquet", EVAL_COLUMNS, problem=problems)
    manifest = make_base(experiment, tmp_path, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    check(
        "base",
        {
            "parameters": manifest["parameters"],
            "loss": manifest["warm_start_final_loss"],
            "weights": size_of(model.named_parameters()),
            "vocabulary": len(AutoTokenizer.from_pretrained(tmp_path / "base")),
        },
        generator,
    )


@pytest.fixture
def set_up_run(root, tiny_model, tmp_path, monkeypatch):
    """A run's loop as its stage sets it up, with an engine that samples uniformly in the place of vLLM.

    And what trainer and engine were given: a seed may move none of the few numbers here.
    """
    value = load_experiment("smoke", root / "config").model_dump(mode="json")
    value["training"] |= {name: SETTINGS[name] for name in SETTINGS if name != "deepspeed"}
    value["training"] |= {"steps": 2, "max_prompt_tokens": 16}
    value["methods"]["own"] = {
        "label": "own",
        "advantage": "otb",
        "importance": "tis",
        "safe_vocabulary": {"rule": "fixed"},
    }
    value |= {"seeds": [3], "grid": [{"method": "own", "engine": "coarse", "rho": 0.01}]}
    value["report"] |= {"reference": "own"}
    write_resolved(parse_experiment(value, tmp_path), tmp_path / "golden")
    directory = ExperimentDir(tmp_path / "golden" / "config.yaml")
    directory.base.symlink_to(tiny_model)
    directory.data.mkdir()
    prompts = [" ".join([WORDS[row % 4], WORDS[row // 4], "nuri"][: 2 + row % 2]) for row in range(6)]
    prompts += [" ".join(WORDS * 3)]
    ids = [str(row) for row in range(7)]
    write_problems(directory.data / "train.parquet", TRAIN_COLUMNS, id=ids, answer="7", prompt=prompts)
    given: dict[str, float] = {}

    class RecordedTrainer(Trainer):
        def __init__(self, base, config, options, prompts):
            given["trainer.seed"] = torch.initial_seed()
            given["trainer.zero_stage"] = options["zero_optimization"]["stage"]
            given["trainer.prompt_tokens"] = sum(map(len, prompts))
            super().__init__(base, config, options, prompts)

    def engine(model, config, *, rules, **arguments):
        (rule,) = rules
        given.update({f"engine.{name}": argument for name, argument in arguments.items()})
        given.update({"engine.rho": rule.rho, "engine.bits": torch.finfo(getattr(torch, config.dtype)).bits})
        return ScriptedEngine(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), distance=0.05)

    monkeypatch.setattr("dvp.training.backend.Trainer", RecordedTrainer)
    monkeypatch.setattr("dvp.rollout.vllm.VllmEngine", engine)
    (run,) = directory.experiment.runs
    loop, too_long = set_up(directory, run)
    return loop, {f"given.{name}": float(value) for name, value in given.items()} | {"too_long": too_long}


def test_train_and_convert(set_up_run, tiny_model, tmp_path):
    """Two steps with an engine that is off by 0.05 nats per token, and the model that they end in."""
    loop, given = set_up_run
    loop.agreement._config = EngineConfig(dtype="float32")  # what the scripted engine is, whatever the run's rounds
    before = {name: value.clone() for name, value in loop.trainer.weights()}
    _, rows = run_loop(loop, tmp_path, tmp_path / "checkpoints", lambda row: None)
    numbers = {
        f"{row['step']}.{name}": float(value)
        for row in rows
        for name, value in row.items()
        if isinstance(value, int | float) and name != "step" and not any(part in name for part in LEFT_OUT)
    }
    moved_by = size_of((name, value - before[name]) for name, value in loop.trainer.weights())
    check("train", given | numbers | {"weights_moved_by": moved_by})
    kept = checkpoint.keep_weights(tmp_path, len(rows), loop.trainer, PROMPTS)
    proof = write_model(kept, tiny_model, tmp_path / "model", temperature=1.0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    moved_by = size_of((name, value - before[name]) for name, value in model.named_parameters())
    check("convert", {"tokens": proof["tokens_scored"], "weights_moved_by": moved_by})


def test_evaluate(run):
    """Grading and scoring, alone and through lm-eval with a scripted engine."""
    engine = RunnerEngine()
    scored = run("held_out", engine)
    ((_, sampling, seeds),) = engine.calls
    asked = {name: getattr(sampling, name) for name in ("n", "temperature", "top_p", "max_tokens")}
    asked |= {f"seed_{index}": seed / 2**60 for index, seed in enumerate(seeds[:5])}
    graded = [float(grade(response, "7", truncated=False)) for response in RESPONSES]
    rng = np.random.default_rng(0)
    correct_PK = rng.random((12, 4)) < 0.4
    answers = [["7" if right else str(rng.integers(3)) for right in row] for row in correct_PK]
    scores = summarise(correct_PK, answers, resamples=200, seed=0)
    check(
        "evaluate",
        dict(zip(RESPONSES, graded, strict=True))
        | flat(scores)
        | {f"sampling.{name}": value for name, value in asked.items()}
        | {f"runner.{name}": value for name, value in flat(scored["metrics"]).items()}
        | {f"runner.{name}": scored[name] for name in ("samples", "truncated_fraction", "mean_response_tokens")},
    )


def flat(metrics: dict[str, dict]) -> dict[str, float]:
    return {f"{name}.{key}": float(value) for name, metric in metrics.items() for key, value in metric.items()}


def test_mismatch(root, tiny_model, tmp_path):
    experiment = experiment_of(root)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    result = measure_mismatch(
        experiment,
        experiment.measurements("mismatch")[0],
        ["a", "b", "c"],
        Problems(["a", "b", "c"], ["7", "7", "8"], PROMPTS, tokenizer.pad_token_id, VERIFIER),
        model,
        NoisyEngine(model, tokenizer, 0.4),
        tmp_path,
    )
    sets = pd.read_parquet(tmp_path / "safe_sets.parquet")
    means = sets.select_dtypes("number").replace([np.inf, -np.inf], np.nan).mean()
    check(
        "mismatch",
        {name: result[name] for name in ("positions", "pairs", "sharp_violations")}
        | {"kl": result["kl"]["engine"]}
        | {f"safe_sets.{name}": float(value) for name, value in means.items()},
    )


def test_bias(root, tiny_model):
    """Gradients, what is made of their inner products, and each kind of estimator on one batch."""
    policy = Policy(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))
    gradients = Gradients(policy, temperature=0.8, tokens=64, seed=0)
    generator = torch.Generator().manual_seed(0)
    responses = [torch.randint(400, (length,), generator=generator).tolist() for length in (4, 7, 1, 5)]
    batch = Batch.collate([[20, 30, 40]] * 4, responses, 1)

    def gradient(bias: float) -> torch.Tensor:
        coefficient_B = torch.tensor([1.0, -0.5, 0.25, bias]) + 0.1 * torch.randn(4, generator=generator)
        parts_KBT = position_parts(batch.response_BT, [])
        return gradients.of_responses(batch, coefficient_B[:, None], FixedRho(0.02), parts_KBT)[:, 0, 0].double()

    batches_nD = torch.stack([gradient(0.5) for _ in range(4)])
    reference_mD = torch.stack([gradient(0.0) for _ in range(4)])
    reference_mm = reference_mD @ reference_mD.T
    found = gradient_statistics(batches_nD @ batches_nD.T, reference_mm, batches_nD @ reference_mD.T)
    numbers = {f"norm_{index}": value.norm().item() for index, value in enumerate(batches_nD)}
    numbers |= {name: float(found[name].value) for name in STATISTICS}
    differences_nD = batches_nD - reference_mD
    paired = gradient_statistics(differences_nD @ differences_nD.T, reference_mm)["signal"]
    numbers |= {"paired_squared_bias": paired.value, "paired_squared_bias_se": paired.se}

    experiment = load_experiment("smoke", root / "config")
    noise_BT = 0.3 * torch.randn(batch.tokens_BT.shape, generator=generator)
    rewards_B = torch.tensor([1.0, 0.0, 0.0, 1.0])
    for rho, methods in ESTIMATORS.items():
        estimators = [Estimator(experiment, method, rho) for method in methods]
        safe = estimators[0].safe.trainer
        infer_BT = (gradients.score(batch, safe)["pruned_log_prob"] + noise_BT) * batch.response_BT
        rollout = Rollout(batch, infer_BT, rewards_B, torch.zeros(4, dtype=torch.bool))
        gradient_EKD = torch.empty(len(estimators) + 1, 2, gradients.sketch.length)
        notes, log_ratio_B = _fill(gradient_EKD, estimators, rollout, safe, gradients, [2], group_size=4)
        numbers |= {f"{rho}.{name}": value for name, value in weight_diagnostics(log_ratio_B).items()}
        notes.append({})
        for method, note, gradient_KD in zip([*methods, f"exact_{rho}"], notes, gradient_EKD, strict=True):
            numbers |= {f"{method}.{name}": float(value) for name, value in note.items()}
            numbers |= {f"{method}.norm_{part}": value.norm().item() for part, value in enumerate(gradient_KD)}
    check("bias", numbers)


def sums(statistics) -> dict[str, float]:
    """The values and the bounds of a report's statistics, added up by name."""
    numbers: dict[str, float] = {}
    for statistic in statistics:
        for name in ("value", "low", "high"):
            key = f"{statistic.name}.{name}"
            number = getattr(statistic, name)
            numbers[key] = numbers.get(key, 0.0) + (number if math.isfinite(number) else 0.0)
    return numbers


def test_report(tmp_path):
    experiment = make_experiment(training__steps=12, evaluation__bootstrap_resamples=400)
    found, _ = training_part(experiment, Results(experiment, tmp_path).folder)
    check("report", sums(found), "training")


def test_report_matrix(tmp_path):
    also = [{"engine": "training"}, {"engine": "training", "rho": "own"}, {"rho": "own"}]
    changes = {"training__steps": 2, "evaluation__bootstrap_resamples": 400, "evaluation__also": also}
    experiment = make_experiment(**changes)
    Results(experiment, tmp_path)
    check("report", sums(measured_of(experiment, tmp_path, "matrix").statistics), "matrix")


def test_report_diversity(tmp_path):
    puzzles = {"kind": "generated", "generator": "graph_color", "count": 5000, "seed": 0, "steps": [5, 5]}
    changes = {"training__steps": 2, "evaluation__bootstrap_resamples": 400, "sources__stories": puzzles}
    experiment = make_experiment(**changes, evaluation__also=[{"engine": "training"}, {"rho": "own"}])
    Results(experiment, tmp_path)
    check("report", sums(measured_of(experiment, tmp_path, "diversity").statistics), "diversity")


def test_report_curve(tmp_path):
    experiment = make_experiment(training__steps=12, evaluation__bootstrap_resamples=400, evaluation__at=[3, 6, 9])
    Results(experiment, tmp_path)
    check("report", sums(measured_of(experiment, tmp_path, "curve").statistics), "curve")


def test_report_mismatch(tiny_model, tmp_path):
    experiment = test_analysis_mismatch.experiment_of(rhos=(0.01,), seeds=(0, 1))
    test_analysis_mismatch.measure_all(experiment, tiny_model, tmp_path)
    measured = measured_of(experiment, tmp_path, "mismatch").statistics
    # Of the exact engine and of the trainer against itself there is rounding alone, which processors do differently.
    kept = [one for one in measured if one.where["engine"] != "fp32" and "self_noise" not in one.name]
    check("report", sums(kept), "mismatch")


def test_report_bias(tmp_path):
    experiment = bias_experiment()
    for measurement in experiment.measurements("bias"):
        write_cell(experiment, tmp_path, measurement)
    check("report", sums(measured_of(experiment, tmp_path, "bias").statistics), "bias")


def test_report_variance(tmp_path):
    experiment = bias_experiment(**test_analysis_variance.ASKED)
    for measurement in experiment.measurements("bias"):
        write_cell(experiment, tmp_path, measurement)
    check("report", sums(measured_of(experiment, tmp_path, "variance").statistics), "variance")


def test_report_bias_length(tmp_path):
    experiment = test_bias_length.experiment_of()
    for measurement in experiment.measurements("bias"):
        write_cell(experiment, tmp_path, measurement)
    check("report", sums(measured_of(experiment, tmp_path, "bias_length").statistics), "bias_length")


def test_report_sweep(tmp_path):
    experiment = test_sweep.experiment_of()
    test_sweep.make_all(experiment, tmp_path)
    check("report", sums(measured_of(experiment, tmp_path, "training").statistics), "sweep")


def test_evidence(tmp_path):
    """What becomes of an interval: the words of an effect and of a bound."""
    numbers = {}
    for low, high in ((5.0, 31.0), (11.0, 19.0), (-5.0, 8.0), (-5.0, 18.0), (-15.0, -1.0), (math.nan, math.nan)):
        value = (low + high) / 2
        folder = test_evidence_page.make_place(tmp_path, test_evidence_page.statistic(value, low, high, rho="0.01"))
        claim = test_evidence_page.answered(folder)["claims"][0]
        words = [claims.WORDS.index(condition["status"]) for condition in claim["conditions"]]
        numbers |= {f"{low} to {high}: delta": words[0], f"{low} to {high}: below": words[1]}
    check("evidence", numbers)
