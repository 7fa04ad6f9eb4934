import datetime
import json
import math
import re

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dvp.data.sources import load
from dvp.data.verifier import grade
from dvp.errors import DvpError
from dvp.experiment.data import Columns, FileSource, GeneratedSource, HubSource

ROWS = {
    "dapo_math_17k": 12,
    "gsm8k": 7473,
    "gsm8k_test": 1319,
    "aime25": 30,
    "aime24": 30,
    "amc23": 40,
    "math500": 500,
}


@pytest.mark.parametrize("name", ROWS)
def test_real_files_with_the_catalogues_columns(real_sources, name):
    rows = load(real_sources[name], name)
    assert len(rows) == ROWS[name]
    assert all(row.problem and row.answer and row.id for row in rows)
    if name != "math500":
        assert all(row.answer.removeprefix("-").isdecimal() for row in rows)


def test_the_instruction_of_dapo_is_removed(real_sources):
    rows = load(real_sources["dapo_math_17k"], "dapo")
    assert rows[0].problem.startswith("In triangle $ABC$")
    assert rows[0].problem.endswith("$a + b + c$.")
    assert not any("Answer:" in row.problem or "step by step" in row.problem for row in rows)
    assert rows[0].answer == "34"
    assert rows[0].id == "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"


def test_every_hub_source_of_the_catalogue_is_pinned(catalogue):
    hub = [source for source in catalogue.values() if isinstance(source, HubSource)]
    assert len(hub) == 7
    assert all(source.revision for source in hub)


def test_generated():
    source = GeneratedSource(kind="generated", generator="stories", count=5, seed=0, steps=[2, 2])
    rows = load(source, "stories")
    assert [row.id for row in rows] == ["1", "2", "3", "4", "5"]
    assert all(row.solution.endswith(f"Answer: {row.answer}") for row in rows)


def test_all_file_types_and_the_hub_give_the_same_rows(tmp_path, monkeypatch, shared, real_sources):
    import datasets

    rows = [json.loads(line) for line in (shared / "dapo_math_sample.jsonl").read_text().splitlines()]
    source = real_sources["dapo_math_17k"]
    expected = load(source, "x")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pd.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    for file in ("a.json", "a.parquet"):
        assert load(source.model_copy(update={"path": tmp_path / file}), "x") == expected

    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    fields = {"columns": source.columns, "strip": source.strip}
    hub = HubSource(kind="hub", path="a/b", name="main", split="train", revision="0" * 40, **fields)
    assert load(hub, "x") == expected
    assert asked == [(("a/b", "main"), {"split": "train", "revision": "0" * 40})]
    with pytest.raises(DvpError, match=r"no column 'question'; found data_source, prompt.0.content, prompt.0.role"):
        load(hub.model_copy(update={"columns": Columns(problem="question", answer="ability")}), "x")


