import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from shlex import quote

from snakemake.exceptions import WorkflowError
from snakemake.utils import validate

from dvp.analysis.parts import parts
from dvp.experiment.loading import load_experiment
from dvp.errors import DvpError
from dvp.files import only_writer
from dvp.versions import STAGE_VERSIONS

validate(config, "../schemas/config.schema.yaml")

# `dvp` is found in the environment that Snakemake itself runs in, activated or not. Slurm signals every process of a
# job: shell and tee must outlive `dvp`, which saves what it has and then leaves.
shell.prefix(
    "trap '' TERM USR1; set -euo pipefail; "
    f"export PATH={quote(str(Path(sys.executable).parent))}:$PATH; "
)

# Every experiment has the same rules, in a folder of its own; rules see it as a wildcard.
RESULTS = f"{config['results']}/{{experiment}}"
LOGS = f"{RESULTS}/logs"
# What each job took, in files named after its rule; `dvp plan` reads them.
BENCHMARKS = f"{RESULTS}/benchmarks"
# The resolved experiment, written when a run starts. It is no input of any rule: a stage depends on those parts of it
# that its `config_hash` hashes, not on the file's age (and `ancient` would hide such changes while the file is remade).
RESOLVED = f"{RESULTS}/config.yaml"
EVIDENCE = f"{config['results']}/evidence"


@cache
def experiment(name):
    try:
        return load_experiment(name)
    except DvpError as error:
        raise WorkflowError(str(error)) from None


# The one that is asked for, now: a mistake in it is told before anything else.
experiment(config["experiment"])


def begin():
    """Lock and resolve the experiments of which something is to be done.

    Until this process ends, no other Snakemake writes to their results, from whichever checkout. (Snakemake's own lock
    sees its working directory only, and outlives a Snakemake that was killed.)
    """
    todo = [job.wildcards_dict.get("experiment") for job in workflow.dag.needrun_jobs()]
    for name in dict.fromkeys(filter(None, todo)):
        folder = RESULTS.format(experiment=name)
        try:
            HELD.enter_context(only_writer(Path(folder), "running this experiment"))
        except DvpError as error:
            raise WorkflowError(str(error)) from None
        shell(f"dvp resolve --experiment {quote(name)} --folder {quote(folder)}")


HELD = ExitStack()


wildcard_constraints:
    experiment="[a-z0-9][a-z0-9_.-]*",
    run="base|method~[^/]+/engine~[^/]+/rho~[^/]+/seed~[0-9]+",
    measurement="(base|method~[^/]+/engine~[^/]+/rho~[^/]+)/by~[^/]+/seed~[0-9]+",
    task="[^/]+",


def config_hash(stage):
    """The params function that re-runs a stage when a part of the experiment that it depends on changes."""

    def of_wildcards(wildcards):
        asked = experiment(wildcards.experiment)
        if "measurement" in wildcards.keys():
            return asked.config_hash(
                stage, measurement=asked.measurement(stage, wildcards.measurement)
            )
        path = wildcards.get("run", "base")
        run = None if path == "base" else asked.run(path)
        return asked.config_hash(stage, run, wildcards.get("task"))

    return of_wildcards


def gpus(of_each_node, nodes=lambda asked, wildcards: 1):
    """A job's GPUs, for the Slurm plugin and, as a number that can be limited, for Snakemake.

    Both arguments are functions of the experiment and the wildcards.
    """

    def resource(value):
        return lambda wildcards: value(experiment(wildcards.experiment), wildcards)

    return {
        # Not the plugin's `gpu`: it counts all nodes', and no step could start in a job of several.
        "gres": resource(lambda *job: f"gpu:{of_each_node(*job)}"),
        "nodes": resource(nodes),
        "accelerators": resource(lambda *job: of_each_node(*job) * nodes(*job)),
    }


def training_gpus(asked, wildcards):
    return asked.training.gpus


def training_nodes(asked, wildcards):
    return asked.training.nodes


def evaluation_gpus(asked, wildcards):
    return asked.engines[asked.evaluation.engine].tensor_parallel


def measurement_of(wildcards):
    """The measurement that a path names."""
    asked = experiment(wildcards.experiment)
    for measurement in asked.measurements("mismatch") + asked.measurements("bias"):
        if measurement.path == wildcards.measurement:
            return measurement
    raise WorkflowError(f"{wildcards.measurement} is not measured by '{asked.name}'")


def measurement_gpus(asked, wildcards):
    """Of a measurement: those of its engine."""
    return asked.engines[measurement_of(wildcards).engine].tensor_parallel


def threads_of(gpus_of_job):
    return lambda wildcards: gpus_of_job(experiment(wildcards.experiment), wildcards)


def local_files(wildcards):
    """Problems that come from files of this machine: when one changes, everything runs again."""
    asked = experiment(wildcards.experiment)
    names = dict.fromkeys([asked.data.train, *asked.data.evaluation])
    return [
        str(asked.sources[name].path)
        for name in names
        if asked.sources[name].kind == "file"
    ]


def of_all_runs(stage, *more):
    """The output of the rule `stage` for every run, `more` paths of runs (such as base), and every task."""

    def files(wildcards):
        asked = experiment(wildcards.experiment)
        runs = [*more, *(run.path for run in asked.runs)]
        every = expand(
            stage.output[0], experiment=asked.name, run=runs, task=asked.data.tasks
        )
        return list(dict.fromkeys(every))  # not every stage has tasks

    return files


def of_all_measurements(stage):
    """The output of the rule `stage` (mismatch or bias) for every measurement of the experiment."""

    def files(wildcards):
        asked = experiment(wildcards.experiment)
        measurements = [
            measurement.path for measurement in asked.measurements(stage.rule.name)
        ]
        return expand(stage.output[0], experiment=asked.name, measurement=measurements)

    return files


def model_proof(wildcards):
    """What says that the model to evaluate or to measure is complete."""
    run = wildcards.get("run")
    if run is None:
        measured = measurement_of(wildcards).run
        run = "base" if measured is None else measured.path
    if run == "base":
        return rules.base.output
    return rules.convert.output[0].format(experiment=wildcards.experiment, run=run)


def reports(name):
    """What the report of an experiment ends with: a file for each of its parts."""
    return expand(
        f"{RESULTS}/report/{{part}}.json", experiment=name, part=parts(experiment(name))
    )
