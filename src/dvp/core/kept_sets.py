"""The sets that an engine sampled tokens from, as it reports them, for a trainer that renormalises over the same ones.

This is mask replay (docs/method.md, "Mask replay"): p^rp(a) = p(a) 1[a ∈ V'_S] / Σ_{b∈V'_S} p(b). After min-p a set has
few tokens, so their ids are kept, not V bits per state.

Shape suffixes: N states (tokens), M ids of all their sets one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class KeptSets:
    """V'_S(s) of N states, none of them empty."""

    ids_M: torch.Tensor
    """int32 token ids, ascending within a set; empty if they are on another rank."""
    sizes_N: torch.Tensor
    """int64, |V'_S|."""
    log_mass_N: torch.Tensor
    """log Z'(s) = log Σ_{a∈V'_S} q(a), float32, nats: added to the engine's log q^mp it gives the unpruned log q."""

    @staticmethod
    def cat(parts: Sequence[KeptSets]) -> KeptSets:
        """Concatenate the states of several."""
        if not parts:
            return KeptSets(torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.long), torch.empty(0))
        return KeptSets(
            torch.cat([part.ids_M for part in parts]),
            torch.cat([part.sizes_N for part in parts]),
            torch.cat([part.log_mass_N for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.sizes_N)

    @property
    def has_ids(self) -> bool:
        """Return whether the ids are here; no set is empty, so there is at least one."""
        return len(self.ids_M) > 0

    def without_ids(self) -> KeptSets:
        """Return the sets without ids, 12 bytes per state, which is all that other ranks need."""
        return KeptSets(self.ids_M.new_empty(0), self.sizes_N, self.log_mass_N)

    def states(self, rows_n: torch.Tensor) -> KeptSets:
        """Select these states, in this order."""
        sizes_n = self.sizes_N[rows_n]
        starts_n = (self.sizes_N.cumsum(0) - self.sizes_N)[rows_n]
        # The number of each id within its own set, counted from the set's start.
        within_m = torch.arange(int(sizes_n.sum()), device=sizes_n.device) - (
            sizes_n.cumsum(0) - sizes_n
        ).repeat_interleave(sizes_n)
        return KeptSets(self.ids_M[starts_n.repeat_interleave(sizes_n) + within_m], sizes_n, self.log_mass_N[rows_n])

    def split(self, counts: Sequence[int]) -> list[KeptSets]:
        """Split into consecutive parts of so many states each; the reverse of `cat`."""
        sizes, log_masses = self.sizes_N.split(list(counts)), self.log_mass_N.split(list(counts))
        ids = self.ids_M.split([int(part.sum()) for part in sizes])
        return [KeptSets(*part) for part in zip(ids, sizes, log_masses, strict=True)]

    def to(self, device: torch.device) -> KeptSets:
        """Return the sets on another device."""
        return KeptSets(self.ids_M.to(device), self.sizes_N.to(device), self.log_mass_N.to(device))

    @property
    def entries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return state and token id of every member, int64 (M,) each: an index into (N, V)."""
        state_M = torch.arange(len(self), device=self.sizes_N.device).repeat_interleave(self.sizes_N)
        return state_M, self.ids_M.long()

    def sums(self, values_M: torch.Tensor) -> torch.Tensor:
        """Sum over each set, (N,), always in the same order: a GPU's index_add would not be bit-identical.

        Sums run in float64: in fp32, 1e5 small values added one by one would lose four digits, all to the same side.
        """
        if not len(self):
            return values_M.new_empty(0)
        return torch.segment_reduce(values_M.double(), "sum", lengths=self.sizes_N).to(values_M.dtype)

    def contain(self, tokens_N: torch.Tensor) -> torch.Tensor:
        """Return whether each state's token is in its set, bool (N,)."""
        state_M, id_M = self.entries
        return self.sums((tokens_N[state_M] == id_M).float()) > 0
