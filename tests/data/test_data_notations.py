r"""Kinds of answers that were once graded wrong, in either direction; each row is one instance of its kind."""

import pytest

from dvp.data.verifier import check_reference, grade, stated_answer
from dvp.errors import DvpError

FORMS = (r"\boxed{%s}", "Answer: $%s$", "The answer is $%s$.", "Answer: %s")
CHANGED = {
    "a variable is no unit": [
        ("3t", "3"),
        ("2a+3c", "2a+3"),
        ("n+3m", "n+3"),
        ("4s", "4m"),
        *(("3", f"3{letter}") for letter in "cdghlmost"),
        (r"\frac{1}{2}t", r"\frac{1}{2}"),
        (r"\frac{1}{2}at^2", r"\frac{1}{2}"),
        ("3", "3at"),
        ("3", "3im"),
    ],
    "a product of variables is no unit": [
        (r"\frac{1}{2} m v^2", r"\frac12"),
        (r"\frac13 h b", r"\frac13"),
        (r"2\pi h r", r"2\pi"),
        ("x^2 m n", "x^2"),
        ("n+3 m", "n+3"),
        ("2 mg", "2"),
        *((product, product[0]) for product in ("2 m g h", "5mg", "3 m n", "2 l w", "4 s t")),
        *(("7", f"7{product}") for product in (" m g", "mg", " s t", "in", "cu", " abs", "abce", " sinx", " cm h")),
    ],
    "nothing is dropped": [
        (r"2\mathbf{i}+3\mathbf{j}", r"2\mathbf{i}-3\mathbf{j}"),
        (r"2\mathbf{i}+3\mathbf{j}", "2"),
        ("2", r"2\mathrm{e}"),
        ("2", r"2\text{i}"),
        ("3", r"1+2\mathrm{i}"),
        (r"1+2\mathrm{i}", "3"),
        ("f'(x)", "f(x)"),
        ("0", r"0\text{ thousand}"),
        ("0", r"\text{not }0"),
    ],
    "numbers are exact": [
        (r"\frac{1}{2^{60}}", r"\frac{1}{2^{61}}"),
        (r"1-\frac{1}{2^{60}}", r"1+\frac{1}{2^{60}}"),
        (r"\frac{1}{20!}", r"\frac{1}{21!}"),
        (r"\frac{100!}{51!}", r"\frac{100!}{50!}"),
        ("(5/6)^{301}", "(5/6)^{300}"),
        (r"\frac{2^{100}+1}{2^{100}}", "1"),
        (r"6.6\times10^{-34}", r"1.05\times10^{-34}"),
        ("0.0000123", "0.0000124"),
        ("0.15", "0.1500001"),
        ("0.15", r"0.15+\frac{1}{30!}"),
        (r"\sqrt2", r"\sqrt2+\frac{1}{2^{300}}"),
        ("e^{-300}", "e^{-301}"),
    ],
    "what is no expression has no last number": [
        ("70", "2**3 + 70"),
        ("70", "x**2 + y**2 = 70"),
        ("Eq(x**2/4 + y**2/3, 1)", "Eq(x**2/16 + y**2/12, 1)"),
        ("70", r"70\text{ is impossible}"),
        ("70", r"\{x \mid x > 70\}"),
        ("70", r"\{x : x > 70\}"),
    ],
    "a relation is no number": [("70", f"{sign} 70") for sign in (r"\neq", "<", ">", r"\ge", r"\le", r"x \ne")],
    "only a name stands before a value": [("0", "x^2-5x+6=0"), ("70", "2x+3y=70"), ("7", "x+y=7"), ("70", "3+5=70")],
    "variables have all values": [("|x-5|", "5-x"), ("|x|", "x"), (r"\sqrt{x^2}", "x")],
    "equations have what they say": [
        ("70", "69.1 = 70.0"),
        ("x^2=-1", "x^2=-4"),
        ("|x|=-1", "|x|=-2"),
        ("x=5", "y=5"),
        ("x+y<3", "x+y>3"),
        ("x+y<3", "-x-y<-3"),
        (r"x \le 3", "x < 3"),
    ],
    "sets, tuples and intervals are not each other": [
        ("(6,31,-1)", r"\{6,31,-1\}"),
        (r"(2,\infty)", r"\{2,\infty\}"),
        ("(1,2)", "2,1"),
        ("[1,2]", "(1,2)"),
        ("2,2,3", "2,3,3"),
        ("(1,2)", "1"),
    ],
    "degrees are not radians": [(r"\sin 30^\circ", r"\sin 30"), (r"\frac12", r"\sin 30")],
    "units are not exchanged": [
        (r"15\mbox{ cm}^2", r"15\mbox{ cm}^3"),
        (r"5.4\text{ cents}", r"5.4\text{ dollars}"),
        (r"36^\circ", r"\$36"),
        ("18", r"18\text{ thousand}"),
        ("18", r"18\text{ dozen}"),
        ("18", r"18\text{ or }20"),
        ("18", r"18\text{ and }20"),
        ("18", r"18\text{ squared}"),
        ("50", "0.5"),
        (r"50\%", "0.5"),
    ],
    "words are no products, letters have a case": [
        ("no", "on"),
        ("was", "saw"),
        (r"\text{odd}", "ddo"),
        ("AB", "BA"),
        ("AB", "ab"),
        ("3R^2", "3r^2"),
    ],
    "an inequality is no list of its ends": [
        ("1<x<2", "1,2"),
        ("1,2", "1<x<2"),
        ("1<x<2", r"x=1\text{ or }x=2"),
        ("x<2", r"-\infty,2"),
        ("(2,3)", r"2\text{ or }3"),
        (r"(1,2)\cup(3,4)", "(1,2),(3,4)"),
        ("(1,2),(3,4)", r"(1,2)\cup(3,4)"),
    ],
    "and is not or": [
        (r"x\le1\text{ or }x\ge3", r"x\le1\text{ and }x\ge3"),
        (r"x\le1\text{ or }x\ge3", r"(1,3)"),
        (r"x\le1\text{ or }x\ge3", r"y\le1\text{ or }y\ge3"),
        (r"x>1\text{ and }x<3", r"(1,\infty)\cup(-\infty,3)"),
        (r"x>1\text{ and }x<3", r"x>1\text{ or }x<3"),
        (r"x>1\text{ and }x<3", r"x>1\text{ and }x\le3"),
        (r"x\ne1\text{ and }x\ne3", r"x\ne1\text{ or }x\ne3"),
    ],
    "ratios": [("1:2:3", "1:3:2"), ("1:2:3", r"\frac16"), ("1:2:3", "1:2:4"), ("1:2:3", "1:2"), (r"\frac16", "1:2:3")],
    "names have their values": [
        ("x=1,y=2", "2,1"),
        ("2,1", "x=1,y=2"),
        ("a=1,b=2,c=3", "3,2,1"),
        ("x=1,y=2", r"\{1,2\}"),
        ("a=b=c", "a=c"),
    ],
    "a modulus": [(r"n\equiv 1\pmod{3}", "1"), (r"n\equiv 1\pmod{3}", r"n\equiv 1\pmod{4}"), ("70", r"70\bmod 3")],
    "each sign is its own": [(r"(1,2),(-1,-2)", r"(\pm1,\pm2)")],
    "no leading zero before thousands": [("0,100", "100"), ("100", "0,100")],
    "floors": [
        (r"\lceil n/2\rceil", r"\lfloor n/2\rfloor+1"),
        (r"\lfloor 2n/3\rfloor+1", r"\lceil 2n/3\rceil"),
        (r"\lceil n/2\rceil m", r"(\lfloor n/2\rfloor+1)m"),
    ],
    "exponentials of both signs": [
        (r"\sinh 300", r"\cosh 300"),
        ("1", r"\tanh 200"),
        (r"\sqrt{1+e^{-300}}", "1"),
        (r"\frac{2^{1000.5}+1}{2^{1000.5}}", "1"),
    ],
    "times": [("12:30", answer) for answer in (r"\text{not }12:30", "-12:30", "after 12:30", "12:30 or so")],
    "a double factorial is none of a factorial": [("(7!)!", "7!!")],
    "bases": [("40_9", "36"), ("40_9", r"\$36"), ("52_8", "42"), ("52_8", "52_9")],
}


