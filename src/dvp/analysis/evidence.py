"""The page of claims: what was published, what was measured here, the verdict, and from which runs.

The rules that make a verdict stand in config/claims.yaml, beside the claims. Both forms of the page are rendered from
the same data, by templates/claims.md.j2 and templates/claims.html.j2. That data, claims.json, is all that a later page
needs to take over what was measured for this one; it names every run of every claim, which the page in Markdown counts.
"""

import base64
import math
import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dvp.analysis.claims import CLAIMS, Claim, Condition, Source, load_file
from dvp.analysis.load import check_fresh
from dvp.analysis.pages import TEMPLATES
from dvp.analysis.statistics import ESTIMATES, Statistic, read_statistics
from dvp.errors import DvpError
from dvp.experiment.loading import read_resolved
from dvp.files import atomic_path, expect, expect_keys, read_json, verify_checksums

REPRODUCED, IN_PART, NOT_REPRODUCED = "reproduced", "reproduced in part", "not reproduced"
NOT_SEEN, NOT_TESTABLE = "could not have been seen here", "not testable at this scale"
NOT_TESTED = "not tested yet"
VERDICTS = (REPRODUCED, IN_PART, NOT_REPRODUCED, NOT_SEEN, NOT_TESTABLE, NOT_TESTED)
MET, FAILED, OPEN, MISSING = "met", "failed", "open", "not measured"
_STATISTIC = (
    dict.fromkeys(("name", "unit", "how"), "a text")
    | {"where": "an object", "sources": "a list"}
    | dict.fromkeys(("value", "low", "high"), "a finite number or null")
)
_TABLE = dict.fromkeys(("headings", "rows", "notes"), "a list")
RELATIONS = {"equal": "", "below": "< ", "at_least": "≥ "}


def answer(experiments: list[str], claims: Path = CLAIMS, earlier: Path | None = None) -> dict[str, Any]:
    """Every claim with its conditions, their statistics and the verdict, as plain data.

    Args:
        experiments: KEY=FOLDER, the experiment with this folder (results/E) answers what the claims ask of KEY.
        earlier: the claims.json of a page made before, whose numbers answer what is asked of other keys.

    Raises:
        DvpError: a key that is malformed, misspelt or given twice, a report that is not there, an earlier page
            that is none, or a condition that several statistics fit.
    """
    file = load_file(claims)
    asked = file.by_id
    folders: dict[str, Path] = {}
    for pair in experiments:
        key, equals, folder = pair.partition("=")
        if not (key and equals and folder):
            raise DvpError(f"--experiments {pair}: expected KEY=FOLDER")
        if key in folders:
            raise DvpError(f"--experiments {pair}: '{key}' is given twice, as {folders[key]} too")
        folders[key] = Path(folder)
    file.check_keys(folders)
    wanted = file.wanted
    reports = _read_earlier(earlier) if earlier else {}
    reports = {key: report for key, report in reports.items() if key in wanted}
    reports |= {key: _read(folder) for key, folder in folders.items()}
    answered = [_answer_claim(claim, file.sources[claim.source], reports) for claim in asked.values()]
    return {
        "sources": {key: source.model_dump() for key, source in file.sources.items()},
        "experiments": {key: _of_use(key, report, answered, file.overview) for key, report in reports.items()},
        "overview": file.overview,
        "not_run": sorted(wanted - set(reports)),
        "not_asked": sorted(set(reports) - wanted),
        "claims": answered,
        "changes": [change.model_dump() for change in file.changes],
    }


