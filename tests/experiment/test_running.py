"""What happens before the first job: locks, ages of files, the settings that jobs read, files of problems."""

import os
import time

import pytest

from dvp.errors import DvpError
from dvp.experiment.loading import load_experiment, read_resolved
from dvp.experiment.running import begin, checksums_of, local_files, were_read
from dvp.files import sha256_file, write_json


@pytest.fixture
def smoke(root):
    return load_experiment("smoke", root / "config")


def test_an_experiment_is_locked_until_its_locks_are_closed(smoke, tmp_path):
    with begin([smoke], tmp_path):
        assert read_resolved(tmp_path / "smoke/config.yaml").used == smoke.used
        with pytest.raises(DvpError, match="smoke: another process is running this experiment; wait for it or stop it"):
            begin([smoke], tmp_path)
    begin([smoke], tmp_path).close()


def test_no_lock_is_left_where_one_experiment_is_refused(smoke, root, tmp_path):
    tiny = load_experiment("tiny", root / "config")
    with begin([tiny], tmp_path), pytest.raises(DvpError, match="tiny: another process"):
        begin([smoke, tiny], tmp_path)
    begin([smoke], tmp_path).close()


@pytest.mark.parametrize(("seconds", "refused"), [(3.0, False), (100.0, True)])
def test_a_file_from_the_future_is_refused(smoke, tmp_path, seconds, refused):
    made = tmp_path / "smoke/base/manifest.json"
    write_json(made, {})
    os.utime(made, (time.time() + seconds,) * 2)
    if refused:
        with pytest.raises(DvpError, match=r"base/manifest.json: dated 20\d\d-.* in the future; what is made from it"):
            begin([smoke], tmp_path)
        assert not (tmp_path / "smoke/config.yaml").exists()
    else:
        begin([smoke], tmp_path).close()


def test_a_file_of_problems_was_read_if_the_manifest_has_its_checksum(smoke, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    source = {"kind": "file", "path": str(rows), "columns": {"problem": "q", "answer": "a"}}
    value = smoke.model_dump(mode="json")
    value["sources"]["rows"] = source
    value["data"]["train"] = "rows"
    own = type(smoke).model_validate(value)
    assert local_files(smoke) == {}
    assert local_files(own) == {"rows": rows}
    assert checksums_of(own) == {"rows": sha256_file(rows)}
    assert were_read(own, tmp_path) == {str(rows): False}
    write_json(tmp_path / "data/manifest.json", {"sources": {"rows": {"description": {"sha256": sha256_file(rows)}}}})
    assert were_read(own, tmp_path) == {str(rows): True}
    rows.write_text("{} \n")
    assert were_read(own, tmp_path) == {str(rows): False}
