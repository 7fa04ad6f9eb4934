"""The experiment as typed, strict models.

An experiment file in config/experiments names what to run; config/catalogue holds the sources, engines and methods
that it may refer to by name (an experiment's own `sources:`, `engines:` or `methods:` add to the catalogue or replace
an entry). `load_experiment` resolves the two into one self-contained `Experiment`; unknown keys, impossible values and
dangling names are refused with one line.

What a stage depends on is its *identity*: a hash over just those parts of the experiment, so that a changed label does
not train anything again and a changed learning rate does.
"""

import math
import re
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from dvp.errors import DvpError
from dvp.files import sha256_json
from dvp.methods import Method
from dvp.strict import Fraction, Name, Positive, PositiveFloat, Strict

Revision = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]


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


class Architecture(Strict):
    """A Qwen3 model (transformers' own classes)."""

    hidden_size: Positive
    layers: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    intermediate_size: Positive
    max_position_embeddings: Positive
    tie_word_embeddings: bool = True

    @model_validator(mode="after")
    def _grouped(self) -> "Architecture":
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self


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


class LocalBase(Strict):
    """A local Hugging Face directory."""

    kind: Literal["local"]
    path: str


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
    gpus: Positive = 1
    """GPUs of each node; without a GPU, processes."""
    nodes: Positive = 1
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


class GridEntry(Strict):
    """Every combination of its lists, for every seed."""

    method: Annotated[list[Name], Field(min_length=1)]
    engine: Annotated[list[Name], Field(min_length=1)]
    rho: Annotated[list[str], Field(min_length=1)] | None = None

    @field_validator("method", "engine", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("rho", mode="before")
    @classmethod
    def _rhos(cls, value: Any) -> Any:
        values = value if isinstance(value, list) or value is None else [value]
        if values is None:
            return None
        for rho in values:
            parse_rho(rho)
        return [rho if isinstance(rho, str) else repr(rho) for rho in values]


class ReportConfig(Strict):
    """What the main table compares."""

    task: Name
    """The task whose score is in the main table."""
    reference: Name
    """The method (on its mismatched engine) that the others are set against."""
    declarations: list[str] = []
    """Sentences that stand under every table, such as how the base model was made."""


class Run(Strict):
    """One grid point with one seed."""

    method: str
    engine: str
    rho: str | None
    seed: int

    @property
    def path(self) -> str:
        """The run as a relative path, which says what it is."""
        return f"method~{self.method}/engine~{self.engine}/rho~{self.rho or 'none'}/seed~{self.seed}"

    @property
    def rho_value(self) -> float | None:
        """ρ as a number, None without a safe vocabulary."""
        return None if self.rho is None else parse_rho(self.rho)


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
                known(f"grid[{index}].method", name, self.methods)
                if self.methods[name].takes_rho != (entry.rho is not None):
                    expected = "needs" if self.methods[name].takes_rho else "takes no"
                    raise ValueError(f"grid[{index}]: method '{name}' {expected} rho")
        distinct("grid: run", [run.path for run in self.runs])
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

    @property
    def runs(self) -> list[Run]:
        """Every run of the grid, in the order of the file."""
        return [
            Run(method=method, engine=engine, rho=rho, seed=seed)
            for entry in self.grid
            for method, engine, rho, seed in product(entry.method, entry.engine, entry.rho or [None], self.seeds)
        ]

    def run(self, path: str) -> Run:
        """The run of this path. Raises DvpError if the grid has none."""
        for run in self.runs:
            if run.path == path:
                return run
        raise DvpError(f"run '{path}' is not in the grid of experiment '{self.name}'")

    def identity(self, stage: str, run: Run | None = None, task: str | None = None) -> str:
        """Hash (12 hex digits) of all parts of the experiment on which a stage depends, upstream stages included.

        `run` is None for the stages before the grid, and for the evaluation of the base model.
        """
        sources = {
            name: self.sources[name].model_dump(mode="json") for name in [self.data.train, *self.data.evaluation]
        }
        parts: dict[str, Any] = {"data": self.data.model_dump(mode="json"), "sources": sources}
        if stage != "prepare":
            parts["base"] = self.base.model_dump(mode="json")
            if isinstance(self.base, TrainedBase):
                parts["base_source"] = self.sources[self.base.source].model_dump(mode="json")
        if stage in ("train", "convert", "evaluate") and run is not None:
            parts["training"] = self.training.model_dump(mode="json")
            parts["deepspeed"] = self.deepspeed
            parts["run"] = run.model_dump(mode="json")
            parts["engine"] = self.engines[run.engine].model_dump(mode="json")
            parts["method"] = self.methods[run.method].model_dump(mode="json", exclude={"label"})
        if stage == "evaluate":
            evaluation = self.evaluation.model_dump(mode="json")
            evaluation["samples_per_problem"] = {task: self.evaluation.samples_per_problem[task]} if task else {}
            parts["evaluation"] = evaluation
            parts["evaluation_engine"] = self.engines[self.evaluation.engine].model_dump(mode="json")
        if stage == "report":
            parts = self.model_dump(mode="json")
        return sha256_json(parts)[:12]


def parse_rho(value: object) -> float:
    """ρ from `0.01`, `"1e-2"`, or `"e-13"` (which is exp(−13)). Raises ValueError outside (0, 1)."""
    match = re.fullmatch(r"(e-)?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", str(value))
    if match is None:
        rho = math.nan
    elif match[1]:
        rho = math.exp(-float(match[2])) if match[3] is None else math.nan
    else:
        rho = float(match[0])
    if isinstance(value, bool) or not 0 < rho < 1:
        raise ValueError(f"ρ must lie in (0, 1), written like 0.01 or e-13 for exp(-13); found {value!r}")
    return rho