@pytest.mark.parametrize("kind", CHANGED)
def test_wrong_answers_of_this_kind_are_wrong(kind):
    wrong = [(form % answer, reference) for reference, answer in CHANGED[kind] for form in FORMS]
    assert [pair for pair in wrong if grade(*pair)] == []


@pytest.mark.parametrize(
    "response",
    [
        "Answer: 18 thousand",
        "Answer: 18 million dollars",
        "Answer: 18 is impossible",
        "Answer: 18 and a half",
        "Answer: not 18",
        "Answer: at least 18",
        "Answer: at least $18$",
        "Answer: between 18 and 20",
        "Answer: $18$ thousand",
        "Answer: -$18$",
        "Answer: $3$ or $18$",
        "The answer is 18 thousand.",
        "The answer is 18 times larger than it was.",
        "#### 18 dozen",
        *(
            f"Answer: {words} 18"
            for words in ("twice", "sqrt", "up to", "cannot be", "divisible by", "half of", "minus")
        ),
        *(f"Answer: {words} $18$" for words in ("twice", "up to", "cannot be", "divisible by", "half of")),
        *(f"Answer: 18 {words}" for words in ("doubled", "twice", "(rejected)", "fifty", "only if", "halved")),
        *(f"Answer: $18$ {words}" for words in ("doubled", "twice", "(rejected)", ", rejected", "fifty")),
        "The answer is $18$ doubled.",
    ],
)
def test_words_that_change_a_value_are_not_ignored(response):
    assert not grade(response, "18")


