"""Results whose ages say nothing, as those of a copy, get them back in the order in which they were made."""

import os
import time
from pathlib import Path

import pytest

from dvp.files import sha256_file, write_json
from dvp.tracking.order import restore_order
from dvp.tracking.record import KEY, STAGE, UPSTREAM, Record, write_record

RUN = "method~rloo/engine~fp32/rho~none/seed~0"
FILES = {
    "prepare": "data/manifest.json",
    "preflight": "preflight/engine~x/preflight.json",
    "base": "base/manifest.json",
    "train": f"runs/{RUN}/train.json",
}
READ = {"prepare": [], "preflight": [], "base": ["prepare"], "train": ["prepare", "base"]}
BENCHMARKS = {"prepare": "prepare", "preflight": "preflight/x", "base": "base", "train": f"train/{RUN}"}


def make(folder: Path, stage: str, started: int, ended: int) -> None:
    """What a stage leaves, by seconds of a clock of its own."""
    result = folder / FILES[stage]
    write_json(result.with_name("weights.json"), {"of": stage})
    write_json(result, {KEY: stage, "files": {"weights.json": sha256_file(result.with_name("weights.json"))}})
    tags = {KEY: stage, STAGE: stage} | {f"{UPSTREAM}{other}": other for other in READ[stage]}
    record = Record(experiment="e", name=stage, tags=tags, status="FINISHED", started=started, ended=ended)
    write_record(folder / f"tracking/{stage}.json", record)
    benchmark = folder / f"benchmarks/{BENCHMARKS[stage]}.tsv"
    benchmark.parent.mkdir(parents=True, exist_ok=True)
    benchmark.write_text("s\n1\n")


def outputs(folder: Path, stage: str) -> list[Path]:
    result = folder / FILES[stage]
    return [result, result.with_name("weights.json"), folder / f"benchmarks/{BENCHMARKS[stage]}.tsv"]


def ages(folder: Path) -> dict[str, list[float]]:
    return {stage: [file.stat().st_mtime for file in outputs(folder, stage)] for stage in FILES}


def set_ages(folder: Path, **seconds: float) -> None:
    for stage, age in seconds.items():
        for file in outputs(folder, stage):
            os.utime(file, (age, age))


@pytest.fixture
def copy(tmp_path) -> Path:
    """Results of four stages, the last of which is the oldest by its files."""
    for stage, started, ended in (("prepare", 0, 1), ("base", 1, 2), ("preflight", 2, 3), ("train", 3, 4)):
        make(tmp_path, stage, started, ended)
    set_ages(tmp_path, prepare=3000, base=2000, preflight=4000, train=1000)
    return tmp_path


def test_a_copy_is_in_the_order_in_which_it_was_made(copy):
    restore_order(copy)
    assert ages(copy) == {stage: [age] * 3 for stage, age in zip(FILES, (3000, 4000, 3000, 4000), strict=True)}


def test_what_is_in_order_is_left_alone(copy):
    set_ages(copy, prepare=1000, base=1000, preflight=1000, train=2000)
    before = ages(copy)
    restore_order(copy)
    assert ages(copy) == before


def test_no_file_is_from_the_future(copy):
    set_ages(copy, prepare=2e10, base=2e10, preflight=1e10, train=3e10)
    restore_order(copy)
    assert all(1e9 < age <= time.time() for of_stage in ages(copy).values() for age in of_stage)


def test_what_was_made_again_is_newer_than_what_read_the_old_one(copy):
    """The base model, with the same settings; then Snakemake was killed."""
    make(copy, "base", 5, 6)
    set_ages(copy, prepare=500, base=2000, preflight=500, train=1000)
    before = ages(copy)
    restore_order(copy)
    assert ages(copy) == before


@pytest.mark.parametrize("altered", ["base", "train"])
def test_what_was_altered_is_left_to_snakemake(copy, altered):
    (copy / FILES[altered]).with_name("weights.json").write_text("{}")
    set_ages(copy, prepare=1000, base=3000, train=2000)
    before = ages(copy)
    restore_order(copy)
    assert ages(copy) == before
