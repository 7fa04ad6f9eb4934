rule diagnose:
    input:
        data=rules.prepare.output,
        model=model_proof,
    output:
        f"{RESULTS}/diagnostics/{{cell}}/diagnose.json",
    log:
        f"{LOGS}/diagnostics/{{cell}}.log",
    conda:
        "../../envs/dvp.yaml"
    threads: threads_of(cell_gpus)
    resources:
        **gpus(cell_gpus),
    params:
        config=RESOLVED,
        identity=identity("diagnose"),
        code=code_hash("diagnose"),
    message:
        "comparing engine and trainer: {wildcards.cell}"
    shell:
        "dvp diagnose --config {params.config:q} --cell {wildcards.cell:q} --threads {threads} 2>&1 | tee {log:q}"


rule bias:
    input:
        data=rules.prepare.output,
        model=model_proof,
    output:
        f"{RESULTS}/bias/{{cell}}/bias.json",
    log:
        f"{LOGS}/bias/{{cell}}.log",
    conda:
        "../../envs/dvp.yaml"
    threads: threads_of(cell_gpus)
    resources:
        **gpus(cell_gpus),
    params:
        config=RESOLVED,
        identity=identity("bias"),
        code=code_hash("bias"),
    message:
        "comparing gradient estimators: {wildcards.cell}"
    shell:
        "dvp bias --config {params.config:q} --cell {wildcards.cell:q} --threads {threads} 2>&1 | tee {log:q}"
