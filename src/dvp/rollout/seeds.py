"""Derive sampling seeds from numbers that name what is sampled."""

import hashlib


def derived_seed(*parts: int) -> int:
    """Derive a seed (62 bits) from numbers such as a run's seed, the step and the problem, equal in all processes."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 2
