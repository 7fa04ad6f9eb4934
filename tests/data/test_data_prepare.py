import json

import pandas as pd
import pytest

from dvp.data.prepare import COMMON, EVAL_COLUMNS, TRAIN_COLUMNS, left_out, normalised, prepare
from dvp.data.puzzles import Puzzle
from dvp.data.verifier import check_reference
from dvp.errors import DvpError
from dvp.experiment.data import DataConfig
from dvp.files import sha256_file

TASKS = ["aime24", "aime25", "amc23", "math500", "gsm8k_test"]
WORDS = [f"word{i}" for i in range(14)]


def tables(folder):
    return pd.read_parquet(folder / "train.parquet"), pd.read_parquet(folder / "eval.parquet")


@pytest.mark.slow
@pytest.mark.parametrize(("train", "held_out", "distinct"), [("stories", 200, 4000), ("gsm8k", 100, 7473)])
def test_real_sources(tmp_path, real_sources, train, held_out, distinct):
    data = DataConfig(train=train, held_out=held_out, evaluation=TASKS, prompt_template="Q: {problem}\nA:")
    manifest = prepare(data, real_sources, tmp_path)
    training, evaluation = tables(tmp_path)
    assert tuple(training.columns) == TRAIN_COLUMNS
    assert tuple(evaluation.columns) == EVAL_COLUMNS
    sizes = {"held_out": held_out, "aime24": 30, "aime25": 30, "amc23": 40, "math500": 500, "gsm8k_test": 1319}
    assert manifest["counts"]["evaluation"] == sizes == evaluation.groupby("task").size().to_dict()
    assert manifest["counts"]["train"] == len(training)
    assert len(training) + len(manifest["contaminated"]) + held_out == distinct
    held = evaluation[evaluation.task == "held_out"]
    assert not set(map(normalised, held.problem)) & set(map(normalised, training.problem))
    assert not set(held.id) & set(training.id)
    assert (training.prompt == "Q: " + training.problem + "\nA:").all()
    for file, digest in manifest["files"].items():
        assert sha256_file(tmp_path / file) == digest
    json.dumps(manifest)


def test_dapo_repeats_are_dropped(tmp_path, real_sources):
    manifest = prepare(DataConfig(train="dapo_math_17k", evaluation=["amc23"]), real_sources, tmp_path)
    account = manifest["sources"]["dapo_math_17k"]
    assert (account["rows_read"], account["duplicates_dropped"], account["distinct"]) == (12, 3, 9)
    assert account["conflicting_answers"] == []
    assert account["description"]["sha256"] == sha256_file(real_sources["dapo_math_17k"].path)
    assert manifest["counts"] == {"train": 9, "over_limit": 0, "evaluation": {"amc23": 40}}


def test_same_bytes_twice_and_for_shuffled_rows(tmp_path, write_rows):
    rows = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i), "id": f"p{i}"} for i in range(20)]
    columns = {"problem": "problem", "answer": "answer", "id": "id"}
    data = DataConfig(train="s", held_out=5)
    digests = []
    for name, content in (("one", rows), ("two", rows), ("three", rows[::-1])):
        sources = {"s": write_rows(name, content, columns=columns)}
        digests.append(prepare(data, sources, tmp_path / name)["files"])
    assert digests[0] == digests[1] == digests[2]
    limited = prepare(data.model_copy(update={"limit": 4}), sources, tmp_path / "limited")
    assert limited["counts"] == {"train": 4, "over_limit": 11, "evaluation": {"held_out": 5}}
    (train, held), (few, same) = tables(tmp_path / "one"), tables(tmp_path / "limited")
    assert few.equals(train[:4])
    assert same.equals(held)
    assert list(train.id) != sorted(train.id)


def test_a_hidden_evaluation_problem_is_found(tmp_path, shared, real_sources, write_rows):
    aime = [json.loads(line) for line in (shared / "aime25.jsonl").read_text().splitlines()]
    hidden = max(aime, key=lambda row: len(row["problem"]))
    rows = [
        {
            "problem": "What is the colour of the sky over the sea in the morning of a rather fine day?",
            "answer": "1",
        },
        {
            "problem": f"Dear pupil, solve. {hidden['problem'].upper()}  Good luck!",
            "answer": hidden["answer"],
        },
    ]
    sources = real_sources | {"mine": write_rows("mine", rows)}
    manifest = prepare(DataConfig(train="mine", evaluation=TASKS), sources, tmp_path)
    (entry,) = manifest["contaminated"]
    assert (entry["id"], entry["task"], entry["task_id"]) == ("2", "aime25", hidden["id"])
    assert len(entry["ngram"].split()) == 13
    assert list(tables(tmp_path)[0].id) == ["1"]


