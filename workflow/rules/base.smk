rule base:
    input:
        needed("base"),
        kind=only_if_trained,
    output:
        multiext(f"{RESULTS}/base/", "manifest.json", *HUGGING_FACE),
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


# A model that exists already is linked, in however many files its weights are; every stage verifies them by name.
use rule base as base_linked with:
    input:
        needed("base"),
    output:
        multiext(f"{RESULTS}/base/", "manifest.json", "config.json"),


ruleorder: base > base_linked
