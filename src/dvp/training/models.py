"""Check that a model can be used: a whole causal language model of text, whose layout trainer and engine both know.

It is judged by what it is, not by its name (docs/your_model.md); what is wrong beyond that, dvp.training.agreement
finds.
"""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING as KNOWN
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as LANGUAGE_MODELS
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from dvp.errors import DvpError
from dvp.files import read_json
from dvp.rollout.layout import weight_files
from dvp.training.backend import Policy
from dvp.training.rollouts import in_a_line

NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
FLOATS = ("F16", "BF16", "F32", "F64")
EXPERTS = re.compile(r'"\w*expert\w*": (?:[2-9]|[1-9]\d+)(?![.\d])')  # a key that counts several


def check_model(folder: Path) -> None:
    """Check that a model can be trained, served and measured.

    Raises DvpError, with what was found and what is expected. Only names, types and shapes of the weights are read, and
    no code of the model's own is run.
    """
    if not (folder / "config.json").is_file():
        raise DvpError(f"{folder}: not a Hugging Face model directory: no config.json, which an adapter has not")
    config = _config(folder)
    _check_tokenizer(folder, config)
    types = _types(folder)
    try:
        # On the meta device only names and shapes are read.
        options = {"device_map": "meta", "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, found = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, **options)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise DvpError(f"{folder}: transformers cannot load it ({in_a_line(error)})") from None
    if missing := sorted(found["missing_keys"]):
        raise DvpError(f"{folder}: weight {missing[0]} is not in its files (of {len(missing)} that are missing)")
    for name, has, expected in sorted(found["mismatched_keys"]):
        raise DvpError(f"{folder}: weight {name} is {list(has)}, but config.json makes it {list(expected)}")
    for name, _ in model.named_parameters():
        if types.get(name, "F32") not in FLOATS:
            raise DvpError(f"{folder}: weight {name} is quantised ({types[name]}); expected one of 16 or 32 bits")
    try:
        Policy(model)
    except Exception as error:  # each architecture fails in its own way without weights
        raise DvpError(f"{folder}: {error if isinstance(error, DvpError) else in_a_line(error)}") from None
    _check_engine(folder, config)


def _config(folder: Path) -> PretrainedConfig:
    """Read the model's configuration. Raises DvpError for another kind of model."""
    file = folder / "config.json"
    raw = read_json(file)
    kind = str(raw.get("model_type"))
    if kind not in KNOWN:
        raise DvpError(
            f"{file}: model_type {kind!r} is none that transformers knows, and the code that comes with a model is "
            "never run (trust_remote_code)"
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # each architecture checks its keys in its own way
        raise DvpError(f"{folder}: not a Hugging Face model directory ({in_a_line(error)})") from None
    if quantised := raw.get("quantization_config") or raw.get("compression_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise DvpError(f"{file}: quantization_config: its weights are quantised ({method}); expected 16 or 32 bits")
    architectures, known = raw.get("architectures"), LANGUAGE_MODELS.get(type(config), None)
    if known is None or architectures != [known.__name__]:
        expected = f"expected {known.__name__!r}" if known else f"{kind} has none in transformers"
        raise DvpError(f"{file}: architectures: {architectures} is no causal language model; {expected}")
    if config.get_text_config() is not config:
        raise DvpError(f"{file}: {known.__name__} is a model of more than text; expected one of text alone")
    if experts := EXPERTS.search(config.to_json_string(use_diff=False)):
        raise DvpError(
            f"{file}: {experts[0]}: {known.__name__} is a mixture of experts, whose new weights do not reach vLLM as "
            "they are; expected a dense model"
        )
    for key in NEEDED:
        value = getattr(config, key, None)
        if not isinstance(value, int) or value <= 0:
            raise DvpError(f"{file}: {key}: expected a number above 0, found {value!r}")
    return config


def _check_tokenizer(folder: Path, config: PretrainedConfig) -> None:
    """Check that every token of the tokenizer has a row in the model's embedding, and that one ends a sequence.

    Raises DvpError.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DvpError(f"{folder}: not a Hugging Face model directory ({in_a_line(error)})") from None
    largest = max(tokenizer.get_vocab().values())
    if largest >= config.vocab_size:
        raise DvpError(
            f"{folder}/config.json: vocab_size {config.vocab_size} is too small for the tokenizer beside it, "
            f"whose largest token id is {largest}"
        )
    if tokenizer.eos_token_id is None:
        raise DvpError(f"{folder}/tokenizer_config.json: the tokenizer has no end-of-sequence token")


def _types(folder: Path) -> dict[str, str]:
    """Return safetensors' names for the types of all weights. Raises DvpError for a file that is missing or cut off."""
    types = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as weights:
                types |= {name: weights.get_slice(name).get_dtype() for name in weights.offset_keys()}
        except (OSError, SafetensorError) as error:
            raise DvpError(f"{file}: not a whole safetensors file ({in_a_line(error)})") from None
    if not types:
        raise DvpError(f"{folder}: expected weights as .safetensors, found none")
    return types


def _check_engine(folder: Path, config: PretrainedConfig) -> None:
    """Check that vLLM has a model of its own for this architecture. Raises DvpError.

    It runs others through transformers' classes, which it changes for its own use in the trainer's process.
    """
    from vllm import ModelRegistry

    name = config.architectures[0]
    own = ModelRegistry.models.get(name)
    if own is None or getattr(own, "module_name", "").endswith(".transformers"):
        raise DvpError(
            f"{folder}/config.json: vLLM has no {name} of its own, and would change transformers' in the trainer's "
            "process; expected an architecture that it has (docs/your_model.md)"
        )
