"""The recipes of docs/extend.md, followed to the letter in a copy of the package."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
METHODS = """
half_rloo: {label: The documented advantage, advantage: half}
confident_rloo: {label: The documented rule for ρ, advantage: rloo, safe_vocabulary: confident}
"""
"""Entries of a catalogue of methods that ask for them by name."""


def follow(package: Path) -> None:
    """Put the documented code where docs/extend.md says; `package` is a copy of src/dvp."""
    text = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    advantage, rule = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    with (package / "core" / "advantages.py").open("a", encoding="utf-8") as file:
        file.write(f"\n\n{advantage}")
    file, union = package / "core" / "safe_vocabulary.py", "Rule = Annotated["
    rules = file.read_text(encoding="utf-8")
    assert rules.count(union) == 1
    file.write_text(rules.replace(union, f"{rule}\n\n{union}ConfidentRule | "), encoding="utf-8")


def declare(folder: Path) -> None:
    """Put the documented figure, table and claim where docs/extend.md says; `folder` is a copy of the repository."""
    text = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    of = dict(re.findall(r"```yaml\n(figures|tables|claims):\n(.*?)```", text, re.DOTALL))
    for kind, file in (("figures", "src/dvp/analysis/shown.yaml"), ("tables", "src/dvp/analysis/shown.yaml")):
        _insert(folder / file, f"\n{kind}:\n", of[kind])
    _insert(folder / "config/claims.yaml", "\n  own:\n", of["claims"].removeprefix("  own:\n"))


def _insert(file: Path, after: str, entry: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(after) == 1
    file.write_text(text.replace(after, after + entry), encoding="utf-8")