@pytest.mark.parametrize(
    "response",
    [
        r"-\boxed{70}",
        r"$-\boxed{70}$",
        r"2\boxed{70}",
        r"$x = 2 \boxed{70}$",
        r"$2(\boxed{70})$",
        r"$x\boxed{70}$",
        r"$2\cdot\boxed{70}$",
        r"$2*\boxed{70}$",
        r"$\pi\boxed{70}$",
        r"$\frac12\boxed{70}$",
        r"$1/\boxed{70}$",
        r"\boxed{70}+1",
        r"$\boxed{70} + x$",
        r"\boxed{70}^2",
        r"{\boxed{70}}^2",
        r"\boxed{70}0",
        r"\boxed{70}x",
        r"$\boxed{70}\pi$",
        r"$\boxed{70}\cdot 2$",
        r"\sqrt{\boxed{70}}",
        r"\sqrt {\boxed{70}}",
        r"\frac{\boxed{70}}{3}",
        r"\frac{3}{\boxed{70}}",
        r"2^{\boxed{70}}",
        r"$x\neq\boxed{70}$",
        r"$x \ne \boxed{70}$",
        r"$x > \boxed{70}$",
        r"$x\not=\boxed{70}$",
        r"\boxed{70} is not the answer.",
        r"$\boxed{70}$ is wrong.",
        r"$\boxed{70}$, which isn't the answer.",
        r"The answer is not \boxed{70}.",
        r"The answer is not $\boxed{70}$.",
        r"$\text{not }\boxed{70}$",
        r"\boxed{70}. No, -\boxed{70}.",
        "The answer is 70. Hold on. The answer is not 70, it is 71.",
        "\\boxed{70}\n\nWait. The answer is not $70$.",
    ],
)
def test_a_box_that_is_changed_or_denied_states_nothing(response):
    assert stated_answer(response, truncated=False) is None


