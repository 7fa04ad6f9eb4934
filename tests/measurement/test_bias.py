"""Stage `bias`: gradients against dense float64 autograd, weights against training's, the whole with a real engine."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM, AutoTokenizer

from dvp import cli
from dvp.analysis.bias import statistics
from dvp.analysis.load import Reader
from dvp.core.advantages import ADVANTAGES, Responses
from dvp.core.batch import Batch, Rollout
from dvp.core.safe_vocabulary import FixedRho
from dvp.data.prepare import EVAL_COLUMNS, TRAIN_COLUMNS
from dvp.errors import DvpError
from dvp.experiment.loading import dump_experiment, load_experiment
from dvp.files import checksums, read_json, sha256_file, write_json, write_text
from dvp.measurement import gradients as module
from dvp.measurement.bias import _fill, clustered_rank_correlation
from dvp.measurement.gradients import CountSketch, Estimator, Gradients, position_parts
from dvp.measurement.problems import FixedProblems
from dvp.rollout.engine import Completion
from dvp.rollout.seeds import derived_seed
from dvp.training.backend import Policy
from made_up_problems import write_problems
from rounding import TINY_LOG_PROB

ANSWER, SHARE = "1", 4  # of four answers that are given, one is right
PROBLEMS = [f"{name} tells a number" for name in ("bafi", "dogu", "kelo", "mipa", "nuri", "sato")]
EXPERIMENT = {
    "name": "small_bias",
    "extends": "tiny",
    "seeds": [3],
    "grid": [{"method": "rloo", "engine": "fp32"}],
    "training": {"group_size": 4, "max_response_tokens": 8, "tokens_per_micro_batch": 512},
    "bias": {
        "policies": ["base"],
        "engines": ["fp32", "coarse"],
        "problems": 4,
        "batches": 12,
        "reference_batches": 24,
        "estimators": [
            {"method": ["rloo", "rloo_tis", "rloo_mis", "otb", "otb_oracle"]},
            {"method": ["dvp", "dvp_tis", "dvp_replay"], "rho": 0.05},
        ],
        "position_bins": [2],
        "norm_responses": 8,
    },
}


@pytest.fixture
def policy(tiny_model):
    return Policy(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    prompts = [[20, 30, 40], [20, 30, 40], [50, 60, 70, 80, 90], [50, 60, 70, 80, 90]]
    responses = [torch.randint(400, (length,), generator=generator).tolist() for length in (4, 7, 1, 5)]
    return Batch.collate(prompts, responses, 1)


def parts_of(batch, bins=()):
    return position_parts(batch.response_BT, bins)


def assert_close(found_D: torch.Tensor, expected_D: torch.Tensor) -> None:
    """Assert that gradients agree up to the rounding of a log-prob, relative to the largest entry."""
    atol = TINY_LOG_PROB * expected_D.abs().max().item()
    torch.testing.assert_close(found_D, expected_D, rtol=0, atol=atol)


def dense_gradient(model_dir, batch, coefficient_BT, rho, temperature):
    """∇ Σ c log p^mp in float64 from whole logits, V_S by its definition, tokens outside it left out."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).double()
    logits_BTV = model(batch.tokens_BT).logits[:, :-1] / temperature
    if rho is not None:
        outside_BTV = logits_BTV < logits_BTV.amax(dim=-1, keepdim=True) + math.log(rho)
        logits_BTV = logits_BTV.masked_fill(outside_BTV.detach(), -torch.inf)
    log_prob_BT = logits_BTV.log_softmax(dim=-1).gather(2, batch.tokens_BT[:, 1:, None])[:, :, 0]
    used_BT = batch.response_BT[:, 1:] & log_prob_BT.isfinite()
    total = torch.where(used_BT, coefficient_BT[:, 1:].double() * torch.where(used_BT, log_prob_BT, 0.0), 0.0).sum()
    parts = torch.autograd.grad(total, list(model.parameters()))
    return torch.cat([part.reshape(-1) for part in parts]), used_BT


def rollout_of(batch, log_prob_BT, noise=0.0):
    """Sampled by an engine whose log-probs are so far from these; and its log q − log p."""
    noise_BT = noise * torch.randn(batch.tokens_BT.shape, generator=torch.Generator().manual_seed(2))
    infer_BT = (log_prob_BT + noise_BT) * batch.response_BT
    return Rollout(batch, infer_BT, torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.bool)), noise_BT


