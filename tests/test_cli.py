"""`dvp` from outside: what its help says, and the one line with which it refuses bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import NullPool, create_engine

from dvp import signals
from dvp.cli import LARGEST_SEED, app, main, report
from dvp.errors import Stopped
from dvp.experiment.loading import dump_experiment, load_experiment, parse_experiment, read_resolved, read_yaml
from dvp.files import checksums, sha256_file, write_json, write_text
from dvp.strict import Seed
from dvp.tracking.record import read_record
from dvp.versions import STAGE_VERSIONS

pytestmark = pytest.mark.slow  # each call is a process of its own

ROOT = Path(__file__).parents[1]
RUN = "method~rloo/engine~fp32/rho~none/seed~0"
WRITES = {
    "resolve": ["FOLDER/config.yaml"],
    "plan": ["Writes nothing and needs neither GPU nor network"],
    "prepare": ["data/train.parquet", "data/eval.parquet", "data/manifest.json"],
    "base": ["base/"],
    "preflight": ["preflight/engine~NAME/preflight.json", "report.json"],
    "train": ["runs/RUN/metrics.jsonl", "runs/RUN/train.json"],
    "convert": ["models/RUN/", "models/RUN/conversion.json"],
    "evaluate": ["evals/RUN/TASK/samples.parquet", "scores.json"],
    "bias": ["bias/MEASUREMENT/*.parquet", "bias.json"],
    "mismatch": ["mismatch/MEASUREMENT/*.parquet", "mismatch.json"],
    "report": ["tables/", "figures/", "report/PART.json"],
    "evidence": ["config/claims.yaml", "claims.md", "claims.html", "claims.json"],
    "track": ["tracking/", "Changes no file"],
    "show": ["Reads what dvp report wrote"],
}


@pytest.fixture(autouse=True)
def store_beside_the_results(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a copy of configuration and rules, to run `dvp` in; one MLflow store for all tests."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("config", "workflow"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "Snakefile", folder)
    return folder


@pytest.fixture
def resolved(place, request):
    """Write experiment `smoke` resolved, trained on the given lines; the file, relative to the place."""

    def write(lines: list[str] | None = None) -> str:
        value = load_experiment("smoke", ROOT / "config").model_dump(mode="json")
        if lines is not None:
            rows = place / f"{request.node.name}.jsonl"
            rows.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
            columns = {"problem": "question", "answer": "meta.truth"}
            value["sources"]["rows"] = {"kind": "file", "path": rows.name, "columns": columns}
            value["data"] |= {"train": "rows", "held_out": 1}
        file = Path("results") / request.node.name / "config.yaml"
        write_text(place / file, dump_experiment(parse_experiment(value, file)))
        return str(file)

    return write


@pytest.fixture
def refused(dvp, place):
    """Run `dvp` on bad input: status 2 and one line on standard error, which is returned without its beginning."""

    def run(*arguments: str) -> str:
        status, line, everything = dvp(*arguments, cwd=place, timeout=120)
        assert everything == line + "\n"
        assert status == 2
        start = f"dvp {arguments[0]}: "
        assert line.startswith(start)
        assert not [path for path in place.rglob("*") if path.suffix in {".tmp", ".old"}]
        return line.removeprefix(start)

    return run


# --- help ---


@pytest.fixture
def help_of(capsys, monkeypatch):
    """What `dvp … --help` prints on a terminal of 80 columns, on one line."""
    monkeypatch.setenv("COLUMNS", "80")

    def text(*verb: str) -> str:
        assert main([*verb, "--help"]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        assert max(map(len, printed.out.splitlines())) <= 80
        return " ".join(printed.out.replace("│", " ").split())

    return text


def test_help_lists_every_verb(help_of):
    text = help_of()
    for verb in WRITES:
        assert f" {verb} " in text
    assert "Exit status: 0 done, 2 a problem in the input (one line says which), 1 a bug in dvp." in text


@pytest.mark.parametrize("verb", WRITES)
def test_the_help_of_a_verb_says_what_is_written(verb, help_of):
    text = help_of(verb)
    for file in WRITES[verb]:
        assert file in text


def test_every_verb_has_a_stage_and_help():
    assert {command.callback.__name__ for command in app.registered_commands} == set(WRITES)


def test_help_imports_no_library_that_takes_long():
    program = "import sys; from dvp.cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert not {"torch", "transformers", "vllm", "mlflow", "pandas", "numpy"} & set(done.stderr.split())


def test_every_part_of_a_report_can_be_asked_for():
    parts = get_args(get_type_hints(report)["part"])
    assert {f"report_{part}" for part in parts} == {name for name in STAGE_VERSIONS if name.startswith("report_")}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "dvp: Missing command; see `dvp --help`"),
        (["nope"], "dvp: No such command 'nope'; see `dvp --help`"),
        (["train"], "dvp train: Missing option '--config'; see `dvp train --help`"),
        (["train", "--config"], "dvp train: Option '--config' requires an argument; see `dvp train --help`"),
        (
            ["plan", "--pric", "3"],
            "dvp plan: No such option: --pric (Possible options: --price); see `dvp plan --help`",
        ),
        (
            ["report", "--config", "x", "--part", "y"],
            "dvp report: Invalid value for '--part': 'y' is not one of 'training', 'matrix', 'diversity', 'curve', "
            "'mismatch', 'bias', 'variance', 'bias_length', 'sweep'; see `dvp report --help`",
        ),
    ],
)
def test_a_command_that_is_no_command_is_one_line(arguments, line, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr() == ("", line + "\n")


def options_of(kind: type) -> list[tuple[str, str]]:
    """Verb and name of every option of a kind."""
    return [
        (command.callback.__name__, f"--{name.replace('_', '-')}")
        for command in app.registered_commands
        for name, option in get_type_hints(command.callback).items()
        if kind in (option, *get_args(option))
    ]


@pytest.mark.parametrize(("verb", "option"), options_of(Path))
def test_a_path_is_not_empty(verb, option, capsys, tmp_path, monkeypatch):
    """As that of a variable that is not set: it would be the current folder."""
    assert ("bias", "--problems") in options_of(Path)
    monkeypatch.chdir(tmp_path)
    assert main([verb, option, ""]) == 2
    expected = f"dvp {verb}: Invalid value for '{option}': expected a path, found an empty text"
    assert capsys.readouterr() == ("", f"{expected}; see `dvp {verb} --help`\n")
    assert not list(tmp_path.iterdir())


# --- dvp resolve ---


def test_resolve_writes_what_the_other_verbs_read(dvp, place):
    status, _, errors = dvp("resolve", "--experiment", "smoke", "--folder", "results/good", cwd=place)
    assert (status, "Traceback" in errors) == (0, False)
    assert sorted(path.name for path in (place / "results" / "good").iterdir()) == ["config.yaml"]
    assert (place / "results" / "mlflow.db").is_file()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "learning_rate: 1.5e-4",
            "learning_rte: 1.5e-4",
            "training.learning_rte: unknown key; did you mean learning_rate? (and 1 more)",
        ),
        (
            "rho: 1e-2",
            "rho: 1.5",
            "grid.1.rho: ρ must lie in (0, 1), written like 0.01 or exp(-13); found 1.5",
        ),
        ("seeds: [0]", "seeds: [0", "not valid YAML: "),
    ],
)
def test_resolve_names_file_and_key(refused, place, old, new, message):
    file = place / "config" / "experiments" / "bad.yaml"
    text = (ROOT / "config" / "experiments" / "smoke.yaml").read_text(encoding="utf-8")
    assert text.count(old) == 1
    file.write_text(text.replace("name: smoke", "name: bad").replace(old, new), encoding="utf-8")
    line = refused("resolve", "--experiment", "bad", "--folder", "bad/results/bad")
    assert line.startswith(f"config/experiments/bad.yaml: {message}")
    assert not (place / "bad").exists()


def test_resolve_takes_no_path_for_an_experiment(refused, place):
    line = refused("resolve", "--experiment", "../experiments/smoke", "--folder", "bad/results/bad")
    assert line == (
        "experiment '../experiments/smoke': expected the name of a file in config/experiments, without .yaml"
    )
    assert not (place / "bad").exists()


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["plan"], "config/config.yaml: no such file"),
        (
            ["resolve", "--experiment", "smoke", "--folder", "x/smoke"],
            "config/experiments/smoke.yaml: no such experiment",
        ),
        (["evidence", "--experiments", "grid=x", "--output", "y"], "config/claims.yaml: no such file"),
        (["bias", "--model", "x", "--engine", "fp32"], "config/experiments/estimator_bias.yaml: no such experiment"),
    ],
)
def test_a_verb_that_reads_config_says_where_it_is_to_be_run(arguments, file, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    line = f"dvp {arguments[0]}: {file}; run this in the repository's root, which has config/\n"
    assert capsys.readouterr().err == line
    assert not list(tmp_path.iterdir())


# --- a terminal without ρ ---


def test_a_terminal_without_greek_shows_something_else(place):
    """As with LC_ALL=de_DE.ISO-8859-1, where that locale is installed."""
    done = subprocess.run(
        [sys.executable, "-m", "dvp.cli", "plan", "--config", "experiment=tiny"],
        cwd=place,
        check=False,
        capture_output=True,
        timeout=120,
        env=os.environ | {"PYTHONIOENCODING": "iso-8859-1"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert "for each ?" in done.stdout.decode("iso-8859-1")


# --- dvp plan ---


def test_plan_prints_and_writes_nothing(place):
    def files() -> list[Path]:
        # Snakemake, which is asked for the jobs, has a folder of its own wherever it is called.
        return sorted(path for path in place.rglob("*") if ".snakemake" not in path.parts)

    before = files()
    done = subprocess.run(
        [sys.executable, "-m", "dvp.cli", "plan", "--config", "experiment=smoke", "results=there", "--price", "0.5"],
        cwd=place,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.startswith("smoke on CPU core: ")
    assert " at 0.5 each" in done.stdout.splitlines()[0]
    assert done.stderr == ""
    assert files() == before


def test_results_that_cannot_be_written_can_be_planned(place):
    """Those of somebody else, or archived ones."""
    results = place / "protected"
    results.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", results], check=False).returncode:
        pytest.skip("no right to mount")
    try:
        model = results / "smoke/models/method~rloo/engine~fp32/rho~none/seed~0/config.json"
        model.parent.mkdir(parents=True)
        model.write_text("{}")
        subprocess.run(["mount", "-o", "remount,ro", results], check=True)
        plan = [sys.executable, "-m", "dvp.cli", "plan", "--config", "experiment=smoke", f"results={results}"]
        done = subprocess.run(plan, cwd=place, check=False, capture_output=True, text=True, timeout=120)
    finally:
        subprocess.run(["umount", results], check=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_plan_that_nobody_reads_to_its_end_is_no_bug(place):
    plan = [sys.executable, "-m", "dvp.cli", "plan", "--config", "experiment=smoke"]
    with subprocess.Popen(plan, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=120) == 141


def test_plan_refuses_what_it_cannot_plan(refused):
    assert refused("plan", "--config", "experimnt=smoke") == (
        "--config experimnt=smoke: expected KEY=VALUE with one of the keys experiment, results"
    )
    assert refused("plan", "--config", "experiment=nope").startswith("config/experiments/nope.yaml: no such experiment")
    assert refused("plan", "--config", "experiment=paper_8b", "--gpus", "4") == (
        "--gpus 4: a job of stage 'preflight' takes 8 at once"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        ["--gpus", "0"],
        ["--price", "-1"],
        ["--price", "nan"],
        ["--price", "inf"],
        ["--price", "1e308"],
        ["--response-tokens", "1e10"],
        ["--gpu", "abacus"],
    ],
)
def test_plan_takes_numbers_within_bounds_and_known_gpus(wrong, capsys):
    assert main(["plan", *wrong]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dvp plan: Invalid value for '{wrong[0]}': ")


def test_a_number_out_of_bounds_is_said_with_them(capsys):
    assert main(["plan", "--price", "1e308"]) == 2
    line = "dvp plan: Invalid value for '--price': 1e+308 is not a number above zero, 1,000,000,000 at most"
    assert capsys.readouterr().err == f"{line}; see `dvp plan --help`\n"


@pytest.mark.parametrize("seed", [-1, 2**32, 10**30])
def test_bias_takes_the_seeds_that_an_experiment_may_have(seed, capsys):
    with pytest.raises(ValidationError):
        TypeAdapter(Seed).validate_python(seed)
    assert TypeAdapter(Seed).validate_python(LARGEST_SEED) == LARGEST_SEED
    assert main(["bias", "--seed", str(seed)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    bound = "greater than or equal to 0" if seed < 0 else f"less than or equal to {LARGEST_SEED}"
    assert line == f"dvp bias: Invalid value for '--seed': Input should be {bound}; see `dvp bias --help`"


# --- dvp evidence ---


def test_evidence_takes_several_experiments_after_one_option(refused, place):
    line = refused("evidence", "--experiments", "grid=results/a", "training", "--output", "results/evidence")
    assert line == "--experiments training: expected KEY=FOLDER"
    line = refused("evidence", "--experiments", "grid=results/a", "grid=results/b", "--output", "results/evidence")
    assert line == "--experiments grid=results/b: 'grid' is given twice, as results/a too"
    assert not (place / "results" / "evidence").exists()


# --- dvp prepare ---

GOOD = json.dumps({"question": "What is 1 + 1?", "meta": {"truth": "2"}})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        pytest.param(
            [GOOD, json.dumps({"question": "x", "meta": {"true": "2"}})],
            "{file}: row 2: no column 'meta.truth'; found question, meta.true",
            id="column",
        ),
        pytest.param(
            [GOOD, GOOD, json.dumps({"question": "x", "meta": {"truth": "\\frac{1}{"}})],
            "{file}: row 3: the answer '\\\\frac{1}{' is not a mathematical expression, nor a word",
            id="answer",
        ),
        pytest.param([GOOD, '{"question": "x", "meta"'], "{file}: row 2: ", id="json"),
        pytest.param(
            [GOOD, GOOD],
            "data.train: no problem of source 'rows' is left: 2 rows read, 1 distinct problems, 1 held out",
            id="empty",
        ),
    ],
)
def test_prepare_names_file_row_and_column(refused, resolved, place, lines, message):
    config = resolved(lines)
    folder = (place / config).parent
    line = refused("prepare", "--config", config)
    file = read_yaml(place / config)["sources"]["rows"]["path"]
    assert line.startswith(message.replace("{file}", f"sources.rows: {file}"))
    assert sorted(path.name for path in folder.rglob("*")) == ["config.yaml", "prepare.json", "tracking"]
    assert read_record(folder / "tracking/prepare.json").tags["failure"] == f"DvpError: {line}"


def test_prepare_says_what_it_left_out_or_that_it_is_too_much(dvp, refused, resolved, place):
    """Fewer problems than a step needs are told before a base model is made and a training job waits for it."""
    rows = [{"question": f"What is {i} ^ {i}?", "meta": {"truth": "2"}} for i in (1, 2, 3, 4, 4)]
    config = resolved([json.dumps(row) for row in rows])
    line = refused("prepare", "--config", config)
    assert line == "experiment 'smoke': training.prompts_per_step: 4 are more than the problems to train on, 3"
    assert not (place / config).with_name("data").joinpath("manifest.json").exists()
    config = resolved([json.dumps(row) for row in [*rows, rows[0] | {"question": "What is five?"}]])
    status, _, everything = dvp("prepare", "--config", config, cwd=place)
    line = "sources.rows: left out of 6 rows: repeated problems: 1; see data/manifest.json\n"
    assert (status, everything) == (0, line)


# --- dvp train, convert, evaluate: torch and transformers are imported before anything is refused ---


@pytest.mark.slow
def test_train_before_base_names_the_missing_file(refused, resolved, place):
    config = resolved()
    folder = (place / config).parent
    (folder / "data").mkdir()
    (folder / "data" / "train.parquet").write_bytes(b"x")
    config_hash = read_resolved(place / config).config_hash("prepare")
    manifest = {"files": checksums(folder / "data"), "tracking_key": "x", "config_hash": config_hash}
    write_json(folder / "data" / "manifest.json", manifest)
    line = refused("train", "--config", config, "--run", RUN)
    assert line == f"{Path(config).parent}/base/manifest.json: no such file; the stage that writes it has not finished"
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_train_takes_runs_of_the_grid_only(refused, resolved, place):
    config = resolved()
    run = RUN.replace("seed~0", "seed~7")
    line = refused("train", "--config", config, "--run", run)
    assert line.startswith(f"run '{run}' is not in the grid of experiment 'smoke'; one that is: method~")
    assert [path.name for path in (place / config).parent.iterdir()] == ["config.yaml"]


@pytest.mark.slow
def test_convert_notices_altered_files(refused, resolved, place):
    config = resolved()
    run = (place / config).parent / "runs" / RUN
    run.mkdir(parents=True)
    for name in ("metrics.jsonl", "probe.safetensors"):
        (run / name).write_bytes(b"as it was written")
    files = {name: sha256_file(run / name) for name in ("metrics.jsonl", "probe.safetensors")}
    experiment = read_resolved(place / config)
    config_hash = experiment.config_hash("train", experiment.run(RUN))
    trained = {"checkpoint": "checkpoints/x", "files": files, "tracking_key": "x", "config_hash": config_hash}
    write_json(run / "train.json", trained)
    (run / "probe.safetensors").write_bytes(b"as it was writteN")
    line = refused("convert", "--config", config, "--run", RUN)
    assert line.startswith(f"{Path(config).parent / 'runs' / RUN}/probe.safetensors: altered since it was written")
    assert not ((place / config).parent / "models").exists()


@pytest.mark.slow
def test_evaluate_takes_tasks_of_the_experiment_only(refused, resolved, place):
    config = resolved()
    line = refused("evaluate", "--config", config, "--run", "base", "--task", "aime25")
    assert line == "task 'aime25' is not in experiment 'smoke': held_out"
    assert [path.name for path in (place / config).parent.iterdir()] == ["config.yaml"]


def test_a_folder_that_cannot_be_written_is_named_in_one_line(dvp, place):
    (place / "taken").write_text("a file, no folder")
    status, line, everything = dvp("resolve", "--experiment", "smoke", "--folder", "taken/results", cwd=place)
    assert status == 2
    assert "taken" in line
    assert "Traceback" not in everything


def test_a_signal_while_the_store_is_closed_is_no_traceback(monkeypatch, caplog):
    """SQLAlchemy logs what happens while it closes a connection; a rank is often told to stop just then."""
    engine = create_engine("sqlite://", poolclass=NullPool)

    def stopped(connection):
        connection.close()
        raise Stopped("stopped by SIGTERM; run again to go on", signal.SIGTERM)

    monkeypatch.setattr(engine.dialect, "do_close", stopped)
    with suppress(Stopped), engine.connect():
        pass
    assert not caplog.records


def test_an_overflow_is_seen_and_a_librarys_chatter_is_not():
    """The one that vLLM causes whenever it is imported."""
    program = (
        "import numpy, torch.distributed; from dvp.cli import quiet; quiet(); "
        "torch.distributed.reduce_op.SUM; numpy.float32(1e38) * numpy.float32(10)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.splitlines() == ["<string>:1: RuntimeWarning: overflow encountered in scalar multiply"]


DROPPED = """
import signal, sys, threading, time, weakref
from contextlib import nullcontext
from dvp.cli import stoppable
from dvp.errors import Stopped
from dvp.training.stopping import Abandoned, StopRequest

