"""Real files may stand in ../shared/data beside the repository; without them the tests that need them are skipped."""

import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from dvp.experiment.data import FileSource, HubSource, Source
from dvp.experiment.loading import read_yaml

ROOT = Path(__file__).parents[2]
FILES = {
    # In these two files the hub's column has another name.
    "aime24": ("aime24.jsonl", {"answer": "answer"}),
    "amc23": ("amc23.jsonl", {"problem": "problem"}),
    "aime25": ("aime25.jsonl", {}),
    "dapo_math_17k": ("dapo_math_sample.jsonl", {}),
    "gsm8k": ("gsm8k_train.jsonl", {}),
    "gsm8k_test": ("gsm8k_test.jsonl", {}),
    "math500": ("math500.jsonl", {}),
}


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the real data is not here: {folder}")
    return folder


@pytest.fixture(scope="session")
def catalogue() -> dict[str, Source]:
    entries = read_yaml(ROOT / "config" / "catalogue" / "sources.yaml")
    return {name: TypeAdapter(Source).validate_python(entry) for name, entry in entries.items()}


@pytest.fixture(scope="session")
def real_sources(shared, catalogue) -> dict[str, Source]:
    """The catalogue with each hub source's own columns, format and strip, but a local file for the hub."""
    sources = dict(catalogue)
    for name, (file, renamed) in FILES.items():
        hub = catalogue[name]
        assert isinstance(hub, HubSource)
        sources[name] = FileSource(
            kind="file",
            path=shared / file,
            columns=hub.columns.model_copy(update=renamed),
            answer_format=hub.answer_format,
            strip=hub.strip,
        )
    return sources


@pytest.fixture
def write_rows(tmp_path):
    """Write dictionaries as a .jsonl file and return the source that reads it."""

    def write(name: str, rows: list[dict], **options) -> FileSource:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        columns = options.pop("columns", {"problem": "problem", "answer": "answer"})
        return FileSource.model_validate({"kind": "file", "path": path, "columns": columns, **options})

    return write
