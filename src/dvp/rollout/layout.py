"""Describe a model's weights so that they can be handed over: their files, which share a tensor, which are matrices."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dvp.files import read_json

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Layout:
    """The weights of an architecture, by their names in the Hugging Face model."""

    shared: dict[str, list[str]]
    """Other names of a weight, such as that of a tied head, by its first name."""
    matrices: dict[str, bool]
    """Weights of the linear layers but the head; True if a column, not a row, makes an output (GPT-2's Conv1D)."""
    prefix: str
    """The beginning of a name that files may leave out."""

    def known(self, name: str) -> str:
        """Return the model's own name for a weight's name in a file."""
        longer = f"{self.prefix}.{name}"
        return longer if longer in self.shared or longer in self.matrices else name


def read_layout(model: Path) -> Layout:
    """Return the layout of a Hugging Face directory, by its architecture; no weights are read."""
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    names: dict[int, list[str]] = {}
    for name, parameter in made.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return Layout(
        shared={first: others for first, *others in names.values() if others},
        matrices=matrices(made),
        prefix=made.base_model_prefix,
    )


def matrices(model: PreTrainedModel) -> dict[str, bool]:
    """Return the weights of a model's linear layers but the head, by name; see Layout.matrices."""
    head = model.get_output_embeddings()
    return {
        f"{name}.weight": isinstance(module, Conv1D)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
    }


def weight_files(model: Path) -> list[Path]:
    """Return the files that hold a model's weights: those that its index names, if there is one."""
    if (model / INDEX).is_file():
        return [model / name for name in sorted(set(read_json(model / INDEX, "weight_map")["weight_map"].values()))]
    return sorted(model.glob("*.safetensors"))
