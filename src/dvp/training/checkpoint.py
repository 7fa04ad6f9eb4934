"""Checkpoints that are whole or absent, and are verified before a byte of them is unpickled.

A checkpoint is a folder `step-000020` with DeepSpeed's files, what the weights in them are to the last bit
(weights.json), metrics and responses so far, state.json, and a manifest of their SHA-256 sums. It is written under a
temporary name, synced, and renamed; a killed process leaves the previous one intact.

The weights of a step that is evaluated (evaluation.at) are kept beside the checkpoints, in a folder `weights-000016`:
as safetensors, a third or a quarter of a checkpoint, with weights.json, the probe of that step and a manifest. No
training goes on from them, and they stay when checkpoints go.

It holds no state of a random generator, and no place in the data, because training has none: the order of the problems
and the seed of each response are functions of the run's seed and the step (dvp.training.loop), and the trainer's
forward pass has no dropout. Feedback and collapse follow from the metrics.
"""

import errno
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from torch.serialization import get_unsafe_globals_in_checkpoint

from dvp.errors import DvpError
from dvp.files import atomic_path, checksums, read_json, sha256_file, sha256_json, sync, verify_checksums, write_json
from dvp.training import ranks
from dvp.training.backend import TAG, Trainer
from dvp.training.probe import PROBE, write_probe
from dvp.training.weights import MODEL, WEIGHTS, Fingerprint, difference, fingerprints, write_weights
from dvp.versions import STAGE_VERSIONS

MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"
STATE = "state.json"
DAMAGED = ".damaged"
KEPT = "weights-"
# DeepSpeed pickles these beside its tensors, and reads them back without weights_only.
ALLOWED_GLOBALS = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}


def folder_of(folder: Path, settings: str, data: dict[str, str], base: dict[str, str]) -> Path:
    """Where below `folder` a run keeps its checkpoints: by settings, data, base model and version of the stage.

    `settings` is the config hash; data and base model are given by the checksums of their files. A JSON file beside the
    run's checkpoints says what they belong to. If there are none to continue, each folder of others is named on
    standard error, with what it differs in. The number of ranks is no part of it: `restore` refuses another one.
    The caller holds the run's lock; all ranks call this, once they know of each other.
    """
    belongs_to = {
        "settings": settings,
        "data": sha256_json(data)[:12],
        "base model": sha256_json(base)[:12],
        "stage version": STAGE_VERSIONS["train"],
    }
    path = folder / sha256_json(belongs_to)[:12]
    if ranks.is_main():
        if not checkpoints(path):
            for other in sorted(file for file in folder.glob("*") if file != path and checkpoints(file)):
                newest = checkpoints(other)[-1].name
                print(f"{other}: {newest} is not continued: {_difference(other, belongs_to)}", file=sys.stderr)
        write_json(_label(path), belongs_to)
    return path


