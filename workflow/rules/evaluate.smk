rule evaluate:
    input:
        config=CONFIG,
        data=rules.prepare.output,
        model=model_proof,
    output:
        f"{RESULTS}/evals/{{run}}/{{task}}/scores.json",
    log:
        f"{LOGS}/runs/{{run}}/evaluate-{{task}}.log",
    conda:
        "../../envs/dvp.yaml"
    params:
        identity=identity("evaluate"),
        code=code_hash("evaluate"),
    message:
        "evaluating {wildcards.run} on {wildcards.task}"
    shell:
        "dvp evaluate --config {input.config:q} --run {wildcards.run:q} --task {wildcards.task:q}"
        " --threads {threads} 2>&1 | tee {log:q}"
