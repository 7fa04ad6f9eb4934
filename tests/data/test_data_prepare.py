"""From sources to tables: what is one problem, what is left out, and what is said of it."""

import json
from pathlib import Path

import pandas as pd
import pytest

from dvp.data.prepare import COMMON, EVAL_COLUMNS, TRAIN_COLUMNS, left_out, normalised, prepare
from dvp.data.puzzles import Puzzle
from dvp.data.verifier import check_reference
from dvp.errors import DvpError
from dvp.experiment.data import DataConfig
from dvp.files import sha256_file

TASKS = ["aime24", "aime25", "amc23", "math500", "gsm8k_test"]
GRID = [list("*OO"), list("XO#")]
SOLVED, ALSO = (Puzzle("shortest_path", f"right {moves}", {"matrix": GRID}) for moves in ("right down", "down right"))


def tables(folder):
    return pd.read_parquet(folder / "train.parquet"), pd.read_parquet(folder / "eval.parquet")


@pytest.fixture
def made(tmp_path, write_rows):
    """Prepare source `s`, and `t` for a task, from rows (a text has the answer 1); returns the manifest."""

    def make(s, t=(), folder="out", options=None, **data) -> dict:
        sources = {}
        for name, rows in {"s": s, "t": t}.items():
            listed = [{"problem": row, "answer": "1"} if isinstance(row, str) else row for row in rows]
            sources[name] = write_rows(f"{folder}-{name}", listed, **options or {})
        return prepare(DataConfig(train="s", evaluation=["t"] if t else [], **data), sources, tmp_path / folder)

    return make


def named(texts: dict[str, str]) -> list[dict]:
    return [{"problem": problem, "answer": answer} for problem, answer in texts.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("train", "held_out", "distinct"), [("stories", 200, 4000), ("gsm8k", 100, 7473)])
def test_real_sources(tmp_path, real_sources, train, held_out, distinct):
    data = DataConfig(train=train, held_out=held_out, evaluation=TASKS, prompt_template="Q: {problem}\nA:")
    manifest = prepare(data, real_sources, tmp_path)
    training, evaluation = tables(tmp_path)
    assert (tuple(training.columns), tuple(evaluation.columns)) == (TRAIN_COLUMNS, EVAL_COLUMNS)
    sizes = {"held_out": held_out, "aime24": 30, "aime25": 30, "amc23": 40, "math500": 500, "gsm8k_test": 1319}
    assert manifest["counts"]["evaluation"] == sizes == evaluation.groupby("task").size().to_dict()
    assert manifest["counts"]["train"] == len(training) == distinct - len(manifest["contaminated"]) - held_out
    held = evaluation[evaluation.task == "held_out"]
    assert not set(map(normalised, held.problem)) & set(map(normalised, training.problem))
    assert not set(held.id) & set(training.id)
    assert (training.prompt == "Q: " + training.problem + "\nA:").all()
    assert manifest["files"] == {file: sha256_file(tmp_path / file) for file in manifest["files"]}
    json.dumps(manifest)


def test_same_bytes_twice_and_for_shuffled_rows(made, tmp_path):
    rows = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i), "id": f"p{i}"} for i in range(20)]
    options = {"columns": {"problem": "problem", "answer": "answer", "id": "id"}}
    orders = {"one": rows, "two": rows, "three": rows[::-1]}
    digests = [made(order, folder=name, options=options, held_out=5)["files"] for name, order in orders.items()]
    assert digests[0] == digests[1] == digests[2]
    limited = made(rows, folder="limited", options=options, held_out=5, limit=4)
    assert limited["counts"] == {"train": 4, "over_limit": 11, "evaluation": {"held_out": 5}}
    (train, held), (few, same) = tables(tmp_path / "one"), tables(tmp_path / "limited")
    assert few.equals(train[:4])
    assert same.equals(held)
    assert list(train.id) != sorted(train.id)


