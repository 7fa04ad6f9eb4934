import json
import multiprocessing
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dvp.data import equality
from dvp.data.verifier import check_reference, equal, grade, stated_answer, unboxed
from dvp.errors import DvpError

FORMS = (
    r"\boxed{%s}",
    r"So the answer is $\boxed{%s}$.",
    r"\[ \boxed{ %s } \]",
    "Answer: %s",
    "We add.\nAnswer: %s.",
    "**Answer:** %s",
    "**Answer**: %s\n",
    "### Final Answer:\n\n%s\n",
    "Final answer: %s",
    "final answer: %s",
    "answer: %s",
    "Answer: $%s$",
    r"Answer: \(%s\)",
    r"Answer: \[%s\]",
    "Answer: $$%s$$",
    "The answer is %s.",
    "The answer is: $%s$. I hope it is correct.",
    "Thus the final answer is **%s**.",
    "3 + 4 = 7\n#### %s",
)


def written(answer: str) -> list[str]:
    """Several ways to write a whole number."""
    number = int(answer)
    forms = [answer, str(number), f"{number:03d}", f"{number}.0"]
    return [*forms, f"{number:,}", f"{number:,}".replace(",", "{,}"), f"{number:,}".replace(",", r",\!")]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("file", ["aime25.jsonl", "aime24.jsonl"])
def test_aime_answers_in_every_form(shared, file):
    answers = [row["answer"] for row in read(shared / file)]
    assert len(answers) == 30
    for form in FORMS:
        right = [grade(form % text, answer) for answer in answers for text in written(answer)]
        assert all(right), form
        for wrong in (1, -1, 10, 1000):
            graded = [grade(form % (int(answer) + wrong), answer) for answer in answers]
            assert not any(graded), form


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
        answer = row["answer"].rpartition("####")[2].strip()
        assert grade(row["answer"], answer.replace(",", ""))
        assert not grade(row["answer"], str(int(answer.replace(",", "")) + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        *FORMS,
        r"So the final answer is \(%s\).",
        "The answer is **$%s$**",
        r"The answer is: \[%s\]",
        "#### $%s$",
        "#### $$%s$$",
        "Answer:\n\n$%s$",
        "Answer:\n\n%s",
        "**Answer:**\n\\[%s\\]",
        r"$\text{Answer: }%s$",
        r"\boxed{\text{Answer: }%s}",
        r"\textbf{Answer:} %s",
    ],
)
def test_math500_answers_in_every_form(shared, form):
    answers = [row["answer"] for row in read(shared / "math500.jsonl")]
    assert [answer for answer in answers if not grade(form % answer, answer)] == []
    # An answer that is taken back counts no more, whatever the last one is.
    assert [answer for answer in answers if grade(f"Answer: 1234567\nWait.\n{form % answer}", "1234567")] == []


def test_every_reference_equals_itself_as_it_is_usually_written(shared):
    answers = [str(row["answer"]) for file in ("amc23", "math500") for row in read(shared / f"{file}.jsonl")]
    answers += [row["reward_model"]["ground_truth"] for row in read(shared / "dapo_math_sample.jsonl")]
    for answer in dict.fromkeys(answers):
        check_reference(answer)
        for written in (
            f"${answer}$",
            f" {answer} ",
            answer.replace("\\frac", "\\dfrac").replace("\\ddfrac", "\\dfrac"),
            answer.replace("\\left", "").replace("\\right", ""),
        ):
            assert equal(answer, written), (answer, written)


