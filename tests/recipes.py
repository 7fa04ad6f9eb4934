"""Execution of the recipes of docs/extend.md in a copy of the package."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"
METHODS = """
half_rloo: {label: The documented advantage, advantage: half}
confident_rloo: {label: The documented rule for ρ, advantage: rloo, safe_vocabulary: confident}
"""
"""Entries of the catalogue of methods that use the recipes' code by name."""
CLASSES = ("rollout/plain.py", "tools/dictionary.py")
"""Files of src/dvp that are in docs/examples."""
BEFORE = {
    "core/safe_vocabulary.py": ("Rule = Annotated[", "Rule = Annotated[ConfidentRule | "),
    "core/importance.py": (
        "Correction = ImportanceRule",
        'Correction = Annotated[ImportanceRule | Smooth, Field(discriminator="kind")]',
    ),
    "core/masks.py": ("Mask = Annotated[", "Mask = Annotated[TailMask | "),
    "core/objective.py": ("Loss = Annotated[", "Loss = Annotated[Squared | "),
    "experiment/tools.py": ("Tools = Annotated[", "Tools = Annotated[Dictionary | "),
}
"""Line of a file of src/dvp that a recipe changes, before and after; the recipe's code goes in front of it."""


def follow(package: Path) -> None:
    """Insert the documented code where docs/examples/parts.py says. `package` is a copy of src/dvp."""
    parts = re.split(
        r"^# (\w+/\w+\.py).*\n(?:# .*\n)*", (EXAMPLES / "parts.py").read_text(encoding="utf-8"), flags=re.M
    )[1:]
    assert dict.fromkeys(parts[::2]) == dict.fromkeys(["core/advantages.py", *BEFORE])
    for place, code in zip(parts[::2], parts[1::2], strict=True):
        file = package / place
        before = file.read_text(encoding="utf-8")
        if place not in BEFORE:
            file.write_text(before + code, encoding="utf-8")
            continue
        old, new = BEFORE[place]
        assert before.count(f"\n{old}") == 1
        file.write_text(before.replace(f"\n{old}", f"{code}{new}"), encoding="utf-8")
    text = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    for place in CLASSES:
        assert f"`src/dvp/{place}`" in text
        shutil.copy(EXAMPLES / Path(place).name, package / place)
    [line] = re.findall(r"`(ENGINES\[.*?)`", text)
    with (package / "experiment/training.py").open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")


def show(folder: Path) -> None:
    """Insert the documented figure, table and claim where docs/extend.md says. `folder` is a copy of the repository."""
    text = (EXAMPLES / "kl_growth.py").read_text(encoding="utf-8")
    with (folder / "src/dvp/analysis/pages/training.py").open("a", encoding="utf-8") as file:
        file.write("\n\n" + text[text.index("@figure(") :])
    [claim] = re.findall(
        r"^claims:\n  own:\n(.*)", (EXAMPLES / "kl_growth.yaml").read_text(encoding="utf-8"), re.M | re.S
    )
    file = folder / "config/claims.yaml"
    before = file.read_text(encoding="utf-8")
    assert before.count("\n  own:\n") == 1
    file.write_text(before.replace("\n  own:\n", f"\n  own:\n{claim}"), encoding="utf-8")
