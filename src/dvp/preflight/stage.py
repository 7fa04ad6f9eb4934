"""The stage `preflight`: all that a run does, in minutes, with the real model, engine, ranks and lengths.

It takes several processes, because a process can hold only one engine and a resumed run is a new process. The verb
starts itself for each of them, on several ranks by torchrun, as training does. All write into one report.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import psutil

from dvp.errors import DvpError, Stopped
from dvp.experiment.folder import ExperimentDir
from dvp.files import only_writer, write_json
from dvp.gpus import claim, held
from dvp.preflight.report import SAMPLING, Report, Verdict, check_memory, check_save
from dvp.stage import Stage, run_stage

Process = Literal["train", "resume", "convert", "evaluate"]
WORK = "work"
"""Name of the scratch folder, as large as a few checkpoints and deleted at the end."""


def preflight(
    config: Path, engine: str, threads: int, stop_seconds: int, memory: float | None, process: Process | None
) -> None:
    """Run the preflight of an engine and write preflight/engine~ENGINE/preflight.json if all checks pass.

    engine : the engine, followed by the training settings that the grid gives, if any: ENGINE/KEY~VALUE/….
    threads : processor threads of each process.
    stop_seconds : time from a scheduler's warning to the end of the job; 0 if unknown.
    memory : bytes of host memory that a training job may take per node; None: as Slurm says, or all of this machine's.
    process : the part to run, in the processes that this call starts; None: start all of them.
    Raises DvpError with the line of the check that failed; the report is then in report.json in the same folder.
    """
    directory = ExperimentDir(config)
    config_hash = directory.experiment.config_hash("preflight", engine)
    directory.experiment = directory.experiment.waiting_for(engine)
    result = directory.result("preflight", engine)
    command = ["preflight", "--config", str(config), "--engine", engine]
    if process is not None:
        _as_process(directory, result.parent / WORK, command, threads, process)
        return
    if directory.experiment.training.nodes == 1:  # Slurm assigns the GPUs of several nodes
        evaluated_on = directory.experiment.engines[directory.experiment.sampler.engine]
        claim(max(directory.experiment.training.gpus, evaluated_on.tensor_parallel))
    with only_writer(result.parent, "running this preflight"):
        inputs = {"base": directory.result("base"), "prepare": directory.result("prepare")}
        result.unlink(missing_ok=True)
        with run_stage("preflight", directory, result, config_hash, inputs, task=engine.replace("/", "-")) as stage:
            settings = directory.experiment
            of_engine = settings.engines[settings.points[0].engine]
            stage.tracked.log_params(
                {"training": settings.training.model_dump(mode="json"), "engine": of_engine.model_dump(mode="json")}
            )
            if memory is None:
                megabytes = os.environ.get("SLURM_MEM_PER_NODE")
                memory = float(megabytes) * 2**20 if megabytes else psutil.virtual_memory().total
            _all(stage, directory, [*command, "--threads", str(threads)], stop_seconds, memory)


def _as_process(directory: ExperimentDir, work: Path, command: list[str], threads: int, process: Process) -> None:
    from dvp.rollout.vllm import configure_environment

    configure_environment(threads)  # before anything imports vllm or transformers
    import torch

    from dvp.preflight import processes
    from dvp.preflight.brief import brief
    from dvp.training import launch

    torch.set_num_threads(threads)
    engine = directory.experiment.points[0].engine
    directory.experiment = brief(directory.experiment)
    act = getattr(processes, process)
    try:
        if process in ("train", "resume"):
            command = [*command, "--process", process]
            launch.on_ranks(directory.experiment.training, work, command, threads, lambda: act(directory, engine, work))
        else:
            act(directory, engine, work)
    except Stopped as stopped:  # as intended: the first process has sent SIGTERM
        raise SystemExit(stopped.code) from None
    except DvpError as error:
        with contextlib.suppress(DvpError):  # the first process prints it
            Report(work).fail(str(error))
        raise SystemExit(2) from None


def _all(stage: Stage, directory: ExperimentDir, command: list[str], stop_seconds: int, memory: float) -> None:
    """Run the processes one after the other, and the checks that need more than one of them.

    The first process is tried twice if it fails to start. Raises DvpError with the first check that fails.
    """
    training, folder = directory.experiment.training, stage.result.parent
    failed, work = folder / "report.json", folder / WORK
    failed.unlink(missing_ok=True)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    report = Report(work)

    def result(*, passed: bool) -> dict:
        found = report.read()
        settings = {"engine": command[command.index("--engine") + 1], "gpus": training.gpus, "nodes": training.nodes}
        return {"passed": passed, **settings, **{key: found.get(key) for key in ("device", "checks", "seconds")}}

    try:
        try:
            leaving = _process("train", command, report, work)
        except DvpError as error:
            if report.read()["checks"][-1]["check"] != "start":
                raise
            print(f"tried once more, as a node may have faltered: {error}", flush=True)
            shutil.rmtree(work)
            work.mkdir()
            leaving = _process("train", command, report, work)
        _process("resume", command, report, work)
        found = report.read()
        report.add("memory", check_memory(found["peaks"], memory))
        report.add("save", check_save(leaving, found["seconds"]["update"], stop_seconds))
        _process("convert", command, report, work)
        _process("evaluate", command, report, work)
        done = result(passed=True)
    except DvpError:
        write_json(failed, result(passed=False))
        stage.tracked.log_file(failed)
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    checks = {line["check"].replace(" ", "_"): line["measured"] for line in done["checks"]}
    stage.tracked.log_result(checks | {"seconds": done["seconds"]})
    stage.finish(done)


def _process(process: Process, command: list[str], report: Report, work: Path) -> float:
    """Run one of the processes to its end; return the seconds from SIGTERM to its end, 0 without a signal.

    `train` is sent SIGTERM while it samples. Raises DvpError, naming the check that the process was at.
    """
    child = subprocess.Popen([sys.executable, "-m", "dvp.cli", *command, "--process", process], pass_fds=held)
    signalled = None
    try:
        while child.poll() is None:
            if process == "train" and signalled is None and (work / SAMPLING).exists():
                child.send_signal(signal.SIGTERM)
                signalled = time.monotonic()
            time.sleep(0.05)
    except BaseException:
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise
    leaving = 0.0 if signalled is None else time.monotonic() - signalled
    status = child.returncode
    if status != (128 + signal.SIGTERM if process == "train" else 0):
        if status == 0:
            report.add("save", Verdict(False, "the processes did not leave on SIGTERM"))
        killed = status < 0 and f"ended by {signal.Signals(-status).name}; was there too little memory?"
        report.fail(killed or f"ended with status {status}")
    return leaving
