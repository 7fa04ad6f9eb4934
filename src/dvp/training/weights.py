"""Weights, known by name, type, shape and SHA-256: trainer, checkpoint and converted model have the same ones."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from dvp.training import ranks
from dvp.training.backend import Trainer

WEIGHTS = "weights.json"
MODEL = "model.safetensors"
Fingerprint = dict[str, str | list[int]]


def fingerprint(value: torch.Tensor) -> Fingerprint:
    """Type, shape and SHA-256 of a tensor's bytes, in the order of its elements."""
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def fingerprints(trainer: Trainer) -> tuple[dict[str, Fingerprint], list[str]]:
    """Of every parameter, by its name in the Hugging Face model; and the names of those that are not finite.

    All ranks call this, and each of them hashes its share.
    """
    mine: dict[str, tuple[Fingerprint, bool]] = {}
    names = []
    for index, (name, value) in enumerate(trainer.weights()):
        names.append(name)
        if index % ranks.count() == ranks.rank():
            mine[name] = fingerprint(value), bool(value.isfinite().all())
    known = {name: of_one for share in ranks.gather(mine) for name, of_one in share.items()}
    return {name: known[name][0] for name in names}, [name for name in names if not known[name][1]]


def write_weights(file: Path, known: Mapping[str, Fingerprint], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write fp32 weights as safetensors, each as soon as it is there.

    known : of all of them, in the order in which they come.

    The library's own writer wants all of them in memory. The format: https://github.com/huggingface/safetensors#format
    """
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, of_one in known.items():
        begin, end = end, end + 4 * math.prod(of_one["shape"])
        header[name] = {"dtype": "F32", "shape": of_one["shape"], "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(file, "wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, value in weights:
            out.write(value.detach().cpu().contiguous().view(-1).numpy())


def difference(expected: Mapping[str, Fingerprint], actual: Mapping[str, Fingerprint]) -> str | None:
    """In which parameter two models differ first, and how; None if they are the same to the last bit."""
    for name in [*expected, *(name for name in actual if name not in expected)]:
        if name not in actual:
            return f"parameter '{name}' is missing"
        if name not in expected:
            return f"parameter '{name}' is one too many"
        for key, what in (("dtype", "type"), ("shape", "shape"), ("sha256", "SHA-256")):
            if actual[name][key] != expected[name][key]:
                return f"parameter '{name}': {what} {actual[name][key]}, expected {expected[name][key]}"
    return None
