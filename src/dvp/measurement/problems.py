"""A fixed policy opened for a measurement: problems, engine, trainer, and batches of graded responses from either."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from dvp.core.batch import Rollout
from dvp.core.safe_vocabulary import SafeVocabulary
from dvp.data.prompts import before_response, encode_prompts, padding_token, short_enough
from dvp.data.reward import Grader
from dvp.data.sources import Row
from dvp.data.verifier import check_reference
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.progress import Progress
from dvp.rollout.engine import Completion, Engine, Sampling, make_engine
from dvp.rollout.seeds import derived_seed
from dvp.training.rollouts import Problems, prompt_rows

REFERENCE = -1  # stands in a reference seed where an engine batch has its number
MEASURED = -1  # precedes that number: without it the seeds would equal training's, made of a seed, a step and a row
CALL = 512  # responses requested from the engine at once
GENERATED_TOKENS = 2**15  # tokens of prompts and responses that the trainer's policy generates at once


def rendered(rows: list[Row], template: str) -> pd.DataFrame:
    """Return a table of id, answer and prompt, each problem set into `template` at {problem}."""
    return pd.DataFrame(
        {
            "id": [row.id for row in rows],
            "answer": [row.answer for row in rows],
            "prompt": [template.replace("{problem}", row.problem) for row in rows],
        }
    )


def drawn(available: int, count: int, seed: int) -> list[int]:
    """Draw the rows for a measurement of the mismatch; one of the bias uses those of training's first step."""
    return np.random.default_rng([seed, 0]).choice(available, count, replace=False).tolist()


class FixedProblems:
    """A fixed policy (a Hugging Face directory) with the problems of a measurement, for sampling and scoring.

    Raises:
        DvpError: too few problems with a short enough prompt, a context that is too short, or a reference answer with
            which nothing can be compared.
    """

    def __init__(
        self,
        experiment: Experiment,
        model: Path,
        problems: pd.DataFrame,
        *,
        where: str,
        count: int,
        seed: int,
        draw: Callable[[int, int, int], list[int]] = lambda available, count, seed: prompt_rows(
            available, count, 1, seed
        ),
    ):
        """Choose and encode `count` problems of a table with id, answer and prompt.

        where : the table's origin, for error messages. draw : chooses rows, given their number, `count` and `seed`; by
        default those of training's first step.
        """
        self._experiment, self._training, self._model, self.seed = experiment, experiment.training, model, seed
        self.group_size = self._training.group_size
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        encoded = encode_prompts(self._tokenizer, problems, experiment.data.chat, where)
        kept = short_enough(encoded, self._training.max_prompt_tokens)
        if len(kept) < count:
            raise DvpError(
                f"{where}: {len(kept)} problems of {len(problems)} have a prompt that is short enough, "
                f"fewer than the {count} to be measured"
            )
        self.rows = [kept[index] for index in draw(len(kept), count, seed)]
        chosen = problems.iloc[self.rows]
        self.ids = [str(name) for name in chosen["id"]]
        self.prompts = [encoded[row] for row in self.rows]
        places = [f"{where}: row {row} (id {name})" for row, name in zip(self.rows, self.ids, strict=True)]
        self._pad = padding_token(self._tokenizer)
        grader = Grader(before_response(self._tokenizer, experiment.data), experiment.data.reward)
        self.problems = Problems(places, list(chosen["answer"]), self.prompts, self._pad, grader)
        for place, answer in zip(places, chosen["answer"], strict=True) if grader.own is None else ():
            try:
                check_reference(answer)
            except DvpError as error:
                raise DvpError(f"{place}: {error}") from None
        context = AutoConfig.from_pretrained(model).max_position_embeddings
        self.problems.check_context(context, self._training.max_response_tokens)

    def engine(self, name: str, at_once: int, **options: Any) -> Engine:
        """Start the policy in the experiment's engine `name`, which samples `at_once` responses together."""
        threads = torch.get_num_threads()
        engine = make_engine(
            self._model,
            self._experiment.engines[name],
            max_model_len=max(map(len, self.prompts)) + self._training.max_response_tokens,
            max_num_seqs=at_once,
            seed=self.seed,
            **options,
        )
        torch.set_num_threads(threads)  # starting an engine may change it
        return engine

    def network(self) -> PreTrainedModel:
        """Load the policy in the trainer's precision, fp32, onto the GPU if there is one."""
        network = AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32)
        return network.to("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def responses(self) -> int:
        """Return the number of responses in a batch, B."""
        return len(self.prompts) * self.group_size

    def from_engine(
        self, engine: Engine, rule: SafeVocabulary | None, batches: int, *, report_sets: bool = False
    ) -> Iterator[Rollout]:
        """Yield graded batches from the engine; their seeds do not depend on the safe vocabulary `rule`."""
        sampling = Sampling(
            max_tokens=self._training.max_response_tokens,
            n=self.group_size,
            temperature=self._training.temperature,
            safe_vocabulary=rule,
            report_sets=report_sets,
        )
        for numbers in torch.arange(batches).split(max(1, CALL // self.responses)):
            seeds = [derived_seed(self.seed, MEASURED, number, row) for number in numbers.tolist() for row in self.rows]
            groups = engine.generate(self.prompts * len(numbers), sampling, seeds)
            for start in range(0, len(groups), len(self.prompts)):
                yield self.problems.graded(range(len(self.prompts)), groups[start : start + len(self.prompts)])

    def from_trainer(self, model: torch.nn.Module, batches: int, name: str) -> list[Rollout]:
        """Return graded batches that the trainer's policy itself samples, by temperature alone (no top-k, no top-p).

        `name` labels the progress lines.
        """
        ends = model.generation_config.eos_token_id
        ends = {self._tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends] if ends is not None else [])}
        # Set on the model: `generate` would complete an argument with the model's own defaults, such as top_k.
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
        # All responses to a prompt are sampled together, so that nothing is padded on the left.
        for done, (row, prompt) in enumerate(zip(self.rows, self.prompts, strict=True), start=1):
            at_once = max(1, GENERATED_TOKENS // (len(prompt) + self._training.max_response_tokens))
            own: list[Completion] = []
            with torch.random.fork_rng():
                torch.manual_seed(derived_seed(self.seed, REFERENCE, row))
                for part in torch.arange(batches * group).split(at_once):
                    inputs_BT = torch.tensor([prompt], device=model.device).expand(len(part), -1)
                    outputs_BT = model.generate(inputs_BT, attention_mask=torch.ones_like(inputs_BT))
                    own += [self._completion(tokens, ends) for tokens in outputs_BT[:, len(prompt) :].tolist()]
            sampled.append(own)
            progress.step(done, f"{len(own)} responses a problem")
        return [
            self.problems.graded(range(len(self.prompts)), [own[start : start + group] for own in sampled])
            for start in range(0, batches * group, group)
        ]

    def _completion(self, tokens: list[int], ends: set[int]) -> Completion:
        length = next((index for index, token in enumerate(tokens, start=1) if token in ends), None)
        kept = tokens[:length]
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        return Completion(kept, [0.0] * len(kept), text, "length" if length is None else "stop")
