"""Consistency of the documents with the repository, and the language of documents, docstrings and comments."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import yaml

from dvp.analysis.claims import load_file
from dvp.experiment.config import Experiment
from dvp.experiment.loading import load_experiment, read_yaml
from dvp.experiment.reference import editor_schema, reference

ROOT = Path(__file__).parents[1]
NAMES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "config/README.md",
    "results/README.md",
    "results/reference/README.md",
    "results/reference/changed_rules.md",
)
DOCUMENTS = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS += sorted((ROOT / "results/reference").glob("*/README.md"))
# Top-level names of the repository, so that a word with a slash is taken for a path only if it begins with one of them.
TOP = ("src/", "tests/", "config/", "docs/", "envs/", "workflow/", "profiles/", "slurm/", "results/reference/")
TO_BE_WRITTEN = ("config/experiments/mine.yaml", "src/dvp/rollout/plain.py", "src/dvp/tools/dictionary.py")
PATTERN = re.compile(r"\b(?!README|LICENSE)[A-Z]{3,}\b|[{*<…]")
"""Paths with a placeholder: results/EXPERIMENT, catalogue/{sources,engines}.yaml."""
documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them, and those that it names itself."""
    text = path.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {*re.findall(r'<a id="([^"]+)"', text)} | {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
    }


DIALECT = re.compile(
    "|".join(
        (
            r"could not have been seen|told (?:apart )?from 0|cannot be told|by the rules?\b|no rule asked",
            r"wins? (?:\w+ ){0,3}back|tak(?:e|es|ing) (?:\w+ ){0,3}away|holds 0|turned round|hardly|mended|rehears\w*",
            r"weights that come late|late weights|(?:exact|coarse) engine|sampled exactly|sets? of problems",
            r"right (?:answers|samples)|to the last (?:bit|digit)|(?:made|drawn) (?:anew|again)|lost with \w+ machine",
            r"the nights|by the estimates|borrowed time|told as stories|page of claims|a method in a row",
            r"ended without a word|(?:nats|tokens|seconds|responses|prompts|bytes) a (?:token|step|response|problem)",
        )
    ),
    re.IGNORECASE,
)
"""Phrases that a reader in the field would have to decode."""
TEXTS = [*DOCUMENTS, *(ROOT / "config").rglob("*.yaml"), *(ROOT / "workflow/report").iterdir()]
TEXTS += [file for file in (ROOT / "src/dvp/analysis/templates").rglob("*") if file.is_file()]


SOURCES = sorted((ROOT / "src").rglob("*.py"))
NO_BEGINNING = re.compile(r"(?:Of|With|What|The same|But|And|As|Where|So)\b")
"""Words with which no docstring begins: it starts with a verb, or with a noun that names the thing."""
CODE = re.compile(r"`[^`]*`|\b\w+(?:\.\w+)+\b|\b\w*_\w*\b")
"""Names of code within prose."""


def prose(file: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and whether it is a docstring, of a file's docstrings, strings below fields, and comments.

    White space is normalised. A comment of several lines is one text.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    first = {id(node.body[0]) for node in ast.walk(tree) if isinstance(node, documented) and node.body}
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, " ".join(text.split()), id(node) in first
            case ast.Assign(targets=[ast.Attribute(attr="__doc__")], value=ast.Constant(value=str(text))):
                yield node.lineno, " ".join(text.split()), True
    comments: dict[int, str] = {}
    begin = end = 0  # of the last comment that stands on lines of its own
    with tokenize.open(file) as lines:
        for token in tokenize.generate_tokens(lines.readline):
            if token.type == tokenize.COMMENT:
                line, text, alone = token.start[0], token.string.lstrip("#: "), token.line.lstrip().startswith("#")
                if alone and line == end + 1:
                    comments[begin] += f" {text}"
                else:
                    comments[line] = text
                    begin = line
                end = line if alone else 0
    yield from ((line, text, False) for line, text in comments.items())


def test_docstrings_begin_with_a_verb_or_a_noun():
    """List every docstring in src that begins with a word of NO_BEGINNING."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {text[:90]}"
        for file in SOURCES
        for line, text, is_docstring in prose(file)
        if is_docstring and NO_BEGINNING.match(text)
    ]
    assert not wrong, f"{len(wrong)} docstrings:\n" + "\n".join(wrong)


def test_the_words_of_the_source_are_those_of_the_field():
    """List every docstring and comment in src that has a phrase of DIALECT outside names of code."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {', '.join(found)}"
        for file in SOURCES
        for line, text, _ in prose(file)
        if (found := DIALECT.findall(CODE.sub("", text)))
    ]
    assert not wrong, f"{len(wrong)} docstrings and comments:\n" + "\n".join(wrong)


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_words_are_those_of_the_field(text):
    assert not DIALECT.findall(text.read_text(encoding="utf-8"))


