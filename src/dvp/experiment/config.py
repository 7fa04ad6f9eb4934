"""The experiment as a typed, strict model.

An experiment file in config/experiments names what to run; config/catalogue holds the sources, engines and methods
that it may refer to by name (an experiment's own `sources:`, `engines:` or `methods:` add to the catalogue or replace
an entry). `load_experiment` resolves the two into one self-contained `Experiment`. Unknown keys, impossible values and
undefined names are errors of one line.
"""

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cached_property
from itertools import pairwise, product
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from dvp.core.advantages import NEED_A_GROUP
from dvp.core.safe_vocabulary import SafeVocabularies
from dvp.errors import DvpError
from dvp.experiment.base import Base, TrainedBase
from dvp.experiment.config_hash import settings_of_job
from dvp.experiment.data import DataConfig, GeneratedSource, Source
from dvp.experiment.evaluation import TRAINING, EvaluationConfig, Further, ReportConfig
from dvp.experiment.grid import (
    BiasConfig,
    GridEntry,
    GridPoint,
    Measurement,
    MismatchConfig,
    Rho,
    Run,
    Sampler,
)
from dvp.experiment.jobs import Job, list_jobs
from dvp.experiment.methods import Method
from dvp.experiment.tools import Tools
from dvp.experiment.training import EngineConfig, TrainingConfig
from dvp.files import sha256_json
from dvp.strict import EXPERIMENT, Distinct, Line, Name, Seed, Several, Strict, distinct, optional