def test_sketches_keep_inner_products_on_average_and_sums_exactly():
    """With the variance that is stated; what fits stays as it is."""
    torch.manual_seed(0)
    x, y = torch.randn(300, dtype=torch.float64), torch.randn(300, dtype=torch.float64)
    y, buckets, products = x + y, 64, []
    for seed in range(800):
        sketch = CountSketch([100, 200], buckets, seed)
        short_x, short_y = (sketch([z[:100], z[100:].view(20, 10)]) for z in (x, y))
        products.append((short_x @ short_y).item())
    assert len(short_x) == sketch.length == buckets
    torch.testing.assert_close(short_x + short_y, sketch([(x + y)[:100], (x + y)[100:]]))
    bound = 2 * (x @ x) * (y @ y) / buckets
    assert np.mean(products) == pytest.approx((x @ y).item(), abs=4 * np.std(products) / 800**0.5)
    assert 0.3 * bound < np.var(products) < 1.2 * bound
    assert torch.equal(CountSketch([100, 200], 300, 0)([x[:100].view(2, 50), x[100:]]), x)


@pytest.mark.parametrize("ties", [False, True])
def test_rank_correlation_is_scipys_and_its_error_the_jackknifes(ties):
    rng = np.random.default_rng(0)
    left = rng.integers(0, 5, 30) * 1.0 if ties else rng.normal(size=30)
    tokens = pd.DataFrame({"proxy": left, "norm": left + rng.normal(size=30), "problem": rng.integers(0, 3, 30)})

    def spearman(part):
        return spearmanr(part["proxy"], part["norm"]).statistic

    without = [spearman(tokens[tokens["problem"] != problem]) for problem in range(3)]
    expected = spearman(tokens), math.sqrt(2 * np.var(without))
    assert clustered_rank_correlation(tokens) == pytest.approx(expected)
    for undefined in (tokens[:0], tokens[:3].assign(proxy=1.0, problem=0)):
        assert clustered_rank_correlation(undefined) == pytest.approx((math.nan, math.nan), nan_ok=True)


@pytest.mark.parametrize("rho", [None, 0.02])
def test_parts_by_position_are_the_gradients_of_their_tokens(tiny_model, policy, batch, rho, monkeypatch):
    """Lengths 4, 7, 1 and 5: the bins 1–2, 3–5 and 6 on. One response's third token is a tool's, and has no number."""
    safe = None if rho is None else FixedRho(rho)
    batch.response_BT[1, 5] = False
    parts_KBT = parts_of(batch, [2, 5])
    assert torch.equal(parts_KBT.sum(dim=0), batch.response_BT.long())
    assert parts_KBT.sum(dim=2).tolist() == [[2, 2, 1, 2], [2, 3, 0, 3], [0, 1, 0, 0]]
    assert parts_KBT[1, 1].nonzero()[:, 0].tolist() == [6, 7, 8]

    gradients = Gradients(policy, temperature=0.8, tokens=32, seed=0)
    in_safe_BT = gradients.score(batch, safe)["target_in_safe"]
    coefficient_BE = torch.tensor([[1.0, 0.5], [0.0, -2.0], [0.5, 3.0], [0.0, 0.0]])
    coefficient_BT = coefficient_BE[:, 1:] * batch.response_BT * in_safe_BT
    by_batch_KD = gradients.of_batch(batch, coefficient_BT, safe, parts_KBT)
    by_response_EKD = gradients.of_responses(batch, coefficient_BE, safe, parts_KBT)
    for part_BT, *found in zip(parts_KBT, by_batch_KD, by_response_EKD[1], strict=True):
        expected_D, _ = dense_gradient(tiny_model, batch, coefficient_BT * part_BT, rho, 0.8)
        for found_D in found:
            assert_close(found_D.double(), expected_D)
    assert not gradients.of_batch(batch, 0 * coefficient_BT, safe, parts_KBT).any()  # everything was rejected
    assert not gradients.of_responses(batch, 0 * coefficient_BE, safe, parts_KBT).any()
    (whole_D,) = gradients.of_batch(batch, coefficient_BT, safe, parts_of(batch))
    assert_close(by_batch_KD.sum(dim=0), whole_D)
    if rho is None:  # a long one is sketched after it was made
        monkeypatch.setattr(module, "BUCKETS", 2**12)
        sketched = Gradients(policy, temperature=0.8, tokens=32, seed=5)
        (short_D,) = sketched.of_batch(batch, coefficient_BT, None, parts_of(batch))
        assert len(short_D) == 2**12
        expected_D = sketched.sketch(whole_D.split([one.numel() for one in policy.parameters()]))
        assert_close(short_D, expected_D)


