"""How far two float32 results may be apart that are one in exact arithmetic."""

import torch

EPSILON = torch.finfo(torch.float32).eps


def assert_same_sums(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], terms: int, size: float | None = None
) -> None:
    """Compare sums of `terms` float32 numbers, which processors and programs add in their own orders.

    Each order is off by at most `terms` · ε · Σ|term| / `terms`, to first order; a term is at most of about `size`, by
    default the largest of all sums. What a smaller sum has lost to cancellation is therefore no difference.
    """
    assert found.keys() == expected.keys()
    largest = max(value.abs().max().item() for value in expected.values()) if size is None else size
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], atol=terms * EPSILON * largest, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
