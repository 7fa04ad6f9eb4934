"""Fill the numbers and tables of the documentation from the kept results, so that none is typed by hand.

In a page `<!--=NAME-->…<!--/-->` encloses the entry NAME of docs/numbers.yaml: a number with its 95 % interval, a
table, the table of answers, or the count of verdicts. `dvp redraw` writes the text between the marks.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dvp.analysis.claims import WORDS, effect_word
from dvp.analysis.formats import EMPTY
from dvp.analysis.statistics import ESTIMATES, Statistic, read_statistics
from dvp.errors import DvpError
from dvp.experiment.loading import read_yaml

NUMBERS = "numbers.yaml"  # in the folder of the documentation
MARK = re.compile(r"<!--=(?P<name>[a-z0-9_]+)-->(?P<text>.*?)<!--/-->", re.DOTALL)


def _digits(value: float) -> str:
    """Format with two digits, or as a whole number from 10 on."""
    return f"{value:.0f}" if abs(value) >= 10 else re.sub(r"e-0?", "e-", f"{value:#.2g}")


def _tenths(value: float) -> str:
    """Format with one decimal; a value that this would round to zero keeps its first digit, to show its sign."""
    return f"{value:.1f}" if abs(value) >= 0.05 or value == 0 else f"{float(f'{value:.1g}'):.9f}".rstrip("0")


_FORMATS: dict[str, tuple[float, Callable[[float], str], str]] = {
    "pp": (100, _tenths, " pp"),
    "share": (100, _digits, " %"),
    "saving": (1, _digits, " %"),
    "ratio": (1, "{:.2f}".format, ""),
    "number": (1, _digits, ""),
}


class Number(NamedTuple):
    """A number of a page: its text, the interval in the unit of the text, and the estimate that it comes from."""

    text: str
    low: float
    high: float
    unit: str
    estimate: Statistic


class Answers:
    """The entries of docs/numbers.yaml, made from the results that are kept below a folder.

    Args:
        declared: docs/numbers.yaml: `results` (the folder), `views` (keys used again and again), `numbers`, `tables`,
            `answers`.
        results: the folder with EXPERIMENT/report/estimates.parquet.
        claims: the claims in the result of `evidence.answer`.
    """

    def __init__(self, declared: dict[str, Any], results: Path, claims: list[dict[str, Any]]) -> None:
        self.declared, self.results = declared, results
        self.claims = {claim["id"]: claim for claim in claims}
        self.statistics: dict[str, list[Statistic]] = {}

    def text(self, name: str) -> str:
        """Return the text between the marks of an entry. Raises DvpError if it is not declared, or malformed."""
        try:
            if name in ("status", "answers"):
                return self._status() if name == "status" else self._answers()
            if name in self.declared["tables"]:
                return self._table(name, self.declared["tables"][name])
            return self.number(name, self.declared["numbers"][name]).text
        except (AttributeError, KeyError, TypeError) as error:
            expected = "expected a number or a table with the keys that the file's head names"
            raise DvpError(f"{NUMBERS}: {name}: {expected}; {type(error).__name__}: {error}") from None

    def number(self, name: str, asked: dict[str, Any], *, table: bool = False) -> Number:
        """Format one number with its interval; in a table without its unit, and a gain in pp with a plus sign.

        `asked` has the keys of an entry of `numbers`. Raises DvpError unless exactly one estimate fits it.
        """
        view = self.declared["views"][asked["view"]] if "view" in asked else {}
        asked = view | {key: value for key, value in asked.items() if key != "view"}
        experiment, quantity = asked.pop("experiment"), asked.pop("quantity")
        style, negate, invert = asked.pop("as", "number"), asked.pop("negate", False), asked.pop("invert", False)
        if experiment not in self.statistics:
            if not (file := self.results / experiment / ESTIMATES).is_file():
                raise DvpError(f"{NUMBERS}: {name}: {file}: no such file")
            self.statistics[experiment] = read_statistics(file)
        where = {key: str(value) for key, value in asked.items()}
        found = [
            one for one in self.statistics[experiment] if one.name == quantity and where.items() <= one.where.items()
        ]
        if len(found) != 1:
            fits = [one.where for one in found] or "nothing"
            raise DvpError(f"{NUMBERS}: {name}: {experiment} {quantity} {where}: expected one estimate, found {fits}")
        [one] = found
        scale, form, unit = _FORMATS[style]
        low, value, high = (scale * (1 / number if invert else number) for number in (one.low, one.value, one.high))
        low, value, high = (-low, -value, -high) if negate else (low, value, high)
        low, high = min(low, high), max(low, high)
        sign = "+" if table and style == "pp" and value > 0 else ""
        ends = f" [{form(low)}, {form(high)}]" if math.isfinite(low) else ""
        text = f"{sign}{form(value)}{'' if table else unit}{ends}"
        return Number(text.replace("-", "−"), low, high, unit, one)

    def _table(self, name: str, table: dict[str, Any]) -> str:
        """Write a Markdown table; a cell's number is declared by its table, column and row together."""
        rows = []
        for label, row in table["rows"].items():
            cells = []
            for heading, column in table["columns"].items():
                asked = table.get("all", {}) | column | row
                left_out = heading in asked.pop("without", [])
                cells.append(EMPTY if left_out else self.number(f"{name}: {label}, {heading}", asked, table=True).text)
            rows.append([label, *cells])
        return _markdown(["", *table["columns"]], rows)

    def _answers(self) -> str:
        rows = []
        for answer in self.declared["answers"]:
            number = self.number(answer["question"], answer["number"])
            word = self.claims[answer["claim"]]["verdict"]
            if "delta" in answer:
                word = effect_word(number.low, number.high, answer["delta"])
                word = word.replace("δ", f"{answer['delta']:g}{number.unit}")
            link = f"[{word}](../../results/reference/claims.md#{answer['claim']})"
            question = f"[{answer['question']}]({answer['page']}.md)"
            rows.append(
                [question, f"{answer['what']} {number.text}".strip(), answer["at"], _over(number.estimate), link]
            )
        return _markdown(["question", "estimate [95 %]", "dose; sampled from", "over", "comes to"], rows)

    def _status(self) -> str:
        own = [one for claim in self.claims.values() for one in claim["conditions"] if not one["control"]]
        count = Counter(one["status"] for one in own)
        each = ", ".join(f"{count[word]} {word}" for word in WORDS if count[word])
        return f"{len(self.claims)} claims with {len(own)} conditions: {each}"