@pytest.mark.parametrize("rho", [None, 0.02])
def test_true_norms_are_those_of_autograd_token_by_token(tiny_model, policy, batch, rho, monkeypatch):
    """In float64 from whole logits, a backward pass a token; 0 outside V_S, and where the model did not write."""
    monkeypatch.setattr(module, "NORM_ELEMENTS", 3 * sum(each.numel() for each in policy.parameters()))
    safe = None if rho is None else FixedRho(rho)
    batch.response_BT[1, 5] = False
    found_BT = Gradients(policy, temperature=0.8, tokens=48, seed=0).squared_norms(batch, safe)
    assert not found_BT[~batch.response_BT].any()
    for row, column in batch.response_BT.nonzero().tolist():
        only_BT = torch.zeros(batch.tokens_BT.shape)
        only_BT[row, column] = 1.0
        expected_D, used_BT = dense_gradient(tiny_model, batch, only_BT, rho, 0.8)
        expected = expected_D.square().sum().item() if used_BT[row, column - 1] else 0.0
        assert found_BT[row, column].item() == pytest.approx(expected, rel=2 * TINY_LOG_PROB)
    outside = (found_BT == 0) & batch.response_BT
    assert outside.any() == (rho is not None)


def test_the_oracle_weighs_tokens_by_their_true_norms(root, tmp_path, policy, batch):
    """Its coefficients are those of OTB with the norms as w, and others than OTB's."""
    experiment = small_experiment(root, tmp_path)
    oracle, otb = Estimator(experiment, "otb_oracle", None), Estimator(experiment, "otb", None)
    gradients = Gradients(policy, temperature=1.0, tokens=64, seed=0)
    statistics, norm_BT = gradients.score(batch, None), gradients.squared_norms(batch, None)
    rollout, _ = rollout_of(batch, statistics["log_prob"])
    found_BT = oracle.update(rollout, statistics, norm_BT).advantage_BT
    ones_BT = torch.ones(norm_BT.shape)
    expected_BT = ADVANTAGES["otb"](Responses(rollout.rewards_B, batch.response_BT, 4, norm_BT, ones_BT))
    torch.testing.assert_close(found_BT, expected_BT)
    assert not torch.allclose(found_BT, otb.update(rollout, statistics, norm_BT).advantage_BT, atol=1e-3)


def small_experiment(root, folder, **changes):
    """The experiment of these tests, with changes to its `bias`, and a folder that it can be found from."""
    shutil.copytree(root / "config", folder / "config", dirs_exist_ok=True)
    value = EXPERIMENT | {"bias": EXPERIMENT["bias"] | changes}
    (folder / "config" / "experiments" / "small_bias.yaml").write_text(yaml.safe_dump(value))
    return load_experiment("small_bias", folder / "config")


@pytest.mark.parametrize("method", ["rloo", "rloo_tis", "dvp"])
def test_a_batch_also_gives_the_exact_gradient(root, tmp_path, tiny_model, policy, batch, method):
    """Against dense float64 autograd; with an estimator of one weight a response beside it, and of one a token."""
    rho = "0.001" if method == "dvp" else None
    estimator = Estimator(small_experiment(root, tmp_path), method, rho)
    gradients = Gradients(policy, temperature=1.0, tokens=64, seed=0)
    statistics = gradients.score(batch, estimator.safe.trainer)
    rollout, noise_BT = rollout_of(batch, statistics["pruned_log_prob"], 0.1)
    gradient_EKD = torch.empty(2, 1, gradients.sketch.length)
    _, log_ratio_B = _fill(gradient_EKD, [estimator], rollout, estimator.safe.trainer, gradients, [], group_size=4)
    ratio_B = (-noise_BT * batch.response_BT).double().sum(dim=1).exp()
    inside_B = (statistics["target_in_safe"] | ~batch.response_BT).all(dim=1)
    tokens = batch.response_BT.sum(dim=1).max().item()
    torch.testing.assert_close(log_ratio_B.exp(), ratio_B * inside_B, rtol=tokens * TINY_LOG_PROB, atol=0.0)
    advantage_B = torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3])  # less the mean of the three others
    coefficient_BT = (ratio_B * inside_B * advantage_B / 4)[:, None] * batch.response_BT
    expected_D, _ = dense_gradient(tiny_model, batch, coefficient_BT, rho and float(rho), 1.0)
    assert_close(gradient_EKD[1, 0].double(), expected_D)


