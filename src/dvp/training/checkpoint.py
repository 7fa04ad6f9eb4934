"""Checkpoints that are whole or absent, and are verified before a byte of them is unpickled.

A checkpoint is a folder `step-000020` with DeepSpeed's files, the metrics so far, state.json, and a manifest of their
SHA-256 sums. It is written under a temporary name, synced, and renamed; a killed process leaves the previous one
intact.
"""

import re
import shutil
from pathlib import Path

from torch.serialization import get_unsafe_globals_in_checkpoint

from dvp.errors import DvpError
from dvp.files import atomic_path, checksums, read_json, verify_checksums, write_json
from dvp.training import ranks
from dvp.training.backend import Trainer

MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"
# DeepSpeed pickles these beside its tensors, and reads them back without weights_only.
ALLOWED_GLOBALS = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}


def save(folder: Path, step: int, trainer: Trainer, metrics: Path, keep: int) -> Path:
    """Write the checkpoint of `step` below `folder`, with a copy of the `metrics` up to it. Returns its path.

    All but the newest `keep` are deleted, and so is what a killed process left half-written; the caller holds the
    run's lock. All ranks call this; it returns when the checkpoint is whole.
    """
    path = folder / f"step-{step:06d}"
    if not ranks.is_main():
        trainer.save(path)
        ranks.gather(None)
        return path
    for abandoned in folder.glob(".step-*"):
        shutil.rmtree(abandoned)
    with atomic_path(path) as temporary:
        temporary.mkdir()
        trainer.save(temporary)
        # DeepSpeed leaves copies of its conversion scripts; code has no place among data.
        for script in temporary.glob("*.py"):
            script.unlink()
        shutil.copyfile(metrics, temporary / METRICS)
        write_json(temporary / "state.json", {"step": step, "ranks": ranks.count()})
        write_json(temporary / MANIFEST, {"files": checksums(temporary)})
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    ranks.gather(None)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints below `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{6}", path.name))


def verify(path: Path) -> dict:
    """Check every file of a checkpoint and return its state.

    Raises DvpError, naming the file, if one is missing, was altered, or holds code that a checkpoint has no need of.
    """
    if not path.is_dir():
        raise DvpError(f"{path}: no such checkpoint")
    manifest = read_json(path / MANIFEST, "files")
    verify_checksums(path, manifest["files"])
    for file in sorted(path.rglob("*.pt")):
        if str(file.relative_to(path)) not in manifest["files"]:
            raise DvpError(f"{file}: not listed in the checkpoint's manifest")
        try:
            foreign = set(get_unsafe_globals_in_checkpoint(file)) - ALLOWED_GLOBALS
        except (ValueError, RuntimeError) as error:
            raise DvpError(f"{file}: not a checkpoint of torch ({' '.join(str(error).split())[:200]})") from None
        if foreign:
            raise DvpError(f"{file}: refuses to be loaded: it would call {', '.join(sorted(foreign))}")
    return read_json(path / "state.json", "step", "ranks")