def _over(one: Statistic) -> str:
    """Say what an interval is over: base models, training seeds, or problem sets."""
    if models := re.search(r"over (\d+ base models)", one.how):
        return models[1]
    trained, sets = re.search(r"(\d+) training seeds", one.how), re.search(r"over (\d+) seeds", one.how)
    return f"{trained[1]} seeds" if trained else f"{sets[1]} problem sets" if sets else one.how


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n" + "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def fill(page: str, answers: Answers) -> str:
    """Return a page with the text between its marks replaced."""
    return MARK.sub(lambda mark: f"<!--={mark['name']}-->{answers.text(mark['name'])}<!--/-->", page)


def pages(root: Path) -> list[Path]:
    """List the pages that may have marks: README.md, those of docs/, and those beside kept results."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md")), *root.glob("results/reference/*/README.md")]


def read(docs: Path, results: Path, claims: list[dict[str, Any]]) -> Answers:
    """Read docs/numbers.yaml. Raises DvpError if it does not have the expected keys."""
    declared = read_yaml(docs / NUMBERS)
    if set(declared) != {"results", "views", "numbers", "tables", "answers"}:
        found = ", ".join(declared)
        raise DvpError(f"{docs / NUMBERS}: expected results, views, numbers, tables and answers, found {found}")
    return Answers(declared, results, claims)
