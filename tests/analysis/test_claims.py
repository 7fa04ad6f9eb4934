"""config/claims.yaml: templates are written out, and what is wrong is told in one line."""

import pytest

from dvp.analysis.claims import load_file
from dvp.errors import DvpError

HEAD = "sources: {paper: {name: A paper, published: somewhere}}\n"
CONDITION = "{id: a, text: t, figure: e/f, conditions: [{says: s, experiment: e, statistic: x, %s}]}"


def load(tmp_path, text):
    path = tmp_path / "claims.yaml"
    path.write_text(HEAD + text)
    return load_file(path)


def test_a_template_is_written_out(tmp_path):
    """What all conditions share, over it the template, over that the condition's own keys; blanks are filled."""
    file = load(
        tmp_path,
        """
templates:
  gain: {statistic: over, evaluated_rho: "{rho}", delta: 0.02, says: "{this} over {that}"}
claims:
  paper:
    - id: a
      text: t
      all: {experiment: grid, method: dvp, rho: 1e-2, this: DVP, that: RLOO}
      conditions:
        - gain
        - {as: gain, rho: exp(-13), delta: 0.05, control: true, that: MIS, where: {control: bf16, size: 4, rate: 1e-6}}
""",
    )
    [claim] = file.claims
    first, second = claim.conditions
    assert (claim.source, claim.figure) == ("paper", None)
    assert (first.says, first.delta, first.control) == ("DVP over RLOO", 0.02, False)
    assert first.where == {"method": "dvp", "rho": "0.01", "evaluated_rho": "0.01"}
    assert (second.says, second.delta, second.control) == ("DVP over MIS", 0.05, True)
    assert second.where == {"method": "dvp", "rho": "exp(-13)", "evaluated_rho": "exp(-13)"} | {
        **{"control": "bf16", "size": "4", "rate": "1e-06"}
    }


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{id: a, text: t, conditions: []}", "claims.0.conditions: "),
        ("{id: a, text: t}", "claims: expected lists of claims by source; KeyError: 'conditions'"),
        (CONDITION % "above: 0, below: 1", "expected one of delta, above, below, within; found 2"),
        (CONDITION % "delta: 0", "claims.0.conditions.0.delta: "),
        (CONDITION % "within: [1, 0]", r"within: expected \[low, high\]"),
        (CONDITION % "rho: e-13, above: 0", r"claims.0.conditions.0.where: ρ must lie in \(0, 1\)"),
        (CONDITION % "control: true, above: 0", "expected one that is not a control"),
        (CONDITION % "as: gain, above: 0", "claims: expected lists of claims by source; KeyError: 'gain'"),
        (f"{CONDITION % 'above: 0'}, {CONDITION % 'above: 0'}", "id 'a' is a duplicate"),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path, entry, message):
    with pytest.raises(DvpError, match=message) as error:
        load(tmp_path, f"claims: {{paper: [{entry}]}}\n")
    assert str(error.value).startswith(str(tmp_path / "claims.yaml"))
    assert "\n" not in str(error.value)


def test_a_source_that_there_is_not_is_refused(tmp_path):
    with pytest.raises(DvpError, match="claims: other: no such source; known are paper"):
        load(tmp_path, f"claims: {{other: [{CONDITION % 'above: 0'}]}}\n")


def test_a_misspelt_key_of_evidence_is_told(tmp_path):
    claim = (CONDITION % "above: 0").replace("experiment: e", "experiment: training_grid")
    file = load(tmp_path, f"claims: {{paper: [{claim}]}}")
    with pytest.raises(
        DvpError, match="evidence: 'training_grit' is asked for by no claim; did you mean training_grid"
    ):
        file.check_keys(["training_grit"])