def test_a_hidden_evaluation_problem_is_found(tmp_path, shared, real_sources, write_rows):
    aime = [json.loads(line) for line in (shared / "aime25.jsonl").read_text().splitlines()]
    hidden = max(aime, key=lambda row: len(row["problem"]))
    rows = named({"What is the colour of the sky over the sea in the morning of a rather fine day?": "1"})
    rows += named({f"Dear pupil, solve. {hidden['problem'].upper()}  Good luck!": hidden["answer"]})
    sources = real_sources | {"mine": write_rows("mine", rows)}
    (entry,) = prepare(DataConfig(train="mine", evaluation=TASKS), sources, tmp_path)["contaminated"]
    assert (entry["id"], entry["task"], entry["task_id"]) == ("2", "aime25", hidden["id"])
    assert len(entry["ngram"].split()) == 13
    assert list(tables(tmp_path)[0].id) == ["1"]


def test_a_short_problem_is_found_whole_or_with_more_around_it(made, tmp_path):
    manifest = made(["what is  $2+2$", "What is 2 + 2 + 2?"], ["What is 2 + 2?"])
    assert manifest["contaminated"] == [{"id": "1", "task": "t", "task_id": "1", "ngram": "what is 2 2"}]
    task, five, pupil = (
        ["Simplify $(-k + 4) + (-2 + 3k)$."],
        "simplify k 4 2 3k",
        "Dear pupil: simplify $(-k+4)+(-2+3k)$",
    )
    contained = [f"{task[0]} Give your answer as a polynomial in $k$, with its terms in order.", pupil]
    manifest = made([*contained, "Simplify $(-k + 4) + (-2 + 5k)$. Explain.", "Simplify $k + 4$."], task, "short")
    found = sorted(manifest["contaminated"], key=lambda entry: entry["id"])
    assert found == [{"id": number, "task": "t", "task_id": "1", "ngram": five} for number in "12"]
    # What many hold is a template of theirs, but the problem itself is left out all the same.
    many = [f"{pupil}, pupil {'x' * i}" for i in range(1, COMMON + 2)]
    manifest = made([*many, pupil.removeprefix("Dear pupil: ")], task, "many")
    assert [entry["id"] for entry in manifest["contaminated"]] == [str(COMMON + 2)]
    assert manifest["common_phrases"] == {five: COMMON + 2}


def test_a_common_phrase_alone_is_no_contamination_but_a_copy_is(made):
    phrase = " ".join(f"word{i}" for i in range(14))  # two 13-grams
    whole = " ".join([phrase, *(f"own{i}" for i in range(12))])
    rows = [f"Row {i} {i * i}: {phrase}" for i in range(COMMON + 1)]
    few = made([*rows[:2], "x"], [whole], "few")
    assert sorted(entry["id"] for entry in few["contaminated"]) == ["1", "2"]
    many = made(rows, [whole], "many")
    assert many["contaminated"] == []
    assert set(many["common_phrases"].values()) == {COMMON + 1}
    # Many copies of the whole problem make its every n-gram common; they are found all the same.
    found = made([*(f"Row {i}: {whole}" for i in range(20)), *rows], [whole], "copies")
    assert (len(found["contaminated"]), found["counts"]["train"]) == (20, len(rows))


def test_without_n_only_the_same_problem_is_contaminated(made):
    """The words of a grid are its open and blocked cells, which many have alike; * and # are none."""
    grids, task = ["* O # O", "O * # O", "# O * O"], ["o *  # O"]
    assert made(grids, task, decontamination={"ngram": None})["counts"]["train"] == 2
    with pytest.raises(DvpError, match="3 contaminated"):
        made(grids, task, decontamination={"ngram": 13})


