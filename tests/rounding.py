"""Tolerance for float32 results that are equal in exact arithmetic."""

import torch

EPSILON = torch.finfo(torch.float32).eps


def assert_same_sums(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], terms: int, size: float | None = None
) -> None:
    """Assert that sums of `terms` float32 numbers agree up to the order of summation, which differs between programs.

    Each order is off by at most `terms` · ε · Σ|term| / `terms`, to first order; a term is at most about `size`, by
    default the largest of all sums. Digits that a smaller sum loses to cancellation are therefore tolerated.
    """
    assert found.keys() == expected.keys()
    largest = max(value.abs().max().item() for value in expected.values()) if size is None else size
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], atol=terms * EPSILON * largest, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
