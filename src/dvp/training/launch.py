"""Starting a run on several ranks: torchrun on every node, srun to start it there, and one line if it fails.

`dvp train` starts itself again as the ranks. torchrun ends all of them when one has failed, and would say so in thirty
lines; instead each rank reports why it failed, and the one that failed first is heard.
"""

import json
import os
import re
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

from dvp.errors import STOP_SIGNALS, DvpError, Stopped, disk_trouble
from dvp.experiment.training import TrainingConfig
from dvp.gpus import held

WAIT = timedelta(minutes=30)
"""The longest that a rank waits for another, which may still be sampling, and torchrun for ranks that are told to stop.

A rank that was told finishes its update and saves: at eight billion parameters 100 GB. torchrun's own 30 s would kill
it in the middle; whoever has less time to give, as Slurm has, ends the job itself.
"""
# torchrun puts this before every line of a rank; what comes without it is torchrun's own.
PREFIX = "\x1erank ${rank}\x1e"
OF_RANK = re.compile("\x1erank (\\d+)\x1e(.*)", re.DOTALL)
REPORT = "\x1dreport "
OF_JOB = ("SLURM_CONF", "SLURM_JOB_ID")
NOT_FROM_OTHERS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)  # does not follow from another rank's end
# In torchrun's account of what failed.
ENDED = re.compile(r"rank\s*: (\d+).*?exitcode\s*: (-?\d+)", re.DOTALL)


def is_rank() -> bool:
    """Whether this process is one of the ranks that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def on_ranks(
    training: TrainingConfig, folder: Path, arguments: list[str], threads: int, work: Callable[[], None]
) -> None:
    """`work` on every rank of `training`: in this process if it is alone or a rank, else in ranks that it starts.

    folder : as `run` has it.
    arguments : of `dvp`, that come to this same call in a rank; `--threads` is added.
    Raises what `run` does.
    """
    if training.ranks == 1:
        work()
    elif is_rank():
        with reported():
            work()
        leave()
    else:
        run(training, folder, [*arguments, "--threads", str(max(1, threads // training.gpus))])


def leave() -> None:
    """End a rank that is done, at once.

    In the ordinary way gloo's threads now and then abort a process ("terminate called without an active exception")
    when another rank ends at the same moment, and torchrun takes the whole run for failed: on a busy machine in 15 of
    24 tries of two ranks.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run(training: TrainingConfig, folder: Path, arguments: list[str]) -> None:
    """Run `dvp ARGUMENTS` as all ranks of `training` and pass on what they print, until they are done.

    folder : where all nodes can write, for the ranks' output on its way here.
    Raises DvpError with the error of the first rank that failed, RuntimeError if that was a bug; Stopped when they were
    told to stop, or when this process was, which passes it on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".ranks-") as logs:
        process = subprocess.Popen(
            command(training, Path(logs), arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            pass_fds=held(),
            # What Slurm says of the step that this process is in would confine the ranks' step to its node.
            env={name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name in OF_JOB}
            | {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": PREFIX, "PYTHONUNBUFFERED": "1"}
            # One thread a rank unless somebody has said otherwise: torchrun would warn of it.
            | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        )
        try:
            reports, others = _listen(process)
            status = process.wait()
        except Stopped:
            # SIGTERM is what torchrun passes on to the ranks, which save what is done.
            process.send_signal(signal.SIGTERM)
            reports, _ = _listen(process)
            process.wait()
            for report in reports:
                if report["signal"] is not None:
                    raise Stopped(report["message"], report["signal"]) from None
            raise
        except BaseException:
            # torchrun passes this on to the ranks, which leave in the same way.
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
    if status:
        _raise(reports, others)


def command(training: TrainingConfig, logs: Path, arguments: list[str]) -> list[str]:
    """The processes' command line. Raises DvpError if several nodes are wanted outside a Slurm allocation."""
    if training.nodes == 1:
        start, rendezvous = [], ["--standalone"]
    else:
        job = os.environ.get("SLURM_JOB_ID")
        if job is None:
            raise DvpError(
                f"training.nodes is {training.nodes}: several nodes need a Slurm allocation; SLURM_JOB_ID is not set"
            )
        # Within a step of the job, as Snakemake's Slurm plugin starts it, the new step has to share what that one has:
        # --overlap is about all but the memory.
        start = ["srun", f"--jobid={job}", "--overlap", "--mem=0", "--cpu-bind=none", "--kill-on-bad-exit=1"]
        start += [f"--nodes={training.nodes}", "--ntasks-per-node=1"]
        # Jobs that share a node must not share a port.
        address = f"{_first_node(job)}:{20000 + int(job) % 20000}"
        rendezvous = [f"--nnodes={training.nodes}", "--rdzv-backend=c10d"]
        rendezvous += [f"--rdzv-endpoint={address}", f"--rdzv-id=dvp-{job}"]
    return [
        *start,
        *(sys.executable, "-m", "torch.distributed.run", *rendezvous, f"--nproc-per-node={training.gpus}"),
        *("--max-restarts=0", "--redirects=3", "--tee=3", f"--log-dir={logs}"),
        f"--shutdown-timeout={WAIT.seconds}",
        *("-m", "--", "dvp.cli", *arguments),  # after --, or torchrun takes our options for its own
    ]


