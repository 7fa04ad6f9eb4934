r"""What a response states, and whether it is right: the real data sets' answers, and answers.yaml's by their kind."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dvp.answers.comparison import equal
from dvp.data.verifier import check_reference, grade, stated_answer
from dvp.errors import DvpError
from dvp.experiment.loading import read_yaml

ANSWERS = read_yaml(Path(__file__).parent / "answers.yaml")
FORMS = (
    *(r"\boxed{%s}", r"So the answer is $\boxed{%s}$.", r"\[ \boxed{ %s } \]", r"\boxed{\text{Answer: }%s}"),
    *("Answer: %s", "We add.\nAnswer: %s.", "**Answer:** %s", "**Answer**: %s\n", "answer: %s", "Answer: $%s$"),
    *("### Final Answer:\n\n%s\n", "Final answer: %s", "final answer: %s", "Answer:\n\n%s", "Answer:\n\n$%s$"),
    *(r"Answer: \(%s\)", r"Answer: \[%s\]", "Answer: $$%s$$", "**Answer:**\n\\[%s\\]", r"$\text{Answer: }%s$"),
    *(
        r"\textbf{Answer:} %s",
        "The answer is %s.",
        "The answer is: $%s$. I hope it is correct.",
        r"The answer is: \[%s\]",
    ),
    *("Thus the final answer is **%s**.", "The answer is **$%s$**", r"So the final answer is \(%s\)."),
    *("3 + 4 = 7\n#### %s", "#### $%s$", "#### $$%s$$"),
)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(answer: str) -> list[str]:
    """Several ways to write a whole number."""
    number = int(answer)
    grouped = f"{number:,}"
    forms = [answer, str(number), f"{number:03d}", f"{number}.0"]
    return [*forms, grouped, grouped.replace(",", "{,}"), grouped.replace(",", r",\!")]


@pytest.mark.parametrize("file", ["aime25.jsonl", "aime24.jsonl"])
def test_aime_answers_in_every_form(shared, file):
    answers = [row["answer"] for row in read(shared / file)]
    for form in FORMS:
        assert all(grade(form % text, answer) for answer in answers for text in written(answer)), form
        for wrong in (1, -1, 10, 1000):
            assert not any(grade(form % (int(answer) + wrong), answer) for answer in answers), form


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_math500_answers_in_every_form(shared, form):
    answers = [row["answer"] for row in read(shared / "math500.jsonl")]
    assert [answer for answer in answers if not grade(form % answer, answer)] == []
    # An answer that is taken back counts no more, whatever the last one is.
    assert [answer for answer in answers if grade(f"Answer: 1234567\nWait.\n{form % answer}", "1234567")] == []


@pytest.mark.slow
def test_math500_solutions(shared):
    rows = read(shared / "math500.jsonl")
    assert sum(grade(row["solution"], row["answer"]) for row in rows) == 500
    # The next row's solution is wrong, but for "x=5", which does answer 5.
    pairs = [(row["answer"], other) for row, other in zip(rows, rows[1:] + rows[:1], strict=True)]
    equal = [(answer, other["answer"]) for answer, other in pairs if grade(other["solution"], answer)]
    assert [pair for pair in equal if pair[0] != pair[1]] == [("5", "x=5")]


def test_gsm8k_solutions(shared):
    for row in read(shared / "gsm8k_test.jsonl"):
        answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
        assert grade(row["answer"], answer)
        assert not grade(row["answer"], str(int(answer) + 1))


@pytest.mark.parametrize("reference", ANSWERS["right"])
def test_answers_as_they_are_written_are_right(reference):
    check_reference(reference)
    assert equal(reference, reference)
    assert [response for response in ANSWERS["right"][reference] if not grade(response, reference)] == []


@pytest.mark.parametrize("kind", ANSWERS["wrong"])
def test_wrong_answers_of_this_kind_are_wrong(kind):
    forms = (r"\boxed{%s}", "Answer: $%s$", "The answer is $%s$.", "Answer: %s")
    wrong = [(form % answer, reference) for reference, answer in ANSWERS["wrong"][kind] for form in forms]
    assert [pair for pair in wrong if grade(*pair)] == []


@pytest.mark.parametrize("reference", ANSWERS["not_stated"])
def test_words_that_change_a_value_are_not_ignored(reference):
    assert [response for response in ANSWERS["not_stated"][reference] if grade(response, reference)] == []


@pytest.mark.parametrize("response", ANSWERS["void"])
def test_a_box_that_is_changed_or_denied_states_nothing(response):
    assert stated_answer(response, truncated=False) is None


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        *(
            (text, None)
            for text in ("Answer: 1", "Answer: 1 ", "Answer: 1.", "Answer: $1$", "#### 1", "The answer is 1")
        ),
        *((text, None) for text in (r"\boxed{1", r"\boxed{\frac{1}{2}", "Answer: 5\nNo. Answer: 1")),
        *((text, None) for text in (r"\boxed{5} or rather \boxed{1", "Let us compute 12 + 30 = 42")),
        *((text, "1") for text in (r"\boxed{1}", r"Answer: $\boxed{1}$", "Answer: 1\n", "Answer: 1. So")),
        *((text, "1") for text in ("#### 1\nNext", "Answer: 1\nTo check, 2 +")),
    ],
)
def test_what_a_response_that_was_cut_off_states(response, answer):
    assert stated_answer(response, truncated=True) == answer
    assert grade(response, "1", truncated=True) == (answer == "1")


@pytest.mark.parametrize(
    ("response", "thinking", "answer"),
    [
        (r"<think>\boxed{1}</think>\boxed{2}", "", "2"),
        (r"<think>\boxed{1}</think> I do not know.", "", None),
        (r"<think>Perhaps \boxed{1}", "", None),
        (r"\boxed{1}</think>\boxed{2}", "<think>", "2"),
        (r"Perhaps \boxed{1}", "<think>", None),
        (r"\boxed{1}", "", "1"),
        (r"a</think>\boxed{1} <think> no, \boxed{2}</think> \boxed{3}", "<think>", "3"),
        (r"<think>\boxed{1}</think> no", None, "1"),
        (r"<think>Perhaps \boxed{1}", None, "1"),
    ],
)
@pytest.mark.parametrize("truncated", [False, True])
def test_only_what_follows_the_thinking_states_an_answer(response, thinking, answer, truncated):
    assert stated_answer(response, truncated=truncated, thinking=thinking) == answer
    assert grade(response, "1", truncated=truncated, thinking=thinking) == (answer == "1")


@pytest.mark.parametrize(
    "reference",
    [
        *("", "  ", "}{", "{{{{", "$", "1" * 500, "(" * 30 + "1" + ")" * 30, r"\int_0^1", "Answer: 42", "5 apples 3"),
        *(r"\{x \mid x > 70\}", "Eq(x, 1)", "1/0", "x2"),
    ],
)
def test_references_that_no_answer_could_match_are_refused(reference):
    with pytest.raises(DvpError, match=r"^the answer "):
        check_reference(reference)


@pytest.mark.parametrize(
    "reference", ["None", "no solution", "unknown", "does not exist", "Not given", "Na", r"\text{N}"]
)
def test_words_that_may_be_answers_are_references(reference):
    check_reference(reference)


@pytest.mark.parametrize(
    "reference",
    [
        *(
            "proof",
            "PROOF.",
            "(Proof omitted)",
            r"\text{proof}",
            "Proved",
            "Q.E.D.",
            "The statement is proved",
            "Not provided",
        ),
        *(
            "See solution",
            "see the solution above",
            "See explanation below.",
            "refer to the figure",
            "N/A",
            "n/a",
            "N.A.",
        ),
        *(
            "notfound",
            "not found",
            "No answer provided",
            "answer not available",
            "Answers may vary",
            "TBD",
            "nan",
            "null",
        ),
        *("not applicable", "Missing", "Solution in text", "证明见解析", "略"),
    ],
)
def test_references_that_say_that_there_is_no_answer_are_refused(reference):
    with pytest.raises(DvpError, match="is a placeholder, which says that no answer is given"):
        check_reference(reference)


PIECES = [r"\boxed{", "}", "{", "Answer:", "The answer is", "####", "$", r"\(", r"\)", r"\frac{1}{2}", "70", ".", "\n"]


@settings(max_examples=100)
@given(
    st.text(max_size=60) | st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join),
    st.booleans(),
)
def test_never_raises(response, truncated):
    assert grade(response, "70", truncated=truncated) in (True, False)
    assert grade(rf"\boxed{{{response}}}", "70") in (True, False)
