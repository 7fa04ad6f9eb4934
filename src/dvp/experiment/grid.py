"""What is run and measured: the grid of training runs, and the measurements at fixed policies; each has a path."""

import math
import re
from collections.abc import Iterator
from itertools import product
from operator import not_
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from typing_extensions import TypedDict

from dvp.experiment.training import TrainingConfig
from dvp.progress import setting_as_read
from dvp.strict import Name, Positive, PositiveFloat, Strict

# Keys of `training` that are no axes: lists and groups of keys, and what a job runs on.
NO_AXES = ("adam_betas", "collapse", "keep_responses", "gpus", "nodes", "deepspeed")

WHOLE = "all"  # tokens of a response, beside bins of positions


def parse_rho(value: object) -> float:
    """ρ from `0.01`, `"1e-2"` or `"exp(-13)"`. Raises ValueError outside (0, 1)."""
    number = r"([0-9]+\.?[0-9]*|\.[0-9]+)"
    exponent = re.fullmatch(rf"exp\(-{number}\)", str(value))
    if exponent:
        rho = math.exp(-float(exponent[1]))
    else:
        rho = float(str(value)) if re.fullmatch(rf"{number}([eE][-+]?[0-9]+)?", str(value)) else math.nan
    if isinstance(value, bool) or not 0 < rho < 1:
        mistaken = re.fullmatch(rf"(e|exp)-({number})", str(value))
        if mistaken:
            raise ValueError(f"ρ: write exp(-{mistaken[2]}), or 1e-{mistaken[2]} if that is meant; found {value!r}")
        raise ValueError(f"ρ must lie in (0, 1), written like 0.01 or exp(-13); found {value!r}")
    return rho


def rho_in_path(rho: str | None) -> str:
    """ρ as part of a path, which a shell takes without quotes: `exp-13` for exp(-13), `none` without a ρ."""
    return "none" if rho is None else rho.replace("(", "").replace(")", "")


def rho_as_read(rho: str) -> str:
    """ρ for a person: e⁻¹³ for `exp(-13)`; other values as they are written."""
    if match := re.fullmatch(r"exp\(-([\d.]+)\)", rho):
        return "e⁻" + match[1].translate(str.maketrans("0123456789.", "⁰¹²³⁴⁵⁶⁷⁸⁹·"))
    return rho


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def rho_as_written(value: Any) -> str:
    """ρ as an experiment keeps it: exp(-13) as it is, 1e-2 as 0.01, quoted or not. Raises ValueError as `parse_rho`."""
    rho = parse_rho(value)
    return value if str(value).startswith("exp") else repr(rho)


def _all_as_written(value: Any) -> list[str]:
    rhos = [rho_as_written(item) for item in (value if isinstance(value, list) else [value])]
    seen = set()
    for rho in rhos:
        if parse_rho(rho) in seen:
            raise ValueError(f"ρ {rho} is listed twice")
        seen.add(parse_rho(rho))
    return rhos


def _may_differ(value: Any) -> Any:
    for key in NO_AXES:
        if isinstance(value, dict) and key in value:
            raise ValueError(f"{key} is the same for the whole grid; set it in `training`")
    return value


def _of_training(name: str, *, listed: bool) -> Any:
    """Some keys of `training` as a dict: each with a value, or with a value or a list of them."""
    types = {}
    for key, field in TrainingConfig.model_fields.items():
        if key not in NO_AXES:
            kind = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
            if listed:
                kind = Annotated[list[kind], Field(min_length=1), BeforeValidator(_one_or_several)]
            types[key] = kind
    keys = TypedDict(name, types, total=False)
    keys.__pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    value = {"type": "value"}
    schema = {"type": "object", "additionalProperties": {"anyOf": [value, {"type": "array", "items": value}]}}
    shown = schema if listed else {"type": "object", "additionalProperties": value}
    return Annotated[keys, BeforeValidator(_may_differ), WithJsonSchema(shown)]


