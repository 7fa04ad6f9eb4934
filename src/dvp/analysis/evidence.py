"""The claims report: what was published, what was measured here, the verdict, and from which runs.

The rules that make a verdict stand in config/claims.yaml, beside the claims. The page is templates/claims.md.j2; its
HTML is made of that. claims.json has the same data.
"""

import base64
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from markdown_it import MarkdownIt

from dvp.analysis.claims import CLAIMS, Claim, Condition, Source, load_file
from dvp.analysis.formats import STYLE
from dvp.analysis.pages import TEMPLATES
from dvp.analysis.points import where_of
from dvp.analysis.report import Part, kept
from dvp.analysis.statistics import Statistic
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.loading import read_resolved

SUPPORTED, MIXED, CONTRADICTED, INCONCLUSIVE = "supported", "mixed", "contradicted", "inconclusive"
NOT_TESTABLE, NOT_TESTED, MISSING = "not testable at this scale", "not tested yet", "not measured"
VERDICTS = (SUPPORTED, MIXED, CONTRADICTED, INCONCLUSIVE, NOT_TESTABLE, NOT_TESTED)
RELATIONS = {"equal": "", "below": "< ", "at_least": "≥ "}
PAGE_STYLE = (
    "body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem } "
    "img { max-width: 100% }"
)


class Report(NamedTuple):
    """What is in an experiment's folder, results/E."""

    folder: Path
    experiment: Experiment
    part: Part


def answer(experiments: list[str], claims: Path = CLAIMS) -> dict[str, Any]:
    """Every claim with its conditions, their statistics and the verdict, as plain data.

    Args:
        experiments: KEY=FOLDER, the experiment with this folder (results/E) answers what the claims ask of KEY.

    Raises:
        DvpError: a key that is malformed, misspelt or given twice, a report that is not there, or a condition that
            several statistics fit.
    """
    file, folders = load_file(claims), {}
    for pair in experiments:
        key, equals, folder = pair.partition("=")
        if not (key and equals and folder):
            raise DvpError(f"--experiments {pair}: expected KEY=FOLDER")
        if key in folders:
            raise DvpError(f"--experiments {pair}: '{key}' is a duplicate of {folders[key]}")
        folders[key] = Path(folder)
    file.check_keys(folders)
    read: dict[Path, Report] = {}
    for folder in dict.fromkeys(folders.values()):
        experiment = read_resolved(folder / "config.yaml")
        read[folder] = Report(folder, experiment, kept(experiment, folder))
    reports = {key: read[folder] for key, folder in folders.items()}
    overview = file.overview in reports and reports[file.overview].part.tables.get("overview_table")
    return {
        "sources": {key: source.model_dump() for key, source in file.sources.items()},
        "experiments": {
            key: {
                "folder": str(folder),
                "scale": " ".join(experiment.scale.split()),
                "report": part.manifest["tracking_key"],
            }
            for key, (folder, experiment, part) in reports.items()
        },
        "overview_of": file.overview,
        "overview": overview.formatted()._asdict() if overview else None,
        "not_run": sorted(file.wanted - set(reports)),
        "not_asked": sorted(set(reports) - file.wanted),
        "claims": [_answer_claim(claim, file.sources[claim.source], reports) for claim in file.claims],
    }


