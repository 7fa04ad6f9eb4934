"""The policy against the model's own forward pass, for models that treat their logits differently."""

import deepspeed
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from dvp.core.batch import Batch
from dvp.errors import DvpError
from dvp.training.backend import ATTENTION, Policy, Trainer
from rounding import assert_same_sums, rounding

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.5,  # logits of several nats
}
TERMS = 61 + 2 * (4 * 16 + 32)
"""Terms of the sums that a log-prob comes through: of the vocabulary, and of both layers' projections."""
PROMPTS = [[5, 9, 2, 31, 44, 7], [8, 60, 13]]
SUPPORTED = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 2},  # its layers and its head have other names
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "hyperclovax": {"logits_scaling": 3.0},  # the name of Granite's divisor, as a factor
    "gemma2": {"final_logit_softcapping": None},
}


def make(model_type: str, **options) -> PreTrainedModel:
    """A tiny model with random weights."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | options)).eval()


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_the_policy_scores_as_the_model_itself(model_type):
    model, temperature = make(model_type, **SUPPORTED[model_type]), 0.7
    expected = []
    for prompt in PROMPTS:
        log_prob_TV = (model(torch.tensor([prompt])).logits[0, :-1] / temperature).log_softmax(dim=1)
        expected.append(log_prob_TV.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0])
    expected_N = torch.cat(expected)
    expected_N.sum().backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()
    batch = Batch.collate([prompt[:1] for prompt in PROMPTS], [prompt[1:] for prompt in PROMPTS], pad=0)
    policy = Policy(model)
    log_prob_N = policy(batch, safe=None, temperature=temperature).log_prob
    assert expected_N.min() < -4  # not a flat distribution, of which any scale would be right
    assert_same_sums({"log_prob": log_prob_N}, {"log_prob": expected_N}, TERMS)
    log_prob_N.sum().backward()
    assert_same_sums({name: value.grad for name, value in model.named_parameters()}, gradients, TERMS)
    policy.check([*PROMPTS[:1], [7]])  # a prompt of one token too


RESPONSES = [[[11, 12, 13, 14], [12], [20, 21, 22]], [[30, 31], [31, 30, 32, 33, 34]]]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2", "granite"])
def test_responses_that_share_a_prompt_are_scored_as_rows(model_type):
    """Log-probs and gradients; what a tool wrote between a model's tokens is context."""
    model = make(model_type, **SUPPORTED[model_type])
    pairs = [(prompt, own) for prompt, group in zip(PROMPTS, RESPONSES, strict=True) for own in group]
    written = [[True, False, False, True], None, [True, False, True], None, None]
    apart = Batch.collate(*([list(side) for side in zip(*pairs, strict=True)]), pad=0, written=written)
    policy = Policy(model)
    policy.check(PROMPTS)
    assert policy.shares_prompts
    shared = apart.sharing_prompts(width=1000, tokens=100)
    assert [(length, rows) for length, rows in shared.units()] == [(6 + 3 + 0 + 2, [0, 1, 2]), (3 + 1 + 4, [3, 4])]
    found = []
    for batch in (apart, shared, shared.rows(torch.tensor([4, 0, 2]))):
        model.zero_grad()
        log_prob_N = policy(batch, safe=None, temperature=1.0).log_prob
        (log_prob_N * torch.arange(1.0, len(log_prob_N) + 1)).sum().backward()
        found.append((log_prob_N, {name: value.grad.clone() for name, value in model.named_parameters()}))
    (rows_N, of_rows), (shared_N, of_shared), (some_n, _) = found
    atol = rounding(TERMS, rows_N.abs().max().item())
    torch.testing.assert_close(shared_N, rows_N, atol=atol, rtol=0)
    assert_same_sums(of_shared, of_rows, TERMS)
    of_row = rows_N.split(apart.response_BT.sum(dim=1).tolist())
    torch.testing.assert_close(some_n, torch.cat([of_row[row] for row in (4, 0, 2)]), atol=atol, rtol=0)


@pytest.mark.parametrize(
    "model",
    [("mistral", {"sliding_window": 8}), ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "num_layers": 2})],
    ids=lambda model: model[0],
)
def test_a_model_with_other_masks_shares_no_prompt(model):
    policy = Policy(make(model[0], **model[1]))
    policy.check(PROMPTS)
    assert not policy.shares_prompts


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("gemma2", {"final_logit_softcapping": 5.0}, "Gemma2ForCausalLM: soft-caps its logits, which the trainer does"),
        ("phi", {}, "PhiForCausalLM: its head has a bias, which the trainer does not support"),
        ("cohere", {"logit_scale": -1.0}, "CohereForCausalLM: does more to its logits than to scale them"),
    ],
)
def test_what_is_not_a_scale_of_the_logits_is_refused_by_name(model_type, options, message):
    with pytest.raises(DvpError, match=f"^{message}"):
        Policy(make(model_type, **options))


