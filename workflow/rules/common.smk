import sys
from contextlib import ExitStack
from pathlib import Path
from shlex import quote

from snakemake.exceptions import WorkflowError
from snakemake.utils import validate

from dvp.experiment_files import load_experiment
from dvp.errors import DvpError
from dvp.files import only_writer
from dvp.provenance import code_hash

validate(config, "../schemas/config.schema.yaml")

# `dvp` is found in the environment that Snakemake itself runs in, activated or not. Slurm signals every process of a
# job: shell and tee must outlive `dvp`, which saves what it has and then leaves.
shell.prefix(
    "trap '' TERM USR1; set -euo pipefail; "
    f"export PATH={quote(str(Path(sys.executable).parent))}:$PATH; "
)

try:
    EXPERIMENT = load_experiment(config["experiment"])
except DvpError as error:
    raise WorkflowError(str(error)) from None

RESULTS = f"{config['results']}/{EXPERIMENT.name}"
LOGS = f"{RESULTS}/logs"
RUNS = [run.path for run in EXPERIMENT.runs]
# The resolved experiment, written when a run starts. It is no input of any rule: a stage depends on those parts of it
# that its `identity` hashes, not on the file's age (and `ancient` would hide such changes while the file is remade).
RESOLVED = f"{RESULTS}/config.yaml"


HELD = ExitStack()


def hold_results():
    """Until this process ends, no other Snakemake writes to these results, from whichever checkout.

    Snakemake's own lock sees its working directory only, and outlives a Snakemake that was killed.
    """
    try:
        HELD.enter_context(only_writer(Path(RESULTS), "running this experiment"))
    except DvpError as error:
        raise WorkflowError(str(error)) from None


wildcard_constraints:
    run="base|method~[^/]+/engine~[^/]+/rho~[^/]+/seed~[0-9]+",
    task="[^/]+",


def identity(stage):
    """The params function that re-runs a stage when a part of the experiment that it depends on changes."""

    def of_wildcards(wildcards):
        path = wildcards.get("run", "base")
        run = None if path == "base" else EXPERIMENT.run(path)
        return EXPERIMENT.identity(stage, run, wildcards.get("task"))

    return of_wildcards


def gpus(of_each_node, nodes=1):
    """A job's GPUs, for the Slurm plugin and, as a number that can be limited, for Snakemake."""
    return {
        # Not the plugin's `gpu`: it counts all nodes', and no step could start in a job of several.
        "gres": f"gpu:{of_each_node}",
        "nodes": nodes,
        "accelerators": of_each_node * nodes,
    }


def local_files():
    """Problems that come from files of this machine: when one changes, everything runs again."""
    names = dict.fromkeys([EXPERIMENT.data.train, *EXPERIMENT.data.evaluation])
    return [
        str(EXPERIMENT.sources[name].path)
        for name in names
        if EXPERIMENT.sources[name].kind == "file"
    ]


def model_proof(wildcards):
    """What says that the model to evaluate is complete."""
    if wildcards.run == "base":
        return rules.base.output
    return rules.convert.output[0].format(run=wildcards.run)
