"""Count sketch: long vectors as short ones whose inner products are, on average, the same.

Every coordinate is added, with a random sign, to one of K buckets. ⟨Sx, Sy⟩ is an unbiased estimate of ⟨x, y⟩ with a
variance of at most 2|x|²|y|²/K (Charikar, Chen and Farach-Colton 2002); a sum of sketches is the sketch of the sum.
"""

from collections.abc import Sequence

import torch

from dvp.errors import DvpError


class CountSketch:
    """Brings vectors, given as several tensors, to at most `buckets` coordinates; shorter ones stay as they are."""

    def __init__(self, sizes: Sequence[int], buckets: int, seed: int):
        """`sizes`: elements of each tensor. Takes four bytes for each of them unless they fit into the buckets.

        Raises:
            DvpError: buckets outside [1, 2^30].
        """
        if not 1 <= buckets <= 2**30:
            raise DvpError(f"count sketch: expected 1 to 2^30 buckets, got {buckets}")
        self.size = sum(sizes)
        self.exact = self.size <= buckets
        self.length = self.size if self.exact else buckets
        self._places: list[torch.Tensor] = []
        if not self.exact:
            generator = torch.Generator().manual_seed(seed)
            # The lower half of the places is for plus, the upper half for minus.
            self._places = [
                torch.randint(2 * buckets, (size,), generator=generator, dtype=torch.int32) for size in sizes
            ]

    def __call__(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The vector's sketch, (length,), on its device; `parts` have the sizes given, in any shape."""
        if self.exact:
            return torch.cat([part.reshape(-1) for part in parts])
        self._places = [places.to(parts[0].device) for places in self._places]
        signed = parts[0].new_zeros(2 * self.length)
        for part, places in zip(parts, self._places, strict=True):
            signed.index_add_(0, places, part.reshape(-1))
        return signed[: self.length] - signed[self.length :]
