"""Grading for lm-eval's tasks: every one of the k samples, by mathematical equality of the stated answer."""

from collections.abc import Sequence
from typing import Any

from dvp.data.verifier import grade


def process_results(doc: dict[str, Any], results: Sequence[Sequence[str]]) -> dict[str, float]:
    """avg@k of one problem. `results` holds one list: the k responses (dvp.evaluation.lm.Response)."""
    (responses,) = results
    correct = 0
    for response in responses:
        # Plain strings, from another of lm-eval's models, do not say whether they were cut off.
        truncated, thinking = getattr(response, "truncated", False), getattr(response, "thinking", None)
        right = grade(response, doc["answer"], truncated=truncated, thinking=thinking)
        correct += right
        if hasattr(response, "completion"):
            response.correct = right  # for the table of samples
    return {"avg_at_k": correct / len(responses)}
