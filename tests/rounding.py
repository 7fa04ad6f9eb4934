"""Tolerances for numbers that are equal in exact arithmetic: from the arithmetic, not from what one processor gave."""

import torch


def rounding(terms: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """Bound the difference between two computations of one number, each with `terms` roundings of numbers up to `size`.

    A rounding is off by at most half of ε · `size`, so each computation by `terms` / 2 · ε · `size`, to first order
    (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1), in whatever order it adds. A sum of n
    numbers takes n - 1 roundings. By default, a relative bound.
    """
    return terms * torch.finfo(dtype).eps * size


TINY_TERMS = 400 + 2 * (3 * 64 + 96)
"""Terms of the sums that a log-prob of the tests' tiny model comes through: its vocabulary and its layers' matrices."""
TINY_LOGITS = 10.0
"""About its largest logit."""
TINY_LOG_PROB = rounding(TINY_TERMS, TINY_LOGITS)
"""Nats by which two programs may differ in it; relative to their largest entry, also its gradients by the weights."""


def assert_same_sums(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], terms: int, size: float | None = None
) -> None:
    """Assert that sums of `terms` float32 numbers agree up to the order of summation, which differs between programs.

    size : of a term and of a partial sum; by default the largest of all sums. Digits that a smaller sum loses to
        cancellation are therefore tolerated.
    """
    assert found.keys() == expected.keys()
    largest = max(value.abs().max().item() for value in expected.values()) if size is None else size
    for name, value in found.items():
        atol = rounding(terms, largest)
        torch.testing.assert_close(
            value, expected[name], atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_steps(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], before: dict[str, torch.Tensor], terms: int
) -> None:
    """Assert that Adam moved weights alike by gradients that are sums of `terms` float32 numbers.

    Adam divides a gradient by its own size: one that is as small as its rounding, η = `terms` · ε of the others, moves
    its weight by either sign, and a larger one, g, by η / |g| too far. With gradients of density 1 at 0, in units of
    their size, the mean square of this error, of a step, is ∫ min(2, 2η / |g|)² dg = 16 η.
    """
    wrong, moved = (
        sum((one[name].double() - other[name].double()).square().sum().item() for name in expected)
        for one, other in ((found, expected), (expected, before))
    )
    assert found.keys() == expected.keys()
    assert moved > 0
    assert wrong <= rounding(16 * terms) * moved
