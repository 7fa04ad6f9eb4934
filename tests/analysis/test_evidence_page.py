"""The page of claims: conditions, verdicts, and what it says of where the numbers come from."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_results import make_experiment

from dvp.analysis.claims import Condition, effect_word
from dvp.analysis.evidence import answer, render, verdict
from dvp.analysis.series import SERIES, joined
from dvp.analysis.statistics import ESTIMATES, Statistic, to_frame
from dvp.errors import DvpError
from dvp.experiment.loading import dump_experiment
from dvp.files import sha256_file, write_json, write_text

EXPERIMENT = make_experiment()
ORIGIN = {"sha256": "0" * 64, "config_hash": "abc", "git_commit": "c" * 40, "tracking_key": "key1"}
CLAIMS = """
sources: {paper: {name: A paper, published: somewhere}, own: {name: Ours}}
claims:
  paper:
    - id: gain
      text: it gains
      published: {relation: equal, value: 20.0, unit: "%"}
      note: Table 1
      figure: grid/scores
      all: {experiment: grid, statistic: gain, rho: 1e-2}
      conditions: [{says: it gains, delta: 10}, {says: and stays small, below: 20}]
  own:
    - {id: other, text: "another | thing", conditions: [{experiment: late, says: s, statistic: x, above: 0}]}
