"""The page of claims: conditions, verdicts, and what it says of where the numbers come from."""

import json
import shutil
from functools import partial

import pytest
from made_up_results import make_experiment

from dvp.analysis.claims import Condition
from dvp.analysis.evidence import answer, collect_figures, render, status, verdict
from dvp.errors import DvpError
from dvp.experiment.loading import dump_experiment
from dvp.files import write_json, write_text

ORIGIN = {"sha256": "0" * 64, "config_hash": "abc", "git_commit": "c" * 40, "tracking_key": "key1"}
CLAIMS = """
sources: {paper: {name: A paper, published: somewhere}, own: {name: Ours}}
claims:
  - id: gain
    text: it gains
    value: 20.0
    unit: "%"
    relation: equal
    source: paper
    note: Table 1
    figure: grid/scores
    conditions:
      - {says: above nothing, experiment: grid, statistic: gain, where: {rho: 1e-2}, above: 0}
      - {says: and by 20, experiment: grid, statistic: gain, where: {rho: 1e-2}, contains: 20}
  - {id: other, text: another thing, source: own, not_tested: no time}
  - {id: large, text: a large thing, source: paper, not_testable: no GPU}
changes:
  - {claim: gain, commit: "1234567", known: the result, what: "asks for 20, not for 21 | 22"}
"""


def statistic(value, low, high, **where):
    return {
        "name": "gain",
        "where": where,
        "value": value,
        "low": low,
        "high": high,
        "unit": "%",
        "how": "t interval over 3 training seeds",
        "sources": ["runs/a/train.json"],
    }


def make_place(folder, *statistics):
    """Results of one experiment whose report holds the given statistics, and the claims."""
    (folder / "claims.yaml").write_text(CLAIMS)
    experiment = make_experiment()
    write_text(folder / "tiny/config.yaml", dump_experiment(experiment))
    record = {"statistics": list(statistics), "files": {"runs/a/train.json": ORIGIN}}
    record |= {"config_hash": experiment.config_hash("report"), "tracking_key": "report 1", "figures": ["scores"]}
    write_json(folder / "tiny/report/training.json", record)
    write_text(folder / "tiny/figures/scores.png", "a picture")
    return folder


@pytest.fixture
def place(tmp_path):
    return partial(make_place, tmp_path)


def answered(folder):
    return answer([f"grid={folder / 'tiny'}"], folder / "claims.yaml")


def rendered(answers, folder):
    collect_figures(answers, folder)
    return render(answers, folder)


@pytest.mark.parametrize(
    ("measured", "expected", "statuses"),
    [
        ((18.0, 5.0, 31.0), "reproduced", ["met", "met"]),
        ((8.0, 5.0, 11.0), "reproduced in part", ["met", "failed"]),
        ((8.0, -5.0, 18.0), "not reproduced", ["open", "failed"]),
        ((-8.0, -15.0, 0.0), "not reproduced", ["failed", "failed"]),
        ((8.0, None, None), "could not have been seen here", ["open", "open"]),
    ],
)
def test_the_verdict_follows_from_the_interval(place, measured, expected, statuses):
    folder = place(statistic(*measured, rho="0.01"), statistic(99.0, 98.0, 100.0, rho="exp(-13)"))
    gain, other, large = answered(folder)["claims"]
    assert gain["verdict"] == expected
    assert [one["status"] for one in gain["conditions"]] == statuses
    assert [one["settings"] for one in gain["conditions"]] == [2, 2]
    assert other["verdict"] == "not tested yet"
    assert large["verdict"] == "not testable at this scale"


def test_what_an_experiment_does_not_measure_is_said_and_is_no_verdict(place):
    folder = place(statistic(1.0, 0.5, 1.5, rho="0.5"), statistic(1.0, 0.5, 1.5, rho="exp(-13)"))
    result = answered(folder)
    gain = result["claims"][0]
    assert gain["verdict"] == "not tested yet"
    assert {one["status"] for one in gain["conditions"]} == {"not measured"}
    assert "grid has it of rho 0.5, exp(-13) | not measured" in render(result, folder)["claims.md"]
    assert "grid measures no gain" in rendered(answered(place()), folder)["claims.html"]


