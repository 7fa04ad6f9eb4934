"""Write checkpoints that are whole or absent, and verify them before a byte of them is unpickled.

A checkpoint is a folder `step-000020` with DeepSpeed's files, metrics and responses so far, the contexts of the drift,
state.json, and a manifest of their SHA-256 sums. It is written under a temporary name, synced, and renamed; a killed
process leaves the previous one intact.

A checkpoint holds no state of a random generator, and no position in the data, because training has none: the order of
the problems and the seed of each response are functions of the run's seed and the step (dvp.training.loop), and the
trainer's forward pass has no dropout. Feedback and collapse follow from the metrics.

The weights of a step that is evaluated, the last one among them, are kept beside the checkpoints, in a folder
`weights-000016`: as safetensors, a third or a quarter of a checkpoint, with a probe: the trainer's log-probs of fixed
prompts, which the converted model must reproduce. Training never resumes from them, and they stay when checkpoints are
deleted.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch.serialization import get_unsafe_globals_in_checkpoint

from dvp.core.batch import Batch
from dvp.errors import DvpError
from dvp.experiment.training import KEEP_CHECKPOINTS
from dvp.files import atomic_path, checksums, read_json, sha256_file, sha256_json, sync, verify_checksums, write_json
from dvp.training import ranks
from dvp.training.backend import TAG, Trainer
from dvp.versions import STAGE_VERSIONS

MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"
STATE = "state.json"
DAMAGED = ".damaged"
KEPT = "weights-"
MODEL = "model.safetensors"
PROBE = "probe.safetensors"
PROBE_PROMPTS = 16
OF_RANK = re.compile(r"pp_rank_(\d+)_")  # in the names of DeepSpeed's files
# DeepSpeed pickles these beside its tensors, and reads them back without weights_only.
ALLOWED_GLOBALS = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}


def folder_of(folder: Path, settings: str, data: dict[str, str], base: dict[str, str]) -> Path:
    """Return where below `folder` a run keeps its checkpoints: by settings, data, base model and version of the stage.

    settings : the config hash.
    data, base : checksums of the files of data and base model.
    Rank 0 writes what the checkpoints belong to beside that folder, as JSON. If there are none to continue, it names
    each folder of others on standard error, with what it differs in. The number of ranks is no part of the name. The
    caller holds the run's lock; all ranks call this, once they know of each other.
    """
    belongs_to = {
        "settings": settings,
        "data": sha256_json(data)[:12],
        "base model": sha256_json(base)[:12],
        "stage version": STAGE_VERSIONS["train"],
    }
    path = folder / sha256_json(belongs_to)[:12]
    if ranks.is_main():
        for label in sorted(folder.glob("*.json")) if not checkpoints(path) else ():
            other = label.with_suffix("")
            if other != path and checkpoints(other):
                there = read_json(label)
                differs = ", ".join(name for name in belongs_to if there.get(name) != belongs_to[name])
                print(f"{checkpoints(other)[-1]} is not continued: it differs in {differs}", file=sys.stderr)
        write_json(path.with_suffix(".json"), belongs_to)
    return path


class Saving:
    """A checkpoint that threads of all ranks are writing; training may continue meanwhile."""

    def __init__(
        self,
        folder: Path,
        step: int,
        trainer: Trainer,
        growing: list[Path],
        others: Sequence[Callable[[Path], None]] = (),
    ):
        """Begin to write the checkpoint of `step` below `folder`, with copies of the `growing` files.

        growing : metrics.jsonl among them.
        others : each writes something more into a folder.
        The caller holds the run's lock, and calls `finish` before it begins the next one. All ranks call this and
        `finish`.
        Raises DvpError, with all older ones in place, if the weights are not finite or nothing can be written.
        """
        self._began = time.perf_counter()
        _check_finite(trainer, step)
        self._step, self._path = step, folder / f"step-{step:06d}"
        self._half = folder / f".{self._path.name}.half"
        with _telling(self._path, self._half):
            if ranks.is_main():
                _remove_abandoned(self._path)
                self._half.mkdir(parents=True)
                for file in growing:
                    shutil.copyfile(file, self._half / file.name)
                for write in others:
                    write(self._half)
            parts = trainer.parts(self._half)
            if ranks.is_main():
                # DeepSpeed leaves copies of its conversion scripts; code has no place among data.
                for script in self._half.glob("*.py"):
                    script.unlink()
        self._written = ThreadPoolExecutor(1).submit(_write_parts, parts)
        self.seconds = 0.0
        """Seconds that it took, once it is finished, other work meanwhile not counted."""

    def finish(self) -> Path:
        """Wait until the checkpoint is whole, delete all but the newest KEEP_CHECKPOINTS, and return its path.

        Damaged ones are deleted as well. Raises DvpError, with all older ones in place, if it cannot be written.
        """
        with _telling(self._path, self._half):
            own, ended = self._written.result()
            now = time.perf_counter()
            every = ranks.gather(own)
            if ranks.is_main():
                with atomic_path(self._path) as temporary:
                    os.replace(self._half, temporary)
                    sums = {f"{TAG}/{name}": digest for of_rank in every for name, digest in of_rank.items()}
                    _close(temporary, self._path, self._step, sums)
        ranks.gather(None)
        if ranks.is_main():
            folder = self._path.parent
            for old in [*checkpoints(folder)[:-KEEP_CHECKPOINTS], *folder.glob(f"*{DAMAGED}")]:
                shutil.rmtree(old)
        self.seconds = ended - self._began + time.perf_counter() - now
        return self._path


def keep_weights(folder: Path, step: int, trainer: Trainer, prompts: list[list[int]]) -> Path:
    """Write the weights of `step` below `folder`, in fp32 and by their Hugging Face names, with their probe.

    The probe is the log-prob of all tokens of `prompts` (token ids) but their first ones, by the live trainer in fp32.
    Weights that are there already are written again. All ranks call this, and rank 0 holds all weights; the caller
    holds the run's lock.

    Returns the folder that was written.
    Raises DvpError if the weights are not finite or cannot be written.
    """
    _check_finite(trainer, step)
    # A prompt of one token would have nothing to score.
    prompts = [prompt * 2 if len(prompt) == 1 else prompt for prompt in prompts]
    batch = Batch.collate([prompt[:1] for prompt in prompts], [prompt[1:] for prompt in prompts], pad=0)
    log_prob_N = trainer.score(batch, None, bf16=False)["log_prob"][batch.response_BT]
    weights = {name: value.to("cpu", copy=True) for name, value in trainer.weights() if ranks.is_main()}
    path = kept_weights(folder, step)
    if ranks.is_main():
        with _telling(path):
            _remove_abandoned(path)
            with atomic_path(path) as temporary:
                temporary.mkdir()
                save_file(weights, temporary / MODEL, metadata={"format": "pt"})
                probe = {"tokens": batch.tokens_BT, "scored": batch.response_BT, "log_prob": log_prob_N}
                save_file(probe, temporary / PROBE, metadata={"device": trainer.device.type})
                _close(temporary, path, step, {})
    ranks.gather(None)
    return path


def _check_finite(trainer: Trainer, step: int) -> None:
    """Check that all weights are finite. All ranks call this. Raises DvpError, naming the step and a parameter."""
    broken = [name for name, value in trainer.weights() if not value.isfinite().all()]
    if broken:
        # A step measures before it updates: what the last update broke would be seen in the next step only.
        raise DvpError(
            f"step {step}: its update left weights that are not finite; lower training.learning_rate ({broken[0]})"
        )


def _close(folder: Path, path: Path, step: int, sums: dict[str, str]) -> None:
    """Write state.json and the manifest of `folder`, which will become `path`; `sums` are checksums known already."""
    write_json(folder / STATE, {"step": step, "ranks": ranks.count(), "fingerprint": path.parent.name})
    write_json(folder / MANIFEST, {"files": checksums(folder, known=sums)})


def _remove_abandoned(path: Path) -> None:
    """Delete what a killed process left half-written of this kind (checkpoints or kept weights)."""
    for abandoned in path.parent.glob(f".{path.name.partition('-')[0]}-*"):
        shutil.rmtree(abandoned)


@contextmanager
def _telling(path: Path, half: Path | None = None) -> Iterator[None]:
    """Turn a write error into a one-line DvpError and delete `half`, the partial checkpoint, if there is one."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if half is not None and ranks.is_main():
            shutil.rmtree(half, ignore_errors=True)
        # This is how torch reports a file that cannot be written; any other error may come from another rank's end.
        if not ranks.is_main() or (isinstance(error, RuntimeError) and "inline_container" not in str(error)):
            raise
        free = f"{shutil.disk_usage(path.parent).free / 2**20:.0f} MiB free"
        raise DvpError(
            f"{path}: the checkpoint cannot be written ({getattr(error, 'strerror', None) or free}); older ones are "
            "intact; run again to continue from there"
        ) from error


