from dvp.analysis.shown import shown
from dvp.files import sha256_json

# As a caption reads it (workflow/report/shown.rst).
config["shown"] = {kind: shown(kind) for kind in ("tables", "figures")}


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
            labels=lambda wildcards: {"show": config["shown"]["tables"][wildcards.table]["title"]},
        ),
        report(
            directory(f"{RESULTS}/figures"),
            patterns=["{figure}.svg"],
            caption="../report/shown.rst",
            category="{experiment}",
            labels=lambda wildcards: {"show": config["shown"]["figures"][wildcards.figure]["title"]},
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
        shown=sha256_json(config["shown"])[:12],
    message:
        "drawing the report of {wildcards.experiment}"
    shell:
        "dvp report --config {input.config:q} 2>&1 | tee {log:q}"