def test_short_problems_are_compared_whole(tmp_path, write_rows):
    task = write_rows("task", [{"problem": "What is 2 + 2?", "answer": "4"}])
    rows = [{"problem": "what is  $2+2$", "answer": "4"}, {"problem": "What is 2 + 2 + 2?", "answer": "6"}]
    manifest = prepare(DataConfig(train="s", evaluation=["t"]), {"s": write_rows("s", rows), "t": task}, tmp_path)
    assert manifest["contaminated"] == [{"id": "1", "task": "t", "task_id": "1", "ngram": "what is 2 2"}]
    assert manifest["counts"]["train"] == 1


def test_a_short_problem_with_more_around_it_is_found(tmp_path, write_rows):
    task = write_rows("task", [{"problem": "Simplify $(-k + 4) + (-2 + 3k)$.", "answer": "2k+2"}])
    five = "simplify k 4 2 3k"
    contained = [
        "Simplify $(-k + 4) + (-2 + 3k)$. Give your answer as a polynomial in $k$, with its terms in order.",
        "Dear pupil: simplify $(-k+4)+(-2+3k)$",
    ]
    others = ["Simplify $(-k + 4) + (-2 + 5k)$. Explain.", "Simplify $k + 4$."]
    rows = [{"problem": text, "answer": "1"} for text in [*contained, *others]]
    data = DataConfig(train="s", evaluation=["t"])
    manifest = prepare(data, {"s": write_rows("s", rows), "t": task}, tmp_path)
    assert sorted(manifest["contaminated"], key=lambda entry: entry["id"]) == [
        {"id": number, "task": "t", "task_id": "1", "ngram": five} for number in "12"
    ]
    assert sorted(tables(tmp_path)[0].id) == ["3", "4"]
    # What many hold is a template of theirs, but the problem itself is left out all the same.
    many = [{"problem": f"{contained[1]}, pupil {'x' * i}", "answer": "1"} for i in range(1, COMMON + 2)]
    many.append({"problem": contained[1].removeprefix("Dear pupil: "), "answer": "1"})
    manifest = prepare(data, {"s": write_rows("many", many), "t": task}, tmp_path)
    assert [entry["id"] for entry in manifest["contaminated"]] == [str(COMMON + 2)]
    assert manifest["common_phrases"] == {five: COMMON + 2}


@pytest.mark.slow
def test_every_problem_of_math500_is_found_in_a_longer_one(tmp_path, shared, real_sources, write_rows):
    problems = [json.loads(line)["problem"] for line in (shared / "math500.jsonl").read_text().splitlines()]
    rows = [{"problem": f"{problem} Show how you found it, step by step.", "answer": "1"} for problem in problems]
    rows += [{"problem": f"Dear pupil, do this one: {problem}", "answer": "1"} for problem in problems]
    rows.append({"problem": "x", "answer": "1"})
    manifest = prepare(
        DataConfig(train="s", evaluation=["math500"]), {"s": write_rows("s", rows), **real_sources}, tmp_path
    )
    # Three have fewer than five words: "Simplify $\sqrt{242}$."
    assert manifest["counts"]["train"] == 2 * 3 + 1


def test_a_common_phrase_alone_is_no_contamination_but_a_copy_is(tmp_path, write_rows):
    phrase = " ".join(WORDS)  # two 13-grams
    whole = " ".join([phrase, *(f"own{i}" for i in range(12))])
    task = write_rows("t", [{"problem": whole, "answer": "1"}])
    rows = [{"problem": f"Row {i} {i * i}: {phrase}", "answer": str(i)} for i in range(COMMON + 1)]
    data = DataConfig(train="s", evaluation=["t"])
    few = prepare(data, {"s": write_rows("few", [*rows[:2], {"problem": "x", "answer": "1"}]), "t": task}, tmp_path)
    assert sorted(entry["id"] for entry in few["contaminated"]) == ["1", "2"]
    many = prepare(data, {"s": write_rows("many", rows), "t": task}, tmp_path)
    assert many["contaminated"] == []
    assert set(many["common_phrases"].values()) == {COMMON + 1}
    # Many copies of the whole problem make its every n-gram common; they are found all the same.
    copies = [{"problem": f"Row {i}: {whole}", "answer": "1"} for i in range(20)]
    found = prepare(data, {"s": write_rows("copies", [*copies, *rows]), "t": task}, tmp_path)
    assert len(found["contaminated"]) == 20
    assert found["counts"]["train"] == len(rows)