def _label(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _difference(folder: Path, belongs_to: dict) -> str:
    try:
        there = read_json(_label(folder), *belongs_to)
    except DvpError as error:
        return str(error)
    return f"it differs in {', '.join(name for name in belongs_to if there[name] != belongs_to[name])}"


def save(folder: Path, step: int, trainer: Trainer, growing: list[Path], keep: int) -> Path:
    """Write the checkpoint of `step` below `folder`, with copies of the files that grow, metrics.jsonl among them.

    Returns its path.

    All but the newest `keep` are deleted, and so is what a killed process left half-written; the caller holds the
    run's lock. All ranks call this, each writes and hashes its own part, and it returns when the checkpoint is whole.
    Raises DvpError if the weights are not finite or it cannot be written, with all older ones in place.
    """
    weights = _finite_weights(trainer, step)
    path = folder / f"step-{step:06d}"
    try:
        if not ranks.is_main():
            _write_parts(trainer, path)
            ranks.gather(None)
            return path
        for abandoned in folder.glob(".step-*"):
            shutil.rmtree(abandoned)
        with atomic_path(path) as temporary:
            temporary.mkdir()
            sums = _write_parts(trainer, temporary)
            # DeepSpeed leaves copies of its conversion scripts; code has no place among data.
            for script in temporary.glob("*.py"):
                script.unlink()
            for file in growing:
                shutil.copyfile(file, temporary / file.name)
            write_json(temporary / WEIGHTS, weights)
            state = {"step": step, "ranks": ranks.count(), "fingerprint": folder.name}
            write_json(temporary / STATE, state)
            write_json(temporary / MANIFEST, {"files": checksums(temporary, known=sums)})
    except (OSError, RuntimeError) as error:
        # torch's own way to say that a file cannot be written; any other may be the end of another rank.
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        raise _not_written(path, error) from error
    for old in [*checkpoints(folder)[:-keep], *folder.glob(f"*{DAMAGED}")]:
        shutil.rmtree(old)
    ranks.gather(None)
    return path


def keep_weights(folder: Path, step: int, trainer: Trainer, prompts: list[list[int]]) -> Path:
    """Write the weights of `step` below `folder`, with what the trainer says of `prompts` (token ids).

    Returns their path.

    All ranks call this; the caller holds the run's lock. Weights that are there are written again.
    Raises DvpError if they are not finite or cannot be written.
    """
    weights = _finite_weights(trainer, step)
    path = kept_weights(folder, step)
    if not ranks.is_main():
        for _ in trainer.weights():  # gathered by all
            pass
        write_probe(path, trainer, prompts)
        ranks.gather(None)
        return path
    try:
        for abandoned in folder.glob(f".{KEPT}*"):
            shutil.rmtree(abandoned)
        with atomic_path(path) as temporary:
            temporary.mkdir()
            write_weights(temporary / MODEL, weights, trainer.weights())
            write_probe(temporary / PROBE, trainer, prompts)
            write_json(temporary / WEIGHTS, weights)
            write_json(temporary / STATE, {"step": step, "ranks": ranks.count(), "fingerprint": folder.name})
            write_json(temporary / MANIFEST, {"files": checksums(temporary)})
    except OSError as error:
        raise _not_written(path, error) from error
    ranks.gather(None)
    return path


def kept_weights(folder: Path, step: int) -> Path:
    """Where below `folder` the weights of a step are kept."""
    return folder / f"{KEPT}{step:06d}"


def check_kept(folder: Path, steps: Iterable[int]) -> None:
    """Raise DvpError, naming the first, unless the weights of all these steps are kept below `folder`."""
    for step in steps:
        if not kept_weights(folder, step).is_dir():
            raise DvpError(
                f"{kept_weights(folder, step)}: missing, although the run was trained beyond this step; to train "
                f"from the start, move {folder} away"
            )


def _finite_weights(trainer: Trainer, step: int) -> dict[str, Fingerprint]:
    weights, broken = fingerprints(trainer)
    if broken:
        # A step measures before it updates: what the last update broke would be seen in the next step only.
        raise DvpError(
            f"step {step}: its update left weights that are not finite; lower training.learning_rate ({broken[0]})"
        )
    return weights


def _not_written(path: Path, error: Exception) -> DvpError:
    return DvpError(
        f"{path}: the checkpoint cannot be written ({_reason(error, path.parent)}); older ones are intact; solve "
        "this and run again to continue from there"
    )


def _write_parts(trainer: Trainer, folder: Path) -> dict[str, str]:
    """DeepSpeed's files, by all ranks; what each has written is on the disk. Their SHA-256, by relative path."""
    folder = trainer.save(folder)
    sums = {}
    for file in sorted((folder / TAG).iterdir()):
        if part_of(file) == ranks.rank():
            sync(file)
            sums[str(file.relative_to(folder))] = sha256_file(file)
    return {name: digest for share in ranks.gather(sums) for name, digest in share.items()}


def part_of(file: Path) -> int:
    """The rank that wrote a file of DeepSpeed's; those without a number are rank 0's."""
    known = re.search(r"pp_rank_(\d+)_", file.name)
    return int(known[1]) if known else 0


def restore(folder: Path, trainer: Trainer) -> tuple[Path, str] | None:
    """Load the newest whole checkpoint below `folder` into the trainer: its path and its metrics; None without any.

    A damaged one is named on standard error and set aside until another one has been written. All ranks call this.
    Raises DvpError if all are damaged, the newest is of another number of ranks, or the trainer does not have the
    weights that were saved once it has read them; they stay as they are.
    """
    newest = ranks.gather(_newest(folder) if ranks.is_main() else None)[0]
    if newest is not None:
        trainer.load(newest[0])
        differs = difference(read_json(newest[0] / WEIGHTS), fingerprints(trainer)[0])
        if differs is not None:
            raise DvpError(f"{newest[0]}: the trainer that has read it has other weights: {differs}")
    return newest


def _newest(folder: Path) -> tuple[Path, str] | None:
    damaged: list[Path] = []
    problems: list[DvpError] = []
    for path in reversed(checkpoints(folder)):
        try:
            state = verify(path)
            metrics = (path / METRICS).read_text(encoding="utf-8")
            if len(metrics.splitlines()) != state["step"]:
                raise DvpError(f"{path}: expected {state['step']} rows of metrics")
        except DvpError as error:
            damaged.append(path)
            problems.append(error)
            continue
        if state["ranks"] != ranks.count():
            raise DvpError(
                f"{path}: written by {state['ranks']} ranks, but training.gpus × nodes is {ranks.count()}; go on with "
                f"{state['ranks']}, or move {folder} away to start anew"
            )
        for broken, problem in zip(damaged, problems, strict=True):
            print(f"warning: {problem}; going back to {path.name}", file=sys.stderr)
            os.replace(broken, broken.with_name(broken.name + DAMAGED))
        return path, metrics
    if damaged:
        raise DvpError(
            f"{folder}: no checkpoint is intact, nothing was deleted; to train from the start, move the folder away "
            f"({'; '.join(map(str, problems))})"
        )
    return None


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints below `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{6}", path.name))


def verify(path: Path) -> dict:
    """Check every file of a checkpoint, or of a step's kept weights, and return its state.

    Raises DvpError, naming the file, if one is missing, was altered, is of another run, or holds code that a
    checkpoint has no need of.
    """
    if not path.is_dir():
        raise DvpError(f"{path}: no such checkpoint")
    try:
        return _verify(path)
    except OSError as error:
        raise DvpError(f"{error.filename or path}: cannot be read ({error.strerror})") from None


def _verify(path: Path) -> dict:
    manifest = read_json(path / MANIFEST, "files")
    for name in (STATE, WEIGHTS, *((MODEL, PROBE) if path.name.startswith(KEPT) else (METRICS,))):
        if name not in manifest["files"]:
            raise DvpError(f"{path / MANIFEST}: does not list {name}")
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
    state = read_json(path / STATE, "step", "fingerprint", "ranks")
    if state["fingerprint"] != path.parent.name:
        raise DvpError(f"{path}: a checkpoint of other settings or data ({state['fingerprint']})")
    return state


def _reason(error: Exception, folder: Path) -> str:
    """Why a write failed, in a few words; torch's own are about its streams."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    free = shutil.disk_usage(folder).free
    if free < 2**20:
        return os.strerror(errno.ENOSPC)
    return f"{' '.join(str(error).split())[:100]}; {free / 2**20:.0f} MiB free"