@pytest.mark.parametrize(
    "response",
    [
        r"$x=\boxed{70}$",
        r"$x \approx \boxed{70}$",
        r"\(x = 2 \cdot 35 = \boxed{70}\)",
        r"It is $\boxed{70}^\circ$.",
        r"$\boxed{70}\%$",
        r"$\boxed{70}\text{ miles}$",
        r"- \boxed{70}",
        r"* $\boxed{70}$",
        r"**\boxed{70}**",
        r"**Answer:** \boxed{70}",
        r"$$\text{Answer: }\boxed{70}$$",
        r"$\Rightarrow \boxed{70}$",
        r"=> \boxed{70}",
        r"(a) \boxed{70}",
        r"We get 70 \boxed{70}",
        "So 35 + 35 =\n\\boxed{70}\n- as above",
        r"$\color{red}{\boxed{70}}$",
        r"$\textbf{\boxed{70}}$",
        r"\boxed{70}, not 71.",
        r"\boxed{70}! That was not hard, only 2 steps.",
        r"It is not 69 but \boxed{70}.",
        r"\boxed{70} (since $2\cdot 35=70$)",
        r"\$\boxed{70}",
        "\\boxed{70}. The answer is not surprising.",
        "Answer: so the total is 70",
        "Answer = 70",
        "### Answer\n70",
        "**Final answer**\n\n$70$",
        "The answer is 70, since it is even.",
        "The answer is $70$ because it is even.",
        "Answer: $70$, since it is even",
    ],
)
def test_a_box_in_a_sentence_or_a_formula_states_its_answer(response):
    assert grade(response, "70")


