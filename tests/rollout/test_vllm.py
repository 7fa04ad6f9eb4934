"""The real vLLM, its CPU build: what it reports is what it sampled from, and a reloaded engine is a fresh one."""

import copy
import json
import math
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from dvp.core.batch import Batch
from dvp.core.safe_vocabulary import EngineSets, Entropy, EntropyScaled, FixedRho, MassBudget, TopNSigma
from dvp.errors import DvpError
from dvp.experiment.tools import Calculator
from dvp.experiment.training import EngineConfig
from dvp.rollout import private
from dvp.rollout.engine import Sampling
from dvp.rollout.layout import read_layout
from dvp.rollout.rounding import round_weight
from dvp.rollout.turns import ToolEngine
from dvp.rollout.vllm import VllmEngine, prove_safe_vocabulary
from dvp.tools import make_tool
from dvp.training.backend import Policy
from rounding import TINY_LOG_PROB

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


def reloaded(engine, folder):
    """The model of a folder, whose weights the engine has got."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine.load_weights(model.named_parameters())
    return model


def dense_logits(model, prompt, response, temperature=1.0):
    """Logits (T, V) of the response's positions in float64."""
    with torch.no_grad():
        logits = model.double()(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    model.float()
    return logits


def reference_log_probs(model, prompt, response):
    """log q of the response in float64, from dense logits."""
    return dense_logits(model, prompt, response).log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def test_the_whole_vocabulary_comes_with_the_same_responses_as_without(fp32, tiny_model):
    model = reloaded(fp32, tiny_model)
    plain = fp32.generate(PROMPTS, Sampling(max_tokens=24, n=3), SEEDS)
    whole = fp32.generate(PROMPTS, Sampling(max_tokens=24, n=3, whole_vocabulary=True), SEEDS)
    pruned = Sampling(max_tokens=8, safe_vocabulary=FixedRho(0.05), whole_vocabulary=True)
    for prompt, before, after, (cut,) in zip(PROMPTS, plain, whole, fp32.generate(PROMPTS, pruned, SEEDS), strict=True):
        first_V = fp32.log_probs(prompt, None)
        for one, same in zip(before, after, strict=True):
            assert (same.token_ids, same.finish_reason, same.text) == (one.token_ids, one.finish_reason, one.text)
            assert same.text.strip()
            assert same.log_probs == pytest.approx(one.log_probs, abs=TINY_LOG_PROB)
            values_TV = same.vocabulary_log_probs_TV
            assert torch.allclose(values_TV[0], first_V, rtol=0, atol=TINY_LOG_PROB)
            expected_TV = dense_logits(model, prompt, same.token_ids).log_softmax(-1)
            assert torch.allclose(values_TV.double(), expected_TV, rtol=0, atol=TINY_LOG_PROB)
        assert 0 < cut.vocabulary_log_probs_TV.isfinite().sum() < cut.vocabulary_log_probs_TV.numel()
        assert cut.vocabulary_log_probs_TV.double().logsumexp(-1).abs().max() < 1e-5


def as_vllm_reports(engine, sampling):
    """The whole vocabulary as vLLM's own `logprobs=-1` has it, by objects: of each response (T, V)."""
    from vllm import SamplingParams

    rho = sampling.safe_vocabulary and {"min_p": sampling.safe_vocabulary.rho}
    options = {"n": sampling.n, "temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
    asked = [SamplingParams(seed=seed, logprobs=-1, detokenize=False, **options, **(rho or {})) for seed in SEEDS]
    outputs = engine.llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked, use_tqdm=False)
    vocabulary = range(engine.llm.llm_engine.model_config.get_vocab_size())
    return [
        [
            torch.tensor([[row[a].logprob if a in row else -math.inf for a in vocabulary] for row in one.logprobs])
            for one in output.outputs
        ]
        for output in outputs
    ]


@pytest.mark.parametrize(
    "options",
    [{"max_tokens": 60, "n": 10}, {"max_tokens": 12, "n": 2, "temperature": 0.7, "safe_vocabulary": FixedRho(0.05)}],
    ids=["many that end early", "pruned"],
)
def test_the_recorded_rows_are_what_vllm_reports(fp32, tiny_model, monkeypatch, options):
    """Exactly, of requests that end at different times and so change rows, and of a first token after a prompt."""
    reloaded(fp32, tiny_model)
    monkeypatch.setattr(fp32.llm.llm_engine.model_config, "max_logprobs", -1)
    sampling = Sampling(whole_vocabulary=True, **options)
    found, lengths = fp32.generate(PROMPTS, sampling, SEEDS), set()
    for group, expected in zip(found, as_vllm_reports(fp32, sampling), strict=True):
        for one, values_TV in zip(group, expected, strict=True):
            lengths.add(len(one.token_ids))
            assert torch.equal(one.vocabulary_log_probs_TV, values_TV)
            own_T = values_TV.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
            assert torch.equal(torch.tensor(one.log_probs), own_T)
    assert len(lengths) > 5 or sampling.n == 2
    # Nothing of it is left: what comes next is recorded by nobody.
    assert "sample" not in vars(fp32.llm.collective_rpc(lambda worker: worker.model_runner.sampler)[0])


class SecondRunner:
    """vLLM's V2 runner as far as it is asked: on a CPU there is none. Its sampler returns logits, padded metadata."""

    class Sampler:
        def add_request(self, index, params):
            self.added = [*getattr(self, "added", []), index]

        def sample(self, logits, *metadata, return_logprobs):
            return logits.argmax(dim=1), 2 * logits

    def __init__(self):
        self.sampler, self.model_runner = self.Sampler(), self
        self.req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([3, 0, 5])))


