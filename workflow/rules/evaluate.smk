# One task: of an experiment with one, of a model that was evaluated task by task, and what is asked for by its path.
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


# All tasks of a model, with one engine. What is there already and still holds is kept: `update`.
if len(TASKS) > 1:

    rule evaluate_tasks:
        input:
            needed("evaluate"),
            kind=only_if_not_by_task,
        output:
            update(
                expand(
                    f"{RESULTS}/evals/{{run}}{{by}}/{{task}}/{{file}}",
                    task=TASKS,
                    file=("scores.json", "samples.parquet"),
                    allow_missing=True,
                )
            ),
        log:
            f"{LOGS}/runs/{{run}}{{by}}/evaluate.log",
        benchmark:
            f"{BENCHMARKS}/evaluate_tasks/{{run}}{{by}}.tsv"
        wildcard_constraints:
            run=f"base|{POLICY}",
            by="(/by~[^/]+/min_p~[^/]+)?",
        threads: gpus_each("evaluate")
        resources:
            **gpus("evaluate"),
        params:
            config=RESOLVED,
            config_hash=config_hashes,
            version=STAGE_VERSIONS["evaluate"],
        message:
            "evaluating {wildcards.run}{wildcards.by}"
        shell:
            "dvp evaluate --config {params.config:q} --run {wildcards.run:q}{wildcards.by:q}"
            " --threads {threads} 2>&1 | tee {log:q}"

    ruleorder: evaluate_tasks > evaluate