def render(answered: dict[str, Any], folder: Path) -> dict[str, str]:
    """The page by file name: claims.md, claims.html (one file, with its figures in it), and its table alone.

    folder : where the page is to be; its figures are linked from there.
    """

    def image(figure: str) -> str:
        key, name = figure.split("/")
        return os.path.relpath(Path(answered["experiments"][key]["folder"]) / "figures" / f"{name}.png", folder)

    def embedded(match: re.Match) -> str:
        picture = Path(os.path.normpath(folder / match[1])).read_bytes()
        return f'src="data:image/png;base64,{base64.b64encode(picture).decode()}"'

    environment = TEMPLATES.overlay()
    environment.filters = TEMPLATES.filters | {
        "interval": _interval,
        "seen_from": _seen_from,
        "met": _met,
        "intervals": lambda claim: list(dict.fromkeys(one["how"] for one in claim["conditions"] if "how" in one)),
        "runs": _runs,
        "image": image,
        "text": lambda text: re.sub("<(?=[A-Za-z/!?])", "&lt;", text).replace("|", "\\|"),
    }
    groups = []
    for key, source in answered["sources"].items():
        own = [claim for claim in answered["claims"] if claim["source"] == key]
        count = Counter(claim["verdict"] for claim in own)
        groups.append(source | {"key": key, "claims": own, "counts": [count[name] for name in VERDICTS]})
    scales: dict[str, list[str]] = {}
    for name, experiment in answered["experiments"].items():
        scales.setdefault(experiment["scale"], []).append(name)
    of_overview = answered["experiments"].get(answered["overview_of"], {"folder": ""})
    page = {
        **{key: answered[key] for key in ("overview_of", "overview", "not_run", "not_asked")},
        "verdicts": VERDICTS,
        "groups": groups,
        "not_tested": NOT_TESTED,
        "overview_folder": Path(of_overview["folder"]).name,
        "scales": scales,
    }
    text = {name: environment.get_template(f"{name}.md.j2").render(page) for name in ("claims", "table")}
    html = {name: MarkdownIt().enable("table").render(each) for name, each in text.items()}
    whole = re.sub(r'src="([^"]+\.png)"', embedded, html["claims"])
    head = f'<meta charset="utf-8">\n<style>{PAGE_STYLE}{STYLE}</style>\n'
    return {
        "claims.md": text["claims"],
        "claims.html": f'<!doctype html>\n<html lang="en">\n<title>Claims and verdicts</title>\n{head}{whole}</html>\n',
        "table.html": '<div class="claims">\n'
        + re.sub(r'<a href="#[^"]*">(.*?)</a>', r"\1", html["table"])
        + "</div>\n",
    }


def verdict(statuses: list[str], controls: list[str], *, needs_all: bool = False) -> str:
    """Of conditions and controls, as config/claims.yaml says."""
    if MISSING in (*statuses, *controls):
        return NOT_TESTED
    found = CONTRADICTED if needs_all and CONTRADICTED in statuses else MIXED
    found = INCONCLUSIVE if needs_all and found == MIXED else found
    found = statuses[0] if len(set(statuses)) == 1 else found
    if CONTRADICTED in controls and found != CONTRADICTED:
        return MIXED
    return INCONCLUSIVE if INCONCLUSIVE in controls and found == SUPPORTED else found


def synthesis(conditions: list[dict[str, Any]]) -> str:
    """What the verdict comes to, in a sentence or two."""
    lines = []
    for control, noun in ((False, "condition"), (True, "control")):
        own = [condition for condition in conditions if condition["control"] is control]
        counts = Counter(condition["status"] for condition in own)
        each = ", ".join(f"{number} {status}" for status, number in counts.most_common())
        lines += [f"{len(own)} {noun}{'s' if len(own) > 1 else ''}: {each}"] if own else []
    short = sum(map(_excludes_zero, conditions))
    lines += (
        [f"of the inconclusive, {short} with an interval that excludes zero but not the criterion"] if short else []
    )
    return "; ".join(lines)


def _excludes_zero(condition: dict[str, Any]) -> bool:
    """Whether a condition asks for more than a difference from zero, and that alone is shown."""
    if condition["status"] != INCONCLUSIVE or condition["low"] is None or condition["high"] is None:
        return False
    threshold = condition["above"] if condition["above"] is not None else condition["below"]
    difference = condition["unit"] == "%" or _is_difference(condition["statistic"], condition["unit"])
    return bool(difference and threshold and (condition["low"] > 0 or condition["high"] < 0))