class Squashed(LlamaForCausalLM):
    """A model whose own forward pass does something to the hidden states before its head."""

    def forward(self, *inputs, **options):
        output = super().forward(*inputs, **options)
        output.logits = self.lm_head(torch.tanh(self.model(*inputs, **options).last_hidden_state)) + 0 * output.logits
        return output


def test_a_model_that_does_something_else_is_refused_when_its_prompts_are_scored():
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    policy = Policy(Squashed(LlamaConfig(**sizes)).eval())
    message = r"^Squashed: the trainer's log-probs differ from the model's own by [0-9.e+]+ nats, at most 0.001 is"
    with pytest.raises(DvpError, match=message):
        policy.check(PROMPTS)


def test_a_head_in_fp32_does_not_round_its_logits():
    """Under autocast, where the head's factors are bf16 all the same."""
    batch = Batch.collate([prompt[:1] for prompt in PROMPTS], [prompt[1:] for prompt in PROMPTS], pad=0)
    logits = {}
    for head_dtype in ("auto", "float32"):
        policy = Policy(make("llama"), head_dtype=head_dtype)
        with torch.autocast("cpu", torch.bfloat16):
            logits[head_dtype] = policy(batch, safe=None, temperature=1.0).max_logit
    assert torch.equal(logits["auto"], logits["auto"].bfloat16().float())
    assert not torch.equal(logits["float32"], logits["float32"].bfloat16().float())
    torch.testing.assert_close(logits["float32"].bfloat16().float(), logits["auto"])


# --- attention in fp32, with keys and values that heads share ---


BATCH = Batch.collate([[5], [8]], [[9, 2, 31, 44, 7], [60, 13]], pad=0)


def shared(attention: str | None) -> Policy:
    """Four heads share one key and value."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **SIZES | {"num_attention_heads": 4})
    return Policy(AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval())


@pytest.fixture
def asked(monkeypatch):
    """Of each call of PyTorch's attention `enable_gqa`, the keys' heads, the mask, and whether it is causal."""
    calls, original = [], torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, **options):
        calls.append((options.get("enable_gqa", False), key.shape[1], options["attn_mask"], options["is_causal"]))
        return original(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return calls


def test_in_fp32_no_head_shares_keys_and_the_numbers_are_the_same(asked):
    plain, ours = shared(None), shared(ATTENTION)
    asked.clear()
    expected_N = plain(BATCH, safe=None, temperature=1.0).log_prob
    assert asked == [(True, 1, None, True)] * 2  # what transformers does, and the reason for all this
    asked.clear()
    log_prob_N = ours(BATCH, safe=None, temperature=1.0).log_prob
    assert asked == [(False, 4, None, True)] * 2
    assert_same_sums({"log_prob": log_prob_N}, {"log_prob": expected_N}, TERMS)
    asked.clear()
    with torch.autocast("cpu", torch.bfloat16):  # whose flash kernel takes shared keys as they are
        ours(BATCH, safe=None, temperature=1.0)
    assert asked == [(True, 1, None, True)] * 2
    expected_N.sum().backward()
    log_prob_N.sum().backward()
    found, expected = ({name: value.grad for name, value in one.named_parameters()} for one in (ours, plain))
    assert_same_sums(found, expected, TERMS)


def test_a_rank_of_a_gpu_makes_its_group_and_loads_there(monkeypatch, tmp_path):
    """No GPU is here: what would be asked of torch, DeepSpeed and transformers, in this order."""
    asked = []

    def note(owner, name):
        monkeypatch.setattr(owner, name, lambda *given, **options: asked.append((name, given, options)))

    def from_pretrained(*_, device_map, **options):
        raise DvpError(str(device_map))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    note(torch.cuda, "set_device")
    note(torch.distributed, "init_process_group")
    note(deepspeed, "init_distributed")
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda base: LlamaConfig())
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(DvpError, match=r"^\{'': device\(type='cuda', index=1\)\}$"):
        Trainer(tmp_path, None, {})
    assert [name for name, *_ in asked] == ["set_device", "init_process_group", "init_distributed"]
    (_, device, _), (_, backend, options), _ = asked
    assert (device, backend) == ((1,), ("nccl",))
    assert "device_id" not in options  # a group that is bound to a GPU splits off every other one at once
