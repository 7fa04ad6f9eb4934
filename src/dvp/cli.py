"""`dvp VERB`: one verb a stage. Rules call these; everything can be run without Snakemake."""

import argparse
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from dvp.errors import STOP_SIGNALS, DvpError, Stopped


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="dvp",
        description="Dynamic Vocabulary Pruning, from raw prompts to the tables of a paper. Each verb is a stage of "
        "the pipeline: it reads files, writes files, and writes its small JSON file last. `make` or `snakemake` "
        "runs them all in order.",
        epilog="Exit status: 0 done, 2 a problem in the input (one line says which), 1 a bug in dvp. "
        "Told to stop by SIGTERM (143) or SIGUSR1 (138), training saves its last step first.",
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, what: str, details: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}. {details}")

    one = verb(
        "resolve",
        "validate an experiment and write it resolved",
        "Reads config/experiments/NAME.yaml and config/catalogue, writes FOLDER/config.yaml, which all other verbs "
        "read, and creates the MLflow store. Run it in the repository's root.",
    )
    one.add_argument("--experiment", required=True, metavar="NAME", help="name of a file in config/experiments")
    one.add_argument("--folder", required=True, type=Path, help="where results go, such as results/tiny")

    one = verb(
        "plan",
        "say what an experiment will take before anything is submitted",
        "Prints jobs, GPU-hours, wall time, disk and money by stage and by method: from recorded times where the "
        "experiment has run, from a stated estimate where not. Writes nothing and needs neither GPU nor network. Run "
        "it in the repository's root.",
    )
    one.add_argument(
        "--config",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="as Snakemake's: experiment=NAME, results=FOLDER (default: config/config.yaml)",
    )
    one.add_argument(
        "--gpu",
        choices=("a100", "h100", "h200", "cpu"),
        help="what to reckon with (default: h200, or cpu for a base model that the pipeline trains itself)",
    )
    one.add_argument("--gpus", type=_positive, metavar="N", help="used at once (default: what the largest job takes)")
    one.add_argument("--price", type=_above_zero, metavar="X", help="of a GPU-hour")
    one.add_argument(
        "--response-tokens",
        type=_above_zero,
        metavar="N",
        help="mean length of a response (default: as recorded, else half of the longest)",
    )
    one.add_argument("--json", action="store_true", help="print numbers: hours, bytes")

    def stage(name: str, what: str, details: str, *, run: bool = False, threads: bool = False):
        one = verb(name, what, details)
        one.add_argument("--config", required=True, type=Path, metavar="FILE", help="results/E/config.yaml")
        if run:
            one.add_argument("--run", required=True, metavar="RUN", help="method~…/engine~…/rho~…/seed~…")
        if threads:
            one.add_argument("--threads", type=_positive, default=1, metavar="N", help="CPU threads (default: 1)")
        return one

    stage(
        "prepare",
        "turn sources into training and evaluation problems",
        "Loads, deduplicates, decontaminates, splits and renders prompts; writes data/train.parquet, data/eval.parquet "
        "and data/manifest.json, which says what was dropped and why.",
    )
    stage(
        "base",
        "make the base model",
        "Trains the tiny tokenizer and model, or fetches a pinned revision of the hub; writes base/, an ordinary "
        "Hugging Face directory.",
        threads=True,
    )
    stage(
        "train",
        "train one run with RL",
        "Rollouts by vLLM, updates by DeepSpeed. Writes runs/RUN/metrics.jsonl as it goes, checkpoints to continue "
        "from when it is run again, and runs/RUN/train.json at the end.",
        run=True,
        threads=True,
    )
    stage(
        "convert",
        "turn a run's checkpoint into a Hugging Face model, with proof",
        "Writes models/RUN/ as safetensors and models/RUN/conversion.json; fails if fixed prompts score differently.",
        run=True,
        threads=True,
    )
    evaluate = stage(
        "evaluate",
        "sample a model on a task and score it",
        "Runs lm-eval over vLLM; writes evals/RUN/TASK/samples.parquet (every sample) and scores.json (avg@k, pass@k, "
        "maj@k with intervals). RUN `base` is the model before RL.",
        run=True,
        threads=True,
    )
    evaluate.add_argument("--task", required=True, help="`held_out` or an evaluation source of the experiment")
    mismatch = stage(
        "mismatch",
        "measure the mismatch between engine and trainer at a fixed policy",
        "Samples with the engine, scores with the trainer, compares them over the whole vocabulary; writes "
        "mismatch/MEASUREMENT/*.parquet and mismatch.json.",
        threads=True,
    )
    mismatch.add_argument(
        "--measurement", required=True, metavar="MEASUREMENT", help="POLICY/by~ENGINE/seed~N; POLICY as RUN, or base"
    )
    one = verb(
        "bias",
        "measure bias and variance of every estimator of the policy gradient",
        "At a fixed policy, against the exact on-policy gradient. With --config and --measurement: one of an "
        "experiment; writes bias/MEASUREMENT/estimators.parquet, jackknife.parquet and bias.json. With --model and "
        "--engine: any Hugging Face directory; prints the table and writes the same files to FOLDER. Run it in the "
        "repository's root.",
    )
    one.add_argument("--config", type=Path, metavar="FILE", help="results/E/config.yaml")
    one.add_argument(
        "--measurement", metavar="MEASUREMENT", help="POLICY/by~ENGINE/seed~N, POLICY being base or method~…"
    )
    one.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face directory")
    one.add_argument("--engine", metavar="NAME", help="an engine of the experiment or of config/catalogue")
    one.add_argument(
        "--experiment",
        default="estimator_bias",
        metavar="NAME",
        help="whose estimators, batches and sampling are used (default: estimator_bias)",
    )
    one.add_argument(
        "--problems",
        type=Path,
        metavar="FILE",
        help=".parquet, .jsonl or .json with columns problem and answer (default: what the experiment trains on)",
    )
    one.add_argument("--seed", type=_natural, default=0, metavar="N", help="draws problems and responses (default: 0)")
    one.add_argument("--output", type=Path, default=Path("bias"), metavar="FOLDER", help="(default: bias)")
    one.add_argument("--threads", type=_positive, default=1, metavar="N", help="CPU threads (default: 1)")
    one = stage(
        "report",
        "make tables and figures",
        "Writes tables/, figures/ and report/PART.json. Which parts there are follows from the experiment.",
    )
    one.add_argument(
        "--part",
        default="training",
        choices=("training", "mismatch", "bias", "sweep"),
        help="training: scores and curves of the grid (default); mismatch, bias: the measurements at fixed policies; "
        "sweep: over ρ",
    )
    one = verb(
        "claims",
        "hold what was measured against what was published",
        "Reads config/claims.yaml and results/E/report/*.json; writes claims.md, claims.html and claims.json.",
    )
    one.add_argument(
        "--experiments",
        required=True,
        nargs="+",
        metavar="KEY=FOLDER",
        help="the experiment in FOLDER, results/E, answers what the claims ask of KEY (config/config.yaml: evidence)",
    )
    one.add_argument("--output", required=True, type=Path, metavar="FOLDER")
    stage(
        "track",
        "bring the tracking store up to date from the files",
        "Reads tracking/ and runs/RUN/metrics.jsonl, and adds to the MLflow store what it lacks of every stage that "
        "has begun: after an outage of the store, or into an empty one. Changes no file.",
    )
    stage("show", "print the main table and where everything is", "Reads what `dvp report` wrote.")
    return top


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def main(arguments: list[str] | None = None) -> int:
    """Run a verb; the exit status."""
    options = vars(parser().parse_args(arguments))
    verb = options.pop("verb")
    # A terminated stage ends like an interrupted one: temporary files are removed, MLflow is told.
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)
    quiet()
    from dvp import stages

    for name in ("run", "measurement"):
        if name in options:
            options[f"{name}_path"] = options.pop(name)
    if "experiment" in options:
        options["name"] = options.pop("experiment")
    try:
        getattr(stages, verb)(**options)
        sys.stdout.flush()
    except BrokenPipeError:
        # `dvp plan | head`: its reader has seen enough. What is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except DvpError as error:
        print(f"dvp {verb}: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"dvp {verb}: {stopped}", file=sys.stderr)
        return stopped.code
    except KeyboardInterrupt:
        print(f"dvp {verb}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:  # a full disk, a folder that is not ours
            print(f"dvp {verb}: {error.filename}: {error.strerror}", file=sys.stderr)
            return 2
        traceback.print_exc()
        print(
            f"dvp {verb}: a bug, please report it with the lines above: {type(error).__name__}: {error}",
            file=sys.stderr,
        )
        return 1
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(f"stopped by {signal.Signals(number).name}; run again to go on", number)


def quiet() -> None:
    """Keep the libraries' chatter off the terminal, where progress and reasons are to be seen."""
    defaults = {
        "DS_ACCELERATOR": "" if Path("/dev/nvidiactl").exists() else "cpu",
        "GLOG_minloglevel": "2",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "CRITICAL",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    for key, value in defaults.items():
        if value:
            os.environ.setdefault(key, value)
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    for name in ("alembic", "deepspeed", "DeepSpeed", "lm_eval", "urllib3", "vllm"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
