"""Import torch when it is first used.

A method's settings are defined beside its mathematics, and Snakemake reads experiments again and again, which must not
take the seconds that importing torch takes. Modules that use this also postpone the evaluation of their annotations.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

if TYPE_CHECKING:
    import torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()


def no_grad(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate like torch.no_grad(), without importing torch where the function is defined."""

    @wraps(function)
    def without_gradients(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.no_grad():
            return function(*args, **kwargs)

    return without_gradients