def test_rows_are_recorded_in_vllms_second_runner_too():
    """A prompt in two parts, a request that asks for nothing, one that changes its place in the batch."""
    worker = SecondRunner()
    private.record_rows(worker)
    asks = SimpleNamespace(extra_args={private.RECORDED: 7}, seed=11, max_tokens=4)
    worker.sampler.add_request(2, asks)
    worker.sampler.add_request(0, SimpleNamespace(extra_args=None, seed=12, max_tokens=4))
    torch.manual_seed(0)
    steps = [([0, 2], [3, 2, 0]), ([2, 0], [5, 4, 0]), ([2], [6, 0, 0])]
    logits = [torch.randn(len(places), 6) for places, _ in steps]
    for own, (places, tokens) in zip(logits, steps, strict=True):
        worker.sampler.sample(own, None, None, np.array(places), 0, 0, 0, np.array(tokens), return_logprobs=True)
    rows = private.take_rows(worker)
    assert worker.sampler.added == [2, 0]
    assert not {"sample", "add_request"} & vars(worker.sampler).keys()
    assert list(rows) == [(7, 11)]
    expected = (2 * torch.stack([logits[1][0], logits[2][0]])).log_softmax(-1)
    assert torch.equal(torch.from_numpy(rows[7, 11]), expected)


def in_budget(p_V, rule):
    """Least likely entries first; the tiny model's have no ties."""
    order = p_V.argsort()
    safe_V = torch.ones(len(p_V), dtype=torch.bool)
    safe_V[order[p_V[order].cumsum(0) <= rule.budget]] = False
    return safe_V


def by_entropy(p_V, rule):
    settings = rule.settings
    log_rho = math.log(rule.rho) + settings.alpha * (settings.target_entropy + (p_V * p_V.log()).sum().item())
    return p_V >= p_V.max() * min(max(math.exp(log_rho), settings.lowest), settings.highest)


