rule convert:
    input:
        base=rules.base.output,
        trained=rules.train.output,
    output:
        f"{RESULTS}/models/{{run}}/conversion.json",
    log:
        f"{LOGS}/runs/{{run}}/convert.log",
    conda:
        "../../envs/dvp.yaml"
    params:
        config=RESOLVED,
        config_hash=config_hash("convert"),
        code=code_hash("convert"),
    message:
        "converting {wildcards.run}"
    shell:
        "dvp convert --config {params.config:q} --run {wildcards.run:q} --threads {threads} 2>&1 | tee {log:q}"
