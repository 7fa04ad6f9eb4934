"""Turn sources into the two tables that training and evaluation read, and account for every row left out.

1. Rows of a source with the same text (but for Unicode's composition and white space) are one problem: the first is
   kept, or none if their answers differ. A problem whose answer cannot be read is left out, too.
2. Training problems are put in the order of the SHA-256 of their normalised text (NFKC, case, white space): it looks
   random, needs no seed, and does not depend on the order of the source. The first `held_out` become the task
   `held_out`.
3. A training problem that shares a word n-gram with a problem of any task is contaminated and left out. Words
   are runs of letters and digits of the normalised text: `$x^2$` is `x 2`. A task's problem of fewer than n words is
   compared as a whole: a training problem that equals it is contaminated; if it has at least SHORTEST words, so is one
   that contains it among other words. Without n all problems are compared whole, character by character.
   An n-gram of more than COMMON training problems is a phrase ("can be written as m/n where m and n are
   relatively prime …"): one alone proves nothing, half of a problem's n-grams together do. A short problem that more
   than COMMON training problems contain ("What is the value of $x$?"), as templates do, proves nothing either.
4. `limit` keeps the first that are left.
"""

import hashlib
import re
import unicodedata
from collections import Counter
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from dvp.answers.comparison import equal
from dvp.data import puzzles
from dvp.data.sources import Row, load, locate
from dvp.data.verifier import check_reference
from dvp.errors import DvpError
from dvp.experiment.data import DataConfig, FileSource, GeneratedSource, HubSource
from dvp.files import atomic_path, sha256_file

TRAIN_COLUMNS = ("id", "source", "problem", "answer", "prompt")
EVAL_COLUMNS = ("task", "id", "problem", "answer", "prompt")
COMMON = 10
SHORTEST = 5
"""Fewest words of a short problem that identify it; fewer ("Compute $2 + 2$.") occur in others by chance."""
_WORD = re.compile(r"\w+")


def prepare(
    data: DataConfig,
    sources: dict[str, GeneratedSource | HubSource | FileSource],
    folder: Path,
) -> dict:
    """Write train.parquet and eval.parquet into `folder` and return the manifest (JSON-able).

    A prompt is the template with {problem} replaced; a tokenizer's chat template (data.chat) is applied
    where the tokenizer is. The same input gives the same bytes.

    Raises DvpError, naming the source and row, or the task, at fault.
    """
    accounts: dict[str, dict] = {}
    loaded: dict[str, list[Row]] = {}
    for name in dict.fromkeys([*data.evaluation, data.train]):
        loaded[name], accounts[name] = _distinct(name, sources[name], data)

    ordered = sorted(loaded[data.train], key=_order)
    tasks = {"held_out": ordered[: data.held_out]} if data.held_out else {}
    tasks |= {name: loaded[name] for name in data.evaluation}
    candidates = ordered[data.held_out :]
    clean, contaminated, phrases = _decontaminated(candidates, tasks, data.decontamination.ngram)
    train = clean[: data.limit]
    if not train:
        raise DvpError(
            f"data.train: no problem of source '{data.train}' is left: "
            f"{accounts[data.train]['rows_read']} rows read, {len(ordered)} distinct problems, "
            f"{len(ordered) - len(candidates)} held out, {len(contaminated)} contaminated"
        )
    for task, rows in tasks.items():
        if not rows:
            raise DvpError(f"task '{task}': no problem is left after duplicates with conflicting answers were dropped")
        if repeated := [row_id for row_id, count in Counter(row.id for row in rows).items() if count > 1]:
            raise DvpError(
                f"task '{task}': the id '{repeated[0]}' names two problems; without columns.id rows are numbered"
            )
    files = {
        "train.parquet": (TRAIN_COLUMNS, [{"source": data.train} | row._asdict() for row in train]),
        "eval.parquet": (EVAL_COLUMNS, [{"task": task} | row._asdict() for task in tasks for row in tasks[task]]),
    }
    for file, (columns, rows) in files.items():
        for row in rows:  # str.replace, as problems contain braces
            row["prompt"] = data.prompt_template.replace("{problem}", row["problem"])
        with atomic_path(folder / file) as temporary:
            table = pa.Table.from_pylist(rows, pa.schema([(column, pa.string()) for column in columns]))
            pq.write_table(table, temporary, compression="zstd")
    return {
        "sources": accounts,
        "contaminated": contaminated,
        "common_phrases": phrases,
        "counts": {
            "train": len(train),
            "over_limit": len(clean) - len(train),
            "evaluation": {task: len(rows) for task, rows in tasks.items()},
        },
        "files": {file: sha256_file(folder / file) for file in files},
    }


