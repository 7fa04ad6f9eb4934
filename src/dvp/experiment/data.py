"""Settings of the data: where problems come from, and which of them to train and to evaluate on."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from dvp.strict import Distinct, Fraction, Name, Positive, Seed, Strict, Text

Revision = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
"""A commit of a repository on the hub."""


class Columns(Strict):
    """Which column of a row is what; dots reach into nested values (`reward_model.ground_truth`)."""

    problem: str
    """The problem's text."""
    answer: str
    """Its final answer."""
    solution: str | None = None
    """A worked solution."""
    id: str | None = None
    """The data set's own name of the row."""


MOST_STEPS = {"sums": 2, "chains": 13, "graph_color": 12}
"""Largest steps by generator. In chains of 17 rounds or more no three changes keep the numbers in range, in 16 almost
none do; of random graphs with 20 vertices almost none have a colouring."""


class GeneratedSource(Strict):
    """Problems made here, from a seed."""

    kind: Literal["generated"]
    generator: Literal[
        "stories",
        "english_stories",
        "sums",
        "products",
        "chains",
        "tales",
        "wide_tales",
        "graph_color",
    ]
    """stories: sums told as short stories, in pseudo-words; english_stories: the same in plain English, for pretrained
    models; sums: such as "What is 34 + 12?"; products: products of two numbers of two digits, for a calculator; chains:
    rounds of three small sums; tales: stories whose solutions are told with words from a long natural tail, of 13,000
    words; wide_tales: of 208,000; graph_color: puzzles of reasoning-gym that have several solutions, of which its
    verifier takes any."""
    count: Positive
    """Problems."""
    seed: Seed
    """Of the problems: the same seed makes the same ones."""
    steps: Annotated[list[Positive], Field(min_length=2, max_length=2)] = [2, 4]
    """Fewest and most steps of a problem; of sums, digits of a number: 1 or 2; of chains, rounds: 13 at most; of
    graph_color, vertices: 2 to 12."""

    @property
    def several_solutions(self) -> bool:
        """Return whether its problems can have several correct solutions."""
        return self.generator == "graph_color"

    @model_validator(mode="after")
    def _in_range(self) -> "GeneratedSource":
        fewest, most = 1 + self.several_solutions, MOST_STEPS.get(self.generator, self.steps[1])
        if not fewest <= self.steps[0] <= self.steps[1] <= most:
            raise ValueError(f"steps: expected [fewest, most] within {fewest} and {most}, found {self.steps}")
        return self


class _Table(Strict):
    columns: Columns
    """Which column is what."""
    answer_format: Literal["plain", "gsm8k", "number"] = "plain"
    """plain: as it stands; gsm8k: what follows ####; number: a float that means an integer (27.0)."""
    strip: list[Text] = []
    """Literal texts removed from the problem, such as an instruction that the data set puts around it."""


class HubSource(_Table):
    """A data set of the Hugging Face hub, at a fixed revision."""

    kind: Literal["hub"]
    path: str
    """The data set's name on the hub."""
    name: str | None = None
    """Its configuration, where it has several."""
    split: str
    """Such as train or test."""
    revision: Revision
    """The commit of the data set's repository."""
    problems: Positive | None = None
    """How many problems it has, by which `dvp plan` counts."""


class FileSource(_Table):
    """A local .json, .jsonl or .parquet file."""

    kind: Literal["file"]
    path: Annotated[Path, Field(strict=False)]
    """Relative to the repository's root, or absolute."""


Source = Annotated[GeneratedSource | HubSource | FileSource, Field(discriminator="kind")]


class Decontamination(Strict):
    """Training problems that share a word n-gram with an evaluation problem are dropped.

    An evaluation problem of fewer words, but at least five, counts where a training problem contains it whole; if more
    than ten training problems contain it, it is taken for a phrase, and they stay.
    """

    ngram: Positive | None = 13
    """Words; null: only the same problem is dropped, for puzzles that have no words of their own."""


class RewardFunction(Strict, frozen=True):
    """A Python function in the verifier's place: NAME(response, reference) returns a finite number."""

    file: Annotated[Path, Field(strict=False)]
    """A Python file, relative to the repository's root, or absolute. It is run with all that the process may do."""
    function: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
    """Takes the response's text and the problem's reference; from a reward of 1 on a response counts as correct."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """The file's; filled in when the experiment is loaded, so that another function trains and evaluates again."""


class DataConfig(Strict):
    """Which problems to train on and which to evaluate on."""

    train: Name
    """A source."""
    held_out: Annotated[int, Field(ge=0)] = 0
    """Problems split off the training source; they become the task `held_out`."""
    evaluation: Distinct[Name] = []
    """Sources, each a task of the same name."""
    limit: Positive | None = None
    """The largest number of training problems."""
    unreadable_answers: Fraction = 0.01
    """The largest share of a source's problems whose answers the verifier cannot read; they are left out, and
    data/manifest.json names them. More are an error."""
    prompt_template: Text = "{problem}"
    """{problem} is where the problem's text goes."""
    chat: bool = False
    """Whether the tokenizer's chat template is applied to the prompt."""
    answer_after_thinking: bool | None = None
    """Whether only what follows a response's last </think> states its answer, and an unclosed <think> nothing; null:
    it does if a chat template is applied that mentions <think>."""
    reward: RewardFunction | None = None
    """A function of your own; null: the verifier, 1 for a response that states the right answer, else 0. With one,
    references are texts that nothing but it reads, and there is no maj@k."""
    decontamination: Decontamination = Decontamination()
    """Which training problems are too like one of the evaluation, and are left out."""

    @field_validator("prompt_template")
    @classmethod
    def _has_problem(cls, value: str) -> str:
        if "{problem}" not in value or "{{problem}}" in value:
            raise ValueError("expected a text that contains {problem}, in one pair of braces")
        return value

    @model_validator(mode="after")
    def _trains_on_other_problems(self) -> "DataConfig":
        if self.train in self.evaluation:
            raise ValueError(f"evaluation: '{self.train}' is trained on; held_out splits problems off it")
        return self

    @property
    def tasks(self) -> list[str]:
        """Return the evaluation tasks, the held-out one first."""
        return (["held_out"] if self.held_out else []) + self.evaluation