@pytest.mark.parametrize(
    ("statuses", "of_parts", "of_all"),
    [
        (["met", "met"], "reproduced", "reproduced"),
        (["met", "open"], "reproduced in part", "not reproduced"),
        (["met", "failed"], "reproduced in part", "not reproduced"),
        (["met", "not measured"], "not tested yet", "not tested yet"),
        (["open", "failed"], "not reproduced", "not reproduced"),
        (["failed", "not measured"], "not tested yet", "not tested yet"),
        (["open", "not measured"], "not tested yet", "not tested yet"),
        (["not measured"], "not tested yet", "not tested yet"),
    ],
)
def test_conditions_that_mean_something_together_only_are_not_met_in_part(statuses, of_parts, of_all):
    assert verdict(statuses, []) == of_parts
    assert verdict(statuses, [], needs_all=True) == of_all


@pytest.mark.parametrize(
    ("statuses", "controls", "expected"),
    [
        (["met"], ["met"], "reproduced"),
        (["met", "open"], ["met"], "reproduced in part"),
        (["met", "failed"], ["met"], "reproduced in part"),
        (["met", "met"], ["open"], "not reproduced"),
        (["met", "met"], ["met", "failed"], "not reproduced"),
        (["met"], ["not measured"], "not tested yet"),
        (["failed"], ["met"], "not reproduced"),
        (["open"], ["open"], "could not have been seen here"),
        (["open"], ["met"], "could not have been seen here"),
        (["open"], ["failed"], "not reproduced"),
        (["not measured"], ["not measured"], "not tested yet"),
        (["not measured"], ["met"], "not tested yet"),
    ],
)
def test_what_a_control_does_not_bear_out_reproduces_nothing(statuses, controls, expected):
    assert verdict(statuses, controls) == expected


@pytest.mark.parametrize(
    ("test", "measured", "says"),
    [
        ({"above": 0}, (0.01, -0.02, 0.04), "open; met from 3 points on"),
        ({"above": 0.02}, (0.03, 0.015, 0.045), "open; met from 3.5 points on"),
        ({"below": 0}, (0.01, -0.02, 0.04), "open; met up to -3 points"),
        (
            {"within": [-0.01, 0.01]},
            (0.0, -0.02, 0.04),
            "open; met by no value, as the interval is wider than 2 points",
        ),
        ({"within": [-0.05, 0.05]}, (0.03, 0.0, 0.06), "open; met from -2 to 2 points"),
        ({"above": 0}, (0.05, 0.02, 0.08), "met |"),
        # Of the logarithm: as many times as it is wide, not as much.
        ({"below": 0.01}, (0.006, 0.003, 0.012), "open; met up to 0.5 points"),
        ({"above": 0.01}, (0.016, 0.004, 0.064), "open; met from 4 points on"),
    ],
)
def test_an_open_condition_says_what_could_have_been_seen(tmp_path, test, measured, says):
    claims = {
        "sources": {"paper": {"name": "A paper", "published": "somewhere"}},
        "claims": [
            {
                "id": "gain",
                "text": "it gains",
                "source": "paper",
                "figure": "grid/scores",
                "conditions": [{"says": "it does", "experiment": "grid", "statistic": "score_over_other"} | test],
            }
        ],
    }
    folder = make_place(tmp_path, statistic(*measured) | {"name": "score_over_other", "unit": "fraction"})
    (folder / "claims.yaml").write_text(json.dumps(claims))
    page = rendered(answered(folder), folder)["claims.md"]
    short, row = (line for line in page.splitlines() if " points |" in line)
    assert says in row
    value, low, high = (f"{100 * number:.3g}" for number in measured)
    assert f"| {value} [{low}, {high}] points |" in row
    assert f"| {value} [{low}, {high}] points |" in short


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        ((5.0, 100 * (1.05 / 1.2 - 1), 26.0), "met from 20 % on"),  # a change, of a ratio of 1.05
        ((20.0, -20.0, 100 * (1 - 0.64 / 1.2)), "met from 33.3 % on"),  # a saving, of a ratio of 0.8
    ],
)
def test_what_could_have_been_seen_of_a_relative_change_is_of_its_logarithm(tmp_path, measured, says):
    asked = {"says": "it does", "experiment": "grid", "statistic": "score_over_other", "above": 0}
    claim = {"id": "gain", "text": "it gains", "source": "paper", "figure": "grid/scores", "conditions": [asked]}
    folder = make_place(tmp_path, statistic(*measured) | {"name": "score_over_other", "unit": "%"})
    (folder / "claims.yaml").write_text(
        json.dumps({"sources": {"paper": {"name": "A paper", "published": "somewhere"}}, "claims": [claim]})
    )
    assert says in rendered(answered(folder), folder)["claims.md"]