def test_unreachable_hub(monkeypatch):
    import datasets

    def load_dataset(*args, **options):
        raise ConnectionError("Couldn't reach 'a/b' on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    columns = Columns(problem="problem", answer="answer")
    source = HubSource(kind="hub", path="a/b", split="test", revision="0" * 40, columns=columns)
    with pytest.raises(DvpError) as error:
        load(source, "sources.b")
    message = str(error.value)
    assert message.startswith("sources.b: cannot load a/b (test, revision 000")
    assert "Couldn't reach 'a/b' on the Hub; without the hub" in message
    assert "{kind: file, path: FILE.parquet, columns: …}" in message
    assert "\n" not in message


GOOD = {"problem": "1 + 1?", "answer": "2"}


@pytest.mark.parametrize(
    ("second", "options", "message"),
    [
        ({"problem": "", "answer": "1"}, {}, "row 2: column 'problem': the problem is empty"),
        ({"problem": " \n", "answer": "1"}, {}, "row 2: column 'problem': the problem is empty"),
        (
            {"problem": "Go.", "answer": "1"},
            {"strip": ["Go."]},
            "row 2: column 'problem': the problem is empty",
        ),
        ({"problem": None, "answer": "1"}, {}, "row 2: column 'problem': expected a text, found None"),
        ({"problem": 5, "answer": "1"}, {}, "row 2: column 'problem': expected a text, found 5"),
        ({"problem": "a", "answer": None}, {}, "row 2: column 'answer': expected an answer, found None"),
        ({"problem": "a", "answer": ""}, {}, "row 2: column 'answer': expected an answer, found ''"),
        ({"problem": "a", "answer": ["1"]}, {}, "row 2: column 'answer': expected an answer, found ['1']"),
        ({"problem": "a"}, {}, "row 2: no column 'answer'; found problem"),
        (
            {"problem": "a", "answer": 2.5},
            {"answer_format": "number"},
            "row 2: column 'answer': expected a number that means an integer, such as 27.0, found 2.5",
        ),
        *(
            (
                {"problem": "a", "answer": value},
                {"answer_format": "number"},
                f"row 2: column 'answer': expected a number that means an integer, such as 27.0, found {value!r}",
            )
            for value in ("1_000", "nan", "1e999999999", "12 apples")
        ),
        (["a", "b"], {}, "row 2: expected an object with named columns, found ['a', 'b']"),
        *(
            ({"problem": "a", "answer": value}, {}, f"row 2: column 'answer': expected an answer, found {value}")
            for value in (math.nan, math.inf, -math.inf)
        ),
        (
            {"problem": "a", "answer": "1", "id": True},
            {"columns": {"problem": "problem", "answer": "answer", "id": "id"}},
            "row 2: column 'id': expected a text or a number, found True",
        ),
        (
            {"problem": "a \ud83d b", "answer": "1"},
            {},
            "row 2: not valid JSON: half a character (\\ud83d without its other half), which is no text",
        ),
    ],
)
def test_malformed_rows(write_rows, second, options, message):
    good = GOOD | {"id": 1} if "columns" in options else GOOD
    source = write_rows("bad", [good, second], **options)
    with pytest.raises(DvpError) as error:
        load(source, "sources.bad")
    assert str(error.value) == f"sources.bad: {source.path}: {message}"


@pytest.mark.parametrize(
    ("value", "answer_format", "expected"),
    [
        (0.00001, "plain", "0.00001"),
        (-1.5e-7, "plain", "-0.00000015"),
        (1e22, "plain", "10000000000000000000000"),
        (2.5, "plain", "2.5"),
        (27.0, "number", "27"),
        ("12345678901234567891", "number", "12345678901234567891"),
        ("1.2e3", "number", "1200"),
    ],
)
def test_a_number_is_written_without_an_exponent_and_to_its_last_digit(write_rows, value, answer_format, expected):
    """The verifier reads the e of 1e-05 as Euler's number."""
    source = write_rows("good", [{"problem": "a", "answer": value}], answer_format=answer_format)
    answer = load(source, "sources.good")[0].answer
    assert answer == expected
    assert grade(f"Answer: {expected}", answer)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (True, "True"),
        (b"0", "b'0'"),
        (datetime.date(2020, 1, 1), "datetime.date(2020, 1, 1)"),
    ],
)
def test_what_a_parquet_column_holds_is_an_answer_or_refused(tmp_path, value, found):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"problem": ["1 + 1?"], "answer": [value]}), path)
    source = FileSource(kind="file", path=path, columns=Columns(problem="problem", answer="answer"))
    with pytest.raises(DvpError) as error:
        load(source, "x")
    assert str(error.value) == f"x: {path}: row 1: column 'answer': expected an answer, found {found}"


def damaged(content: bytes) -> bytes:
    """With another byte in the middle of a data page."""
    return content[:3000] + bytes(255 - byte for byte in content[3000:3400]) + content[3400:]