class Connection:
    pass

def spin():
    while True:
        pass

threading.Thread(target=spin, daemon=True).start()  # so the signal comes again in the midst of the hook, too
stoppable()
with StopRequest() if sys.argv[1] == "training" else nullcontext() as training:
    for _ in range(30):
        try:
            with training.abandonable() if training else nullcontext():
                connection = Connection()
                watched = weakref.ref(connection, lambda _: signal.raise_signal(signal.SIGTERM))
                del connection
                time.sleep(60)
                print("it went on")
        except (Abandoned, Stopped) as error:
            print(type(error).__name__)
        if training:
            training.signal = None
    time.sleep(0.1)  # nothing comes again that was heard
"""


@pytest.mark.parametrize(("where", "raised"), [("a stage", "Stopped"), ("training", "Abandoned")])
def test_a_signal_within_a_callback_of_python_is_not_lost(where, raised):
    """What is raised there is dropped, with a traceback: the process would go on as if it had not been told."""
    command = [sys.executable, "-c", DROPPED, where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == ""
    assert done.stdout.split() == [raised] * 30


def test_a_signal_that_was_heard_a_moment_ago_is_not_sent_again(monkeypatch):
    """It would come where nothing waits for it, and end a process that has been told already."""

    class HeardMeanwhile(threading.Event):
        def wait(self, timeout=None):
            heard = self.is_set()
            self.set()
            return heard

    sent = []
    monkeypatch.setattr(signal, "pthread_kill", lambda *arguments: sent.append(arguments))
    signals._send(signal.SIGTERM, HeardMeanwhile())
    assert sent == []


def test_a_stop_that_a_library_makes_an_error_of_is_a_stop(monkeypatch, capsys):
    """transformers does, where it comes while a module is imported."""

    def load_experiment(*_):
        try:
            signal.raise_signal(signal.SIGUSR1)
        except Stopped:
            raise ModuleNotFoundError("Could not import module 'AutoTokenizer'") from None

    monkeypatch.setattr("dvp.experiment.loading.load_experiment", load_experiment)
    assert main(["resolve", "--experiment", "smoke", "--folder", "results/smoke"]) == 138
    assert capsys.readouterr().err == "dvp resolve: stopped by SIGUSR1; run again to go on\n"


def test_a_hook_that_was_there_before_is_there_again(monkeypatch, capsys):
    def hook(unraisable):
        pass

    monkeypatch.setattr(sys, "unraisablehook", hook)
    assert main(["--help"]) == 0
    assert sys.unraisablehook is hook