def _first_node(job: str) -> str:
    """The allocation's first node. Asked of Slurm: its plugin for Snakemake hides SLURM_JOB_NODELIST from a job."""
    nodes = job
    for question in (["squeue", "--noheader", "--format=%N", "--job"], ["scontrol", "show", "hostnames"]):
        try:
            answer = subprocess.run([*question, nodes], capture_output=True, text=True, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            raise DvpError(f"Slurm does not name the nodes of job {job} ({' '.join(str(error).split())})") from None
        nodes = answer.stdout.strip()
    if not nodes:
        raise DvpError(f"Slurm does not name the nodes of job {job}")
    return nodes.split()[0]


@contextmanager
def reported() -> Iterator[None]:
    """End a rank that fails: tell the launcher why, and leave at once.

    Leaving in the ordinary way would wait for other ranks, which wait for this one.
    """
    try:
        yield
    except (Stopped, Exception) as error:
        known = str(error) if isinstance(error, Stopped | DvpError) else disk_trouble(error)
        report = {
            "time": time.time(),
            "bug": known is None,
            "signal": error.code - 128 if isinstance(error, Stopped) else None,
            "message": f"{type(error).__name__}: {error}" if known is None else known,
            "traceback": traceback.format_exc() if known is None else "",
        }
        sys.stderr.write(f"{REPORT}{json.dumps(report)}\n")  # at once: torchrun would cut a line that comes in parts
        sys.stderr.flush()
        os._exit(error.code if isinstance(error, Stopped) else 1 if report["bug"] else 2)
    except KeyboardInterrupt:
        os._exit(130)  # the launcher was interrupted as well, and says so


def _listen(process: subprocess.Popen) -> tuple[list[dict], list[str]]:
    """Print what the ranks print. Returns the reports of those that failed, and the lines of nobody."""
    reports, others = [], []
    for line in process.stdout:
        match = OF_RANK.search(line)
        if match is None:
            others.append(line)
            continue
        rank, text = match.groups()
        if text.startswith(REPORT):
            reports.append(json.loads(text.removeprefix(REPORT)) | {"rank": rank})
        else:
            print(text if rank == "0" else f"[rank {rank}] {text}", end="", file=sys.stderr, flush=True)
    return reports, others


def _raise(reports: list[dict], others: list[str]) -> None:
    """Raise what went wrong first; a rank that loses another one fails as well."""
    errors = [report for report in reports if not report["bug"] and report["signal"] is None]
    # These may follow from another rank's end, after which torchrun tells the others to stop.
    consequences = [report for report in reports if report not in errors]
    if errors:
        raise DvpError(min(errors, key=lambda report: report["time"])["message"])
    text = "".join(others)
    codes = ENDED.findall(text)
    ended = [(rank, signal.Signals(-int(code))) for rank, code in codes if code.startswith("-")]
    if codes and not reports and all(-int(code) in STOP_SIGNALS for _, code in codes):  # before they could say so
        raise Stopped(f"stopped by {ended[0][1].name}; run again to go on", ended[0][1])
    for rank, number in ended:
        if not consequences or number in NOT_FROM_OTHERS:
            remedy = "; was there too little memory?" if number == signal.SIGKILL else ""
            raise DvpError(f"rank {rank} was ended by {number.name} ({signal.strsignal(number)}){remedy}")
    if consequences:
        first = min(consequences, key=lambda report: report["time"])
        if first["signal"] is not None:
            raise Stopped(first["message"], first["signal"])
        print(first["traceback"], end="", file=sys.stderr)
        raise RuntimeError(f"rank {first['rank']}: {first['message']}")
    for line in others:
        if line.startswith("srun: error:"):
            raise DvpError(line.strip())
    print(text, end="", file=sys.stderr)
    raise RuntimeError("the ranks did not start, or ended without a word")