def normalised(problem: str) -> str:
    """Return the text by which a problem is looked for in others.

    Different problems may share it: 2² and 22, X and x.
    """
    return " ".join(unicodedata.normalize("NFKC", problem).casefold().split())


def _same(problem: str) -> str:
    """Return the text by which two rows are one problem."""
    return " ".join(unicodedata.normalize("NFC", problem).split())


def _order(row: Row) -> tuple[str, str]:
    digest = hashlib.sha256(normalised(row.problem).encode("utf-8", "surrogatepass")).hexdigest()
    return digest, _same(row.problem)


def _distinct(name: str, source: GeneratedSource | HubSource | FileSource, data: DataConfig) -> tuple[list[Row], dict]:
    """Return the distinct problems of a source, their answers checked, and the account of what was dropped."""
    where = f"sources.{name}"
    rows = load(source, where)
    first: dict[str, Row] = {}
    answers: dict[str, dict[str, int]] = {}
    counts: Counter[str] = Counter()
    key_of = cache(_same)
    for row in rows:
        key = key_of(row.problem)
        counts[key] += 1
        first.setdefault(key, row)
        answers.setdefault(key, {}).setdefault(row.answer, row.number)
    kept, unreadable, conflicts = [], [], []
    for key, row in tqdm(first.items(), desc=f"checking {where}", unit=" answers", delay=3, mininterval=1):
        try:
            if data.reward is None:
                check_reference(row.answer)
        except DvpError as error:
            unreadable.append({"id": row.id, "row": row.number, "answer": row.answer, "reason": str(error)})
            continue
        other = data.reward is not None  # only the user's function knows which references mean the same
        differing = {a: n for a, n in answers[key].items() if a == row.answer or other or not _agree(row.answer, a)}
        if len(differing) > 1:
            if 2 * counts[key] > len(rows) and not isinstance(source, GeneratedSource):
                raise DvpError(f"{locate(source, where)}: {_shared(row.problem, counts[key], len(rows), source)}")
            conflicts.append({"id": row.id, "answers": list(differing), "rows": list(differing.values())})
        else:
            kept.append(row)
    if len(unreadable) / len(first) > data.unreadable_answers:
        raise DvpError(
            f"{locate(source, where)}: {_named(unreadable)}; {len(unreadable)} of {len(first)} problems have such an "
            f"answer, more than data.unreadable_answers allows ({data.unreadable_answers:g} of them)"
        )
    checksum = {"sha256": sha256_file(source.path)} if isinstance(source, FileSource) else {}
    return kept, {
        "description": source.model_dump(mode="json") | checksum,
        "rows_read": len(rows),
        "duplicates_dropped": len(rows) - len(first),
        "unreadable_answers": unreadable,
        "conflicting_answers": conflicts,
        "distinct": len(kept),
    }


def _shared(problem: str, count: int, rows: int, source: HubSource | FileSource) -> str:
    """Describe the error that most rows have one problem, as when the column is that of a system message."""
    column = source.columns.problem
    following = re.sub(r"(?<=\.)\d+(?=\.|$)", lambda place: str(int(place[0]) + 1), column, count=1)
    message = f"; if that is a system message, the problem may be in '{following}'" if following != column else ""
    words = problem if len(problem) <= 60 else problem[:60] + "…"
    return (
        f"column '{column}': {count} of {rows} rows have the problem {words!r}, with different answers; expected each "
        f"row's own problem{message}"
    )