WRITTEN = {
    r"28\%": [r"\boxed{28 percent}", "Answer: 28 percent", r"\boxed{28\text{ percent}}", "The answer is 28 percent."],
    "28": [r"\boxed{28 percent}", "Answer: 28 percent", "#### 28 percent", "Answer: 28 per cent"],
    r"1-\frac1e": [r"\boxed{1-\frac{1}{\mathrm{e}}}", "Answer: $1-1/e$"],
    "6-5i": [r"\boxed{6-5\mathrm{i}}", r"\boxed{6-5\text{i}}", r"\boxed{-5i+6}"],
    "18": [
        "Answer: 18 dollars",
        "The answer is 18 people.",
        "#### 18 books",
        "So the answer is $18$ dollars.",
        "Answer: $18$ students left",
        "Answer: She has 18 dollars left.",
        "Answer: about 18",
        r"\boxed{18 dollars}",
        r"\boxed{18\text{ dollars}}",
        r"\boxed{\$18}",
        "Answer: 18 square feet",
        "Answer: 18 km/h",
        r"\boxed{18 cm^2}",
        r"\boxed{18cm}",
    ],
    "5": ["Answer: 5 (five)", "Answer: 5 m", r"\boxed{5 cm}", r"\boxed{5\text{ m}}", "Answer: ５", "The answer is ５."],
    "1000": ["Answer: 1e3", "Answer: 1 000", "Answer: 1\u00a0000", r"\boxed{1\,000}", r"\boxed{1{,}000}"],
    r"3\sqrt{13}": [
        r"\boxed{3\sqrt{13}.}",
        r"\boxed{3√13}",
        "Answer: 3√13",
        "The answer is 3√13.",
        r"\boxed{3~\sqrt{13}}",
    ],
    "(3,4)": [r"\boxed{\bigl(3,4\bigr)}", r"\boxed{\big( 3, 4 \big)}", r"\boxed{\left(3,4\right)}", r"\boxed{3,4}"],
    r"90^\circ": [r"\boxed{90°}", "Answer: 90°", "Answer: 90", r"\boxed{90\text{ degrees}}", r"\boxed{90^{\circ}}"],
    r"\infty": [r"\boxed{∞}", "Answer: ∞", r"\boxed{+\infty}"],
    "70": [
        *(
            rf"\boxed{{{answer}}}"
            for answer in (
                r"\boldsymbol{70}",
                r"\mathbf{70}",
                r"\bm{70}",
                r"\color{red}70",
                r"\color{red}{70}",
                r"\textcolor{red}{70}",
                r"{\color{blue} 70}",
                r"\underline{70}",
                r"\mathrm{70}",
                r"\textbf{70}",
                r"\displaystyle 70",
                "70.",
                "７０",
                "$70$",
                r"\(70\)",
                "2(35)",
                r"70 \pmod{1000}",
                r"70\text{ m}",
            )
        ),
        "**Answer:**\n\n\\[\n70\n\\]",
        "Answer: $$\n70\n$$",
        "The answer is\n\\[\n70\n\\]\n",
        "**Answer**:\n\n$$\n70\n$$\nDone.",
        "Answer：70",
        "**Answer：** 70",
        r"\boxed 70",
        r"$\boxed 70$.",
    ],
    "-5": ["Answer: –5", "Answer: −5", "Answer: －5", "The answer is –5."],
    "x^3+3x-6": [r"\boxed{x**3+3x-6}", r"\boxed{x^3 + 3x - 6.}", r"\boxed{3x - 6 + x^3}"],
    r"\{1,2\}": [r"\boxed{\lbrace 1,2\rbrace}", r"\boxed{\left\{2, 1\right\}}"],
    r"\emptyset": [r"\boxed{\varnothing}", r"\boxed{∅}", r"\boxed{\{\}}"],
    "0.0000123": ["Answer: 1.23×10⁻⁵", r"\boxed{1.23×10⁻⁵}"],
    r"e=\frac12": [r"\boxed{\frac12}", r"\boxed{e=0.5}"],
    "6": [r"\boxed{\dbinom42}"],
    r"\frac13": [
        r"\boxed{{1\over3}}",
        r"\boxed{0.\dot3}",
        r"\boxed{0.\dot{3}}",
        r"\boxed{0.\overline{3}}",
        r"\boxed{0.333333}",
        "Answer: 1/3",
    ],
    "0.3": ["Answer: 0.30000000000000004"],
    "-1": [r"\boxed{i^2}"],
    "x+y<3": [r"\boxed{2x+2y<6}", r"\boxed{3 > y + x}"],
    "yes": [r"\boxed{Yes}", "The answer is yes.", "Answer: Yes", "The answer is **Yes**.", r"\boxed{\text{YES}}"],
    "No": ["The answer is no.", "Answer: NO"],
    "odd": [r"\boxed{\text{Odd}}", "The answer is odd."],
    r"\text{(B)}": [
        "The correct answer is (B).",
        "The correct answer is **(B)**.",
        "The answer is B.",
        "Answer: b)"[:-1],
    ],
    "3": [r"\boxed{3\text{ m}}", r"\boxed{3\mathrm{ m}}", r"\boxed{\{3\}}"],
    r"15\text{ cm}^2": [
        r"\boxed{15\mbox{ cm}^2}",
        r"\boxed{15}",
        r"\boxed{15\text{ square centimeters}}",
        "Answer: 15 sq cm",
    ],
    r"\frac{270}{7}": [r"\boxed{\frac{270}7\text{ degrees}}", r"\boxed{38\frac47}"],
    "-2": [r"\boxed{\sqrt[3]{-8}}"],
    "1024": [r"\boxed{2^10}", r"\boxed{2^{10} = 1024}"],
    r"\sqrt2+\sqrt3": [r"\boxed{\sqrt{5+2\sqrt6}}"],
    r"x \in [-2,7]": [r"\boxed{[-2,7]}", r"\boxed{-2 \le x \le 7}"],
    r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}": [r"\boxed{\frac15\begin{bmatrix} 1 \\ -18 \end{bmatrix}}"],
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}": [r"\boxed{\left(\begin{array}{c}1\\2\end{array}\right)}"],
    r"1 \pm \sqrt{19}": [r"\boxed{1+\sqrt{19}, 1-\sqrt{19}}", r"\boxed{x = 1 \pm \sqrt{19}}"],
    r"\frac12 m v^2": [r"\boxed{\frac{mv^2}{2}}", r"\boxed{\frac{1}{2}mv^2}"],
    "2 m g h": [r"\boxed{2mgh}", "Answer: $2mgh$", "Answer: 2 m g h"],
    "3 m n": [r"\boxed{3mn}"],
    "1<x<3": [r"\boxed{x>1\text{ and }x<3}", r"\boxed{(1,3)}", r"\boxed{x \in (1,3)}"],
    r"x \le 1 \text{ or } x \ge 3": [
        r"\boxed{(-\infty,1]\cup[3,\infty)}",
        r"\boxed{x \ge 3 \text{ or } x \le 1}",
        "Answer: x ≤ 1 or x ≥ 3",
    ],
    r"x>1\text{ and }x\le3": [r"\boxed{1<x\le3}", r"\boxed{(1,3]}", r"\boxed{x\le3\text{ and }x>1}"],
    "1,2": [r"\boxed{1\text{ or }2}", r"\boxed{2 and 1}", r"\boxed{x=1\text{ or }x=2}", r"\boxed{\{1,2\}}"],
    "1:2:3": [r"\boxed{1:2:3}", r"\boxed{2:4:6}"],
    "x=1,y=2": [r"\boxed{1,2}", r"\boxed{y=2,x=1}", r"\boxed{x=1\text{ and }y=2}"],
    r"n\equiv 1\pmod{3}": [r"\boxed{n\equiv1\pmod 3}", r"\boxed{1\pmod{3}}"],
    r"(\pm1,2)": [r"\boxed{(\pm 1,2)}"],
    "a=b=c": [r"\boxed{a=b=c}"],
    r"\lceil n/2\rceil": [r"\boxed{-\lfloor -n/2\rfloor}"],
    r"\sinh 2": [r"\boxed{\frac{e^2-e^{-2}}{2}}", r"\boxed{\frac{e^4-1}{2e^2}}"],
    r"\tanh x": [r"\boxed{\frac{e^{2x}-1}{e^{2x}+1}}", r"\boxed{\sinh x / \cosh x}"],
    "12:30": [r"\boxed{\text{at }12:30}", r"\boxed{12:30\text{ p.m.}}", "Answer: 12:30 pm"],
    "7!": [r"\boxed{5040}", r"\boxed{7!}"],
    "x^2+x": [r"\boxed{x(x+1)}", r"\boxed{f(x) = x + x^2}"],
    "5 dollars": ["Answer: 5", "Answer: $5", r"\boxed{5}"],
    "5 km/h": ["Answer: 5 km/h", r"\boxed{5}"],
    "2 1/2": [r"\boxed{\frac52}", "Answer: 2.5", r"\boxed{2\frac12}"],
    "1e-3": ["Answer: 0.001", r"\boxed{10^{-3}}"],
    "pi/2": [r"\boxed{\frac{\pi}{2}}", "Answer: pi/2"],
    "2*pi": [r"\boxed{2\pi}"],
    "oo": [r"\boxed{\infty}"],
    r"4\operatorname{cis}60^\circ": [r"\boxed{2+2i\sqrt{3}}", r"\boxed{4\text{cis }60^\circ}"],
    r"\langle1,2\rangle": [r"\boxed{\langle 1, 2\rangle}", r"\boxed{(1,2)}"],
    "0.\\overline{3}": [r"\boxed{\frac{1}{3}}"],
    r"1-\frac{1}{\mathrm{e}}": [r"\boxed{1-e^{-1}}"],
    "f'(x)": [r"\boxed{f'(x)}", r"\boxed{f^{\prime}(x)}"],
}


@pytest.mark.parametrize("reference", WRITTEN)
def test_answers_as_they_are_written_are_right(reference):
    check_reference(reference)
    assert [response for response in WRITTEN[reference] if not grade(response, reference)] == []


@pytest.mark.parametrize(
    "reference", ["Answer: 42", r"\int_0^1", "5 apples 3", r"\{x \mid x > 70\}", "Eq(x, 1)", "1/0", "x2"]
)
def test_references_that_no_answer_could_match_are_refused(reference):
    with pytest.raises(DvpError, match=r"the answer .* is not a mathematical expression, nor a word"):
        check_reference(reference)


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
