import sys
import time
from contextlib import ExitStack
from datetime import datetime
from functools import cache
from pathlib import Path
from shlex import quote

from snakemake.exceptions import WorkflowError

from dvp.analysis.claims import load_file
from dvp.analysis.pages import FIGURES, TABLES, fingerprint
from dvp.experiment.loading import check_settings, load_experiment, write_resolved
from dvp.errors import DvpError
from dvp.files import only_writer, sha256_file
from dvp.tools import make_tool
from dvp.tracking.order import restore_order, was_read
from dvp.versions import STAGE_VERSIONS

try:
    config["results"] = check_settings(config).results
except DvpError as error:
    raise WorkflowError(str(error)) from None

# `dvp` is found in the environment that Snakemake itself runs in, activated or not. Slurm signals every process of a
# job: the shell and `tee` must outlive `dvp`, which saves what it has and then leaves. Signals that the shell ignored
# `dvp` would inherit, but not a trap; so a stop ends it from its first instruction on. The trap is run when a pipeline
# has ended, whose status then counts, or before one has begun: that is a stop, too.
shell.prefix(
    "set -euo pipefail; "
    f"export PATH={quote(str(Path(sys.executable).parent))}:$PATH; "
    "tee() {{ trap '' TERM USR1; exec tee \"$@\"; }}; "
    "trap 'test ${{#PIPESTATUS[@]}} = 2 || exit 143' TERM USR1; "
)

# Every experiment has the same rules, in a folder of its own; rules see it as a wildcard.
RESULTS = f"{config['results']}/{{experiment}}"
LOGS = f"{RESULTS}/logs"
# What each job took, in files named after its rule; `dvp plan` reads them.
BENCHMARKS = f"{RESULTS}/benchmarks"
# The resolved experiment: the output of `resolve`, an input of the reports alone. Any other stage depends on those parts
# of it that its `config_hash` hashes: as an input, every change of it would run everything again, and while an
# `ancient` input is made again, Snakemake sees no other reason to run what reads it. So `begin` brings it up to date.
RESOLVED = f"{RESULTS}/config.yaml"
EVIDENCE = f"{config['results']}/evidence"
# The files of a Hugging Face directory that we write, however large.
HUGGING_FACE = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


@cache
def experiment(name):
    try:
        found = load_experiment(name)
    except DvpError as error:
        raise WorkflowError(str(error)) from None
    if workflow.is_main_process:
        restore_order(Path(RESULTS.format(experiment=name)))
    return found


# The one that is asked for, now: a mistake in it is told before anything else.
TASKS = experiment(config["experiment"]).data.tasks


def begin():
    """Lock the experiments of which something is to be done, and have their jobs read the settings of now.

    An experiment whose tool does not work on this machine is refused before any job, if jobs are to call it, and so is a
    fault in the file of claims, which is read when all else is done.

    Until this process ends, no other Snakemake writes to their results, from whichever checkout. (Snakemake's own lock
    sees its working directory only, and outlives a Snakemake that was killed.) What jobs read stays as it is until
    then, though somebody edits the experiment.
    """
    todo = {}
    for job in workflow.dag.needrun_jobs():
        todo.setdefault(job.wildcards_dict.get("experiment"), set()).add(job.rule.name)
        for file in map(Path, job.input):
            if file.exists() and file.stat().st_mtime > time.time() + SKEW:
                raise WorkflowError(
                    f"{file}: dated {datetime.fromtimestamp(file.stat().st_mtime):%Y-%m-%d %H:%M}, in the future; "
                    "what is made from it would seem to be older: `touch` it, or is this machine's clock wrong?"
                )
    try:
        if "evidence" in todo.pop(None, ()):
            load_file().check_keys(config["evidence"])
        for name, stages in todo.items():
            folder = RESULTS.format(experiment=name)
            HELD.enter_context(only_writer(Path(folder), "running this experiment"))
            if experiment(name).tools and stages & CALLING:
                make_tool(experiment(name).tools)
            write_resolved(experiment(name), Path(folder))
    except DvpError as error:
        raise WorkflowError(str(error)) from None


HELD = ExitStack()
CALLING = {"preflight", "train", "evaluate", "evaluate_tasks"}  # a tool
SKEW = 5  # seconds that the clocks of machines may differ by


# Training settings that the grid gives, one a part of the path.
SETTINGS = "(?:/[a-z_]+~[^/]+)*"
# A run as it was after one of its steps is converted and evaluated as the whole run is, and is a path in its folder.
RUN = f"method~[^/]+/engine~[^/]+/rho~[^/]+{SETTINGS}/seed~[0-9]+"
POLICY = f"{RUN}(/step~[0-9]+)?"


wildcard_constraints:
    experiment="[a-z0-9][a-z0-9_.-]*",
    run=RUN,
    measurement=f"(base|method~[^/]+/engine~[^/]+/rho~[^/]+{SETTINGS})/by~[^/]+(/on~[^/]+)?/seed~[0-9]+",
    task="[^/]+",
    engine=f"[^/]+{SETTINGS}",


# How the rules' wildcards name a job, and a job its files.
PATHS = {
    "train": "{run}",
    "convert": "{run}",
    "evaluate": "{run}{by}/{task}",
    "preflight": "{engine}",
    "mismatch": "{measurement}",
    "bias": "{measurement}",
}