def problem_table(count):
    return pd.DataFrame(
        [{"id": str(n), "answer": ANSWER, "prompt": text + "\n"} for n, text in enumerate(PROBLEMS[:count])]
    )


def test_a_measurement_has_no_seed_of_a_training_run(root, tmp_path, tiny_model):
    """Else a policy would be measured on what it was trained with, where their problems and steps meet."""
    asked = []

    def generate(prompts, sampling, seeds):
        asked.extend(seeds)
        return [[Completion([5], [-1.0], "x", "stop")] * sampling.n for _ in prompts]

    task = FixedProblems(small_experiment(root, tmp_path), tiny_model, problem_table(6), where="FILE", count=4, seed=0)
    assert len(list(task.from_engine(SimpleNamespace(generate=generate), None, 3))) == 3
    assert len(set(asked)) == 3 * len(task.rows)
    assert not set(asked) & {derived_seed(0, step, row) for step in range(100) for row in range(100)}


def test_the_trainers_own_samples_follow_its_policy(root, tmp_path, tiny_model):
    """First tokens against the softmax, where the directory says top_k = 1; a response ends with its end."""
    experiment = small_experiment(root, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.generation_config.update(top_k=1, temperature=0.1, do_sample=True)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    task = FixedProblems(experiment, tiny_model, problem_table(6), where="FILE", count=4, seed=0)
    batches = 150
    rollouts = task.from_trainer(model, batches, "test")
    again = task.from_trainer(model, batches, "test")
    assert all(torch.equal(a.batch.tokens_BT, b.batch.tokens_BT) for a, b in zip(rollouts, again, strict=True))
    ends = 0
    counts = np.zeros((4, 400))
    for rollout in rollouts:
        batch = rollout.batch
        for row in range(16):
            tokens = batch.tokens_BT[row][batch.response_BT[row]].tolist()
            counts[row // 4, tokens[0]] += 1
            ended = tokenizer.eos_token_id in tokens
            assert ended == (not rollout.truncated_B[row])
            assert tokens.index(tokenizer.eos_token_id) == len(tokens) - 1 if ended else len(tokens) == 8
            ends += ended
    assert ends > 0
    for prompt, counts_V in zip(task.prompts, counts, strict=True):
        with torch.no_grad():
            p_V = model(torch.tensor([prompt])).logits[0, -1].double().softmax(dim=0).numpy()
        expected_V = p_V * counts_V.sum()
        common = expected_V >= 5
        chi2 = ((counts_V - expected_V)[common] ** 2 / expected_V[common]).sum()
        assert chi2 < common.sum() + 5 * math.sqrt(2 * common.sum())
        assert counts_V.max() < counts_V.sum() / 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "int1"}, "--engine: 'int1' is not defined; known are bf16"),
        ({"model": "nowhere"}, "nowhere: not a Hugging Face model directory"),
        ({"experiment": "tiny"}, "experiment 'tiny' has no `bias`"),
        ({"config": Path("config.yaml")}, "expected --config FILE --measurement MEASUREMENT, or --model FOLDER"),
        ([{"problem": f"x {n}", "answer": "1"} for n in "ab"], "2 problems of 2 have a prompt .* fewer than the 4 to"),
        ([{"problem": f"x {n}", "answer": "x" * 500} for n in "abcd"], r"row \d .id \d.: the answer .* is too long"),
        (
            [{"problem": "bafi " * 600 + n, "answer": "1"} for n in "abcd"],
            "its prompt has .* tokens; the model's context of 512",
        ),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(root, tmp_path, tiny_model, monkeypatch, change, message):
    """A list stands in the file of problems."""
    small_experiment(root, tmp_path)
    monkeypatch.chdir(tmp_path)
    options = {"model": tiny_model, "engine": "fp32", "experiment": "small_bias", "output": Path("out")}
    if isinstance(change, list):
        pd.DataFrame(change).to_json("rows.jsonl", orient="records", lines=True)
        change = {"problems": Path("rows.jsonl")}
    options |= {name: Path(value) if name == "model" else value for name, value in change.items()}
    with pytest.raises(DvpError, match=message):
        cli.bias(**options)
    assert not Path("out").exists()


