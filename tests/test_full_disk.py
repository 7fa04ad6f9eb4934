"""A full disk is one line that names the file, whichever library meets it, and costs nothing that was there."""

import errno
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from sqlalchemy import create_engine, text

from dvp.errors import disk_trouble
from dvp.files import checksums, write_text

FULL = os.strerror(errno.ENOSPC)


# --- what the libraries raise ---


def _python(disk: Path) -> None:
    with open("/dev/full", "w", encoding="utf-8") as file:
        file.write("x")


def _parquet(disk: Path) -> None:  # not /dev/full: it removes a file that it could not write
    pq.write_table(pa.table({"x": torch.rand(2**16).numpy()}), disk / "x.parquet")


def _weights(disk: Path) -> None:
    save_file({"x": torch.zeros(2**18)}, disk / "x.safetensors")


def _database(disk: Path) -> None:
    with create_engine(f"sqlite:///{disk}/x.db").begin() as connection:
        connection.execute(text("CREATE TABLE x (y BLOB)"))
        connection.execute(text("INSERT INTO x VALUES (zeroblob(1000000))"))


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("write", [_python, _parquet, _weights, _database])
def test_a_full_disk_is_told_of_any_exception(write, disk):
    with pytest.raises(Exception, match=r"(?i)space|full|logged") as raised:
        write(disk)
    assert disk_trouble(raised.value) == FULL


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EDQUOT, "", "/disk/x"), "/disk/x: Disk quota exceeded"),
        (RuntimeError("write failed: Input/output error (os error 5)"), "Input/output error"),
        (sqlite3.OperationalError("disk I/O error"), "Input/output error"),
        (ValueError("[Errno 122] while closing"), "Disk quota exceeded"),
        (ValueError("errno 288, 28 lines"), None),
    ],
)
def test_what_is_no_fault_of_a_disk_is_not_told(error, told):
    assert disk_trouble(error) == told


def test_the_file_that_was_written_is_named(disk):
    with pytest.raises(OSError, match=FULL) as raised:
        write_text(disk / "x.txt", "x" * 2**19)
    assert disk_trouble(raised.value) == f"{disk}/x.txt: {FULL}"
    assert list(disk.iterdir()) == []


# --- stages ---


def fill(disk: Path, left: int) -> Path:
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        while os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize > left:
            file.write(bytes(2**12))
    return filler


RESOLVE = ("resolve", "--experiment", "smoke", "--folder", "disk/smoke")


@pytest.mark.slow
def test_a_full_disk_ends_resolve_and_prepare_in_a_line(dvp, disk, root, monkeypatch):
    """At once, and in the midst of the data. The repository's configuration and the store are elsewhere."""

    def run(*arguments: str) -> tuple[int, str]:
        status, _, errors = dvp(*arguments, cwd=disk.parent)
        return status, errors

    shutil.copytree(root / "config", disk.parent / "config")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{disk.parent}/mlflow.db")
    filler = fill(disk, 0)
    assert run(*RESOLVE) == (2, f"dvp resolve: disk/smoke/config.yaml: {FULL}\n")
    filler.unlink()
    assert run(*RESOLVE) == (0, "")
    kept = checksums(disk)
    prepare = ("prepare", "--config", "disk/smoke/config.yaml")
    for left, file in ((0, "tracking/prepare.json"), (2**13, "data/train.parquet")):
        filler = fill(disk, left)
        assert run(*prepare) == (2, f"dvp prepare: disk/smoke/{file}: {FULL}\n")
        filler.unlink()
        assert kept.items() <= checksums(disk).items()
    assert run(*prepare)[0] == 0
