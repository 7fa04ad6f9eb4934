"""Settings of the grid of training runs, and of the measurements at fixed policies; each has a path."""

import math
import re
from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic_core import core_schema
from typing_extensions import TypedDict

from dvp.experiment.training import TrainingConfig
from dvp.progress import setting_as_read
from dvp.strict import Distinct, Name, OneOrMany, Positive, PositiveFloat, Several, Strict, optional

# Keys of `training` that cannot be axes: lists and groups of keys, and what a job runs on.
NO_AXES = ("adam_betas", "keep_responses", "gpus", "nodes", "deepspeed")

WHOLE = "all"  # all tokens of a response, as opposed to a bin of positions


class Rho(str):
    """A ρ as an experiment writes it: exp(-13) as it is, 1e-2 as 0.01, quoted or not.

    `value` is the number. Raises ValueError for anything outside (0, 1).
    """

    value: float

    def __new__(cls, written: object) -> Self:
        """Parse a text or a number of (0, 1)."""
        number = r"([0-9]+\.?[0-9]*|\.[0-9]+)"
        exponent = re.fullmatch(rf"exp\(-{number}\)", str(written))
        if not exponent and not re.fullmatch(rf"{number}([eE][-+]?[0-9]+)?", str(written)):
            value = math.nan
        else:
            value = math.exp(-float(exponent[1])) if exponent else float(written)
        if not 0 < value < 1:
            raise ValueError(f"ρ must lie in (0, 1), written like 0.01 or exp(-13); found {written!r}")
        rho = super().__new__(cls, written if exponent else repr(value))
        rho.value = value
        return rho

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> core_schema.CoreSchema:
        """Return a schema that validates by `Rho` and serialises as text."""
        text = core_schema.to_string_ser_schema()
        return core_schema.no_info_plain_validator_function(
            cls,
            serialization=text,
            json_schema_input_schema=core_schema.union_schema([core_schema.float_schema(), core_schema.str_schema()]),
        )


def parse_rho(rho: object) -> float:
    """Return ρ as a number. Raises ValueError as `Rho`."""
    return Rho(rho).value


def rho_in_path(rho: str | None) -> str:
    """Return ρ as part of a path, which a shell takes without quotes: `exp-13` for exp(-13), `none` without one."""
    return "none" if rho is None else re.sub("[()]", "", Rho(rho))


def _of_training(listed: bool) -> Any:
    """Return the type of a dict of some keys of `training`, each with a value or, if `listed`, a list of values."""
    kinds = {
        key: Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        for key, field in TrainingConfig.model_fields.items()
        if key not in NO_AXES
    }
    keys = TypedDict("Settings", {key: OneOrMany[kind] if listed else kind for key, kind in kinds.items()}, total=False)
    keys.__pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    value = {"type": "value"}
    value = {"anyOf": [value, {"type": "array", "items": value}]} if listed else value
    return Annotated[keys, WithJsonSchema({"type": "object", "additionalProperties": value})]


Settings = _of_training(listed=False)
Axes = _of_training(listed=True)


def whole_run(path: str) -> str:
    """Return the path of the run, given the path of the run or of one of its steps: `RUN` for `RUN/step~16`."""
    return re.sub(r"/step~\d+$", "", path)


def settings_path(settings: dict[str, Any]) -> str:
    """Return training settings as part of a path, sorted by name: `/group_size~4/steps~96`, or nothing."""
    return "".join(f"/{key}~{setting_as_written(settings[key])}" for key in sorted(settings))


def setting_as_written(value: bool | float | str | None) -> str:
    """Return a training setting as text, also as part of a path, which a shell takes without quotes."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def settings_as_read(settings: dict[str, Any]) -> list[str]:
    """Return training settings for a person: `G 4`, `learning rate 0.0001`."""
    return [setting_as_read(key, setting_as_written(value)) for key, value in settings.items()]


class Estimators(Strict):
    """Every combination of its lists: methods whose gradient estimates are compared, at each ρ if they take one."""

    method: OneOrMany[Name]
    """A method or a list of methods."""
    rho: OneOrMany[Rho] | None = None
    """One ρ or a list, for methods that take one."""


class GridEntry(Strict):
    """Every combination of its lists, for every seed."""

    method: OneOrMany[Name]
    """A method or a list of methods."""
    engine: OneOrMany[Name]
    """An engine or a list of engines."""
    rho: OneOrMany[Rho] | None = None
    """One ρ or a list, for methods that take one: 0.01, 1e-2 or exp(-13)."""
    training: Axes = optional({})
    """Numbers, texts and switches of `training` for these runs alone, each a value or a list: axes of the grid."""

    @property
    def points(self) -> Iterator["GridPoint"]:
        """Yield its grid points, in the order of the file."""
        for method, engine, rho, *values in product(
            self.method, self.engine, self.rho or [None], *self.training.values()
        ):
            training = dict(zip(self.training, values, strict=True))
            yield GridPoint(method=method, engine=engine, rho=rho, training=training)


class GridPoint(Strict):
    """A grid point without its seed."""

    method: Name
    """A method."""
    engine: Name
    """The engine that it was trained with."""
    rho: Rho | None = None
    """Its ρ, for a method that takes one."""
    training: Settings = optional({})
    """Its training settings, those of the grid's entry that names it."""

    def __hash__(self) -> int:
        """Hash the path, as settings are a dict."""
        return hash(self.path)

    @property
    def path(self) -> str:
        """Return the grid point as a relative path that spells out its settings."""
        point = f"method~{self.method}/engine~{self.engine}/rho~{rho_in_path(self.rho)}"
        return point + settings_path(self.training)

    @property
    def rho_value(self) -> float | None:
        """Return ρ as a number, None without a safe vocabulary."""
        return None if self.rho is None else self.rho.value

    @property
    def preflight(self) -> str:
        """Return the path of the preflight that its runs wait for: their engine, and settings that the grid gives."""
        return self.engine + settings_path(self.training)

    def run(self, seed: int) -> "Run":
        """Return the run of this grid point with this seed."""
        return Run(method=self.method, engine=self.engine, rho=self.rho, training=self.training, seed=seed)