@pytest.fixture(scope="module")
def solver(tiny_model, tmp_path_factory):
    """The tiny model, taught to state one of four answers: right now and then, so that there is a gradient."""
    folder = tmp_path_factory.mktemp("solver")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = np.random.default_rng(0)
    for _ in range(80):
        rows = []
        for text in PROBLEMS:
            prompt = tokenizer(text + "\n")["input_ids"]
            answer = tokenizer(f"#### {rng.integers(1, 1 + SHARE)}")["input_ids"] + [tokenizer.eos_token_id]
            rows.append((prompt, answer))
        batch = Batch.collate([prompt for prompt, _ in rows], [answer for _, answer in rows], 1)
        labels_BT = torch.where(batch.response_BT, batch.tokens_BT, -100)
        optimizer.zero_grad()
        model(batch.tokens_BT, labels=labels_BT).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def by_hand(root, solver, dvp, tmp_path_factory):
    """`dvp bias --model` with an exact engine."""
    folder = tmp_path_factory.mktemp("by-hand")
    small_experiment(root, folder)
    rows = [{"problem": text, "answer": ANSWER} for text in PROBLEMS]
    pd.DataFrame(rows).to_parquet(folder / "problems.parquet")
    arguments = ["--model", solver, "--engine", "fp32", "--experiment", "small_bias", "--seed", 3]
    status, line, said = dvp("bias", *arguments, "--problems", "problems.parquet", "--output", "out", cwd=folder)
    assert status == 0, line
    return folder / "out", said


@pytest.mark.slow
def test_naive_rloo_on_an_exact_engine_is_unbiased(by_hand):
    folder, said = by_hand
    table = pd.read_parquet(folder / "estimators.parquet").set_index("method")
    record = read_json(folder / "bias.json", "engine", "seed", "git_commit", "reference", "paired")
    assert record["files"] == {name: sha256_file(folder / name) for name in record["files"]}
    assert record["engine"] == "fp32"
    assert 0 < record["reference"]["reward"] < 1
    naive = table.loc["rloo"]
    assert abs(naive["squared_bias"]) < 3 * naive["squared_bias_se"]
    assert naive["variance"] > 3 * naive["variance_se"] > 0
    # All ratios are 1 but for rounding.
    for method in ("rloo_tis", "rloo_mis"):
        assert table.loc[method, "kept_fraction"] == 1
        assert table.loc[method, "mean_weight"] == pytest.approx(1, abs=1e-4)
        for name in ("squared_bias", "variance"):
            assert table.loc[method, name] == pytest.approx(naive[name], abs=1e-3 * naive["variance"])
    # An exact engine leaves nothing but rounding, where separate samples leave their noise.
    assert table.loc["rloo", ["weight_ess", "weight_mean"]].tolist() == pytest.approx([1, 1], abs=1e-4)
    assert record["paired"]["weight_ess"] == table.loc["rloo", "weight_ess"]
    for method in ("rloo", "rloo_mis"):
        assert abs(table.loc[method, "paired_squared_bias"]) < 1e-6 < table.loc[method, "squared_bias_se"]
    assert table.loc["rloo", ["paired_squared_bias_pruned", "weight_ess_pruned"]].isna().all()
    # On these samples DVP is unbiased for its own objective, not for that of the whole vocabulary.
    assert abs(table.loc["dvp", "paired_squared_bias_pruned"]) < 1e-6
    assert table.loc["dvp", "paired_squared_bias_se"] > 1e-6
    assert table.loc["dvp", "rho"] == "0.05"
    # Mask replay: the engine's sets are the trainer's own here.
    assert math.isnan(table.loc["dvp_replay", "paired_squared_bias_pruned"])
    for name in ("squared_bias", "variance", "kept_fraction", "paired_squared_bias"):
        assert table.loc["dvp_replay", name] == pytest.approx(table.loc["dvp", name], rel=1e-3, abs=1e-6), name
    variance = pd.read_parquet(folder / "variance.parquet").set_index(["method", "position"])
    assert set(variance.index.get_level_values("position")) == {"all", "1-2", "3-8"}
    for method in table.index:
        assert variance.loc[(method, "all"), "variance"] == pytest.approx(table.loc[method, "variance"])
    assert table.loc["otb_oracle", "variance"] != table.loc["otb", "variance"]
    proxy = pd.read_parquet(folder / "proxy.parquet").set_index("position")
    assert proxy.loc["all", "tokens"] == proxy.loc[["1-2", "3-8"], "tokens"].sum() > 8
    assert -1 <= proxy.loc["all", "rank_correlation"] <= 1
    assert "gradients: step" in said


