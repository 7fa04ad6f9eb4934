# With the resources of a training job: it does the same, for minutes. report.json, which names a check that failed, is
# not declared: Snakemake deletes the outputs of a job that fails.
rule preflight:
    input:
        needed("preflight"),
    output:
        f"{RESULTS}/preflight/engine~{{engine}}/preflight.json",
    log:
        f"{LOGS}/preflight/{{engine}}.log",
    benchmark:
        f"{BENCHMARKS}/preflight/{{engine}}.tsv"
    retries: 0  # what failed fails again
    threads: of_job("preflight", "gpus")
    resources:
        **gpus("preflight"),
        stop_seconds=0,
    params:
        config=RESOLVED,
        config_hash=config_hash("preflight"),
        version=STAGE_VERSIONS["preflight"],
        # Slurm's own variables do not reach the job: a profile says what it may take.
        memory=lambda wildcards, resources: (f"--memory-mb {resources.mem_mb}" if "mem_mb" in resources.keys() else ""),
    message:
        "preflight of a run with engine {wildcards.engine}"
    shell:
        "dvp preflight --config {params.config:q} --engine {wildcards.engine:q}"
        " --threads {threads} --stop-seconds {resources.stop_seconds} {params.memory} 2>&1 | tee {log:q}"
