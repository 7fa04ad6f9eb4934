"""The real vLLM, its CPU build: what it reports is what it sampled from, and a reloaded engine is a fresh one."""

import copy
import cProfile
import ctypes
import json
import math
import os
import resource
import subprocess
import sys
from dataclasses import fields
from itertools import chain, takewhile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dvp.core.batch import Batch
from dvp.core.safe_vocabulary import EngineSets, Entropy, EntropyScaled, FixedRho, MassBudget, TopNSigma
from dvp.errors import DvpError
from dvp.experiment.tools import Calculator
from dvp.experiment.training import EngineConfig
from dvp.rollout.engine import Sampling
from dvp.rollout.layout import read_layout
from dvp.rollout.rounding import round_weight
from dvp.rollout.turns import ToolEngine
from dvp.rollout.vllm import VllmEngine, _round_cache, prove_safe_vocabulary
from dvp.tools import make_tool
from dvp.training.backend import Policy

pytestmark = pytest.mark.slow
PROMPTS = [[20, 30, 40, 50], [60, 70], [80, 90, 100, 110, 120, 130]]
SEEDS = [11, 22, 33]
# Prunes differently where the tiny model is sure than where it is not, without reaching its limits everywhere.
ENTROPY = EntropyScaled(0.05, Entropy(rule="entropy", alpha=1.5, target_entropy=3.0, lowest=1e-4, highest=0.5))


@pytest.fixture(scope="module")
def fp32(tiny_model):
    """The one engine of this process, with the tiny model's weights; tests that load others say so."""
    return VllmEngine(
        tiny_model, EngineConfig(dtype="float32"), max_model_len=128, max_num_seqs=32, seed=0, rules=[ENTROPY]
    )


@pytest.fixture(scope="module")
def changed(tiny_model):
    """The tiny model after an update: other weights under the same names."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def dense_logits(model, prompt, response, temperature=1.0):
    """Logits (T, V) of the response's positions in float64."""
    with torch.no_grad():
        logits = model.double()(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    model.float()
    return logits


def reference_log_probs(model, prompt, response, rho=None, temperature=1.0):
    """log q of the response in float64, from dense logits, over the safe vocabulary if ρ is given."""
    logits = dense_logits(model, prompt, response, temperature)
    if rho is not None:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(rho), -math.inf)
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize(("rho", "temperature"), [(None, 1.0), (0.02, 1.0), (math.exp(-13), 1.0), (0.05, 0.7)])
def test_reported_log_probs_are_those_of_the_sampled_distribution(fp32, tiny_model, rho, temperature):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    fp32.load_weights(model.named_parameters())
    rule = None if rho is None else FixedRho(rho)
    sampling = Sampling(max_tokens=24, n=3, safe_vocabulary=rule, temperature=temperature)
    for prompt, group in zip(PROMPTS, fp32.generate(PROMPTS, sampling, SEEDS), strict=True):
        assert len(group) == 3
        for one in group:
            expected = reference_log_probs(model, prompt, one.token_ids, rho, temperature)
            assert torch.allclose(torch.tensor(one.log_probs).double(), expected, atol=2e-5)