@pytest.mark.parametrize(
    ("second", "conflicts"),
    [(ALSO, 0), (SOLVED._replace(answer="right down"), 1), (SOLVED._replace(metadata={"matrix": GRID[::-1]}), 1)],
)
def test_two_solutions_are_no_conflict_and_two_puzzles_are(made, second, conflicts):
    answers = {"a a": SOLVED, "a  a": second, "b": SOLVED, "c": SOLVED}
    manifest = made(named({text: puzzle.reference() for text, puzzle in answers.items()}), held_out=1)
    account = manifest["sources"]["s"]
    assert (len(account["conflicting_answers"]), account["distinct"]) == (conflicts, 3 - conflicts)


def test_conflicting_answers(made):
    answers = {
        "What is  one?": "1",
        "What is one?": "2",
        "What is \u00e9t\u00e9?": "2",
        "What is e\u0301te\u0301?": "2.0",
    }
    manifest = made(named(answers | {"What is three?": "3"}), held_out=1)
    account = manifest["sources"]["s"]
    assert account["conflicting_answers"] == [{"id": "1", "answers": ["1", "2"], "rows": [1, 2]}]
    differ = "problems whose rows differ in the answer: 1 (rows 1 and 2); see data/manifest.json"
    assert left_out(manifest, []) == [f"sources.s: left out of 5 rows: repeated problems: 2; {differ}"]
    assert (account["rows_read"], account["duplicates_dropped"], account["distinct"]) == (5, 2, 2)
    assert account["description"]["sha256"] == sha256_file(Path(account["description"]["path"]))


def test_prompts_may_contain_braces(made, tmp_path):
    made(
        [f"Find ${{{i}}}$ {{problem}} {{0}}" for i in range(2)],
        held_out=1,
        prompt_template="{problem} \\boxed{}",
        chat=True,
    )
    for table in tables(tmp_path / "out"):
        assert table.prompt[0] == table.problem[0] + " \\boxed{}"


def test_an_unreadable_answer_leaves_out_its_problem(made, tmp_path):
    """One such row of a hundred does not stop the preparation, and nobody has to search for it."""
    rows = named({f"What is {i} ^ {i}?": "}{" if i == 6 else "1" for i in range(100)})
    manifest = made([*rows, rows[6] | {"answer": "7"}], [row | {"problem": f"Of t: {row['problem']}"} for row in rows])
    with pytest.raises(DvpError) as error:
        check_reference("}{")
    for source in "st":
        (entry,) = manifest["sources"][source]["unreadable_answers"]
        assert entry == {"id": "7", "row": 7, "answer": "}{", "reason": str(error.value)}
    assert manifest["counts"] == {"train": 99, "over_limit": 0, "evaluation": {"t": 99}}
    assert not any((table.id == "7").any() for table in tables(tmp_path / "out"))
    left = f"problems with an unreadable answer: 1 (row 7: {error.value}); see data/manifest.json"
    assert left_out(manifest, ["t"]) == [
        f"sources.t: fewer problems are evaluated: left out of 100 rows: {left}",
        f"sources.s: left out of 101 rows: repeated problems: 1; {left}",
    ]


def test_more_unreadable_answers_than_allowed_are_refused(made, tmp_path):
    rows = named({f"What is {i} ^ {i}?": "}{" if i == 98 else "1" for i in range(99)})
    with pytest.raises(
        DvpError, match=r"row 99: the answer '}{' is .*; 1 of 99 problems have such an answer, more than"
    ):
        made(rows, held_out=1)
    assert not (tmp_path / "out/train.parquet").exists()
    assert made(rows, held_out=1, unreadable_answers=0.02)["sources"]["s"]["distinct"] == 98


