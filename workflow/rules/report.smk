rule report:
    input:
        config=rules.resolve.output,
        results=needed("report"),
        replicates=lambda wildcards: expand(
            f"{RESULTS}/report/manifest.json",
            experiment=experiment(wildcards.experiment).replicates,
        ),
    output:
        f"{RESULTS}/report/manifest.json",
        f"{RESULTS}/report/estimates.parquet",
        f"{RESULTS}/report/series.parquet",
        f"{RESULTS}/provenance.json",
        report(
            directory(f"{RESULTS}/tables"),
            patterns=["{table}.html"],
            caption="../report/shown.rst",
            category="{experiment}",
            labels=titled("tables"),
        ),
        report(
            directory(f"{RESULTS}/figures"),
            patterns=["{figure}.svg"],
            caption="../report/shown.rst",
            category="{experiment}",
            labels=titled("figures"),
        ),
        report(
            f"{RESULTS}/report/responses.html",
            caption="../report/responses.rst",
            category="{experiment}",
            labels={"show": "Responses, token by token"},
        ),
    log:
        f"{LOGS}/report.log",
    benchmark:
        f"{BENCHMARKS}/report.tsv"
    params:
        config_hash=config_hash("report"),
        version=STAGE_VERSIONS["report"],
        shown=fingerprint(),
    message:
        "drawing the report of {wildcards.experiment}"
    shell:
        "dvp report --config {input.config:q} 2>&1 | tee {log:q}"
