"""Numbers in the documentation come from the estimates that are kept, and none is typed."""

import re
from pathlib import Path

import pytest

from dvp.analysis.answers import MARK, Answers, fill, pages
from dvp.analysis.statistics import ESTIMATES, Statistic, to_frame
from dvp.errors import DvpError

ROOT = Path(__file__).parents[2]
INTERVAL = re.compile(r"[−-]?\d[\d.,]*(?: (?:%|pp|points|nats|k))? \[[−-]?\d[\d.,]*, ?[−-]?\d[\d.,]*\]")


@pytest.fixture
def answers(tmp_path):
    """An experiment with two estimates, and what a page may ask of it."""
    where = {"method": "mis", "engine": "coarse"}
    how = "over problems and 5 training seeds: paired"
    rows = [
        Statistic("gain", where, 0.0287, 0.0119, 0.0456, "fraction", how, ()),
        Statistic("gain", where | {"method": "dvp"}, -0.0003, -0.0112, 0.0107, "fraction", how, ()),
    ]
    (tmp_path / "made_up/report").mkdir(parents=True)
    to_frame(rows).to_parquet(tmp_path / "made_up" / ESTIMATES)
    declared = {
        "views": {"gain": {"experiment": "made_up", "quantity": "gain", "as": "pp"}},
        "numbers": {
            "mis": {"view": "gain", "method": "mis"},
            "loss": {"view": "gain", "method": "mis", "negate": True},
            "dvp": {"view": "gain", "method": "dvp"},
            "once": {"view": "gain", "method": "mis", "as": "ratio", "invert": True},
        },
        "tables": {
            "all": {
                "all": {"view": "gain"},
                "columns": {"here": {}, "there": {"engine": "fp32"}},
                "rows": {"MIS": {"method": "mis", "without": ["there"]}},
            }
        },
        "answers": [
            {"question": "Q?", "what": "it is", "number": {"view": "gain", "method": "mis"}, "claim": "c", "page": "p"}
        ],
    }
    return Answers(declared, tmp_path, [{"id": "c", "verdict": "supported"}, {"id": "d", "verdict": "mixed"}])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mis", "2.9 pp [1.2, 4.6]"),
        ("loss", "−2.9 pp [−4.6, −1.2]"),
        ("dvp", "0.0 pp [−1.1, 1.1]"),
        ("once", "34.84 [21.93, 84.03]"),
        ("status", "2 claims: 1 supported, 1 mixed"),
        ("all", "\n|  | here | there |\n| --- | --- | --- |\n| MIS | +2.9 [1.2, 4.6] | – |\n"),
    ],
)
def test_a_mark_is_filled(answers, name, text):
    assert fill(f"so <!--={name}-->old<!--/--> is", answers) == f"so <!--={name}-->{text}<!--/--> is"


def test_an_answer_says_over_what_its_interval_is(answers):
    row = answers.text("answers").splitlines()[-1]
    assert (
        row == "| [Q?](p.md) | it is 2.9 pp [1.2, 4.6] | 5 seeds | [supported](../../results/reference/claims.md#c) |"
    )


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"view": "gain"}, "expected one estimate, found .*mis.*dvp"),
        ({"view": "gain", "method": "none"}, "expected one estimate, found nothing"),
        ({"view": "lost"}, "KeyError: 'lost'"),
        ({"experiment": "made_up"}, "KeyError: 'quantity'"),
        ({"view": "gain", "method": "mis", "as": "furlongs"}, "KeyError: 'furlongs'"),
        ({"view": "gain", "experiment": "other"}, "no such file"),
        (None, "TypeError"),
    ],
)
def test_what_fits_no_one_estimate_is_refused_in_a_line(answers, asked, problem):
    answers.declared["numbers"]["x"] = asked
    with pytest.raises(DvpError, match=rf"^numbers\.yaml: x: .*{problem}"):
        answers.text("x")
    with pytest.raises(DvpError, match=r"^numbers\.yaml: unknown: .*KeyError: 'unknown'"):
        fill("<!--=unknown--><!--/-->", answers)


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_interval_is_typed(page):
    text = page.read_text()
    assert not INTERVAL.findall(MARK.sub("", text))
    # A line that begins with a comment is no Markdown.
    assert not re.findall(r"^<!--=\w+-->.+", text, re.MULTILINE)
