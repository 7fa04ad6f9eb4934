"""DeepSpeed as the trainer: fp32 weights, AdamW, ZeRO stage from config/deepspeed.

The policy that DeepSpeed wraps returns statistics of the sampled tokens instead of logits, so that no step ever holds
the logits of a whole batch.
"""

import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dvp.config import TrainingConfig
from dvp.core.head import TokenStatistics, token_statistics
from dvp.core.safe_vocabulary import SafeVocabulary
from dvp.errors import DvpError


@dataclass(frozen=True)
class Batch:
    """Right-padded token ids (B, T) and the response's positions (B, T, bool)."""

    tokens_BT: torch.Tensor
    response_BT: torch.Tensor

    @staticmethod
    def collate(prompts: list[list[int]], responses: list[list[int]], pad: int) -> "Batch":
        """Prompts and responses side by side, padded on the right with `pad`."""
        length = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
        tokens_BT = torch.full((len(prompts), length), pad)
        response_BT = torch.zeros((len(prompts), length), dtype=torch.bool)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            end = len(prompt) + len(response)
            tokens_BT[row, :end] = torch.tensor(prompt + response)
            response_BT[row, len(prompt) : end] = True
        return Batch(tokens_BT, response_BT)

    def rows(self, index: torch.Tensor) -> "Batch":
        """These rows only, cut to the longest of them."""
        # A response is never empty, so a row's last True is its last real token.
        length = int(self.response_BT[index].any(dim=0).nonzero().max()) + 1
        return Batch(self.tokens_BT[index, :length], self.response_BT[index, :length])


class Policy(torch.nn.Module):
    """A causal language model whose forward scores given responses."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, *, safe: SafeVocabulary | None, temperature: float) -> TokenStatistics:
        """Statistics of the response tokens, flattened row by row (N = number of response tokens)."""
        # Right padding under a causal mask: no real position sees a pad, so no attention mask is needed.
        hidden_BTH = self.model.model(batch.tokens_BT[:, :-1], use_cache=False).last_hidden_state
        scored_BT = batch.response_BT[:, 1:]
        return token_statistics(
            hidden_BTH[scored_BT],
            self.model.lm_head.weight,
            batch.tokens_BT[:, 1:][scored_BT],
            safe=safe,
            temperature=temperature,
            # The head's product is out of autocast's sight.
            logits_dtype=torch.bfloat16 if torch.is_autocast_enabled(hidden_BTH.device.type) else None,
        )


class Trainer:
    """The policy under DeepSpeed: scores, accumulates gradients, steps, saves, and hands its weights out."""

    def __init__(self, base: Path, config: TrainingConfig, options: dict[str, Any]):
        """Load the model of `base` in fp32 and wrap it; `options` are DeepSpeed's own (a file of config/deepspeed)."""
        _configure_environment()
        import deepspeed
        from deepspeed.utils import logger

        logger.setLevel(logging.ERROR)
        # It serves inference only; and a process that is killed while it is built or looked up leaves a lock behind for
        # which every later one of this user waits for ever.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(
            dist_backend="nccl" if torch.cuda.is_available() else "gloo", verbose=False, auto_mpi_discovery=False
        )
        self.policy = Policy(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
        optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=config.learning_rate,
            betas=tuple(config.adam_betas),
            weight_decay=config.weight_decay,
        )
        warmup = config.warmup_steps
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / warmup) if warmup else 1.0
        )
        self._engine, *_ = deepspeed.initialize(
            model=self.policy,
            optimizer=optimizer,
            lr_scheduler=schedule,
            config={
                "train_micro_batch_size_per_gpu": config.micro_batch_size,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": config.gradient_clipping,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                **options,
            },
        )
        self.device = self._engine.device
        self.context: int = self.policy.model.config.max_position_embeddings
        self._temperature = config.temperature
        self._micro_batch = config.micro_batch_size

    @torch.no_grad()
    def score(
        self, batch: Batch, safe: SafeVocabulary | None, *, micro_batch: int | None = None, bf16: bool = False
    ) -> TokenStatistics:
        """Statistics of every response token of the batch (flattened), without gradients.

        `micro_batch` responses at a time (default: as in training), in bf16 if asked for.
        """
        # DeepSpeed's engine would switch autocast off; without gradients it does nothing else for a forward pass.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            parts = [
                self.policy(self._to_device(batch.rows(rows)), safe=safe, temperature=self._temperature)
                for rows in torch.arange(len(batch.tokens_BT)).split(micro_batch or self._micro_batch)
            ]
        return TokenStatistics(
            **{name: torch.cat([getattr(part, name) for part in parts]).cpu() for name in parts[0].__dict__}
        )

    def forward_backward(self, batch: Batch, safe: SafeVocabulary | None, loss, last: bool) -> None:
        """Accumulate the gradient of `loss(statistics of the batch)`; `last` marks the step's final micro-batch."""
        self._engine.set_gradient_accumulation_boundary(last)
        statistics = self._engine(self._to_device(batch), safe=safe, temperature=self._temperature)
        self._engine.backward(loss(statistics))
        self._engine.step()

    @property
    def gradient_norm(self) -> float:
        """Global norm of the last step's gradient, before clipping."""
        return float(self._engine.get_global_grad_norm())

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of every parameter, named as in the Hugging Face model."""
        for name, parameter in self.policy.model.named_parameters():
            yield name, parameter.detach()

    def save(self, folder: Path) -> None:
        """Write DeepSpeed's checkpoint (weights, optimiser, schedule) below `folder`."""
        self._engine.save_checkpoint(str(folder), tag=TAG)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; the caller has verified the files. Raises DvpError."""
        path, _ = self._engine.load_checkpoint(str(folder), tag=TAG)
        if path is None:
            raise DvpError(f"{folder}: DeepSpeed finds no checkpoint here")

    def _to_device(self, batch: Batch) -> Batch:
        return Batch(batch.tokens_BT.to(self.device), batch.response_BT.to(self.device))


TAG = "deepspeed"


def _configure_environment() -> None:
    """One process of its own where torchrun has not said otherwise."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise DvpError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: training runs in one process, start it without torchrun"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if not torch.cuda.is_available():
        defaults["DS_ACCELERATOR"] = "cpu"
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
