rule mismatch:
    input:
        needed("mismatch"),
    output:
        multiext(
            f"{RESULTS}/mismatch/{{measurement}}/",
            "mismatch.json",
            "histogram.parquet",
            "gaps.parquet",
            "bounds.parquet",
            "safe_sets.parquet",
            "noise.parquet",
            "prefixes.parquet",
        ),
    log:
        f"{LOGS}/mismatch/{{measurement}}.log",
    benchmark:
        f"{BENCHMARKS}/mismatch/{{measurement}}.tsv"
    threads: of_job("mismatch", "gpus")
    resources:
        **gpus("mismatch"),
    params:
        config=RESOLVED,
        config_hash=config_hash("mismatch"),
        version=STAGE_VERSIONS["mismatch"],
    message:
        "comparing engine and trainer: {wildcards.measurement}"
    shell:
        "dvp mismatch --config {params.config:q} --measurement {wildcards.measurement:q} --threads {threads} 2>&1 | tee {log:q}"


rule bias:
    input:
        needed("bias"),
    output:
        multiext(
            f"{RESULTS}/bias/{{measurement}}/",
            "bias.json",
            "estimators.parquet",
            "jackknife.parquet",
            "variance.parquet",
            "variance_jackknife.parquet",
            "proxy.parquet",
        ),
    log:
        f"{LOGS}/bias/{{measurement}}.log",
    benchmark:
        f"{BENCHMARKS}/bias/{{measurement}}.tsv"
    threads: of_job("bias", "gpus")
    resources:
        **gpus("bias"),
    params:
        config=RESOLVED,
        config_hash=config_hash("bias"),
        version=STAGE_VERSIONS["bias"],
    message:
        "comparing gradient estimators: {wildcards.measurement}"
    shell:
        "dvp bias --config {params.config:q} --measurement {wildcards.measurement:q} --threads {threads} 2>&1 | tee {log:q}"