@documents
def test_every_link_leads_somewhere(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), f"{document}: {link}"
        assert not anchor or anchor in anchors(target), f"{document}: {link}"


def definitions(file: Path) -> set[str]:
    """Return the names of a module's functions and classes, of methods as CLASS.METHOD."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    top = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    methods = {f"{node.name}.{getattr(one, 'name', '')}" for node in top for one in getattr(node, "body", [])}
    return {node.name for node in top} | methods


@documents
def test_every_function_that_is_linked_is_in_its_file(document):
    for name, path in re.findall(r"\[`([\w.]+)`\]\(([^)]+[^_]\.py)\)", document.read_text(encoding="utf-8")):
        assert name in definitions(document.parent / path), f"{document}: {name}"


@pytest.mark.parametrize("name", ["how_a_step_works", "from_a_sample_to_a_claim"])
def test_a_path_through_the_code_has_six_files(name):
    text = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    assert len(set(re.findall(r"\]\(([^)]+\.py)\)", text))) == 6
    assert len(text.split()) <= 350


@documents
def test_every_path_that_is_named_exists(document):
    for quoted in re.findall(r"`([^`\n]+)`", document.read_text(encoding="utf-8")):
        for word in quoted.split():
            path = word.rstrip(".,:;)")
            if path.startswith(TOP) and path not in TO_BE_WRITTEN and not PATTERN.search(path):
                assert (ROOT / path).exists(), f"{document}: {path}"


def test_the_readmes_tree_is_that_of_the_repository():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.partition("## Where things are\n\n```\n")[2].partition("```")[0]
    assert tree
    for line in tree.splitlines():
        names = re.match(r" *((?:[\w./]+(?:, )?)+)", line)[1]
        inside = ROOT / "src/dvp" if line.startswith("  ") else ROOT
        for name in names.split(", "):
            if not PATTERN.search(name):
                assert (inside / name).exists(), line


@documents
def test_every_verb_and_target_that_is_named_exists(document):
    text = document.read_text(encoding="utf-8")
    verbs = set(re.findall(r"\bdvp ([a-z]+)\b", " ".join(re.findall(r"`[^`]+`|^dvp .*$", text, flags=re.M))))
    targets = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, flags=re.M))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets <= set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
    for verb in verbs:
        assert re.search(rf"^\W+{verb}\b", cli_help(), flags=re.M), f"{document}: dvp {verb}"


@cache
def cli_help() -> str:
    return subprocess.run(
        [sys.executable, "-m", "dvp.cli", "--help"], check=True, capture_output=True, text=True
    ).stdout


@documents
def test_every_experiment_that_is_run_exists(document):
    known = {file.stem for file in (ROOT / "config/experiments").rglob("*.yaml")} | {"mine", "NAME"}
    assert set(re.findall(r"experiment=([\w.-]+)", document.read_text(encoding="utf-8"))) <= known


@documents
def test_shell_blocks_can_be_parsed(document):
    for block in blocks(document.read_text(encoding="utf-8"), "sh"):
        shlex.split(block, comments=True)


@documents
def test_the_experiments_and_methods_that_are_shown_are_accepted(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("problems.jsonl", "exam.jsonl", "rewards.py"):  # which some of them name
        Path(name).touch()
    config = shutil.copytree(ROOT / "config", tmp_path / "config")
    for block in blocks(document.read_text(encoding="utf-8"), "yaml"):
        text = block
        if not text.startswith("name:"):  # entries of the catalogue's methods
            text = "name: mine\nextends: smoke\nmethods:\n" + textwrap.indent(text, "  ")
        (config / "experiments" / "mine.yaml").write_text(text, encoding="utf-8")
        assert load_experiment("mine", config).name == "mine"


def test_all_keys_have_their_page():
    assert (ROOT / "docs/keys.md").read_text(encoding="utf-8") == reference(), "run `make format`"


def test_editors_have_the_schema_of_every_experiment():
    schema = json.loads((ROOT / "config/schema.json").read_text(encoding="utf-8"))
    assert schema == editor_schema(), "run `make format`"
    check = jsonschema.Draft202012Validator(schema)
    for file in (ROOT / "config/experiments").rglob("*.yaml"):
        named = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# yaml-language-server: $schema=")
        assert (file.parent / named).resolve() == ROOT / "config/schema.json", file
        assert not list(check.iter_errors(read_yaml(file))), file
    for wrong in ({"seedz": [0]}, {"training": {"stepz": 1}}, {"training": {"steps": "many"}}):
        assert not check.is_valid(wrong)


def test_every_key_has_a_meaning():
    schema = Experiment.model_json_schema()
    groups = [("file", schema), *schema["$defs"].items()]
    keys = {f"{name}.{key}": value for name, group in groups for key, value in group.get("properties", {}).items()}
    assert not [
        key for key, value in keys.items() if not key.endswith((".kind", ".rule")) and "description" not in value
    ]


def test_the_version_is_told_once():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == version
    assert f"badge/version-{version}-" in (ROOT / "README.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)[1]
    assert newest == f"{version} — {citation['date-released']}"


def test_the_changelog_keeps_to_its_kinds_of_changes():
    """The headings of keepachangelog.com, for the versions since 0.3.0."""
    recent = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## 0.2.0 ")[0]
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", recent, flags=re.M)) <= kinds


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").iterdir()), ids=lambda file: file.stem)
def test_issue_forms_have_what_github_requires(form):
    found = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(found)
    fields = [field for field in found["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"input", "textarea"}
    assert len({field["id"] for field in fields}) == len(fields) > 0
    assert all(field["attributes"]["label"] for field in fields)


def test_the_citation_is_complete():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= set(citation)
    assert [paper["identifiers"][0]["value"] for paper in citation["references"]] == [
        "arXiv:2512.23087",
        "arXiv:2602.07078",
    ]


def test_code_that_cites_the_method_names_a_heading_of_it():
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs/method.md").read_text(encoding="utf-8"), flags=re.M)
    for file in [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        text = " ".join(file.read_text(encoding="utf-8").split())
        for heading in re.findall(r'docs/method\.md, "([^"]+)"', text):
            assert heading in headings, f"{file}: {heading}"


def test_the_cuda_lock_has_no_two_packages_with_the_same_files():
    """Before 12.8, cuda-python held the files of cuda-bindings; since then it only asks for it, in its own version."""
    versions = dict(line.split("==") for line in (ROOT / "envs/cuda.txt").read_text(encoding="utf-8").split())
    assert versions["cuda-python"] == versions["cuda-bindings"]


def test_claims_named_as_changed_exist():
    """Every name in the tables of results/reference/changed_rules.md is that of a claim of today."""
    text = (ROOT / "results/reference/changed_rules.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|")[0] for line in text.splitlines() if re.match(r"\| [a-z]+_", line)]
    named = set(re.findall(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b", " ".join(rows)))
    assert named
    assert named <= {claim.id for claim in load_file(ROOT / "config/claims.yaml").claims}


def messages(file: Path) -> Iterator[str]:
    """Yield every text in a module, with … in the places of values."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.JoinedStr(values=parts):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)
            case ast.Constant(value=str(text)):
                yield text


def test_messages_that_troubleshooting_quotes_are_printed():
    """Each part of a quotation between two … is in one text of src, in this order."""
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    heads = re.findall(r"^\| ([^|]*) \|", page, flags=re.M)
    quoted = [text for head in heads for text in re.findall(r"`([^`]+)`", head)]
    assert len(quoted) > 25
    printed = [text for file in SOURCES for text in messages(file)]
    gone = [
        text
        for text in quoted
        if not any(re.search(".*".join(map(re.escape, text.split("…"))), one, re.DOTALL) for one in printed)
    ]
    assert not gone
