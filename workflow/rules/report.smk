rule report_training:
    input:
        config=rules.resolve.output,
        runs=all_of(rules.train),
        scores=all_of(rules.evaluate),
    output:
        f"{RESULTS}/report/training.json",
        f"{RESULTS}/provenance.json",
        multiext(f"{RESULTS}/tables/main_table", ".csv", ".md", ".tex"),
        multiext(f"{RESULTS}/tables/mismatch_table", ".csv", ".md", ".tex"),
        expand(
            f"{RESULTS}/figures/{{figure}}.png",
            figure=["scores", "learning_curves", "mismatch_curves", "gradient_norm"],
            allow_missing=True,
        ),
        report(
            f"{RESULTS}/tables/main_table.html",
            caption="../report/main_table.rst",
            category="{experiment}",
            labels={"show": "Scores by method"},
        ),
        report(
            f"{RESULTS}/tables/mismatch_table.html",
            caption="../report/mismatch_table.rst",
            category="{experiment}",
            labels={"show": "Mismatch by method"},
        ),
        report(
            f"{RESULTS}/figures/scores.svg",
            caption="../report/scores.rst",
            category="{experiment}",
            labels={"show": "Held-out scores"},
        ),
        report(
            f"{RESULTS}/figures/learning_curves.svg",
            caption="../report/learning_curves.rst",
            category="{experiment}",
            labels={"show": "Learning curves"},
        ),
        report(
            f"{RESULTS}/figures/mismatch_curves.svg",
            caption="../report/mismatch_curves.rst",
            category="{experiment}",
            labels={"show": "Mismatch KL"},
        ),
        report(
            f"{RESULTS}/figures/gradient_norm.svg",
            caption="../report/gradient_norm.rst",
            category="{experiment}",
            labels={"show": "Gradient norm"},
        ),
        report(
            f"{RESULTS}/report/responses.html",
            caption="../report/responses.rst",
            category="{experiment}",
            labels={"show": "Responses, token by token"},
        ),
    log:
        f"{LOGS}/report-training.log",
    benchmark:
        f"{BENCHMARKS}/report_training.tsv"
    params:
        config_hash=config_hash("report"),
        version=STAGE_VERSIONS["report_training"],
    message:
        "drawing training and scores of {wildcards.experiment}"
    shell:
        "dvp report --config {input.config:q} --part training 2>&1 | tee {log:q}"


rule report_matrix:
    input:
        config=rules.resolve.output,
        runs=all_of(rules.train),
        scores=all_of(rules.evaluate),
        also=all_of(rules.evaluate, evaluated="also"),
    output:
        f"{RESULTS}/report/matrix.json",
        multiext(f"{RESULTS}/tables/matrix_table", ".csv", ".md", ".tex"),
        multiext(f"{RESULTS}/tables/overview_table", ".csv", ".md", ".tex"),
        expand(
            f"{RESULTS}/figures/{{figure}}.png",
            figure=["evaluation_matrix"],
            allow_missing=True,
        ),
        report(
            f"{RESULTS}/tables/overview_table.html",
            caption="../report/overview_table.rst",
            category="{experiment}",
            labels={"show": "A method in a row"},
        ),
        report(
            f"{RESULTS}/tables/matrix_table.html",
            caption="../report/matrix_table.rst",
            category="{experiment}",
            labels={"show": "Scores by policy"},
        ),
        report(
            f"{RESULTS}/figures/evaluation_matrix.svg",
            caption="../report/evaluation_matrix.rst",
            category="{experiment}",
            labels={"show": "Scores by policy"},
        ),
    log:
        f"{LOGS}/report-matrix.log",
    benchmark:
        f"{BENCHMARKS}/report_matrix.tsv"
    params:
        config_hash=config_hash("report"),
        version=STAGE_VERSIONS["report_matrix"],
    message:
        "drawing the scores of {wildcards.experiment} by policy"
    shell:
        "dvp report --config {input.config:q} --part matrix 2>&1 | tee {log:q}"


rule report_diversity:
    input:
        config=rules.resolve.output,
        base=f"{RESULTS}/base/manifest.json",
        runs=all_of(rules.train),
        scores=all_of(rules.evaluate),
        also=all_of(rules.evaluate, evaluated="also"),
    output:
        f"{RESULTS}/report/diversity.json",
        multiext(f"{RESULTS}/tables/diversity_table", ".csv", ".md", ".tex"),
        expand(
            f"{RESULTS}/figures/{{figure}}.png",
            figure=["solutions"],
            allow_missing=True,
        ),
        report(
            f"{RESULTS}/tables/diversity_table.html",
            caption="../report/diversity_table.rst",
            category="{experiment}",
            labels={"show": "Different solutions"},
        ),
        report(
            f"{RESULTS}/figures/solutions.svg",
            caption="../report/solutions.rst",
            category="{experiment}",
            labels={"show": "Different solutions, drawn"},
        ),
    log:
        f"{LOGS}/report-diversity.log",
    benchmark:
        f"{BENCHMARKS}/report_diversity.tsv"
    params:
        config_hash=config_hash("report"),
        version=STAGE_VERSIONS["report_diversity"],
    message:
        "drawing the different solutions of {wildcards.experiment}"
    shell:
        "dvp report --config {input.config:q} --part diversity 2>&1 | tee {log:q}"


