rule mismatch:
    input:
        data=rules.prepare.output,
        model=model_proof,
    output:
        f"{RESULTS}/mismatch/{{measurement}}/mismatch.json",
    log:
        f"{LOGS}/mismatch/{{measurement}}.log",
    conda:
        "../../envs/dvp.yaml"
    threads: threads_of(measurement_gpus)
    resources:
        **gpus(measurement_gpus),
    params:
        config=RESOLVED,
        config_hash=config_hash("mismatch"),
        code=code_hash("mismatch"),
    message:
        "comparing engine and trainer: {wildcards.measurement}"
    shell:
        "dvp mismatch --config {params.config:q} --measurement {wildcards.measurement:q} --threads {threads} 2>&1 | tee {log:q}"


rule bias:
    input:
        data=rules.prepare.output,
        model=model_proof,
    output:
        f"{RESULTS}/bias/{{measurement}}/bias.json",
    log:
        f"{LOGS}/bias/{{measurement}}.log",
    conda:
        "../../envs/dvp.yaml"
    threads: threads_of(measurement_gpus)
    resources:
        **gpus(measurement_gpus),
    params:
        config=RESOLVED,
        config_hash=config_hash("bias"),
        code=code_hash("bias"),
    message:
        "comparing gradient estimators: {wildcards.measurement}"
    shell:
        "dvp bias --config {params.config:q} --measurement {wildcards.measurement:q} --threads {threads} 2>&1 | tee {log:q}"
