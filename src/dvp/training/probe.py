"""What a trainer says of fixed prompts at the end of a run: the converted model must say the same."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dvp.core.batch import Batch
from dvp.files import atomic_path
from dvp.training import ranks
from dvp.training.backend import Trainer

PROBE = "probe.safetensors"
PROBE_PROMPTS = 16


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
