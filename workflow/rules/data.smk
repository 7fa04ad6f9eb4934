rule resolve:
    input:
        "config/config.yaml",
        f"config/experiments/{EXPERIMENT.name}.yaml",
        expand("config/catalogue/{table}.yaml", table=["engines", "methods", "sources"]),
    output:
        RESOLVED,
    log:
        f"{LOGS}/resolve.log",
    conda:
        "../../envs/dvp.yaml"
    params:
        experiment=EXPERIMENT.name,
        folder=subpath(output[0], parent=True),
        identity=EXPERIMENT.identity("report"),
    message:
        "validating experiment {params.experiment}"
    shell:
        "dvp resolve --experiment {params.experiment:q} --folder {params.folder:q} 2>&1 | tee {log:q}"


rule prepare:
    input:
        config=CONFIG,
        files=local_files(),
    output:
        f"{RESULTS}/data/manifest.json",
    log:
        f"{LOGS}/prepare.log",
    conda:
        "../../envs/dvp.yaml"
    params:
        identity=identity("prepare"),
        code=code_hash("prepare"),
    message:
        "preparing problems"
    shell:
        "dvp prepare --config {input.config:q} 2>&1 | tee {log:q}"