def test_two_solutions_of_a_puzzle_are_no_conflict_and_two_puzzles_of_one_text_are(tmp_path, write_rows):
    grid = [list("*OO"), list("XO#")]
    right, other = (
        Puzzle("shortest_path", f"right {moves}", {"matrix": grid}) for moves in ("right down", "down right")
    )
    wrong = right._replace(answer="right down")
    blocked = Puzzle("shortest_path", "right down right", {"matrix": [list("*OX"), list("XO#")]})
    for name, second, conflicts in (("same", other, 0), ("wrong", wrong, 1), ("another", blocked, 1)):
        answers = {"a a": right, "a  a": second, "b": right, "c": right}
        rows = [{"problem": text, "answer": puzzle.reference()} for text, puzzle in answers.items()]
        data, sources = DataConfig(train="s", held_out=1), {"s": write_rows(name, rows)}
        account = prepare(data, sources, tmp_path / name)["sources"]["s"]
        assert len(account["conflicting_answers"]) == conflicts
        assert account["distinct"] == 3 - conflicts


def test_without_n_only_the_same_problem_is_contaminated(tmp_path, write_rows):
    """The words of a grid are its open and blocked cells, which many have alike; * and # are none."""
    rows = [{"problem": text, "answer": "1"} for text in ("* O # O", "O * # O", "# O * O")]
    task = [{"problem": "o *  # O", "answer": "1"}]
    sources = {"s": write_rows("s", rows), "task": write_rows("task", task)}
    for ngram, left in ((None, 2), (13, 0)):
        data = DataConfig(train="s", evaluation=["task"], decontamination={"ngram": ngram})
        if left:
            assert prepare(data, sources, tmp_path / "out")["counts"]["train"] == left
        else:
            with pytest.raises(DvpError, match="3 contaminated"):
                prepare(data, sources, tmp_path / "out")


def test_conflicting_answers(tmp_path, write_rows):
    rows = [
        {"problem": "What is  one?", "answer": "1"},
        {"problem": "What is one?", "answer": "2"},
        {"problem": "What is \u00e9t\u00e9?", "answer": "2"},
        {"problem": "What is e\u0301te\u0301?", "answer": "2.0"},
        {"problem": "What is three?", "answer": "3"},
    ]
    manifest = prepare(DataConfig(train="s", held_out=1), {"s": write_rows("s", rows)}, tmp_path)
    account = manifest["sources"]["s"]
    assert account["conflicting_answers"] == [{"id": "1", "answers": ["1", "2"], "rows": [1, 2]}]
    differ = "problems whose rows differ in the answer: 1 (rows 1 and 2); see data/manifest.json"
    assert left_out(manifest, []) == [f"sources.s: left out of 5 rows: repeated problems: 2; {differ}"]
    assert (account["rows_read"], account["duplicates_dropped"], account["distinct"]) == (5, 2, 2)


def test_prompts_may_contain_braces(tmp_path, write_rows):
    rows = [{"problem": f"Find ${{{i}}}$ {{problem}} {{0}}", "answer": "1"} for i in range(2)]
    data = DataConfig(train="s", held_out=1, prompt_template="{problem} \\boxed{}", chat=True)
    prepare(data, {"s": write_rows("s", rows)}, tmp_path)
    for table in tables(tmp_path):
        assert table.prompt[0] == table.problem[0] + " \\boxed{}"


def test_an_unreadable_answer_leaves_out_its_problem(tmp_path, write_rows):
    """One such row of a hundred does not stop the preparation, and nobody has to search for it."""
    rows = [{"problem": f"What is {i} ^ {i}?", "answer": "1"} for i in range(100)]
    rows[6]["answer"] = "}{"
    rows.append(rows[6] | {"answer": "7"})
    data, sources = DataConfig(train="s", evaluation=["t"]), {"s": write_rows("s", rows)}
    sources["t"] = write_rows("t", [row | {"problem": f"Of t: {row['problem']}"} for row in rows[:100]])
    manifest = prepare(data, sources, tmp_path)
    with pytest.raises(DvpError) as error:
        check_reference("}{")
    reason = str(error.value)
    for source in "st":
        (entry,) = manifest["sources"][source]["unreadable_answers"]
        assert entry == {"id": "7", "row": 7, "answer": "}{", "reason": reason}
    assert manifest["counts"] == {"train": 99, "over_limit": 0, "evaluation": {"t": 99}}
    assert not any((table.id == "7").any() for table in tables(tmp_path))
    of_t, of_s = left_out(manifest, data.evaluation)
    left = f"problems with an unreadable answer: 1 (row 7: {reason}); see data/manifest.json"
    assert of_t == f"sources.t: fewer problems are evaluated: left out of 100 rows: {left}"
    assert of_s == f"sources.s: left out of 101 rows: repeated problems: 1; {left}"


