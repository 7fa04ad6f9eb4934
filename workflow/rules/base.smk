# The weights are not declared, as a model that exists already has them in however many files; every stage verifies them.
rule base:
    input:
        needed("base"),
    output:
        multiext(f"{RESULTS}/base/", "manifest.json", "config.json"),
    log:
        f"{LOGS}/base.log",
    benchmark:
        f"{BENCHMARKS}/base.tsv"
    threads: 2
    params:
        config=RESOLVED,
        config_hash=config_hash("base"),
        version=STAGE_VERSIONS["base"],
    message:
        "making the base model"
    shell:
        "dvp base --config {params.config:q} --threads {threads} 2>&1 | tee {log:q}"
