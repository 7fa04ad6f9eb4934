"""Settings of the evaluation, and of what the main table compares."""

from operator import not_
from typing import Annotated

from pydantic import Field

from dvp.experiment.grid import Settings
from dvp.strict import Name, Positive, Strict


class EvaluationConfig(Strict):
    """How a model is scored."""

    engine: Name
    """An engine, the same for all models."""
    samples_per_problem: dict[Name, Positive]
    """k, by task."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Of sampling."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of sampling."""
    max_response_tokens: Positive
    """Longest response."""
    bootstrap_resamples: Annotated[int, Field(ge=100)] = 2000
    """Of the intervals in scores.json."""
    seed: int = 0
    """Of sampling and of the bootstrap."""


class ReportConfig(Strict):
    """What the main table compares."""

    task: Name
    """The task whose score is in the main table."""
    reference: Name
    """The method (on its mismatched engine) that the others are set against."""
    reference_training: Settings = Field({}, exclude_if=not_)
    """Of that method, training settings of the point that is meant, where the grid has it with several."""
    declarations: list[str] = []
    """Sentences that stand under every table, such as how the base model was made."""
