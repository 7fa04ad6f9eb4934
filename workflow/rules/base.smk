rule base:
    input:
        data=rules.prepare.output,
    output:
        f"{RESULTS}/base/manifest.json",
    log:
        f"{LOGS}/base.log",
    conda:
        "../../envs/dvp.yaml"
    threads: 2
    params:
        config=RESOLVED,
        config_hash=config_hash("base"),
        code=code_hash("base"),
    message:
        "making the base model"
    shell:
        "dvp base --config {params.config:q} --threads {threads} 2>&1 | tee {log:q}"
