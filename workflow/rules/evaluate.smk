rule evaluate:
    input:
        needed("evaluate"),
    output:
        multiext(
            f"{RESULTS}/evals/{{run}}{{by}}/{{task}}/",
            "scores.json",
            "samples.parquet",
        ),
    log:
        f"{LOGS}/runs/{{run}}{{by}}/evaluate-{{task}}.log",
    benchmark:
        f"{BENCHMARKS}/evaluate/{{run}}{{by}}/{{task}}.tsv"
    wildcard_constraints:
        run=f"base|{POLICY}",
        by="(/by~[^/]+/min_p~[^/]+)?",
    threads: gpus_each("evaluate")
    resources:
        **gpus("evaluate"),
    params:
        config=RESOLVED,
        config_hash=config_hash("evaluate"),
        version=STAGE_VERSIONS["evaluate"],
    message:
        "evaluating {wildcards.run}{wildcards.by} on {wildcards.task}"
    shell:
        "dvp evaluate --config {params.config:q} --run {wildcards.run:q}{wildcards.by:q} --task {wildcards.task:q}"
        " --threads {threads} 2>&1 | tee {log:q}"
