"""Record a few sampled responses of a run, token by token: runs/RUN/responses.parquet.

Some responses of every step are recorded as the trainer saw them before the step's first update. Kept are those of
every `every`-th step, of the first and the last one, and of the steps before a collapse. As nobody can foresee a
collapse, the latest steps are held back until there is one. What is kept follows from the number of finished steps and
the step of the collapse alone, so a run that was cut off and continued ends with the same file.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dvp.errors import DvpError
from dvp.experiment.training import KeepResponses
from dvp.files import atomic_path

if TYPE_CHECKING:  # whoever reads the file needs no torch
    import torch

    from dvp.core.batch import Rollout
    from dvp.core.update import Update

RESPONSES = "responses.parquet"
# A row is a response. Log-probs are in nats. `infer_log_prob` is the engine's log q, `log_prob` the trainer's over the
# full vocabulary and `pruned_log_prob` over the safe one, as in dvp.core.head. `chosen` says why this response of the
# step's: one of the first, or one with the largest |log p − log q|. `rejected` is what dropped all of it, if anything.
PER_RESPONSE = {
    **{"step": pa.int32(), "index": pa.int32(), "chosen": pa.string(), "problem": pa.string(), "prompt": pa.string()},
    **{"answer": pa.string(), "reward": pa.float32(), "truncated": pa.bool_(), "rejected": pa.string()},
}
# Lists with an entry per token; all lists of a row have the same length.
PER_TOKEN = {
    "token_id": pa.int32(),
    "text": pa.string(),
    **dict.fromkeys(("infer_log_prob", "log_prob", "pruned_log_prob"), pa.float32()),
    "in_safe": pa.bool_(),
    **dict.fromkeys(("weight", "advantage"), pa.float32()),
}


def _list(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, pa.list_(pa.field("element", kind, nullable=False)), nullable=False)


SCHEMA = pa.schema(
    [
        *(pa.field(name, kind, nullable=name == "rejected") for name, kind in PER_RESPONSE.items()),
        *(_list(name, kind) for name, kind in PER_TOKEN.items()),
    ]
)
# In a run with a tool: whether the model wrote a token. Values that a tool's token does not have are 0.
WRITTEN = _list("written", pa.bool_())
FIRST, WORST = "first", "worst"
# A character is at most four bytes, so at most four tokens.
LONGEST_CHARACTER = 4
REPLACEMENT = "\ufffd"


class Pieces:
    """A decoder that gives each token its text, so that what is recorded can be read without the tokenizer."""

    def __init__(self, tokenizer: Any):
        """Take a tokenizer of transformers."""
        self._tokenizer = tokenizer
        # Some tokenizers drop the space before the first token: each is decoded behind another one.
        self._anchor = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._before = len(self.text(self._anchor))
        self._piece = cache(lambda token_id: self._behind_anchor([token_id]))

    def text(self, token_ids: list[int]) -> str:
        """Decode all tokens together, special tokens included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def of(self, token_ids: list[int]) -> list[str]:
        """Return a text for each token.

        A character that is spread over several tokens goes to the first one, and the others' text is empty. Bytes that
        make no character are U+FFFD.
        """
        pieces: list[str] = []
        while (start := len(pieces)) < len(token_ids):
            spread = range(2, min(LONGEST_CHARACTER, len(token_ids) - start) + 1)
            first = self._piece(token_ids[start])
            for count in spread if REPLACEMENT in first else ():
                joined = self._behind_anchor(token_ids[start : start + count])
                if REPLACEMENT not in joined:
                    pieces += [joined, *[""] * (count - 1)]
                    break
            else:
                pieces.append(first)
        return pieces

    def _behind_anchor(self, token_ids: list[int]) -> str:
        return self.text(self._anchor + token_ids)[self._before :]