def kept_weights(folder: Path, step: int) -> Path:
    """Return the folder below `folder` where the weights of a step are kept."""
    return folder / f"{KEPT}{step:06d}"


def _write_parts(parts: list[tuple[Path, Callable[[], None]]]) -> tuple[dict[str, str], float]:
    """Write this rank's files to the disk; return their SHA-256 by name, and the time when the last one was written."""
    sums = {}
    while parts:
        file, write = parts.pop()
        write()
        sync(file)
        sums[file.name] = sha256_file(file)
    return sums, time.perf_counter()


def restore(folder: Path, trainer: Trainer) -> tuple[Path, str] | None:
    """Load the newest whole checkpoint below `folder` into the trainer.

    A damaged one is named on standard error and set aside until another one has been written. All ranks call this, and
    each verifies its own files. They may be more or fewer than those that wrote it.
    Returns the checkpoint's path and its metrics.jsonl as text; None if there is no checkpoint.
    Raises DvpError if all are damaged; then nothing is moved.
    """
    damaged: dict[Path, DvpError] = {}
    for path in reversed(ranks.gather(checkpoints(folder))[0]):
        found = ranks.gather(_verified(path))
        problem = next((one for one in found if isinstance(one, DvpError)), None)
        if problem is not None:
            damaged[path] = problem
            continue
        for broken, problem in damaged.items() if ranks.is_main() else ():
            print(f"warning: {problem}; going back to {path.name}", file=sys.stderr)
            os.replace(broken, broken.with_name(broken.name + DAMAGED))
        trainer.load(path, found[0]["ranks"])
        return path, ranks.gather((path / METRICS).read_text(encoding="utf-8"))[0]
    if damaged:
        raise DvpError(
            f"{folder}: no checkpoint is intact, nothing was deleted; to train from the start, move the folder away "
            f"({'; '.join(map(str, damaged.values()))})"
        )
    return None


def _verified(path: Path) -> dict | DvpError:
    """Return the state of a checkpoint, or the error in this rank's part of it."""
    try:
        return verify(path, _is_mine)
    except DvpError as error:
        return error


def _is_mine(name: str) -> bool:
    """Return whether this rank verifies a file; rank 0 verifies those that belong to no rank."""
    of_rank = OF_RANK.search(name)
    return (int(of_rank[1]) if of_rank else 0) % ranks.count() == ranks.rank()


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints below `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{6}", path.name))


def verify(path: Path, mine: Callable[[str], bool] = lambda name: True) -> dict:
    """Check the files of a checkpoint, or of a step's kept weights, whose names are `mine`; return its state.

    Raises DvpError, naming the file, if one is missing, was altered, belongs to another run, or holds code that a
    checkpoint does not need.
    """
    listed = read_json(path / MANIFEST, "files")["files"]
    try:
        verify_checksums(path, {name: digest for name, digest in listed.items() if mine(name)})
    except OSError as error:
        raise DvpError(f"{error.filename or path}: cannot be read ({error.strerror})") from None
    for file in sorted(file for file in path.rglob("*.pt") if mine(file.name)):
        if str(file.relative_to(path)) not in listed:
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
