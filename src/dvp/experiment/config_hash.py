"""Select the settings that a stage depends on, and no others.

Their hash is the stage's *config hash*: a changed label retrains nothing, a changed learning rate does.
"""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from dvp.experiment.base import TrainedBase
from dvp.experiment.jobs import Job

if TYPE_CHECKING:
    from dvp.experiment.config import Experiment


def settings_of_job(experiment: "Experiment", job: Job) -> dict[str, Any]:
    """Return all settings on which the results of a job depend, upstream stages included; JSON-able.

    A run has its own training settings, wherever they are written; a measurement samples as the section `training`
    says, whatever its policy was trained with.
    """
    if job.stage == "report":  # a report may show any of them
        return _set(experiment.used, exclude={"preflight"})
    stage, run, measurement = job.stage, job.run, job.measurement
    data, base, training = experiment.data, experiment.base, experiment.training
    # Leave out what only `dvp plan` uses (problems) or only raises an error (unreadable_answers): no result changes.
    sources = {name: _set(experiment.sources[name], exclude={"problems"}) for name in [data.train, *data.evaluation]}
    parts: dict[str, Any] = {"data": _set(data, exclude={"unreadable_answers"}), "sources": sources}
    if stage != "prepare":
        made = isinstance(base, TrainedBase)
        parts["base"] = _set(base, exclude=None if made else {"architecture"})
        if made:
            parts["base_source"] = _set(experiment.sources[base.source])
        if experiment.tools is not None and (made or stage != "base"):
            # A base model that is trained here learns how a call is written.
            written = {"call", "answer"} if stage == "base" else None
            parts["tools"] = _set(experiment.tools, include=written)
    if run is not None:
        # The number of GPUs changes a run by rounding only.
        trained = experiment.training_of(run)
        safe = experiment.sides_of(run)
        # report_sets changes nothing if the engine has no sets to report, or reports them anyway.
        asked = set() if trained.sets_reported(safe) and not safe.replayed else {"report_sets"}
        parts["training"] = _set(trained, exclude={"gpus", "nodes"} | asked)
        parts["deepspeed"] = experiment.deepspeed
        parts["run"] = _set(run, exclude={"training"})
        parts["engine"] = _set(experiment.engines[run.engine])
        parts["method"] = _set(experiment.methods[run.method], exclude={"label"})
    if stage == "train" and experiment.evaluation.at is not None:
        # Weights that were not kept cannot be evaluated later, so other steps need another training.
        parts["kept"] = experiment.evaluated_steps(run)
    if stage == "preflight":
        # Only what every run with this engine depends on: rerunning a preflight reruns the training that waits for it.
        waiting = experiment.waiting_for(job.path)
        parts["training"] = _set(waiting.training, exclude={"gpus", "nodes"})
        parts["deepspeed"] = experiment.deepspeed
        parts["engine"] = _set(experiment.engines[job.engine])
    if stage == "evaluate":
        evaluation = _set(experiment.evaluation, exclude={"at", "also"}) | {"engine": job.engine}
        evaluation["samples_per_problem"] = {job.task: experiment.evaluation.samples_per_problem[job.task]}
        parts["evaluation"] = evaluation
        parts["evaluation_engine"] = _set(experiment.engines[job.engine])
        if job.sampler.rho is not None:
            parts["evaluation_rho"] = job.sampler.rho
    if measurement is not None:
        settings = getattr(experiment, stage)
        parts["measured"] = _set(settings, exclude={"policies", "engines", "estimators", "tasks"})
        parts["measured_engine"] = _set(experiment.engines[job.engine])
        parts["seed"] = measurement.seed
        if job.task is not None:
            parts["task"] = job.task
        sampling = {"temperature", "max_prompt_tokens", "max_response_tokens"}
        if stage == "bias":
            sampling |= {"group_size", "tokens_per_micro_batch"}
        parts["sampling"] = _set(training, include=sampling)
    if stage == "bias":
        parts["estimators"] = [
            (method, _set(experiment.methods[method], exclude={"label"}), rho) for method, rho in experiment.estimators
        ]
    return parts


def _set(section: BaseModel, **of: Any) -> dict[str, Any]:
    """Return a section's settings that differ from their defaults, so that a new or removed option changes no hash.

    If a default itself changes, so do the numbers of those who relied on it: dvp.versions records that.
    """
    return section.model_dump(mode="json", exclude_defaults=True, **of)
