FIGURES = ["scores", "learning_curves", "mismatch_curves", "gradient_norm"]
TABLES = ["main_table", "mismatch_table"]


rule report:
    input:
        claims="config/claims.yaml",
        runs=expand(rules.train.output, run=RUNS),
        scores=expand(
            rules.evaluate.output, run=["base", *RUNS], task=EXPERIMENT.data.tasks
        ),
    output:
        f"{RESULTS}/report.json",
        f"{RESULTS}/provenance.json",
        multiext(f"{RESULTS}/tables/main_table", ".csv", ".tex"),
        multiext(f"{RESULTS}/tables/mismatch_table", ".csv", ".tex"),
        expand(f"{RESULTS}/figures/{{figure}}.png", figure=FIGURES),
        report(
            f"{RESULTS}/tables/main_table.md",
            caption="../report/main_table.rst",
            category="Tables",
            labels={"table": "Scores by method"},
        ),
        report(
            f"{RESULTS}/tables/mismatch_table.md",
            caption="../report/mismatch_table.rst",
            category="Tables",
            labels={"table": "Mismatch by method"},
        ),
        report(
            f"{RESULTS}/figures/scores.svg",
            caption="../report/scores.rst",
            category="Figures",
            labels={"figure": "Held-out scores"},
        ),
        report(
            f"{RESULTS}/figures/learning_curves.svg",
            caption="../report/learning_curves.rst",
            category="Figures",
            labels={"figure": "Learning curves"},
        ),
        report(
            f"{RESULTS}/figures/mismatch_curves.svg",
            caption="../report/mismatch_curves.rst",
            category="Figures",
            labels={"figure": "Mismatch KL"},
        ),
        report(
            f"{RESULTS}/figures/gradient_norm.svg",
            caption="../report/gradient_norm.rst",
            category="Figures",
            labels={"figure": "Gradient norm"},
        ),
    log:
        f"{LOGS}/report.log",
    conda:
        "../../envs/dvp.yaml"
    params:
        config=RESOLVED,
        identity=identity("report"),
        code=code_hash("report"),
    message:
        "drawing tables and figures"
    shell:
        "dvp report --config {params.config:q} 2>&1 | tee {log:q}"