SAFE = {
    type(None): lambda p_V, rule: p_V >= 0,
    FixedRho: lambda p_V, rule: p_V >= rule.rho * p_V.max(),
    MassBudget: in_budget,
    EntropyScaled: by_entropy,
    TopNSigma: lambda p_V, rule: p_V.log() >= p_V.log().max() - rule.n * p_V.log().std(correction=0),
}
SIGMA = TopNSigma(rule="top_n_sigma", n=1.5)
RULES = [None, FixedRho(0.02), FixedRho(math.exp(-13)), MassBudget(0.3), MassBudget(0.02), ENTROPY, SIGMA]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rule", RULES)
def test_reported_log_probs_are_those_of_the_sampled_distribution(fp32, tiny_model, rule, temperature):
    """After temperature, at every position of requests that end at different times and so change rows; in float64."""
    model = reloaded(fp32, tiny_model)
    sampling = Sampling(max_tokens=40, n=6, safe_vocabulary=rule, temperature=temperature)
    sizes, lengths = set(), set()
    for prompt, group in zip(PROMPTS, fp32.generate(PROMPTS, sampling, SEEDS), strict=True):
        assert len(group) == 6
        for one in group:
            lengths.add(len(one.token_ids))
            p_TV = dense_logits(model, prompt, one.token_ids, temperature).softmax(-1)
            for p_V, token, reported in zip(p_TV, one.token_ids, one.log_probs, strict=True):
                safe_V = SAFE[type(rule)](p_V, rule)
                assert safe_V[token]
                assert reported == pytest.approx((p_V[token] / p_V[safe_V].sum()).log().item(), abs=TINY_LOG_PROB)
                sizes.add(safe_V.sum().item())
    assert len(sizes) > 5 or rule in RULES[:3:2]  # which leave out nothing, or hardly anything
    assert len(lengths) > 1 or temperature < 1  # cold, the tiny model ends hardly any


def test_the_same_seed_gives_the_same_responses_and_another_does_not(fp32):
    sampling = Sampling(max_tokens=16, n=4)
    first = fp32.generate(PROMPTS, sampling, SEEDS)
    assert fp32.generate(PROMPTS, sampling, SEEDS) == first
    assert fp32.generate(PROMPTS, sampling, [1, 2, 3]) != first
    assert len({tuple(one.token_ids) for one in first[0]}) > 1


@pytest.fixture
def reporting(fp32, tiny_model, monkeypatch):
    reloaded(fp32, tiny_model)
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
            assert (logits_TV[inside_TV] >= (threshold_T1.expand_as(logits_TV)[inside_TV] - TINY_LOG_PROB)).all()
            assert (logits_TV[~inside_TV] < (threshold_T1.expand_as(logits_TV)[~inside_TV] + TINY_LOG_PROB)).all()
            log_z_T = logits_TV.masked_fill(~inside_TV, -torch.inf).logsumexp(1) - logits_TV.logsumexp(1)
            assert torch.allclose(one.kept.log_mass_N.double(), log_z_T, rtol=0, atol=TINY_LOG_PROB)
            # log q = log q^mp + log Z'.
            log_q_T = logits_TV.log_softmax(1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(one.log_probs).double() + log_z_T, log_q_T, rtol=0, atol=TINY_LOG_PROB)
            sizes += one.kept.sizes_N.tolist()
    assert len(set(sizes)) > 3


@pytest.fixture
def turns(fp32, tiny_model):
    """The engine with a calculator; a model of random weights writes these delimiters again and again."""
    settings = Calculator(kind="calculator", call=["a", "e"], max_turns=4, max_answer_tokens=12)
    return ToolEngine(fp32, make_tool(settings), settings, AutoTokenizer.from_pretrained(tiny_model))


@pytest.mark.parametrize("rule", [None, FixedRho(0.02), ENTROPY, EngineSets(FixedRho(0.02)), EngineSets(ENTROPY)])
def test_log_probs_over_turns_are_the_trainers(turns, tiny_model, rule, monkeypatch):
    """Token by token of every turn, with the tool's answers as context only; the trainer scores all turns at once."""
    model = reloaded(turns, tiny_model)
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


def test_finish_reasons(fp32, tiny_model):
    ends = [one for group in fp32.generate(PROMPTS, Sampling(max_tokens=60, n=30), SEEDS) for one in group]
    assert {one.finish_reason for one in ends} == {"stop", "length"}
    end = AutoTokenizer.from_pretrained(tiny_model).eos_token_id
    assert all((one.token_ids[-1] == end) == (one.finish_reason == "stop") for one in ends)


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
        private.round_cache(worker, "fp8")


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


def test_how_vllm_is_started_on_a_gpu_and_on_a_cpu(asked_of_vllm):
    """CUDA graphs and chunked prefill are for a GPU; the kernel is asked for AMX first."""
    for gpu in (True, False):
        options = asked_of_vllm(gpu=gpu)
        assert options["enforce_eager"] == (not gpu)
        assert options["enable_chunked_prefill"] == gpu
        assert asked_of_vllm.steps == ["AMX", "vLLM starts"]
    assert asked_of_vllm(gpu=True, config={"cuda_graphs": False})["enforce_eager"]


