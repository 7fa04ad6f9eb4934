import pytest
from made_up_results import CLAIMS

from dvp.analysis.claims import claim, load_claims, load_file
from dvp.errors import DvpError

SOURCES = "sources: {paper: {name: A paper, published: somewhere}, own: {name: Ours}}"
CONDITION = "{id: a, text: t, source: paper, figure: e/f, conditions: [{says: s, experiment: e, statistic: x, %s}]}"


def test_published_values():
    claims = load_claims(CLAIMS)
    gain, bound = claims["dvp_mis_gain"], claims["dvp_kl"]
    assert (gain.value, gain.unit, gain.relation, gain.method) == (26.55, "%", "equal", "dvp_mis")
    assert (bound.value, bound.relation) == (0.001, "below")
    sources = load_file(CLAIMS).sources
    assert all("arXiv" in sources[entry.source].published for entry in claims.values() if entry.value is not None)
    assert [entry.id for entry in claims.values() if entry.method] == ["dvp_mis_gain"]
    assert claims["otb_single_aime25"].value == 30.31


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{id: a, text: t, source: paper, valu: 1.0}", r"claims.0.valu: unknown key"),
        ("{id: a, text: t, source: paper}", "claims.0: expected one of conditions, not_testable and not_tested"),
        ("{id: a, text: t, source: paper, not_tested: n, not_testable: m}", "expected one of conditions"),
        ("{id: a, text: t, source: paper, not_tested: n, figure: e/f}", "figure: belongs to a claim with conditions"),
        ("{id: a, text: t, source: paper, not_tested: n, figure: f}", "claims.0.figure: String should match"),
        (CONDITION % "above: 0, below: 1", "expected one of above, below, within, contains; found 2"),
        (CONDITION % "within: [1, 0]", r"within: expected \[low, high\]"),
        (CONDITION % "where: {rho: e-13}, above: 0", r"claims.0.conditions.0.where: ρ: write exp\(-13\), or 1e-13 if"),
        (CONDITION % "where: {rho: [1]}, above: 0", "claims.0.conditions.0.where.rho: "),
        (CONDITION % "control: true, above: 0", "expected one that is not a control"),
        ("{id: a, text: t, source: other, not_tested: n}", r"source 'other' is not defined"),
        (
            "{id: a, text: t, source: paper, not_tested: n, value: 1.0}",
            r"claims.0: value, unit and relation go together",
        ),
        (
            "{id: a, text: t, source: paper, not_tested: n}, {id: a, text: u, source: paper, not_tested: n}",
            r"id 'a' is given twice",
        ),
        ("{id: a, text: t, source: paper, value: high, unit: '%', relation: equal}", r"claims.0.value: "),
    ],
)
def test_refused(tmp_path, entry, message):
    path = tmp_path / "claims.yaml"
    path.write_text(f"{SOURCES}\nclaims: [{entry}]\n")
    with pytest.raises(DvpError, match=message) as error:
        load_claims(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_change_is_of_a_claim_that_there_is(tmp_path):
    path = tmp_path / "claims.yaml"
    path.write_text(
        f"{SOURCES}\nclaims: [{{id: a, text: t, source: paper, not_tested: n}}]\n"
        "changes: [{claim: b, commit: c, known: k, what: w}]\n"
    )
    with pytest.raises(DvpError, match="changes: 'b' is neither a claim's id nor 'all'"):
        load_claims(path)


def test_quoted_claim_must_have_a_value():
    with pytest.raises(DvpError, match="rho_u_shape"):
        claim(load_claims(CLAIMS), "rho_u_shape")


def test_rho_is_written_as_in_the_paths_of_runs(tmp_path):
    path = tmp_path / "claims.yaml"
    path.write_text(f"{SOURCES}\nclaims: [{CONDITION % 'where: {rho: 1e-2, method: dvp}, above: 0'}]\n")
    [condition] = load_claims(path)["a"].conditions
    assert condition.where == {"rho": "0.01", "method": "dvp"}