def test_more_unreadable_answers_than_allowed_are_refused(tmp_path, write_rows):
    rows = [{"problem": f"What is {i} ^ {i}?", "answer": "1"} for i in range(99)] + [{"problem": "b", "answer": "}{"}]
    source = write_rows("s", rows[-99:])
    with pytest.raises(DvpError) as error:
        prepare(DataConfig(train="s", held_out=1), {"s": source}, tmp_path)
    line = str(error.value)
    assert line.startswith(f"sources.s: {source.path}: row 99: the answer '}}{{' is ")
    assert line.endswith(
        "; 1 of 99 problems have such an answer, more than data.unreadable_answers allows (0.01 of them)"
    )
    assert not (tmp_path / "train.parquet").exists()
    data = DataConfig(train="s", held_out=1, unreadable_answers=0.02)
    assert prepare(data, {"s": source}, tmp_path)["sources"]["s"]["distinct"] == 98


def test_problems_that_differ_in_a_sign_stay_different(tmp_path, write_rows):
    """Case and superscripts are mathematics: none is merged, whatever the answers; a task's is looked for without."""
    texts = ["What is 2² + n?", "What is 22 + n?", "What is 22 + N?", "What is ２２ + n?", "What is 2₂ + n?"]
    rows = [{"problem": text, "answer": str(i)} for i, text in enumerate(texts)]
    data = DataConfig(train="s", evaluation=["t"])
    sources = {"s": write_rows("s", rows), "t": write_rows("t", [{"problem": "What is one?", "answer": "1"}])}
    manifest = prepare(data, sources, tmp_path / "one")
    assert (manifest["sources"]["s"]["distinct"], manifest["counts"]["train"]) == (5, 5)
    assert left_out(manifest, data.evaluation) == []
    again = prepare(data, sources | {"s": write_rows("again", rows[::-1])}, tmp_path / "two")
    assert list(tables(tmp_path / "one")[0].problem) == list(tables(tmp_path / "two")[0].problem)
    assert again["counts"] == manifest["counts"]
    sources["t"] = write_rows("t", [{"problem": "what is 2² + N?", "answer": "1"}])
    sources["s"] = write_rows("more", [*rows, {"problem": "What is three?", "answer": "3"}])
    manifest = prepare(data, sources, tmp_path)
    assert manifest["counts"]["train"] == 1
    (line,) = left_out(manifest, data.evaluation)
    assert line == "data.train: left out, as they have words of a task's problem: 5; see data/manifest.json"


def test_nothing_left(tmp_path, write_rows):
    one = write_rows("one", [{"problem": "What is one?", "answer": "1"}])
    with pytest.raises(
        DvpError, match="source 's' is left: 1 rows read, 1 distinct problems, 1 held out, 0 contaminated"
    ):
        prepare(DataConfig(train="s", held_out=5), {"s": one}, tmp_path)
    with pytest.raises(DvpError, match=r"source 's' is left: .* 1 contaminated"):
        prepare(DataConfig(train="s", evaluation=["t"]), {"s": one, "t": one}, tmp_path)
    both = write_rows("both", [{"problem": "a a", "answer": "1"}, {"problem": "a  a", "answer": "2"}])
    with pytest.raises(DvpError, match="task 't': no problem is left"):
        prepare(DataConfig(train="s", evaluation=["t"]), {"s": one, "t": both}, tmp_path)


def test_task_ids_are_unique(tmp_path, write_rows):
    rows = [{"problem": "a", "answer": "1", "id": 7}, {"problem": "b", "answer": "1", "id": 7}]
    task = write_rows("t", rows, columns={"problem": "problem", "answer": "answer", "id": "id"})
    one = write_rows("one", [{"problem": "What is one?", "answer": "1"}])
    with pytest.raises(DvpError, match="task 't': the id '7' names two problems"):
        prepare(DataConfig(train="s", evaluation=["t"]), {"s": one, "t": task}, tmp_path)
