"""What a trainer says of fixed prompts at the end of a run: the converted model must say the same."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dvp.core.batch import Batch
from dvp.files import atomic_path
from dvp.training import ranks
from dvp.training.backend import Trainer

PROBE = "probe.safetensors"
PROBE_PROMPTS = 16


def write_probe(path: Path, trainer: Trainer, prompts: list[list[int]]) -> None:
    """Score prompts (token ids), all but their first tokens, with the live trainer in fp32; keep the log-probs."""
    batch = Batch.collate([prompt[:1] for prompt in prompts], [prompt[1:] for prompt in prompts], pad=0)
    log_prob_N = trainer.score(batch, None, bf16=False)["log_prob"][batch.response_BT]  # by all ranks
    if not ranks.is_main():
        return
    with atomic_path(path) as temporary:
        save_file({"tokens": batch.tokens_BT, "scored": batch.response_BT, "log_prob": log_prob_N}, temporary)


def read_probe(path: Path) -> tuple[Batch, torch.Tensor]:
    """What `write_probe` wrote: the batch, and the log-probability of each of its N scored tokens."""
    known = load_file(path)
    return Batch(known["tokens"], known["scored"]), known["log_prob"]
