"""Responses side by side: token ids and masks (Batch), and with what the engine and the verifier say of them (Rollout).

Shape suffixes: B responses, T token positions (prompt, response and padding), N flattened response tokens, b some of
the responses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dvp.core.kept_sets import KeptSets


@dataclass(frozen=True, eq=False)
class Batch:
    """Prompts with their responses, padded on the right."""

    tokens_BT: torch.Tensor
    """int64 token ids."""
    response_BT: torch.Tensor
    """bool, True at the tokens that the model wrote: False at the prompt, at padding, and where a tool's answer stands
    in a response, which is context like the prompt. The last token of a response is the model's."""
    kept: tuple[KeptSets, ...] | None = None
    """Of each response the sets that its own tokens were sampled from; None where the engine did not report them."""

    @staticmethod
    def collate(
        prompts: list[list[int]],
        responses: list[list[int]],
        pad: int,
        written: Sequence[list[bool] | None] | None = None,
        kept: Sequence[KeptSets] | None = None,
    ) -> "Batch":
        """Prompts and responses side by side, padded on the right with `pad`.

        written : for each response which of its tokens the model wrote; None where it wrote all of them.
        kept : see the class.
        """
        length = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
        tokens_BT = torch.full((len(prompts), length), pad)
        response_BT = torch.zeros((len(prompts), length), dtype=torch.bool)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            end = len(prompt) + len(response)
            tokens_BT[row, :end] = torch.tensor(prompt + response)
            own = None if written is None else written[row]
            response_BT[row, len(prompt) : end] = True if own is None else torch.tensor(own)
        return Batch(tokens_BT, response_BT, None if kept is None else tuple(kept))

    def rows(self, rows_b: torch.Tensor) -> "Batch":
        """These rows only, cut to the longest of them."""
        length = int(self.lengths()[rows_b].max())
        return Batch(self.tokens_BT[rows_b, :length], self.response_BT[rows_b, :length], self.kept_of(rows_b))

    def only(self, counted_BT: torch.Tensor) -> "Batch":
        """The same, but that of a response's own tokens only those of this mask (bool) are scored."""
        kept = self.kept and tuple(
            sets.states(counted_T[own_T].nonzero()[:, 0])
            for sets, own_T, counted_T in zip(self.kept, self.response_BT, counted_BT, strict=True)
        )
        return Batch(self.tokens_BT, self.response_BT & counted_BT, kept)

    def kept_of(self, rows_b: torch.Tensor) -> tuple[KeptSets, ...] | None:
        """`kept` of these rows only."""
        return None if self.kept is None else tuple(self.kept[row] for row in rows_b.tolist())

    def lengths(self) -> torch.Tensor:
        """Tokens of each row, prompt and response, (B,)."""
        # A response is never empty and ends with the model's token, so a row's last True is its last real token.
        return (self.response_BT * torch.arange(1, self.response_BT.shape[1] + 1, device=self.response_BT.device)).amax(
            dim=1
        )

    def micro_batches(self, tokens: int, rows_b: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Rows for one pass each: the longest first, those of like length together, so that little is padded.

        tokens : at most so many positions a pass, padding included; a row that is longer has a pass of its own.
        rows_b : which rows; all if not given.
        """
        rows_b = torch.arange(len(self.tokens_BT)) if rows_b is None else rows_b
        lengths_b, order_b = self.lengths()[rows_b].sort(descending=True, stable=True)
        parts, start = [], 0
        while start < len(order_b):
            size = max(1, tokens // int(lengths_b[start]))
            parts.append(rows_b[order_b[start : start + size]])
            start += size
        return parts

    def to(self, device: torch.device) -> "Batch":
        """The same on another device."""
        kept = None if self.kept is None else tuple(sets.to(device) for sets in self.kept)
        return Batch(self.tokens_BT.to(device), self.response_BT.to(device), kept)


@dataclass(frozen=True, eq=False)
class Rollout:
    """B graded responses, the responses to a prompt in consecutive rows."""

    batch: Batch
    infer_log_prob_BT: torch.Tensor
    """log q (nats) of each response token as the engine sampled it; 0 elsewhere."""
    rewards_B: torch.Tensor
    """float."""
    truncated_B: torch.Tensor
    """bool: the response was cut off at its longest."""

    def rows(self, rows_b: torch.Tensor) -> "Rollout":
        """These responses only, at full width."""
        batch = Batch(self.batch.tokens_BT[rows_b], self.batch.response_BT[rows_b], self.batch.kept_of(rows_b))
        return Rollout(batch, self.infer_log_prob_BT[rows_b], self.rewards_B[rows_b], self.truncated_B[rows_b])


def unflatten(values_N: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Per-token values back at their positions, (B, T); 0 (False) elsewhere. Carries gradients."""
    return torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=values_N.device).masked_scatter(mask_BT, values_N)


def unflatten_parts(parts: list[torch.Tensor], values: list[torch.Tensor], mask_BT: torch.Tensor) -> torch.Tensor:
    """Like `unflatten`, of values that were made some rows at a time: `parts` are those rows, `values` theirs."""
    values_BT = torch.zeros(mask_BT.shape, dtype=values[0].dtype)
    for rows_b, values_n in zip(parts, values, strict=True):
        values_BT[rows_b] = unflatten(values_n, mask_BT[rows_b])
    return values_BT
