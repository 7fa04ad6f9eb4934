"""Make the claims report: what was published, what was measured here, what that comes to, and from which runs.

Words follow from intervals by `dvp.analysis.claims.Condition.word` alone. The page is templates/claims.md.j2; its HTML
is made of that. claims.json has the same data.
"""

import base64
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from markdown_it import MarkdownIt

from dvp.analysis.claims import CLAIMS, MISSING, WORDS, Claim, Condition, Source, load_file
from dvp.analysis.formats import STYLE
from dvp.analysis.report import estimates_of, kept
from dvp.analysis.statistics import Statistic
from dvp.analysis.templating import TEMPLATES
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.loading import read_resolved

RELATIONS = {"equal": "", "below": "< ", "at_least": "≥ "}
PAGE_STYLE = (
    "body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem } "
    "img { max-width: 100% }"
)


class Report(NamedTuple):
    """The estimates in an experiment's folder, results/E, and report/manifest.json beside them."""

    folder: Path
    experiment: Experiment
    statistics: list[Statistic]
    manifest: dict[str, Any]


def answer(experiments: list[str], claims: Path = CLAIMS) -> dict[str, Any]:
    """Answer every claim: its conditions, their estimates, and the words for them, as plain data.

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
        read[folder] = Report(folder, experiment, *estimates_of(experiment, folder))
    reports = {key: read[folder] for key, folder in folders.items()}
    overview = None
    if file.overview in reports:
        overview = kept(reports[file.overview].experiment, folders[file.overview]).tables.get("overview_table")
    return {
        "sources": {key: source.model_dump() for key, source in file.sources.items()},
        "experiments": {
            key: {
                "folder": str(folder),
                "scale": " ".join(experiment.scale.split()),
                "report": manifest["tracking_key"],
            }
            for key, (folder, experiment, _, manifest) in reports.items()
        },
        "overview_of": file.overview,
        "overview": overview.formatted()._asdict() if overview else None,
        "not_run": sorted(file.wanted - set(reports)),
        "not_asked": sorted(set(reports) - file.wanted),
        "claims": [_answer_claim(claim, file.sources[claim.source], reports) for claim in file.claims],
    }


def render(answered: dict[str, Any], folder: Path) -> dict[str, str]:
    """Return the page by file name: claims.md, claims.html (with its figures embedded), and its table alone.

    folder : the page's folder, from which figures are linked.
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
        "delta": _with_delta,
        "intervals": lambda claim: list(dict.fromkeys(one["how"] for one in claim["conditions"] if "how" in one)),
        "runs": _runs,
        "image": image,
        "text": lambda text: re.sub("<(?=[A-Za-z/!?])", "&lt;", text).replace("|", "\\|"),
    }
    groups = []
    for key, source in answered["sources"].items():
        own = [claim for claim in answered["claims"] if claim["source"] == key]
        groups.append(source | {"key": key, "claims": own, "counts": counts(own)})
    scales: dict[str, list[str]] = {}
    for name, experiment in answered["experiments"].items():
        scales.setdefault(experiment["scale"], []).append(name)
    of_overview = answered["experiments"].get(answered["overview_of"], {"folder": ""})
    page = {
        **{key: answered[key] for key in ("overview_of", "overview", "not_run", "not_asked")},
        "words": WORDS,
        "groups": groups,
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


def verdict(words: list[str]) -> str:
    """Return the word that all conditions share, or how many have which, in the order of WORDS."""
    count = Counter(words)
    return words[0] if len(count) == 1 else ", ".join(f"{count[word]} {word}" for word in WORDS if count[word])


def counts(claims: list[dict[str, Any]]) -> list[int]:
    """Count the claims' conditions by word, in the order of WORDS; controls are left out."""
    count = Counter(one["status"] for claim in claims for one in claim["conditions"] if not one["control"])
    return [count[word] for word in WORDS]


def _answer_claim(claim: Claim, source: Source, reports: dict[str, Report]) -> dict[str, Any]:
    conditions = [_answer_condition(claim.id, condition, reports) for condition in claim.conditions]
    runs: dict[str, dict[str, str]] = {}
    for condition in conditions:
        for file in condition["sources"]:
            report = reports[condition["experiment"]]
            runs.setdefault(report.folder.name, {})[file] = report.manifest["origins"][file]["git_commit"]
    published = "in words" if source.published else None
    if claim.published:
        published = f"{RELATIONS[claim.published.relation]}{claim.published.value:g} {claim.published.unit}"
    key, _, figure = (claim.figure or "").partition("/")
    return claim.model_dump(include={"id", "text", "source", "note"}) | {
        "published": published,
        "verdict": verdict([one["status"] for one in conditions if not one["control"]]),
        "conditions": conditions,
        "figure": claim.figure if key in reports and figure in reports[key].manifest["figures"] else None,
        "files": {name: sorted(files) for name, files in runs.items()},
        "commits": {name: sorted(set(files.values())) for name, files in runs.items()},
    }


def _answer_condition(claim: str, condition: Condition, reports: dict[str, Report]) -> dict[str, Any]:
    asked = condition.model_dump(exclude={"negate"})
    missing = {"status": MISSING, "sources": []}
    if condition.experiment not in reports:
        return asked | missing | {"instead": f"{condition.experiment} was not run"}
    alike = [one for one in reports[condition.experiment].statistics if one.name == condition.statistic]
    fitting = [one for one in alike if condition.where.items() <= one.where.items()]
    if not fitting:
        return asked | missing | {"instead": _instead(condition, bool(alike))}
    if len(fitting) > 1:
        raise DvpError(
            f"claim '{claim}': {condition.statistic}: {len(fitting)} statistics fit {condition.where}; "
            f"tell them apart by {', '.join(sorted(set(fitting[0].where) - set(condition.where)))}"
        )
    [one] = fitting
    value, low, high = (number if math.isfinite(number) else None for number in (one.value, one.low, one.high))
    if condition.negate:
        value, high, low = (None if number is None else 0.0 - number for number in (value, low, high))
    measured = {"value": value, "low": low, "high": high, "unit": one.unit, "how": one.how}
    return asked | measured | {"status": condition.word(low, high), "sources": list(one.sources)}


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


def _with_delta(condition: dict[str, Any]) -> str:
    """Put the size of δ into a condition's word: `gain above 2 pp`."""
    if condition["delta"] is None or condition["status"] == MISSING:
        return condition["status"]
    factor, unit = _scale(condition)
    return condition["status"].replace("δ", f"{factor * condition['delta']:g} {unit}")


def _scale(condition: dict[str, Any]) -> tuple[float, str]:
    """Return the factor and the unit in which a statistic is shown: differences of scores in percentage points."""
    if condition["unit"] == "fraction":
        return 100, "pp" if _is_difference(condition["statistic"], condition["unit"]) else "%"
    return 1, condition["unit"]


def _is_difference(name: str, unit: str) -> bool:
    return unit == "fraction" and "_over_" in name


def _runs(claim: dict[str, Any]) -> str:
    """List on how many files of which experiments a claim rests, and at which commits."""
    return "; ".join(
        f"{folder}, {len(files)} file{'s' if len(files) > 1 else ''}, commit "
        + ", ".join(commit[:7] for commit in claim["commits"][folder])
        for folder, files in claim["files"].items()
    )