def test_an_engine_that_has_started_asks_the_hub_nothing(fp32):
    assert huggingface_hub.is_offline_mode()
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("card", "backend"),
    [((8, 9), "TRITON_ATTN"), ((12, 0), "TRITON_ATTN"), ((10, 0), "TRITON_ATTN"), ((9, 0), None)],
    ids=["RTX 40", "RTX 50", "B200", "H100"],
)
def test_an_8_bit_cache_needs_no_compiler_off_hopper(asked_of_vllm, monkeypatch, card, backend):
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: card)
    asked = asked_of_vllm(gpu=True, config={"kv_cache_dtype": "fp8"}).get("attention_backend")
    assert asked == backend
    if asked is not None:  # and vLLM takes it there
        settings = AttentionSelectorConfig(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="fp8", block_size=16)
        chosen = AttentionBackendEnum[asked].get_class()
        assert not chosen.validate_configuration(device_capability=DeviceCapability(*card), **settings._asdict())
    assert "attention_backend" not in asked_of_vllm(gpu=True)


def test_vllm_quantises_weights_that_are_not_stored_so(asked_of_vllm):
    """Its own name for that changes; what it does not know as such it refuses only on a GPU."""
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    assert asked_of_vllm(gpu=True)["quantization"] is None
    assert asked_of_vllm(gpu=True, config={"quantization": "fp8"})["quantization"] in ONLINE_QUANT_SHORTHAND_NAMES


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


@pytest.fixture
def sleeping(fp32, monkeypatch):
    """`fp32` with vLLM's sleep on a GPU, played: level 2 leaves nothing but copies of the buffers (gpu_worker.py)."""
    model = fp32.llm.collective_rpc(lambda worker: worker.model_runner.model)[0]
    saved = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def sleep(level):
        for tensor in (*model.parameters(), *model.buffers()) if level == 2 else ():
            tensor.data.fill_(7)

    def wake_up(tags=("weights", "kv_cache")):
        woken.append(tuple(tags))
        if "weights" not in tags:
            return
        for name, buffer in model.named_buffers():
            buffer.copy_(saved[name])

    woken: list[tuple[str, ...]] = []
    monkeypatch.setattr(fp32, "woken", woken, raising=False)
    monkeypatch.setattr(fp32.llm, "sleep", sleep)
    monkeypatch.setattr(fp32.llm, "wake_up", wake_up)
    monkeypatch.setattr(fp32, "_sleeps", True)
    yield fp32
    monkeypatch.setattr(fp32, "_asleep", None)


def test_an_engine_that_slept_lacks_nothing(sleeping, changed):
    sleeping.load_weights(changed.named_parameters())
    before = [sleeping.log_probs(prompt, None) for prompt in PROMPTS]
    for keep_weights in (False, True):
        sleeping.sleep(keep_weights=keep_weights)
        if not keep_weights:
            sleeping.load_weights(changed.named_parameters())
        for prompt, expected_V in zip(PROMPTS, before, strict=True):
            assert torch.equal(sleeping.log_probs(prompt, None), expected_V)


def test_the_cache_wakes_after_the_weights_are_loaded(sleeping, changed):
    """What a trainer gathers to hand over has its room until then."""
    sleeping.sleep(keep_weights=False)

    def weights():
        yield from changed.named_parameters()
        assert sleeping.woken == [("weights",)]

    sleeping.load_weights(weights())
    assert sleeping.woken == [("weights",), ("kv_cache",)]


def test_after_such_a_sleep_weights_must_come_first(sleeping, changed):
    sleeping.sleep(keep_weights=False)
    with pytest.raises(DvpError, match="slept without its weights: load weights before anything else"):
        sleeping.generate(PROMPTS, Sampling(max_tokens=1), SEEDS)
    sleeping.load_weights(changed.named_parameters())


