"""Grading for lm-eval's tasks: every one of the k samples, by mathematical equality of the stated answer."""

from collections.abc import Sequence
from typing import Any

from dvp.data.verifier import grade


def process_results(doc: dict[str, Any], results: Sequence[Sequence[str]]) -> dict[str, float]:
    """avg@k of one problem. `results` holds one list: the k responses (dvp.evaluation.lm.Response)."""
    (responses,) = results
    correct = [
        # Plain strings, from another of lm-eval's models, do not say whether they were cut off.
        grade(
            response,
            doc["answer"],
            truncated=getattr(response, "truncated", False),
            thinking=getattr(response, "thinking", None),
        )
        for response in responses
    ]
    return {"avg_at_k": sum(correct) / len(correct)}
