# All tasks of a model, with one engine. The folders of the tasks are not declared, so that a task that is done is kept
# while another one fails or is added.
rule evaluate:
    input:
        needed("evaluate"),
    output:
        f"{RESULTS}/evals/{{model}}/manifest.json",
    log:
        f"{LOGS}/runs/{{model}}/evaluate.log",
    benchmark:
        f"{BENCHMARKS}/evaluate/{{model}}.tsv"
    threads: of_job("evaluate", "gpus")
    resources:
        **gpus("evaluate"),
    params:
        config=RESOLVED,
        config_hash=config_hash("evaluate"),
        version=STAGE_VERSIONS["evaluate"],
    message:
        "evaluating {wildcards.model}"
    shell:
        "dvp evaluate --config {params.config:q} --run {wildcards.model:q} --threads {threads} 2>&1 | tee {log:q}"
