"""Config hashes of jobs, by stage and run."""


def hash_of(experiment, stage: str, run=None, task: str = "held_out") -> str:
    """Return the config hash of a stage's job for a run or, without one, for the base model."""
    model = "base" if run is None else run.path
    path = {"train": model, "convert": model, "evaluate": f"{model}/{task}"}.get(stage, "")
    return experiment.config_hash(stage, path)