@pytest.mark.parametrize(
    ("unit", "test", "measured", "says"),
    [
        ("fraction", {"above": 0}, (-0.03, -0.04, -0.01), "3 [1, 4] points | met"),
        ("fraction", {"above": 0}, (-0.03, -0.04, 0.01), "3 [-1, 4] points | open; met from 4 points on"),
        ("fraction", {"above": 0}, (0.03, 0.02, 0.04), "-3 [-4, -2] points | failed"),
        ("ratio", {"above": 24}, (0.025, 0.02, 0.04), "40 [25, 50] ratio | met"),
        ("ratio", {"above": 24}, (0.05, 0.025, 0.1), "20 [10, 40] ratio | open; met from 48 ratio on"),
        ("ratio", {"above": 24}, (0.025, -0.01, 0.06), "40 [16.7, not defined] ratio | open"),
        ("fraction", {"above": 0}, (-0.03, None, None), "3 [not defined, not defined] points | open"),
    ],
)
def test_a_statistic_can_be_asked_for_the_other_way_round(tmp_path, unit, test, measured, says):
    asked = {"says": "it does", "experiment": "grid", "statistic": "score_over_other", "turned": True} | test
    claim = {"id": "gain", "text": "it gains", "source": "paper", "figure": "grid/scores", "conditions": [asked]}
    made = statistic(*measured) | {"name": "score_over_other", "unit": unit}
    folder = make_place(tmp_path, made)
    (folder / "claims.yaml").write_text(
        json.dumps({"sources": {"paper": {"name": "A paper", "published": "somewhere"}}, "claims": [claim]})
    )
    page = answered(folder)
    assert f"| it does | {says}" in rendered(page, folder)["claims.md"]
    assert page["claims"][0]["conditions"][0]["how"] == "t interval over 3 training seeds; turned round"
    # What was measured stands in the file as it was measured.
    assert page["experiments"]["grid"]["statistics"] == [made]


@pytest.mark.parametrize(
    ("name", "unit"), [("score_change_percent", "%"), ("final_k3", "nats per token"), ("score", "fraction")]
)
def test_what_has_no_other_way_round_is_refused(tmp_path, name, unit):
    asked = {"says": "it does", "experiment": "grid", "statistic": name, "turned": True, "above": 0}
    claim = {"id": "gain", "text": "it gains", "source": "paper", "figure": "grid/scores", "conditions": [asked]}
    folder = make_place(tmp_path, statistic(0.1, 0.05, 0.2) | {"name": name, "unit": unit})
    (folder / "claims.yaml").write_text(
        json.dumps({"sources": {"paper": {"name": "A paper", "published": "somewhere"}}, "claims": [claim]})
    )
    with pytest.raises(DvpError, match=f"claim 'gain': {name}: turned: expected a ratio or a difference"):
        answered(folder)


def test_a_figure_of_an_earlier_run_is_not_shown(place):
    folder = place(statistic(8.0, 5.0, 11.0, rho="0.01"))
    path = folder / "tiny/report/training.json"
    write_json(path, json.loads(path.read_text()) | {"figures": []})
    result = answered(folder)
    assert result["claims"][0]["figure"] is None
    assert "scores.png" not in render(result, folder)["claims.md"]
    assert "data:image" not in rendered(result, folder)["claims.html"]


def test_a_condition_that_two_statistics_fit_is_refused(place):
    folder = place(statistic(1.0, 0.5, 1.5, rho="0.01", engine="a"), statistic(1.0, 0.5, 1.5, rho="0.01", engine="b"))
    with pytest.raises(DvpError, match=r"claim 'gain': gain: 2 statistics fit .* tell them apart by engine"):
        answered(folder)