def _one_or_several(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Listed = Annotated[list[Name], Field(min_length=1), BeforeValidator(_as_list)]
Rho = Annotated[str, BeforeValidator(rho_as_written)]
Rhos = Annotated[list[str], Field(min_length=1), BeforeValidator(_all_as_written)]
Settings = _of_training("Settings", listed=False)
Axes = _of_training("Axes", listed=True)


def whole_run(path: str) -> str:
    """Path of the run that the path of a run or of one of its steps names: `RUN` for `RUN/step~16`."""
    return re.sub(r"/step~\d+$", "", path)


def settings_path(settings: dict[str, Any]) -> str:
    """Training settings as part of a path, in the order of their names: `/group_size~4/steps~96`, or nothing."""
    return "".join(f"/{key}~{setting_as_written(settings[key])}" for key in sorted(settings))


def setting_as_written(value: bool | float | str | None) -> str:
    """A training setting as text, also as part of a path, which a shell takes without quotes."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings_as_read(settings: dict[str, Any]) -> list[str]:
    """Training settings for a person: `G 4`, `learning rate 0.0001`."""
    return [setting_as_read(key, setting_as_written(value)) for key, value in settings.items()]


class GridEntry(Strict):
    """Every combination of its lists, for every seed."""

    method: Listed
    """A method or a list of methods."""
    engine: Listed
    """An engine or a list of engines."""
    rho: Rhos | None = None
    """One ρ or a list, for methods that take one: 0.01, 1e-2 or exp(-13)."""
    training: Axes = Field({}, exclude_if=not_)
    """Numbers, texts and switches of `training` for these runs alone, each a value or a list: axes of the grid."""

    @property
    def settings(self) -> list[dict[str, Any]]:
        """Every combination of `training`, one without any key if there is none."""
        return [dict(zip(self.training, values, strict=True)) for values in product(*self.training.values())]

    @property
    def points(self) -> Iterator["GridPoint"]:
        """Its grid points, in the order of the file."""
        for method, engine, rho, settings in product(self.method, self.engine, self.rho or [None], self.settings):
            yield GridPoint(method=method, engine=engine, rho=rho, training=settings)


class Estimators(Strict):
    """Every combination of its lists: methods whose gradient estimates are compared, at each ρ if they take one."""

    method: Listed
    """A method or a list of methods."""
    rho: Rhos | None = None
    """One ρ or a list, for methods that take one."""


class GridPoint(Strict):
    """A grid point without its seed."""

    method: Name
    """A method."""
    engine: Name
    """The engine that it was trained with."""
    rho: Rho | None = None
    """Its ρ, for a method that takes one."""
    training: Settings = Field({}, exclude_if=not_)
    """Its training settings, those of the grid's entry that names it."""

    def __hash__(self) -> int:
        """Of the path, as settings are a dict."""
        return hash(self.path)

    @property
    def path(self) -> str:
        """The grid point as a relative path, which says what it is."""
        point = f"method~{self.method}/engine~{self.engine}/rho~{rho_in_path(self.rho)}"
        return point + settings_path(self.training)

    @property
    def rho_value(self) -> float | None:
        """ρ as a number, None without a safe vocabulary."""
        return None if self.rho is None else parse_rho(self.rho)

    @property
    def preflight(self) -> str:
        """The preflight that its runs wait for, as a path: their engine, and settings that the grid gives."""
        return self.engine + settings_path(self.training)

    def run(self, seed: int) -> "Run":
        """The grid point with this seed."""
        return Run(method=self.method, engine=self.engine, rho=self.rho, training=self.training, seed=seed)


class Run(GridPoint):
    """One grid point with one seed: the whole run, or as it was after one of its steps."""

    seed: int
    step: int | None = Field(None, exclude_if=lambda step: step is None)
    """Of a run as it was after this step; None after the last, with which a run ends."""

    @property
    def path(self) -> str:
        """The run as a relative path, which says what it is."""
        return f"{super().path}/seed~{self.seed}" + ("" if self.step is None else f"/step~{self.step}")

    @property
    def point(self) -> GridPoint:
        """Its grid point."""
        return GridPoint(method=self.method, engine=self.engine, rho=self.rho, training=self.training)

    def after(self, step: int | None) -> "Run":
        """The run as it was after a step; None is the whole run."""
        return self.model_copy(update={"step": step})


class Sampler(Strict):
    """With what a model is sampled when it is scored: an engine, from the full vocabulary or from the safe one at ρ."""

    engine: Name
    rho: Rho | None = None
    """None: the full vocabulary."""

    @property
    def path(self) -> str:
        """The sampler as a relative path, which says what it is."""
        return f"by~{self.engine}/min_p~{rho_in_path(self.rho)}"

    @property
    def in_path(self) -> str:
        """What stands behind the run in the path of its evaluation, where not all models are sampled so."""
        return f"/{self.path}"

    @property
    def rho_value(self) -> float | None:
        """ρ as a number, None without a safe vocabulary."""
        return None if self.rho is None else parse_rho(self.rho)


class Measurement(Strict):
    """One measurement at a fixed policy: with one engine and one seed, which is the trained policy's seed as well."""

    policy: Literal["base"] | GridPoint
    engine: str
    seed: int
    task: str | None = None
    """Whose problems it is made with; None: training problems."""

    @property
    def path(self) -> str:
        """The measurement as a relative path, which says what it is."""
        problems = "" if self.task is None else f"/on~{self.task}"
        return f"{self.policy_path}/by~{self.engine}{problems}/seed~{self.seed}"

    @property
    def policy_path(self) -> str:
        """The policy's own."""
        return self.policy if self.policy == "base" else self.policy.path

    @property
    def run(self) -> Run | None:
        """Whose model it measures; None for the base model."""
        return None if self.policy == "base" else self.policy.run(self.seed)


def _policy(value: Any) -> Any:
    """Refuse what is neither form in one line; of a union pydantic says what is wrong with each form."""
    if value != "base" and not isinstance(value, dict | GridPoint):
        raise ValueError(f"expected base, or a grid point as {{method: NAME, engine: NAME}}, found {value!r}")
    return value


Policy = Annotated[
    Annotated[Literal["base"], Tag("base")] | Annotated[GridPoint, Tag("point")],
    Discriminator(lambda value: "base" if value == "base" else "point"),
    BeforeValidator(_policy),
]


class _MeasurementConfig(Strict):
    """What is measured at fixed policies: every policy with every engine, for every seed."""

    policies: Annotated[list[Policy], Field(min_length=1)]
    """The base model, or a grid point at the end of its training."""
    engines: Listed
    """An engine or a list of engines."""
    problems: Positive
    """Problems whose prompts are used, the same for all; training problems unless `bias.tasks` names others."""


class MismatchConfig(_MeasurementConfig):
    """How far trainer and engine are apart, over the whole vocabulary, at the positions that the engine visits."""

    responses: Positive
    """Responses to each problem."""
    rhos: Rhos
    """At which safe vocabularies are compared."""
    margins: Annotated[list[PositiveFloat], Field(min_length=1)]
    """ε̂ of the margin rule, nats."""

    @field_validator("margins")
    @classmethod
    def _distinct(cls, value: list[float]) -> list[float]:
        for margin in value:
            if value.count(margin) > 1:
                raise ValueError(f"{margin} is listed twice")
        return value


class BiasConfig(_MeasurementConfig):
    """How far each estimator of the policy gradient is from the exact on-policy gradient, and how noisy it is."""

    batches: Annotated[int, Field(ge=4)]
    """Batches an estimator: all problems, training.group_size responses each."""
    reference_batches: Annotated[int, Field(ge=4)]
    """Batches sampled from the trainer's own policy, from which the exact gradient is estimated."""
    estimators: Annotated[list[Estimators], Field(min_length=1)]
    """What is compared."""
    tasks: list[Name] = Field([], exclude_if=not_)
    """Evaluated tasks whose problems are used instead of training problems, each task by itself. From two on the report
    has the bias over the length of responses. Not with position_bins."""
    position_bins: list[Positive] = Field([], exclude_if=not_)
    """Variance by position in the response: the last token of each bin but the last, as [8, 16, 32]."""
    norm_responses: Annotated[int, Field(ge=0)] = Field(0, exclude_if=not_)
    """Responses of the trainer's own policy, at the tokens of which OTB's proxy is held against the true norms of the
    gradients; 0 measures none."""

    @model_validator(mode="after")
    def _both_or_none(self) -> "BiasConfig":
        if bool(self.position_bins) != bool(self.norm_responses):
            raise ValueError("position_bins and norm_responses go together; give both or none")
        return self

    @model_validator(mode="after")
    def _one_way_to_divide(self) -> "BiasConfig":
        if self.position_bins and self.tasks:
            raise ValueError("tasks and position_bins cannot be combined; give one")
        return self

    @field_validator("position_bins")
    @classmethod
    def _ascending(cls, value: list[int]) -> list[int]:
        if value != sorted(set(value)):
            raise ValueError(f"expected ascending numbers, found {value}")
        return value