rule report_curve:
    input:
        config=rules.resolve.output,
        runs=all_of(rules.train),
        scores=all_of(rules.evaluate),
        along_training=all_of(rules.evaluate, evaluated="along training"),
    output:
        f"{RESULTS}/report/curve.json",
        multiext(f"{RESULTS}/tables/curve_table", ".csv", ".md", ".tex"),
        multiext(f"{RESULTS}/tables/score_curve", ".csv", ".md", ".tex"),
        expand(
            f"{RESULTS}/figures/{{figure}}.png",
            figure=["score_curve"],
            allow_missing=True,
        ),
        report(
            f"{RESULTS}/tables/curve_table.html",
            caption="../report/curve_table.rst",
            category="{experiment}",
            labels={"show": "Final, peak and mean scores, tokens to a score"},
        ),
        report(
            f"{RESULTS}/tables/score_curve.html",
            caption="../report/score_curve_table.rst",
            category="{experiment}",
            labels={"show": "Scores by step"},
        ),
        report(
            f"{RESULTS}/figures/score_curve.svg",
            caption="../report/score_curve.rst",
            category="{experiment}",
            labels={"show": "Scores along training"},
        ),
    log:
        f"{LOGS}/report-curve.log",
    benchmark:
        f"{BENCHMARKS}/report_curve.tsv"
    params:
        config_hash=config_hash("report"),
        version=STAGE_VERSIONS["report_curve"],
    message:
        "drawing the scores along training of {wildcards.experiment}"
    shell:
        "dvp report --config {input.config:q} --part curve 2>&1 | tee {log:q}"


rule report_mismatch:
    input:
        config=rules.resolve.output,
        measurements=all_of(rules.mismatch),
    output:
        f"{RESULTS}/report/mismatch.json",
        multiext(f"{RESULTS}/tables/engines_table", ".csv", ".md", ".tex"),
        multiext(f"{RESULTS}/tables/safe_sets_table", ".csv", ".md", ".tex"),
        multiext(f"{RESULTS}/tables/lengths_table", ".csv", ".md", ".tex"),
        expand(
            f"{RESULTS}/figures/{{figure}}.png",
            figure=[
                "bounds",
                "mismatch_distribution",
                "mismatch_by_probability",
                "safe_sets",
                "pruned_shares",
                "mismatch_by_length",
            ],
            allow_missing=True,
        ),
        report(
            f"{RESULTS}/tables/engines_table.html",
            caption="../report/engines_table.rst",
            category="{experiment}",
            labels={"show": "Engines"},
        ),
        report(
            f"{RESULTS}/tables/safe_sets_table.html",
            caption="../report/safe_sets_table.rst",
            category="{experiment}",
            labels={"show": "Safe vocabularies"},
        ),
        report(
            f"{RESULTS}/tables/lengths_table.html",
            caption="../report/lengths_table.rst",
            category="{experiment}",
            labels={"show": "The mismatch by length"},
        ),
        report(
            f"{RESULTS}/figures/bounds.svg",
            caption="../report/bounds.rst",
            category="{experiment}",
            labels={"show": "|d| and its bounds"},
        ),
        report(
            f"{RESULTS}/figures/mismatch_distribution.svg",
            caption="../report/mismatch_distribution.rst",
            category="{experiment}",
            labels={"show": "Distribution of d"},
        ),
        report(
            f"{RESULTS}/figures/mismatch_by_probability.svg",
            caption="../report/mismatch_by_probability.rst",
            category="{experiment}",
            labels={"show": "Where the mismatch is"},
        ),
        report(
            f"{RESULTS}/figures/safe_sets.svg",
            caption="../report/safe_sets.rst",
            category="{experiment}",
            labels={"show": "Safe vocabularies by ρ"},
        ),
        report(
            f"{RESULTS}/figures/pruned_shares.svg",
            caption="../report/pruned_shares.rst",
            category="{experiment}",
            labels={"show": "What ρ can remove"},
        ),
        report(
            f"{RESULTS}/figures/mismatch_by_length.svg",
            caption="../report/mismatch_by_length.rst",
            category="{experiment}",
            labels={"show": "The mismatch by length, drawn"},
        ),
    log:
        f"{LOGS}/report-mismatch.log",
    benchmark:
        f"{BENCHMARKS}/report_mismatch.tsv"
    params:
        config_hash=config_hash("report"),
        version=STAGE_VERSIONS["report_mismatch"],
    message:
        "drawing the mismatch of {wildcards.experiment}"
    shell:
        "dvp report --config {input.config:q} --part mismatch 2>&1 | tee {log:q}"