def test_an_experiment_that_no_claim_asks_for_is_told(place):
    folder = place(statistic(1.0, 0.5, 1.5, rho="0.01"))
    pages = rendered(answer([f"grit={folder / 'tiny'}"], folder / "claims.yaml"), folder)
    for name in ("claims.md", "claims.html"):
        assert "Not run for this page: grid." in pages[name]
        assert "Run, and asked for by no claim: grit." in pages[name]
    with pytest.raises(DvpError, match="expected KEY=FOLDER"):
        answer(["grid"], folder / "claims.yaml")


def test_what_was_not_run_is_said_and_is_no_verdict(place):
    folder = place(statistic(8.0, 5.0, 11.0, rho="0.01"))
    result = answer([], folder / "claims.yaml")
    assert (result["not_run"], result["claims"][0]["verdict"]) == (["grid"], "not tested yet")
    pages = rendered(result, folder)
    assert "Not run for this page: grid." in pages["claims.md"]
    assert "- [it gains](#gain): grid was not run\n" in pages["claims.md"]
    assert "Not run for this page: grid." in pages["claims.html"]


def test_a_later_page_takes_over_what_was_measured_and_holds_it_against_its_own_rules(place):
    folder = place(statistic(8.0, 5.0, 11.0, rho="0.01"), statistic(99.0, 98.0, 100.0, rho="exp(-13)"))
    first, path = answered(folder), folder / "first/claims.json"
    rendered(first, folder / "first")
    write_json(path, first | {"tracking_key": "page 1"})
    shutil.rmtree(folder / "tiny")
    (folder / "claims.yaml").write_text(CLAIMS.replace("contains: 20", "contains: 10"))

    later = answer([], folder / "claims.yaml", path)
    page = rendered(later, folder / "later")["claims.md"]
    assert first["claims"][0]["verdict"] == "reproduced in part"
    assert later["claims"][0]["verdict"] == "reproduced"
    assert later["claims"][0]["files"] == first["claims"][0]["files"] == {"tiny/runs/a/train.json": ORIGIN}
    assert [one["settings"] for one in later["claims"][0]["conditions"]] == [2, 2]
    assert "Measured for an earlier page, and held against the rules of this one: grid." in page
    assert (folder / "later/figures/tiny/scores.png").read_text() == "a picture"
    assert later["not_run"] == []

    # Of a page of a page it is still known where it was made; and what is measured anew replaces it.
    write_json(folder / "later/claims.json", later | {"tracking_key": "page 2"})
    third = answer([], folder / "claims.yaml", folder / "later/claims.json")
    assert third["experiments"]["grid"]["earlier"] == "page 1"
    place(statistic(-8.0, -11.0, -5.0, rho="0.01"))
    anew = answer([f"grid={folder / 'tiny'}"], folder / "claims.yaml", path)
    assert anew["claims"][0]["conditions"][0]["value"] == -8.0
    assert anew["experiments"]["grid"]["earlier"] is None

    # A rule that asks for something else has no number there.
    (folder / "claims.yaml").write_text(CLAIMS.replace("1e-2", "1e-3"))
    other = answer([], folder / "claims.yaml", path)
    assert other["claims"][0]["conditions"][0]["instead"] == "the earlier page did not ask for it"