def left_out(manifest: dict, evaluated: list[str]) -> list[str]:
    """List what a manifest says was left out, one line per source; `evaluated` are the sources that are tasks."""
    lines = []
    for name, account in manifest["sources"].items():
        conflicts, unreadable = account["conflicting_answers"], account["unreadable_answers"]
        rows = ", ".join(" and ".join(map(str, conflict["rows"])) for conflict in conflicts[:3])
        counts = {
            "repeated problems": (account["duplicates_dropped"], ""),
            "problems whose rows differ in the answer": (len(conflicts), f" (rows {rows})"),
            "problems with an unreadable answer": (len(unreadable), f" ({_named(unreadable)})"),
        }
        parts = [f"{what}: {count}{which}" for what, (count, which) in counts.items() if count]
        fewer = "fewer problems are evaluated: " if name in evaluated and (conflicts or unreadable) else ""
        if parts:
            lines.append(f"sources.{name}: {fewer}left out of {account['rows_read']} rows: {'; '.join(parts)}")
    if contaminated := manifest["contaminated"]:
        lines.append(f"data.train: left out, as they have words of a task's problem: {len(contaminated)}")
    return [f"{line}; see data/manifest.json" for line in lines]


def _named(unreadable: list[dict]) -> str:
    return "; ".join(f"row {entry['row']}: {entry['reason']}" for entry in unreadable[:3])


def _agree(answer: str, other: str) -> bool:
    """Return whether two answers to one problem agree: equal, or solutions of the same puzzle."""
    if not (puzzles.is_puzzle(answer) and puzzles.is_puzzle(other)):
        return equal(answer, other)
    try:
        puzzles.check(other)
    except DvpError:
        return False
    return puzzles.read(answer)._replace(answer="") == puzzles.read(other)._replace(answer="")


def _words(problem: str) -> list[str]:
    return _WORD.findall(normalised(problem))


def _runs(words: list[str], length: int) -> list[str]:
    return list(dict.fromkeys(" ".join(words[i : i + length]) for i in range(len(words) - length + 1)))


def _ngrams(problem: str, n: int | None) -> list[str]:
    """Return the distinct n-grams of a problem's words; the whole, marked by "= ", if it is shorter or n is None."""
    if n is None:
        return ["= " + normalised(problem)]
    return _runs(_words(problem), n) or ["= " + " ".join(_words(problem))]


def _decontaminated(
    rows: list[Row], tasks: dict[str, list[Row]], n: int | None
) -> tuple[list[Row], list[dict], dict[str, int]]:
    """Return the clean rows, an account of the others, and how often each common phrase was found."""
    owners: dict[str, list[tuple[str, str]]] = {}
    sizes: dict[tuple[str, str], int] = {}
    short: set[int] = set()
    for task, problem in ((task, problem) for task, problems in tasks.items() for problem in problems):
        ngrams = _ngrams(problem.problem, n)
        sizes[task, problem.id] = len(ngrams)
        for ngram in ngrams:
            owners.setdefault(ngram, []).append((task, problem.id))
        if n is not None and SHORTEST <= (length := len(_words(problem.problem))) < n:
            short.add(length)
    shared, held = [], []
    for row in tqdm(rows, desc="comparing with the tasks", unit=" problems", delay=3, mininterval=1):
        words = _words(row.problem) if short else []
        runs = ("= " + run for length in sorted(short) if length < len(words) for run in _runs(words, length))
        shared.append([ngram for ngram in _ngrams(row.problem, n) if ngram in owners])
        held.append([run for run in runs if run in owners])
    counts = Counter(ngram for matching in shared + held for ngram in matching)

    clean, contaminated = [], []
    for row, matching, whole in zip(rows, shared, held, strict=True):
        telling = [ngram for ngram in matching + whole if counts[ngram] <= COMMON]
        overlap = Counter(owner for ngram in matching for owner in owners[ngram])
        copied = [owner for owner, count in overlap.items() if 2 * count >= sizes[owner]]
        if telling or copied:
            task, problem = copied[0] if copied else owners[telling[0]][0]
            ngram = next(ngram for ngram in telling + matching if (task, problem) in owners[ngram])
            contaminated.append({"id": row.id, "task": task, "task_id": problem, "ngram": ngram.removeprefix("= ")})
        else:
            clean.append(row)
    phrases = {ngram.removeprefix("= "): count for ngram, count in counts.items() if count > COMMON}
    return clean, contaminated, phrases