rule report_bias:
    input:
        config=rules.resolve.output,
        measurements=all_of(rules.bias),
    output:
        f"{RESULTS}/report/bias.json",
        multiext(f"{RESULTS}/tables/bias_table", ".csv", ".md", ".tex"),
        expand(
            f"{RESULTS}/figures/{{figure}}.png",
            figure=["bias_variance"],
            allow_missing=True,
        ),
        report(
            f"{RESULTS}/tables/bias_table.html",
            caption="../report/bias_table.rst",
            category="{experiment}",
            labels={"show": "Estimators"},
        ),
        report(
            f"{RESULTS}/figures/bias_variance.svg",
            caption="../report/bias_variance.rst",
            category="{experiment}",
            labels={"show": "Bias and variance"},
        ),
    log:
        f"{LOGS}/report-bias.log",
    benchmark:
        f"{BENCHMARKS}/report_bias.tsv"
    params:
        config_hash=config_hash("report"),
        version=STAGE_VERSIONS["report_bias"],
    message:
        "drawing the estimators' bias of {wildcards.experiment}"
    shell:
        "dvp report --config {input.config:q} --part bias 2>&1 | tee {log:q}"


rule report_variance:
    input:
        config=rules.resolve.output,
        measurements=all_of(rules.bias),
    output:
        f"{RESULTS}/report/variance.json",
        expand(
            f"{RESULTS}/tables/{{table}}.{{suffix}}",
            table=["variance_table", "proxy_table"],
            suffix=["csv", "md", "tex"],
            allow_missing=True,
        ),
        expand(
            f"{RESULTS}/figures/{{figure}}.png",
            figure=["variance_by_baseline", "variance_by_position"],
            allow_missing=True,
        ),
        report(
            f"{RESULTS}/tables/variance_table.html",
            caption="../report/variance_table.rst",
            category="{experiment}",
            labels={"show": "Variance of the gradient"},
        ),
        report(
            f"{RESULTS}/tables/proxy_table.html",
            caption="../report/proxy_table.rst",
            category="{experiment}",
            labels={"show": "OTB's proxy against true norms"},
        ),
        report(
            f"{RESULTS}/figures/variance_by_baseline.svg",
            caption="../report/variance_by_baseline.rst",
            category="{experiment}",
            labels={"show": "Variance by baseline"},
        ),
        report(
            f"{RESULTS}/figures/variance_by_position.svg",
            caption="../report/variance_by_position.rst",
            category="{experiment}",
            labels={"show": "Variance by position"},
        ),
    log:
        f"{LOGS}/report-variance.log",
    benchmark:
        f"{BENCHMARKS}/report_variance.tsv"
    params:
        config_hash=config_hash("report"),
        version=STAGE_VERSIONS["report_variance"],
    message:
        "drawing the variance of gradients of {wildcards.experiment}"
    shell:
        "dvp report --config {input.config:q} --part variance 2>&1 | tee {log:q}"


rule report_bias_length:
    input:
        config=rules.resolve.output,
        measurements=all_of(rules.bias),
    output:
        f"{RESULTS}/report/bias_length.json",
        multiext(f"{RESULTS}/tables/bias_length_table", ".csv", ".md", ".tex"),
        expand(
            f"{RESULTS}/figures/{{figure}}.png",
            figure=["bias_by_length"],
            allow_missing=True,
        ),
        report(
            f"{RESULTS}/tables/bias_length_table.html",
            caption="../report/bias_length_table.rst",
            category="{experiment}",
            labels={"show": "Estimators by length"},
        ),
        report(
            f"{RESULTS}/figures/bias_by_length.svg",
            caption="../report/bias_by_length.rst",
            category="{experiment}",
            labels={"show": "Bias by length"},
        ),
    log:
        f"{LOGS}/report-bias_length.log",
    benchmark:
        f"{BENCHMARKS}/report_bias_length.tsv"
    params:
        config_hash=config_hash("report"),
        version=STAGE_VERSIONS["report_bias_length"],
    message:
        "drawing the bias by length of {wildcards.experiment}"
    shell:
        "dvp report --config {input.config:q} --part bias_length 2>&1 | tee {log:q}"


rule report_sweep:
    input:
        config=rules.resolve.output,
        runs=all_of(rules.train),
        scores=all_of(rules.evaluate),
        measurements=all_of(rules.bias),
    output:
        f"{RESULTS}/report/sweep.json",
        expand(
            f"{RESULTS}/figures/{{figure}}.png",
            figure=["rho_sweep"],
            allow_missing=True,
        ),
        report(
            f"{RESULTS}/figures/rho_sweep.svg",
            caption="../report/rho_sweep.rst",
            category="{experiment}",
            labels={"show": "Score, KL, bias and variance by ρ"},
        ),
    log:
        f"{LOGS}/report-sweep.log",
    benchmark:
        f"{BENCHMARKS}/report_sweep.tsv"
    params:
        config_hash=config_hash("report"),
        version=STAGE_VERSIONS["report_sweep"],
    message:
        "drawing the sweep of {wildcards.experiment}"
    shell:
        "dvp report --config {input.config:q} --part sweep 2>&1 | tee {log:q}"
