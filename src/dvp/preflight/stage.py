"""The stage `preflight`: the whole path of a run in minutes, with the real model, engine, ranks and lengths.

The path takes several processes, as a process holds one engine and a run that is resumed is a new process: this verb
starts itself for each of them, on several ranks by torchrun, as training does. What they find out is in one report.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal, TextIO

import psutil

from dvp.errors import DvpError
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
    config: Path,
    engine: str,
    threads: int,
    stop_seconds: int,
    memory: float | None,
    process: Process | None,
) -> None:
    """Rehearse the path of a run with an engine → preflight/engine~ENGINE/preflight.json if nothing failed.

    engine : the engine, followed by the training settings that the grid gives, if any: ENGINE/KEY~VALUE/….
    stop_seconds : from a scheduler's warning to the end of the job; 0 if unknown.
    memory : bytes that a training job may take on each node; None: as Slurm says, else all of this machine's.
    process : what to do as one of the processes that this call starts.
    Raises DvpError with the line of the check that failed; the report is in report.json beside it.
    """
    directory = ExperimentDir(config)
    config_hash = directory.experiment.config_hash("preflight", engine=engine)
    directory.experiment = directory.experiment.waiting_for(engine)
    result = directory.result("preflight", engine)
    if process is not None:
        _as_process(directory, config, engine, threads, process)
        return
    if directory.experiment.training.nodes == 1:  # several are Slurm's to hand out
        evaluated_on = directory.experiment.engines[directory.experiment.sampler.engine]
        claim(max(directory.experiment.training.gpus, evaluated_on.tensor_parallel))
    with only_writer(result.parent, "running this preflight"):
        inputs = {"base": directory.result("base"), "prepare": directory.result("prepare")}
        result.unlink(missing_ok=True)
        with run_stage("preflight", directory, result, config_hash, inputs, task=engine.replace("/", "-")) as stage:
            settings = directory.experiment
            stage.tracked.log_params(
                {
                    "training": settings.training.model_dump(mode="json"),
                    "engine": settings.engines[settings.points[0].engine].model_dump(mode="json"),
                }
            )
            _Preflight(directory, config, engine, threads, stop_seconds, memory).run(stage)


def _as_process(directory: ExperimentDir, config: Path, engine: str, threads: int, process: Process) -> None:
    from dvp.rollout.vllm import configure_environment

    configure_environment(threads)  # before anything imports vllm or transformers
    import torch

    from dvp.preflight import rehearsal
    from dvp.training import launch

    torch.set_num_threads(threads)
    work = directory.result("preflight", engine).parent / WORK
    directory.experiment = rehearsal.rehearsed(directory.experiment)
    if process == "evaluate":
        rehearsal.evaluate(directory, work)
    elif process == "convert":
        rehearsal.convert(directory, directory.experiment.points[0].engine, work)
    else:
        act = rehearsal.train if process == "train" else rehearsal.resume
        command = ["preflight", "--config", str(config), "--engine", engine, "--process", process]
        name = directory.experiment.points[0].engine
        launch.on_ranks(directory.experiment.training, work, command, threads, lambda: act(directory, name, work))


class _Preflight:
    """The processes one after the other, and the checks that need more than one of them."""

    def __init__(
        self,
        directory: ExperimentDir,
        config: Path,
        engine: str,
        threads: int,
        stop_seconds: int,
        memory: float | None,
    ):
        self._experiment = directory.experiment
        self._folder = directory.result("preflight", engine).parent
        self._work = self._folder / WORK
        self._engine, self._stop_seconds = engine, stop_seconds
        self._memory = memory or _memory_of_job()
        self._command = [sys.executable, "-m", "dvp.cli", "preflight", "--config", str(config), "--engine", engine]
        self._command += ["--threads", str(threads)]
        self._report = Report(self._work / "report.jsonl")
        self._shown = 0
        self._leaving = 0.0
        """Seconds from SIGTERM to the end of the first process."""

    def run(self, stage: Stage) -> None:
        """All of it. Raises DvpError with the first check that fails."""
        failed = self._folder / "report.json"
        failed.unlink(missing_ok=True)
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(parents=True)
        self._report.path.touch()
        try:
            for process in PROCESSES:
                self._start(process)
                if process in ON_RANKS:
                    self._check_memory()
                if process == "resume":
                    self._check_save()
                self._show()
            summary = self._summary()
        except DvpError:
            self._show()
            write_json(failed, {"passed": False, **self._summary()})
            stage.tracked.log_file(failed)
            raise
        finally:
            shutil.rmtree(self._work, ignore_errors=True)
        stage.tracked.log_result(_numbers(summary))
        stage.finish({"passed": True, **summary})

    def _start(self, process: Process) -> None:
        """One of the processes, to its end. Raises DvpError, naming the check that it was at."""
        child = subprocess.Popen(
            [*self._command, "--process", process],
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=held(),
        )
        last: list[str] = []
        listener = threading.Thread(target=_pass_on, args=(child.stderr, last))
        listener.start()
        signalled = None
        try:
            while process == "train" and child.poll() is None and signalled is None:
                if (self._work / SAMPLING).exists():
                    child.send_signal(signal.SIGTERM)
                    signalled = time.monotonic()
                time.sleep(0.05)
            status = child.wait()
        except BaseException:
            child.send_signal(signal.SIGTERM)
            child.wait()
            raise
        finally:
            listener.join()
        if signalled is not None:
            self._leaving = time.monotonic() - signalled
        expected = 128 + signal.SIGTERM if process == "train" else 0
        if status == expected:
            return
        verdicts, _, begun = self._report.read()
        for verdict in verdicts:
            if not verdict["passed"]:
                raise DvpError(f"{verdict['check']}: {verdict['says']}")
        if status == 0:
            begun, says = "save", "the processes did not leave on SIGTERM"
        elif status < 0:
            says = f"ended by {signal.Signals(-status).name}; was there too little memory?"
        else:
            says = last[-1].split(": ", 1)[-1].strip() if last else f"ended with status {status}"
        self._report.add(begun or "start", Verdict(False, says))

    def _check_memory(self) -> None:
        """Refuse what the processes so far took; once there are no more of them, say that it was not too much."""
        _, notes, _ = self._report.read()
        peaks = [notes[f"peaks_{process}"] for process in ON_RANKS if f"peaks_{process}" in notes]
        largest = {name: max(of_process[name] for of_process in peaks) for name in peaks[0]}
        verdict = check_memory(largest, self._memory, self._planned(notes))
        if not verdict.passed or len(peaks) == len(ON_RANKS):
            self._report.add("memory", verdict)

    def _check_save(self) -> None:
        _, notes, _ = self._report.read()
        training = self._experiment.training
        tokens = training.prompts_per_step * training.group_size * training.max_response_tokens
        update = notes["seconds"]["update_token"] * tokens
        self._report.add("save", check_save(self._leaving, update, self._stop_seconds))

    def _planned(self, notes: dict) -> dict[str, float] | None:
        """Bytes of a GPU, as `dvp plan` has them; None on a CPU, and where the plan lacks the model's sizes."""
        estimate = self._estimate(notes)
        if estimate is None:
            return None
        return {
            "update": sum(estimate.update_memory().values()),
            "rollout": estimate.rollout_memory(self._experiment.points[0].engine)["bytes"],
        }

    def _estimate(self, notes: dict) -> Estimate | None:
        device = next((known for known in DEVICES.values() if known.name.split()[0] in notes["device"]), None)
        if device is None:
            return None
        try:
            return Estimate(self._experiment, device, None)
        except DvpError:
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
            "utilisation": self._utilisation(notes) if "device" in notes else None,
            "kept": notes.get("kept"),
            "kept_at": training.max_response_tokens,
        }

    def _show(self) -> None:
        """Print the verdicts that came since the last call."""
        verdicts, _, _ = self._report.read()
        for verdict in verdicts[self._shown :]:
            print(f"{'passed' if verdict['passed'] else 'FAILED'}  {verdict['check']}: {verdict['says']}", flush=True)
        self._shown = len(verdicts)


def _pass_on(stream: TextIO, last: list[str]) -> None:
    """Print what a process says, but for the line in which it names its own error, which is kept."""
    for line in stream:
        if line.startswith("dvp preflight: "):
            last[:] = [line]
        else:
            print(line, end="", file=sys.stderr, flush=True)


def _memory_of_job() -> float:
    """Bytes that this job may take on a node: Slurm's, or all that the machine has."""
    megabytes = os.environ.get("SLURM_MEM_PER_NODE")
    return float(megabytes) * 2**20 if megabytes else psutil.virtual_memory().total


def _numbers(summary: dict) -> dict:
    """Of a summary, what goes to the tracking store."""
    checks = {line["check"].replace(" ", "_"): line["measured"] for line in summary["checks"]}
    figures = {name: summary[name] for name in ("seconds", "kept", "utilisation") if summary[name] is not None}
    return _only_numbers(checks | figures)


def _only_numbers(value: dict) -> dict:
    return {
        name: _only_numbers(item) if isinstance(item, dict) else item
        for name, item in value.items()
        if isinstance(item, dict | int | float)
    }
