"""Write and read files that are either whole or absent: atomic writes, one writer, checksums, strict reads."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dvp.errors import WRITING, DvpError

_UMASK = os.umask(0o022)  # the umask can only be read by setting it
os.umask(_UMASK)


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: object) -> str:
    """Return the SHA-256 of a JSON-able value, in hex, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` and delete it at the end; an exception gets a note that names `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _remove(temporary)
    try:
        yield temporary
    except Exception as error:
        error.add_note(f"{WRITING}{path}")
        raise
    finally:
        _remove(temporary)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; move it to `path` only when the block ends without an exception.

    The block creates a file or a directory there. A directory replaces an older one. An exception gets a note that
    names `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob(f".{escape(path.name)}.*.old"):  # left by a process that was killed between two renames
        _remove(old) if path.exists() else os.replace(old, path)
    with _aside(path) as temporary:
        yield temporary
        for made in [temporary, *temporary.rglob("*")]:
            if not made.is_symlink():
                _finish(made)
        # A directory cannot be replaced in one step: the old one steps aside first.
        old = path.with_name(f".{path.name}.{os.getpid()}.old")
        if path.is_dir():
            os.replace(path, old)
        os.replace(temporary, path)
        _remove(old)
        sync(path.parent)  # the rename itself must reach the disk, too


@contextmanager
def atomic_files(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, whose files replace those of `folder` when the block ends without an exception.

    Each file is moved in one step. Folders within `folder` stay, as other processes may be writing there.
    """
    with _aside(folder) as temporary:
        temporary.mkdir(parents=True)
        yield temporary
        made = sorted(temporary.iterdir())
        for file in made:
            _finish(file)
        folder.mkdir(exist_ok=True)
        for file in made:
            os.replace(file, folder / file.name)
        for old in folder.iterdir():
            if old.is_file() and old.name not in {file.name for file in made}:
                old.unlink()
        sync(folder)


def append_line(path: Path, line: str) -> None:
    """Append a line without buffering, so that a full disk raises OSError in this call and not in a later one."""
    data = f"{line}\n".encode()
    with open(path, "ab", buffering=0) as file:
        while data:
            data = data[file.write(data) :]


@contextmanager
def only_writer(folder: Path, doing: str) -> Iterator[None]:
    """Hold a folder's lock during the block; the lock is released when the process ends, however it ends.

    Needed because a job may outlive the Snakemake that started it, and two checkouts may share their results.
    doing : what the process that holds the lock is doing there, for the message.
    Raises DvpError if another process holds the lock, or if the folder cannot be made or written to.
    """
    lock = FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise DvpError(f"{folder}: another process is {doing}; wait for it or stop it") from None
    except OSError as error:
        raise DvpError(f"{folder}: results cannot be written there ({error.strerror})") from None
    try:
        yield
    finally:
        lock.release()


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def dump_json(value: object) -> str:
    """Return readable JSON. Raises ValueError for NaN and infinities, which are not JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically."""
    write_text(path, dump_json(value) + "\n")


def parse_json(text: str) -> Any:
    """Parse a JSON text strictly.

    Raises ValueError, in one line, for invalid JSON, duplicate keys, unpaired surrogates, too deep nesting or too long
    integers.
    """
    try:
        value = json.loads(text, object_pairs_hook=_once_each)
        if "\\u" in text:  # only an escape can spell an unpaired surrogate
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"unpaired surrogate \\u{ord(half):04x}: not valid text") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        # The rest of Python's message is about its own settings.
        raise ValueError(str(error).partition(";")[0]) from None
    return value


def read_json(path: Path, *required: str) -> dict:
    """Read a JSON object and check that it has the `required` keys.

    Raises DvpError if the file is missing, is not a JSON object, or lacks a key.
    """
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DvpError(f"{path}: no such file; the stage that writes it has not finished") from None
    except OSError as error:
        raise DvpError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise DvpError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise DvpError(f"{path}: expected a JSON object, found {type(value).__name__}")
    for key in required:
        if key not in value:
            raise DvpError(f"{path}: key '{key}' is missing")
    return value


def checksums(folder: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the SHA-256 of every file below `folder`, by relative path, without names that begin with a dot.

    known : checksums that are not computed again; a file that another machine wrote need not be visible here yet.
    """
    names = [
        str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and not file.name.startswith(".")
    ]
    sums = dict(known or {})
    new = [name for name in names if name not in sums]
    sums.update(zip(new, _sha256_files([folder / name for name in new]), strict=True))
    return dict(sorted(sums.items()))


def verify_checksums(folder: Path, expected: dict[str, str]) -> None:
    """Raise DvpError, naming the file, if one of `expected` is missing from `folder` or was altered."""
    files = [folder / name for name in expected]
    for file in files:
        if not file.is_file():
            raise DvpError(f"{file}: missing, although its manifest lists it")
    for file, digest, now in zip(files, expected.values(), _sha256_files(files), strict=True):
        if now != digest:
            raise DvpError(f"{file}: altered since it was written (its SHA-256 differs from its manifest)")


def _sha256_files(files: list[Path]) -> list[str]:
    """Hash files in parallel: a thread hashes one or two gigabytes per second, and a checkpoint may have 100."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(sha256_file, files))


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finish(path: Path) -> None:
    """Flush a file to the disk before it gets its name, and give it the permissions of the umask.

    safetensors makes files that only their owner can read.
    """
    if path.is_file() and path.stat().st_mode & 0o777 == 0o600:
        path.chmod(0o666 & ~_UMASK)
    sync(path)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} is a duplicate")
    return value


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