class ResponseRecorder:
    """The responses of a run that are recorded so far. Each step calls `record`, then `settle`; `write` saves them."""

    def __init__(self, settings: KeepResponses, steps: int, tokenizer: Any, *, tools: bool = False):
        """Start with no responses; `steps` is the run's last step, `tools` whether its responses may call one."""
        self._settings = settings
        self._steps = steps
        self._schema = SCHEMA.append(WRITTEN) if tools else SCHEMA
        self._pieces = Pieces(tokenizer)
        self.rows: list[dict[str, Any]] = []
        """The recorded responses, as in SCHEMA, ordered by step and index."""

    def record(
        self,
        step: int,
        problems: list[tuple[str, str]],
        rollout: "Rollout",
        statistics: "dict[str, torch.Tensor]",
        update: "Update",
    ) -> None:
        """Record `per_step` responses of a rollout of B.

        The first half are its first ones, answers to the same problem if the group is large enough; the others are
        those with the largest |log p − log q| of a token in the safe vocabulary.
        step : above all that were recorded.
        problems : id and reference answer for each response.
        rollout, statistics, update : as in dvp.core.update.
        """
        mask_BT = rollout.batch.response_BT
        log_ratio_BT = statistics["pruned_log_prob"] - rollout.infer_log_prob_BT
        largest_B = (log_ratio_BT.abs() * (mask_BT & statistics["target_in_safe"])).amax(dim=1)
        count = min(self._settings.per_step, len(mask_BT))
        chosen = dict.fromkeys(range(-(-count // 2)), FIRST)
        for index in largest_B.argsort(descending=True, stable=True).tolist():
            if len(chosen) < count:
                chosen.setdefault(index, WORST)
        per_token = {
            "infer_log_prob": rollout.infer_log_prob_BT,
            "log_prob": statistics["log_prob"],
            "pruned_log_prob": statistics["pruned_log_prob"],
            "weight": update.weight_BT,
            "advantage": update.advantage_BT,
        }
        for index in sorted(chosen):
            positions = mask_BT[index].nonzero()[:, 0].tolist()
            part = slice(positions[0], positions[-1] + 1)
            written_t = mask_BT[index, part]
            token_ids = rollout.batch.tokens_BT[index]
            response = token_ids[part].tolist()
            problem, answer = problems[index]
            weights, other = update.weights, None if update.weights.kept_B[index] else "bounds"
            self.rows.append(
                {
                    "step": step,
                    "index": index,
                    "chosen": chosen[index],
                    "problem": str(problem),
                    "prompt": self._pieces.text(token_ids[: part.start].tolist()),
                    "answer": str(answer),
                    "reward": rollout.rewards_B[index].item(),
                    "truncated": bool(rollout.truncated_B[index]),
                    # The first of the rules that dropped it; "bounds" if only its weight did.
                    "rejected": next((rule for rule, of_B in weights.dropped_B.items() if of_B[index]), other),
                    "token_id": response,
                    "text": self._pieces.of(response),
                    **{
                        name: values_BT[index, part].masked_fill(~written_t, 0.0).tolist()
                        for name, values_BT in per_token.items()
                    },
                    # What the model did not write was not pruned.
                    "in_safe": (statistics["target_in_safe"][index, part] | ~written_t).tolist(),
                    "written": written_t.tolist(),
                }
            )

    def settle(self, step: int, collapsed_at: int | None) -> None:
        """Drop what need not be kept now that `step` is finished; `collapsed_at` is the step of a collapse so far."""
        self.rows = [row for row in self.rows if self._is_kept(row["step"], step, collapsed_at)]

    def _is_kept(self, recorded: int, step: int, collapsed_at: int | None) -> bool:
        if recorded in (1, self._steps) or recorded % self._settings.every == 0:
            return True
        if collapsed_at is None and step == self._steps:
            return False
        until = step if collapsed_at is None else collapsed_at
        return until - self._settings.before_collapse <= recorded <= until

    def write(self, path: Path) -> None:
        """Write the file atomically, with the steps that are held back."""
        with atomic_path(path) as temporary:
            pq.write_table(pa.Table.from_pylist(self.rows, schema=self._schema), temporary, compression="zstd")

    def restore(self, path: Path) -> None:
        """Continue from a file that `write` wrote. Raises DvpError for any other file."""
        self.rows = read_responses(path).to_pylist()


def read_responses(path: Path) -> pa.Table:
    """Read a responses.parquet, as in SCHEMA and with WRITTEN. Raises DvpError for any other file."""
    try:
        table = pq.read_table(path)
        if WRITTEN.name not in table.schema.names:  # of a run without a tool
            every = [[True] * length for length in pc.list_value_length(table["token_id"]).to_pylist()]
            table = table.append_column(WRITTEN, pa.array(every, WRITTEN.type))
        table = table.select([*SCHEMA.names, WRITTEN.name]).cast(SCHEMA.append(WRITTEN))
    except FileNotFoundError:
        raise DvpError(f"{path}: no such file; `dvp train` writes it") from None
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        problem = " ".join(str(error).split())[:100]
        raise DvpError(f"{path}: expected the responses that `dvp train` records ({problem})") from None
    return table
