"""What is implausible about log-probs is named, each fault by its number, and good measurements are left alone."""

import json

import numpy as np
import pytest

from dvp.analysis.suspicions import suspicions
from dvp.cli import main
from dvp.errors import DvpError

V, LENGTH = 200, 50


def softmax(logits_NV):
    p_NV = np.exp(logits_NV - logits_NV.max(axis=1, keepdims=True))
    return p_NV / p_NV.sum(axis=1, keepdims=True)


def cut(q_NV, top_p):
    """Each row of q_NV restricted to its likeliest tokens, which have top_p of it, and renormalised."""
    sorted_NV = -np.sort(-q_NV, axis=1)
    least_N = sorted_NV[np.arange(len(q_NV)), (sorted_NV.cumsum(axis=1) < top_p).sum(axis=1)]
    kept_NV = np.where(q_NV >= least_N[:, None], q_NV, 0.0)
    return kept_NV / kept_NV.sum(axis=1, keepdims=True)


class Measured:
    """Tokens sampled by an engine whose logits are the trainer's with noise; as sampled, or with a fault."""

    def __init__(self, noise=0.05, tokens=2000, seed=0, engine=1.0, trainer=1.0, raw=1.0, top_p=1.0):
        """Temperatures of the engine's and the trainer's log-probs; `raw`, of what the engine sampled, not reported."""
        random = np.random.default_rng(seed)
        z_NV = random.standard_normal((tokens, V)) * random.uniform(0.5, 6, (tokens, 1))
        noisy_NV = z_NV + noise * random.standard_normal(z_NV.shape)
        q_NV = softmax(noisy_NV / engine)
        q_NV = q_NV if top_p == 1.0 else cut(q_NV, top_p)
        sampled_NV = q_NV if raw == 1.0 else softmax(noisy_NV / raw)
        token_N = (sampled_NV.cumsum(axis=1) < random.random((tokens, 1))).sum(axis=1).clip(max=V - 1)
        rows = np.arange(tokens)
        self.log_q_N, self.log_p_N = (np.log(of_NV[rows, token_N]) for of_NV in (q_NV, softmax(z_NV / trainer)))
        self.response_N, self.position_N = rows // LENGTH, rows % LENGTH

    def found(self, kept_N=slice(None), error=None, limit=None):
        log_ratio_N = self.log_p_N - self.log_q_N
        columns = (self.log_q_N, self.log_p_N, np.expm1(log_ratio_N) - log_ratio_N, self.response_N, self.position_N)
        return suspicions(*(values_N[kept_N] for values_N in columns), error, limit)


@pytest.mark.parametrize("tokens", [1, 2, 5, 30, 2000])
@pytest.mark.parametrize("noise", [1e-6, 1e-2, 0.05, 0.2, 0.5])
def test_good_measurements_of_any_size_raise_none(noise, tokens):
    assert [Measured(noise, tokens, seed).found() for seed in range(20)] == [[]] * 20


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.5])
def test_what_a_correction_has_kept_raises_none(noise):
    """Responses that MIS keeps, and tokens within a mask."""
    measured = Measured(noise, 20000)
    log_ratio_N = measured.log_p_N - measured.log_q_N
    kept_N = np.abs(np.bincount(measured.response_N, log_ratio_N))[measured.response_N] < np.log(2)
    assert measured.found(kept_N) == []
    assert measured.found(np.abs(log_ratio_N) < np.log(2)) == []


def test_log_probs_that_were_rounded_raise_none():
    measured = Measured()
    for name in ("log_q_N", "log_p_N"):
        bits_N = (getattr(measured, name).astype(np.float32).view(np.uint32) + 0x8000) & 0xFFFF0000
        setattr(measured, name, bits_N.view(np.float32).astype(float))
    assert measured.found() == []


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"engine": 0.7}, "another temperature"),
        ({"engine": 1.3}, "another temperature"),
        ({"trainer": 0.7}, "another temperature"),
        ({"raw": 0.7, "trainer": 0.7}, "not sampled from the engine's log-probs"),
        ({"top_p": 0.95}, "of a part of the vocabulary that has 9"),
        ({"top_p": 0.95, "noise": 0.2}, "of a part of the vocabulary that has 9"),
        ({"noise": 3.0}, "This is an engine error"),
    ],
)
def test_a_fault_of_the_distribution_is_named(fault, says):
    assert says in " ".join(Measured(tokens=20000, **fault).found())


