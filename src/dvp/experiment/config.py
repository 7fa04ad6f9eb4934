"""The experiment as typed, strict models.

An experiment file in config/experiments names what to run; config/catalogue holds the sources, engines and methods
that it may refer to by name (an experiment's own `sources:`, `engines:` or `methods:` add to the catalogue or replace
an entry). `load_experiment` resolves the two into one self-contained `Experiment`; unknown keys, impossible values and
dangling names are refused with one line.

What a stage depends on is its *config hash*: over just those parts of the experiment, so that a changed label does not
train anything again and a changed learning rate does.
"""

from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from dvp.errors import DvpError
from dvp.experiment.grid import BiasConfig, GridEntry, Measurement, MismatchConfig, Run
from dvp.experiment.methods import FeedbackSafe, Method
from dvp.files import sha256_json
from dvp.strict import Fraction, Name, Positive, PositiveFloat, Strict

Revision = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
# In a DeepSpeed file: the trainer multiplies in bf16; weights, gradients' sums and optimiser stay fp32.
BF16_AUTOCAST = {"enabled": True, "dtype": "bfloat16"}


class Columns(Strict):
    """Where a row keeps what we need; dots reach into nested values (`reward_model.ground_truth`)."""

    problem: str
    answer: str
    solution: str | None = None
    id: str | None = None


class GeneratedSource(Strict):
    """Problems made here, from a seed."""

    kind: Literal["generated"]
    generator: Literal["stories"]
    count: Positive
    seed: int
    steps: Annotated[list[Positive], Field(min_length=2, max_length=2)] = [2, 4]
    """Fewest and most steps of a problem."""

    @model_validator(mode="after")
    def _ordered(self) -> "GeneratedSource":
        if self.steps[0] > self.steps[1]:
            raise ValueError(f"steps: expected [fewest, most], found {self.steps}")
        return self


class _Table(Strict):
    columns: Columns
    answer_format: Literal["plain", "gsm8k", "number"] = "plain"
    """plain: as it stands; gsm8k: what follows ####; number: a float that means an integer (27.0)."""
    strip: list[str] = []
    """Literal texts removed from the problem, such as an instruction that the data set puts around it."""


class HubSource(_Table):
    """A data set of the Hugging Face hub, at a fixed revision."""

    kind: Literal["hub"]
    path: str
    name: str | None = None
    split: str
    revision: Revision | None = None
    """The commit of the data set's repository. Without one the source is refused when an experiment uses it."""
    problems: Positive | None = None
    """How many problems it has: what `dvp plan` reckons with until `dvp prepare` has counted them."""


class FileSource(_Table):
    """A local .json, .jsonl or .parquet file."""

    kind: Literal["file"]
    path: Annotated[Path, Field(strict=False)]


Source = Annotated[GeneratedSource | HubSource | FileSource, Field(discriminator="kind")]


class Decontamination(Strict):
    """Training problems that share a word n-gram with an evaluation problem are dropped."""

    ngram: Positive = 13


class DataConfig(Strict):
    """Which problems to train on and which to evaluate on."""

    train: Name
    """A source."""
    held_out: Annotated[int, Field(ge=0)] = 0
    """Problems split off the training source; they become the task `held_out`."""
    evaluation: list[Name] = []
    """Sources, each a task of the same name."""
    limit: Positive | None = None
    """Training problems kept at most."""
    prompt_template: str = "{problem}"
    chat: bool = False
    """Whether the tokenizer's chat template is applied to the prompt."""
    decontamination: Decontamination = Decontamination()

    @field_validator("prompt_template")
    @classmethod
    def _has_problem(cls, value: str) -> str:
        if "{problem}" not in value:
            raise ValueError("expected a text that contains {problem}")
        return value

    @property
    def tasks(self) -> list[str]:
        """The evaluation tasks, the held-out one first."""
        return (["held_out"] if self.held_out else []) + self.evaluation


class TokenizerConfig(Strict):
    """A byte-level BPE trained on generated documents; digits stand alone."""

    vocabulary_size: Annotated[int, Field(ge=300)]
    documents: Positive


