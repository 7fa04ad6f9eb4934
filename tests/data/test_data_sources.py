"""Sources: what a row becomes, the same from every kind of file, and one line for what is wrong with one."""

import datetime
import json
import math
from pathlib import Path

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dvp.data.sources import load
from dvp.data.verifier import grade
from dvp.errors import DvpError
from dvp.experiment.data import Columns, FileSource, GeneratedSource, HubSource
from dvp.experiment.loading import read_yaml

ROWS = {"dapo_math_17k": 12, "gsm8k": 7473, "gsm8k_test": 1319, "aime25": 30, "aime24": 30, "amc23": 40, "math500": 500}
GOOD = {"problem": "1 + 1?", "answer": "2"}
PLAIN = Columns(problem="problem", answer="answer")


def refusal(source: FileSource | HubSource) -> str:
    """What is said of a source, without its name."""
    with pytest.raises(DvpError) as error:
        load(source, "x")
    line = str(error.value)
    assert "\n" not in line
    assert line.startswith(f"x: {source.path}: " if isinstance(source, FileSource) else "x: ")
    return line.removeprefix(f"x: {source.path}: ")


@pytest.fixture
def write_file(tmp_path):
    def write(name: str, content: bytes | pa.Table, **options) -> FileSource:
        if isinstance(content, pa.Table):
            pq.write_table(content, tmp_path / name, use_dictionary=False)
        else:
            (tmp_path / name).write_bytes(content)
        return FileSource(kind="file", path=tmp_path / name, columns=PLAIN, **options)

    return write


@pytest.mark.parametrize("name", ROWS)
def test_real_files_with_the_catalogues_columns(real_sources, name):
    rows = load(real_sources[name], name)
    assert len(rows) == ROWS[name]
    assert all(row.problem and row.answer and row.id for row in rows)
    assert name == "math500" or all(row.answer.removeprefix("-").isdecimal() for row in rows)


def test_the_instruction_of_dapo_is_removed(real_sources):
    rows = load(real_sources["dapo_math_17k"], "dapo")
    assert not any("Answer:" in row.problem or "step by step" in row.problem for row in rows)
    assert rows[0].problem.startswith("In triangle $ABC$")
    assert rows[0][2::-2] == ("34", "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079")


def test_generated():
    rows = load(GeneratedSource(kind="generated", generator="stories", count=5, seed=0, steps=[2, 2]), "stories")
    assert [row.id for row in rows] == ["1", "2", "3", "4", "5"]
    assert all(row.solution.endswith(f"Answer: {row.answer}") for row in rows)
    assert {row.solution.count("=") for row in rows} == {2}


def test_all_file_types_and_the_hub_give_the_same_rows(tmp_path, monkeypatch, shared, real_sources):
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
    hub = HubSource(kind="hub", path="a/b", name="main", split="train", revision="1" * 40, **fields)
    assert load(hub, "x") == expected
    assert asked == [(("a/b", "main"), {"split": "train", "revision": "1" * 40})]
    missing = hub.model_copy(update={"columns": Columns(problem="question", answer="ability")})
    assert "no column 'question'; found data_source, prompt" in refusal(missing)


