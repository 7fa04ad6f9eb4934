import sys
from contextlib import ExitStack
from pathlib import Path
from shlex import quote

from snakemake.exceptions import WorkflowError

from dvp.analysis.claims import load_file
from dvp.errors import DvpError
from dvp.experiment.jobs import together
from dvp.experiment.loading import check_settings, load_experiment
from dvp.experiment.running import begin, checksums_of, were_read
from dvp.strict import EXPERIMENT
from dvp.tracking.order import restore_order
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
BENCHMARKS = f"{RESULTS}/benchmarks"
# The resolved experiment: the output of `resolve`, an input of the reports alone. Any other stage depends on those parts
# of it that its `config_hash` hashes: as an input, every change of it would run everything again, and while an
# `ancient` input is made again, Snakemake sees no other reason to run what reads it. So `begin` brings it up to date.
RESOLVED = f"{RESULTS}/config.yaml"

# Training settings that the grid gives, one a part of the path.
SETTINGS = "(?:/[a-z_]+~[^/]+)*"
RUN = f"method~[^/]+/engine~[^/]+/rho~[^/]+{SETTINGS}/seed~[0-9]+"
# A run as it was after one of its steps is converted and evaluated as the whole run is, and is a path in its folder.
POLICY = f"{RUN}(?:/step~[0-9]+)?"


wildcard_constraints:
    experiment=EXPERIMENT.pattern,
    run=RUN,
    model=f"(?:base|{POLICY})(?:/by~[^/]+/min_p~[^/]+)?",
    measurement=f"(base|method~[^/]+/engine~[^/]+/rho~[^/]+{SETTINGS})/by~[^/]+(/on~[^/]+)?/seed~[0-9]+",
    engine=f"[^/]+{SETTINGS}",


EXPERIMENTS = {}  # those that the rules have asked for
LOCKS = ExitStack()  # on their results, until this process ends
PLACES = ("run", "model", "engine", "measurement")  # wildcards beside the experiment, of which a rule has one at most


def experiment(name):
    """The experiment of this name. The files of a copy get their order back before Snakemake looks at their ages."""
    if name not in EXPERIMENTS:
        EXPERIMENTS[name] = load_experiment(name)
        if workflow.is_main_process:
            restore_order(Path(RESULTS.format(experiment=name)))
    return EXPERIMENTS[name]


def jobs_of(stage, wildcards):
    """The jobs of a stage that a rule's wildcards name: one, or an evaluation for each task."""
    found = experiment(wildcards.experiment)
    path = "".join(value for name, value in wildcards.items() if name in PLACES)
    paths = [str(Path(path, task)) for task in found.data.tasks] if stage == "evaluate" else [path]
    return [found.job(stage, each) for each in paths]


def files_of(name, jobs):
    """All that jobs of an experiment make; each is given by stage and path."""
    return [
        file
        for stage, path in dict.fromkeys(together(*job) for job in jobs)
        for file in expand(getattr(rules, stage).output, experiment=name, **dict.fromkeys(PLACES, path))
    ]


def needed(stage):
    """The input function of a rule: all that is made by the jobs that a job waits for."""
    return lambda wildcards: files_of(wildcards.experiment, jobs_of(stage, wildcards)[0].after)


def everything(name):
    """All files of an experiment that a rule or a person reads, so that a missing one is made again."""
    jobs = [place for place, job in experiment(name).jobs.items() if job.asked]
    return files_of(name, jobs) + expand(rules.resolve.output, experiment=name)


def config_hash(stage):
    """The params function that re-runs a stage when a part of the experiment that it depends on changes."""
    return lambda wildcards: " ".join(
        experiment(wildcards.experiment).config_hash(stage, job.path) for job in jobs_of(stage, wildcards)
    )


def of_job(stage, key):
    """The function of a rule's wildcards that says something of its job, such as its GPUs."""
    return lambda wildcards: getattr(jobs_of(stage, wildcards)[0], key)


def gpus(stage):
    """A job's GPUs, for the Slurm plugin and, as a number that can be limited, for Snakemake."""
    return {key: of_job(stage, key) for key in ("gres", "nodes", "accelerators")}


def checked_claims(wildcards):
    """The file of claims, a fault in which is told before any job."""
    load_file().check_keys(config["evidence"])
    return "config/claims.yaml"