def job_of(stage, wildcards):
    """The job that a rule's wildcards name; one that the experiment has not is refused."""
    path = PATHS.get(stage, "").format(**{"task": TASKS[0]} | dict(wildcards.items()))
    return experiment(wildcards.experiment).job(stage, path)


def files_of(name, job):
    """All that a job makes."""
    linked = job.stage == "base" and experiment(name).base.kind != "trained"
    model = "base" if job.run is None else job.run.path
    return expand(
        rules.base_linked.output if linked else getattr(rules, job.stage).output,
        experiment=name,
        run=model,
        by=job.path.removeprefix(model)[: -len(job.task or "") - 1],
        task=job.task or "",
        engine=job.path,
        measurement=job.path,
    )


def needed(stage):
    """The input function of a rule: all that is made by the jobs that a job waits for."""

    def of_wildcards(wildcards):
        name = wildcards.experiment
        before = job_of(stage, wildcards).after
        return [
            file
            for each in before
            for file in files_of(name, experiment(name).job(*each))
        ]

    return of_wildcards


def config_hash(stage):
    """The params function that re-runs a stage when a part of the experiment that it depends on changes."""

    def of_wildcards(wildcards):
        path = PATHS.get(stage, "").format(**dict(wildcards.items()))
        return experiment(wildcards.experiment).config_hash(stage, path)

    return of_wildcards


def config_hashes(wildcards):
    """Of every task of a model, as `config_hash` of one."""
    found = experiment(wildcards.experiment)
    path = f"{wildcards.run}{wildcards.by}"
    return [found.config_hash("evaluate", f"{path}/{task}") for task in TASKS]


def only_if_not_by_task(wildcards):
    """Nothing, for a model of an experiment with TASKS; else a file that never is, so that `evaluate` takes over.

    So it does for what it made: Snakemake would make it again for another rule's sake.
    """
    of = f"{wildcards.run}{wildcards.by}"
    folder = Path(BENCHMARKS.format(experiment=wildcards.experiment), "evaluate", of)
    by_task = any((folder / f"{task}.tsv").exists() for task in TASKS)
    alike = experiment(wildcards.experiment).data.tasks == TASKS
    return [] if alike and not by_task else "no such file: evaluate"


def gpus(stage):
    """A job's GPUs, for the Slurm plugin and, as a number that can be limited, for Snakemake."""

    def resource(value):
        return lambda wildcards: value(job_of(stage, wildcards))

    return {
        # Not the plugin's `gpu`: it counts all nodes', and no step could start in a job of several.
        "gres": resource(lambda job: f"gpu:{job.gpus}"),
        "nodes": resource(lambda job: job.nodes),
        "accelerators": resource(lambda job: job.gpus * job.nodes),
    }


def gpus_each(stage):
    """The GPUs of a job on each node, as its threads."""
    return lambda wildcards: job_of(stage, wildcards).gpus


def only_if_trained(wildcards):
    """Nothing if the pipeline trains the base model; else a file that never is, so that `base_linked` takes over."""
    trained = experiment(wildcards.experiment).base.kind == "trained"
    return [] if trained else "no such file: base_linked"


def declared_memory(wildcards, resources):
    """The option that says what a job may take, where a profile declares it: Slurm's own variables do not reach it."""
    memory = resources.get("mem_mb")
    return "" if memory is None else f"--memory-mb {memory}"


@cache
def local_sources(name):
    """By source, the files of this machine that problems come from, and their checksums."""
    asked = experiment(name)
    used = {
        source: asked.sources[source]
        for source in (asked.data.train, *asked.data.evaluation)
    }
    return {
        source: (of.path, sha256_file(of.path))
        for source, of in used.items()
        if of.kind == "file"
    }


def local_files(wildcards):
    """The files of this machine that problems come from; one that is newer runs nothing again if it says the same."""
    manifest = Path(
        RESULTS.format(experiment=wildcards.experiment), "data", "manifest.json"
    )
    return [
        ancient(str(file)) if was_read(source, digest, manifest) else str(file)
        for source, (file, digest) in local_sources(wildcards.experiment).items()
    ]


def local_contents(wildcards):
    """Their checksums: one that says something else, though it is older, is read again."""
    return {
        source: digest
        for source, (_, digest) in local_sources(wildcards.experiment).items()
    }


SHOWN = {"tables": TABLES, "figures": FIGURES}
# As workflow/report/shown.rst reads them.
config["captions"] = {
    kind: {name: one.caption for name, one in entries.items()}
    for kind, entries in SHOWN.items()
}


def titled(kind):
    """What Snakemake's report calls each of the tables or figures."""
    return lambda wildcards: {"show": SHOWN[kind][wildcards[0]].title}


def everything(name):
    """All files of an experiment that a rule or a person reads, so that a missing one is made again.

    Not the models along training: they are made for their evaluation, and may be deleted after it.
    """
    files = [
        file
        for job in experiment(name).jobs.values()
        if job.asked and not (job.stage == "convert" and job.run.step is not None)
        for file in files_of(name, job)
    ]
    return files + expand(rules.resolve.output, experiment=name)