def test_the_whole_vocabulary_comes_with_the_same_responses_as_without(fp32, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    fp32.load_weights(model.named_parameters())
    plain = fp32.generate(PROMPTS, Sampling(max_tokens=24, n=3), SEEDS)
    whole = fp32.generate(PROMPTS, Sampling(max_tokens=24, n=3, whole_vocabulary=True), SEEDS)
    for prompt, before, after in zip(PROMPTS, plain, whole, strict=True):
        first_V = fp32.log_probs(prompt, None)
        for one, same in zip(before, after, strict=True):
            assert one.vocabulary_log_probs_TV is None
            assert (same.token_ids, same.finish_reason) == (one.token_ids, one.finish_reason)
            assert same.text == one.text
            assert same.text.strip()
            assert same.log_probs == pytest.approx(one.log_probs, abs=1e-5)
            values_TV = same.vocabulary_log_probs_TV
            assert values_TV.shape == (len(same.token_ids), 400)
            assert values_TV.double().logsumexp(-1).abs().max() < 1e-5
            assert torch.allclose(values_TV[0], first_V, atol=2e-5)
            expected_TV = dense_logits(model, prompt, same.token_ids).log_softmax(-1)
            assert torch.allclose(values_TV.double(), expected_TV, atol=5e-5)


def test_log_probs_are_read_without_decoding_the_vocabulary(fp32):
    """To decode each of 151,936 tokens took two seconds a prompt, and a run asks for 48 before it starts."""
    profile = cProfile.Profile()
    values_V = profile.runcall(fp32.log_probs, PROMPTS[0], None)
    decoded = sum(entry.callcount for entry in profile.getstats() if getattr(entry.code, "co_name", "") == "decode")
    assert decoded < len(values_V) == 400


def test_the_whole_vocabulary_says_what_was_pruned(fp32, tiny_model):
    fp32.load_weights(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).named_parameters())
    sampling = Sampling(max_tokens=8, safe_vocabulary=FixedRho(0.05), whole_vocabulary=True)
    for prompt, (one,) in zip(PROMPTS, fp32.generate(PROMPTS, sampling, SEEDS), strict=True):
        values_TV = one.vocabulary_log_probs_TV
        assert 0 < values_TV.isfinite().sum() < values_TV.numel()
        assert values_TV.double().logsumexp(-1).abs().max() < 1e-5
        assert torch.equal(values_TV[0].isfinite(), fp32.log_probs(prompt, FixedRho(0.05)).isfinite())


def in_budget(p_V, rule):
    """The safe set under a budget of mass, least likely entries first; the tiny model's have no ties."""
    pruned, safe = 0.0, torch.ones(len(p_V), dtype=torch.bool)
    for entry in p_V.argsort():
        pruned += p_V[entry].item()
        if pruned > rule.budget:
            return safe
        safe[entry] = False
    raise AssertionError("a budget below 1 leaves something")


def by_entropy(p_V, rule):
    settings = rule.settings
    log_rho = math.log(rule.rho) + settings.alpha * (settings.target_entropy + (p_V * p_V.log()).sum().item())
    return p_V >= p_V.max() * min(max(math.exp(log_rho), settings.lowest), settings.highest)