@pytest.mark.parametrize(
    ("response", "reference"),
    [
        (r"\boxed{\frac{140}{2}}", "70"),
        (r"\boxed{0.5}", r"\frac{1}{2}"),
        (r"\boxed{x = 70}", "70"),
        (r"\boxed{70\text{ miles}}", "70"),
        ("Answer: $70$ miles", "70"),
        ("Answer: $1,234", "1234"),
        ("Answer: −5", "-5"),
        (r"\boxed{\text{(C)}}", r"\text{(C)}"),
        (r"\boxed{\left\{1, 2\right\}}", r"\{1,2\}"),
        ("Answer: 70. We are done.", "70"),
        (r"Answer: \boxed{70}", "70"),
        (r"\boxed{1} no, \boxed{70}", "70"),
        ("\\boxed{1}\nAnswer: 70", "70"),
        ("Answer: 1\nThe answer is 70.", "70"),
        (r"\boxed{\boxed{70}}", "70"),
        ("\\boxed{70}\n\n#### Conclusion\nThat is all.", "70"),
        ("\\boxed{70}. We may check our answer: $7 \\cdot 10 = 71 - 1$, fine.", "70"),
        ("\\boxed{70}, and the answer is surprising.", "70"),
        (r"\boxed{70}, written without \boxed{", "70"),
        (r"Answer: \$70", "70"),
        (r"Answer: $\$70$", r"\$70"),
        (r"The answer is \(\$70.50\).", "70.50"),
        ("The answer is 3, 5, 7.", "3, 5, 7"),
        ("#### (3,4]", "(3,4]"),
        ("#### $2 + 3$", "5"),
        ("#### -\\sqrt{3} \nNext", r"-\sqrt{3}"),
        (r"\textbf{Answer: 70}", "70"),
        (r"\(\text{Answer: }70\)", "70"),
        (r"$\text{The answer is }70$.", "70"),
        (r"\boxed{\text{The answer is } 70}", "70"),
        (r"\boxed{50\%}", "50"),
        ("Answer: 50%", "50"),
        ("Answer: 50%", r"50\%"),
        ("Answer: 50", r"50\%"),
        (r"Answer: $50$ \%", "50%"),
        (r"\boxed{12.5\,\%}", "25/2"),
        (r"\boxed{52_{8}}", "52_8"),
        (r"\boxed{52_{\text{eight}}}", "52_8"),
        (r"\boxed{052_{\text{base } 8}}", "52_8"),
        (r"\boxed{(52)_{8}}", "52_8"),
        (r"\boxed{x = 52_8}", "52_8"),
        (r"\boxed{52}", "52_8"),
        (r"\boxed{1{,}052_8}", "1,052_8"),
        (r"\boxed{52_8 = 42}", "42"),
        (r"\boxed{1A_{16}}", "1A_{16}"),
        (r"\boxed{10C_5}", "10C_5"),
        ("The answer is 12:30.", "12:30"),
        ("The answer is 12:30 p.m.", r"12:30 \text{ p.m.}"),
        (r"\boxed{12:30 \text{ PM}}", "12:30"),
        (r"\boxed{5/12}", "5:12"),
        (r"\boxed{\text{even}}", "Even"),
        (r"\boxed{\text{AB}}", "AB"),
        (r"\boxed{yx}", "xy"),
        (r"\boxed{3+4=7}", "7"),
        (r"\boxed{2^3 = 4 + 4 = 8}", "8"),
        (r"\boxed{\frac{10}{3} = 3.33}", "3.33"),
        (r"\boxed{3(4) = 12}", "12"),
    ],
)
def test_right(response, reference):
    assert grade(response, reference)


@pytest.mark.parametrize(
    "response",
    [
        "",
        "70",
        "We get 3 + 67 = 70.",
        "The number 70 is the",
        "Answer:",
        "Answer: \n",
        r"\boxed{}",
        r"\boxed{70",
        r"\boxed{70, 71}",
        r"\boxed{70 \text{ or } 71}",
        "Answer: 70 or 71",
        "Answer: $70$ or $71$",
        "Answer: $71$ or $70$",
        "The answer is 70 or 71.",
        "The answer is not 70.",
        "The answer is between 69 and 70",
        "Answer: 71. It is not 70.",
        "Answer: 70\nWait. Answer: 71",
        r"\boxed{70} no, \boxed{71}",
        r"\boxed{70} no, \boxed{}",
        r"\boxed{7}0",
        "unanswer: 70",
        "Answer: 7 0",
        "Answer: 70\nWait. The answer is $15\\pi$.",
        "Answer: 70\nWait. The answer is 15\\pi.",
        "#### 70\n\nWait, 2 is counted twice.\n#### $2 + 3$",
        "#### 70\n\nWait, 2 is counted twice.\n#### 2 + 3",
        "The answer is $70$ or $71$.",
        "The answer is 70 (that is 69 + 1)",
        "The answer is 70?",
        r"Answer: \(70\) or \(71\)",
        r"Answer: \(71\) or \(70\)",
        r"Answer: \(x=71\) and \(y=70\)",
        r"Answer: \[x=71\] and \[y=70\]",
        r"\boxed{70_8}",
        r"\boxed{3+5=70}",
        r"\boxed{3+5=70\text{ cm}}",
        r"\boxed{0.7\%}",
    ],
)
def test_not_right(response):
    assert not grade(response, "70")


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("52_9", "52_8"),
        ("53_8", "52_8"),
        ("53", "52_8"),
        ("42", "52_8"),
        ("x=52_9", "52_8"),
        ("52_8", "52"),
        ("1,52_8", "152_8"),
        ("1B_{16}", "1A_{16}"),
        ("2:5", "12:30"),
        ("2/5", "12:30"),
        ("12:31", "12:30"),
        ("2:00", "1:00"),
        (r"12:30\text{ a.m.}", r"12:30\text{ p.m.}"),
        ("BA", "AB"),
        ("CBA", "ABC"),
        (r"\text{BA}", "AB"),
        ("neve", "even"),
        ("0.5", r"50\%"),
        (r"50\%", "0.5"),
    ],
)
def test_bases_times_words_and_percentages(answer, reference):
    check_reference(reference)
    assert equal(reference, reference)
    assert not equal(reference, answer)