def status(condition: Condition, low: float | None, high: float | None) -> str:
    """Whether the interval lies where the condition says, elsewhere, or on both sides; inconclusive without one."""
    if low is None or high is None:
        return INCONCLUSIVE
    if condition.contains is not None:
        return SUPPORTED if low <= condition.contains <= high else CONTRADICTED
    first, last = condition.bounds
    if first < low and high < last:
        return SUPPORTED
    return CONTRADICTED if high <= first or low >= last else INCONCLUSIVE


def _answer_claim(claim: Claim, source: Source, reports: dict[str, Report]) -> dict[str, Any]:
    conditions = [_answer_condition(claim.id, condition, reports) for condition in claim.conditions]
    statuses = {
        control: [one["status"] for one in conditions if one["control"] is control] for control in (True, False)
    }
    runs: dict[str, dict[str, str]] = {}
    for condition in conditions:
        for file in condition["sources"]:
            folder, _, part = reports[condition["experiment"]]
            runs.setdefault(folder.name, {})[file] = part.files[file]["git_commit"]
    published = "in words" if source.published else None
    if claim.published:
        published = f"{RELATIONS[claim.published.relation]}{claim.published.value:g} {claim.published.unit}"
    key, _, figure = (claim.figure or "").partition("/")
    tested = verdict(statuses[False], statuses[True], needs_all=claim.needs_all)
    return claim.model_dump(include={"id", "text", "source", "note"}) | {
        "published": published,
        "verdict": tested if conditions else NOT_TESTABLE,
        "why": claim.not_testable or synthesis(conditions),
        "conditions": conditions,
        "figure": claim.figure if key in reports and figure in reports[key].part.manifest["figures"] else None,
        "files": {name: sorted(files) for name, files in runs.items()},
        "commits": {name: sorted(set(files.values())) for name, files in runs.items()},
    }


def _answer_condition(claim: str, condition: Condition, reports: dict[str, Report]) -> dict[str, Any]:
    asked = condition.model_dump(exclude={"turned", "contains"})
    missing = {"status": MISSING, "sources": []}
    if condition.experiment not in reports:
        return asked | missing | {"settings": 0, "instead": f"{condition.experiment} was not run"}
    _, experiment, part = reports[condition.experiment]
    alike = [one for one in part.statistics if one.name == condition.statistic]
    fitting = [one for one in alike if condition.where.items() <= one.where.items()]
    asked |= {"settings": _tried(experiment, part, alike)}
    if not fitting:
        return asked | missing | {"instead": _instead(condition, bool(alike))}
    if len(fitting) > 1:
        raise DvpError(
            f"claim '{claim}': {condition.statistic}: {len(fitting)} statistics fit {condition.where}; "
            f"tell them apart by {', '.join(sorted(set(fitting[0].where) - set(condition.where)))}"
        )
    [one] = fitting
    numbers = {key: number if math.isfinite(number := getattr(one, key)) else None for key in ("value", "low", "high")}
    measured = numbers | {"unit": one.unit, "how": one.how, "sources": list(one.sources)}
    if condition.turned:
        measured |= _turned(claim, one, numbers)
    return asked | measured | {"status": status(condition, measured["low"], measured["high"])}


def _tried(experiment: Experiment, part: Part, alike: list[Statistic]) -> int:
    """How many settings a statistic was looked at for.

    A change of the reference against itself is none, nor one of the base model. An archive that has not all that was
    measured says how many there were.
    """
    trivial = [where_of(experiment, point) for point in (None, experiment.reference_point)]
    tried = [one for one in alike if one.name != "score_change_percent" or one.where not in trivial]
    before = part.manifest.get("measured", {})
    return max([len(tried), *(before.get(name, 0) for name in {one.name for one in alike})])


