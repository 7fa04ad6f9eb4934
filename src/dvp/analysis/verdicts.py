"""The page of claims: what was published, what was measured here, the verdict, and from which runs.

The rules that make a verdict stand in config/claims.yaml, beside the claims.
"""

import base64
import html
import math
import os
from pathlib import Path
from typing import Any

from dvp.analysis.claims import CLAIMS, Claim, Condition, load_claims
from dvp.analysis.formats import EMPTY
from dvp.analysis.inputs import check_fresh
from dvp.analysis.parts import parts
from dvp.errors import DvpError
from dvp.experiment.loading import read_resolved
from dvp.files import read_json

REPRODUCED, IN_PART, NOT_REPRODUCED = "reproduced", "reproduced in part", "not reproduced"
NOT_TESTABLE, NOT_TESTED = "not testable at this scale", "not tested yet"
MET, FAILED, OPEN, MISSING = "met", "failed", "open", "not measured"
RELATIONS = {"equal": "", "below": "< ", "at_least": "≥ "}
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem; border-bottom: 1px solid #ddd }
th { background: #f4f4f4 } img { max-width: 100% } code { font-size: 85%; overflow-wrap: anywhere }
.reproduced { color: #00704f } .not.reproduced, .failed { color: #b03a00 } .in.part, .open { color: #7a5c00 }
"""


def answer(experiments: list[str], claims: Path = CLAIMS) -> dict[str, Any]:
    """Every claim with its conditions, their statistics and the verdict, as plain data.

    Args:
        experiments: KEY=FOLDER, the experiment with this folder (results/E) answers what the claims ask of KEY.

    Raises:
        DvpError: a key that is missing or malformed, a report that is not there, or a condition that several
            statistics fit.
    """
    asked = load_claims(claims)
    folders: dict[str, Path] = {}
    for pair in experiments:
        key, equals, folder = pair.partition("=")
        if not (key and equals and folder):
            raise DvpError(f"--experiments {pair}: expected KEY=FOLDER")
        folders[key] = Path(folder)
    wanted = {condition.experiment for claim in asked.values() for condition in claim.conditions}
    wanted |= {claim.figure.split("/")[0] for claim in asked.values() if claim.figure}
    if missing := sorted(wanted - set(folders)):
        raise DvpError(f"config/config.yaml: evidence: '{missing[0]}', for which {claims} asks, is missing")
    reports = {key: _read(folder) for key, folder in folders.items()}
    return {
        "experiments": {
            key: {"folder": str(folders[key])} | {name: report[name] for name in ("scale", "reports", "files")}
            for key, report in reports.items()
        },
        "claims": [_answer_claim(claim, reports, folders) for claim in asked.values()],
    }


def to_markdown(answered: dict[str, Any], folder: Path) -> str:
    """The page as Markdown: a table at a glance, then each claim with its conditions, figure and the runs behind it.

    folder : where the page will be, for its links.
    """
    lines = ["# Claims and verdicts", "", *_introduction(answered), ""]
    lines += [
        "| claim | published | measured here [95 %] | verdict | settings tried | figure | runs |",
        "|---" * 7 + "|",
    ]
    for one in answered["claims"]:
        cells = [
            f"[{one['text']}](#{one['id']}) ({one['source']})",
            one["published"],
            "<br>".join(map(_brief, one["conditions"])) or one["why"],
            f"**{one['verdict']}**",
            str(one["settings"]) if one["conditions"] else EMPTY,
            f"[{one['figure']}]({_link(one, folder)})" if one["figure"] else EMPTY,
            _runs(one),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    for one in answered["claims"]:
        if not one["conditions"]:
            continue
        lines += ["", f'## <a id="{one["id"]}"></a>{one["text"]}', ""]
        lines += [f"Published: {one['published']} ({one['source']}; {one['note']}). Verdict: **{one['verdict']}**.", ""]
        for condition in one["conditions"]:
            lines.append(f"- {_long(condition)}")
        if one["figure"]:
            lines += ["", f"![{one['figure']}]({_link(one, folder)})"]
        if not one["files"]:
            continue
        lines += ["", "<details><summary>from which runs</summary>", ""]
        lines += ["| from | MLflow `tracking_key` | config_hash | commit |", "|---|---|---|---|"]
        for name, origin in one["files"].items():
            lines.append(
                f"| `{name}` | `{origin['tracking_key']}` | `{origin['config_hash']}` | `{origin['git_commit'][:12]}` |"
            )
        lines += ["", "</details>"]
    return "\n".join([*lines, ""])


def to_html(answered: dict[str, Any]) -> str:
    """The page as one file, with its figures in it."""
    text = html.escape
    parts = [f"<!doctype html><meta charset='utf-8'><title>Claims and verdicts</title><style>{STYLE}</style>"]
    parts += ["<h1>Claims and verdicts</h1>", *(f"<p>{text(line)}</p>" for line in _introduction(answered) if line)]
    parts.append("<table><tr><th>claim<th>published<th>measured here [95 %]<th>verdict<th>settings tried<th>runs</tr>")
    for one in answered["claims"]:
        measured = "<br>".join(text(_brief(condition)) for condition in one["conditions"]) or text(one["why"])
        parts.append(
            f"<tr><td><a href='#{one['id']}'>{text(one['text'])}</a> ({text(one['source'])})"
            f"<td>{text(one['published'])}<td>{measured}<td class='{one['verdict']}'><b>{one['verdict']}</b>"
            f"<td>{one['settings'] if one['conditions'] else EMPTY}<td>{text(_runs(one))}</tr>"
        )
    parts.append("</table>")
    for one in answered["claims"]:
        parts.append(f"<h2 id='{one['id']}'>{text(one['text'])}</h2>")
        parts.append(f"<p>Published: {text(one['published'])} ({text(one['source'])}; {text(one['note'])}).")
        parts.append(f"Verdict: <b class='{one['verdict']}'>{one['verdict']}</b>. {text(one['why'])}</p><ul>")
        parts += [f"<li class='{condition['status']}'>{text(_long(condition))}" for condition in one["conditions"]]
        parts.append("</ul>")
        if one["figure"]:
            image = Path(one["image"])
            if image.is_file():
                encoded = base64.b64encode(image.read_bytes()).decode()
                parts.append(f"<p><img alt='{one['figure']}' src='data:image/png;base64,{encoded}'></p>")
        if one["files"]:
            parts.append("<details><summary>from which runs</summary><table>")
            parts.append("<tr><th>file<th>MLflow tracking_key<th>config_hash<th>commit</tr>")
            for name, origin in one["files"].items():
                cells = (name, origin["tracking_key"], origin["config_hash"], origin["git_commit"])
                parts.append("<tr>" + "".join(f"<td><code>{text(cell)}</code>" for cell in cells) + "</tr>")
            parts.append("</table></details>")
    return "\n".join(parts) + "\n"


def verdict(statuses: list[str], *, needs_all: bool = False) -> str:
    """Of a claim's conditions, as config/claims.yaml says; `not tested yet` where none was measured."""
    if all(status == MISSING for status in statuses):
        return NOT_TESTED
    if all(status == MET for status in statuses):
        return REPRODUCED
    if MET not in statuses and FAILED not in statuses:
        return NOT_TESTABLE
    return IN_PART if MET in statuses and not needs_all else NOT_REPRODUCED


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
    """All parts of an experiment's report. Raises DvpError for one that is missing or stale."""
    experiment = read_resolved(folder / "config.yaml")
    reports, files, found, figures = {}, {}, [], []
    for name in parts(experiment):
        path = folder / "report" / f"{name}.json"
        part = read_json(path, "config_hash", "tracking_key", "statistics", "figures", "files")
        check_fresh(path, part, experiment.config_hash("report"))
        reports[name] = part["tracking_key"]
        files |= part["files"]
        found += part["statistics"]
        figures += part["figures"]
    return {
        "scale": experiment.scale,
        "reports": reports,
        "files": files,
        "statistics": found,
        "figures": figures,
    }


def _answer_claim(claim: Claim, reports: dict[str, Any], folders: dict[str, Path]) -> dict[str, Any]:
    conditions = [
        _answer_condition(claim.id, condition, reports[condition.experiment]) for condition in claim.conditions
    ]
    value = "in words" if claim.value is None else f"{RELATIONS[claim.relation]}{claim.value:g} {claim.unit}"
    files: dict[str, Any] = {}
    for condition, answered in zip(claim.conditions, conditions, strict=True):
        origins = reports[condition.experiment]["files"]
        files |= {f"{folders[condition.experiment].name}/{name}": origins[name] for name in answered["sources"]}
    figure = image = None
    key, name = (claim.figure or "/").split("/")
    # A file of that name may be of an earlier run that drew it.
    if claim.figure and name in reports[key]["figures"]:
        figure, image = f"{folders[key].name}/{name}", str(folders[key] / "figures" / f"{name}.png")
    return {
        "id": claim.id,
        "text": claim.text,
        "source": claim.source,
        "note": claim.note or "no note",
        "published": value,
        "verdict": verdict([one["status"] for one in conditions], needs_all=claim.needs_all)
        if conditions
        else NOT_TESTABLE
        if claim.not_testable
        else NOT_TESTED,
        "why": claim.not_testable or claim.not_tested or "",
        "conditions": conditions,
        "settings": max((one["settings"] for one in conditions), default=0),
        "figure": figure,
        "image": image,
        "files": files,
    }


def _answer_condition(claim: str, condition: Condition, report: dict[str, Any]) -> dict[str, Any]:
    alike = [one for one in report["statistics"] if one["name"] == condition.statistic]
    found = [one for one in alike if condition.where.items() <= one["where"].items()]
    told = {"says": condition.says, "statistic": condition.statistic, "where": condition.where, "settings": len(alike)}
    if not found:
        return told | {"status": MISSING, "sources": [], "instead": _instead(condition, alike)}
    if len(found) > 1:
        raise DvpError(
            f"claim '{claim}': {condition.statistic}: {len(found)} statistics fit {condition.where}; "
            f"tell them apart by {', '.join(sorted(set(found[0]['where']) - set(condition.where)))}"
        )
    [one] = found
    measured = {key: one[key] for key in ("value", "low", "high", "unit", "how", "sources")}
    return told | measured | {"status": status(condition, one["low"], one["high"])}


def _instead(condition: Condition, alike: list[dict[str, Any]]) -> str:
    """What there is of a statistic that is not there as asked for."""
    if not alike:
        return f"{condition.experiment} measures no {condition.statistic}"
    others = {key: sorted({one["where"].get(key, "none") for one in alike}) for key in condition.where}
    lacking = [f"{key} {', '.join(others[key])}" for key, asked in condition.where.items() if asked not in others[key]]
    return f"{condition.experiment} has it of " + ("; ".join(lacking) or "other combinations")


def _introduction(answered: dict[str, Any]) -> list[str]:
    count = dict.fromkeys((REPRODUCED, IN_PART, NOT_REPRODUCED, NOT_TESTABLE, NOT_TESTED), 0)
    for one in answered["claims"]:
        count[one["verdict"]] += 1
    lines = [", ".join(f"{number} {name}" for name, number in count.items() if number) + ".", ""]
    lines += [
        "A condition is met if the whole 95 % interval lies where it says, failed if the whole interval lies "
        "elsewhere, open otherwise. Reproduced: all conditions met; in part: some; not reproduced: none, or not all "
        "where they mean something together only; not testable at this scale: all open, or for the reason given. The "
        "conditions were written down before the runs (config/claims.yaml, which also says what was changed since). "
        "Settings tried: how many values of the same statistic were looked at.",
    ]
    for scale in dict.fromkeys(one["scale"] for one in answered["experiments"].values()):
        lines += ["", f"Scale: {' '.join(scale.split())}"]
    return lines


def _link(one: dict[str, Any], folder: Path) -> str:
    return Path(os.path.relpath(one["image"], folder)).as_posix()


def _number(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.3g}"


def _interval(condition: dict[str, Any]) -> str:
    if condition["status"] == MISSING:
        return condition["instead"]
    numbers = [_number(condition[key]) for key in ("value", "low", "high")]
    return f"{numbers[0]} [{numbers[1]}, {numbers[2]}] {condition['unit']}"


def _brief(condition: dict[str, Any]) -> str:
    return f"{_interval(condition)}: {condition['status']}"


def _long(condition: dict[str, Any]) -> str:
    line = f"{condition['status']}: {condition['says']}. Measured: {_interval(condition)}"
    return line + (f" ({condition['how']})." if "how" in condition else ".")


def _runs(one: dict[str, Any]) -> str:
    if not one["files"]:
        return EMPTY
    commits = dict.fromkeys(origin["git_commit"][:7] for origin in one["files"].values())
    return f"{len(one['files'])}, commit {', '.join(commits)}"
