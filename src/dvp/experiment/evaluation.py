"""Settings of the evaluation, and of what the main table compares."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from dvp.experiment.grid import GridPoint, Settings
from dvp.strict import LOWEST_TEMPERATURE, Distinct, Line, Name, Positive, Seed, Several, Strict, optional

TRAINING = "training"
"""The name that stands for the engine that a model was trained with."""


class Spread(Strict):
    """Steps at equal distances: one of the two keys."""

    every: Positive | None = optional()
    """n: after steps n, 2n, 3n, …"""
    times: Positive | None = optional()
    """n: so many times a run, the last of them at its last step; for runs of unequal length."""

    @model_validator(mode="after")
    def _one(self) -> "Spread":
        if (self.every is None) == (self.times is None):
            raise ValueError("expected {every: n} or {times: n}")
        return self


Steps = Annotated[
    Annotated[Several[Positive], Tag("list")] | Annotated[Spread, Tag("spread")],
    Discriminator(lambda value: "list" if isinstance(value, list) else "spread"),
]


class Further(Strict):
    """A further way to sample each model: an engine, a safe vocabulary, or both."""

    engine: Name | None = optional()
    """An engine, or `training`: the one that a model was trained with (the base model: each of the grid's); by default
    evaluation.engine."""
    rho: Literal["own"] | None = optional()
    """`own`: from the safe vocabulary at a model's ρ; models without one at every ρ that the grid has with their engine
    (the base model: with the engine that samples it, if that is `training`; else every ρ). By default the full
    vocabulary."""


class EvaluationConfig(Strict):
    """How a model is scored."""

    engine: Name
    """An engine, the same for all models, which it samples from their full vocabulary."""
    samples_per_problem: dict[Name, Positive]
    """k, by task."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Of sampling; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of sampling."""
    max_response_tokens: Positive
    """Longest response."""
    at: Steps | None = optional()
    """Steps of training that are evaluated beside the last: a list, {every: n} or {times: n}. Their weights are
    kept: when this changes, runs are trained again."""
    also: Distinct[Further] = optional([])
    """With what else the final weights are sampled and scored, such as [{engine: training, rho: own}]."""
    bootstrap_resamples: Annotated[int, Field(ge=100)] = 2000
    """Of the intervals over problems, in scores.json and the report."""
    seed: Seed = 0
    """Of sampling and of the bootstrap."""

    @model_validator(mode="after")
    def _samples_differ(self) -> "EvaluationConfig":
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(f"temperature: expected 0 or at least {LOWEST_TEMPERATURE}, found {self.temperature:g}")
        if self.temperature == 0 and max(self.samples_per_problem.values(), default=1) > 1:
            raise ValueError("samples_per_problem: expected 1 at temperature 0 (greedy)")
        return self

    def steps(self, last: int) -> list[int]:
        """Return the steps after which a run of `last` steps is evaluated, ascending, without the last one.

        Raises ValueError for a step beyond the last, or more times than there are steps.
        """
        if self.at is None:
            return []
        if isinstance(self.at, list):
            steps = sorted(self.at)
        elif self.at.every is not None:
            steps = list(range(self.at.every, max(self.at.every, last) + 1, self.at.every))
        else:
            times = self.at.times
            if times > last:
                raise ValueError(f"{times} times are more than the steps, {last}")
            steps = [(2 * place * last + times) // (2 * times) for place in range(1, times + 1)]  # rounded
        if steps[-1] > last:
            raise ValueError(f"step {steps[-1]} is beyond the last, {last}")
        return [step for step in steps if step < last]


class ReportConfig(Strict):
    """The main table and its comparison."""

    task: Name
    """The task whose score is in the main table."""
    reference: Name
    """The method that the others are set against."""
    reference_engine: Name | None = optional()
    """The engine of that point. By default, of the method's engines (without evaluation.engine, if there are others),
    the one that most points of the grid have."""
    reference_training: Settings = optional({})
    """Of that method, training settings of the point that is meant, where the grid has it with several."""
    reached_within: Annotated[float, Field(ge=0)] = optional(2.0)
    """A run has reached the reference's final score when it is at most so many points (%) below it."""
    primary: Distinct[GridPoint] = optional([])
    """Test the differences of these points from the reference together, by Holm's procedure, over several base models;
    all other differences are exploratory."""
    equivalent_within: Annotated[float, Field(gt=0)] | None = optional()
    """Test, by two one-sided t tests over several base models, that the scores of a method and of the same without a
    safe vocabulary differ by less than so many points (%)."""
    declarations: list[Line] = []
    """Sentences that stand under every table, such as how the base model was made."""
