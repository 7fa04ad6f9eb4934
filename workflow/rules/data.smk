rule prepare:
    input:
        files=local_files,
    output:
        multiext(f"{RESULTS}/data/", "manifest.json", "train.parquet", "eval.parquet"),
    log:
        f"{LOGS}/prepare.log",
    benchmark:
        f"{BENCHMARKS}/prepare.tsv"
    params:
        config=RESOLVED,
        config_hash=config_hash("prepare"),
        version=STAGE_VERSIONS["prepare"],
        contents=local_contents,
    message:
        "preparing problems"
    shell:
        "dvp prepare --config {params.config:q} 2>&1 | tee {log:q}"
