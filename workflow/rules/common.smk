import sys
import time
from contextlib import ExitStack
from datetime import datetime
from functools import cache
from pathlib import Path
from shlex import quote

from snakemake.exceptions import WorkflowError

from dvp.analysis.claims import load_file
from dvp.analysis.parts import several_solutions
from dvp.analysis.shown import shown
from dvp.experiment.grid import whole_run
from dvp.experiment.loading import check_settings, load_experiment, write_resolved
from dvp.errors import DvpError
from dvp.files import only_writer, sha256_file, sha256_json
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
experiment(config["experiment"])


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
            if experiment(name).tools and stages & {"preflight", "train", "evaluate"}:
                make_tool(experiment(name).tools)
            write_resolved(experiment(name), Path(folder))
    except DvpError as error:
        raise WorkflowError(str(error)) from None
    rehearse_first(workflow.dag)
    sleep_between_jobs(workflow)


HELD = ExitStack()
SKEW = 5  # seconds that the clocks of machines may differ by


def rehearse_first(dag):
    """Have every training job that is to be done wait for every preflight of its experiment that is to be done.

    With `keep-going`, runs of one engine would else be trained although the preflight of another one failed. If all
    preflights were inputs of every run, one more engine in the grid would have all runs made again. Snakemake cannot be
    asked for an order alone, so this changes the counts by which it starts jobs (version 9; a test would notice).
    """
    todo = list(dag.needrun_jobs())
    for preflight in todo:
        for training in todo:
            if (
                (preflight.rule.name, training.rule.name) == ("preflight", "train")
                and preflight.wildcards.experiment == training.wildcards.experiment
                and training not in dag.depending[preflight]
            ):
                dag.depending[preflight][training] = set()
                dag._n_until_ready[training] += 1
                dag._ready_jobs.discard(training)


def sleep_between_jobs(workflow):
    """Have Snakemake's scheduler wake when a job has ended, and not every second as well.

    To hold its default limit, 100 jobs a second, it looks at all files of all jobs that are ready once a second, and once
    more for each job that has ended: with some hundred jobs, most of a core (version 9; a test would notice). Another limit
    is kept, and so is the default one where only a part of the jobs is looked at, which nothing else would wake it for.
    """
    settings = workflow.scheduling_settings
    limit = settings.max_jobs_per_timespan
    if (
        limit
        and (limit.max_jobs, limit.timespan) == (100, 1)
        and settings.subsample is None
    ):
        workflow.scheduler.job_rate_limiter = None


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


def config_hash(stage):
    """The params function that re-runs a stage when a part of the experiment that it depends on changes."""

    def of_wildcards(wildcards):
        asked = experiment(wildcards.experiment)
        if "measurement" in wildcards.keys():
            return asked.config_hash(
                stage, measurement=asked.measurement(stage, wildcards.measurement)
            )
        path = wildcards.get("run", "base") + wildcards.get("by", "")
        run, sampler = asked.evaluated(path)
        return asked.config_hash(
            stage,
            run,
            wildcards.get("task"),
            engine=wildcards.get("engine"),
            sampler=sampler,
        )

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
    _, sampler = asked.evaluated(wildcards.run + wildcards.by)
    return asked.engines[sampler.engine].tensor_parallel


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


def trains_base(name):
    return experiment(name).base.kind == "trained"


def only_if_trained(wildcards):
    """Nothing if the pipeline trains the base model; else a file that never is, so that `base_linked` takes over."""
    return [] if trains_base(wildcards.experiment) else "no such file: base_linked"


def base_files(wildcards):
    """The base model."""
    stage = rules.base if trains_base(wildcards.experiment) else rules.base_linked
    return expand(stage.output, experiment=wildcards.experiment)


def declared_memory(wildcards, resources):
    """The option that says what a job may take, where a profile declares it: Slurm's own variables do not reach it."""
    memory = resources.get("mem_mb")
    return "" if memory is None else f"--memory-mb {memory}"


def preflight_files(wildcards):
    """What says that the path of a run was rehearsed with its engine; nothing where that is not asked for.

    Where this is made again the run is, too; for the other preflights it only waits (`rehearse_first`).
    """
    asked = experiment(wildcards.experiment)
    preflight = asked.run(wildcards.run).preflight
    if preflight not in asked.preflights:
        return []
    return expand(
        rules.preflight.output, experiment=wildcards.experiment, engine=preflight
    )


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


def outputs(stage, name, evaluated="as all"):
    """All that a rule makes for an experiment, for every run, task and measurement of it.

    evaluated : which evaluations, those of all models with what samples them all (as all), of the runs as they were
        after their evaluated steps (along training), or with what else samples them (also).
    """
    asked = experiment(name)
    runs, stage_name = [run.path for run in asked.runs], stage.rule.name
    if stage_name in ("mismatch", "bias"):
        of = {"measurement": [each.path for each in asked.measurements(stage_name)]}
    elif stage_name == "preflight":
        of = {"engine": asked.preflights}
    elif stage_name == "evaluate":
        paths = {
            "as all": [(path, "") for path in ("base", *runs)],
            "along training": [(run.path, "") for run in asked.snapshots],
            "also": [
                ("base" if run is None else run.path, sampler.in_path)
                for run, sampler in asked.further_evaluations
            ],
        }[evaluated]
        return [
            file
            for run, by in paths
            for file in expand(
                stage.output, experiment=name, run=run, by=by, task=asked.data.tasks
            )
        ]
    else:
        of = {"run": runs}
    # A rule without wildcards of its own would give its files as often as there are runs.
    return list(dict.fromkeys(expand(stage.output, experiment=name, **of)))


def all_of(stage, **of):
    """The input function for all that a rule makes for the experiment."""
    return lambda wildcards: outputs(stage, wildcards.experiment, **of)


def training_files(wildcards):
    """What the training of a run ends with, also of a run after one of its steps."""
    run = whole_run(wildcards.run)
    return expand(rules.train.output, experiment=wildcards.experiment, run=run)


def model_files(wildcards):
    """The model to evaluate or to measure."""
    run = wildcards.get("run")
    if run is None:
        measured = measurement_of(wildcards).run
        run = "base" if measured is None else measured.path
    if run == "base":
        return base_files(wildcards)
    return expand(rules.convert.output, experiment=wildcards.experiment, run=run)


def reported(wildcards):
    """All that the report of an experiment is made of."""
    name = wildcards.experiment
    files = outputs(rules.train, name)
    for evaluated in ("as all", "along training", "also"):
        files += outputs(rules.evaluate, name, evaluated)
    for stage in (rules.mismatch, rules.bias):
        files += outputs(stage, name)
    return files + (
        [f"{RESULTS}/base/manifest.json"] if several_solutions(experiment(name)) else []
    )


# As a caption reads it (workflow/report/shown.rst); a table or figure that is declared anew is drawn.
config["shown"] = {kind: shown(kind) for kind in ("tables", "figures")}


def titled(kind):
    """What Snakemake's report calls each of the tables or figures."""
    return lambda wildcards: {"show": shown(kind)[wildcards[0]]["title"]}


def everything(name):
    """All files of an experiment that a rule or a person reads, so that a missing one is made again.

    Not the models along training: they are made for their evaluation, and may be deleted after it.
    """
    base = "base" if trains_base(name) else "base_linked"
    stages = ["resolve", "prepare", base, "preflight", "train", "convert", "evaluate"]
    stages += ["mismatch", "bias", "report"]
    files = [file for stage in stages for file in outputs(getattr(rules, stage), name)]
    for evaluated in ("along training", "also"):
        files += outputs(rules.evaluate, name, evaluated)
    return files
