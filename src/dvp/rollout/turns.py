"""Sample responses in turns: the model writes until it calls a tool, gets the answer, and continues.

ToolEngine wraps an engine, for training and evaluation alike, and is itself an Engine. Token ids are joined, never
text: the model sees exactly the ids that it wrote, and a tool's answer is encoded by itself. All open responses
continue together, and the engine's prefix cache keeps what they have so far. A turn's seed follows from the response's,
so a rollout can be repeated as far as the tool answers the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dvp.core.kept_sets import KeptSets
from dvp.experiment.tools import Tools
from dvp.rollout.engine import Completion, Engine, Sampling
from dvp.rollout.seeds import derived_seed
from dvp.tools.tool import Answer, Tool

GAP = "..."  # stands for the middle of a long answer
NO_CALL = Answer("error: a call ends here that was not begun", failed=True)


class ToolEngine:
    """An Engine whose responses may call a tool."""

    def __init__(self, engine: Engine, tool: Tool, settings: Tools, tokenizer: Any):
        """Wrap an engine; `tokenizer` is the model's, of transformers."""
        self.engine, self.tool = engine, tool
        self._settings, self._tokenizer = settings, tokenizer

    def generate(self, prompts: list[list[int]], sampling: Sampling, seeds: list[int]) -> list[list[Completion]]:
        """Sample as Engine.generate, with calls answered.

        `sampling.max_tokens` limits a whole response, answers included. With `to_the_end` or `whole_vocabulary` no tool
        is called.
        """
        if sampling.to_the_end or sampling.whole_vocabulary:
            return self.engine.generate(prompts, sampling, seeds)
        sampling = replace(sampling, stop=self._settings.call[1])
        groups = [
            [_Response(prompt, derived_seed(seed, index), [completion]) for index, completion in enumerate(completions)]
            for prompt, seed, completions in zip(
                prompts, seeds, self.engine.generate(prompts, sampling, seeds), strict=True
            )
        ]
        unfinished = [response for group in groups for response in group]
        for turn in range(2, self._settings.max_turns + 1):
            unfinished = self._answered([response for response in unfinished if response.calls], sampling.max_tokens)
            if not unfinished:
                break
            limits = tuple(sampling.max_tokens - len(response.token_ids) for response in unfinished)
            continued = self.engine.generate(
                [response.prompt + response.token_ids for response in unfinished],
                replace(sampling, n=1, limits=limits),
                [derived_seed(response.seed, turn) for response in unfinished],
            )
            for response, (completion,) in zip(unfinished, continued, strict=True):
                response.parts.append(completion)
        return [[self._joined(response) for response in group] for group in groups]

    def _answered(self, responses: "list[_Response]", max_tokens: int) -> "list[_Response]":
        """Append the tool's answer to each response with room for it and a further token; return those responses."""
        opening, closing = self._settings.call
        found = [response.parts[-1].text.partition(closing)[0].rpartition(opening) for response in responses]
        answers = iter(self.tool.answers([call for _, begun, call in found if begun]))
        with_room = []
        for response, (_, begun, _) in zip(responses, found, strict=True):
            answer = next(answers) if begun else NO_CALL
            ids = self._encoded(answer.text)
            if len(response.token_ids) + len(ids) < max_tokens:
                response.parts.append(Completion(ids, [], "", "", failed_calls=int(answer.failed)))
                with_room.append(response)
        return with_room

    def _joined(self, response: "_Response") -> Completion:
        """Join a response's turns and answers; one whose last call has no answer was cut off ("length")."""
        opening, closing = self._settings.call
        turns, answers = response.parts[::2], response.parts[1::2]
        # The token that completes a call may have text behind it. Lines keep a statement from running across a call.
        texts = (turn.text.partition(closing) for turn in turns)
        kept = [turn.kept for turn in turns if turn.kept is not None]
        return Completion(
            token_ids=response.token_ids,
            log_probs=[value for turn in turns for value in turn.log_probs],
            text="\n".join(before.partition(opening)[0] + after for before, _, after in texts),
            finish_reason="length" if response.calls else turns[-1].finish_reason,
            kept=KeptSets.cat(kept) if kept else None,
            written=[place % 2 == 0 for place, part in enumerate(response.parts) for _ in part.token_ids],
            transcript=self._tokenizer.decode(
                response.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
            calls=len(answers),
            failed_calls=sum(answer.failed_calls for answer in answers),
        )

    def _encoded(self, text: str) -> list[int]:
        """Return an answer's token ids with its delimiters; a control token that it spells is plain text.

        The middle of an answer that is longer than `max_answer_tokens` is replaced by GAP.
        """
        before, after = (self._ids(delimiter) for delimiter in self._settings.answer)
        ids, most = self._ids(text, split_special_tokens=True), self._settings.max_answer_tokens
        if len(ids) > most:
            gap = self._ids(GAP)
            kept = max(most - len(gap), 2)
            ids = [*ids[: kept - kept // 2], *gap, *ids[len(ids) - kept // 2 :]]
        return [*before, *ids, *after]

    def _ids(self, text: str, **options: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, **options)["input_ids"])

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the engine."""
        return getattr(self.engine, name)


@dataclass
class _Response:
    """A response that is being written."""

    prompt: list[int]
    seed: int
    parts: list[Completion]
    """Turns of the model, and between them answers of the tool."""

    @property
    def token_ids(self) -> list[int]:
        return [token for part in self.parts for token in part.token_ids]

    @property
    def calls(self) -> bool:
        """Return whether the last turn ended in a call."""
        return self.parts[-1].finish_reason == "string"


def turn_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Summarise how responses used their tool.

    Returns:
        turns_mean: turns per response, one more than its calls.
        failed_calls_fraction: calls that were mistakes; 0 without a call.
        called_fraction: responses with a call.
        tool_tokens_mean: tokens per response that the model did not write.
    """
    calls = sum(completion.calls for completion in completions)
    tokens = sum(len(completion.token_ids) - len(completion.log_probs) for completion in completions)
    return {
        "turns_mean": 1 + calls / len(completions),
        "failed_calls_fraction": sum(completion.failed_calls for completion in completions) / max(calls, 1),
        "called_fraction": sum(completion.calls > 0 for completion in completions) / len(completions),
        "tool_tokens_mean": tokens / len(completions),
    }