def _turned(claim: str, one: Statistic, numbers: dict[str, float | None]) -> dict[str, Any]:
    """Value and interval the other way round; none where a ratio is not above 0, which has no reciprocal."""
    if one.unit != "ratio" and not _is_difference(one.name, one.unit):
        expected = "expected a ratio or a difference of fractions"
        raise DvpError(f"claim '{claim}': {one.name}: turned: {expected}, found unit '{one.unit}'")

    def turned(number: float | None) -> float | None:
        if number is None or (one.unit == "ratio" and number <= 0):
            return None
        return 1 / number if one.unit == "ratio" else 0.0 - number

    value, low, high = map(turned, numbers.values())
    return {"value": value, "low": high, "high": low, "how": f"{one.how}; sign or ratio reversed"}


def _instead(condition: Condition, measured: bool) -> str:
    of = ", ".join(f"{key} {value}" for key, value in condition.where.items()) if measured else ""
    return f"{condition.experiment} measures no {condition.statistic}" + (f" of {of}" if of else "")


def _number(value: float | None, factor: float) -> str:
    return "not defined" if value is None else f"{factor * value:.3g}"


def _interval(condition: dict[str, Any]) -> str:
    if condition["status"] == MISSING:
        return condition["instead"]
    factor, unit = _scale(condition)
    value, low, high = (_number(condition[key], factor) for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}] {unit}"


def _seen_from(condition: dict[str, Any]) -> str | None:
    """Of one that is inconclusive: which value would support it with an interval as wide as this one."""
    if condition["status"] != INCONCLUSIVE or condition["low"] is None or condition["high"] is None:
        return None
    factor, unit = _scale(condition)
    value, low, high = (condition[key] for key in ("value", "low", "high"))
    above, below = condition["within"] or (condition["above"], condition["below"])
    lowest = None if above is None else above + value - low
    largest = None if below is None else below + value - high
    # An interval of the logarithm: of the number itself, or of the ratio that a change or a saving in per cent is of.
    for whole, sign in [(0, 1), *([(100, 1), (100, -1)] if condition["unit"] == "%" else [])]:
        ratio, ratio_low, ratio_high = (whole + sign * number for number in (value, low, high))
        if min(ratio_low, ratio_high) > 0 and math.isclose(ratio**2, ratio_low * ratio_high, rel_tol=1e-6):
            if above is not None:
                lowest = sign * ((whole + sign * above) * ratio / ratio_low - whole)
            if below is not None:
                largest = sign * ((whole + sign * below) * ratio / ratio_high - whole)
            break
    if largest is None:
        return f"from {_number(lowest, factor)} {unit} on"
    if lowest is None:
        return f"up to {_number(largest, factor)} {unit}"
    if lowest < largest:
        return f"from {_number(lowest, factor)} to {_number(largest, factor)} {unit}"
    return f"by no value, as the interval is wider than {_number(below - above, factor)} {unit}"


def _scale(condition: dict[str, Any]) -> tuple[float, str]:
    """What a statistic is multiplied by and in which unit it is shown: differences of scores in percentage points."""
    if condition["unit"] == "fraction":
        return 100, "pp" if _is_difference(condition["statistic"], condition["unit"]) else "%"
    return 1, condition["unit"]


def _is_difference(name: str, unit: str) -> bool:
    return unit == "fraction" and "_over_" in name


def _met(claim: dict[str, Any], control: bool) -> str:
    """How many of a claim's conditions, or of its controls, are supported."""
    statuses = [condition["status"] for condition in claim["conditions"] if condition["control"] == control]
    return f"{statuses.count(SUPPORTED)} of {len(statuses)}" if statuses else "–"


def _runs(claim: dict[str, Any]) -> str:
    """How many files of which experiments a claim rests on, and of which commits."""
    return "; ".join(
        f"{folder}, {len(files)} file{'s' if len(files) > 1 else ''}, commit "
        + ", ".join(commit[:7] for commit in claim["commits"][folder])
        for folder, files in claim["files"].items()
    )
