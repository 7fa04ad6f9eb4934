"""Differences between methods over several base models."""

from dvp.analysis.columns import Layout, Report, Row, interval, number, reference_or_text
from dvp.analysis.shown import table


@table("Differences over base models", part="bases")
def tests_table(report: Report) -> Layout:
    """Differences between methods of {experiment} over its base models: of scores and of their log-odds, from the
    reference and from the same method without a safe vocabulary. Brackets are 95 % t intervals over base models;
    p-values are those of t tests on log-odds.
    """
    exact, optional = report.experiment.evaluation.engine, {"optional": True}

    def at_rho(row: Row) -> dict[str, str] | None:
        return None if row.point.rho is None else {"evaluated_on": exact, "evaluated_rho": row.point.rho}

    points = {"spec": "+.2f", "scale": 100}
    odds = {"heading": "log-odds [95 %]", "spec": "+.3f"}
    over_reference, over_unpruned = "over_reference", "over_unpruned"
    columns = [
        *report.point_columns(),
        interval(f"score_{over_reference}", "over ref. (pp) [95 %]", **points, mark=reference_or_text),
        interval(f"log_odds_{over_reference}", **odds),
        number(f"p_{over_reference}", "p", ".2g"),
        number(f"adjusted_p_{over_reference}", "p (Holm)", ".2g", **optional),
        interval(f"score_{over_unpruned}", "DVP adds (pp) [95 %]", **points, **optional),
        interval(f"log_odds_{over_unpruned}", **odds, **optional),
        number(f"p_{over_unpruned}", "p", ".2g", **optional),
        number(f"equivalence_p_{over_unpruned}", "p (equivalence)", ".2g", **optional),
        interval(
            f"{over_unpruned}_at_rho",
            "DVP adds, both at ρ (pp) [95 %]",
            quantity=f"score_{over_unpruned}_by_policy",
            at=at_rho,
            **points,
            **optional,
        ),
        interval("log_odds_at_rho", **odds, quantity=f"log_odds_{over_unpruned}_by_policy", at=at_rho, **optional),
    ]
    heading = f"differences of avg@{report.k} on {report.experiment.report.task} over base models"
    return Layout(heading, report.points(), columns)
