"""The experiment as a typed, strict model.

An experiment file in config/experiments names what to run; config/catalogue holds the sources, engines and methods
that it may refer to by name (an experiment's own `sources:`, `engines:` or `methods:` add to the catalogue or replace
an entry). `load_experiment` resolves the two into one self-contained `Experiment`; unknown keys, impossible values and
names that are not defined are refused with one line.
"""

from difflib import get_close_matches
from itertools import pairwise, product
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from dvp.core.advantages import NEED_A_GROUP
from dvp.errors import DvpError
from dvp.experiment.base import Base, TrainedBase
from dvp.experiment.config_hash import settings_of_stage
from dvp.experiment.data import DataConfig, GeneratedSource, HubSource, Source
from dvp.experiment.evaluation import TRAINING, EvaluationConfig, Further, ReportConfig
from dvp.experiment.grid import (
    BiasConfig,
    GridEntry,
    GridPoint,
    Measurement,
    MismatchConfig,
    Run,
    Sampler,
    parse_rho,
    setting_as_written,
    whole_run,
)
from dvp.experiment.methods import Method
from dvp.experiment.tools import Tools
from dvp.experiment.training import EngineConfig, TrainingConfig
from dvp.files import sha256_json
from dvp.strict import Line, Name, Seed, Strict