class Run(GridPoint):
    """One grid point with one seed: the whole run, or as it was after one of its steps."""

    seed: int
    step: int | None = optional()
    """Of a run as it was after this step; None after the last, with which a run ends."""

    @property
    def path(self) -> str:
        """Return the run as a relative path that spells out its settings."""
        return f"{super().path}/seed~{self.seed}" + ("" if self.step is None else f"/step~{self.step}")

    @property
    def point(self) -> GridPoint:
        """Return its grid point."""
        return GridPoint(method=self.method, engine=self.engine, rho=self.rho, training=self.training)

    def after(self, step: int | None) -> "Run":
        """Return the run as it was after a step; None is the whole run."""
        return self.model_copy(update={"step": step})


class Sampler(Strict):
    """The sampler of an evaluation: an engine, from the full vocabulary or from the safe one at ρ."""

    engine: Name
    rho: Rho | None = None
    """None: the full vocabulary."""

    @property
    def path(self) -> str:
        """Return the sampler as a relative path that spells out its settings."""
        return f"by~{self.engine}/min_p~{rho_in_path(self.rho)}"


class Measurement(Strict):
    """One measurement at a fixed policy: with one engine and one seed, which is the trained policy's seed as well."""

    policy: Literal["base"] | GridPoint
    engine: str
    seed: int
    task: str | None = None
    """Whose problems it is made with; None: training problems."""

    @property
    def path(self) -> str:
        """Return the measurement as a relative path that spells out its settings."""
        problems = "" if self.task is None else f"/on~{self.task}"
        return f"{self.policy_path}/by~{self.engine}{problems}/seed~{self.seed}"

    @property
    def policy_path(self) -> str:
        """Return the policy's path, or `base`."""
        return self.policy if self.policy == "base" else self.policy.path

    @property
    def run(self) -> Run | None:
        """Return the run whose model it measures; None for the base model."""
        return None if self.policy == "base" else self.policy.run(self.seed)


Policy = Annotated[
    Annotated[Literal["base"], Tag("base")] | Annotated[GridPoint, Tag("point")],
    Discriminator(lambda value: "base" if value == "base" else "point"),
]


class _MeasurementConfig(Strict):
    """Settings of measurements at fixed policies: every policy with every engine, for every seed."""

    policies: Several[Policy]
    """The base model, or a grid point at the end of its training."""
    engines: OneOrMany[Name]
    """An engine or a list of engines."""
    problems: Positive
    """Problems whose prompts are used, the same for all; training problems unless `bias.tasks` names others."""


class MismatchConfig(_MeasurementConfig):
    """How far trainer and engine are apart, over the whole vocabulary, at the positions that the engine visits."""

    responses: Positive
    """Responses to each problem."""
    rhos: OneOrMany[Rho]
    """At which safe vocabularies are compared."""
    margins: Several[PositiveFloat]
    """ε̂ of the margin rule, nats."""


class BiasConfig(_MeasurementConfig):
    """How far each estimator of the policy gradient is from the exact on-policy gradient, and how noisy it is."""

    batches: Annotated[int, Field(ge=4)]
    """Batches an estimator: all problems, training.group_size responses each."""
    reference_batches: Annotated[int, Field(ge=4)]
    """Batches sampled from the trainer's own policy, from which the exact gradient is estimated."""
    estimators: Annotated[list[Estimators], Field(min_length=1)]
    """What is compared."""
    tasks: Distinct[Name] = optional([])
    """Evaluated tasks whose problems are used instead of training problems, each task by itself. From two on the report
    has the bias over the length of responses. Not with position_bins."""
    position_bins: list[Positive] = optional([])
    """Variance by position in the response: the last token of each bin but the last, as [8, 16, 32]."""
    norm_responses: Annotated[int, Field(ge=0)] = optional(0)
    """Responses of the trainer's own policy, at the tokens of which OTB's proxy is held against the true norms of the
    gradients; 0 measures none."""

    @model_validator(mode="after")
    def _bins(self) -> "BiasConfig":
        if bool(self.position_bins) != bool(self.norm_responses):
            raise ValueError("position_bins and norm_responses go together; give both or none")
        if self.position_bins and self.tasks:
            raise ValueError("tasks and position_bins cannot be combined; give one")
        if self.position_bins != sorted(set(self.position_bins)):
            raise ValueError(f"position_bins: expected ascending numbers, found {self.position_bins}")
        return self