def test_an_unreachable_hub_is_one_line(monkeypatch):
    def load_dataset(*args, **options):
        raise ConnectionError("Couldn't reach 'a/b' on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = refusal(HubSource(kind="hub", path="a/b", split="test", revision="1" * 40, columns=PLAIN))
    assert message.startswith("x: a/b (test): cannot be read: revision 111")
    assert "Couldn't reach 'a/b' on the Hub; where nodes have no internet, make data/manifest.json on" in message


def test_shards_that_disagree_on_another_column_are_read(tmp_path, monkeypatch):
    """As those of DPAO_filter: `extra_info` has an index and a split in one, in another an index of another type."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "hub/train").mkdir(parents=True)
    for number, extra in enumerate(({"index": 1, "split": "train"}, {"index": "a"})):
        prompt, reward = (
            [{"role": "user", "content": f"{number} + 1?"}],
            {"ground_truth": f"{number + 1}", "style": "rule"},
        )
        row = {"prompt": prompt, "reward_model": reward, "extra_info": extra}
        pd.DataFrame([row]).to_parquet(tmp_path / f"hub/train/{number}.parquet")
    entry = read_yaml(Path(__file__).parents[2] / "config/catalogue/sources.yaml")["dpao_filter"]
    hub = HubSource(**entry | {"path": str(tmp_path / "hub"), "revision": "1" * 40})
    rows = sorted(load(hub, "dpao_filter"))
    assert [(row.problem, row.answer) for row in rows] == [("0 + 1?", "1"), ("1 + 1?", "2")]


def test_a_revision_that_is_a_placeholder_is_refused():
    message = refusal(HubSource(kind="hub", path="a/b", split="test", revision="0" * 40, columns=PLAIN))
    assert "revision: a placeholder; expected the commit" in message


@pytest.mark.parametrize(
    ("second", "options", "message"),
    [
        ({"problem": " \n"}, {}, "column 'problem': expected a text, found ' \\n'"),
        ({"problem": "Go."}, {"strip": ["Go."]}, "column 'problem': the problem is empty"),
        ({"problem": 5}, {}, "column 'problem': expected a text, found 5"),
        *(({"answer": value}, {}, f"column 'answer': expected an answer, found {value}") for value in (None, ["1"])),
        *(
            ({"answer": value}, {}, f"column 'answer': expected an answer, found {value}")
            for value in (math.nan, -math.inf)
        ),
        *(
            ({"answer": value}, {"answer_format": "number"}, "column 'answer': expected a number that means an integer")
            for value in (2.5, "1_000", "nan", "1e999999999", "12 apples")
        ),
        ({}, {"answer_format": "gsm8k"}, "column 'answer': expected a result after ####, found '2'"),
        ({"id": True}, {"columns": GOOD | {"id": "id"}}, "column 'id': expected a text or a number, found True"),
    ],
)
def test_malformed_rows(write_rows, second, options, message):
    columns = {name: name for name in options.get("columns", GOOD)}
    first = GOOD | {"answer": "#### 2" if options.get("answer_format") == "gsm8k" else "2", "id": 1}
    source = write_rows("bad", [first, GOOD | second], **options | {"columns": columns})
    assert refusal(source).startswith(f"row 2: {message}")


@pytest.mark.parametrize(
    ("value", "answer_format", "expected"),
    [
        (0.00001, "plain", "0.00001"),
        (1e22, "plain", "10000000000000000000000"),
        (25, "plain", "25"),
        ("\\boxed{204}", "plain", "204"),
        (27.0, "number", "27"),
        ("12345678901234567891", "number", "12345678901234567891"),
        ("1.2e3", "number", "1200"),
        ("Two.\n#### 1,234", "gsm8k", "1234"),
    ],
)
def test_answers_in_the_form_that_the_verifier_reads(write_rows, value, answer_format, expected):
    """No exponent, whose e is Euler's number to the verifier, and every digit."""
    answer = load(write_rows("good", [GOOD | {"answer": value}], answer_format=answer_format), "x")[0].answer
    assert answer == expected
    assert grade(f"Answer: {expected}", answer)


def test_names_reach_into_nested_values(write_rows):
    rows = [{"question": "1 + 1?", "meta": {"truth": "2", "tags": [{"name": "a"}]}}]
    assert refusal(write_rows("a", rows)) == "row 1: no column 'problem'; found question, meta"
    columns = {"problem": "question", "answer": "meta.truth", "id": "meta.tags.0.name"}
    assert load(write_rows("b", rows, columns=columns), "x")[0][:3] == ("a", "1 + 1?", "2")
    assert "no column 'meta.tags.1.name'" in refusal(
        write_rows("c", rows, columns=columns | {"id": "meta.tags.1.name"})
    )


@pytest.mark.parametrize("value", [math.nan, True, b"0", datetime.date(2020, 1, 1)])
def test_what_a_parquet_column_holds_is_an_answer_or_refused(write_file, value):
    source = write_file("a.parquet", pa.table({"problem": ["1 + 1?"], "answer": [value]}))
    assert refusal(source) == f"row 1: column 'answer': expected an answer, found {value!r}"


def table(**columns) -> pa.Table:
    return pa.table({"problem": ["a"], "answer": ["1"]} | columns)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pa.table([["a"], ["1"], ["2"]], names=["problem", "answer", "answer"]), "duplicate column"),
        (table(problem=pa.array([b"a\xff"]).cast(pa.string(), safe=False)), "UnicodeDecodeError: "),
        (table(answer=pa.array([2**60], pa.timestamp("ms"))), ""),
    ],
)
def test_parquet_files_that_python_cannot_hold(write_file, content, message):
    assert refusal(write_file("a.parquet", content)).startswith(f"cannot be read: {message}")


def test_a_damaged_parquet_file_is_one_line(write_file):
    """Cut or changed in its head or in the middle of a data page."""
    problems = [f"{n * n * n} + {n}?" for n in range(2000)]
    source = write_file("a.parquet", pa.table({"problem": problems, "answer": ["1"] * 2000}))
    content = source.path.read_bytes()
    for start, length in ((4, 99), (3000, 400), (len(content) - 8, 8)):
        source.path.write_bytes(
            content[:start] + bytes(255 - byte for byte in content[start:][:length]) + content[start + length :]
        )
        assert refusal(source).startswith("cannot be read: ")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"problem": "a", "answer": "1"}\n\n{"problem": \n',
            "row 3: not valid JSON: Expecting value, column",
        ),
        ("a.jsonl", b"\xff\xfe\n", "UnicodeDecodeError"),
        ("a.jsonl", b"", "no rows"),
        ("a.jsonl", b'["a"]', "row 1: expected an object with named columns, found ['a']"),
        ("a.jsonl", b'{"problem": "a", "problem": "b"}', "key 'problem' is a duplicate"),
        ("a.jsonl", b'{"problem": "a", "answer": %b}' % (b"1" * 5000), "Exceeds the limit"),
        ("a.jsonl", b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        ("a.json", b'{"problem": "a"}', "expected a list of objects, found dict"),
        ("a.json", b'[{"problem": "a", "problem": "b"}]', "key 'problem' is a duplicate"),
        ("a.parquet", b"nothing of the kind", "ArrowInvalid"),
        ("a.csv", b"problem,answer\n", "expected a file that ends in .json, .jsonl, .parquet"),
        ("gone.jsonl", None, "no such file"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_unreadable_files(write_file, file, content, message):
    source = write_file(file, content or b"")
    if content is None:
        source.path.unlink()
    assert message in refusal(source)


def test_white_space_that_may_stand_in_a_text_is_kept(write_rows):
    texts = ["x\tf(x)\n1\tan angle\n2\texternal", "where\nu = 3\r\nequal", "\n\to 5 apples\n\to 6", "a\tto b", "one\re"]
    rows = [{"problem": text, "answer": "1"} for text in [*texts, r"\frac{1}{2}\text{ m}\neq\theta\to\rho"]]
    assert [row.problem for row in load(write_rows("a", rows), "x")] == [row["problem"].strip() for row in rows]
