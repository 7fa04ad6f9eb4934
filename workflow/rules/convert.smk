rule convert:
    input:
        needed("convert"),
    output:
        multiext(
            f"{RESULTS}/models/{{run}}/",
            "conversion.json",
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ),
    log:
        f"{LOGS}/runs/{{run}}/convert.log",
    benchmark:
        f"{BENCHMARKS}/convert/{{run}}.tsv"
    wildcard_constraints:
        run=POLICY,
    params:
        config=RESOLVED,
        config_hash=config_hash("convert"),
        version=STAGE_VERSIONS["convert"],
    message:
        "converting {wildcards.run}"
    shell:
        "dvp convert --config {params.config:q} --run {wildcards.run:q} --threads {threads} 2>&1 | tee {log:q}"