def test_the_table_of_one_experiment_opens_the_page_and_a_later_one(place):
    """Its first three notes say what it shows, and stand above it; what it is made of stands below."""
    folder = place(statistic(8.0, 5.0, 11.0, rho="0.01"))
    (folder / "claims.yaml").write_text(f"overview: grid\n{CLAIMS}")
    missing = "is not here: grid was not run, or its models were sampled in one way only"
    assert missing in rendered(answered(folder), folder / "without")["claims.md"]

    experiment = make_experiment(evaluation__also=[{"engine": "training"}])
    write_text(folder / "tiny/config.yaml", dump_experiment(experiment))
    report = {"statistics": [], "files": {}, "figures": [], "tracking_key": "report 2"}
    report["config_hash"] = experiment.config_hash("report")
    training = json.loads((folder / "tiny/report/training.json").read_text())
    write_json(folder / "tiny/report/training.json", training | {"config_hash": report["config_hash"]})
    table = {"title": "t", "headings": ["method", "k3 | nats"], "rows": [["<b>DVP", "1e-3"]]}
    table["notes"] = ["First.", "Second.", "Third.", "The scale."]
    path = folder / "tiny/report/matrix.json"
    for wrong, message in (
        ({}, "tables: expected"),
        ({"tables": {}}, "tables.overview_table: expected"),
        ({"tables": {"overview_table": {"headings": []}}}, "tables.overview_table.rows: expected a list"),
    ):
        write_json(path, report | wrong)
        with pytest.raises(DvpError, match=f"^{path}: {message}"):
            answered(folder)
    write_json(path, report | {"tables": {"overview_table": table}})
    first = answered(folder)
    page_of_first = rendered(first, folder / "first")
    write_json(folder / "first/claims.json", first | {"tracking_key": "page 1"})
    later = answer([], folder / "claims.yaml", folder / "first/claims.json")
    broken = json.loads((folder / "first/claims.json").read_text())
    broken["experiments"]["grid"]["overview"] = {"headings": [], "rows": []}
    write_json(folder / "broken.json", broken)
    with pytest.raises(DvpError, match=r"broken.json: experiments.grid.overview.notes: expected a list"):
        answer([], folder / "claims.yaml", folder / "broken.json")
    for pages in (page_of_first, rendered(later, folder / "later")):
        page = pages["claims.md"]
        places = [
            page.index(text) for text in ("- First.", "- Third.", "k3 \\| nats", "- The scale.", "## What the verdicts")
        ]
        assert places == sorted(places)
        assert "| <b>DVP | 1e-3 |" in page
        assert "tiny/provenance.json names the runs" in page
        assert "<td>&lt;b&gt;DVP</td>" in pages["claims.html"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experiments": []}, "experiments: expected an object, found []"),
        ({"experiments": {"grid": {}}}, "experiments.grid.folder: expected a text, found nothing"),
    ],
)
def test_an_earlier_page_that_is_none_is_refused(place, change, message):
    folder = place(statistic(8.0, 5.0, 11.0, rho="0.01"))
    path = folder / "claims.json"
    write_json(path, answered(folder) | {"tracking_key": "page 1"} | change)
    with pytest.raises(DvpError) as error:
        answer([], folder / "claims.yaml", path)
    assert str(error.value) == f"{path}: {message}"
    with pytest.raises(DvpError, match=r"other\.json: no such file"):
        answer([], folder / "claims.yaml", folder / "other.json")


def test_a_report_that_is_missing_or_of_another_version_is_refused(place):
    folder = place()
    path = folder / "tiny/report/training.json"
    record = json.loads(path.read_text())
    write_json(path, record | {"config_hash": "another"})
    with pytest.raises(DvpError, match=r"report/training\.json: stale, written by another version"):
        answered(folder)
    path.unlink()
    with pytest.raises(DvpError, match=r"report/training\.json: no such file"):
        answered(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"statistics": None}, "statistics: expected a list, found null"),
        ({"statistics": [None]}, "statistics.0: expected an object, found null"),
        ({"statistics": [{"name": "gain"}]}, "statistics.0.unit: expected a text, found nothing"),
        *(
            ({"statistics": [statistic(8.0, 5.0, 11.0) | {key: value}]}, f"statistics.0.{key}: expected {expected}")
            for key, value, expected in (
                ("where", None, "an object, found null"),
                ("name", 1, "a text, found 1"),
                ("value", "8", "a finite number or null, found '8'"),
            )
        ),
        *(
            (
                {"statistics": [statistic(*measured)]},
                f"statistics.0.value: expected a number with an interval or without, found {found}",
            )
            for measured, found in (
                ((None, 5.0, 11.0), "None [5.0, 11.0]"),
                ((8.0, None, 11.0), "8.0 [None, 11.0]"),
                ((8.0, 11.0, 9.0), "8.0 [11.0, 9.0]"),
            )
        ),
        (
            {"statistics": [statistic(8.0, 5.0, 11.0)], "files": {}},
            "files.runs/a/train.json: expected an object, found nothing",
        ),
        (
            {"statistics": [statistic(8.0, 5.0, 11.0)], "files": {"runs/a/train.json": {}}},
            "files.runs/a/train.json.git_commit: expected a text, found nothing",
        ),
    ],
)
def test_a_report_with_something_else_than_statistics_is_refused(place, change, message):
    folder = place()
    path = folder / "tiny/report/training.json"
    write_json(path, json.loads(path.read_text()) | change)
    with pytest.raises(DvpError) as error:
        answered(folder)
    assert str(error.value) == f"{path}: {message}"


