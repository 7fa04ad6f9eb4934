# Checkpoints are not declared as outputs: Snakemake deletes the outputs of a failed job, and training goes on from them.
rule train:
    input:
        data=rules.prepare.output,
        base=rules.base.output,
    output:
        f"{RESULTS}/runs/{{run}}/train.json",
    log:
        f"{LOGS}/runs/{{run}}/train.log",
    benchmark:
        f"{BENCHMARKS}/train/{{run}}.tsv"
    # The longest jobs begin first: a short one fills the time until the last of them ends.
    priority: 1
    threads: threads_of(training_gpus)
    resources:
        **gpus(training_gpus, training_nodes),
    params:
        config=RESOLVED,
        config_hash=config_hash("train"),
        version=STAGE_VERSIONS["train"],
    message:
        "training {wildcards.run}"
    shell:
        "dvp train --config {params.config:q} --run {wildcards.run:q} --threads {threads} 2>&1 | tee {log:q}"
