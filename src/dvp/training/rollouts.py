"""Choose a step's problems, grade the responses, and hand the engine's sets to the rank that computes with them."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from dvp.core.batch import Batch, Rollout
from dvp.data.reward import Grader
from dvp.errors import DvpError
from dvp.rollout.engine import Completion
from dvp.training import ranks


@dataclass(frozen=True)
class Problems:
    """Problems that an engine is asked about; each list has one entry per problem."""

    places: list[str]
    """File, row and id of each problem, for messages."""
    answers: list[str]
    prompts: list[list[int]]
    """Token ids."""
    pad: int
    """A token id; it is never attended to."""
    grader: Grader

    def check_context(self, context: int, max_response_tokens: int) -> None:
        """Check that each prompt and its response fit into the model's context (tokens).

        Raises DvpError, naming the first problem that does not fit.
        """
        room = context - max_response_tokens
        for place, prompt in zip(self.places, self.prompts, strict=True):
            if len(prompt) > room:
                raise DvpError(
                    f"{place}: its prompt has {len(prompt)} tokens; the model's context of {context} leaves {room} "
                    "beside max_response_tokens"
                )

    def graded(self, rows: list[int], groups: list[list[Completion]]) -> Rollout:
        """Grade the group of responses to each of these problems and return the rollout; every rank grades its share.

        Raises:
            DvpError: a log-prob that is not finite, a token outside the set that it is said to be sampled from, or a
                response that the verifier fails on (which is a bug of it).
        """
        problems = [row for row, group in zip(rows, groups, strict=True) for _ in group]
        completions = [completion for group in groups for completion in group]
        tokens = [completion.token_ids for completion in completions]
        written = [completion.written for completion in completions]
        kept = [completion.kept for completion in completions if completion.kept is not None]
        batch = Batch.collate([self.prompts[row] for row in problems], tokens, self.pad, written, kept or None)
        if kept:
            _check_sets(batch)
        infer_log_prob_BT = torch.zeros(batch.tokens_BT.shape)
        infer_log_prob_BT[batch.response_BT] = torch.tensor(
            [value for completion in completions for value in completion.log_probs]
        )
        if not infer_log_prob_BT.isfinite().all():
            raise DvpError(
                "the engine's log-probs are not finite; is the model complete, and its precision high enough?"
            )
        responses = list(zip(problems, completions, strict=True))
        rewards = [self.reward(row, completion) for row, completion in ranks.share(responses)]
        return Rollout(
            batch,
            infer_log_prob_BT,
            torch.tensor(ranks.join(rewards, len(responses))),
            torch.tensor([completion.finish_reason == "length" for completion in completions]),
        )

    def reward(self, row: int, completion: Completion) -> float:
        """Reward a response to this problem. Raises DvpError if the verifier, or the user's own function, fails."""
        truncated = completion.finish_reason == "length"
        try:
            return self.grader.reward(completion.text, self.answers[row], truncated=truncated)
        except DvpError as error:
            raise DvpError(f"{self.places[row]}: {error}") from error
        except Exception as error:
            raise DvpError(f"{self.places[row]}: the verifier failed on a response ({in_a_line(error)})") from error


def _check_sets(batch: Batch) -> None:
    """Check that every sampled token has its set, and is in it. Raises DvpError."""
    lengths, reported = batch.response_BT.sum(dim=1).tolist(), [len(sets) for sets in batch.kept]
    if lengths != reported:
        raise DvpError(f"the engine reported the sets of {sum(reported)} tokens, and sampled {sum(lengths)}")
    # One response after the other: the members of all sets at once may be 4e8, at 16 bytes and more.
    sampled = batch.tokens_BT[batch.response_BT].split(lengths)
    here = [(sets, tokens_N) for sets, tokens_N in zip(batch.kept, sampled, strict=True) if sets.has_ids]
    outside = sum(ranks.gather(sum(int((~sets.contain(tokens_N)).sum()) for sets, tokens_N in here)))
    if outside:
        raise DvpError(f"{outside} of {sum(lengths)} tokens are not in the sets that the engine says it sampled from")


def with_sets(batch: Batch, dealt: list[list[torch.Tensor]]) -> Batch:
    """Return the batch with the sets of the rows that this rank computes with; `dealt` are the rows of every rank.

    All ranks call this.
    """
    if batch.kept is None or ranks.count() == 1:
        return batch
    kept = list(batch.kept)
    wanted = [sorted({row for rows_b in parts for row in rows_b.tolist()}) for parts in dealt]
    for found in ranks.exchange([{row: kept[row] for row in rows if kept[row].has_ids} for rows in wanted]):
        for row, sets in found.items():
            kept[row] = sets
    return replace(batch, kept=tuple(kept))


def prompt_rows(count: int, batch: int, step: int, seed: int) -> list[int]:
    """Return the rows of the training set used at a step (1-based), in an order of its own for each pass.

    No row is used twice in a pass; the count % batch rows that do not fill a batch sit it out.

    Raises DvpError if the set is smaller than a batch, which would put a problem into it twice.
    """
    if count < batch:
        raise DvpError(f"data/train.parquet: {count} problems are fewer than training.prompts_per_step ({batch})")
    per_epoch = count // batch
    epoch, position = divmod(step - 1, per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(count)
    return order[position * batch : (position + 1) * batch].tolist()


def in_a_line(error: Exception) -> str:
    """Return type and message of an exception from other code, in one line of at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
