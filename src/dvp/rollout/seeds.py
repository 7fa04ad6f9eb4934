"""Seeds for whoever samples, derived from numbers that name what is sampled."""

import hashlib


def derived_seed(*parts: int) -> int:
    """A seed (62 bits) from such as a run's seed, the step and the problem: the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 2