class _Transformer(Strict):
    """The shape of a Qwen3 model: grouped queries with normalised heads, SwiGLU."""

    hidden_size: Positive
    layers: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    intermediate_size: Positive
    tie_word_embeddings: bool = True

    @model_validator(mode="after")
    def _grouped(self) -> "_Transformer":
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self


class Architecture(_Transformer):
    """A model to be made (transformers' own classes); its vocabulary is the tokenizer's."""

    max_position_embeddings: Positive


class PretrainedArchitecture(_Transformer):
    """What a pretrained model is like: `dvp plan` reckons with it, `dvp base` refuses a model of another shape."""

    vocabulary_size: Positive


class WarmStart(Strict):
    """Supervised steps on worked solutions, some of them careless on purpose (declared wherever results are shown)."""

    steps: Positive
    batch_size: Positive
    learning_rate: Annotated[float, Field(gt=0)]
    careless_fraction: Fraction
    """Share of the solutions that are careless."""
    careless_error: Fraction
    """Probability that a step of a careless solution is wrong."""


class TrainedBase(Strict):
    """A tiny model that the pipeline trains itself."""

    kind: Literal["trained"]
    seed: int
    source: Name
    """The generated source whose generator supplies the documents."""
    tokenizer: TokenizerConfig
    architecture: Architecture
    warm_start: WarmStart


class HubBase(Strict):
    """A model of the Hugging Face hub, at a fixed revision."""

    kind: Literal["hub"]
    path: str
    revision: Revision
    architecture: PretrainedArchitecture | None = None


class LocalBase(Strict):
    """A local Hugging Face directory."""

    kind: Literal["local"]
    path: str
    architecture: PretrainedArchitecture | None = None


Base = Annotated[TrainedBase | HubBase | LocalBase, Field(discriminator="kind")]


class EngineConfig(Strict):
    """The inference engine and its precision. The trainer is fp32; what differs here is the mismatch under study."""

    dtype: Literal["float32", "bfloat16", "float16"]
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    weight_rounding: Literal["none", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "int3"] = "none"
    """Matrices are rounded through this format, one scale an output row, before they enter the engine."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a GPU's memory that the engine may take; unused on a CPU."""
    tensor_parallel: Positive = 1


class Collapse(Strict):
    """When a run counts as collapsed (dvp.core.collapse). It goes on all the same: a collapse is a result."""

    window: Positive = 128
    sigmas: PositiveFloat = 6.0
    """A spike: k3 or the gradient's norm above mean + this many σ of its last `window` values."""
    warmup: Annotated[int, Field(ge=2)] = 32
    """Values that a metric needs before it can spike."""
    kl_above: PositiveFloat | None = None
    entropy_below: PositiveFloat | None = None
    reward_below: PositiveFloat | None = None
    patience: Positive = 8
    """Steps in a row that entropy or reward must be low."""

    @model_validator(mode="after")
    def _warms_up(self) -> "Collapse":
        if self.warmup > self.window:
            raise ValueError(f"warmup ({self.warmup}) must not exceed window ({self.window})")
        return self


class KeepResponses(Strict):
    """Which responses of a run are kept token by token (dvp.training.responses)."""

    every: Positive = 10
    """Those of every so many steps, and of the first and the last one."""
    per_step: Positive = 4
    """Of each step: half of them its first ones, half those with the largest mismatch."""
    before_collapse: Annotated[int, Field(ge=0)] = 5
    """All steps from so many before a collapse up to it."""


