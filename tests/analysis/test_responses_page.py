"""The page of responses: whole, true to the rows, and harmless whatever a model wrote."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_up_results import make_experiment

from dvp.analysis.responses import Recorded, page, page_data, recorded, visible, worst_tokens, write_begun, write_page
from dvp.errors import DvpError
from dvp.files import checksums, write_json
from dvp.training.responses import SCHEMA, WRITTEN

HOSTILE = [
    "</script><script>document.title = 'hacked'</script>",
    "<img src=x onerror=\"document.title='hacked'\">",
    "<!--",
    "{{ title }}{% raw %}",
    "&amp;\u2028\u2029",
    "\x1b[2J\x1b]0;hacked\x07",
    "\u202egnissim",
    "'\"\\\n\t",
    "",
]
STEPS = (1, 10, 14, 15, 16, 20)


def row(step: int, index: int, rng: np.random.Generator, length: int = 12, **changes) -> dict:
    """A response whose every tenth token is outside the safe vocabulary."""
    sampled = -rng.exponential(size=length).astype(np.float32)
    trained = sampled + rng.normal(scale=0.02, size=length).astype(np.float32)
    safe = np.arange(length) % 10 != 9
    return {
        "step": step,
        "index": index,
        "chosen": "first" if index < 2 else "worst",
        "problem": f"p{step}",
        "prompt": "A jar holds 5 nuts.\n",
        "answer": "7",
        "reward": float(rng.integers(2)),
        "truncated": False,
        "rejected": None,
        "token_id": list(range(length)),
        "text": [f" t{place}" for place in range(length)],
        "infer_log_prob": sampled.tolist(),
        "log_prob": (trained - np.float32(0.01)).tolist(),
        "pruned_log_prob": np.where(safe, trained, np.float32(-50)).tolist(),
        "in_safe": safe.tolist(),
        "weight": safe.astype(float).tolist(),
        "advantage": [0.5] * length,
        "written": [True] * length,
    } | changes


def write_run(folder: Path, rows: list[dict], collapsed_at: int | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    schema = SCHEMA if all(all(one["written"]) for one in rows) else SCHEMA.append(WRITTEN)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / "responses.parquet")
    metrics = [
        {"step": step, "reward": 0.5, "k3": 0.01, "gradient_norm": None, "entropy": 2.0}
        | {"collapsed": collapsed_at is not None and step >= collapsed_at}
        for step in range(1, 21)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in metrics))
    write_json(folder / "train.json", {"files": checksums(folder)})


@pytest.fixture
def experiment():
    return make_experiment(seeds=[0])


@pytest.fixture
def rows() -> list[dict]:
    """24 responses of one run; the largest mismatch is 3 nats, at token 4 of response 1 of step 15."""
    rng = np.random.default_rng(0)
    made = [row(step, index, rng) for step in STEPS for index in (0, 1, 5, 7)]
    worst = made[STEPS.index(15) * 4 + 1]
    worst["pruned_log_prob"][4] = worst["infer_log_prob"][4] - 3.0
    return made


@pytest.fixture
def make_run(experiment, tmp_path):
    def make(rows: list[dict], number: int = 0, collapsed_at: int | None = None) -> Recorded:
        run = experiment.runs[number]
        write_run(tmp_path / "runs" / run.path, rows, collapsed_at)
        return recorded(experiment, tmp_path, run)

    return make


class Elements(HTMLParser):
    """Every start tag, and the text of the block of data."""

    def __init__(self):
        super().__init__()
        self.tags, self.data, self._inside = [], "", False

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = ("id", "data") in attrs

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.data += data


def parsed(html: str) -> Elements:
    elements = Elements()
    elements.feed(html)
    return elements


def test_the_page_holds_the_numbers_of_the_file(experiment, make_run, rows):
    data = json.loads(parsed(page(experiment, [make_run(rows, collapsed_at=16)])).data)
    [run] = data["runs"]
    assert run["collapsed_at"] == 16
    assert run["label"] == "RLOO (naive) · fp32 · seed 0"
    assert run["metrics"]["15"] == {"reward": 0.5, "k3": 0.01, "gradient_norm": None, "entropy": 2.0}
    assert len(run["responses"]) == len(rows)
    for shown, expected in zip(run["responses"], rows, strict=True):
        for name in ("step", "index", "chosen", "problem", "prompt", "answer", "reward", "truncated", "rejected"):
            assert shown[name] == expected[name]
        assert [data["tokens"][token] for token in shown["tokens"]] == [
            list(pair) for pair in zip(expected["token_id"], expected["text"], strict=True)
        ]
        trained, sampled = np.array(expected["pruned_log_prob"]), np.array(expected["infer_log_prob"])
        assert shown["infer_log_prob"] == pytest.approx(sampled, rel=1e-3)
        assert shown["log_ratio"] == pytest.approx(trained - sampled, rel=1e-2, abs=1e-9)
        assert shown["log_prob"] == pytest.approx(expected["log_prob"], rel=1e-3)
        assert shown["outside"] == [9]
        assert shown["weight"] == expected["weight"]
        assert shown["advantage"] == 0.5  # constant


def test_a_run_that_prunes_nothing_says_log_p_once(make_run, rows):
    for one in rows:
        one |= {"pruned_log_prob": one["log_prob"], "in_safe": [True] * 12, "weight": [1.0] * 12}
    [run] = page_data([make_run(rows)], 10**6)["runs"]
    assert all("log_prob" not in one and one["weight"] == 1.0 for one in run["responses"])


def test_the_page_loads_nothing_and_lets_nothing_be_loaded(experiment, make_run, rows):
    html = page(experiment, [make_run(rows)])
    assert not re.search(r"https?:|//\w|@import|url\(", html.replace(parsed(html).data, ""))
    elements = parsed(html)
    assert not any({"src", "href", "style"} & set(attributes) for _, attributes in elements.tags)
    assert not any(name.startswith("on") for _, attributes in elements.tags for name in attributes)
    policy = next(attributes["content"] for _, attributes in elements.tags if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def hostile_run(make_run) -> Recorded:
    rng = np.random.default_rng(0)
    text = [*HOSTILE, " t"]
    everywhere = {"text": text, "prompt": "".join(HOSTILE), "answer": HOSTILE[0], "problem": HOSTILE[1]}
    return make_run([row(1, 0, rng, len(text), **everywhere)])


def test_hostile_text_is_data_and_nothing_else(experiment, make_run):
    benign = [row(1, 0, np.random.default_rng(0), len(HOSTILE) + 1)]
    hostile = page(experiment, [hostile_run(make_run)])
    described = make_experiment(seeds=[0], description="<script> & more")
    assert "&lt;script&gt; &amp; more" in page(described, [hostile_run(make_run)])
    tags = [tag for tag, _ in parsed(hostile).tags]
    assert tags == [tag for tag, _ in parsed(page(experiment, [make_run(benign, 1)])).tags]
    assert hostile.count("</script>") == 2
    data = json.loads(parsed(hostile).data)
    # Control characters are made visible; all else is there to the letter.
    assert [text for _, text in data["tokens"]] == [*map(visible, HOSTILE), " t"]
    assert visible(HOSTILE[0]) == HOSTILE[0]
    assert visible(HOSTILE[5]) == "⟨U+001B⟩[2J⟨U+001B⟩]0;hacked⟨U+0007⟩"
    assert visible(HOSTILE[6]) == "⟨U+202E⟩gnissim"
    assert visible("a\tb\nc é 日本") == "a\tb\nc é 日本"


def test_a_page_that_would_be_too_large_leaves_out_evenly_and_says_so(experiment, make_run, rows):
    runs = [make_run(rows, number, collapsed_at=15 if number else None) for number in (0, 1)]
    one = len(json.dumps(page_data(runs, 10**6)["runs"][0]["responses"][0], ensure_ascii=False).encode())
    data = page_data(runs, 6 * one)
    steps = [[shown["step"] for shown in run["responses"]] for run in data["runs"]]
    # The last, the first, one halfway; the collapse before them.
    assert steps[0] == [1, 14, 20]
    assert 15 in steps[1]
    assert abs(len(steps[0]) - len(steps[1])) <= 1
    whole, part = page(experiment, runs), page(experiment, runs, 6 * one)
    assert "48 of 48 recorded responses are on this page." in whole
    shown = sum(map(len, steps))
    assert f"{shown} of 48 recorded responses are on this page, chosen evenly over runs" in part
    assert len(part) < len(whole)


def test_the_page_of_an_experiment_holds_all_its_runs_unaltered(experiment, make_run, rows, tmp_path):
    runs = [make_run(rows[:4], number) for number in range(len(experiment.runs))]
    write_page(experiment, tmp_path, tmp_path / "responses.html")
    assert (tmp_path / "responses.html").read_text(encoding="utf-8") == page(experiment, runs)
    path = tmp_path / "runs" / experiment.runs[1].path / "responses.parquet"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DvpError, match=r"responses\.parquet: altered since it was written"):
        write_page(experiment, tmp_path, tmp_path / "responses.html")


def test_of_a_long_response_the_ends_and_the_worst_tokens_are_shown(make_run):
    rng = np.random.default_rng(0)
    length = 4000
    long = row(1, 0, rng, length)
    for place in (200, 1800, 2500, 2530):
        long["pruned_log_prob"][place] = long["infer_log_prob"][place] + 5.0
    long["pruned_log_prob"][3991] += 2.0
    [run] = page_data([make_run([long])], 10**6)["runs"]
    [shown] = run["responses"]
    assert shown["ranges"] == [(0, 500), (1750, 1851), (2450, 2581), (3500, 4000)]
    places = [place for low, high in shown["ranges"] for place in range(low, high)]
    large = [place for place, value in zip(places, shown["log_ratio"], strict=True) if value == 5.0]
    assert large == [200, 1800, 2500, 2530]
    assert [places[place] for place in shown["outside"]] == [place for place in places if place % 10 == 9]


def test_the_worst_tokens_are_of_the_safe_vocabulary():
    one = row(1, 0, np.random.default_rng(0))
    one["pruned_log_prob"][9] = -50.0
    one["pruned_log_prob"][3] = one["infer_log_prob"][3] + 0.5
    one["pruned_log_prob"][6] = one["infer_log_prob"][6] - 0.9
    assert worst_tokens(one, 2) == [6, 3]
    assert len(worst_tokens(one, 100)) == 11


def with_tool(**changes) -> dict:
    """A response whose tokens 4 and 5 are a tool's answer."""
    made = row(1, 0, np.random.default_rng(0), written=[place not in (4, 5) for place in range(12)], **changes)
    for place in (4, 5):
        made["in_safe"][place] = True
        for name in ("infer_log_prob", "log_prob", "pruned_log_prob", "weight", "advantage"):
            made[name][place] = 0.0
    return made


