from dvp.analysis.pages import FIGURES, TABLES, fingerprint

# As workflow/report/shown.rst reads them.
config["captions"] = {
    kind: {name: one.caption for name, one in entries.items()}
    for kind, entries in {"tables": TABLES, "figures": FIGURES}.items()
}


rule report:
    input:
        config=rules.resolve.output,
        results=needed("report"),
        of_bases=lambda wildcards: expand(
            f"{RESULTS}/report/manifest.json",
            experiment=experiment(wildcards.experiment).of_bases,
        ),
    output:
        f"{RESULTS}/report/manifest.json",
        f"{RESULTS}/report/estimates.parquet",
        f"{RESULTS}/report/series.parquet",
        f"{RESULTS}/report/problems.parquet",
        f"{RESULTS}/provenance.json",
        report(
            directory(f"{RESULTS}/tables"),
            patterns=["{table}.html"],
            caption="../report/shown.rst",
            category="{experiment}",
            labels=lambda wildcards: {"show": TABLES[wildcards.table].title},
        ),
        report(
            directory(f"{RESULTS}/figures"),
            patterns=["{figure}.svg"],
            caption="../report/shown.rst",
            category="{experiment}",
            labels=lambda wildcards: {"show": FIGURES[wildcards.figure].title},
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
