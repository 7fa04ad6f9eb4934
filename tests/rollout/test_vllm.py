"""The real vLLM, its CPU build: what it reports is what it sampled from, and a reloaded engine is a fresh one."""

import copy
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dvp.config import EngineConfig
from dvp.errors import DvpError
from dvp.rollout.engine import Sampling
from dvp.rollout.rounding import is_rounded, round_weight
from dvp.rollout.vllm import VllmEngine, prove_min_p

pytestmark = pytest.mark.slow
PROMPTS = [[20, 30, 40, 50], [60, 70], [80, 90, 100, 110, 120, 130]]
SEEDS = [11, 22, 33]


@pytest.fixture(scope="module")
def fp32(tiny_model):
    """The one engine of this process, with the tiny model's weights; tests that load others say so."""
    return VllmEngine(tiny_model, EngineConfig(dtype="float32"), max_model_len=128, max_num_seqs=32, seed=0)


@pytest.fixture(scope="module")
def changed(tiny_model):
    """The tiny model after an update: other weights under the same names."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def reference_log_probs(model, prompt, response, rho, temperature=1.0):
    """log q of the response in float64, from dense logits, over the safe vocabulary if ρ is given."""
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        logits = model.double()(ids).logits[0, len(prompt) - 1 : -1] / temperature
    model.float()
    if rho is not None:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(rho), -math.inf)
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize(("rho", "temperature"), [(None, 1.0), (0.02, 1.0), (math.exp(-13), 1.0), (0.05, 0.7)])
def test_reported_log_probs_are_those_of_the_sampled_distribution(fp32, tiny_model, rho, temperature):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    fp32.load_weights(model.named_parameters())
    sampling = Sampling(max_tokens=24, n=3, min_p=rho, temperature=temperature)
    for prompt, group in zip(PROMPTS, fp32.generate(PROMPTS, sampling, SEEDS), strict=True):
        assert len(group) == 3
        for one in group:
            expected = reference_log_probs(model, prompt, one.token_ids, rho, temperature)
            assert torch.allclose(torch.tensor(one.log_probs).double(), expected, atol=2e-5)


def test_the_same_seed_gives_the_same_responses_and_another_does_not(fp32):
    sampling = Sampling(max_tokens=16, n=4)
    first = fp32.generate(PROMPTS, sampling, SEEDS)
    assert fp32.generate(PROMPTS, sampling, SEEDS) == first
    assert fp32.generate(PROMPTS, sampling, [1, 2, 3]) != first
    assert len({tuple(one.token_ids) for one in first[0]}) > 1


def test_finish_reasons(fp32, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ends = [one for group in fp32.generate(PROMPTS, Sampling(max_tokens=60, n=30), SEEDS) for one in group]
    assert {one.finish_reason for one in ends} == {"stop", "length"}
    for one in ends:
        assert (one.token_ids[-1] == model.config.eos_token_id) == (one.finish_reason == "stop")
        assert len(one.token_ids) == len(one.log_probs) <= 60


def test_a_prompt_that_does_not_fit_is_named(fp32):
    with pytest.raises(
        DvpError, match=r"prompt 1 has 120 tokens; with 16 tokens of response it exceeds the engine's 128"
    ):
        fp32.generate([[5], [7] * 120], Sampling(max_tokens=16), [0, 0])


def sample_elsewhere(*arguments) -> subprocess.Popen:
    """Start engine_process.py: a process can hold one engine."""
    script = Path(__file__).parent / "engine_process.py"
    return subprocess.Popen([sys.executable, script, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def completions(process: subprocess.Popen) -> list:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("precision", [{"dtype": "float32"}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}])
def test_a_reloaded_engine_equals_a_fresh_one_exactly(precision, tiny_model, changed, tmp_path):
    """The tied-embeddings trap: without lm_head.weight in the stream the packed head silently keeps the old weights."""
    changed.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    setting = json.dumps(precision)
    reloaded = sample_elsewhere(tiny_model, setting, tmp_path)
    fresh = sample_elsewhere(tmp_path, setting)
    assert completions(reloaded) == completions(fresh)


def test_rounded_weights_reach_the_engine(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    exact = copy.deepcopy(model)
    for name, value in model.named_parameters():
        if is_rounded(name, value):
            value.data = round_weight(value.data, "int4")
    precision = json.dumps({"dtype": "float32", "weight_rounding": "int4"})
    differences = []
    sampled = completions(sample_elsewhere(tiny_model, precision, tiny_model))
    for prompt, group in zip(PROMPTS, sampled, strict=True):
        for one in group:
            expected = reference_log_probs(model, prompt, one["token_ids"], None)
            assert torch.allclose(torch.tensor(one["log_probs"]).double(), expected, atol=2e-5)
            differences.append((expected - reference_log_probs(exact, prompt, one["token_ids"], None)).abs().max())
    assert max(differences) > 0.1


def test_the_proof_passes_on_the_real_engine(fp32):
    for rho in (0.5, 0.01, math.exp(-13)):
        prove_min_p(fp32, PROMPTS, rho)


class Ignoring(VllmEngine):
    """An engine whose server drops min_p."""

    def __init__(self, engine):
        self.llm = engine.llm

    def log_probs(self, prompt, min_p):
        return super().log_probs(prompt, None)


class IgnoringSmall(Ignoring):
    """vLLM's old V0: values up to 1e-5 were taken for 0."""

    def log_probs(self, prompt, min_p):
        return VllmEngine.log_probs(self, prompt, min_p if min_p and min_p > 1e-5 else None)


class NotRenormalised(Ignoring):
    """Masks, but reports the log-probs of before."""

    def log_probs(self, prompt, min_p):
        full = VllmEngine.log_probs(self, prompt, None)
        return full.where(VllmEngine.log_probs(self, prompt, min_p) > -50, -math.inf)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Ignoring, "ignores min_p = 0.3"),
        (IgnoringSmall, "ignores min_p = 2.26"),
        (NotRenormalised, "does not report log-probabilities after min_p = 0.3"),
    ],
)
def test_an_engine_that_does_not_apply_rho_is_refused(fp32, changed, kind, message):
    # Sharper logits, so that e⁻¹³ prunes at this position.
    sharp = [(name, 4 * value if name == "model.norm.weight" else value) for name, value in changed.named_parameters()]
    fp32.load_weights(sharp)
    prove_min_p(fp32, PROMPTS, math.exp(-13))
    with pytest.raises(DvpError, match=message):
        prove_min_p(kind(fp32), PROMPTS, math.exp(-13))
