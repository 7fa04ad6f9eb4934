"""The recipes of docs/extend.md for an advantage and a rule for ρ, followed to the letter in a copy of the package."""

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
