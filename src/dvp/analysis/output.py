"""What a part of a report writes."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dvp.analysis import figures
from dvp.analysis.formats import to_markdown, to_tex
from dvp.analysis.statistics import Measured, Statistic
from dvp.analysis.tables import to_csv
from dvp.files import read_json, sha256_file, write_text

ORIGIN = ("config_hash", "git_commit", "tracking_key")


def write(measured: Measured, folder: Path) -> None:
    """figures/*.svg and *.png, tables/*.csv, *.md and *.tex below `folder`."""
    for name, figure in measured.figures.items():
        figures.save(figure, folder / "figures", name)
    for name, (table, formatted) in measured.tables.items():
        write_text(folder / "tables" / f"{name}.csv", to_csv(table))
        write_text(folder / "tables" / f"{name}.md", to_markdown(formatted))
        write_text(folder / "tables" / f"{name}.tex", to_tex(formatted))


def record(measured: Measured, results: Path) -> dict[str, Any]:
    """The part's JSON file: its statistics, and the origin of every file behind them. Raises DvpError."""
    sources = dict.fromkeys([*measured.sources, *(name for one in measured.statistics for name in one.sources)])
    return {
        "statistics": [_plain(one) for one in measured.statistics],
        "tables": sorted(measured.tables),
        "figures": sorted(measured.figures),
        "files": {
            name: {"sha256": sha256_file(results / name)}
            | {key: read_json(results / name, *ORIGIN)[key] for key in ORIGIN}
            for name in sources
        },
    }


def _plain(one: Statistic) -> dict[str, Any]:
    """A number that is not defined is null: JSON has no NaN."""
    undefined = {key: None for key in ("value", "low", "high") if not math.isfinite(getattr(one, key))}
    return asdict(one) | undefined
