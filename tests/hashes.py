"""Config hashes by the run that a job is of."""


def hash_of(experiment, stage: str, run=None, task: str = "held_out") -> str:
    """The config hash of a stage's job that is of a run or, without one, of the base model."""
    model = "base" if run is None else run.path
    path = {"train": model, "convert": model, "evaluate": f"{model}/{task}"}.get(stage, "")
    return experiment.config_hash(stage, path)