def collect_figures(answered: dict[str, Any], folder: Path) -> None:
    """Copy the figures that the page shows to FOLDER/figures, so that the page can be moved and kept."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for experiment in answered["experiments"].values():
        for name, drawn in experiment["figures"].items():
            source, kept = Path(drawn), f"figures/{Path(experiment['folder']).name}/{name}.png"
            if not source.is_file():
                raise DvpError(f"{source}: no such file; the page shows it")
            if source.resolve() != (folder / kept).resolve():
                with atomic_path(folder / kept) as temporary:
                    shutil.copyfile(source, temporary)
            experiment["figures"][name] = kept


def render(answered: dict[str, Any], folder: Path) -> dict[str, str]:
    """The page by file name: claims.md, claims.html (one file, with its figures in it), and its table alone.

    folder : where the page and its figures are (`collect_figures`).
    """

    def image(figure: str) -> str:
        key, name = figure.split("/")
        return answered["experiments"][key]["figures"][name]

    def data_uri(figure: str) -> str:
        return f"data:image/png;base64,{base64.b64encode((folder / image(figure)).read_bytes()).decode()}"

    environment = TEMPLATES.overlay()
    environment.filters = TEMPLATES.filters | {
        "interval": _interval,
        "seen_from": _seen_from,
        "met": _met,
        "intervals": lambda claim: list(dict.fromkeys(one["how"] for one in claim["conditions"] if "how" in one)),
        "runs": _runs,
        "image": image,
        "data_uri": data_uri,
        "cell": lambda text: str(text).replace("|", "\\|"),
    }
    groups = []
    for key, source in answered["sources"].items():
        own = [claim for claim in answered["claims"] if claim["source"] == key]
        count = Counter(claim["verdict"] for claim in own)
        groups.append(source | {"key": key, "claims": own, "counts": [count[name] for name in VERDICTS]})
    scales: dict[str, list[str]] = {}
    for name, experiment in answered["experiments"].items():
        scales.setdefault(" ".join(experiment["scale"].split()), []).append(name)
    overview = answered["experiments"].get(answered["overview"], {})
    page = {
        "verdicts": VERDICTS,
        "groups": groups,
        "not_tested": NOT_TESTED,
        "changes": answered["changes"],
        "overview_of": answered["overview"],
        "overview": overview.get("overview"),
        "overview_folder": Path(overview.get("folder", "")).name,
        "scales": scales,
        "not_run": answered["not_run"],
        "not_asked": answered["not_asked"],
        "earlier": [key for key, experiment in answered["experiments"].items() if experiment["earlier"]],
    }
    return {
        name: environment.get_template(f"{name}.j2").render(page) for name in ("claims.md", "claims.html", "table.html")
    }


def verdict(statuses: list[str], controls: list[str], *, needs_all: bool = False) -> str:
    """Of conditions and controls, as config/claims.yaml says."""
    if MISSING in (*statuses, *controls):
        return NOT_TESTED
    if all(status == OPEN for status in statuses) and FAILED not in controls:
        return NOT_SEEN
    if all(status == MET for status in [*statuses, *controls]):
        return REPRODUCED
    in_part = MET in statuses and all(status == MET for status in controls) and not needs_all
    return IN_PART if in_part else NOT_REPRODUCED


def status(condition: Condition, low: float | None, high: float | None) -> str:
    """Whether the interval lies where the condition says, elsewhere, or on both sides; open without an interval."""
    if low is None or high is None:
        return OPEN
    if condition.contains is not None:
        return MET if low <= condition.contains <= high else FAILED
    if condition.within is not None:
        first, last = condition.within
    else:
        first = -math.inf if condition.above is None else condition.above
        last = math.inf if condition.below is None else condition.below
    if first < low and high < last:
        return MET
    return FAILED if high <= first or low >= last else OPEN


def _read(folder: Path) -> dict[str, Any]:
    """An experiment's report. Raises DvpError if it is missing, altered or stale."""
    experiment, path = read_resolved(folder / "config.yaml"), folder / "report" / "manifest.json"
    report = read_json(path, "config_hash", "tracking_key", "figures", "tables", "files", "origins")
    check_fresh(path, report, experiment.config_hash("report"))
    verify_checksums(path.parent, report["files"])
    statistics = [_plain(one) for one in read_statistics(folder / ESTIMATES)]
    return {
        "folder": str(folder),
        "scale": experiment.scale,
        "tracking_key": report["tracking_key"],
        "earlier": None,
        "statistics": statistics,
        "measured": dict(Counter(statistic["name"] for statistic in statistics)),
        "files": report["origins"],
        "figures": {figure: str(folder / "figures" / f"{figure}.png") for figure in report["figures"]},
        "overview": report["tables"].get("overview_table"),
    }


def _plain(statistic: Statistic) -> dict[str, Any]:
    """As JSON has it: a number that is not defined is null."""
    undefined = {key: None for key in ("value", "low", "high") if not math.isfinite(getattr(statistic, key))}
    return asdict(statistic) | undefined


def _of_use(key: str, report: dict[str, Any], answered: list[dict[str, Any]], overview: str | None) -> dict[str, Any]:
    """Of a report what the page shows, in the same form."""
    asked = [
        condition
        for claim in answered
        for condition in claim["conditions"]
        if condition["experiment"] == key and condition["status"] != MISSING
    ]
    shown = {claim["figure"] for claim in answered}
    return report | {
        "statistics": [
            statistic
            for statistic in report["statistics"]
            if any(
                condition["statistic"] == statistic["name"] and condition["where"].items() <= statistic["where"].items()
                for condition in asked
            )
        ],
        "files": {source: report["files"][source] for condition in asked for source in condition["sources"]},
        "figures": {name: path for name, path in report["figures"].items() if f"{key}/{name}" in shown},
        "overview": report["overview"] if key == overview else None,
    }