def prepared(experiment, solver, folder, file, columns, **values):
    """The results of the stages before: the solver as base model, and the six problems in a file."""
    results = folder / "results" / "small_bias"
    write_text(results / "config.yaml", dump_experiment(experiment))
    shutil.copytree(solver, results / "base")
    (results / "data").mkdir()
    table = problem_table(6)
    table["id"] = [str(number) for number in range(1, 7)]
    write_problems(results / "data" / file, columns, **table.to_dict("list"), **values)
    for stage, part in (("base", "base"), ("prepare", "data")):
        record = {"tracking_key": stage, "config_hash": experiment.config_hash(stage)}
        write_json(results / part / "manifest.json", record | {"files": checksums(results / part)})
    return results


@pytest.mark.slow
def test_a_cell_of_an_experiment_is_the_same_measurement_again(by_hand, root, solver, dvp, tmp_path):
    """The same model, engine, problems and seed through the other door: equal to the last bit, and reported."""
    experiment = small_experiment(root, tmp_path)
    results = prepared(experiment, solver, tmp_path, "train.parquet", TRAIN_COLUMNS)
    measurement = experiment.measurements("bias")[0]
    status, line, _ = dvp("bias", "--config", results / "config.yaml", "--measurement", measurement.path, cwd=tmp_path)
    assert status == 0, line
    record = read_json(results / "bias" / measurement.path / "bias.json", "files")
    assert len(record["files"]) == 5
    for name in record["files"]:
        pd.testing.assert_frame_equal(
            pd.read_parquet(results / "bias" / measurement.path / name), pd.read_parquet(by_hand[0] / name)
        )
    assert list((results / "tracking").rglob("bias-by~fp32-seed~3.json"))
    only = experiment.model_copy(update={"bias": experiment.bias.model_copy(update={"engines": ["fp32"]})})
    loaded = Reader(only, results)
    assert list(statistics(only, loaded))
    assert all(origin["tracking_key"] for origin in loaded.files.values())

    (results / "base" / "config.json").write_text("{}")
    status, line, _ = dvp("bias", "--config", results / "config.yaml", "--measurement", measurement.path, cwd=tmp_path)
    assert status == 2
    assert "altered since it was written" in line


@pytest.mark.slow
def test_a_tasks_own_problems_are_measured(by_hand, root, solver, dvp, tmp_path):
    """The same problems as a task, and no training problems: the same numbers, under the task's name."""
    changes = {"engines": ["fp32"], "tasks": ["held_out"], "position_bins": [], "norm_responses": 0}
    experiment = small_experiment(root, tmp_path, **changes)
    results = prepared(experiment, solver, tmp_path, "eval.parquet", EVAL_COLUMNS, task="held_out")
    (measurement,) = experiment.measurements("bias")
    status, line, _ = dvp("bias", "--config", results / "config.yaml", "--measurement", measurement.path, cwd=tmp_path)
    assert status == 0, line
    folder = results / "bias" / "base" / "by~fp32" / "on~held_out" / "seed~3"
    found, expected = (pd.read_parquet(place / "estimators.parquet") for place in (folder, by_hand[0]))
    for name in ("reward", "variance", "paired_squared_bias", "weight_ess"):
        # Parts by position are summed there.
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-6, err_msg=name)
    assert list((results / "tracking").rglob("bias-by~fp32-on~held_out-seed~3.json"))
    assert {one.where["task"] for one in statistics(experiment, Reader(experiment, results))} == {"held_out"}
