"""Settings of the evaluation, and of what the main table compares."""

from operator import not_
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from dvp.experiment.grid import Settings
from dvp.strict import LOWEST_TEMPERATURE, Line, Name, Positive, Seed, Strict

TRAINING = "training"
"""In place of an engine's name: the one that a model was trained with."""


class Spread(Strict):
    """Steps at equal distances: one of the two keys."""

    every: Positive | None = Field(default=None, exclude_if=lambda every: every is None)
    """n: after steps n, 2n, 3n, …"""
    times: Positive | None = Field(default=None, exclude_if=lambda times: times is None)
    """n: so many times a run, the last of them at its last step; for runs of unequal length."""


def _taken_by_engines(temperature: float) -> float:
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"expected 0 or at least {LOWEST_TEMPERATURE}, found {temperature:g}")
    return temperature


def _steps(value: Any) -> Any:
    """Refuse what is neither form in one line; of a union pydantic says what is wrong with each form."""
    if isinstance(value, Spread) or value is None:
        return value
    form = isinstance(value, list) or (isinstance(value, dict) and list(value) in (["every"], ["times"]))
    if not form or not value:
        raise ValueError(f"expected a list of steps, {{every: n}} or {{times: n}}, found {value!r}")
    for step in value if isinstance(value, list) else value.values():
        if type(step) is not int or step < 1:
            raise ValueError(f"expected whole numbers from 1 on, found {step!r}")
        if isinstance(value, list) and value.count(step) > 1:
            raise ValueError(f"step {step} is listed twice")
    return value


class Further(Strict):
    """With what else each model is sampled: an engine, a safe vocabulary, or both."""

    engine: Name | None = Field(default=None, exclude_if=lambda engine: engine is None)
    """An engine, or `training`: the one that a model was trained with (the base model: each of the grid's); by default
    evaluation.engine."""
    rho: Literal["own"] | None = Field(default=None, exclude_if=lambda rho: rho is None)
    """`own`: from the safe vocabulary at a model's ρ; models without one at every ρ that the grid has with their engine
    (the base model: with the engine that samples it, if that is `training`; else every ρ). By default the full
    vocabulary."""

    @model_validator(mode="after")
    def _says_something(self) -> "Further":
        if self.engine is None and self.rho is None:
            raise ValueError("expected engine, rho or both; without any it is what is evaluated in any case")
        return self


class EvaluationConfig(Strict):
    """How a model is scored."""

    engine: Name
    """An engine, the same for all models, which it samples from their full vocabulary."""
    samples_per_problem: dict[Name, Positive]
    """k, by task."""
    temperature: Annotated[float, Field(ge=0), AfterValidator(_taken_by_engines)] = 1.0
    """Of sampling; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of sampling."""
    max_response_tokens: Positive
    """Longest response."""
    at: Annotated[list[int] | Spread | None, BeforeValidator(_steps)] = Field(
        default=None, exclude_if=lambda at: at is None
    )
    """Steps of training that are evaluated beside the last: a list, {every: n} or {times: n}. Their weights are
    kept: when this changes, runs are trained again."""
    also: list[Further] = Field([], exclude_if=not_)
    """With what else the final weights are sampled and scored, such as [{engine: training, rho: own}]."""
    bootstrap_resamples: Annotated[int, Field(ge=100)] = 2000
    """Of the intervals over problems, in scores.json and the report."""
    seed: Seed = 0
    """Of sampling and of the bootstrap."""

    @model_validator(mode="after")
    def _samples_differ(self) -> "EvaluationConfig":
        for task, samples in self.samples_per_problem.items():
            if samples > 1 and self.temperature == 0:
                raise ValueError(f"samples_per_problem: {task}: expected 1 at temperature 0 (greedy), found {samples}")
        return self

    @field_validator("also")
    @classmethod
    def _distinct(cls, value: list[Further]) -> list[Further]:
        for index, entry in enumerate(value):
            if entry in value[:index]:
                raise ValueError(f"{entry.model_dump()} is listed twice")
        return value

    def steps(self, last: int) -> list[int]:
        """Steps after which a run of `last` steps is evaluated, in their order, without the last one.

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
    """What the main table compares."""

    task: Name
    """The task whose score is in the main table."""
    reference: Name
    """The method that the others are set against."""
    reference_engine: Name | None = Field(None, exclude_if=lambda engine: engine is None)
    """The engine of that point. By default, of the method's engines (without evaluation.engine, if there are others),
    the one that most points of the grid have."""
    reference_training: Settings = Field({}, exclude_if=not_)
    """Of that method, training settings of the point that is meant, where the grid has it with several."""
    reached_within: Annotated[float, Field(ge=0)] = Field(2.0, exclude_if=lambda points: points == 2.0)
    """A run has reached the reference's final score when it is at most so many points (%) below it."""
    declarations: list[Line] = []
    """Sentences that stand under every table, such as how the base model was made."""