@pytest.mark.parametrize(
    ("left_out", "lacking"),
    [
        ("model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj: 6,144 of 6,144 values"),
        # Parts of what vLLM has in one.
        ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.qkv_proj: 2,048 of 8,192 values"),
        ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.gate_up_proj: 6,144 of 12,288 values"),
        ("model.layers.1.post_attention_layernorm.weight", "model.layers.1.post_attention_layernorm: 64 of 64 values"),
        ("model.embed_tokens.weight", "model.embed_tokens: 25,600 of 25,600 values"),
    ],
)
def test_a_weight_that_is_left_out_is_named(fp32, changed, left_out, lacking):
    """Though the engine has the same value already; the next weights find it whole."""
    fp32.load_weights(changed.named_parameters())
    with pytest.raises(DvpError, match=rf"^not all weights reached the engine: its layer {lacking} were left out$"):
        fp32.load_weights((name, value) for name, value in changed.named_parameters() if name != left_out)
    fp32.load_weights(changed.named_parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU, where the engine's memory is the trainer's")
def test_freed_memory_does_not_outlast_a_sleep(fp32):
    def resident():
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks = [torch.ones(2**20) for _ in range(64)]  # 4 MiB each
    kept = blocks[::2]
    blocks.clear()  # every second one: holes, none of which is at the heap's end
    before = resident()
    fp32.sleep(keep_weights=True)
    assert before - resident() > 100 * 2**20
    assert all(block.eq(1).all() for block in kept)


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
            expected = reference_log_probs(model, prompt, one["token_ids"])
            assert torch.allclose(torch.tensor(one["log_probs"]).double(), expected, rtol=0, atol=TINY_LOG_PROB)
            differences.append((expected - reference_log_probs(exact, prompt, one["token_ids"])).abs().max())
    assert max(differences) > 0.1


class Wrong(VllmEngine):
    """An engine that does something else with a rule."""

    def __init__(self, engine, answer):
        self.llm, self._config, self.max_model_len = engine.llm, engine._config, engine.max_model_len
        self._by_state, self._reports_sets, self.answer = True, False, answer

    def log_probs(self, prompt, rule):
        return self.answer(super().log_probs, prompt, rule)


def ignores(ask, prompt, rule):
    return ask(prompt, None)


def ignores_small(ask, prompt, rule):
    """vLLM's old V0: values up to 1e-5 were taken for 0."""
    return ask(prompt, rule if rule and rule.rho > 1e-5 else None)


def does_not_renormalise(ask, prompt, rule):
    full_V = ask(prompt, None)
    return full_V.where(ask(prompt, rule).isfinite(), -math.inf)


def times(factor):
    return lambda ask, prompt, rule: ask(prompt, rule and MassBudget(factor * rule.budget))


def before_temperature(ask, prompt, rule):
    """Takes the entropy of other logits than those it samples from."""
    if rule is None:
        return ask(prompt, None)
    other = rule.settings.changed(target_entropy=rule.settings.target_entropy + 0.3)
    return ask(prompt, EntropyScaled(rule.rho, other))


@pytest.mark.parametrize(
    ("answer", "rule", "message"),
    [
        (ignores, FixedRho(math.exp(-13)), r"ignores FixedRho\(rho=0.3\)"),
        (ignores_small, FixedRho(math.exp(-13)), r"ignores FixedRho\(rho=2.26"),
        (does_not_renormalise, FixedRho(math.exp(-13)), r"does not report log-probabilities after FixedRho\(rho=0.3\)"),
        (times(1.2), MassBudget(0.02), r"does not report log-probabilities after MassBudget"),
        (times(0.8), MassBudget(0.02), r"ignores MassBudget"),
        (ignores, ENTROPY, r"ignores EntropyScaled\(rho=0.3"),
        (before_temperature, ENTROPY, "does not report log-probabilities after EntropyScaled"),
    ],
)
def test_an_engine_that_does_not_apply_the_rule_is_refused(fp32, changed, answer, rule, message):
    # Sharper logits, so that e⁻¹³ prunes at this position.
    sharp = [(name, 4 * value if name == "model.norm.weight" else value) for name, value in changed.named_parameters()]
    fp32.load_weights(sharp)
    prove_safe_vocabulary(fp32, PROMPTS, rule)
    with pytest.raises(DvpError, match=message):
        prove_safe_vocabulary(Wrong(fp32, answer), PROMPTS, rule)
