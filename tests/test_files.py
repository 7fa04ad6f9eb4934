"""Files are whole or absent, and altered ones are noticed."""

import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from dvp.errors import DvpError
from dvp.files import (
    append_line,
    atomic_files,
    atomic_path,
    checksums,
    only_writer,
    read_json,
    sha256_json,
    verify_checksums,
    write_json,
    write_text,
)

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def names(folder) -> list[str]:
    """Everything below a folder, hidden things included."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_file_is_written_and_replaced_and_its_folder_made(tmp_path):
    path = tmp_path / "a" / "b" / "x.txt"
    for text in ("first ρ\n", "second\n"):
        write_text(path, text)
        assert path.read_text(encoding="utf-8") == text
        assert names(tmp_path) == ["a", "a/b", "a/b/x.txt"]


def _fill(folder, text: str, *files: str) -> None:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")


def fails(path: Path, files: dict[str, str], error: type[BaseException] = RuntimeError) -> list[str]:
    """A block that writes these, below a folder or without a name as the file itself, and fails; the error's notes."""

    def interrupted() -> None:
        with atomic_path(path) as temporary:
            for name, text in files.items():
                file = temporary / name if name else temporary
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            raise error

    with pytest.raises(error) as raised:
        interrupted()
    return getattr(raised.value, "__notes__", [])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_what_fails_half_way_leaves_the_old_one_or_nothing(tmp_path, error):
    file, folder = tmp_path / "x.txt", tmp_path / "model"
    fails(file, {"": "half"}, error)
    assert names(tmp_path) == []
    file.write_text("old", encoding="utf-8")
    _fill(folder, "old", "a", "deep/b")
    before = checksums(tmp_path)
    fails(file, {"": "half"}, error)
    fails(folder, {"a": "new", "deep/b": "new", "c": "new"}, error)
    with pytest.raises(FileNotFoundError), atomic_path(file):
        pass  # writes nothing
    assert checksums(tmp_path) == before
    assert names(tmp_path) == ["model", "model/a", "model/deep", "model/deep/b", "x.txt"]


def test_a_folder_replaces_the_old_one_whole(tmp_path, monkeypatch):
    """What a killed process left is in nobody's way."""
    path = tmp_path / "model"
    monkeypatch.setattr("os.getpid", lambda: 123)
    _fill(tmp_path, "dead", ".model.123.tmp/old")
    for files in (["a", "deep/b"], ["deep/c"]):
        with atomic_path(path) as temporary:
            _fill(temporary, "x", *files)
        assert [name for name in names(path) if (path / name).is_file()] == files
        assert names(tmp_path)[0] == "model"


def test_a_folder_whose_writer_was_killed_between_two_renames_is_put_back(tmp_path):
    """The old one had stepped aside; it is there again, also if the new attempt fails."""
    _fill(tmp_path, "old", ".model.123.old/a", ".other.123.old/a")
    assert fails(tmp_path / "model", {"b": "new"}) == [f"writing {tmp_path}/model"]
    assert names(tmp_path) == [".other.123.old", ".other.123.old/a", "model", "model/a"]
    _fill(tmp_path, "older", ".model.124.old/a")
    with atomic_path(tmp_path / "model") as temporary:
        _fill(temporary, "x", "b")
    assert names(tmp_path) == [".other.123.old", ".other.123.old/a", "model", "model/b"]


# --- JSON ---


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(value=st.dictionaries(st.text(), JSON, max_size=4))
def test_json_is_read_back(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "same.json"
    write_json(path, value)
    assert read_json(path, *value) == value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file; the stage that writes it has not finished"),
        (b'{"a": 1', "not valid JSON (Expecting ',' delimiter: line 1 column 8 (char 7))"),
        (b'{"a": "\xff"}', "not valid JSON ('utf-8' codec can't decode byte 0xff in position 7: invalid start byte)"),
        (b'{"a": 1, "b": 2, "a": 1}', "not valid JSON (key 'a' is a duplicate)"),
        (
            b'{"a": ["x \\ud83d y"]}',
            "not valid JSON (unpaired surrogate \\ud83d: not valid text)",
        ),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "not valid JSON (nested too deeply)"),
        (b"[1]", "expected a JSON object, found list"),
        (b'{"a": 1}', "key 'b' is missing"),
    ],
)
def test_bad_json_is_named(tmp_path, content, message):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DvpError) as error:
        read_json(path, "a", "b")
    assert str(error.value) == f"{path}: {message}"


