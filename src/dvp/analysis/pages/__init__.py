"""The pages of a report: each table and figure is a function in one of these modules."""

from importlib import import_module
from pathlib import Path

from dvp.analysis.shown import FIGURES, TABLES
from dvp.files import sha256_file, sha256_json

__all__ = ["FIGURES", "TABLES", "fingerprint"]

for _page in ("training", "bases", "policies", "curve", "mismatch", "bias"):  # in the order of the report
    import_module(f"{__name__}.{_page}")


def fingerprint() -> str:
    """Hash the pages and the notes of their tables, so that Snakemake makes reports again when one changes."""
    folder = Path(__file__).parent
    files = [*folder.glob("*.py"), *(folder.parent / "templates" / "notes").iterdir()]
    return sha256_json({file.name: sha256_file(file) for file in sorted(files)})[:12]
