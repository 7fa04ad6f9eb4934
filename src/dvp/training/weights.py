"""The weights of a step that is evaluated, the last one among them: what becomes a model, and is asked to score alike.

A folder `weights-000016` beside the checkpoints: the weights as safetensors, a third or a quarter of a checkpoint, and
a probe: what the trainer says of fixed prompts, which the converted model must say too. No training goes on from them,
and they stay when checkpoints go.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dvp.core.batch import Batch
from dvp.errors import DvpError
from dvp.files import atomic_path
from dvp.training import ranks
from dvp.training.backend import Trainer

MODEL = "model.safetensors"
PROBE = "probe.safetensors"
PROBE_PROMPTS = 16


def check_finite(trainer: Trainer, step: int) -> None:
    """Raise DvpError, naming a parameter, if one has a NaN. By all ranks."""
    broken = [name for name, value in trainer.weights() if not value.isfinite().all()]
    if broken:
        # A step measures before it updates: what the last update broke would be seen in the next step only.
        raise DvpError(
            f"step {step}: its update left weights that are not finite; lower training.learning_rate ({broken[0]})"
        )


def write_weights(file: Path, trainer: Trainer) -> None:
    """Write all parameters, fp32, by their names in the Hugging Face model. By all ranks; rank 0 holds them all."""
    weights = {name: value.to("cpu", copy=True) for name, value in trainer.weights() if ranks.is_main()}
    if ranks.is_main():
        save_file(weights, file, metadata={"format": "pt"})


def write_probe(path: Path, trainer: Trainer, prompts: list[list[int]]) -> None:
    """Score prompts (token ids), all but their first tokens, with the live trainer in fp32; keep the log-probs."""
    # A prompt of one token would have nothing to score.
    prompts = [prompt * 2 if len(prompt) == 1 else prompt for prompt in prompts]
    batch = Batch.collate([prompt[:1] for prompt in prompts], [prompt[1:] for prompt in prompts], pad=0)
    log_prob_N = trainer.score(batch, None, bf16=False)["log_prob"][batch.response_BT]  # by all ranks
    if not ranks.is_main():
        return
    tensors = {"tokens": batch.tokens_BT, "scored": batch.response_BT, "log_prob": log_prob_N}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"device": trainer.device.type})


@dataclass(frozen=True)
class Probe:
    """Fixed prompts, the log-probability that the trainer gave each of the N scored tokens, and where."""

    name: str
    batch: Batch
    log_prob_N: torch.Tensor
    device: str
    """cpu or cuda."""


def read_probe(path: Path) -> Probe:
    """What `write_probe` wrote."""
    with safe_open(path, "pt") as known:
        batch = Batch(known.get_tensor("tokens"), known.get_tensor("scored"))
        return Probe(path.name, batch, known.get_tensor("log_prob"), known.metadata()["device"])