# --- checksums ---


@given(value=st.dictionaries(st.text(), JSON, min_size=2, max_size=4))
def test_the_hash_of_json_does_not_depend_on_the_order_of_keys(value):
    assert sha256_json(value) == sha256_json(dict(reversed(value.items())))
    assert sha256_json(value) != sha256_json(value | {next(iter(value)): "something else than before"})
    assert sha256_json(value) == sha256_json(json.loads(json.dumps(value)))


def test_an_altered_or_missing_file_is_named_and_a_further_one_does_no_harm(tmp_path):
    _fill(tmp_path, "", "a", ".hidden", "deep/.hidden")
    assert checksums(tmp_path) == {"a": EMPTY}
    _fill(tmp_path, "x" * 1000, "deep/b")
    expected, file = checksums(tmp_path), tmp_path / "deep" / "b"
    _fill(tmp_path, "x", "c")
    verify_checksums(tmp_path, expected)
    content = bytearray(file.read_bytes())
    content[499] ^= 1
    file.write_bytes(content)
    with pytest.raises(DvpError, match=rf"^{file}: altered since it was written"):
        verify_checksums(tmp_path, expected)
    file.unlink()
    file.mkdir()  # a folder of that name is not the file
    with pytest.raises(DvpError, match=rf"^{file}: missing, although its manifest lists it$"):
        verify_checksums(tmp_path, expected)


def test_all_that_is_written_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Files and folders alike: a folder that is not synced may have lost its files after a power cut."""
    synced = []
    fsync = os.fsync

    def record(descriptor):
        synced.append((os.fstat(descriptor).st_ino, (tmp_path / "out").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with atomic_path(tmp_path / "out") as temporary:
        _fill(temporary, "x", "a", "deep/b", "deep/er/c")
    made = {path.stat().st_ino for path in [tmp_path / "out", *(tmp_path / "out").rglob("*")]}
    assert {inode for inode, named in synced if not named} == made
    assert synced[-1] == (tmp_path.stat().st_ino, True)


@pytest.mark.parametrize("within", [atomic_path, atomic_files])
def test_a_library_that_writes_for_its_owner_alone_is_corrected(tmp_path, within):
    (tmp_path / "plain").touch()
    with within(tmp_path / "folder") as temporary:
        temporary.mkdir(exist_ok=True)
        save_file({"x": torch.ones(1)}, temporary / "weights.safetensors")
    made = tmp_path / "folder/weights.safetensors"
    assert made.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_lines_are_appended_at_once_or_the_call_fails(tmp_path):
    append_line(tmp_path / "lines", "one")
    append_line(tmp_path / "lines", "zwei ü")
    assert (tmp_path / "lines").read_text(encoding="utf-8") == "one\nzwei ü\n"
    with pytest.raises(OSError, match="No space left on device"):
        append_line(Path("/dev/full"), "three")


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    folder = tmp_path / "run"
    with only_writer(folder, "training this run"):
        refused = pytest.raises(DvpError, match="run: another process is training this run; wait for it or stop it")
        with refused, only_writer(folder, "training this run"):
            pass
        with only_writer(tmp_path / "other", "training this run"):
            pass
    (tmp_path / "file").write_text("")
    for place, message in (
        (folder, None),
        (tmp_path / "file", r"file: results cannot be written there \(File exists\)$"),
    ):
        refused = pytest.raises(DvpError, match=message) if message else nullcontext()
        with refused, only_writer(place, "training this run"):
            pass