@pytest.mark.parametrize(
    ("columns", "damage", "message"),
    [
        ([("problem", ["a"]), ("answer", ["1"]), ("answer", ["2"])], None, "column 'answer' is there twice"),
        (
            [("problem", [f"{n * n * n} + {n}?" for n in range(2000)]), ("answer", ["1"] * 2000)],
            damaged,
            "cannot be read after row 0 (OSError: Corrupt snappy",
        ),
        (
            [("problem", pa.array([b"a\xff"]).cast(pa.string(), safe=False)), ("answer", ["1"])],
            None,
            "cannot be read after row 0 (UnicodeDecodeError: ",
        ),
        (
            [("problem", ["a"]), ("answer", pa.array([2**60], pa.timestamp("ms")))],
            None,
            "cannot be read after row 0 (",
        ),
        ([("problem", ["a"]), ("answer", ["1"])], lambda content: content[:4] + bytes(99) + content[103:], ""),
    ],
)
def test_damaged_parquet_files(tmp_path, columns, damage, message):
    path = tmp_path / "a.parquet"
    names, values = zip(*columns, strict=True)
    pq.write_table(pa.table(list(values), names=list(names)), path, use_dictionary=False)
    if damage:
        path.write_bytes(damage(path.read_bytes()))
    source = FileSource(kind="file", path=path, columns=Columns(problem="problem", answer="answer"))
    with pytest.raises(DvpError) as error:
        load(source, "x")
    assert str(error.value).startswith(f"x: {path}: {message}")
    assert "\n" not in str(error.value)


def test_missing_columns(write_rows):
    rows = [{"question": "1 + 1?", "meta": {"truth": "2", "tags": [{"name": "a"}]}}]
    source = write_rows("named", rows)
    with pytest.raises(DvpError) as error:
        load(source, "sources.named")
    found = "no column 'problem'; found question, meta.truth, meta.tags.0.name"
    assert str(error.value) == f"sources.named: {source.path}: row 1: {found}"
    source = write_rows("nested", rows, columns={"problem": "question", "answer": "meta.answer"})
    with pytest.raises(DvpError, match=r"no column 'meta.answer'; found question, meta.truth"):
        load(source, "sources.nested")
    source = write_rows("good", rows, columns={"problem": "question", "answer": "meta.truth", "id": "meta.tags.0.name"})
    assert load(source, "sources.good")[0][:3] == ("a", "1 + 1?", "2")


def test_gsm8k_answers(write_rows):
    source = write_rows("g", [{"problem": "a", "answer": "Two.\n#### 1,234"}], answer_format="gsm8k")
    assert load(source, "x")[0].answer == "1234"
    source = write_rows("h", [GOOD], answer_format="gsm8k")
    with pytest.raises(DvpError, match="row 1: column 'answer': expected a result after ####, found '2'"):
        load(source, "x")