def test_problems_that_differ_in_a_sign_stay_different(made, tmp_path):
    """Case and superscripts are mathematics: none is merged, whatever the answers; a task's is looked for without."""
    texts = ["What is 2² + n?", "What is 22 + n?", "What is 22 + N?", "What is ２２ + n?", "What is 2₂ + n?"]
    rows = named({text: str(i) for i, text in enumerate(texts)})
    manifest, again = made(rows, ["What is one?"], "one"), made(rows[::-1], ["What is one?"], "two")
    assert manifest["counts"]["train"] == again["counts"]["train"] == 5
    assert left_out(manifest, ["t"]) == []
    assert list(tables(tmp_path / "one")[0].problem) == list(tables(tmp_path / "two")[0].problem)
    manifest = made([*rows, "What is three?"], ["what is 2² + N?"])
    assert manifest["counts"]["train"] == 1
    (line,) = left_out(manifest, ["t"])
    assert line == "data.train: left out, as they have words of a task's problem: 5; see data/manifest.json"


def test_nothing_left(made):
    none = "source 's' is left: 1 rows read, 1 distinct problems, 1 held out, 0 contaminated"
    with pytest.raises(DvpError, match=none):
        made(["What is one?"], held_out=5)
    with pytest.raises(DvpError, match=r"source 's' is left: .* 1 contaminated"):
        made(["What is one?"], ["What is one?"])
    with pytest.raises(DvpError, match="task 't': no problem is left"):
        made(["What is one?"], named({"a a": "1", "a  a": "2", "b b": "1", "b  b": "2"}))


@pytest.mark.parametrize("own", [0, 1, 2])
def test_a_problem_that_most_rows_have_is_refused(made, own):
    """verl's prompt may begin with a system message, which is every row's; a few rows may have none."""
    system = {"role": "system", "content": "Reason step by step."}
    rows = [
        {"prompt": [system] * (i >= own) + [{"role": "user", "content": f"What is {i}?"}], "answer": str(i)}
        for i in range(5)
    ]
    columns = {"columns": {"problem": "prompt.0.content", "answer": "answer"}}
    with pytest.raises(DvpError) as error:
        made(rows, options=columns)
    assert str(error.value).endswith(
        f"column 'prompt.0.content': {5 - own} of 5 rows have the problem 'Reason step by step.', with different "
        "answers; expected each row's own problem; if that is a system message, the problem may be in "
        "'prompt.1.content'"
    )
    columns["columns"]["problem"] = "prompt.1.content"
    assert own or made(rows, folder="user", options=columns)["counts"]["train"] == 5


def test_a_repeated_problem_with_one_answer_is_kept(made):
    assert made(named({"What is one?": "1"}) * 5)["sources"]["s"]["duplicates_dropped"] == 4


def test_ids_that_are_equal_as_numbers_stay_different(made, tmp_path):
    ids = ["01", "1", "1.0", "1e0"]
    rows = [{"problem": f"What is {i}?", "answer": "1", "id": name} for i, name in enumerate(ids)]
    made(["What is one?"], rows, options={"columns": {"problem": "problem", "answer": "answer"}})
    columns = {"problem": "problem", "answer": "answer", "id": "id"}
    made([{"problem": "What is six?", "answer": "6", "id": "6"}], rows, "ids", options={"columns": columns})
    assert list(tables(tmp_path / "ids")[1].id) == ids


@pytest.mark.parametrize(
    "answer",
    ["proof", r"\text{Proof}", "Proof.", "See solution", "N/A", "not provided", "notfound", "No answer", "nan"],
)
def test_placeholders_are_left_out_and_too_many_refused(made, answer):
    rows = named({f"Show that {i} = {i}.": answer if i == 6 else "1" for i in range(100)})
    (entry,) = made(rows)["sources"]["s"]["unreadable_answers"]
    assert entry["reason"] == f"the answer {answer!r} is a placeholder, which says that no answer is given"
    with pytest.raises(
        DvpError, match=r"row 7: the answer .* is a placeholder.*; 1 of 99 problems have such an answer"
    ):
        made(rows[:-1], folder="refused")


def test_task_ids_are_unique(made):
    rows = [{"problem": text, "answer": "1", "id": 7} for text in "abc"]
    with pytest.raises(DvpError, match="task 't': the id '7' names two problems"):
        made(rows[:1], rows[1:], options={"columns": {name: name for name in rows[0]}})
