"""A table of strings as Markdown, LaTeX and plain text.

The Markdown file is the master: the plain text for the terminal is read back from it, so the two cannot
differ.
"""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from dvp.errors import DvpError

WIDTH = 110
EMPTY = "–"
# Columns that the terminal can do without, the first to go first.
DISPENSABLE = ("maj@", "pass@", "per seed", "DVP adds")

_SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_GREEK = {
    **{"α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "η": "eta", "θ": "theta"},
    **{"λ": "lambda", "μ": "mu", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "χ": "chi"},
    **{"ω": "omega", "Δ": "Delta", "Π": "Pi", "Σ": "Sigma"},
}
_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: rf"\{character}" for character in "&%$#_{}"},
    **{character: f"${character}$" for character in "|<>"},
    **{"–": "--", "—": "---", "−": "$-$", "×": r"$\times$", "·": r"$\cdot$", "±": r"$\pm$", "→": r"$\to$"},
    **{"≤": r"$\le$", "≥": r"$\ge$", "≈": r"$\approx$", "‖": r"$\|$", "…": r"\ldots{}", "√": r"$\surd$"},
    **{"‘": "`", "’": "'", "“": "``", "”": "''", "\u00a0": "~"},
    **{letter: rf"$\{name}$" for letter, name in _GREEK.items()},
}  # fmt: skip


@dataclass(frozen=True)
class Formatted:
    """A table ready to be printed: headings, rows of as many cells, and the notes that stand below."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    notes: list[str]


def rho_text(rho: str | None) -> str:
    """ρ as it is read: e⁻¹³ for `exp(-13)`; other values as they are written."""
    if rho is None:
        return EMPTY
    if match := re.fullmatch(r"exp\(-([\d.]+)\)", rho):
        return "e⁻" + match[1].translate(str.maketrans("0123456789.", "⁰¹²³⁴⁵⁶⁷⁸⁹·"))
    return rho


def tex_escape(text: str) -> str:
    """Text as LaTeX that compiles with no package; a character that LaTeX may lack becomes its code point."""
    text = re.sub(r"[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda match: f"\0{match[0].translate(_SUPERSCRIPTS)}\1", text)
    escaped = "".join(_TEX.get(character, _known(character)) for character in text)
    return escaped.replace("\0", "$^{").replace("\1", "}$")


def to_markdown(table: Formatted) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = ["---", *["---:"] * (len(table.headings) - 1)]
    body = [line(table.headings), "| " + " | ".join(rule) + " |", *map(line, table.rows)]
    return "\n".join([f"# {table.title}", "", *body, "", *(f"- {_one_line(note)}" for note in table.notes), ""])


def to_tex(table: Formatted) -> str:
    """A fragment for \\input: a tabular with its notes below. It needs no package; it may be wide."""

    def line(cells: list[str]) -> str:
        # A bracket at the start of a row would be read as the optional argument of the \\ before it.
        return "{}" + " & ".join(map(tex_escape, cells)) + r" \\"

    columns = "l" + "r" * (len(table.headings) - 1)
    notes = [rf"\noindent{{\footnotesize {tex_escape(_one_line(note))}\par}}" for note in table.notes]
    return "\n".join(
        [
            f"% {' '.join(table.title.split())}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\hline",
            line(table.headings),
            r"\hline",
            *map(line, table.rows),
            r"\hline",
            r"\end{tabular}",
            r"\par\smallskip",
            *notes,
            "",
        ]
    )


def from_markdown(path: Path) -> Formatted:
    """Read back what `to_markdown` wrote. Raises DvpError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DvpError(f"{path}: no such file; the report has not been written") from None
    cells = [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines
        if line.startswith("|")
    ]
    if not lines or not lines[0].startswith("# ") or len(cells) < 2:
        raise DvpError(f"{path}: expected a title and a table")
    notes = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    return Formatted(lines[0].removeprefix("# "), cells[0], cells[2:], notes)


def to_text(table: Formatted, width: int = WIDTH) -> str:
    """Fixed-width text; if it is wider than `width`, the dispensable columns go, then cells are cut."""
    columns = [list(column) for column in zip(table.headings, *table.rows, strict=True)]
    dropped = []
    for name in DISPENSABLE:
        if _width(columns) > width:
            dropped += [column[0] for column in columns if column[0].startswith(name)]
            columns = [column for column in columns if not column[0].startswith(name)]
    excess = _width(columns) - width
    if excess > 0:
        room = max(max(map(len, columns[0])) - excess, 8)
        columns[0] = [cell if len(cell) <= room else cell[: room - 1] + "…" for cell in columns[0]]
    widths = [max(map(len, column)) for column in columns]
    rows = [
        "  ".join(
            cell.ljust(size) if index == 0 else cell.rjust(size)
            for index, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in zip(*columns, strict=True)
    ]
    rule = "-" * min(_width(columns), width)
    notes = [*table.notes, *([f"Only in the files: {', '.join(dropped)}."] if dropped else [])]
    wrapped = [textwrap.fill(note, width, initial_indent="- ", subsequent_indent="  ") for note in notes]
    return "\n".join([table.title, "", rows[0], rule, *rows[1:], rule, *wrapped])


def _width(columns: list[list[str]]) -> int:
    return sum(max(map(len, column)) for column in columns) + 2 * (len(columns) - 1)


def _known(character: str) -> str:
    # ASCII, the two characters that mark a superscript, and the Latin letters that LaTeX reads as UTF-8.
    if character in "\0\1\n" or 32 <= ord(character) < 127 or "\u00c0" <= character <= "\u017f":
        return character
    return f"[U+{ord(character):04X}]"


def _one_line(text: str) -> str:
    return " ".join(text.split())
