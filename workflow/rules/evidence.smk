EVIDENCE = f"{config['results']}/evidence"


rule evidence:
    input:
        claims=checked_claims,
        reports=[
            f"{config['results']}/{name}/report/manifest.json" for name in dict.fromkeys(config["evidence"].values())
        ],
    output:
        f"{EVIDENCE}/claims.json",
        f"{EVIDENCE}/claims.md",
        f"{EVIDENCE}/table.html",
        report(
            f"{EVIDENCE}/claims.html",
            caption="../report/claims.rst",
            category="Claims",
            labels={"page": "Claims and verdicts"},
        ),
    log:
        f"{EVIDENCE}/claims.log",
    benchmark:
        f"{EVIDENCE}/benchmark.tsv"
    params:
        experiments=[f"{key}={RESULTS.format(experiment=name)}" for key, name in config["evidence"].items()],
        folder=lambda wildcards, output: str(Path(output[0]).parent),
        version=STAGE_VERSIONS["evidence"],
    message:
        "answering the claims"
    shell:
        "dvp evidence --experiments {params.experiments:q} --output {params.folder:q} 2>&1 | tee {log:q}"