def by_spread(p_V, rule):
    return p_V.log() >= p_V.log().max() - rule.n * p_V.log().std(correction=0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rule", [MassBudget(0.3), MassBudget(0.02), ENTROPY, TopNSigma(1.5)])
def test_a_rule_by_state_is_applied_to_each_state(fp32, tiny_model, rule, temperature):
    """After temperature, at every position of requests that end at different times and so change rows."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    fp32.load_weights(model.named_parameters())
    sampling = Sampling(max_tokens=40, n=6, safe_vocabulary=rule, temperature=temperature)
    groups = fp32.generate(PROMPTS, sampling, SEEDS)
    sizes, lengths = set(), set()
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for one in group:
            lengths.add(len(one.token_ids))
            p_TV = dense_logits(model, prompt, one.token_ids, temperature).softmax(-1)
            for p_V, token, reported in zip(p_TV, one.token_ids, one.log_probs, strict=True):
                safe_V = {MassBudget: in_budget, EntropyScaled: by_entropy, TopNSigma: by_spread}[type(rule)](p_V, rule)
                assert safe_V[token]
                assert reported == pytest.approx((p_V[token] / p_V[safe_V].sum()).log().item(), abs=5e-5)
                sizes.add(safe_V.sum().item())
    assert len(sizes) > 5
    assert min(sizes) < 400
    assert len(lengths) > 1 or temperature < 1  # cold, the tiny model ends hardly any


def test_a_mass_budget_keeps_its_promise_in_the_engine(fp32, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    fp32.load_weights(model.named_parameters())
    for prompt in PROMPTS:
        full, kept = fp32.log_probs(prompt, None), fp32.log_probs(prompt, MassBudget(0.05)).isfinite()
        pruned = full.double().exp()[~kept].sum().item()
        assert pruned <= 0.05
        assert pruned + full.double().exp()[kept].min().item() > 0.05


def test_the_same_seed_gives_the_same_responses_and_another_does_not(fp32):
    sampling = Sampling(max_tokens=16, n=4)
    first = fp32.generate(PROMPTS, sampling, SEEDS)
    assert fp32.generate(PROMPTS, sampling, SEEDS) == first
    assert fp32.generate(PROMPTS, sampling, [1, 2, 3]) != first
    assert len({tuple(one.token_ids) for one in first[0]}) > 1


@pytest.fixture
def reporting(fp32, tiny_model, monkeypatch):
    fp32.load_weights(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).named_parameters())
    monkeypatch.setattr(fp32, "_reports_sets", True)
    return fp32


@pytest.mark.parametrize(("rule", "temperature"), [(FixedRho(0.05), 1.0), (FixedRho(0.01), 0.7), (ENTROPY, 1.0)])
def test_the_sets_that_tokens_were_sampled_from_are_reported(reporting, tiny_model, rule, temperature):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    sampling = Sampling(max_tokens=24, n=4, temperature=temperature, safe_vocabulary=rule, report_sets=True)
    first = reporting.generate(PROMPTS, sampling, SEEDS)
    again = reporting.generate(PROMPTS[::-1], sampling, SEEDS[::-1])[::-1]
    sizes = []
    for prompt, group, repeated in zip(PROMPTS, first, again, strict=True):
        for one, same in zip(group, repeated, strict=True):
            assert torch.equal(one.kept.ids_M, same.kept.ids_M)
            assert len(one.kept) == len(one.token_ids)
            assert one.kept.contain(torch.tensor(one.token_ids)).all()
            logits_TV = dense_logits(model, prompt, one.token_ids, temperature)
            inside_TV = torch.zeros_like(logits_TV, dtype=torch.bool)
            inside_TV[one.kept.entries] = True
            threshold_T1 = logits_TV.amax(1, keepdim=True) + rule.log_rho(logits_TV).double()[:, None]
            assert (logits_TV[inside_TV] >= (threshold_T1.expand_as(logits_TV)[inside_TV] - 1e-4)).all()
            assert (logits_TV[~inside_TV] < (threshold_T1.expand_as(logits_TV)[~inside_TV] + 1e-4)).all()
            log_z_T = logits_TV.masked_fill(~inside_TV, -torch.inf).logsumexp(1) - logits_TV.logsumexp(1)
            assert torch.allclose(one.kept.log_mass_N.double(), log_z_T, atol=2e-5)
            # log q = log q^mp + log Z'.
            log_q_T = logits_TV.log_softmax(1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(one.log_probs).double() + log_z_T, log_q_T, atol=2e-5)
            sizes += one.kept.sizes_N.tolist()
    assert len(set(sizes)) > 3


def test_sets_are_reported_by_an_engine_that_was_started_for_it(fp32, reporting, monkeypatch):
    with pytest.raises(DvpError, match="not started to report sets, or has none"):
        reporting.generate(PROMPTS, Sampling(max_tokens=1, report_sets=True), SEEDS)
    sampling = Sampling(max_tokens=1, safe_vocabulary=FixedRho(0.1), report_sets=True, top_p=0.9)
    with pytest.raises(DvpError, match="with top_p a token is not sampled from the set"):
        reporting.generate(PROMPTS, sampling, SEEDS)
    monkeypatch.setattr(fp32, "_reports_sets", False)
    with pytest.raises(DvpError, match="not started to report sets"):
        fp32.generate(PROMPTS, Sampling(max_tokens=1, safe_vocabulary=FixedRho(0.1), report_sets=True), SEEDS)


@pytest.mark.parametrize("rule", [FixedRho(0.05), ENTROPY])
def test_the_proof_passes_where_sets_are_reported(reporting, rule):
    prove_safe_vocabulary(reporting, PROMPTS, rule)


@pytest.fixture
def turns(fp32, tiny_model):
    """The engine with a calculator; a model of random weights writes these delimiters again and again."""
    settings = Calculator(kind="calculator", call=["a", "e"], max_turns=4, max_answer_tokens=12)
    return ToolEngine(fp32, make_tool(settings), settings, AutoTokenizer.from_pretrained(tiny_model))


@pytest.mark.parametrize("rule", [None, FixedRho(0.02), ENTROPY, EngineSets(FixedRho(0.02)), EngineSets(ENTROPY)])
def test_log_probs_over_turns_are_the_trainers(turns, tiny_model, rule, monkeypatch):
    """Token by token of every turn, with the tool's answers as context only; the trainer scores all turns at once."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    turns.load_weights(model.named_parameters())
    monkeypatch.setattr(turns.engine, "_reports_sets", replayed := isinstance(rule, EngineSets))
    sampling = Sampling(max_tokens=90, n=6, safe_vocabulary=rule.rule if replayed else rule, report_sets=replayed)
    groups = turns.generate(PROMPTS, sampling, SEEDS)
    responses = [response for group in groups for response in group]
    assert max(response.calls for response in responses) >= 2
    assert len({response.finish_reason for response in responses}) == 2
    batch = Batch.collate(
        [prompt for prompt in PROMPTS for _ in range(6)],
        [response.token_ids for response in responses],
        1,
        [response.written for response in responses],
        [response.kept for response in responses] if replayed else None,
    )
    with torch.no_grad():
        scored = Policy(model)(batch, safe=rule, temperature=1.0)
    sampled_N = torch.tensor([value for response in responses for value in response.log_probs])
    assert len(sampled_N) == len(scored.log_prob) < sum(len(response.token_ids) for response in responses)
    assert scored.target_in_safe.all()
    assert (scored.pruned_log_prob - sampled_N).abs().max() <= 1e-5


def test_a_rollout_in_turns_can_be_repeated(turns, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    rollouts = []
    for _ in range(2):
        turns.load_weights(model.named_parameters())  # as a step begins: with an empty prefix cache
        rollouts.append(turns.generate(PROMPTS, Sampling(max_tokens=90, n=6), SEEDS))
    assert rollouts[0] == rollouts[1]
    groups = rollouts[0]
    assert len({tuple(response.token_ids) for response in groups[0]}) == 6
    for response in (response for group in groups for response in group):
        assert len(response.token_ids) <= 90
        assert response.written[-1]
        # Exactly what was written, and the calculator's answers to it.
        text = turns._decoded(response.token_ids)
        assert text.count("<result>") == response.calls
        assert (response.finish_reason == "stop") == (response.token_ids[-1] == model.config.eos_token_id)


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


def sample_elsewhere(*arguments, **environment) -> subprocess.Popen:
    """Start engine_process.py: a process can hold one engine."""
    command = [sys.executable, Path(__file__).parent / "engine_process.py", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)


def completions(process: subprocess.Popen) -> list:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize(
    "precision",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
        {"dtype": "bfloat16", "head_dtype": "float32"},
    ],
)
def test_a_reloaded_engine_equals_a_fresh_one_exactly(precision, tiny_model, changed, tmp_path):
    """The tied-embeddings trap: without lm_head.weight in the stream the packed head silently keeps the old weights.

    Both processes also prove that they prune: in bf16, logits are full of ties, and one step of theirs is many times
    the proof's tolerance. A head in float32 has no ties.
    """
    changed.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    setting = json.dumps(precision)
    reloaded = sample_elsewhere(tiny_model, setting, tmp_path)
    fresh = sample_elsewhere(tmp_path, setting)
    assert completions(reloaded) == completions(fresh)


ROUNDS_THE_CACHE = {"ATEN_CPU_CAPABILITY": "avx2"}  # what torch then says of any processor


@pytest.mark.parametrize(("form", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_without_avx512_an_8_bit_cache_is_keys_and_values_of_8_bits(form, dtype, tiny_model):
    """Against transformers with plain attention over rounded keys and values, in float32."""
    engine = sample_elsewhere(tiny_model, json.dumps({"dtype": "float32", "kv_cache_dtype": form}), **ROUNDS_THE_CACHE)
    magnitudes = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    magnitudes = magnitudes[magnitudes.isfinite()]

    def cut(values):
        """To the next number of 8 bits toward zero."""
        return values.sign() * magnitudes[torch.searchsorted(magnitudes, values.abs().contiguous(), right=True) - 1]

    def attention(module, query, key, value, attention_mask, scaling, **options):
        groups, length = module.num_key_value_groups, query.shape[2]
        key, value = (cut(x).repeat_interleave(groups, dim=1) for x in (key, value))
        future = torch.ones(length, length).triu(1).bool()
        weights = (query @ key.transpose(2, 3) * scaling).masked_fill(future, -torch.inf).softmax(dim=-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    AttentionInterface.register("rounded_cache", attention)
    exact, rounded = (AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32) for _ in range(2))
    rounded.config._attn_implementation = "rounded_cache"
    off, moved = [], []
    for prompt, group in zip(PROMPTS, completions(engine), strict=True):
        for response in group:
            tokens, reported = response["token_ids"], torch.tensor(response["log_probs"])
            with torch.no_grad():
                logits_TV = rounded(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            expected = logits_TV.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            off.append((reported - expected).abs())
            moved.append((reported - reference_log_probs(exact, prompt, tokens)).abs())
    # A key that lies between two numbers of 8 bits may become either, as sums are rounded otherwise.
    assert torch.cat(off).median() < 1e-4
    assert torch.cat(off).mean() < 0.1 * torch.cat(moved).mean()


def test_a_model_of_which_nothing_could_be_rounded_is_refused():
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=torch.nn.Linear(2, 2)))
    with pytest.raises(DvpError, match="kv_cache_dtype: fp8 needs AVX-512 here"):
        _round_cache(worker, "fp8")


@pytest.mark.skipif("AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="needs AVX-512")
def test_rounded_keys_and_values_are_what_vllms_own_8_bit_cache_computes_with(tiny_model):
    # A head in bfloat16 would round away what differs.
    precision = {"dtype": "bfloat16", "head_dtype": "float32"}
    own, rounded, whole = (
        completions(sample_elsewhere(tiny_model, json.dumps(precision | {"kv_cache_dtype": form}), **variables))
        for form, variables in (("fp8", {}), ("fp8", ROUNDS_THE_CACHE), ("auto", {}))
    )

    def distance(one, other):
        """Mean |Δ log-prob| while the same tokens were sampled."""
        found = []
        for left, right in zip(chain(*one), chain(*other), strict=True):
            pairs = zip(left["token_ids"], right["token_ids"], left["log_probs"], right["log_probs"], strict=False)
            found += [abs(a - b) for first, second, a, b in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return sum(found) / len(found)

    assert distance(own, rounded) < 0.1 * distance(own, whole)


@pytest.mark.parametrize(
    ("model_type", "scaling"), [("granite", {"logits_scaling": 4.0}), ("cohere", {"logit_scale": 0.25})]
)
def test_the_engine_scales_logits_as_the_trainer_does(model_type, scaling, tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    shape = json.loads((tiny_model / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("intermediate_size", "max_position_embeddings", "eos_token_id", "pad_token_id")
    torch.manual_seed(0)
    options = {name: shape[name] for name in names} | {"bos_token_id": None, "initializer_range": 0.5} | scaling
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options)).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = sample_elsewhere(tmp_path, json.dumps({"dtype": "float32"}))

    policy, compared = Policy(model), 0
    for prompt, group in zip(PROMPTS, completions(engine), strict=True):
        for response in group:
            batch = Batch.collate([prompt], [response["token_ids"]], pad=0)
            with torch.no_grad():
                log_prob_N = policy(batch, safe=None, temperature=1.0).log_prob
            torch.testing.assert_close(log_prob_N, torch.tensor(response["log_probs"]), atol=1e-3, rtol=0)
            compared += len(log_prob_N)
    assert compared > 100


@pytest.fixture
def asked_of_vllm(tiny_model, monkeypatch):
    """What vLLM would be started with, on a GPU or not; it is not started."""
    import vllm
    from vllm import EngineArgs

    def ask(gpu: bool, config: dict | None = None, **asked_for) -> dict:
        asked = {}

        def refuse(model, **options):
            ask.steps.append("vLLM starts")
            asked.update(options)
            raise ValueError("enough")

        ask.steps = []
        monkeypatch.setattr(vllm, "LLM", refuse)
        monkeypatch.setattr(torch.cpu, "_init_amx", lambda: ask.steps.append("AMX"), raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        engine = EngineConfig(dtype="bfloat16", **(config or {}))
        with pytest.raises(DvpError, match=r"vLLM does not start on .*: enough"):
            VllmEngine(tiny_model, engine, max_model_len=128, max_num_seqs=32, seed=0, **asked_for)
        known = {field.name for field in fields(EngineArgs)} | {"use_tqdm_on_load"}
        assert set(asked) <= known
        return asked

    return ask


def test_cuda_graphs_and_chunked_prefill_are_for_a_gpu(asked_of_vllm):
    options = asked_of_vllm(gpu=True)
    assert not options["enforce_eager"]
    assert options["enable_chunked_prefill"]
    assert asked_of_vllm(gpu=True, config={"cuda_graphs": False})["enforce_eager"]
    options = asked_of_vllm(gpu=False)
    assert options["enforce_eager"]
    assert not options["enable_chunked_prefill"]


def test_the_kernel_is_asked_for_amx_before_vllm_starts(asked_of_vllm):
    asked_of_vllm(gpu=False)
    assert asked_of_vllm.steps == ["AMX", "vLLM starts"]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_memory_that_was_freed_is_used_again():
    def fill() -> None:
        torch.empty(2**24).fill_(1.0)  # more than glibc by itself would ever keep

    for _ in range(3):
        fill()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        fill()
    # 16,384 pages each, had they been given back.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 8 * 16384 / 2


def test_an_engines_other_processes_are_not_forked():
    """A process that has looked for a GPU has begun with CUDA, and a fork of it cannot use any."""
    from vllm import envs

    assert envs.VLLM_WORKER_MULTIPROC_METHOD == "spawn"


def test_a_fixed_rho_needs_no_other_model_runner_than_vllms_default(fp32, asked_of_vllm, monkeypatch):
    from vllm import envs

    for rules in ([], [None], [FixedRho(0.1)]):
        assert "logits_processors" not in asked_of_vllm(gpu=True, rules=rules)
        assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    # It is V2 where there is Triton: nothing that the engine asks for is unknown to it.
    envs.disable_envs_cache()
    config = fp32.llm.llm_engine.vllm_config
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setattr(config.model_config, "logits_processors", None)
    assert config.use_v2_model_runner
    assert asked_of_vllm(gpu=True, rules=[FixedRho(0.1)], report_sets=True)["logits_processors"]
    assert asked_of_vllm(gpu=True, rules=[FixedRho(0.1), MassBudget(0.1)])["logits_processors"]
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert not config.use_v2_model_runner


def test_triton_multiplies_float32_exactly():
    """It is in Triton that vLLM's attention for float32 is written; its other products ask PyTorch, which is exact."""
    knobs = pytest.importorskip("triton").knobs
    assert knobs.language.fp32_default == "ieee"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.fixture
def sleeping(fp32, monkeypatch):
    """`fp32` with vLLM's sleep on a GPU, played: level 2 leaves nothing but copies of the buffers (gpu_worker.py)."""
    model = fp32.llm.collective_rpc(lambda worker: worker.model_runner.model)[0]
    saved = {}

    def sleep(level):
        saved.update({name: buffer.clone() for name, buffer in model.named_buffers()})
        for tensor in (*model.parameters(), *model.buffers()) if level == 2 else ():
            tensor.data.fill_(7)

    def wake_up():
        for name, buffer in model.named_buffers():
            buffer.copy_(saved[name])

    monkeypatch.setattr(fp32.llm, "sleep", sleep)
    monkeypatch.setattr(fp32.llm, "wake_up", wake_up)
    monkeypatch.setattr(fp32, "_sleeps", True)
    yield fp32
    monkeypatch.setattr(fp32, "_asleep", None)


def test_an_engine_that_slept_without_its_weights_lacks_nothing_after_the_next(sleeping, changed):
    sleeping.load_weights(changed.named_parameters())
    before = [sleeping.log_probs(prompt, None) for prompt in PROMPTS]
    sleeping.sleep(keep_weights=False)
    sleeping.load_weights(changed.named_parameters())
    for prompt, expected_V in zip(PROMPTS, before, strict=True):
        assert torch.equal(sleeping.log_probs(prompt, None), expected_V)


def test_an_engine_that_kept_its_weights_samples_at_once(sleeping, changed):
    sleeping.load_weights(changed.named_parameters())
    before_V = sleeping.log_probs(PROMPTS[0], None)
    sleeping.sleep(keep_weights=True)
    assert torch.equal(sleeping.log_probs(PROMPTS[0], None), before_V)


def test_a_weight_that_is_left_out_after_such_a_sleep_is_named(sleeping, changed):
    sleeping.sleep(keep_weights=False)
    with pytest.raises(DvpError, match="slept without its weights: load weights before anything else"):
        sleeping.generate(PROMPTS, Sampling(max_tokens=1), SEEDS)
    left_out = "model.layers.1.post_attention_layernorm.weight"
    with pytest.raises(DvpError, match=rf"the engine's weight {left_out} is NaN after loading"):
        sleeping.load_weights((name, value) for name, value in changed.named_parameters() if name != left_out)
    sleeping.load_weights(changed.named_parameters())


def test_an_engine_that_was_not_started_for_a_rule_refuses_it(fp32, monkeypatch):
    monkeypatch.setattr(fp32, "_by_state", False)
    with pytest.raises(DvpError, match=r"the engine was not started for MassBudget\(budget=0.1\)"):
        fp32.generate(PROMPTS, Sampling(max_tokens=1, safe_vocabulary=MassBudget(0.1)), SEEDS)
    fp32.generate(PROMPTS, Sampling(max_tokens=1, safe_vocabulary=FixedRho(0.1)), SEEDS)


@pytest.mark.parametrize("processes", [1, 2])
def test_rounded_weights_reach_the_engine(tiny_model, processes):
    """On several GPUs an engine has a process on each, and each reads the weights."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    exact = copy.deepcopy(model)
    for name in read_layout(tiny_model).matrices:
        model.get_parameter(name).data = round_weight(model.get_parameter(name).data, "int4")
    precision = json.dumps({"dtype": "float32", "weight_rounding": "int4"})
    differences = []
    update = [tiny_model] if processes == 1 else []
    sampled = completions(sample_elsewhere(tiny_model, precision, *update, ENGINE_PROCESSES=str(processes)))
    for prompt, group in zip(PROMPTS, sampled, strict=True):
        for one in group:
            expected = reference_log_probs(model, prompt, one["token_ids"], None)
            assert torch.allclose(torch.tensor(one["log_probs"]).double(), expected, atol=2e-5)
            differences.append((expected - reference_log_probs(exact, prompt, one["token_ids"], None)).abs().max())
    assert max(differences) > 0.1


def test_the_proof_passes_on_the_real_engine(fp32):
    for rule in [FixedRho(0.5), FixedRho(math.exp(-13)), MassBudget(0.02), MassBudget(0.0), ENTROPY]:
        prove_safe_vocabulary(fp32, PROMPTS, rule)


class Ignoring(VllmEngine):
    """An engine whose server drops the rule."""

    def __init__(self, engine):
        self.llm, self._config, self.max_model_len = engine.llm, engine._config, engine.max_model_len
        self._by_state, self._reports_sets = True, False

    def log_probs(self, prompt, rule):
        return super().log_probs(prompt, None)


class IgnoringSmall(Ignoring):
    """vLLM's old V0: values up to 1e-5 were taken for 0."""

    def log_probs(self, prompt, rule):
        return VllmEngine.log_probs(self, prompt, rule if rule and rule.rho > 1e-5 else None)


class NotRenormalised(Ignoring):
    """Masks, but reports the log-probs of before."""

    def log_probs(self, prompt, rule):
        full = VllmEngine.log_probs(self, prompt, None)
        return full.where(VllmEngine.log_probs(self, prompt, rule).isfinite(), -math.inf)


class BudgetTooLarge(Ignoring):
    """Prunes a little more than it should."""

    def log_probs(self, prompt, rule):
        return VllmEngine.log_probs(self, prompt, rule and MassBudget(1.2 * rule.budget))


class BudgetTooSmall(Ignoring):
    """Prunes a little less than it should."""

    def log_probs(self, prompt, rule):
        return VllmEngine.log_probs(self, prompt, rule and MassBudget(0.8 * rule.budget))


class BeforeTemperature(Ignoring):
    """Takes the entropy of other logits than those it samples from."""

    def log_probs(self, prompt, rule):
        if rule is None:
            return VllmEngine.log_probs(self, prompt, None)
        other = rule.settings.changed(target_entropy=rule.settings.target_entropy + 0.3)
        return VllmEngine.log_probs(self, prompt, EntropyScaled(rule.rho, other))


@pytest.mark.parametrize(
    ("kind", "rule", "message"),
    [
        (Ignoring, FixedRho(math.exp(-13)), r"ignores FixedRho\(rho=0.3\)"),
        (IgnoringSmall, FixedRho(math.exp(-13)), r"ignores FixedRho\(rho=2.26"),
        (NotRenormalised, FixedRho(math.exp(-13)), r"does not report log-probabilities after FixedRho\(rho=0.3\)"),
        (Ignoring, MassBudget(0.02), r"ignores MassBudget\(budget=0.3\)"),
        (NotRenormalised, MassBudget(0.02), r"does not report log-probabilities after MassBudget\(budget=0.3\)"),
        (BudgetTooLarge, MassBudget(0.02), r"does not report log-probabilities after MassBudget"),
        (BudgetTooSmall, MassBudget(0.02), r"ignores MassBudget"),
        (Ignoring, ENTROPY, r"ignores EntropyScaled\(rho=0.3"),
        (NotRenormalised, ENTROPY, "does not report log-probabilities after EntropyScaled"),
        (BeforeTemperature, ENTROPY, "does not report log-probabilities after EntropyScaled"),
    ],
)
def test_an_engine_that_does_not_apply_the_rule_is_refused(fp32, changed, kind, rule, message):
    # Sharper logits, so that e⁻¹³ prunes at this position.
    sharp = [(name, 4 * value if name == "model.norm.weight" else value) for name, value in changed.named_parameters()]
    fp32.load_weights(sharp)
    prove_safe_vocabulary(fp32, PROMPTS, rule)
    with pytest.raises(DvpError, match=message):
        prove_safe_vocabulary(kind(fp32), PROMPTS, rule)
