# `update`: the file is replaced in one step and never missing, as other jobs may be reading it.
rule resolve:
    output:
        update(RESOLVED),
    log:
        f"{LOGS}/resolve.log",
    benchmark:
        f"{BENCHMARKS}/resolve.tsv"
    priority: 100
    localrule: True
    params:
        folder=subpath(output[0], parent=True),
        config_hash=config_hash("report"),
        version=STAGE_VERSIONS["resolve"],
    message:
        "resolving the experiment {wildcards.experiment}"
    shell:
        "dvp resolve --experiment {wildcards.experiment:q} --folder {params.folder:q} 2>&1 | tee {log:q}"
