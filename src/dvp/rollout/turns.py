"""Responses in turns: the model writes until it calls a tool, gets the answer, and goes on.

It stands between an engine and whoever samples, training and evaluation alike, and is itself an Engine. Token ids are
joined, never text: the model sees exactly the ids that it wrote, and a tool's answer is encoded by itself. All open
responses go on together, and the engine's prefix cache keeps what they have so far. A turn's seed follows from the
response's, so a rollout can be repeated as far as the tool answers the same.
"""

from collections.abc import Sequence
from dataclasses import replace
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
        """`tokenizer` is the model's, of transformers."""
        self.engine, self.tool = engine, tool
        self._settings, self._tokenizer = settings, tokenizer

    def generate(self, prompts: list[list[int]], sampling: Sampling, seeds: list[int]) -> list[list[Completion]]:
        """See Engine.generate. `sampling.max_tokens` is of a whole response, answers included.

        What has no end (`to_the_end`) or is measured position by position (`whole_vocabulary`) calls no tool.
        """
        if sampling.to_the_end or sampling.whole_vocabulary:
            return self.engine.generate(prompts, sampling, seeds)
        sampling = replace(sampling, stop=self._settings.call[1])
        groups = [
            [
                _Response(prompt, derived_seed(seed, index), completion, self._settings.call)
                for index, completion in enumerate(completions)
            ]
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
                response.write(completion)
        return [[response.completion(self._decoded) for response in group] for group in groups]

    def _answered(self, responses: "list[_Response]", max_tokens: int) -> "list[_Response]":
        """Answer the call at the end of each response; those that have room for the answer and more."""
        answers = iter(self.tool.answers([response.call for response in responses if response.call is not None]))
        with_room = []
        for response in responses:
            answer = NO_CALL if response.call is None else next(answers)
            ids = self._encoded(answer.text)
            if len(response.token_ids) + len(ids) < max_tokens:
                response.put(ids, answer.failed)
                with_room.append(response)
        return with_room

    def _encoded(self, text: str) -> list[int]:
        """Token ids of an answer between its delimiters; a control token that it spells is plain text."""
        before, after = (self._ids(delimiter) for delimiter in self._settings.answer)
        ids, most = self._ids(text, split_special_tokens=True), self._settings.max_answer_tokens
        if len(ids) > most:
            gap = self._ids(GAP)
            kept = max(most - len(gap), 2)
            ids = [*ids[: kept - kept // 2], *gap, *ids[len(ids) - kept // 2 :]]
        return [*before, *ids, *after]

    def _ids(self, text: str, **options: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, **options)["input_ids"])

    def _decoded(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def __getattr__(self, name: str) -> Any:
        """The rest is the engine's."""
        return getattr(self.engine, name)


class _Response:
    """A response that is being written."""

    calls = False
    """Whether its last turn ended in a call."""
    call: str | None = None
    """The text of that call; None if it has an end only."""

    def __init__(self, prompt: list[int], seed: int, first: Completion, delimiters: list[str]):
        self.prompt, self.seed = prompt, seed
        self.token_ids: list[int] = []
        self._delimiters = delimiters
        self._written: list[bool] = []
        self._log_probs: list[float] = []
        self._kept: list[KeptSets] = []
        self._texts: list[str] = []
        self._answered = self._failed = 0
        self.write(first)

    def write(self, completion: Completion) -> None:
        """A turn."""
        self.token_ids = self.token_ids + completion.token_ids
        self._written += [True] * len(completion.token_ids)
        self._log_probs += completion.log_probs
        if completion.kept is not None:
            self._kept.append(completion.kept)
        self._finish_reason = completion.finish_reason
        self.calls = completion.finish_reason == "string"
        opening, closing = self._delimiters
        # The token that completes the closing delimiter may have text behind it.
        before, _, after = completion.text.partition(closing)
        outside, begun, _ = before.partition(opening)
        self._texts.append(outside + after)
        self.call = before.rpartition(opening)[2] if self.calls and begun else None

    def put(self, ids: list[int], failed: bool) -> None:
        """A tool's answer."""
        self.token_ids = self.token_ids + ids
        self._written += [False] * len(ids)
        self._answered += 1
        self._failed += failed

    def completion(self, decoded: Any) -> Completion:
        """The whole response; one whose last call has no answer was cut off."""
        return Completion(
            token_ids=self.token_ids,
            log_probs=self._log_probs,
            # A statement does not go on over a call.
            text="\n".join(self._texts),
            finish_reason="length" if self.calls else self._finish_reason,
            kept=KeptSets.cat(self._kept) if self._kept else None,
            written=self._written,
            transcript=decoded(self.token_ids),
            calls=self._answered,
            failed_calls=self._failed,
        )


def turn_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """What responses did with their tool.

    Returns:
        turns_mean: turns of a response, one more than its calls.
        failed_calls_fraction: calls that were mistakes; 0 without a call.
        called_fraction: responses with a call.
        tool_tokens_mean: tokens of a response that the model did not write.
    """
    calls = sum(completion.calls for completion in completions)
    tokens = sum(len(completion.token_ids) - len(completion.log_probs) for completion in completions)
    return {
        "turns_mean": 1 + calls / len(completions),
        "failed_calls_fraction": sum(completion.failed_calls for completion in completions) / max(calls, 1),
        "called_fraction": sum(completion.calls > 0 for completion in completions) / len(completions),
        "tool_tokens_mean": tokens / len(completions),
    }