"""


def statistic(value, low, high, name="gain", unit="%", **where):
    return Statistic(name, where, value, low, high, unit, "t interval over 3 training seeds", ("runs/a/train.json",))


def make_place(folder, *statistics, claims=CLAIMS, experiment=EXPERIMENT, **manifest):
    """A report that holds the given statistics, and the claims."""
    (folder / "claims.yaml").write_text(claims)
    write_text(folder / "tiny/config.yaml", dump_experiment(experiment))
    (folder / "tiny/report").mkdir(exist_ok=True)
    to_frame(statistics).to_parquet(folder / "tiny" / ESTIMATES)
    joined([]).to_parquet(folder / "tiny" / SERIES)
    files = {Path(name).name: sha256_file(folder / "tiny" / name) for name in (ESTIMATES, SERIES)}
    kept = {"origins": {"runs/a/train.json": ORIGIN}, "figures": ["scores"], "tracking_key": "report 1", "files": files}
    kept |= {"config_hash": experiment.config_hash("report")} | manifest
    write_json(folder / "tiny/report/manifest.json", kept)
    (folder / "tiny/figures").mkdir(exist_ok=True)
    (folder / "tiny/figures/scores.png").write_bytes(b"\x89PNG")
    return folder


@pytest.fixture
def place(tmp_path):
    return partial(make_place, tmp_path)


def answered(folder):
    return answer([f"grid={folder / 'tiny'}"], folder / "claims.yaml")


def page_of(folder):
    return render(answered(folder), folder)["claims.md"]


def asking(test, statistic="score_over_other", **more):
    """A file of one claim of one condition."""
    asked = {"says": "it does", "experiment": "grid", "statistic": statistic} | more | test
    claim = {"id": "gain", "text": "it gains", "figure": "grid/scores", "conditions": [asked]}
    return json.dumps({"sources": {"paper": {"name": "A paper", "published": "x"}}, "claims": {"paper": [claim]}})


def test_what_is_not_measured_is_said_and_is_no_verdict(place):
    folder = place(statistic(1.0, 0.5, 1.5, rho="0.5"), statistic(1.0, 0.5, 1.5, rho="exp(-13)"))
    assert answered(folder)["claims"][0]["verdict"] == "not measured"
    page = page_of(folder)
    assert "grid measures no gain of rho 0.01 | not measured" in page
    assert "Not run for this page: late." in page
    assert "grid measures no gain" in page_of(place())


@given(st.floats(-1, 1), st.floats(-1, 1), st.floats(1e-3, 1))
def test_a_word_follows_from_the_interval_alone(first, second, delta):
    """The scale by its definition: one word for each interval, and no other."""
    low, high = min(first, second), max(first, second)
    rules = {
        "gain above δ": low > delta,
        "gain": 0 < low <= delta,
        "harm": high < 0,
        "no gain above δ": low <= 0 <= high < delta,
        "cannot tell": low <= 0 and high >= delta,
    }
    assert [word for word, holds in rules.items() if holds] == [effect_word(low, high, delta)]


@pytest.mark.parametrize(
    ("test", "low", "high", "expected"),
    [
        ({"delta": 0.02}, 0.03, 0.2, "gain above δ"),
        ({"delta": 0.02}, 0.01, 0.2, "gain"),
        ({"delta": 0.02}, -0.01, 0.01, "no gain above δ"),
        ({"delta": 0.02}, -0.01, 0.2, "cannot tell"),
        ({"delta": 0.02}, -0.2, -0.01, "harm"),
        ({"delta": 0.02}, None, None, "cannot tell"),
        ({"above": 0.0}, 0.1, 0.2, "holds"),
        ({"above": 0.0}, 0.0, 0.2, "cannot tell"),
        ({"above": 0.0}, -0.2, 0.0, "does not hold"),
        ({"below": 1.0}, 0.1, 0.2, "holds"),
        ({"below": 1.0}, 1.0, 1.2, "does not hold"),
        ({"within": [-1.0, 1.0]}, -0.5, 0.5, "holds"),
        ({"within": [-1.0, 1.0]}, -1.5, 0.5, "cannot tell"),
        ({"within": [-1.0, 1.0]}, 1.5, 2.5, "does not hold"),
        ({"below": 1.0, "not_comparable": "another model"}, 0.1, 0.2, "not comparable"),
    ],
)
def test_a_condition_is_about_the_whole_interval(test, low, high, expected):
    assert Condition(says="s", experiment="e", statistic="x", **test).word(low, high) == expected


def test_a_claim_has_a_word_of_its_own_only_if_all_agree():
    assert verdict(["gain", "gain"]) == "gain"
    assert verdict(["cannot tell", "harm", "gain", "cannot tell"]) == "1 gain, 1 harm, 2 cannot tell"


@pytest.mark.parametrize(
    ("test", "measured", "says"),
    [
        ({"delta": 0.02}, (0.03, 0.021, 0.04), "| it does | 3 [2.1, 4] pp | gain above 2 pp |"),
        ({"delta": 0.02, "negate": True}, (0.03, 0.02, 0.04), "| it does | -3 [-4, -2] pp | harm |"),
        ({"above": 0, "negate": True}, (-0.03, math.nan, math.nan), "3 [not defined, not defined] pp | cannot tell |"),
        ({"above": 0, "not_comparable": "no premise"}, (0.03, 0.02, 0.04), "| not comparable: no premise |"),
    ],
)
def test_a_row_has_the_word_with_its_threshold(place, test, measured, says):
    assert says in page_of(place(statistic(*measured, "score_over_other", "fraction"), claims=asking(test)))


def test_a_condition_that_two_statistics_fit_is_refused(place):
    folder = place(statistic(1.0, 0.5, 1.5, rho="0.01", engine="a"), statistic(1.0, 0.5, 1.5, rho="0.01", engine="b"))
    with pytest.raises(DvpError, match=r"claim 'gain': gain: 2 statistics fit .* tell them apart by engine"):
        answered(folder)


def test_an_experiment_that_no_claim_asks_for_is_told(place):
    folder = place(statistic(1.0, 0.5, 1.5, rho="0.01"))
    page = render(answer([f"grit={folder / 'tiny'}"], folder / "claims.yaml"), folder)["claims.md"]
    assert "Run, and asked for by no claim: grit." in page
    with pytest.raises(DvpError, match="expected KEY=FOLDER"):
        answer(["grid"], folder / "claims.yaml")


def test_the_table_of_one_experiment_opens_the_page(place):
    """Its first notes say what it shows, and stand above it; what it is made of stands below."""
    claims = f"overview: grid\n{CLAIMS}"
    assert "is not here: grid was not run, or its models" in page_of(place(claims=claims))
    experiment = make_experiment(evaluation__also=[{"engine": "training"}], methods__rloo__label="<b>RLOO | naive")
    where = {"method": "rloo", "engine": "coarse", "rho": "none", "evaluated_on": "fp32", "evaluated_rho": "none"}
    score = statistic(0.5, 0.4, 0.6, "score_by_policy", "fraction", **where)
    folder = place(score, claims=claims, experiment=experiment)
    pages = render(answered(folder), folder)
    parts = ["## Summary by method", "<b>RLOO \\| naive", "50.0 [40.0, 60.0]", "tiny/report/manifest.json names"]
    places = [pages["claims.md"].replace("&lt;", "<").index(part) for part in (*parts, "## What the words")]
    assert places == sorted(places)
    assert "&lt;b&gt;RLOO | naive" in pages["claims.html"]


def test_a_report_that_is_missing_altered_or_stale_is_refused(place):
    folder = place(config_hash="another")
    with pytest.raises(DvpError, match=r"report/manifest\.json: stale, written by another version"):
        answered(folder)
    place()
    with open(folder / "tiny" / ESTIMATES, "ab") as file:
        file.write(b"x")
    with pytest.raises(DvpError, match=r"estimates\.parquet"):
        answered(folder)
    (folder / "tiny/report/manifest.json").unlink()
    with pytest.raises(DvpError, match=r"report/manifest\.json: no such file"):
        answered(folder)


def test_every_number_names_its_runs(place):
    folder = place(statistic(8.0, 5.0, 11.0, rho="0.01"))
    result = json.loads(json.dumps(answered(folder), allow_nan=False))
    assert result["claims"][0]["files"] == {"tiny": ["runs/a/train.json"]}
    assert "Measured in tiny, 1 file, commit ccccccc." in page_of(folder)
    assert "data:image/png;base64,iVBORw==" in render(result, folder)["claims.html"]
