"""Grading for lm-eval's tasks: every one of the k samples, by mathematical equality of the stated answer."""

from typing import Any

from dvp.data.verifier import grade
from dvp.evaluation.lm import Response


def process_results(doc: dict[str, Any], results: list[list[Response]]) -> dict[str, float]:
    """avg@k of one problem. `results` holds one list: the k responses."""
    (responses,) = results
    for response in responses:
        how = {"truncated": response.truncated, "thinking": response.thinking}
        response.correct = grade(response, doc["answer"], **how)  # for the table of samples, too
    return {"avg_at_k": sum(response.correct for response in responses) / len(responses)}
