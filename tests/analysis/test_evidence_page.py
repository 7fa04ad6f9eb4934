"""The page of claims: conditions, verdicts, and what it says of where the numbers come from."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
from made_up_results import make_experiment

from dvp.analysis.claims import Condition
from dvp.analysis.evidence import answer, render, status, verdict
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
      conditions: [{says: above nothing, above: 0}, {says: and by 20, contains: 20}]
    - {id: large, text: a large thing, not_testable: no GPU}
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
    assert answered(folder)["claims"][0]["verdict"] == "not tested yet"
    page = page_of(folder)
    assert "grid measures no gain of rho 0.01 | not measured" in page
    assert "Not run for this page: late." in page
    assert "grid measures no gain" in page_of(place())


@pytest.mark.parametrize(
    ("statuses", "controls", "of_parts", "of_all"),
    [
        (["+", "+"], ["+"], "supported", "supported"),
        (["+", "?"], ["+"], "mixed", "inconclusive"),
        (["+", "-"], [], "mixed", "contradicted"),
        (["-", "?"], ["?"], "mixed", "contradicted"),
        (["-", "-"], ["-"], "contradicted", "contradicted"),
        (["+", "+"], ["?"], "inconclusive", "inconclusive"),
        (["+", "+"], ["+", "-"], "mixed", "mixed"),
        (["?"], ["+"], "inconclusive", "inconclusive"),
        (["?"], ["-"], "mixed", "mixed"),
        (["+", "not measured"], [], "not tested yet", "not tested yet"),
        (["+"], ["not measured"], "not tested yet", "not tested yet"),
    ],
)
def test_a_verdict_follows_from_conditions_and_controls(statuses, controls, of_parts, of_all):
    words = {"+": "supported", "-": "contradicted", "?": "inconclusive"}
    statuses, controls = ([words.get(sign, sign) for sign in signs] for signs in (statuses, controls))
    assert verdict(statuses, controls) == of_parts
    assert verdict(statuses, controls, needs_all=True) == of_all


@pytest.mark.parametrize(
    ("test", "low", "high", "expected"),
    [
        ({"above": 0.0}, 0.1, 0.2, "supported"),
        ({"above": 0.0}, 0.0, 0.2, "inconclusive"),
        ({"above": 0.0}, -0.2, 0.0, "contradicted"),
        ({"below": 1.0}, 0.1, 0.2, "supported"),
        ({"below": 1.0}, 1.0, 1.2, "contradicted"),
        ({"within": [-1.0, 1.0]}, -0.5, 0.5, "supported"),
        ({"within": [-1.0, 1.0]}, -1.5, 0.5, "inconclusive"),
        ({"within": [-1.0, 1.0]}, 1.5, 2.5, "contradicted"),
        ({"contains": 0.0}, -1.0, 0.0, "supported"),
        ({"contains": 0.0}, 0.1, 0.2, "contradicted"),
    ],
)
def test_a_condition_is_about_the_whole_interval(test, low, high, expected):
    assert status(Condition(says="s", experiment="e", statistic="x", **test), low, high) == expected


@pytest.mark.parametrize(
    ("unit", "test", "measured", "says"),
    [
        ("fraction", {"above": 0}, (0.01, -0.02, 0.04), "inconclusive; supported from 3 pp on"),
        ("fraction", {"above": 0.02}, (0.03, 0.015, 0.045), "inconclusive; supported from 3.5 pp on"),
        ("fraction", {"below": 0}, (0.01, -0.02, 0.04), "inconclusive; supported up to -3 pp"),
        (
            "fraction",
            {"within": [-0.01, 0.01]},
            (0.0, -0.02, 0.04),
            "by no value, as the interval is wider than 2 pp",
        ),
        ("fraction", {"within": [-0.05, 0.05]}, (0.03, 0.0, 0.06), "inconclusive; supported from -2 to 2 pp"),
        # Of the logarithm: as many times as it is wide, not as much.
        ("fraction", {"below": 0.01}, (0.006, 0.003, 0.012), "inconclusive; supported up to 0.5 pp"),
        # A change, of a ratio of 1.05; a saving, of a ratio of 0.8.
        ("%", {"above": 0}, (5.0, 100 * (1.05 / 1.2 - 1), 26.0), "supported from 20 % on"),
        ("%", {"above": 0}, (20.0, -20.0, 100 * (1 - 0.64 / 1.2)), "supported from 33.3 % on"),
    ],
)
def test_an_open_condition_says_what_could_have_been_seen(place, unit, test, measured, says):
    assert says in page_of(place(statistic(*measured, "score_over_other", unit), claims=asking(test)))


@pytest.mark.parametrize(
    ("unit", "test", "measured", "says"),
    [
        ("fraction", {"above": 0}, (-0.03, -0.04, -0.01), "3 [1, 4] pp | supported"),
        ("fraction", {"above": 0}, (0.03, 0.02, 0.04), "-3 [-4, -2] pp | contradicted"),
        ("ratio", {"above": 24}, (0.05, 0.025, 0.1), "20 [10, 40] ratio | inconclusive; supported from 48 ratio on"),
        ("ratio", {"above": 24}, (0.025, -0.01, 0.06), "40 [16.7, not defined] ratio | inconclusive"),
        ("fraction", {"above": 0}, (-0.03, math.nan, math.nan), "3 [not defined, not defined] pp | inconclusive"),
    ],
)
def test_a_statistic_can_be_asked_for_the_other_way_round(place, unit, test, measured, says):
    folder = place(statistic(*measured, "score_over_other", unit), claims=asking(test, turned=True))
    assert f"| it does | {says}" in page_of(folder)


@pytest.mark.parametrize(("name", "unit"), [("score_change_percent", "%"), ("score", "fraction")])
def test_what_has_no_other_way_round_is_refused(place, name, unit):
    folder = place(statistic(0.1, 0.05, 0.2, name, unit), claims=asking({"above": 0}, name, turned=True))
    with pytest.raises(DvpError, match=f"claim 'gain': {name}: turned: expected a ratio or a difference"):
        answered(folder)


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
    places = [pages["claims.md"].replace("&lt;", "<").index(part) for part in (*parts, "## What the verdicts")]
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