def _read_earlier(path: Path) -> dict[str, Any]:
    """By key, what an earlier page shows of the experiments that it was made of."""
    if not path.is_file():
        raise DvpError(f"--earlier {path}: no such file")
    page = read_json(path, "tracking_key", "experiments")
    expect("an object", page["experiments"], f"{path}: experiments")
    for key, report in page["experiments"].items():
        where = f"{path}: experiments.{key}."
        objects = ("reports", "measured", "files", "figures")
        expect_keys(report, {"folder": "a text", "scale": "a text", "statistics": "a list"}, where)
        expect_keys(report, dict.fromkeys(objects, "an object"), where)
        for number, statistic in enumerate(report["statistics"]):
            _check_statistic(statistic, f"{where}statistics.{number}.", report["files"], f"{where}files.")
            expect_keys(report["measured"], {statistic["name"]: "a finite number, 0 or more"}, f"{where}measured.")
        report["earlier"] = report.get("earlier") or page["tracking_key"]
        report["overview"] = report.get("overview")  # pages were made before there was one
        if report["overview"] is not None:
            expect("an object", report["overview"], f"{where}overview")
            expect_keys(report["overview"], _TABLE, f"{where}overview.")
        expect_keys(report["figures"], dict.fromkeys(report["figures"], "a text"), f"{where}figures.")
        report["figures"] = {name: str(path.parent / figure) for name, figure in report["figures"].items()}
    return page["experiments"]


def _check_statistic(statistic: Any, where: str, files: dict[str, Any], files_where: str) -> None:
    """Raise DvpError unless it is one, with an interval or without, and of files whose origin is known."""
    expect_keys(statistic, _STATISTIC, where)
    value, low, high = (statistic[key] for key in ("value", "low", "high"))
    if (low is None) != (high is None) or (low is not None and (value is None or low > high)):
        raise DvpError(f"{where}value: expected a number with an interval or without, found {value} [{low}, {high}]")
    for source in statistic["sources"]:
        expect_keys(files, {str(source): "an object"}, files_where)
        expect_keys(files[source], {"git_commit": "a text"}, f"{files_where}{source}.")


def _answer_claim(claim: Claim, source: Source, reports: dict[str, Any]) -> dict[str, Any]:
    conditions = [_answer_condition(claim.id, condition, reports) for condition in claim.conditions]
    value = "in words" if source.published else None
    if claim.value is not None:
        value = f"{RELATIONS[claim.relation]}{claim.value:g} {claim.unit}"
    files: dict[str, Any] = {}
    for condition, answered in zip(claim.conditions, conditions, strict=True):
        if answered["sources"]:
            report = reports[condition.experiment]
            of = Path(report["folder"]).name
            files |= {f"{of}/{source}": report["files"][source] for source in answered["sources"]}
    key, name = (claim.figure or "/").split("/")
    return {
        "id": claim.id,
        "text": claim.text,
        "source": claim.source,
        "note": claim.note,
        "published": value,
        "verdict": verdict(
            [condition["status"] for condition in conditions if not condition["control"]],
            [condition["status"] for condition in conditions if condition["control"]],
            needs_all=claim.needs_all,
        )
        if conditions
        else NOT_TESTABLE
        if claim.not_testable
        else NOT_TESTED,
        "why": claim.not_testable or claim.not_tested or "",
        "conditions": conditions,
        "figure": claim.figure if key in reports and name in reports[key]["figures"] else None,
        "files": files,
    }


def _answer_condition(claim: str, condition: Condition, reports: dict[str, Any]) -> dict[str, Any]:
    asked = condition.model_dump(
        include={"says", "control", "experiment", "statistic", "where", "above", "below", "within"}
    )
    missing = {"status": MISSING, "sources": []}
    if condition.experiment not in reports:
        return asked | missing | {"settings": 0, "instead": f"{condition.experiment} was not run"}
    report = reports[condition.experiment]
    alike = [statistic for statistic in report["statistics"] if statistic["name"] == condition.statistic]
    fitting = [statistic for statistic in alike if condition.where.items() <= statistic["where"].items()]
    asked |= {"settings": report["measured"].get(condition.statistic, 0)}
    if not fitting:
        instead = "the earlier page did not ask for it" if report["earlier"] else _instead(condition, alike)
        return asked | missing | {"instead": instead}
    if len(fitting) > 1:
        raise DvpError(
            f"claim '{claim}': {condition.statistic}: {len(fitting)} statistics fit {condition.where}; "
            f"tell them apart by {', '.join(sorted(set(fitting[0]['where']) - set(condition.where)))}"
        )
    [statistic] = fitting
    measured = {key: statistic[key] for key in ("value", "low", "high", "unit", "how", "sources")}
    if condition.turned:
        measured |= _turned(claim, statistic)
    return asked | measured | {"status": status(condition, measured["low"], measured["high"])}


