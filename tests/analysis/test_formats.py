import re

import pytest

from dvp.analysis.formats import Formatted, tex_escape, to_html, to_tex, to_text

TABLE = Formatted(
    "smoke_1: 100 %",
    ["method", "max |d|", "maj@8 (%)", "ρ"],
    [["a_b & co", "1", "50.0", "e⁻¹³"], ["[x]", "2", "60.0", "–"]],
    ["Costs $5, 70 % of {it}.", "k ≥ 1 × σ²"],
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50 % of a_b & #1 {x} $", r"50 \% of a\_b \& \#1 \{x\} \$"),
        ("ρ = e⁻¹³", r"$\rho$ = e$^{-13}$"),
        ("a\\b ~ ^", r"a\textbackslash{}b \textasciitilde{} \textasciicircum{}"),
        ("|x| < 1 – 2 ≥ λ", r"$|$x$|$ $<$ 1 -- 2 $\ge$ $\lambda$"),
        ("é 数", "é [U+6570]"),
    ],
)
def test_tex_escape(text, expected):
    assert tex_escape(text) == expected


def test_tex_is_safe():
    """Special characters escaped, braces and environments closed, as many cells in a row as in the head."""
    tex = to_tex(TABLE)
    body = "\n".join(line for line in tex.splitlines() if not line.startswith("%"))
    assert not re.search(r"(?<!\\)[%#_]", body)
    assert body.isascii()
    plain = re.sub(r"\\[{}$&]", "", body)
    assert plain.count("{") == plain.count("}")
    assert plain.count("$") % 2 == 0
    assert body.count(r"\begin{") == body.count(r"\end{") == 1
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 3
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {3}
    assert not any(row.startswith("[") for row in rows)


def test_html_is_escaped():
    html = to_html(Formatted("<t>", ["<a>", "b"], [["<script>", "1"]], ["<n>"]))
    assert "&lt;script&gt;" in html
    assert not re.search(r"<(script|a|n|t)>", html)


def test_text_drops_what_it_can_then_cuts():
    assert "maj@8" in to_text(TABLE)
    narrow = to_text(TABLE, width=26)
    assert "Only in the files: maj@8 (%)." in " ".join(narrow.split())
    assert max(map(len, narrow.splitlines())) <= 26
    long = Formatted("t", ["method", "x"], [["m" * 200, "1"]], ["n " * 200])
    assert max(map(len, to_text(long).splitlines())) <= 110
    assert "…" in to_text(long)


@pytest.mark.parametrize("headings", [["DVP adds to it"], ["per seed", "DVP adds to it"]])
def test_the_first_column_is_never_dropped(headings):
    text = to_text(Formatted("t", headings, [["x" * 60 for _ in headings]], []), width=40)
    assert max(map(len, text.splitlines())) <= 40
    assert f"\n{headings[0]}" in text
