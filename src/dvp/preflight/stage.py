"""The stage `preflight`: the whole path of a run in minutes, with the real model, engine, ranks and lengths.

The path takes several processes, as a process holds one engine and a run that is resumed is a new process: this verb
starts itself for each of them, on several ranks by torchrun, as training does. What they find out is in one report.
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
from dvp.planning.costs import DEVICES
from dvp.planning.estimate import Estimate
from dvp.preflight.report import SAMPLING, Report, Verdict, check_memory, check_save
from dvp.stage import Stage, run_stage

Process = Literal["train", "resume", "convert", "evaluate"]
PROCESSES: tuple[Process, ...] = ("train", "resume", "convert", "evaluate")
ON_RANKS: tuple[Process, ...] = ("train", "resume")
WORK = "work"
"""The scratch folder, deleted at the end; what it held is as large as a few checkpoints."""


def preflight(
    config: Path, engine: str, threads: int, stop_seconds: int, memory: float | None, process: Process | None
) -> None:
    """Try the path of a run with an engine → preflight/engine~ENGINE/preflight.json if nothing failed.

    engine : the engine, followed by the training settings that the grid gives, if any: ENGINE/KEY~VALUE/….
    stop_seconds : from a scheduler's warning to the end of the job; 0 if unknown.
    memory : bytes that a training job may take on each node; None: as Slurm says, else all of this machine's.
    process : what to do as one of the processes that this call starts.
    Raises DvpError with the line of the check that failed; the report is in report.json beside it.
    """
    directory = ExperimentDir(config)
    config_hash = directory.experiment.config_hash("preflight", engine)
    directory.experiment = directory.experiment.waiting_for(engine)
    result = directory.result("preflight", engine)
    command = ["preflight", "--config", str(config), "--engine", engine]
    if process is not None:
        _as_process(directory, result.parent / WORK, command, threads, process)
        return
    if directory.experiment.training.nodes == 1:  # several are Slurm's to hand out
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
            _Preflight(directory, engine, [*command, "--threads", str(threads)], stop_seconds, memory).run(stage)


def _as_process(directory: ExperimentDir, work: Path, command: list[str], threads: int, process: Process) -> None:
    from dvp.rollout.vllm import configure_environment

    configure_environment(threads)  # before anything imports vllm or transformers
    import torch

    from dvp.preflight import rehearsal
    from dvp.training import launch

    torch.set_num_threads(threads)
    engine = directory.experiment.points[0].engine
    directory.experiment = rehearsal.rehearsed(directory.experiment)
    act = getattr(rehearsal, process)
    try:
        if process in ON_RANKS:
            command = [*command, "--process", process]
            launch.on_ranks(directory.experiment.training, work, command, threads, lambda: act(directory, engine, work))
        else:
            act(directory, engine, work)
    except Stopped as stopped:  # as it was told to, by the first process
        raise SystemExit(stopped.code) from None
    except DvpError as error:
        with contextlib.suppress(DvpError):  # the first process tells it
            Report(work).fail(str(error))
        raise SystemExit(2) from None


class _Preflight:
    """The processes one after the other, and the checks that need more than one of them."""

    def __init__(self, directory: ExperimentDir, engine: str, command: list[str], stop_seconds: int, memory: float):
        self._experiment, self._engine, self._command = directory.experiment, engine, command
        self._stop_seconds, self._memory = stop_seconds, memory
        self._folder = directory.result("preflight", engine).parent
        self._report = Report(self._folder / WORK)
        self._leaving = 0.0
        """Seconds from SIGTERM to the end of the first process."""

    def run(self, stage: Stage) -> None:
        """All of it. Raises DvpError with the first check that fails."""
        failed, work, shown = self._folder / "report.json", self._folder / WORK, 0
        failed.unlink(missing_ok=True)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            for process in PROCESSES:
                try:
                    try:
                        self._start(process)
                    except DvpError as error:
                        if self._report.read()[0][-1]["check"] != "start":
                            raise
                        print(f"tried once more, as a node may have faltered: {error}", flush=True)
                        shutil.rmtree(work)
                        work.mkdir()
                        self._start(process)
                    if process in ON_RANKS:
                        self._check_memory()
                    if process == "resume":
                        self._check_save()
                finally:
                    verdicts = self._report.read()[0]
                    for one in verdicts[shown:]:
                        print(f"{'passed' if one['passed'] else 'FAILED'}  {one['check']}: {one['says']}", flush=True)
                    shown = len(verdicts)
            summary = self._summary()
        except DvpError:
            write_json(failed, {"passed": False, **self._summary()})
            stage.tracked.log_file(failed)
            raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
        checks = {line["check"].replace(" ", "_"): line["measured"] for line in summary["checks"]}
        figures = {name: summary[name] for name in ("seconds", "utilisation") if summary[name] is not None}
        stage.tracked.log_result(checks | figures)
        stage.finish({"passed": True, **summary})

    def _start(self, process: Process) -> None:
        """One of the processes, to its end. Raises DvpError, naming the check that it was at."""
        command = [sys.executable, "-m", "dvp.cli", *self._command, "--process", process]
        child = subprocess.Popen(command, pass_fds=held())
        signalled = None
        try:
            while child.poll() is None:
                if process == "train" and signalled is None and (self._folder / WORK / SAMPLING).exists():
                    child.send_signal(signal.SIGTERM)
                    signalled = time.monotonic()
                time.sleep(0.05)
        except BaseException:
            child.send_signal(signal.SIGTERM)
            child.wait()
            raise
        status = child.returncode
        if signalled is not None:
            self._leaving = time.monotonic() - signalled
        if status == (128 + signal.SIGTERM if process == "train" else 0):
            return
        if status == 0:
            self._report.add("save", Verdict(False, "the processes did not leave on SIGTERM"))
        killed = status < 0 and f"ended by {signal.Signals(-status).name}; was there too little memory?"
        self._report.fail(killed or f"ended with status {status}")

    def _check_memory(self) -> None:
        """Refuse what the processes so far took; once there are no more of them, say that it was not too much."""
        notes = self._report.read()[1]
        peaks = [notes[f"peaks_{process}"] for process in ON_RANKS if f"peaks_{process}" in notes]
        largest = {name: max(of_process[name] for of_process in peaks) for name in peaks[0]}
        planned = None
        if estimate := self._estimate(notes):
            rollout = estimate.rollout_memory(self._experiment.points[0].engine)["bytes"]
            planned = {"update": sum(estimate.update_memory().values()), "rollout": rollout}
        verdict = check_memory(largest, self._memory, planned)
        if not verdict.passed or len(peaks) == len(ON_RANKS):
            self._report.add("memory", verdict)

    def _check_save(self) -> None:
        training = self._experiment.training
        tokens = training.prompts_per_step * training.group_size * training.max_response_tokens
        update = self._report.read()[1]["seconds"]["update_token"] * tokens
        self._report.add("save", check_save(self._leaving, update, self._stop_seconds))

    def _estimate(self, notes: dict) -> Estimate | None:
        """What `dvp plan` says; None on a CPU, and where the plan lacks the model's sizes."""
        named = notes.get("device", "")
        device = next((known for known in DEVICES.values() if known.name.split()[0] in named), None)
        with contextlib.suppress(DvpError):
            return device and Estimate(self._experiment, device, None)
        return None

    def _utilisation(self, notes: dict) -> float | None:
        """Share of the GPUs' peak that an update's products reach (MFU): every pass, recomputed ones included."""
        estimate = self._estimate(notes)
        if estimate is None or "seconds" not in notes:
            return None
        training = self._experiment.training
        longest = training.max_response_tokens
        passes = 1 + 3 + training.gradient_checkpointing
        flops = passes * estimate.model.forward_flops(longest, longest**2)
        peak = estimate.device.peak(self._experiment.trainer_dtype) * training.ranks
        return flops / (notes["seconds"]["update_token"] * longest * peak)

    def _summary(self) -> dict:
        """What the JSON file says: the checks, and the figures that `dvp plan` uses."""
        verdicts, notes, _ = self._report.read()
        training = self._experiment.training
        return {
            "engine": self._engine,
            "gpus": training.gpus,
            "nodes": training.nodes,
            "device": notes.get("device"),
            "checks": verdicts,
            "kl": next((line["measured"].get("kl") for line in verdicts if line["check"] == "mismatch"), None),
            "seconds": notes.get("seconds"),
            "utilisation": self._utilisation(notes),
        }