def _turned(claim: str, statistic: dict[str, Any]) -> dict[str, Any]:
    """Value and interval the other way round; none where a ratio is not above 0, which has no reciprocal."""
    value, low, high = (statistic[key] for key in ("value", "low", "high"))
    if statistic["unit"] == "ratio":
        value, low, high = (None if number is None or number <= 0 else 1 / number for number in (value, low, high))
    elif _is_difference(statistic["name"], statistic["unit"]):
        value, low, high = (None if number is None else 0.0 - number for number in (value, low, high))
    else:
        raise DvpError(
            f"claim '{claim}': {statistic['name']}: turned: expected a ratio or a difference of fractions, found "
            f"unit '{statistic['unit']}'"
        )
    return {"value": value, "low": high, "high": low, "how": f"{statistic['how']}; turned round"}


def _instead(condition: Condition, alike: list[dict[str, Any]]) -> str:
    """What there is of a statistic that is not there as asked for."""
    if not alike:
        return f"{condition.experiment} measures no {condition.statistic}"
    others = {key: sorted({statistic["where"].get(key, "none") for statistic in alike}) for key in condition.where}
    lacking = [f"{key} {', '.join(others[key])}" for key, value in condition.where.items() if value not in others[key]]
    return f"{condition.experiment} has it of " + ("; ".join(lacking) or "other combinations")


def _number(value: float | None, factor: float) -> str:
    return "not defined" if value is None else f"{factor * value:.3g}"


def _interval(condition: dict[str, Any]) -> str:
    if condition["status"] == MISSING:
        return condition["instead"]
    factor, unit = _scale(condition)
    value, low, high = (_number(condition[key], factor) for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}] {unit}"


def _seen_from(condition: dict[str, Any]) -> str | None:
    """Of a condition that is open: which value would meet it with an interval as wide as this one."""
    if condition["status"] != OPEN or condition["low"] is None or condition["high"] is None:
        return None
    factor, unit = _scale(condition)
    value, first, last = (condition[key] for key in ("value", "low", "high"))
    # An interval of the logarithm: of the number itself, or of the ratio that a change or a saving in per cent is of.
    for whole, sign in [(0, 1), *([(100, 1), (100, -1)] if condition["unit"] == "%" else [])]:
        ratio, ratio_first, ratio_last = (whole + sign * number for number in (value, first, last))
        if min(ratio_first, ratio_last) > 0 and math.isclose(ratio**2, ratio_first * ratio_last, rel_tol=1e-6):
            if condition["above"] is not None:
                needed = sign * ((whole + sign * condition["above"]) * ratio / ratio_first - whole)
                return f"from {_number(needed, factor)} {unit} on"
            if condition["below"] is not None:
                needed = sign * ((whole + sign * condition["below"]) * ratio / ratio_last - whole)
                return f"up to {_number(needed, factor)} {unit}"
    if condition["above"] is not None:
        return f"from {_number(condition['above'] + condition['value'] - condition['low'], factor)} {unit} on"
    if condition["below"] is not None:
        return f"up to {_number(condition['below'] - condition['high'] + condition['value'], factor)} {unit}"
    first, last = condition["within"]
    low, high = first + condition["value"] - condition["low"], last + condition["value"] - condition["high"]
    if low < high:
        return f"from {_number(low, factor)} to {_number(high, factor)} {unit}"
    return f"by no value, as the interval is wider than {_number(last - first, factor)} {unit}"


def _scale(condition: dict[str, Any]) -> tuple[float, str]:
    """What a statistic is multiplied by and in which unit it is shown: differences of scores in points."""
    if condition["unit"] == "fraction":
        return 100, "points" if _is_difference(condition["statistic"], condition["unit"]) else "%"
    return 1, condition["unit"]


def _is_difference(name: str, unit: str) -> bool:
    return unit == "fraction" and "_over_" in name


def _met(claim: dict[str, Any], control: bool) -> str:
    """How many of a claim's conditions, or of its controls, are met."""
    statuses = [condition["status"] for condition in claim["conditions"] if condition["control"] == control]
    return f"{statuses.count(MET)} of {len(statuses)}" if statuses else "–"


def _runs(claim: dict[str, Any]) -> str:
    """How many files of which experiments a claim rests on, and of which commits."""
    by_folder: dict[str, list[str]] = {}
    for name, origin in claim["files"].items():
        by_folder.setdefault(name.split("/")[0], []).append(origin["git_commit"][:7])
    counted = {folder: f"{len(each)} file{'s' if len(each) > 1 else ''}" for folder, each in by_folder.items()}
    return "; ".join(
        f"{folder}, {counted[folder]}, commit {', '.join(dict.fromkeys(each))}" for folder, each in by_folder.items()
    )