def test_no_cell_of_the_page_is_empty_and_every_number_names_its_runs(place):
    folder = place(statistic(8.0, 5.0, 11.0, rho="0.01"))
    result = json.loads(json.dumps(answered(folder), allow_nan=False))
    page = rendered(result, folder / "evidence")["claims.md"]
    tables = {
        columns: page.partition(f"\n|{'---|' * columns}\n")[2].partition("\n\n")[0].splitlines()
        for columns in (4, 6, 7)
    }
    for columns, lines in tables.items():
        for line in lines:
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert len(cells) == columns
            assert all(cells)
    assert tables[7] == [
        "| [A paper](#source_paper) | 0 | 1 | 0 | 0 | 1 | 0 |",
        "| [Ours](#source_own) | 0 | 0 | 0 | 0 | 0 | 1 |",
    ]
    assert tables[6] == [
        "| [it gains](#gain) | 20 % | 8 [5, 11] % | 1 of 2 | – | **reproduced in part** |",
        "| [a large thing](#large) | in words | no GPU | – | – | **not testable at this scale** |",
    ]
    assert tables[4] == ["| above nothing | 8 [5, 11] % | met | 1 |", "| and by 20 | 8 [5, 11] % | failed | 1 |"]
    assert "- [another thing](#other): no time\n" in page
    assert "**reproduced in part**. Published: 20 %. (Table 1.)\n" in page
    assert "**not tested yet**: no time.\n" in page
    assert "Intervals: t interval over 3 training seeds.\n" in page
    assert "Measured in tiny, 1 file, commit ccccccc. claims.json names each file" in page
    assert result["claims"][0]["files"] == {"tiny/runs/a/train.json": ORIGIN}
    assert "| gain | asks for 20, not for 21 \\| 22 | the result | 1234567 |" in page
    assert "- grid: " in page.partition("## What the page is made of")[2]
    assert page.count("(figures/tiny/scores.png)") == 1
    assert (folder / "evidence/figures/tiny/scores.png").read_text() == "a picture"
    html = render(result, folder / "evidence")["claims.html"]
    for text in (
        "<td>8 [5, 11] %</td>",
        "reproduced in part",
        "1234567",
        "tiny/runs/a/train.json",
        "key1",
        "no GPU",
        "no time",
    ):
        assert text in html


def test_the_html_page_escapes_what_it_quotes_and_holds_its_figures(place):
    folder = place(statistic(8.0, 5.0, 11.0, rho="0.01"))
    (folder / "tiny/figures/scores.png").write_bytes(b"\x89PNG")
    result = answered(folder)
    result["claims"][0]["text"] = "<script>"
    html = rendered(result, folder)["claims.html"]
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "data:image/png;base64,iVBORw==" in html


@pytest.mark.parametrize(
    ("test", "low", "high", "expected"),
    [
        ({"above": 0.0}, 0.1, 0.2, "met"),
        ({"above": 0.0}, 0.0, 0.2, "open"),
        ({"above": 0.0}, -0.2, 0.0, "failed"),
        ({"below": 1.0}, 0.1, 0.2, "met"),
        ({"below": 1.0}, 1.0, 1.2, "failed"),
        ({"below": 1.0}, 0.9, 1.2, "open"),
        ({"within": [-1.0, 1.0]}, -0.5, 0.5, "met"),
        ({"within": [-1.0, 1.0]}, -1.5, 0.5, "open"),
        ({"within": [-1.0, 1.0]}, 1.5, 2.5, "failed"),
        ({"contains": 0.0}, -1.0, 0.0, "met"),
        ({"contains": 0.0}, 0.1, 0.2, "failed"),
    ],
)
def test_a_condition_is_about_the_whole_interval(test, low, high, expected):
    condition = Condition(says="s", experiment="e", statistic="x", **test)
    assert status(condition, low, high) == expected
