"""Coordinate the ranks that train one run, through torch.distributed; a process that is alone is rank 0 of 1.

Every rank has an engine and a verifier for its share of the prompts, and scores and backpropagates its share of the
micro-batches. The results are gathered, so that everything computed from a whole batch (weights, advantages,
denominators, diagnostics) is computed by all of them from the same numbers. Rank 0 alone writes files.
"""

from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def count() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this rank, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Return whether this is the rank that writes files."""
    return rank() == 0


def gather(value: T) -> list[T]:
    """Return the value of every rank, in their order.

    All ranks must call this, in the same place; it waits for the last one.
    """
    if count() == 1:
        return [value]
    values = [None] * count()
    dist.all_gather_object(values, value, group=_over_hosts(dist.get_backend()))
    return values


@cache
def _over_hosts(backend: str) -> dist.ProcessGroup | None:
    """Return the group for pickled objects: NCCL would put those of every rank, sets among them, on each GPU."""
    return None if backend == "gloo" else dist.new_group(backend="gloo")


def exchange(outgoing: list[T]) -> list[T]:
    """Return what every rank sends to this one, in their order; `outgoing` is what this one sends to each.

    All ranks must call this.
    """
    if count() == 1:
        return outgoing
    found: list[T] = []
    for source in range(count()):
        received = [None]
        sent = outgoing if source == rank() else None
        dist.scatter_object_list(received, sent, source, group=_over_hosts(dist.get_backend()))
        found += received
    return found


def own(span: int = 1) -> slice:
    """Return which of any items this rank works on.

    Ranks take turns; `span` consecutive ranks work on the same items.
    """
    return slice(rank() // span, None, count() // span)


def share(items: Sequence[T], span: int = 1) -> list[T]:
    """Return those of the items that this rank works on (see `own`)."""
    return list(items[own(span)])


def deal(items: Sequence[T], spare: T) -> list[list[T]]:
    """Return the share of every rank, all of one size: `spare` stands where there is no item left."""
    size = -(-len(items) // count())
    shares = [list(items[first :: count()]) for first in range(count())]
    return [one + [spare] * (size - len(one)) for one in shares]


def join(mine: list[T], items: int, span: int = 1) -> list[T]:
    """Gather what each rank made of its `share` and return it in the order of all `items`; any more are dropped."""
    gathered = gather(mine)[::span]
    return [gathered[index % len(gathered)][index // len(gathered)] for index in range(items)]