def test_a_tools_tokens_are_shown_as_such(make_run):
    one = with_tool()
    run = make_run([one])
    (shown,) = page_data([run], 10**6)["runs"][0]["responses"]
    assert (shown["by_tool"], shown["own_length"], shown["length"]) == ([4, 5], 10, 12)
    assert not {4, 5} & set(worst_tokens(run.rows([0])[0], 100))
    assert run.range == make_run([row(1, 0, np.random.default_rng(0))]).range


def test_the_page_of_the_runs_that_have_begun(make_run, rows, tmp_path, experiment):
    with pytest.raises(DvpError, match="no run has recorded responses yet"):
        write_begun(experiment, tmp_path)
    made = make_run(rows, 1)
    assert write_begun(experiment, tmp_path).read_text(encoding="utf-8") == page(experiment, [made])


def test_what_was_recorded_before_a_failure_is_shown(make_run, rows, tmp_path, experiment):
    """Snakemake has deleted the run's files; what training left beside the checkpoints is there."""
    make_run(rows)
    place = tmp_path / "runs" / experiment.runs[0].path
    (place / "checkpoints/0123456789ab").mkdir(parents=True)
    (place / "responses.parquet").rename(place / "checkpoints/0123456789ab/responses.parquet")
    (place / "metrics.jsonl").unlink()
    (place / "train.json").unlink()
    shown = recorded(experiment, tmp_path, experiment.runs[0])
    assert len(shown.table) == len(rows)
    assert shown.collapsed_at is None
    assert page_data([shown], 10**6)["runs"][0]["metrics"] == {}


# --- a real browser ---


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium")
def test_a_browser_shows_the_tokens_and_runs_nothing_else(experiment, make_run, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(page(experiment, [hostile_run(make_run)]), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        ["chromium", *options, "--virtual-time-budget=5000", "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    spans = re.findall(r'<span data-place="\d+"', done.stdout)
    assert len(spans) == len(HOSTILE) + 1
    assert "<title>Responses of tiny</title>" in done.stdout
    assert "Largest |log p − log q|" in done.stdout
