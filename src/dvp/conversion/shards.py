"""The fp32 weights of a ZeRO checkpoint, one at a time, read without DeepSpeed and without running what is pickled.

DeepSpeed flattens the weights and cuts them into a part for each rank. ZeRO-1 and 2 cut a parameter group as a whole:
each weight is followed by the padding that the checkpoint records. ZeRO-3 cuts each weight: each rank has an equal part
of it, the last ones padded. That this is read rightly is proved by the weights' checksums (dvp.training.weights).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.serialization import safe_globals

from dvp.errors import DvpError
from dvp.training.checkpoint import ALLOWED_GLOBALS, part_of

PREFIX = "model."  # the Trainer's policy holds the Hugging Face model under this name


class _Ignored:
    """Stands for what DeepSpeed pickles beside its tensors."""

    def __init__(self, *_: object):
        pass


def read_weights(folder: Path) -> dict[str, Callable[[], torch.Tensor]]:
    """Of a verified checkpoint's DeepSpeed folder: by name, in the model's order, a function that reads the weight.

    Files are mapped into memory, not read: only what a function returns is a copy. This and the functions raise
    DvpError for files that are not as DeepSpeed is known to write them.
    """
    with _as_deepspeed_writes(folder):
        return dict(_weights(folder))


@contextmanager
def _as_deepspeed_writes(folder: Path) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError, UnpicklingError) as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise DvpError(f"{folder}: not a ZeRO checkpoint as DeepSpeed is known to write it ({problem})") from None


def _weights(folder: Path) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    model = _load(min(folder.glob("*_model_states.pt"), key=part_of))
    parts = [_load(file)["optimizer_state_dict"] for file in sorted(folder.glob("*_optim_states.pt"), key=part_of)]
    world, stage = len(parts), int(parts[0]["zero_stage"])
    if stage == 3:
        offset = 0
        for name, shape in ((name, shape) for group in model["param_shapes"] for name, shape in group.items()):
            length = math.ceil(shape.numel() / world)

            def read(shape=shape, start=offset, length=length):
                with _as_deepspeed_writes(folder):
                    pieces = [_slice(part["fp32_flat_groups"], start, length) for part in parts]
                    return torch.cat(pieces)[: shape.numel()].view(shape)

            yield name.removeprefix(PREFIX), read
            offset += length
        return
    for index, group in enumerate(model["param_shapes"]):
        flat = [part["single_partition_of_fp32_groups"][index] for part in parts]
        offset = 0
        for (name, shape), padding in zip(group.items(), parts[0]["param_alignment_paddings"][index], strict=True):

            def read(shape=shape, start=offset, flat=flat):
                with _as_deepspeed_writes(folder):
                    return _slice(flat, start, shape.numel()).view(shape)

            yield name.removeprefix(PREFIX), read
            offset += shape.numel() + padding


def _slice(pieces: list[torch.Tensor], start: int, length: int) -> torch.Tensor:
    """A copy of `length` elements from `start` on of what the flat tensors hold one after the other."""
    ends = accumulate(len(piece) for piece in pieces)
    cut = []
    for piece, end in zip(pieces, ends, strict=True):
        begin = end - len(piece)
        cut.append(piece[max(0, start - begin) : max(0, start + length - begin)])
    return torch.cat(cut).detach()


def _load(file: Path) -> dict[str, Any]:
    # An enumeration's value is kept, the rest is not looked at.
    stand_ins = [(int if name.endswith("Enum") else _Ignored, name) for name in ALLOWED_GLOBALS]
    with safe_globals(stand_ins):
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