@pytest.mark.parametrize("fill", [0.0, -1.0, -20.0])
@pytest.mark.parametrize("side", ["log_q_N", "log_p_N"])
def test_a_fill_value_is_named(side, fill):
    measured = Measured()
    getattr(measured, side)[::50] = fill
    first = measured.found()[0]
    assert first.startswith(f"{fill:g} is the {'engine' if side == 'log_q_N' else 'trainer'}'s log-prob of ")
    assert "tokens of 2,000, where the" in first


def test_columns_that_are_shifted_are_named():
    measured = Measured()
    measured.log_p_N = np.roll(measured.log_p_N, 1)
    assert "With one column shifted by a position it is 0.00" in measured.found()[0]


def test_units_of_a_logarithm_are_named():
    measured = Measured()
    measured.log_q_N = measured.log_q_N / np.log(2)
    assert "grow by 1.44" in measured.found()[0]


def test_an_error_that_grows_with_position_is_named():
    measured = Measured()
    measured.log_p_N = measured.log_p_N - measured.position_N / 10
    assert "It grows with position (" in measured.found()[-1]


def test_rounding_alone_is_too_coarse_and_no_engine_error():
    """The trainer with the engine's own weights computes what the engine does, and yet they are far apart."""
    found = Measured(noise=3.0, tokens=20000).found(error=1e-4, limit=1e-3)
    assert "too coarse for this model: KL" in " ".join(found)
    assert "engine error" not in " ".join(found)
    assert "with its own weights the trainer is off it by 0.01" in Measured().found(error=0.01, limit=1e-3)[-1]


def test_columns_that_are_the_same_are_refused():
    measured = Measured()
    measured.log_p_N = measured.log_q_N.copy()
    with pytest.raises(DvpError, match="identical at all 2,000 tokens: one was copied"):
        measured.found()


FILES = {
    "copied": (
        {"rollout_log_probs": [-0.5, -1.0, -0.2], "old_log_probs": [-0.5, -1.0, -0.2]},
        2,
        "identical at all 12",
    ),
    "temperature": (
        {"engine_logprobs": [-k / 10 for k in range(1, 30)], "trainer_logprobs": [-0.06 * k for k in range(1, 30)]},
        0,
        "grow by 1.67",
    ),
    "another model": (
        {"engine_logprobs": [-0.1, -2.0, -0.3, -7.0], "trainer_logprobs": [-9.0, -0.1, -12.0, -0.2]},
        0,
        "This is an engine error: KL ",
    ),
    "truncated": (
        {"engine_logprobs": [-1.0, -1.5, -2.0], "trainer_logprobs": [-1.1, -1.6, -2.1]},
        0,
        "The mean ratio p/q is 0.9048",
    ),
    "fill": ({"engine_logprobs": [-0.5, -9999.0], "trainer_logprobs": [-0.5, -1.0]}, 2, "4 of 8 tokens have no usable"),
}


@pytest.mark.parametrize(("row", "status", "says"), FILES.values(), ids=FILES)
def test_the_verb_doubts_its_file(tmp_path, monkeypatch, capsys, root, row, status, says):
    """Before any advice, which is then not given."""
    monkeypatch.chdir(root)
    monkeypatch.setattr("dvp.analysis.forecast.SIMULATED", 2)
    file, out = tmp_path / "dump.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    assert main(["diagnose-rollouts", str(file), "--output", str(out)]) == status
    printed = " ".join("".join(capsys.readouterr()).split())
    assert says in printed
    assert "needs no correction" not in printed
    assert "It needs a correction" not in printed
    if status == 0:
        page = " ".join((out / "mismatch.html").read_text().split())
        assert says in page
        assert page.index(says) < page.index("No correction is advised before that is explained")