def test_answers_that_are_numbers_or_boxed(write_rows):
    answers = [27.0, "27.0", 27, -1.0]
    rows = [{"problem": "a", "answer": answer} for answer in answers]
    assert [r.answer for r in load(write_rows("n", rows, answer_format="number"), "x")] == [
        "27",
        "27",
        "27",
        "-1",
    ]
    boxed = [{"problem": "a", "answer": "\\boxed{204}"}, {"problem": "a", "answer": 25}]
    assert [r.answer for r in load(write_rows("b", boxed), "x")] == ["204", "25"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.jsonl", b'{"problem": "a", "answer": "1"}\n\n{"problem": \n', "row 3: not valid JSON"),
        ("a.jsonl", b"\xff\xfe\n", "not UTF-8 text"),
        ("a.jsonl", b"", "no rows"),
        ("a.json", b'{"problem": "a"}', "expected a list of objects, found dict"),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', "is it JSON lines? Then call it .jsonl"),
        ("a.json", b"[]", "no rows"),
        (
            "a.jsonl",
            b'{"problem": "a", "answer": "1", "answer": "2"}',
            "row 1: not valid JSON: key 'answer' is there twice",
        ),
        (
            "a.json",
            b'[{"problem": "a", "answer": "1"} ,\n {"problem": "a", "x": {"y": 1, "y": 1}}]',
            "row 2: not valid JSON: key 'y' is there twice",
        ),
        ("a.json", b'[{"problem": "a \\ud83d b", "answer": "1"}]', "row 1: not valid JSON: half a character (\\ud83d"),
        ("a.jsonl", b'{"problem": "a", "answer": %b}' % (b"1" * 5000), "row 1: not valid JSON: Exceeds the limit"),
        ("a.json", b'[{"problem": "a", "answer": %b}]' % (b"1" * 5000), "not valid JSON (Exceeds the limit"),
        ("a.jsonl", b"[" * 100_000 + b"]" * 100_000, "row 1: not valid JSON: nested too deeply"),
        ("a.json", b"[" * 100_000 + b"]" * 100_000, "not valid JSON (nested too deeply)"),
        ("a.parquet", b"nothing of the kind", "not a Parquet file"),
        ("a.csv", b"problem,answer\n", "expected a file that ends in .json, .jsonl, .parquet"),
    ],
)
def test_unreadable_files(tmp_path, file, content, message):
    path = tmp_path / file
    path.write_bytes(content)
    source = FileSource(kind="file", path=path, columns=Columns(problem="problem", answer="answer"))
    with pytest.raises(DvpError) as error:
        load(source, "sources.a")
    assert str(error.value).startswith(f"sources.a: {path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file(tmp_path):
    path = tmp_path / "gone.jsonl"
    source = FileSource(kind="file", path=path, columns=Columns(problem="problem", answer="answer"))
    with pytest.raises(DvpError) as error:
        load(source, "sources.gone")
    assert str(error.value) == f"sources.gone: {path}: no such file"


def one_backslash(text: str) -> str:
    """What JSON makes of a text whose backslashes were not escaped."""
    return re.sub(r"\\[bfnrt]", lambda escape: json.loads(f'"{escape[0]}"'), text)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        *[(text, text.strip("$")) for text in (r"\frac{1}{2}", r"\text{ m}", r"$\beta$", r"$\theta$", r"\boxed{3}")],
        *[(f"${text}$", text[1:]) for text in (r"a\neq b", r"3\times 4", r"x\tan^2 x", r"x\to\infty", r"a\rangle")],
        *[(f"${text}$", text[2:]) for text in (r"3 \ne 0", r"x \to 0", r"a \notin B", r"a \rightarrow b")],
        ("Page\x0c2", None),
        ("\x00", None),
        ("1\x1b[0m", None),
    ],
)
@pytest.mark.parametrize("column", ["problem", "answer"])
def test_what_one_backslash_in_json_left_is_refused(write_rows, text, command, column):
    r"""`\frac` is then a form feed and `rac`, and no longer what the author wrote."""
    good = {"problem": "What?", "answer": "1"}
    source = write_rows("a", [good, good | {column: one_backslash(text)}])
    with pytest.raises(DvpError) as error:
        load(source, "sources.a")
    line = str(error.value)
    assert line.startswith(f"sources.a: {source.path}: row 2: column '{column}': a control character, '\\")
    cause = command and re.match(r"\\[a-z]+", command)[0]
    assert line.endswith(f": most likely {cause} with one backslash where two are needed" if cause else "; remove it")
    assert "\n" not in line


def test_white_space_that_may_stand_in_a_text_is_kept(write_rows):
    texts = [
        *(
            "x\tf(x)\n1\tan external angle\n2\texternal",
            "where\nu = 3\r\nequal",
            "\n\to 5 apples\n\to 6",
            "a\tto b",
            "one\re",
        ),
        r"\frac{1}{2}\text{ m}\neq\theta\to\rho",
    ]
    rows = [{"problem": text, "answer": "1"} for text in texts]
    assert [row.problem for row in load(write_rows("a", rows), "sources.a")] == [text.strip() for text in texts]
