rule base:
    input:
        data=rules.prepare.output,
    output:
        f"{RESULTS}/base/manifest.json",
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