class TrainingConfig(Strict):
    """The RL loop."""

    steps: Positive
    prompts_per_step: Positive
    group_size: Positive
    """Responses per prompt."""
    micro_batch_size: Positive
    """Responses per forward pass of one GPU."""
    learning_rate: Annotated[float, Field(gt=0)]
    adam_betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.99]
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    gradient_clipping: Annotated[float, Field(gt=0)] = 1.0
    temperature: Annotated[float, Field(gt=0)] = 1.0
    max_response_tokens: Positive
    minibatches: Positive = 1
    """Optimiser steps per rollout batch, each on as many of its prompts."""
    synchronise_every: Positive = 1
    """Steps after which the engine gets the trainer's weights; above 1 it samples from stale ones."""
    collapse: Collapse = Collapse()
    keep_responses: KeepResponses = KeepResponses()
    max_prompt_tokens: Positive | None = None
    """Problems with longer prompts are not trained on. Evaluation leaves none out."""
    gpus: Positive = 1
    """GPUs of each node; without a GPU, processes."""
    nodes: Positive = 1
    gradient_checkpointing: bool = False
    """Recompute the layers' activations in the backward pass: a fourth more arithmetic, a layer's memory."""
    deepspeed: Name
    """A file of config/deepspeed, without .json."""
    checkpoint_every: Positive
    keep_checkpoints: Positive = 2

    @property
    def ranks(self) -> int:
        """GPUs of all nodes together."""
        return self.gpus * self.nodes

    @model_validator(mode="after")
    def _divides(self) -> "TrainingConfig":
        batch = self.prompts_per_step * self.group_size
        share, rest = divmod(batch, self.ranks)
        if rest:
            raise ValueError(f"gpus × nodes ({self.ranks}) must divide prompts_per_step × group_size ({batch})")
        if share % self.micro_batch_size:
            of_each = f" / (gpus × nodes) ({share})" if self.ranks > 1 else f" ({batch})"
            raise ValueError(
                f"micro_batch_size ({self.micro_batch_size}) must divide prompts_per_step × group_size{of_each}"
            )
        if self.prompts_per_step % self.minibatches:
            raise ValueError(f"minibatches ({self.minibatches}) must divide prompts_per_step ({self.prompts_per_step})")
        if self.checkpoint_every % self.synchronise_every:
            raise ValueError(
                f"checkpoint_every ({self.checkpoint_every}) must be a multiple of synchronise_every "
                f"({self.synchronise_every}): a run goes on with the engine's weights equal to the trainer's"
            )
        return self


