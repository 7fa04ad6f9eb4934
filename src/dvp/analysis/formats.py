"""A table of strings as Markdown, LaTeX, HTML and plain text."""

import html
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tabulate import tabulate

from dvp.progress import rho_as_read

WIDTH = 110
EMPTY = "–"
# Columns that to_text drops from a table that is too wide, in this order.
DISPENSABLE = ("maj@", "pass@", "per seed", "DVP adds")
STYLE = """
table { border-collapse: collapse; margin: 1rem 0 }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid #ddd }
th { background: #f4f4f4 }
"""

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


class Formatted(NamedTuple):
    """A table ready to be printed: headings, rows of as many cells, and the notes that stand below."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]


def rho_text(rho: str | None) -> str:
    """Format ρ for a table."""
    return EMPTY if rho is None or rho == "none" else rho_as_read(rho)


def position_text(position: str) -> str:
    """Format a bin of positions in the response, `1-16` as `1–16`."""
    return position.replace("-", "–")


def tokens_text(tokens: float) -> str:
    """Format a number of tokens with three digits: `950`, `12.3 k`, `1.25 M`."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if tokens >= size * 0.9995:
            return f"{tokens / size:#.3g} {unit}".replace(". ", " ")
    return f"{tokens:.0f}"


def digits(sign: str = "") -> Callable[[float], str]:
    """Return a format of two digits, or of whole numbers from 10 on; `sign` as in format specifications."""
    return lambda value: f"{value:{sign}.0f}" if abs(value) >= 10 else f"{value:{sign}.2g}"


def to_markdown(table: Formatted) -> str:
    """Return a table as a Markdown page, with its notes as a list."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in (table.headings, *table.rows)]
    notes = [f"- {_one_line(note)}" for note in table.notes]
    return "\n".join([f"# {table.title}", "", _tabulate(rows, "pipe"), "", *notes, ""])


def to_html(table: Formatted) -> str:
    """Return an HTML fragment that a browser can also show on its own; the first note, the scale, is always visible."""
    first, *others = (html.escape(_one_line(note)) for note in table.notes)
    notes = "".join(f"<li>{note}</li>" for note in others)
    more = f"<details><summary>How to read it</summary><ul>{notes}</ul></details>\n" if others else ""
    return (
        f'<meta charset="utf-8"><style>{STYLE}</style>\n<h3>{html.escape(table.title)}</h3>\n'
        f"{_tabulate([table.headings, *table.rows], 'html')}\n<p>{first}</p>\n{more}"
    )


def to_tex(table: Formatted) -> str:
    """Return a LaTeX fragment for \\input: a tabular with its notes below. It needs no package; it may be wide."""
    # A bracket at the start of a row would be read as the optional argument of the \\ before it.
    rows = [[("" if place else "{}") + tex_escape(cell) for place, cell in enumerate(row)] for row in table.rows]
    body = _tabulate([list(map(tex_escape, table.headings)), *rows], "latex_raw")
    notes = [rf"\noindent{{\footnotesize {tex_escape(_one_line(note))}\par}}" for note in table.notes]
    return "\n".join([f"% {_one_line(table.title)}", body, r"\par\smallskip", *notes, ""])


def to_text(table: Formatted, width: int = WIDTH) -> str:
    """Return fixed-width text; if it is wider than `width`, DISPENSABLE columns are dropped, then cells are cut."""
    columns = [list(column) for column in zip(table.headings, *table.rows, strict=True)]
    dropped = []
    for name in DISPENSABLE:
        if _width(columns) > width:
            # The first column stays, as it names the rows.
            first, *others = columns
            dropped += [column[0] for column in others if column[0].startswith(name)]
            columns = [first, *(column for column in others if not column[0].startswith(name))]
    room = max(max(map(len, columns[0])) - max(_width(columns) - width, 0), 8)
    columns[0] = [cell if len(cell) <= room else cell[: room - 1] + "…" for cell in columns[0]]
    notes = [*table.notes, *([f"Only in the files: {', '.join(dropped)}."] if dropped else [])]
    wrapped = [textwrap.fill(note, width, initial_indent="- ", subsequent_indent="  ") for note in notes]
    head, *body = _plain(columns)
    rule = "-" * max(map(len, [head, *body]))
    return "\n".join([table.title, "", head, rule, *body, rule, *wrapped])


def tex_escape(text: str) -> str:
    """Escape text for LaTeX without packages; a character that LaTeX may lack becomes its code point."""
    text = re.sub(r"[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda match: f"\0{match[0].translate(_SUPERSCRIPTS)}\1", text)
    escaped = "".join(_TEX.get(character, _known(character)) for character in text)
    return escaped.replace("\0", "$^{").replace("\1", "}$")


def _tabulate(rows: Sequence[Sequence[str]], form: str) -> str:
    """Lay out rows, the first of which is the head; the first column, which names the rows, is aligned left."""
    alignment = ["left", *["right"] * (len(rows[0]) - 1)]
    return tabulate(rows[1:], rows[0], form, colalign=alignment, disable_numparse=True)


def _width(columns: list[list[str]]) -> int:
    return max(map(len, _plain(columns)))


def _plain(columns: Sequence[Sequence[str]]) -> list[str]:
    # The head is passed as a row, since tabulate pads a head.
    rows = list(zip(*columns, strict=True))
    return _tabulate([[""] * len(columns), *rows], "plain").splitlines()[-len(rows) :]


def _known(character: str) -> str:
    # ASCII, the two characters that mark a superscript, and the Latin letters that LaTeX reads as UTF-8.
    if character in "\0\1\n" or 32 <= ord(character) < 127 or "\u00c0" <= character <= "\u017f":
        return character
    return f"[U+{ord(character):04X}]"


def _one_line(text: str) -> str:
    return " ".join(text.split())
