from snakemake.utils import min_version

min_version("9.0")


configfile: "config/config.yaml"


# Used with `--software-deployment-method apptainer` only; envs/dvp.def is to make it, which nobody has tested.
container: "envs/dvp.sif"


include: "workflow/rules/common.smk"
include: "workflow/rules/resolve.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/base.smk"
include: "workflow/rules/preflight.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/convert.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/evidence.smk"


report: "workflow/report/workflow.rst"


onstart:
    try:
        LOCKS.enter_context(begin(EXPERIMENTS.values(), Path(config["results"])))
    except DvpError as error:
        raise WorkflowError(str(error)) from None


rule all:
    default_target: True
    input:
        lambda wildcards: everything(config["experiment"]),
    localrule: True
