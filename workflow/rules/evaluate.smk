rule evaluate:
    input:
        data=rules.prepare.output,
        model=model_proof,
    output:
        f"{RESULTS}/evals/{{run}}/{{task}}/scores.json",
    log:
        f"{LOGS}/runs/{{run}}/evaluate-{{task}}.log",
    conda:
        "../../envs/dvp.yaml"
    threads: EXPERIMENT.engines[EXPERIMENT.evaluation.engine].tensor_parallel
    resources:
        **gpus(EXPERIMENT.engines[EXPERIMENT.evaluation.engine].tensor_parallel),
    params:
        config=RESOLVED,
        identity=identity("evaluate"),
        code=code_hash("evaluate"),
    message:
        "evaluating {wildcards.run} on {wildcards.task}"
    shell:
        "dvp evaluate --config {params.config:q} --run {wildcards.run:q} --task {wildcards.task:q}"
        " --threads {threads} 2>&1 | tee {log:q}"
