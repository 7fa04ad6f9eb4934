"""Batches of graded responses to fixed problems, from an engine or from the trainer's own policy."""

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from transformers import GenerationConfig

from dvp.core.batch import Rollout
from dvp.core.safe_vocabulary import SafeVocabulary
from dvp.data.prompts import encode_prompts, padding_token, short_enough
from dvp.data.sources import load
from dvp.data.thinking import before_response
from dvp.data.verifier import check_reference
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.data import Source
from dvp.progress import Progress
from dvp.rollout.engine import Completion, Engine, Sampling
from dvp.rollout.seeds import derived_seed
from dvp.training.rollouts import Problems, prompt_rows

REFERENCE = -1  # in a seed, where the engine's batches have their number
MEASURED = -1  # in front of that number: training's seeds are made of a seed, a step and a row, and would be the same
CALL = 512  # responses that the engine is asked for at once
GENERATED_TOKENS = 2**15  # prompts and responses that the trainer's policy samples at once


def source_problems(source: Source, where: str, template: str) -> pd.DataFrame:
    """id, answer and prompt of every problem of a source. Raises DvpError, naming `where`."""
    rows = load(source, where)
    return pd.DataFrame(
        {
            "id": [row.id for row in rows],
            "answer": [row.answer for row in rows],
            "prompt": [template.replace("{problem}", row.problem) for row in rows],
        }
    )


class FixedProblems:
    """The problems of a measurement, and batches of graded responses to them."""

    def __init__(
        self, experiment: Experiment, tokenizer: Any, problems: pd.DataFrame, *, where: str, seed: int, context: int
    ):
        count, self._training = experiment.bias.problems, experiment.training
        self.group_size = self._training.group_size
        if len(problems) < count:
            raise DvpError(f"{where}: {len(problems)} problems are fewer than bias.problems ({count})")
        encoded = encode_prompts(tokenizer, problems, experiment.data.chat, where)
        kept = short_enough(encoded, self._training.max_prompt_tokens)
        if len(kept) < count:
            raise DvpError(
                f"{where}: {len(kept)} problems have at most training.max_prompt_tokens "
                f"({self._training.max_prompt_tokens}) tokens, fewer than bias.problems ({count})"
            )
        self.rows = [kept[index] for index in prompt_rows(len(kept), count, 1, seed)]
        chosen = problems.iloc[self.rows]
        self.ids = [str(name) for name in chosen["id"]]
        self.prompts = [encoded[row] for row in self.rows]
        self._pad = padding_token(tokenizer)
        places = [f"{where}: row {row} (id {name})" for row, name in zip(self.rows, self.ids, strict=True)]
        thinking = before_response(tokenizer, experiment.data)
        self._problems = Problems(places, list(chosen["answer"]), self.prompts, self._pad, thinking)
        for place, answer in zip(places, chosen["answer"], strict=True):
            try:
                check_reference(answer)
            except DvpError as error:
                raise DvpError(f"{place}: {error}") from None
        self._problems.check_context(context, self._training.max_response_tokens)
        self.longest = max(map(len, self.prompts)) + self._training.max_response_tokens
        self._tokenizer, self._seed = tokenizer, seed

    @property
    def responses(self) -> int:
        """B, in a batch."""
        return len(self.prompts) * self.group_size

    def from_engine(
        self, engine: Engine, rule: SafeVocabulary | None, batches: int, *, report_sets: bool = False
    ) -> Iterator[Rollout]:
        """Batches from the engine. Their seeds do not depend on the safe vocabulary."""
        sampling = Sampling(
            max_tokens=self._training.max_response_tokens,
            n=self.group_size,
            temperature=self._training.temperature,
            safe_vocabulary=rule,
            report_sets=report_sets,
        )
        for numbers in torch.arange(batches).split(max(1, CALL // self.responses)):
            seeds = [
                derived_seed(self._seed, MEASURED, number, row) for number in numbers.tolist() for row in self.rows
            ]
            groups = engine.generate(self.prompts * len(numbers), sampling, seeds)
            for start in range(0, len(groups), len(self.prompts)):
                yield self._problems.graded(range(len(self.prompts)), groups[start : start + len(self.prompts)])

    def from_trainer(self, model: torch.nn.Module, batches: int, name: str) -> list[Rollout]:
        """Batches from the trainer's policy itself: temperature, and nothing else between the logits and the sample."""
        ends = model.generation_config.eos_token_id
        ends = {self._tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends] if ends is not None else [])}
        # Not as an argument: `generate` would fill it up with the model's own defaults, such as top_k.
        model.generation_config = GenerationConfig(
            do_sample=True,
            temperature=self._training.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self._training.max_response_tokens,
            eos_token_id=sorted(ends),
            pad_token_id=self._pad,
        )
        group = self.group_size
        progress = Progress(name, len(self.prompts))
        sampled: list[list[Completion]] = []
        # All responses to a prompt side by side, so that nothing is padded on the left.
        for done, (row, prompt) in enumerate(zip(self.rows, self.prompts, strict=True), start=1):
            at_once = max(1, GENERATED_TOKENS // (len(prompt) + self._training.max_response_tokens))
            own: list[Completion] = []
            with torch.random.fork_rng():
                torch.manual_seed(derived_seed(self._seed, REFERENCE, row))
                for part in torch.arange(batches * group).split(at_once):
                    inputs_BT = torch.tensor([prompt], device=model.device).expand(len(part), -1)
                    outputs_BT = model.generate(inputs_BT, attention_mask=torch.ones_like(inputs_BT))
                    own += [self._completion(tokens, ends) for tokens in outputs_BT[:, len(prompt) :].tolist()]
            sampled.append(own)
            progress.step(done, f"{len(own)} responses a problem")
        return [
            self._problems.graded(range(len(self.prompts)), [own[start : start + group] for own in sampled])
            for start in range(0, batches * group, group)
        ]

    def _completion(self, tokens: list[int], ends: set[int]) -> Completion:
        length = next((index for index, token in enumerate(tokens, start=1) if token in ends), None)
        kept = tokens[:length]
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        return Completion(kept, [0.0] * len(kept), text, "length" if length is None else "stop")
