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
        "numbers": {},
        "tables": {},
    }
    return Answers(declared, tmp_path, [])


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
