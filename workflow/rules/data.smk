rule prepare:
    input:
        # One that is newer but says the same runs nothing again.
        files=lambda wildcards: [
            ancient(file) if read else file
            for file, read in were_read(
                experiment(wildcards.experiment), Path(RESULTS.format(experiment=wildcards.experiment))
            ).items()
        ],
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
        # A file that says something else, though it is older, is read again.
        contents=lambda wildcards: checksums_of(experiment(wildcards.experiment)),
    message:
        "preparing problems"
    shell:
        "dvp prepare --config {params.config:q} 2>&1 | tee {log:q}"
