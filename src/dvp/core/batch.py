"""Batches of responses: token ids and masks (Batch), with the engine's log-probs and the rewards (Rollout).

Shape suffixes: B responses, T token positions (prompt, response and padding), N flattened response tokens, b some of
the responses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from dvp.core.kept_sets import KeptSets

LONGEST_SHARED = 4096
"""Most tokens of a row whose responses share a prompt: its attention mask has this many entries squared."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Prompts with their responses, padded on the right."""

    tokens_BT: torch.Tensor
    """int64 token ids."""
    response_BT: torch.Tensor
    """bool, True at the tokens that the model wrote: False at the prompt, at padding, and where a tool's answer stands
    in a response, which is context like the prompt. The last token of a response is the model's."""
    kept: tuple[KeptSets, ...] | None = None
    """For each response the sets that its own tokens were sampled from; None if the engine did not report them."""
    shared_B2: torch.Tensor | None = None
    """For each response a group number and the length of its prompt; consecutive responses of one number share their
    prompt (`Shared`)."""

    @staticmethod
    def collate(
        prompts: list[list[int]],
        responses: list[list[int]],
        pad: int,
        written: Sequence[list[bool] | None] | None = None,
        kept: Sequence[KeptSets] | None = None,
    ) -> "Batch":
        """Put prompts with their responses side by side, padded on the right with `pad`.

        Args:
            written: for each response which of its tokens the model wrote; None if it wrote all of them.
            kept: see the class.
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
        """Return these rows, cut to the longest of them."""
        length = int(self.lengths()[rows_b].max())
        return replace(
            self.whole_rows(rows_b),
            tokens_BT=self.tokens_BT[rows_b, :length],
            response_BT=self.response_BT[rows_b, :length],
        )

    def whole_rows(self, rows_b: torch.Tensor) -> "Batch":
        """Return these rows at full width."""
        shared_b2 = None if self.shared_B2 is None else self.shared_B2[rows_b]
        if shared_b2 is not None and len(shared_b2[:, 0].unique()) == len(shared_b2):
            shared_b2 = None  # each by itself, so that attention needs no mask but the causal one
        return Batch(self.tokens_BT[rows_b], self.response_BT[rows_b], self.kept_of(rows_b), shared_b2)

    def only(self, counted_BT: torch.Tensor) -> "Batch":
        """Return the batch with only those response tokens scored that are in this mask (bool)."""
        kept = self.kept and tuple(
            sets.states(counted_T[own_T].nonzero()[:, 0])
            for sets, own_T, counted_T in zip(self.kept, self.response_BT, counted_BT, strict=True)
        )
        return replace(self, response_BT=self.response_BT & counted_BT, kept=kept)

    def kept_of(self, rows_b: torch.Tensor) -> tuple[KeptSets, ...] | None:
        """Return `kept` of these rows."""
        return None if self.kept is None else tuple(self.kept[row] for row in rows_b.tolist())

    def lengths(self) -> torch.Tensor:
        """Return the number of tokens of each row, prompt and response, (B,)."""
        # A response is never empty and ends with the model's token, so a row's last True is its last real token.
        return (self.response_BT * torch.arange(1, self.response_BT.shape[1] + 1, device=self.response_BT.device)).amax(
            dim=1
        )

    def micro_batches(self, tokens: int, rows_b: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Split rows into forward passes: the longest first, like lengths together, so that little is padded.

        Responses that share their prompt stay together if one pass has room for them.

        Args:
            tokens: most positions per pass, padding included; a longer row gets a pass of its own.
            rows_b: the rows to split; all by default.
        """
        rows_b = torch.arange(len(self.tokens_BT)) if rows_b is None else rows_b
        units, lengths_b = [], self.lengths()[rows_b].tolist()
        for length, unit in self.whole_rows(rows_b).units():
            together = len(unit) > 1 and length <= tokens
            units += [(length, unit)] if together else [(lengths_b[row], [row]) for row in unit]
        parts = []
        for alone in (True, False):  # a pass of rows that share has a mask as large as its longest row squared
            left = sorted((unit for unit in units if (len(unit[1]) == 1) is alone), key=lambda unit: -unit[0])
            while left:
                size = max(1, tokens // left[0][0])
                parts.append(rows_b[[row for _, rows in left[:size] for row in rows]])
                left = left[size:]
        return parts

    def units(self) -> list[tuple[int, list[int]]]:
        """Return the groups of rows that the model computes as one sequence, each with the sequence's tokens.

        A row is a group by itself unless it shares its prompt.
        """
        lengths = self.lengths().tolist()
        if self.shared_B2 is None:
            return [(length, [row]) for row, length in enumerate(lengths)]
        units = []
        for _, rows in groupby(range(len(lengths)), key=self.shared_B2[:, 0].tolist().__getitem__):
            unit = list(rows)
            prompt = int(self.shared_B2[unit[0], 1])
            # The last token of a response predicts nothing.
            units.append((prompt + sum(max(lengths[row] - prompt - 1, 0) for row in unit), unit))
        return units

    def sharing_prompts(self, width: int, tokens: int) -> "Batch":
        """Return the batch with shared prompts computed once, if that is less work for a model of this width.

        A layer takes about 24 width² operations per token, and 4 width per pair of tokens: half of a row's pairs under
        a causal mask, all of them under another mask.

        Args:
            tokens: most tokens of a row in which responses share a prompt.
        """
        prompt_B, lengths_B = self.response_BT.int().argmax(dim=1), self.lengths()
        numbers: list[int] = []
        before, room = None, 0
        for row, (prompt, length) in enumerate(zip(prompt_B.tolist(), lengths_B.tolist(), strict=True)):
            own = length - prompt - 1
            asked = self.tokens_BT[row, :prompt].tolist()
            if asked != before or own > room:
                before, room = asked, min(tokens, LONGEST_SHARED) - prompt
                numbers.append(row)
            else:
                numbers.append(numbers[-1])
            room -= own
        shared = replace(self, shared_B2=torch.stack([torch.tensor(numbers), prompt_B], dim=1))

        def work(batch: Batch, seen: float) -> float:
            return sum(length * (6 * width + seen * length) for length, _ in batch.units())

        return shared if work(shared, 1.0) < work(self, 0.5) else self

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on another device."""
        kept = None if self.kept is None else tuple(sets.to(device) for sets in self.kept)
        return replace(self, tokens_BT=self.tokens_BT.to(device), response_BT=self.response_BT.to(device), kept=kept)


@dataclass(frozen=True, eq=False)
class Shared:
    """A batch whose rows hold a prompt once, followed by all the responses that share it.

    A token sees the prompt and the earlier tokens of its own response, at the positions that it has in a row by itself.
    A model that is attention alone therefore computes the same, up to rounding.
    """

    tokens_RL: torch.Tensor
    """int64 token ids, without the last of each response, which predicts nothing; padded on the right."""
    position_RL: torch.Tensor
    part_RL: torch.Tensor
    """int64: 0 for the prompt, then a number for each response of the row; -1 for padding."""
    place_N: torch.Tensor
    """For each scored token of the batch, row by row, the index into R × L at which it is predicted."""

    @staticmethod
    def of(batch: Batch) -> "Shared":
        """Lay out a batch whose `shared_B2` is set."""
        units, lengths = batch.units(), batch.lengths().tolist()
        longest = max(length for length, _ in units)
        tokens_RL, position_RL = (torch.zeros((len(units), longest), dtype=torch.long) for _ in range(2))
        part_RL = torch.full((len(units), longest), -1)
        place_BT = torch.zeros(batch.tokens_BT.shape, dtype=torch.long)
        for number, (_, rows) in enumerate(units):
            end = begin = int(batch.shared_B2[rows[0], 1])
            tokens_RL[number, :end] = batch.tokens_BT[rows[0], :end]
            position_RL[number, :end] = torch.arange(end)
            part_RL[number, :end] = 0
            for part, row in enumerate(rows, start=1):
                own = max(lengths[row] - begin - 1, 0)
                piece, source = slice(end, end + own), slice(begin, begin + own)
                tokens_RL[number, piece] = batch.tokens_BT[row, source]
                position_RL[number, piece] = torch.arange(begin, begin + own)
                part_RL[number, piece] = part
                place_BT[row, :begin] = number * longest + torch.arange(begin)
                place_BT[row, source] = number * longest + torch.arange(end, end + own)
                end = piece.stop
        return Shared(tokens_RL, position_RL, part_RL, place_BT[:, :-1][batch.response_BT[:, 1:]])

    def mask(self, device: torch.device) -> torch.Tensor:
        """Make the attention mask on a device: bool, (R, 1, L, L), what a token (third dimension) sees."""
        part_RL = self.part_RL.to(device)
        seen_RLL = (part_RL[:, None, :] == 0) | (part_RL[:, None, :] == part_RL[:, :, None])
        return seen_RLL.tril()[:, None]


@dataclass(frozen=True, eq=False)
class Rollout:
    """B graded responses; the responses to a prompt are consecutive rows."""

    batch: Batch
    infer_log_prob_BT: torch.Tensor
    """log q (nats) of each response token as the engine sampled it; 0 elsewhere."""
    rewards_B: torch.Tensor
    """float."""
    truncated_B: torch.Tensor
    """bool: the response was cut off at the length limit."""

    def rows(self, rows_b: torch.Tensor) -> "Rollout":
        """Return these responses at full width."""
        return Rollout(
            self.batch.whole_rows(rows_b),
            self.infer_log_prob_BT[rows_b],
            self.rewards_B[rows_b],
            self.truncated_B[rows_b],
        )


def unflatten(values_N: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Put per-token values back at their positions, (B, T); 0 (False) elsewhere. Carries gradients."""
    return torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=values_N.device).masked_scatter(mask_BT, values_N)


def unflatten_parts(parts: list[torch.Tensor], values: list[torch.Tensor], mask_BT: torch.Tensor) -> torch.Tensor:
    """Put values computed some rows at a time back like `unflatten`: `parts` are the rows, `values` theirs."""
    values_BT = torch.zeros(mask_BT.shape, dtype=values[0].dtype)
    for rows_b, values_n in zip(parts, values, strict=True):
        values_BT[rows_b] = unflatten(values_n, mask_BT[rows_b])
    return values_BT
