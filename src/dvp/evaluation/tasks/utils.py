"""Grade every one of the k samples of a problem for lm-eval, as training rewards them."""

from typing import Any

from dvp.data.reward import CORRECT
from dvp.evaluation.lm import Response


def process_results(doc: dict[str, Any], results: list[list[Response]]) -> dict[str, float]:
    """Grade the k responses to one problem and return its avg@k. `results` holds one list: the k responses."""
    (responses,) = results
    for response in responses:
        reward = response.grader.reward(response, doc["answer"], truncated=response.truncated)
        response.correct = reward >= CORRECT  # for the table of samples, too
    return {"avg_at_k": sum(response.correct for response in responses) / len(responses)}
