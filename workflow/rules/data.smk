rule prepare:
    input:
        files=local_files,
    output:
        f"{RESULTS}/data/manifest.json",
    log:
        f"{LOGS}/prepare.log",
    conda:
        "../../envs/dvp.yaml"
    params:
        config=RESOLVED,
        config_hash=config_hash("prepare"),
        code=code_hash("prepare"),
    message:
        "preparing problems"
    shell:
        "dvp prepare --config {params.config:q} 2>&1 | tee {log:q}"