class Experiment(Strict):
    """A whole, self-contained experiment."""

    name: Name
    """The file's name without .yaml."""
    description: str
    """What it compares, in a sentence; it stands over the report."""
    scale: Line
    """One sentence on what differs from the paper's scale; it stands beside every published value."""
    seeds: Annotated[list[Seed], Field(min_length=1)]
    """Of training runs and measurements: each grid point is trained once for each."""
    data: DataConfig
    """Problems and prompts."""
    base: Base
    """The model before RL."""
    training: TrainingConfig
    """The RL loop."""
    evaluation: EvaluationConfig
    """How models are scored."""
    report: ReportConfig
    """The main table."""
    grid: Annotated[list[GridEntry], Field(min_length=1)]
    """What is trained."""
    tools: Tools | None = Field(default=None, exclude_if=lambda tools: tools is None)
    """The tool that responses may call, in training and in evaluation."""
    preflight: Literal["auto", "always", "never"] = "auto"
    """Whether the whole path is rehearsed before the grid is trained; auto: where the base model is not trained here.
    No run is trained before all rehearsals have passed, so that a change of this key after training asks for all of it
    again."""
    mismatch: MismatchConfig | None = None
    """Measurements of the mismatch at fixed policies."""
    bias: BiasConfig | None = None
    """Measurements of gradient estimators at fixed policies."""
    sources: dict[Name, Source]
    """Added to the catalogue's, or in place of one."""
    engines: dict[Name, EngineConfig]
    """Added to the catalogue's, or in place of one."""
    methods: dict[Name, Method]
    """Added to the catalogue's, or in place of one."""
    deepspeed: dict[str, Any] = {}
    """What the file named by training.deepspeed holds; filled in when the experiment is resolved."""

    @model_validator(mode="after")
    def _check_data(self) -> "Experiment":
        _distinct("seeds:", self.seeds)
        _defined("data.train", self.data.train, self.sources)
        for name in self.data.evaluation:
            _defined("data.evaluation", name, self.sources)
        _distinct("data.evaluation:", self.data.evaluation)
        if "held_out" in self.data.evaluation:
            raise ValueError("data.evaluation: 'held_out' is reserved for the rows split off the training source")
        if not self.data.tasks:
            raise ValueError("data: no evaluation task; set data.held_out or data.evaluation")
        for name in [self.data.train, *self.data.evaluation]:
            source = self.sources[name]
            if isinstance(source, HubSource) and source.revision is None:
                raise ValueError(
                    f"sources.{name}.revision: not pinned; set it to the 40-digit commit shown under "
                    f"'Files and versions' of huggingface.co/datasets/{source.path}"
                )
        return self

    @model_validator(mode="after")
    def _check_base(self) -> "Experiment":
        if isinstance(self.base, TrainedBase):
            _defined("base.source", self.base.source, self.sources)
            if not isinstance(self.sources[self.base.source], GeneratedSource):
                raise ValueError(f"base.source: expected a generated source, '{self.base.source}' is not one")
            if self.data.chat:
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
    def _check_evaluation(self) -> "Experiment":
        for name in (TRAINING, "own"):
            if name in self.engines:
                raise ValueError(f"engines.{name}: this name is reserved, as evaluation.also has a meaning for it")
        _defined("evaluation.engine", self.evaluation.engine, self.engines)
        for index, entry in enumerate(self.evaluation.also):
            if entry.engine not in (None, TRAINING):
                _defined(f"evaluation.also[{index}].engine", entry.engine, self.engines)
        tasks = dict.fromkeys(self.data.tasks)
        for task in tasks:
            if task not in self.evaluation.samples_per_problem:
                raise ValueError(
                    f"evaluation.samples_per_problem: '{task}' is missing; expected a number for each of "
                    f"{', '.join(tasks)}"
                )
        for task in self.evaluation.samples_per_problem:
            _defined("evaluation.samples_per_problem", task, tasks)
        _defined("report.task", self.report.task, tasks)
        _defined("report.reference", self.report.reference, self.methods)
        return self

    @model_validator(mode="after")
    def _check_grid(self) -> "Experiment":
        for index, entry in enumerate(self.grid):
            for name in entry.engine:
                _defined(f"grid[{index}].engine", name, self.engines)
                if self.training.gpus % self.engines[name].tensor_parallel:
                    raise ValueError(
                        f"grid[{index}].engine: tensor_parallel of '{name}' ({self.engines[name].tensor_parallel}) "
                        f"must divide training.gpus ({self.training.gpus})"
                    )
            for settings in entry.settings:
                training = self._changed_training(f"grid[{index}].training", settings)
                for name in entry.method:
                    self._check_method(f"grid[{index}]", name, entry.rho, training)
                    if training.group_size == 1 and self.methods[name].advantage in NEED_A_GROUP:
                        raise ValueError(
                            f"grid[{index}]: method '{name}' learns nothing with group_size 1, as its advantage "
                            f"{self.methods[name].advantage} compares a prompt's responses"
                        )
                    if self.methods[name].true_norms:
                        raise ValueError(
                            f"grid[{index}]: method '{name}' needs the true norms of gradients, which only "
                            "bias.estimators can have"
                        )
        _distinct("grid: run", [run.path for run in self.runs])
        seen: dict[tuple, GridPoint] = {}
        for point in self.points:
            same = seen.setdefault((point.method, point.engine, point.rho_value, str(self.training_of(point))), point)
            if same is not point:
                raise ValueError(f"grid: {point.path} and {same.path} have the same settings; remove one of them")
        for point in self.points:
            try:
                self.evaluated_steps(point)
            except ValueError as error:
                raise ValueError(f"evaluation.at: {error}, of {point.path}") from None
        if self.evaluation.at is not None and not self.snapshots:
            raise ValueError("evaluation.at: it has no step but the last, which is evaluated in any case; remove it")
        if missing := self.problems_missing(self._most_problems):
            raise ValueError(missing)
        self._check_reference()
        self._check_samplers()
        self._check_reports()
        return self

    def _check_reports(self) -> None:
        """That sets are not asked for where no engine of the grid has any."""
        asked = [point for point in self.points if self.training_of(point).report_sets]
        if asked and not any(
            self.training_of(point).sets_reported(
                self.methods[point.method].sides(point.rho_value, self.training_of(point).max_response_tokens)
            )
            for point in asked
        ):
            raise ValueError("training.report_sets: no method of the grid prunes in the engine; there are no sets")

    def _check_samplers(self) -> None:
        """That what models are sampled with at their ρ is what they were trained with, and no entry is for nothing."""
        for index, entry in enumerate(self.evaluation.also):
            samplers = [sampler for point in [None, *self.points] for sampler in self.samplers_of(entry, point)]
            if not samplers:
                raise ValueError(f"evaluation.also[{index}].rho: the grid has no ρ at which models could be sampled")
            if all(sampler == self.sampler for sampler in samplers):
                raise ValueError(
                    f"evaluation.also[{index}]: expected another engine than {self.evaluation.engine}, or rho; "
                    "this is what is evaluated in any case"
                )
            for point in self.points if entry.rho else []:
                rule = self.methods[point.method].safe_vocabulary
                if rule is not None and not rule.engine_at_rho:
                    raise ValueError(
                        f"evaluation.also[{index}].rho: method '{point.method}' has the rule '{rule.rule}'; "
                        "expected methods with min-p at a fixed ρ, or none"
                    )

    def _changed_training(self, where: str, settings: dict[str, Any]) -> TrainingConfig:
        """The training section with these settings on top, all of it checked."""
        try:
            training = self.training.changed(**settings)
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(f"{where}: {', '.join(_written(settings))}: {message}") from None
        self._check_context(where, training.max_prompt_tokens or 1, training.max_response_tokens)
        return training

    def _check_reference(self) -> None:
        """That report.reference and what stands beside it name one point."""
        method, settings = self.report.reference, self.report.reference_training
        own = [point for point in self.points if point.method == method]
        if not own:
            raise ValueError(f"report.reference: method '{method}' is not in the grid")
        engine = self.report.reference_engine
        if engine is not None:
            own = [point for point in own if point.engine == engine]
            if not own:
                raise ValueError(f"report.reference_engine: the grid has no '{method}' with engine '{engine}'")
        if not any(self.has_settings(point, settings) for point in own):
            asked = ", ".join([*_written(settings), *([f"engine '{engine}'"] if engine else [])])
            raise ValueError(f"report.reference_training: the grid has no '{method}' with {asked}")
        found = self._references
        if len(found) == 1:
            return
        which = " or ".join(point.path for point in found)
        if len({point.engine for point in found}) > 1:
            raise ValueError(f"report.reference_engine: expected the engine that is meant, of {which}")
        if len({point.rho for point in found}) > 1:
            raise ValueError(f"report.reference: expected a method with one ρ on its engine, found {which}")
        raise ValueError(f"report.reference_training: expected the settings that are meant, of {which}")

    @property
    def _references(self) -> list[GridPoint]:
        """The points that `report` may mean by its reference."""
        engine, settings = self.report.reference_engine, self.report.reference_training
        own = [
            point
            for point in self.points
            if point.method == self.report.reference and self.has_settings(point, settings)
        ]
        if engine is not None:
            return [point for point in own if point.engine == engine]
        own = [point for point in own if not self.is_control(point)] or own
        engines = [point.engine for point in self.points]
        most = max(engines.count(point.engine) for point in own)
        return [point for point in own if engines.count(point.engine) == most]

    @property
    def reference_point(self) -> GridPoint:
        """The point that the others are compared with.

        It is of the method report.reference, with report.reference_training and report.reference_engine. Without the
        latter controls are left out unless there is nothing else; of the rest it is the one whose engine most points of
        the grid share.
        """
        return self._references[0]

    def is_control(self, point: GridPoint) -> bool:
        """Whether the point, unlike others, is trained on the evaluation's engine: without the mismatch."""
        exact = self.evaluation.engine
        return point.engine == exact and any(other.engine != exact for other in self.points)

    @model_validator(mode="after")
    def _check_tools(self) -> "Experiment":
        if self.tools is None:
            return self
        for stage in ("mismatch", "bias"):
            if getattr(self, stage) is not None:
                raise ValueError(f"{stage}: it measures responses without tools; remove `{stage}` or `tools`")
        for name in dict.fromkeys([*self._sampling_engines, *(run.engine for run in self.runs)]):
            if self.engines[name].tensor_parallel > 1:
                # The ranks of an engine make the same calls, but a program need not print the same on each of them.
                raise ValueError(f"tools: engine '{name}' is spread over several GPUs; expected tensor_parallel 1")
        for section in ("training", "evaluation"):
            longest = getattr(self, section).max_response_tokens
            if self.tools.max_answer_tokens >= longest:
                raise ValueError(
                    f"tools.max_answer_tokens ({self.tools.max_answer_tokens}) must be below "
                    f"{section}.max_response_tokens ({longest}): an answer is a part of the response"
                )
        return self

    @model_validator(mode="after")
    def _check_measurements(self) -> "Experiment":
        trained = {run.path for run in self.runs}
        for stage in ("mismatch", "bias"):
            settings = getattr(self, stage)
            if settings is None:
                continue
            for name in settings.engines:
                _defined(f"{stage}.engines", name, self.engines)
            for policy in settings.policies:
                if policy == "base":
                    continue
                if policy.run(self.seeds[0]).path not in trained:
                    raise ValueError(f"{stage}.policies: {policy.path} is not in the grid, which must train it")
                own, measured = self.training_of(policy).temperature, self.training.temperature
                if own != measured:
                    raise ValueError(
                        f"{stage}.policies: {policy.path} is trained at temperature {own:g}, but would be measured at "
                        f"{measured:g} (training.temperature)"
                    )
            _distinct(f"{stage}:", [measurement.path for measurement in self.measurements(stage)])
        for name in self.bias.tasks if self.bias else []:
            if name not in self.data.tasks:
                raise ValueError(f"bias.tasks: '{name}' is not evaluated; tasks are {', '.join(self.data.tasks)}")
        if self.mismatch and self.training.temperature != 1.0:
            raise ValueError(
                f"training.temperature: `mismatch` measures at temperature 1, found {self.training.temperature:g}"
            )
        for index, entry in enumerate(self.bias.estimators if self.bias else []):
            for name in entry.method:
                self._check_method(f"bias.estimators[{index}]", name, entry.rho, self.training)
                if not self.methods[name].at_fixed_policy:
                    raise ValueError(
                        f"bias.estimators[{index}]: method '{name}': expected loss reinforce, a rule for ρ that "
                        "needs no training and no decay of the learning rate; the others cannot be compared at a fixed "
                        "policy"
                    )
        if self.bias:
            available = self.bias.reference_batches * self.bias.problems * self.training.group_size
            if self.bias.norm_responses > available:
                raise ValueError(
                    f"bias.norm_responses: {self.bias.norm_responses} are more than the reference has ({available}: "
                    "bias.reference_batches × bias.problems × training.group_size)"
                )
        if self.bias and self.bias.position_bins[-1:] >= [self.training.max_response_tokens]:
            raise ValueError(
                f"bias.position_bins: {self.bias.position_bins[-1]} must be below training.max_response_tokens "
                f"({self.training.max_response_tokens})"
            )
        _distinct("bias.estimators:", [f"{method}, ρ {rho}" if rho else method for method, rho in self.estimators])
        return self

    def _check_method(self, where: str, name: str, rho: list[str] | None, training: TrainingConfig) -> None:
        _defined(f"{where}.method", name, self.methods)
        if self.methods[name].takes_rho != (rho is not None):
            expected = "needs" if self.methods[name].takes_rho else "takes no"
            raise ValueError(f"{where}: method '{name}' {expected} rho")
        decay = self.methods[name].learning_rate_decay
        if decay is not None and decay.patience >= training.steps:
            raise ValueError(
                f"{where}: method '{name}': learning_rate_decay.patience ({decay.patience}) must be below "
                f"training.steps ({training.steps}): no surge would be seen"
            )
        for value in rho or [None]:
            try:
                self.methods[name].sides(value and parse_rho(value), training.max_response_tokens)
            except DvpError as error:
                raise ValueError(f"{where}: method '{name}': {error}") from None

    @property
    def _most_problems(self) -> dict[str | None, int]:
        """What `problems_missing` takes, where the settings say how many problems there can be at most."""
        data, most = self.data, {}
        for name in [data.train, *data.evaluation]:
            source = self.sources[name]
            most[name] = source.count if isinstance(source, GeneratedSource) else getattr(source, "problems", None)
        of_source = most.pop(data.train)
        bounds = [data.limit, None if of_source is None else max(0, of_source - data.held_out)]
        most |= {None: min((bound for bound in bounds if bound is not None), default=None), "held_out": data.held_out}
        return {name: count for name, count in most.items() if count is not None}

    def problems_missing(self, available: dict[str | None, int]) -> str | None:
        """One line if a step or a measurement needs more problems than there are of a task, or (None) to train on."""
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
        """The type in which the trainer multiplies matrices; its weights and optimiser are fp32 in either case."""
        return "bfloat16" if "torch_autocast" in self.deepspeed else "float32"

    @property
    def points(self) -> list[GridPoint]:
        """Every grid point, in the order of the file."""
        return [point for entry in self.grid for point in entry.points]

    @property
    def runs(self) -> list[Run]:
        """Every run of the grid, in the order of the file."""
        return [point.run(seed) for point in self.points for seed in self.seeds]

    def training_of(self, point: GridPoint) -> TrainingConfig:
        """The training settings of a grid point or a run: the section `training`, with those of its entry on top."""
        return self.training.model_copy(update=point.training) if point.training else self.training

    @property
    def axes(self) -> list[str]:
        """The training settings that entries of the grid give and in which its points differ, by name."""
        given = sorted({key for point in self.points for key in point.training})
        every = [self.training_of(point) for point in self.points]
        return [key for key in given if len({getattr(training, key) for training in every}) > 1]

    def settings_of(self, point: GridPoint) -> dict[str, Any]:
        """A point's values of `axes`: what tables and figures show of its training settings."""
        training = self.training_of(point)
        return {key: getattr(training, key) for key in self.axes}

    def has_settings(self, point: GridPoint, settings: dict[str, Any]) -> bool:
        """Whether a point is trained with these settings."""
        training = self.training_of(point)
        return all(getattr(training, key) == value for key, value in settings.items())

    def run(self, path: str) -> Run:
        """The run of this path. Raises DvpError if the grid has none."""
        for run in self.runs:
            if run.path == path:
                return run
        raise DvpError(f"run '{path}' is not in the grid of experiment '{self.name}'; one that is: {self.runs[0].path}")

    def evaluated_steps(self, point: GridPoint) -> list[int]:
        """The steps after which the runs of a point are evaluated (evaluation.at), in their order, without the last."""
        return self.evaluation.steps(self.training_of(point).steps)

    @property
    def snapshots(self) -> list[Run]:
        """Every run as it was after each of its evaluated steps, the last of which is left out; none by default."""
        return [run.after(step) for run in self.runs for step in self.evaluated_steps(run)]

    def policy(self, path: str) -> Run:
        """The run, or the run after an evaluated step, of this path. Raises DvpError if it is not evaluated."""
        run = self.run(whole_run(path))
        for step in [None, *self.evaluated_steps(run)]:
            if run.after(step).path == path:
                return run.after(step)
        raise DvpError(f"'{path}': this step is not in evaluation.at of experiment '{self.name}'")

    @property
    def sampler(self) -> Sampler:
        """With what every model is sampled when it is scored: evaluation.engine, the full vocabulary."""
        return Sampler(engine=self.evaluation.engine)

    @property
    def _sampling_engines(self) -> list[str]:
        """The engines that the section `evaluation` names."""
        named = [entry.engine for entry in self.evaluation.also if entry.engine not in (None, TRAINING)]
        return list(dict.fromkeys([self.evaluation.engine, *named]))

    def samplers_of(self, entry: Further, point: GridPoint | None) -> list[Sampler]:
        """What an entry of evaluation.also means for the models of a point, or for the base model (None)."""
        if entry.engine == TRAINING:
            engines = list(dict.fromkeys(other.engine for other in self.points)) if point is None else [point.engine]
        else:
            engines = [entry.engine or self.evaluation.engine]
        return [Sampler(engine=engine, rho=rho) for engine in engines for rho in self._rhos(entry, engine, point)]

    def _rhos(self, entry: Further, engine: str, point: GridPoint | None) -> list[str | None]:
        if entry.rho is None:
            return [None]
        if point is not None and point.rho is not None:
            return [point.rho]
        beside = point.engine if point is not None else engine if entry.engine == TRAINING else None
        others = [other for other in self.points if other.rho is not None and beside in (None, other.engine)]
        return list(dict.fromkeys(other.rho for other in others))

    def samplers(self, point: GridPoint | None) -> list[Sampler]:
        """With what else (evaluation.also) the models of a point, or the base model (None), are scored; each once."""
        every = [sampler for entry in self.evaluation.also for sampler in self.samplers_of(entry, point)]
        return [sampler for place, sampler in enumerate(every) if sampler not in [self.sampler, *every[:place]]]

    @property
    def further_evaluations(self) -> list[tuple[Run | None, Sampler]]:
        """Every model, the base model (None) first, with what else it is scored with."""
        models = [(None, None), *((point, point.run(seed)) for point in self.points for seed in self.seeds)]
        return [(run, sampler) for point, run in models for sampler in self.samplers(point)]

    def evaluated(self, path: str) -> tuple[Run | None, Sampler]:
        """The model (None: the base model) and the sampler of an evaluation: RUN, RUN/step~N, base or one of the three
        with /by~ENGINE/min_p~RHO.

        Raises DvpError if the experiment does not evaluate it.
        """
        model, by, _ = path.partition("/by~")
        run = None if model == "base" else self.policy(model)
        if not by:
            return run, self.sampler
        samplers = self.samplers(run and run.point) if run is None or run.step is None else []
        for sampler in samplers:
            if f"{model}/{sampler.path}" == path:
                return run, sampler
        raise DvpError(f"'{path}': evaluation.also of experiment '{self.name}' does not ask for it")

    @property
    def preflights(self) -> list[str]:
        """Paths of the preflights, one for each engine and settings of the grid; none if there are to be none."""
        if self.preflight == "never" or (self.preflight == "auto" and isinstance(self.base, TrainedBase)):
            return []
        return list(dict.fromkeys(point.preflight for point in self.points))

    def waiting_for(self, preflight: str) -> "Experiment":
        """Of this experiment the grid that waits for a preflight, as an experiment of one engine and no axes.

        Raises DvpError if no run waits for it.
        """
        points = [point for point in self.points if point.preflight == preflight]
        if not points:
            known = ", ".join(dict.fromkeys(point.preflight for point in self.points))
            raise DvpError(f"--engine: no run has engine '{preflight}'; those of the grid are {known}")
        grid = [
            GridEntry(method=[point.method], engine=[point.engine], rho=None if point.rho is None else [point.rho])
            for point in points
        ]
        return self.model_copy(update={"training": self.training_of(points[0]), "grid": grid})

    def measurements(self, stage: str) -> list[Measurement]:
        """Every measurement of the stage `mismatch` or `bias`, in the order of the file; none if not asked for."""
        settings = getattr(self, stage)
        if settings is None:
            return []
        tasks = self.bias.tasks if stage == "bias" else []
        return [
            Measurement(policy=policy, engine=engine, task=task, seed=seed)
            for policy, engine, task, seed in product(settings.policies, settings.engines, tasks or [None], self.seeds)
        ]

    def measurement(self, stage: str, path: str) -> Measurement:
        """The measurement of this path. Raises DvpError if the stage has none."""
        for measurement in self.measurements(stage):
            if measurement.path == path:
                return measurement
        raise DvpError(f"{stage} '{path}' is not in experiment '{self.name}'")

    @property
    def estimators(self) -> list[tuple[str, str | None]]:
        """Method and ρ of every estimator that the stage `bias` compares, in the order of the file."""
        return [
            pair
            for entry in (self.bias.estimators if self.bias else [])
            for pair in product(entry.method, entry.rho or [None])
        ]

    @property
    def positions(self) -> list[str]:
        """The bins of response tokens for which the stage `bias` gives variances, as `1-8`; none if not asked for."""
        if self.bias is None or not self.bias.position_bins:
            return []
        ends = [*self.bias.position_bins, self.training.max_response_tokens]
        return [f"{start + 1}-{end}" for start, end in pairwise([0, *ends])]

    @property
    def used(self) -> "Experiment":
        """The same experiment without the sources, engines and methods of the catalogue that it does not name."""
        sources = {self.data.train, *self.data.evaluation}
        if isinstance(self.base, TrainedBase):
            sources.add(self.base.source)
        engines = {*self._sampling_engines, *(run.engine for run in self.runs)}
        for settings in filter(None, (self.mismatch, self.bias)):
            engines.update(settings.engines)
        methods = {run.method for run in self.runs} | {method for method, _ in self.estimators}
        tables = {"sources": sources, "engines": engines, "methods": methods}
        return self.model_copy(
            update={
                table: {name: entry for name, entry in getattr(self, table).items() if name in names}
                for table, names in tables.items()
            }
        )

    def config_hash(
        self,
        stage: str,
        run: Run | None = None,
        task: str | None = None,
        measurement: Measurement | None = None,
        engine: str | None = None,
        sampler: Sampler | None = None,
    ) -> str:
        """Hash (12 hex digits) of all settings on which a stage depends (see dvp.experiment.config_hash)."""
        return sha256_json(settings_of_stage(self, stage, run, task, measurement, engine, sampler))[:12]


def _defined(key: str, name: str, table: dict) -> None:
    if name not in table:
        meant = get_close_matches(name, table, n=1, cutoff=0.65)
        hint = f"did you mean {meant[0]}?" if meant else f"known are {', '.join(sorted(table))}"
        raise ValueError(f"{key}: '{name}' is not defined; {hint}")


def _written(settings: dict[str, Any]) -> list[str]:
    return [f"{key} {setting_as_written(value)}" for key, value in settings.items()]


def _distinct(key: str, values: list) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{key} {value} is listed twice")
