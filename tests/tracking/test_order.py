"""Results whose ages say nothing, as those of a copy, get them back in the order in which they were made."""

import os
from pathlib import Path

import pytest

from dvp.files import sha256_file, write_json
from dvp.tracking.order import restore_order
from dvp.tracking.record import KEY, STAGE, Record

RUN = "method~rloo/engine~fp32/rho~none/seed~0"
FILES = {
    "prepare": ("data/manifest.json", "prepare"),
    "base": ("base/manifest.json", "base"),
    "preflight": ("preflight/engine~x/preflight.json", "preflight/x"),
    "train": (f"runs/{RUN}/train.json", f"train/{RUN}"),
}


def outputs(folder: Path, stage: str) -> list[Path]:
    result, benchmark = FILES[stage]
    file = folder / result
    return [file, file.with_name("weights.json"), folder / f"benchmarks/{benchmark}.tsv"]


def make(folder: Path, stage: str, started: int, ended: int, age: float) -> None:
    """What a stage leaves. started, ended : seconds, as its record has them; age : of its files."""
    result, weights, benchmark = outputs(folder, stage)
    write_json(weights, {"of": stage})
    write_json(result, {KEY: stage, "files": {"weights.json": sha256_file(weights)}})
    benchmark.parent.mkdir(parents=True, exist_ok=True)
    benchmark.write_text("s\n1\n")
    of = {"tags": {KEY: stage, STAGE: stage}, "files": {FILES[stage][0]: ""}}
    times = {"started": started * 1000, "ended": ended * 1000}
    record = Record(experiment="e", name=stage, status="FINISHED", **of, **times)
    write_json(folder / f"tracking/{stage}.json", record.model_dump())
    for file in outputs(folder, stage):
        os.utime(file, (age, age))


def ages(folder: Path) -> dict[str, float]:
    return {stage: outputs(folder, stage)[1].stat().st_mtime for stage in FILES}


def copy(folder: Path, prepare: float, base: float, preflight: float, train: float) -> dict[str, float]:
    """Results of four stages with files of these ages; what they are afterwards."""
    times = {"prepare": (0, 1, prepare), "base": (1, 2, base), "preflight": (2, 3, preflight), "train": (3, 4, train)}
    for stage, (started, ended, age) in times.items():
        make(folder, stage, started, ended, age)
    return ages(folder)


@pytest.mark.parametrize("of_files", [(3e3, 2e3, 1e3, 4e3), (2e10, 3e10, 4e10, 5e10)])
def test_a_copy_is_in_the_order_in_which_it_was_made(tmp_path, of_files):
    """Also where all is from the future; and what was made again is newer than what read the old one."""
    copy(tmp_path, *of_files)
    restore_order(tmp_path)
    assert ages(tmp_path) == {"prepare": 1, "base": 2, "preflight": 3, "train": 4}
    assert all(len({file.stat().st_mtime for file in outputs(tmp_path, stage)}) == 1 for stage in FILES)
    make(tmp_path, "base", 5, 6, 500)
    restore_order(tmp_path)
    assert ages(tmp_path)["base"] == 6


def test_what_is_in_order_is_left_alone(tmp_path):
    before = copy(tmp_path, 0.5, 1.5, 2.5, 3.5)
    restore_order(tmp_path)
    assert ages(tmp_path) == before


def test_what_was_altered_keeps_its_age(tmp_path):
    copy(tmp_path, 1e3, 3e3, 2e3, 2e3)
    outputs(tmp_path, "base")[1].write_text("{}")
    restore_order(tmp_path)
    assert ages(tmp_path)["base"] > ages(tmp_path)["train"] == 4