@pytest.mark.parametrize(
    ("heading", "answer"),
    [
        ("Step 2", None),
        ("(a)", None),
        ("2)", None),
        ("1.2.3", None),
        ("- 5", None),
        ("Case $n = 2$", None),
        ("2k", "2k"),
    ],
)
def test_headings_state_nothing(heading, answer):
    assert stated_answer(f"#### {heading}\nWe add.", truncated=False) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Answer: 1", None),
        ("Answer: 1 ", None),
        ("Answer: 1.", None),
        ("Answer: $1$", None),
        ("#### 1", None),
        ("The answer is 1", None),
        (r"\boxed{1", None),
        (r"\boxed{\frac{1}{2}", None),
        ("Answer: 5\nNo. Answer: 1", None),
        (r"\boxed{5} or rather \boxed{1", None),
        ("Let us compute 12 + 30 = 42", None),
        (r"\boxed{1}", "1"),
        (r"Answer: $\boxed{1}$", "1"),
        ("Answer: 1\n", "1"),
        ("Answer: 1. So", "1"),
        ("#### 1\nNext", "1"),
        ("Answer: 1\nTo check, 2 +", "1"),
    ],
)
def test_truncated(response, answer):
    assert stated_answer(response, truncated=True) == answer
    assert grade(response, "1", truncated=True) == (answer == "1")


@pytest.mark.parametrize(
    "reference",
    ["70", "-3", "1,234", r"\frac{1}{2}", r"\text{Evelyn}", "(3,4]", "x=5", "10%", r"50\%", r"52_{\text{eight}}"],
)
def test_good_references(reference):
    check_reference(reference)


@pytest.mark.parametrize("reference", ["", "  ", "}{", "{{{{", "$", "1" * 500, "(" * 30 + "1" + ")" * 30])
def test_references_that_do_not_parse(reference):
    with pytest.raises(DvpError, match="the answer"):
        check_reference(reference)


def test_unboxed():
    assert unboxed(r"\boxed{204}") == unboxed(r"$\boxed{204}$") == "204"
    assert unboxed(r"\frac{1}{2}") == r"\frac{1}{2}"
    assert unboxed(r"\boxed{1} or \boxed{2}") == r"\boxed{1} or \boxed{2}"


PIECES = st.sampled_from(
    [
        r"\boxed{",
        "}",
        "{",
        "Answer:",
        "The answer is",
        "####",
        "$",
        r"\(",
        r"\)",
        r"\frac{1}{2}",
        "70",
        ".",
        "\n",
    ]
)


@settings(max_examples=100)
@given(
    st.one_of(st.text(max_size=60), st.lists(PIECES | st.text(max_size=3), max_size=12).map("".join)),
    st.booleans(),
)
def test_never_raises(response, truncated):
    assert grade(response, "70", truncated=truncated) in (True, False)
    assert grade(rf"\boxed{{{response}}}", "70") in (True, False)


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{" * 50_000,
        r"\boxed{" * 50_000 + "}" * 50_000,
        r"\boxed{" + "{" * 100_000 + "}" * 100_000 + "}",
        r"\boxed{" + "1+" * 100_000 + "1}",
        "Answer: " * 50_000,
        "the answer is " * 50_000,
        "answer" + " " * 300_000 + ":",
        "Answer: " + "$" * 100_000,
        "Answer: " + "9" * 100_000,
        "Answer:" + "\n" * 100_000,
        "#### 1\n" * 50_000 + "x" * 100_000,
        "\\" * 200_000,
    ],
)
def test_long_responses_state_nothing(response):
    """What they cost is in tests/benchmark."""
    assert not grade(response, "70")
    assert not grade(response, "70", truncated=True)


def test_what_cannot_be_evaluated_is_wrong_and_the_next_answer_is_graded():
    hard = r"\binom{10^8}{5000000}"
    assert equality.compare("70", hard) == equality.TOO_HARD
    assert not grade(rf"\boxed{{{hard}}}", "70")
    assert grade(r"\boxed{\frac{140}{2}}", "70")
    # A helper that was killed by somebody else is started again.
    equality._helper.process.kill()
    assert equality.compare("70", r"\frac{210}{3}") == equality.EQUAL


@pytest.mark.parametrize(
    "answer", ["9^{9^{9^9}}", "9^{9^9}", "10^7!", "(10^7)!", r"\sqrt{2}^{10^9}", "x^{10^8}", "(8!)!!"]
)
def test_powers_and_factorials_too_large_are_no_expression(answer):
    assert equality.compare("70", answer) == equality.UNEQUAL
    assert equality.compare(answer, "70") == equality.UNPARSED


def test_a_forked_process_asks_its_own_helper():
    assert equality.compare("70", r"\frac{140}{2}") == equality.EQUAL
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        answers = [(str(number), rf"\frac{{{2 * number}}}{{2}}") for number in range(40)]
        assert pool.starmap(equality.compare, answers, chunksize=5) == [equality.EQUAL] * 40


def test_a_helper_that_does_not_start_is_an_error(monkeypatch):
    helper = equality._Helper()
    monkeypatch.setattr(helper, "command", (sys.executable, "-c", "raise ImportError"))
    with pytest.raises(DvpError, match="the helper that compares answers does not start"):
        helper.ask("1", "2")
