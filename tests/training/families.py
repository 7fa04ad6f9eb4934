"""Small random models of many families: what `base` takes and what it refuses. docs/your_model.md lists them."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dvp.training.base import train_tokenizer

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "head_dim": 32,  # the least of vLLM's attention on a CPU
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Family:
    """A family of models."""

    model_type: str
    """transformers' name."""
    options: dict = field(default_factory=dict)
    """Of its configuration, where they are not SIZES; None leaves one out."""
    refused: str | None = None
    """What the line says with which it is refused; None for one that works."""
    normal: bool = False
    """Whether an engine is started for it in every run of the tests."""


FAMILIES = {
    "Qwen3": Family("qwen3", {"tie_word_embeddings": True}, normal=True),
    "Llama": Family("llama", normal=True),
    "GPT-2": Family(
        "gpt2",
        {"n_embd": 64, "n_head": 2, "n_layer": 2, "num_key_value_heads": None, "tie_word_embeddings": True},
        normal=True,
    ),
    "Qwen2": Family("qwen2", {"vocab_size": 352}),  # more rows than tokens
    "Mistral": Family("mistral"),
    "Phi-3": Family("phi3"),
    "Granite": Family("granite", {"logits_scaling": 4.0}),
    "StableLM": Family("stablelm"),
    "Gemma-3 of text": Family("gemma3_text", {"tie_word_embeddings": True}),
    "Falcon": Family("falcon", {"head_dim": None}),
    "BLOOM": Family(
        "bloom",
        {"n_layer": 2, "n_head": 2, "max_position_embeddings": None},
        refused="max_position_embeddings: expected a number above 0",
    ),
    "OLMo-2": Family("olmo2", refused="vLLM has no Olmo2ForCausalLM of its own"),
    "SmolLM3": Family("smollm3", refused="vLLM has no SmolLM3ForCausalLM of its own"),
    "StarCoder2": Family("starcoder2", refused="vLLM has no Starcoder2ForCausalLM of its own"),
    "GPT-NeoX": Family("gpt_neox", refused="vLLM has no GPTNeoXForCausalLM of its own"),
    "Qwen3-MoE": Family(
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        refused="Qwen3MoeForCausalLM is a mixture of experts",
    ),
    "Mixtral": Family("mixtral", {"num_local_experts": 4}, refused="MixtralForCausalLM is a mixture of experts"),
    "Phi": Family("phi", refused="PhiForCausalLM: its head has a bias"),
    "Gemma-2": Family("gemma2", refused="Gemma2ForCausalLM: soft-caps its logits"),
    "Gemma-3 of images": Family("gemma3", refused="Gemma3ForConditionalGeneration is a model of more than text"),
}


def write_model(folder: Path, family: Family) -> Path:
    """A Hugging Face directory of this family, with random weights and a tokenizer of 300 tokens."""
    rng = random.Random(0)
    words = ["".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(3)) for _ in range(300)]
    tokenizer = train_tokenizer((" ".join(rng.choices(words, k=30)) for _ in range(300)), 300)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {name: value for name, value in (SIZES | special | family.options).items() if value is not None}
    if family.model_type == "gemma3":
        vision = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 2}
        sizes = {"text_config": sizes, "vision_config": vision}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.model_type, **sizes)).float()
    with torch.no_grad():
        for parameter in model.parameters():  # no norm and no bias is as it is by default
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
