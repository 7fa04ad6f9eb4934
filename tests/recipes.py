"""Execution of the recipes of docs/extend.md in a copy of the package."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
METHODS = """
half_rloo: {label: The documented advantage, advantage: half}
confident_rloo: {label: The documented rule for ρ, advantage: rloo, safe_vocabulary: confident}
"""
"""Entries of the catalogue of methods that use the recipes' code by name."""
PIECES = {
    "half": "core/advantages.py",
    "Confident": "core/safe_vocabulary.py",
    "Smooth": "core/importance.py",
    "TailMask": "core/masks.py",
    "Squared": "core/objective.py",
    "Dictionary": "experiment/tools.py",
}
"""File of src/dvp into which docs/extend.md puts each block, by the first name that the block defines."""
EXAMPLES = ("rollout/plain.py", "tools/dictionary.py")
"""Files of src/dvp that are in docs/examples."""
BEFORE = {
    "Confident": ("Rule = Annotated[", "Rule = Annotated[ConfidentRule | "),
    "Smooth": (
        "Correction = ImportanceRule",
        'Correction = Annotated[ImportanceRule | Smooth, Field(discriminator="kind")]',
    ),
    "TailMask": ("Mask = Annotated[", "Mask = Annotated[TailMask | "),
    "Squared": ("Loss = Annotated[", "Loss = Annotated[Squared | "),
    "Dictionary": ("Tools = Annotated[", "Tools = Annotated[Dictionary | "),
}
"""Line that a recipe changes, before and after; the recipe's block goes in front of it."""


def follow(package: Path) -> None:
    """Insert the documented code where docs/extend.md says. `package` is a copy of src/dvp."""
    text = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    pieces = re.findall(r"```python\n((?!@figure|@table).*?)```", text, re.DOTALL)
    assert [re.search(r"^(?:class|def) (\w+)", piece, re.MULTILINE)[1] for piece in pieces] == [*PIECES]
    for piece, (name, place) in zip(pieces, PIECES.items(), strict=True):
        assert f"`src/dvp/{place}`" in text
        file = package / place
        before = file.read_text(encoding="utf-8")
        if name not in BEFORE:
            file.write_text(f"{before}\n\n{piece}", encoding="utf-8")
            continue
        old, new = BEFORE[name]
        assert before.count(f"\n{old}") == 1
        file.write_text(before.replace(f"\n{old}", f"\n{piece}\n\n{new}"), encoding="utf-8")
    for place in EXAMPLES:
        assert f"`src/dvp/{place}`" in text
        shutil.copy(ROOT / "docs" / "examples" / Path(place).name, package / place)
    [line] = re.findall(r"`(ENGINES\[.*?)`", text)
    with (package / "experiment/training.py").open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")


def show(folder: Path) -> None:
    """Insert the documented figure, table and claim where docs/extend.md says. `folder` is a copy of the repository."""
    text = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    page = "src/dvp/analysis/pages/training.py"
    assert f"`{page}`" in text
    pieces = re.findall(r"```python\n(@(?:figure|table)\(.*?)```", text, re.DOTALL)
    assert len(pieces) == 2
    with (folder / page).open("a", encoding="utf-8") as file:
        file.writelines(f"\n\n{piece}" for piece in pieces)
    [claim] = re.findall(r"```yaml\nclaims:\n  own:\n(.*?)```", text, re.DOTALL)
    file = folder / "config/claims.yaml"
    before = file.read_text(encoding="utf-8")
    assert before.count("\n  own:\n") == 1
    file.write_text(before.replace("\n  own:\n", f"\n  own:\n{claim}"), encoding="utf-8")