class Experiment(Strict):
    """A whole, self-contained experiment."""

    name: Annotated[str, Field(pattern=rf"^{EXPERIMENT.pattern}$")]
    """The file's name without .yaml."""
    description: str
    """What it compares, in a sentence; it stands over the report."""
    scale: Line
    """One sentence on what differs from the paper's scale; it stands beside every published value."""
    seeds: Several[Seed]
    """Of training runs and measurements: each grid point is trained once for each."""
    data: DataConfig
    """Problems and prompts."""
    base: Base
    """The model before RL, or the name of one in config/catalogue/bases.yaml."""
    training: TrainingConfig
    """The RL loop."""
    evaluation: EvaluationConfig
    """How models are scored."""
    report: ReportConfig
    """The main table."""
    grid: Annotated[list[GridEntry], Field(min_length=1)]
    """What is trained."""
    bases: Distinct[Seed | Name] = optional([])
    """Several base models in place of `base`: seeds of it and of generated problems to train on, such as [0, 1, 2], or
    names in config/catalogue/bases.yaml. Each has its own data, runs and report, as experiment NAME~BASE; the report's
    numbers are means over them, with t intervals over them."""
    tools: Tools | None = optional()
    """The tool that responses may call, in training and in evaluation."""
    preflight: Literal["auto", "always", "never"] = "auto"
    """Whether a preflight of the whole path runs before the grid is trained; auto: where the base model is not
    trained here. No run is trained before all preflights have passed, so that a change of this key after training
    asks for all of it again."""
    mismatch: MismatchConfig | None = None
    """Measurements of the mismatch at fixed policies."""
    bias: BiasConfig | None = None
    """Measurements of gradient estimators at fixed policies."""
    sources: dict[Name, Source] = {}
    """Added to the catalogue's, or in place of one."""
    engines: dict[Name, EngineConfig] = {}
    """Added to the catalogue's, or in place of one."""
    methods: dict[Name, Method] = {}
    """Added to the catalogue's, or in place of one."""
    deepspeed: dict[str, Any] = {}
    """What the file named by training.deepspeed holds; filled in when the experiment is resolved."""

    @model_validator(mode="before")
    @classmethod
    def _trainer_of_base(cls, value: Any) -> Any:
        """Fill in `training.deepspeed`."""
        base, training = (value.get(key) if isinstance(value, dict) else None for key in ("base", "training"))
        if isinstance(training, dict) and isinstance(base, dict) and training.get("deepspeed") is None:
            file = "zero1" if base.get("kind") == "trained" else "zero1_bf16"
            return value | {"training": training | {"deepspeed": file}}
        return value

    @model_validator(mode="after")
    def _check_names(self) -> "Experiment":
        """Check that every name is defined, and that no reserved one is."""
        for key, names, table in self._named():
            for name in names:
                if name not in table:
                    meant = get_close_matches(name, table, n=1, cutoff=0.65)
                    hint = f"did you mean {meant[0]}?" if meant else f"known are {', '.join(sorted(table))}"
                    raise ValueError(f"{key}: '{name}' is not defined; {hint}")
        for name, key in (("held_out", "data.evaluation"), (TRAINING, "engines")):
            if name in (self.data.evaluation if name == "held_out" else self.engines):
                raise ValueError(f"{key}: the name '{name}' is reserved")
        if set(self.data.tasks) != set(self.evaluation.samples_per_problem):
            tasks = ", ".join(self.data.tasks)
            raise ValueError(f"evaluation.samples_per_problem: expected a number for each of {tasks} and no other")
        return self

    @model_validator(mode="after")
    def _check_bases(self) -> "Experiment":
        if not isinstance(self.base, TrainedBase) and any(isinstance(base, int) for base in self.bases):
            raise ValueError(
                "bases: expected names in config/catalogue/bases.yaml: base, not trained here, has no seed"
            )
        return self

    def _named(self) -> Iterator[tuple[str, Iterable[str], Iterable[str]]]:
        """Yield (key, the names that it gives, the names that are defined) for every key that refers to names."""
        made = [name for name, source in self.sources.items() if isinstance(source, GeneratedSource)]
        yield "data.train", [self.data.train], self.sources
        yield "data.evaluation", self.data.evaluation, self.sources
        yield "base.source", [self.base.source] if isinstance(self.base, TrainedBase) else [], made
        yield "report.task", [self.report.task], self.data.tasks
        yield "evaluation.engine", self._sampling_engines, self.engines
        yield "grid.engine", [point.engine for point in self.points], self.engines
        yield "grid.method", [point.method for point in self.points], self.methods
        yield "report.reference", [self.report.reference], {point.method: point for point in self.points}
        for stage in ("mismatch", "bias"):
            yield f"{stage}.engines", getattr(self, stage).engines if getattr(self, stage) else [], self.engines
        yield "bias.tasks", self.bias.tasks if self.bias else [], self.data.tasks
        yield "bias.estimators", [method for method, _ in self.estimators], self.methods

    @model_validator(mode="after")
    def _check_lengths(self) -> "Experiment":
        if isinstance(self.base, TrainedBase) and self.data.chat:
            raise ValueError("data.chat: a base model that is trained here has no chat template; expected false")
        self._check_context("training", self.training.max_prompt_tokens or 1, self.training.max_response_tokens)
        self._check_context("evaluation", 1, self.evaluation.max_response_tokens)
        return self

    def _check_context(self, where: str, shortest_prompt: int, response: int) -> None:
        context = self.base.architecture.max_position_embeddings if self.base.architecture else None
        if context is not None and shortest_prompt + response > context:
            raise ValueError(
                f"{where}.max_response_tokens: a prompt of {shortest_prompt} and a response of {response} tokens "
                f"are longer than the model's context, {context} (base.architecture.max_position_embeddings)"
            )

    @model_validator(mode="after")
    def _check_grid(self) -> "Experiment":
        seen: dict[tuple, GridPoint] = {}
        for point in self.points:
            where = f"grid: {point.path}"
            try:
                training = self.training.changed(**point.training)
                self.evaluated_steps(point)
            except ValidationError as error:
                raise ValueError(f"{where}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
            except ValueError as error:
                raise ValueError(f"evaluation.at: {error}, of {point.path}") from None
            self._check_context(where, training.max_prompt_tokens or 1, training.max_response_tokens)
            self._check_method(where, point.method, point.rho, training)
            spread, method = self.engines[point.engine].tensor_parallel, self.methods[point.method]
            if training.gpus % spread:
                raise ValueError(f"{where}: tensor_parallel ({spread}) must divide training.gpus ({training.gpus})")
            if training.group_size == 1 and method.advantage in NEED_A_GROUP:
                raise ValueError(f"{where}: advantage {method.advantage} compares a group; expected group_size above 1")
            if method.true_norms:
                raise ValueError(f"{where}: method '{point.method}' needs true norms, which only bias.estimators has")
            same = seen.setdefault((point.method, point.engine, point.rho_value, str(training)), point)
            if same is not point:
                raise ValueError(f"grid: {point.path} and {same.path} have the same settings; remove one of them")
        if len(self._references) != 1:
            found = " or ".join(point.path for point in self._references) or "none"
            raise ValueError(
                "report.reference: expected one point of the grid, chosen by reference_engine and reference_training "
                f"(such as {{group_size: 8}}), found {found}"
            )
        return self

    @model_validator(mode="after")
    def _check_samplers(self) -> "Experiment":
        """Check that models are sampled at their ρ as they were trained, and that no entry is redundant."""
        for index, entry in enumerate(self.evaluation.also):
            samplers = [sampler for point in [None, *self.points] for sampler in self.samplers_of(entry, point)]
            if all(sampler == self.sampler for sampler in samplers):
                raise ValueError(
                    f"evaluation.also[{index}]: expected another engine than {self.evaluation.engine}, or a ρ that the "
                    "grid has; this is what is evaluated in any case"
                )
            for point in self.points if entry.rho else []:
                rule = self.methods[point.method].safe_vocabulary
                if rule is not None and not rule.engine_at_rho:
                    raise ValueError(
                        f"evaluation.also[{index}].rho: expected methods with min-p at a fixed ρ, or none; found "
                        f"'{point.method}' with the rule '{rule.rule}'"
                    )
        return self

    @model_validator(mode="after")
    def _check_primary(self) -> "Experiment":
        for point in self.report.primary:
            if point not in self.points or point == self.reference_point:
                raise ValueError(f"report.primary: expected points of the grid but its reference, found {point.path}")
        return self

    @property
    def _references(self) -> list[GridPoint]:
        """Return the points that `report` may mean by its reference."""
        report = self.report
        own = [
            point
            for point in self.points
            if point.method == report.reference
            and report.reference_engine in (None, point.engine)
            and report.reference_training.items() <= dict(self.training_of(point)).items()
        ]
        if report.reference_engine is not None or not own:
            return own
        own = [point for point in own if not self.is_control(point)] or own
        engines = [point.engine for point in self.points]
        most = max(engines.count(point.engine) for point in own)
        return [point for point in own if engines.count(point.engine) == most]

    @property
    def reference_point(self) -> GridPoint:
        """Return the point that the others are compared with.

        It is of the method report.reference, with report.reference_training and report.reference_engine. Without the
        latter, controls are left out unless there is nothing else; of the rest it is the point whose engine most points
        of the grid share.
        """
        return self._references[0]

    def is_control(self, point: GridPoint) -> bool:
        """Return whether the point, unlike others, is trained on the evaluation's engine: without the mismatch."""
        exact = self.evaluation.engine
        return point.engine == exact and any(other.engine != exact for other in self.points)

    @model_validator(mode="after")
    def _check_tools(self) -> "Experiment":
        if self.tools is None:
            return self
        if self.mismatch or self.bias:
            raise ValueError("tools: `mismatch` and `bias` measure responses without tools; remove one of them")
        for name in [*self._sampling_engines, *(point.engine for point in self.points)]:
            if self.engines[name].tensor_parallel > 1:
                # The ranks of an engine make the same calls, but a program may print something else on each of them.
                raise ValueError(f"tools: engine '{name}' is spread over several GPUs; expected tensor_parallel 1")
        longest, answer = self.tools.max_answer_tokens, "an answer is a part of the response"
        for section in ("training", "evaluation"):
            if longest >= getattr(self, section).max_response_tokens:
                raise ValueError(
                    f"tools.max_answer_tokens ({longest}) must be below {section}.max_response_tokens: {answer}"
                )
        return self

    @model_validator(mode="after")
    def _check_measurements(self) -> "Experiment":
        for stage in ("mismatch", "bias"):
            for policy in getattr(self, stage).policies if getattr(self, stage) else []:
                if policy == "base":
                    continue
                if policy not in self.points:
                    raise ValueError(f"{stage}.policies: {policy.path} is not in the grid, which must train it")
                if self.training_of(policy).temperature != self.training.temperature:
                    raise ValueError(
                        f"{stage}.policies: {policy.path}: expected the temperature of its training to be "
                        f"{self.training.temperature:g} (training.temperature), with which it is measured"
                    )
            distinct([f"{stage}: {measurement.path}" for measurement in self.measurements(stage)])
        if self.mismatch and self.training.temperature != 1.0:
            raise ValueError(f"training.temperature: expected 1 for `mismatch`, found {self.training.temperature:g}")
        if self.bias is None:
            return self
        distinct([f"bias.estimators: {method}, ρ {rho}" for method, rho in self.estimators])
        for name, rho in self.estimators:
            self._check_method("bias.estimators", name, rho, self.training)
            if not self.methods[name].at_fixed_policy:
                raise ValueError(
                    f"bias.estimators: method '{name}': expected loss reinforce, "
                    "no rule for ρ that needs training and no decay of the learning rate"
                )
        available = self.bias.reference_batches * self.bias.problems * self.training.group_size
        for key, value, most in (
            ("norm_responses", self.bias.norm_responses, available),
            ("position_bins", max(self.bias.position_bins, default=0), self.training.max_response_tokens - 1),
        ):
            if value > most:
                raise ValueError(f"bias.{key}: expected {most} at most, found {value}")
        return self

    def _check_method(self, where: str, name: str, rho: Rho | None, training: TrainingConfig) -> None:
        """Check that the method takes this ρ and fits these training settings."""
        method = self.methods[name]
        if method.takes_rho != (rho is not None):
            raise ValueError(f"{where}: method '{name}' {'needs' if method.takes_rho else 'takes no'} rho")
        decay = method.learning_rate_decay
        if decay is not None and decay.patience >= training.steps:
            raise ValueError(
                f"{where}: method '{name}': learning_rate_decay.patience ({decay.patience}) must be below "
                f"training.steps ({training.steps}): no surge would be seen"
            )
        try:
            method.sides(rho and rho.value, training.max_response_tokens)
        except DvpError as error:
            raise ValueError(f"{where}: method '{name}': {error}") from None

    def problems_missing(self, available: dict[str | None, int]) -> str | None:
        """Return an error if a step or a measurement needs more problems than are `available`; None if none does.

        `available` counts the problems of each task; its key None counts those to train on.
        """
        steps = max(self.training_of(point).prompts_per_step for point in self.points)
        needed = [("training.prompts_per_step", steps, [None])]
        if self.mismatch:
            needed.append(("mismatch.problems", self.mismatch.problems, [None]))
        if self.bias:
            needed.append(("bias.problems", self.bias.problems, self.bias.tasks or [None]))
        for key, count, tasks in needed:
            for task in tasks:
                if available.get(task, count) < count:
                    where = "to train on" if task is None else f"of task '{task}'"
                    return f"{key}: {count} are more than the problems {where}, {available[task]}"
        return None

    @property
    def trainer_dtype(self) -> str:
        """Return the type in which the trainer multiplies matrices; weights and optimiser are fp32 in either case."""
        return "bfloat16" if "torch_autocast" in self.deepspeed else "float32"

    def swallowed_updates(self, stored: str | None, engines: Iterable[str]) -> str | None:
        """Return a warning if engines round away an fp32 trainer's updates of a base stored in 16 bits, else None.

        stored: the dtype in the base's config.json.
        """
        coarse = sorted({name for name in engines if self.engines[name].dtype != "float32"})
        if not coarse or self.trainer_dtype != "float32" or stored not in ("bfloat16", "float16"):
            return None
        return (
            f"warning: the base is stored in {stored}, the trainer computes in fp32, and of its updates the engine "
            f"({', '.join(coarse)}) gets only what survives rounding to 16 bits: at first nearly nothing, so that the "
            "mismatch grows from step to step; take `training: {deepspeed: zero1_bf16}` or an fp32 engine "
            "(docs/your_model.md)"
        )

    @property
    def points(self) -> list[GridPoint]:
        """Return every grid point, in the order of the file."""
        return [point for entry in self.grid for point in entry.points]

    @property
    def runs(self) -> list[Run]:
        """Return every run of the grid, in the order of the file; of several base models, those of each."""
        return [point.run(seed) for point in self.points for seed in self.seeds]

    @property
    def of_bases(self) -> list[str]:
        """Return the names of the experiments with one base model each that this one reports together, if any."""
        return [f"{self.name}~{base}" for base in self.bases]

    @property
    def repetitions(self) -> list[int | str]:
        """Return what the report's numbers are means over: base models if there are several, else training seeds."""
        return self.bases or self.seeds

    def training_of(self, point: GridPoint) -> TrainingConfig:
        """Return the training settings of a grid point or run: the section `training`, overridden by its entry's."""
        return self.training.model_copy(update=point.training) if point.training else self.training

    def sides_of(self, run: Run) -> SafeVocabularies:
        """Return the safe vocabularies of a run's trainer and engine."""
        return self.methods[run.method].sides(run.rho_value, self.training_of(run).max_response_tokens)

    @property
    def axes(self) -> list[str]:
        """Return the names of the training settings that grid entries give and in which the points differ."""
        given = sorted({key for point in self.points for key in point.training})
        every = [self.training_of(point) for point in self.points]
        return [key for key in given if len({getattr(training, key) for training in every}) > 1]

    def settings_of(self, point: GridPoint) -> dict[str, Any]:
        """Return a point's values of `axes`: what tables and figures show of its training settings."""
        training = self.training_of(point)
        return {key: getattr(training, key) for key in self.axes}

    @cached_property
    def jobs(self) -> dict[tuple[str, str], Job]:
        """Return every job, by stage and path, each after those that it waits for."""
        return {(job.stage, job.path): job for job in list_jobs(self)}

    def __copy__(self) -> "Experiment":
        """Copy without the cached jobs, as `model_copy` changes settings on which they depend."""
        copied = super().__copy__()
        copied.__dict__.pop("jobs", None)
        return copied

    def job(self, stage: str, path: str = "") -> Job:
        """Return the job of a stage with this path (dvp.experiment.jobs). Raises DvpError if there is none."""
        if (stage, path) not in self.jobs:
            known = [own for of, own in self.jobs if of == stage]
            nearest = get_close_matches(path, known, n=1, cutoff=0)
            hint = f"; the nearest is '{nearest[0]}'" if nearest else ""
            raise DvpError(f"{stage}: '{path}' is not in experiment '{self.name}'{hint}")
        return self.jobs[stage, path]

    def config_hash(self, stage: str, path: str = "") -> str:
        """Return the hash (12 hex digits) of all settings on which a job depends (see dvp.experiment.config_hash)."""
        return sha256_json(settings_of_job(self, self.job(stage, path)))[:12]

    def evaluated_steps(self, point: GridPoint) -> list[int]:
        """Return the steps after which a point's runs are evaluated (evaluation.at), ascending, without the last."""
        return self.evaluation.steps(self.training_of(point).steps)

    @property
    def snapshots(self) -> list[Run]:
        """Return every run as it was after each of its evaluated steps but the last; none by default."""
        return [run.after(step) for run in self.runs for step in self.evaluated_steps(run)]

    @property
    def sampler(self) -> Sampler:
        """Return the sampler with which every model is scored: evaluation.engine, the full vocabulary."""
        return Sampler(engine=self.evaluation.engine)

    @property
    def _sampling_engines(self) -> list[str]:
        """Return the engines that the section `evaluation` names."""
        named = [entry.engine for entry in self.evaluation.also if entry.engine not in (None, TRAINING)]
        return list(dict.fromkeys([self.evaluation.engine, *named]))

    def samplers_of(self, entry: Further, point: GridPoint | None) -> list[Sampler]:
        """Return the samplers that an entry of evaluation.also means for a point's models, or the base model (None)."""
        engines = [entry.engine or self.evaluation.engine]
        if entry.engine == TRAINING:
            engines = list(dict.fromkeys(other.engine for other in ([point] if point else self.points)))
        made = []
        for engine in engines:
            beside = point.engine if point else engine if entry.engine == TRAINING else None
            others = [point] if point and point.rho else self.points
            at = [other.rho for other in others if other.rho and beside in (None, other.engine)]
            made += [Sampler(engine=engine, rho=rho) for rho in (dict.fromkeys(at) if entry.rho else [None])]
        return made

    def samplers(self, point: GridPoint | None) -> list[Sampler]:
        """Return the further samplers (evaluation.also) of a point's models, or of the base model (None), each once."""
        every = [sampler for entry in self.evaluation.also for sampler in self.samplers_of(entry, point)]
        return [sampler for place, sampler in enumerate(every) if sampler not in [self.sampler, *every[:place]]]

    @property
    def further_evaluations(self) -> list[tuple[Run | None, Sampler]]:
        """Return every model, the base model (None) first, with each of its further samplers (evaluation.also)."""
        models = [(None, None), *((point, point.run(seed)) for point in self.points for seed in self.seeds)]
        return [(run, sampler) for point, run in models for sampler in self.samplers(point)]

    @property
    def preflights(self) -> list[str]:
        """Return the paths of the preflights, one for each engine and settings of the grid; none if switched off."""
        if self.preflight == "never" or (self.preflight == "auto" and isinstance(self.base, TrainedBase)):
            return []
        return list(dict.fromkeys(point.preflight for point in self.points))

    def waiting_for(self, preflight: str) -> "Experiment":
        """Return the experiment reduced to the grid points that wait for a preflight: one engine and no axes."""
        points = [point for point in self.points if point.preflight == preflight]
        grid = [
            GridEntry(method=[point.method], engine=[point.engine], rho=None if point.rho is None else [point.rho])
            for point in points
        ]
        return self.model_copy(update={"training": self.training_of(points[0]), "grid": grid})

    def measurements(self, stage: str) -> list[Measurement]:
        """Return the measurements of the stage `mismatch` or `bias`, in the order of the file; none by default."""
        settings = getattr(self, stage)
        if settings is None:
            return []
        tasks = self.bias.tasks if stage == "bias" else []
        return [
            Measurement(policy=policy, engine=engine, task=task, seed=seed)
            for policy, engine, task, seed in product(settings.policies, settings.engines, tasks or [None], self.seeds)
        ]

    @property
    def estimators(self) -> list[tuple[str, str | None]]:
        """Return method and ρ of every estimator that the stage `bias` compares, in the order of the file."""
        return [
            pair
            for entry in (self.bias.estimators if self.bias else [])
            for pair in product(entry.method, entry.rho or [None])
        ]

    @property
    def positions(self) -> list[str]:
        """Return the bins of response tokens, as `1-8`, whose variances `bias` measures; none if not asked for."""
        if self.bias is None or not self.bias.position_bins:
            return []
        ends = [*self.bias.position_bins, self.training.max_response_tokens]
        return [f"{start + 1}-{end}" for start, end in pairwise([0, *ends])]

    @property
    def used(self) -> "Experiment":
        """Return the experiment without the sources, engines and methods that it does not name."""
        tables = ("sources", "engines", "methods")
        rest = self.model_dump_json(exclude={*tables, "deepspeed"})
        kept = {
            table: {name: entry for name, entry in getattr(self, table).items() if re.search(f'"{name}"(?!:)', rest)}
            for table in tables
        }
        return self.model_copy(update=kept)
