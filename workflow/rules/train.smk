# Checkpoints are not declared: Snakemake deletes a job's outputs before it starts it again, and training goes on from
# them. Each has copies of metrics.jsonl and responses.parquet, which training puts back.
rule train:
    input:
        needed("train"),
    output:
        multiext(
            f"{RESULTS}/runs/{{run}}/",
            "train.json",
            "metrics.jsonl",
            "responses.parquet",
            "probe.safetensors",
        ),
    log:
        f"{LOGS}/runs/{{run}}/train.log",
    benchmark:
        f"{BENCHMARKS}/train/{{run}}.tsv"
    # The longest jobs begin first: a short one fills the time until the last of them ends.
    priority: 1
    threads: of_job("train", "gpus")
    resources:
        **gpus("train"),
        stop_seconds=0,
    params:
        config=RESOLVED,
        config_hash=config_hash("train"),
        version=STAGE_VERSIONS["train"],
    message:
        "training {wildcards.run}"
    shell:
        "dvp train --config {params.config:q} --run {wildcards.run:q} --threads {threads} "
        "--stop-seconds {resources.stop_seconds} 2>&1 | tee {log:q}"