class EvaluationConfig(Strict):
    """How a model is scored."""

    engine: Name
    samples_per_problem: dict[Name, Positive]
    """k, by task."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_response_tokens: Positive
    bootstrap_resamples: Annotated[int, Field(ge=100)] = 2000
    seed: int = 0


class ReportConfig(Strict):
    """What the main table compares."""

    task: Name
    """The task whose score is in the main table."""
    reference: Name
    """The method (on its mismatched engine) that the others are set against."""
    declarations: list[str] = []
    """Sentences that stand under every table, such as how the base model was made."""


class Experiment(Strict):
    """A whole, self-contained experiment."""

    name: Name
    description: str
    scale: str
    """One sentence on what differs from the paper's scale; it stands beside every published value."""
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    data: DataConfig
    base: Base
    training: TrainingConfig
    evaluation: EvaluationConfig
    report: ReportConfig
    grid: Annotated[list[GridEntry], Field(min_length=1)]
    mismatch: MismatchConfig | None = None
    bias: BiasConfig | None = None
    sources: dict[Name, Source]
    engines: dict[Name, EngineConfig]
    methods: dict[Name, Method]
    deepspeed: dict[str, Any] = {}
    """What the file named by training.deepspeed holds; filled in when the experiment is resolved."""

    @model_validator(mode="after")
    def _names_exist(self) -> "Experiment":
        def known(key: str, name: str, table: dict) -> None:
            if name not in table:
                raise ValueError(f"{key}: '{name}' is not defined; known are {', '.join(sorted(table))}")

        def distinct(key: str, values: list) -> None:
            for value in values:
                if values.count(value) > 1:
                    raise ValueError(f"{key} {value} is listed twice")

        distinct("seeds:", self.seeds)
        known("data.train", self.data.train, self.sources)
        for name in self.data.evaluation:
            known("data.evaluation", name, self.sources)
        distinct("data.evaluation:", self.data.evaluation)
        if "held_out" in self.data.evaluation:
            raise ValueError("data.evaluation: 'held_out' is reserved for the rows split off the training source")
        if not self.data.tasks:
            raise ValueError("data: no evaluation task; set data.held_out or data.evaluation")
        if isinstance(self.base, TrainedBase):
            known("base.source", self.base.source, self.sources)
            if not isinstance(self.sources[self.base.source], GeneratedSource):
                raise ValueError(f"base.source: expected a generated source, '{self.base.source}' is not one")
        known("evaluation.engine", self.evaluation.engine, self.engines)
        tasks = dict.fromkeys(self.data.tasks)
        for task in tasks:
            known("evaluation.samples_per_problem", task, self.evaluation.samples_per_problem)
        for task in self.evaluation.samples_per_problem:
            known("evaluation.samples_per_problem", task, tasks)
        known("report.task", self.report.task, tasks)
        known("report.reference", self.report.reference, self.methods)
        for index, entry in enumerate(self.grid):
            for name in entry.engine:
                known(f"grid[{index}].engine", name, self.engines)
                if self.training.gpus % self.engines[name].tensor_parallel:
                    raise ValueError(
                        f"grid[{index}].engine: tensor_parallel of '{name}' ({self.engines[name].tensor_parallel}) "
                        f"must divide training.gpus ({self.training.gpus})"
                    )
            for name in entry.method:
                self._check_method(f"grid[{index}]", name, entry.rho)
        distinct("grid: run", [run.path for run in self.runs])
        for stage in ("mismatch", "bias"):
            self._check_measurement(stage)
        if all(self.report.reference not in entry.method for entry in self.grid):
            raise ValueError(f"report.reference: method '{self.report.reference}' is not in the grid")
        for name in [self.data.train, *self.data.evaluation]:
            source = self.sources[name]
            if isinstance(source, HubSource) and source.revision is None:
                raise ValueError(
                    f"sources.{name}.revision: not pinned; set it to the 40-digit commit shown under "
                    f"'Files and versions' of huggingface.co/datasets/{source.path}"
                )
        return self

    def _check_method(self, where: str, name: str, rho: list[str] | None) -> None:
        if name not in self.methods:
            known = ", ".join(sorted(self.methods))
            raise ValueError(f"{where}.method: '{name}' is not defined; known are {known}")
        if self.methods[name].takes_rho != (rho is not None):
            expected = "needs" if self.methods[name].takes_rho else "takes no"
            raise ValueError(f"{where}: method '{name}' {expected} rho")

    def _check_measurement(self, stage: str) -> None:
        settings = getattr(self, stage)
        if settings is None:
            return
        for name in settings.engines:
            if name not in self.engines:
                known = ", ".join(sorted(self.engines))
                raise ValueError(f"{stage}.engines: '{name}' is not defined; known are {known}")
        for policy in settings.policies:
            if policy != "base" and policy.run(self.seeds[0]).path not in [run.path for run in self.runs]:
                raise ValueError(f"{stage}.policies: {policy.path} is not in the grid, which must train it")
        paths = [measurement.path for measurement in self.measurements(stage)]
        for path in paths:
            if paths.count(path) > 1:
                raise ValueError(f"{stage}: {path} is listed twice")
        if stage == "mismatch":
            if self.training.temperature != 1.0:
                raise ValueError(
                    f"training.temperature: `mismatch` measures at temperature 1, found {self.training.temperature:g}"
                )
            return
        for index, entry in enumerate(settings.estimators):
            for name in entry.method:
                self._check_method(f"bias.estimators[{index}]", name, entry.rho)
                method = self.methods[name]
                if method.loss.kind != "reinforce" or isinstance(method.safe_vocabulary, FeedbackSafe):
                    raise ValueError(
                        f"bias.estimators[{index}]: method '{name}': expected loss reinforce and a rule for ρ that "
                        "needs no training; at a fixed policy the others have nothing to say"
                    )
        names = self.estimators
        for one in names:
            if names.count(one) > 1:
                raise ValueError(f"bias.estimators: {one[0]}, ρ {one[1]} is listed twice")

    @property
    def trainer_dtype(self) -> str:
        """The type in which the trainer multiplies matrices; its weights and optimiser are fp32 in either case."""
        return "bfloat16" if "torch_autocast" in self.deepspeed else "float32"

    @property
    def runs(self) -> list[Run]:
        """Every run of the grid, in the order of the file."""
        return [
            Run(method=method, engine=engine, rho=rho, seed=seed)
            for entry in self.grid
            for method, engine, rho, seed in product(entry.method, entry.engine, entry.rho or [None], self.seeds)
        ]

    def measurements(self, stage: str) -> list[Measurement]:
        """Every measurement of the stage `mismatch` or `bias`, in the order of the file; none if not asked for."""
        settings = getattr(self, stage)
        if settings is None:
            return []
        return [
            Measurement(policy=policy, engine=engine, seed=seed)
            for policy, engine, seed in product(settings.policies, settings.engines, self.seeds)
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

    def run(self, path: str) -> Run:
        """The run of this path. Raises DvpError if the grid has none."""
        for run in self.runs:
            if run.path == path:
                return run
        raise DvpError(f"run '{path}' is not in the grid of experiment '{self.name}'")

    def config_hash(
        self, stage: str, run: Run | None = None, task: str | None = None, measurement: Measurement | None = None
    ) -> str:
        """Hash (12 hex digits) of all parts of the experiment on which a stage depends, upstream stages included.

        `run` is None for the stages before the grid, and for the evaluation of the base model; `measurement` is that of
        the stages `mismatch` and `bias`.
        """
        if measurement is not None:
            run = measurement.run
        # What only `dvp plan` reckons with changes no result.
        sources = {
            name: self.sources[name].model_dump(mode="json", exclude={"problems"})
            for name in [self.data.train, *self.data.evaluation]
        }
        parts: dict[str, Any] = {"data": self.data.model_dump(mode="json"), "sources": sources}
        if stage != "prepare":
            made = isinstance(self.base, TrainedBase)
            parts["base"] = self.base.model_dump(mode="json", exclude=None if made else {"architecture"})
            if made:
                parts["base_source"] = self.sources[self.base.source].model_dump(mode="json")
        if stage in ("train", "convert", "evaluate", "mismatch", "bias") and run is not None:
            # Over how many GPUs a run is spread changes it by rounding only.
            parts["training"] = self.training.model_dump(mode="json", exclude={"gpus", "nodes"})
            parts["deepspeed"] = self.deepspeed
            parts["run"] = run.model_dump(mode="json")
            parts["engine"] = self.engines[run.engine].model_dump(mode="json")
            parts["method"] = self.methods[run.method].model_dump(mode="json", exclude={"label"})
        if stage == "evaluate":
            evaluation = self.evaluation.model_dump(mode="json")
            evaluation["samples_per_problem"] = {task: self.evaluation.samples_per_problem[task]} if task else {}
            parts["evaluation"] = evaluation
            parts["evaluation_engine"] = self.engines[self.evaluation.engine].model_dump(mode="json")
        if measurement is not None:
            settings = getattr(self, stage)
            parts["measured"] = settings.model_dump(mode="json", exclude={"policies", "engines", "estimators"})
            parts["measured_engine"] = self.engines[measurement.engine].model_dump(mode="json")
            parts["seed"] = measurement.seed
            sampling = {"temperature", "max_prompt_tokens", "max_response_tokens"}
            if stage == "bias":
                sampling |= {"group_size", "micro_batch_size"}
            parts["sampling"] = self.training.model_dump(mode="json", include=sampling)
        if stage == "bias":
            parts["estimators"] = [
                (self.methods[method].model_dump(mode="json", exclude={"label"}), rho)
                for method, rho in self.estimators
            ]
        if stage == "report":
            parts = self.model_dump(mode="json")
        return sha256_json(parts)[:12]
