"""Run a stage: verify its inputs, record it as an MLflow run, and write its small JSON file last.

A stage that is killed has no JSON file, so it is never taken for a finished one. The file carries the stage's
config_hash, commit and the key of its MLflow run, which the next stage links to.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dvp.errors import DvpError
from dvp.experiment.folder import ExperimentDir
from dvp.experiment.grid import whole_run
from dvp.files import atomic_path, read_json, sha256_json, verify_checksums, write_json
from dvp.provenance import git_commit
from dvp.tracking.names import policy_params, policy_title
from dvp.tracking.record import KEY
from dvp.tracking.stage import StageRun, stage_run

Inputs = Mapping[str, Path | list[Path]]
"""The JSON files of the stages whose output a stage reads, by stage."""


@dataclass(frozen=True)
class Stage:
    """A stage at work, with its MLflow run and the JSON file that it ends with."""

    folder: Path
    """The experiment's own folder, results/E."""
    result: Path
    tracked: StageRun
    config_hash: str
    started: float

    def finish(self, result: dict) -> None:
        """Write the JSON file, the stage's last act, and keep a copy of it with the MLflow run."""
        provenance = {
            "config_hash": self.config_hash,
            "git_commit": git_commit(),
            KEY: self.tracked.key,
            "seconds_stage": round(time.time() - self.started, 2),
        }
        write_json(self.result, result | provenance)
        self.tracked.log_file(self.result)

    def is_done(self) -> bool:
        """Return whether the JSON file was written by this very work and its files are unaltered."""
        with contextlib.suppress(DvpError, OSError):
            record = read_json(self.result, KEY, "files")
            verify_checksums(self.result.parent, record["files"])
            return record[KEY] == self.tracked.key
        return False

    def reuse(self) -> bool:
        """Copy the files of another experiment that has done this work; return whether there was one.

        A stage's key names its version, its settings and the contents of its inputs, so files of the same key are the
        ones that would be made here. The run may have another path there, because a training setting is part of a path
        only where a grid gives it. The JSON file keeps the commit and seconds of the original work, and names its
        source in `reused_from`.
        """
        for other, theirs in self.tracked.alike():
            # A file that cannot be read is of no use; what cannot be written, the stage's own work will report.
            with contextlib.suppress(DvpError, OSError):
                there = other / list(theirs.files)[-1]
                record = read_json(there, KEY, "files")
                if record[KEY] != theirs.key:
                    continue
                verify_checksums(there.parent, record["files"])
                checkpoints = [record["checkpoint"]] if "checkpoint" in record else []
                for name in [*record["files"], *checkpoints, *record.get("kept", {}).values()]:
                    source = there.parent / name
                    with atomic_path(self.result.parent / name) as temporary:
                        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, temporary)
                reused = f"{other.name} {theirs.key}"
                self.tracked.adopt(other, theirs)
                self.tracked.tag("reused_from", reused)
                print(f"the same as in {other}: copied", flush=True)
                if "run" in record and self.tracked.run:
                    record["run"] = self.tracked.run
                write_json(self.result, record | {KEY: self.tracked.key, "reused_from": reused})
                self.tracked.log_file(self.result)
                return True
        return False


@contextmanager
def run_stage(
    name: str,
    where: ExperimentDir | Path,
    result: Path,
    config_hash: str,
    inputs: Inputs,
    *,
    verify: bool = True,
    run: str | None = None,
    task: str | None = None,
    metrics: Path | None = None,
) -> Iterator[Stage]:
    """Yield a stage at work; its MLflow run ends with the block, as failed if the block raises.

    where : the experiment's folder, or the folder of a stage that reads several experiments.
    result : the JSON file that `finish` writes.
    verify : whether to check settings and checksums of the inputs; without it, the stage checks what it reads itself.
    run, task : path of the run, and what the stage works on in it, for the MLflow run.
    metrics : the metrics.jsonl that has every row given to `log_step`.
    Raises DvpError, before anything is written, for an input that is missing, altered or of other settings.
    """
    started = time.time()
    records = read_inputs(where, inputs, run, verify=verify)
    folder, experiment = (where, where.name) if isinstance(where, Path) else (where.folder, where.experiment.name)
    with stage_run(
        folder,
        experiment,
        name,
        config_hash=config_hash,
        inputs=sha256_json([record["files"] for of_stage in records.values() for record in of_stage])[:12],
        upstream={stage: [record[KEY] for record in of_stage] for stage, of_stage in records.items()},
        run=run,
        task=task,
        metrics=metrics,
        **_policy(where, name, run, inputs),
    ) as tracked:
        yield Stage(folder, result, tracked, config_hash, started)


def _policy(where: ExperimentDir | Path, stage: str, run: str | None, inputs: Inputs) -> dict:
    """Return how the MLflow run shows the policy that a stage makes or works on; empty without one."""
    if isinstance(where, Path) or (run is None and stage != "base" and "base" not in inputs):
        return {}
    policy = None if run is None else where.experiment.job("convert", run).run
    shown = {"title": policy_title(where.experiment, policy), "params": policy_params(where.experiment, policy)}
    if stage == "evaluate" and policy is not None:
        shown["step"] = policy.step or where.experiment.training_of(policy).steps
    return shown


def read_inputs(
    where: ExperimentDir | Path, inputs: Inputs, run: str | None = None, *, verify: bool = True
) -> dict[str, list[dict]]:
    """Read the JSON files of a stage's inputs and return their contents by stage.

    run : path of the run that the inputs belong to.
    verify : whether to check that they were written under the current settings, and that the files they list are
        unaltered.
    Raises DvpError if a file is missing or a check fails.
    """
    records: dict[str, list[dict]] = {}
    for stage, paths in inputs.items():
        records[stage] = []
        for path in [paths] if isinstance(paths, Path) else paths:
            record = read_json(path, "files", KEY, "config_hash")
            if verify and isinstance(where, ExperimentDir) and stage in ("prepare", "base", "train", "convert"):
                of = {"train": whole_run(run or ""), "convert": run or ""}
                expected = where.experiment.config_hash(stage, of.get(stage, ""))
                if record["config_hash"] != expected:
                    raise DvpError(
                        f"{path}: written under other settings (config_hash {record['config_hash']}, that of the "
                        f"experiment is {expected}); run `dvp {stage}` again"
                    )
            if verify:
                verify_checksums(path.parent, record["files"])
            records[stage].append(record)
    return records
