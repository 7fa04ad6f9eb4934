"""Small random models of many families: what `base` takes and what it refuses, and why. docs/models.md has this table."""

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
GPT2 = {"n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 128, "tie_word_embeddings": True}


@dataclass(frozen=True)
class Family:
    """model_type: transformers' name; refused: how its line goes on, None if it works; normal: in every test run."""

    model_type: str
    options: dict = field(default_factory=dict)
    refused: str | None = None
    normal: bool = False


FAMILIES = {
    "Qwen3": Family("qwen3", {"tie_word_embeddings": True}, normal=True),
    "Llama": Family("llama", normal=True),
    "GPT-2": Family("gpt2", GPT2, normal=True),
    "Qwen2": Family("qwen2", {"vocab_size": 352}),
    "Mistral": Family("mistral"),
    "Phi-3": Family("phi3"),
    "Granite": Family("granite", {"logits_scaling": 4.0}),
    "StableLM": Family("stablelm"),
    "Gemma-3 (text)": Family("gemma3_text", {"tie_word_embeddings": True}),
    "Falcon": Family("falcon", {"head_dim": None, "ffn_hidden_size": 64}),
    "BLOOM": Family("bloom", {"n_layer": 2, "n_head": 2, "max_position_embeddings": None}),
    "OLMo-2": Family("olmo2"),
    "SmolLM3": Family("smollm3"),
    "StarCoder2": Family("starcoder2"),
    "GPT-NeoX": Family("gpt_neox"),
    "Qwen3-MoE": Family("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "Mixtral": Family("mixtral", {"num_local_experts": 4}),
    "Phi": Family("phi"),
    "Gemma-2": Family("gemma2"),
    "Gemma-3 (images)": Family("gemma3"),
}


def write_model(folder: Path, family: Family) -> Path:
    """A Hugging Face directory of this family, with random weights and a tokenizer of 300 tokens."""
    rng = random.Random(0)
    words = ["".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(3)) for _ in range(300)]
    tokenizer = train_tokenizer((" ".join(rng.choices(words, k=30)) for _ in range(300)), 300)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {name: value for name, value in (SIZES | special | family.options).items() if value is not None}
    if family.model_type == "gemma3":
        sizes = {"text_config": {**sizes}, "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 2}}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.model_type, **sizes)).float()
    with torch.no_grad():
        for parameter in model.parameters():  # no norm and no bias is as it is by default
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
