"""Start a run on several ranks: torchrun on every node, started there by srun, and a one-line error if a rank fails.

`dvp train` starts itself again as the ranks. torchrun ends all of them when one has failed, and would report that in
thirty lines; instead each rank writes why it failed into torchrun's folder of logs, and the first cause is raised here.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from dvp import node
from dvp.errors import STOP_SIGNALS, DvpError, Stopped, disk_trouble
from dvp.experiment.training import TrainingConfig
from dvp.gpus import held

WAIT = timedelta(minutes=30)
"""The longest that a rank waits for another, which may still be sampling, and torchrun for ranks that are told to stop.

A rank that is told to stop finishes its update and saves: 100 GB at eight billion parameters. torchrun's own 30 s would
kill it in the middle. A scheduler that gives less time, such as Slurm, ends the job itself.
"""
REPORT = "error.json"  # torchrun's name for a rank's report of its failure
FREE_PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"
OF_JOB = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_TMPDIR")
KINDS = ("error", "killed", "other", "ended", "told")
"""Kinds of reports, in the order in which they are raised: an error in the input; a signal that follows from no other
rank's end; a bug or a stop, which a rank may report after losing another one; a signal that may follow from that;
torchrun's signal to the other ranks."""


def on_ranks(
    training: TrainingConfig, folder: Path, arguments: list[str], threads: int, work: Callable[[], None]
) -> None:
    """Run `work` on every rank of `training`: in this process if it is alone or a rank, else in ranks that it starts.

    folder : where all nodes can write, for the reports of the ranks.
    arguments : of `dvp`, that lead to this same call in a rank; `--threads` is added.
    Raises DvpError with the error of the first rank that failed, RuntimeError if that was a bug; Stopped if the ranks
    were told to stop, or if this process was, which passes it on.
    """
    if training.ranks == 1:
        work()
    elif node.is_rank():
        with reported():
            work()
        leave()
    else:
        folder.mkdir(parents=True, exist_ok=True)
        each = str(max(1, threads // training.gpus))
        with TemporaryDirectory(dir=folder, prefix=".ranks-") as logs:
            _run(command(training, Path(logs), [*arguments, "--threads", each]), logs, each)


def leave() -> None:
    """End this rank, which is done, without an ordinary exit.

    In an ordinary exit gloo's threads now and then abort a process ("terminate called without an active exception")
    when another rank ends at the same moment, and torchrun takes the whole run for failed: on a busy machine in 15 of
    24 tries of two ranks.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def reported() -> Iterator[None]:
    """Report a failure in the block to the launcher and end this rank at once.

    An ordinary exit would wait for other ranks, which wait for this one.
    """
    try:
        yield
    except (Stopped, Exception) as error:
        stopped, known = isinstance(error, Stopped), isinstance(error, Stopped | DvpError)
        message = str(error) if known else disk_trouble(error)
        report = {
            "kind": "other" if stopped or message is None else "error",
            "signal": error.code - 128 if stopped else None,
            "message": message or f"{type(error).__name__}: {error}",
            "traceback": "" if message else traceback.format_exc(),
            "timestamp": time.time(),
        }
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(report), encoding="utf-8")
        os._exit(error.code if stopped else 1 if message is None else 2)
    except KeyboardInterrupt:
        os._exit(130)  # the launcher was interrupted as well, and says so


def _run(command: list[str], logs: str, threads: str) -> None:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=held,
        env=_environment()
        | {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ", "PYTHONUNBUFFERED": "1"}
        | {"OMP_NUM_THREADS": threads},  # by itself torchrun would say 1
    )
    try:
        status = process.wait()
    except BaseException as error:
        # torchrun passes this on to the ranks, which save what is done.
        process.send_signal(signal.SIGTERM)
        process.wait()
        for report in _reports(logs) if isinstance(error, Stopped) else ():
            if report["signal"] is not None:
                raise Stopped(report["message"], report["signal"]) from None
        raise
    if status:
        raise_first(_reports(logs))


def _reports(logs: str) -> list[dict]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in Path(logs).rglob(f"*{REPORT}")]


def raise_first(reports: list[dict]) -> None:
    """Choose which error to raise when several ranks have died: the first by KINDS, then by time.

    The others may have failed because they lost that rank. Raises DvpError, Stopped, or RuntimeError for a bug.
    """
    if not reports:
        raise DvpError("the ranks did not start, or no rank reported an error; expected a line above that says why")
    first = min(reports, key=lambda report: (KINDS.index(report["kind"]), report["timestamp"]))
    if first["kind"] in ("other", "told") and first["signal"] is not None:
        raise Stopped(first["message"], first["signal"])
    if first["kind"] == "other":
        print(first["traceback"], end="", file=sys.stderr)
        raise RuntimeError(first["message"])
    raise DvpError(first["message"])


def command(training: TrainingConfig, logs: Path, arguments: list[str]) -> list[str]:
    """Return the command line that starts the ranks.

    Raises DvpError if several nodes are wanted outside a Slurm allocation, or if Slurm does not name them.
    """
    start, rendezvous = [], ["--standalone"]
    if training.nodes > 1:
        job = os.environ.get("SLURM_JOB_ID")
        if job is None:
            raise DvpError(
                f"training.nodes is {training.nodes}: several nodes need a Slurm allocation; SLURM_JOB_ID is not set"
            )
        # Snakemake's Slurm plugin runs this process in a step of the job, whose resources the new step has to share:
        # --overlap covers all but the memory.
        step = ["srun", f"--jobid={job}", "--overlap", "--mem=0", "--cpu-bind=none", "--kill-on-bad-exit=1"]
        start = [*step, f"--nodes={training.nodes}", "--ntasks-per-node=1"]
        rendezvous = [f"--nnodes={training.nodes}", "--rdzv-backend=c10d"]
        rendezvous += [f"--rdzv-endpoint={_rendezvous(job, step)}", f"--rdzv-id=dvp-{job}"]
    return [
        *start,
        *(sys.executable, "-m", "dvp.training.launch", str(logs), *rendezvous, f"--nproc-per-node={training.gpus}"),
        *("--max-restarts=0", "--redirects=3", "--tee=3", f"--log-dir={logs}"),
        f"--shutdown-timeout={WAIT.seconds}",
        *("-m", "--", "dvp.cli", *arguments),  # after --, or torchrun takes our options for its own
    ]


def _rendezvous(job: str, step: list[str]) -> str:
    """Return the allocation's first node and a port that is free there; `step` is how srun starts something in it.

    Slurm is asked for the node, as its plugin for Snakemake hides SLURM_JOB_NODELIST from a job. Raises DvpError.
    """
    try:
        nodes = _answer(["squeue", "--noheader", "--format=%N", "--job", job])
        first = _answer(["scontrol", "show", "hostnames", nodes]).split()[0]
        port = _answer([*step, f"--nodelist={first}", "--nodes=1", "--ntasks=1", sys.executable, "-c", FREE_PORT])
        return f"{first}:{int(port)}"
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DvpError(f"Slurm does not name the nodes of job {job}, or a free port of the first ({reason})") from None


def _answer(command: list[str]) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, env=_environment()
    ).stdout.strip()


def _environment() -> dict[str, str]:
    """Return this process's environment without what Slurm says of its own step.

    That would confine a new step to this node.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name in OF_JOB}


def torchrun(logs: Path, arguments: list[str]) -> int:
    """Run a node's torchrun without output and return its exit status, reporting each rank here that a signal ended.

    logs : folder for the reports.
    arguments : of torchrun.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable()
    try:
        run.main(arguments)
    except SignalException:
        return 1
    except ChildFailedError as failed:
        for rank, failure in failed.failures.items():
            if failure.exitcode < 0:
                report = _ended(rank, signal.Signals(-failure.exitcode)) | {"timestamp": failure.timestamp}
                (logs / f"{rank}-{REPORT}").write_text(json.dumps(report), encoding="utf-8")
        return 1
    return 0


def _ended(rank: int, number: signal.Signals) -> dict:
    """Return the report of a rank that a signal ended, without its time."""
    if number in STOP_SIGNALS:  # before the rank could report it
        return {"kind": "told", "signal": number, "message": f"stopped by {number.name}; run again to go on"}
    remedy = "; out of memory? run again to continue from the last checkpoint" if number == signal.SIGKILL else ""
    killed = number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
    message = f"rank {rank} was ended by {number.name} ({signal.strsignal(number)}){remedy}"
    return {"kind": "killed" if killed else "ended", "signal": None, "message": message}


if __name__ == "__main__":
    sys.exit(torchrun(Path(sys.argv[1]), sys.argv[2:]))
