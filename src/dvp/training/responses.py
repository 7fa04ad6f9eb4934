"""A few sampled responses of a run, token by token: runs/RUN/responses.parquet.

Some responses of every step are taken down as the trainer saw them before the step's first update. Those of every
`every`-th step, of the first and of the last one are kept, and so are the steps before a collapse, which nobody can
name beforehand: until there is one, the latest steps are held back. What is kept follows from the number of finished
steps and the step of the collapse alone, so a run that was cut off and continued ends with the same file.
"""

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
# Of each token; all lists of a row have the same length.
PER_TOKEN = {
    "token_id": pa.int32(),
    "text": pa.string(),
    "infer_log_prob": pa.float32(),
    "log_prob": pa.float32(),
    "pruned_log_prob": pa.float32(),
    "in_safe": pa.bool_(),
    "weight": pa.float32(),
    "advantage": pa.float32(),
}
# A row is a response. Log-probs are in nats. `infer_log_prob` is the engine's log q, `log_prob` the trainer's over the
# full vocabulary and `pruned_log_prob` over the safe one, as in dvp.core.head. `chosen` says why this response of the
# step's: one of the first, or one with the largest |log p − log q|. `rejected` is what dropped all of it, if anything.
SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("index", pa.int32(), nullable=False),
        pa.field("chosen", pa.string(), nullable=False),
        pa.field("problem", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("rejected", pa.string()),
        *(
            pa.field(name, pa.list_(pa.field("element", kind, nullable=False)), nullable=False)
            for name, kind in PER_TOKEN.items()
        ),
    ]
)
# Of each token, in a run with a tool: whether the model wrote it. What a tool's token has no value of is 0.
WRITTEN = pa.field("written", pa.list_(pa.field("element", pa.bool_(), nullable=False)), nullable=False)
FIRST, WORST = "first", "worst"
VETO, TRUST_REGION, K3, BOUNDS = "veto", "trust_region", "k3", "bounds"
# A character is at most four bytes, so at most four tokens.
LONGEST_CHARACTER = 4
REPLACEMENT = "\ufffd"


class Pieces:
    """The text of each token, so that what is recorded can be read without the tokenizer."""

    def __init__(self, tokenizer: Any):
        """`tokenizer` is one of transformers."""
        self._tokenizer = tokenizer
        # Some tokenizers drop the space before the first token: each is decoded behind another one.
        self._anchor = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._before = len(self.text(self._anchor))
        self._known: dict[int, str] = {}

    def text(self, token_ids: list[int]) -> str:
        """All of them together, special tokens included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def of(self, token_ids: list[int]) -> list[str]:
        """A text for each token.

        Where a character is spread over several tokens it is the first one's, and the others' text is empty. Bytes
        that make no character are U+FFFD.
        """
        pieces = [self._piece(token_id) for token_id in token_ids]
        start = 0
        while start < len(pieces):
            end = start + 1
            if REPLACEMENT in pieces[start]:
                for stop in range(start + 2, min(start + LONGEST_CHARACTER, len(pieces)) + 1):
                    joined = self._behind_anchor(token_ids[start:stop])
                    if REPLACEMENT not in joined:
                        pieces[start:stop] = [joined, *[""] * (stop - start - 1)]
                        end = stop
                        break
            start = end
        return pieces

    def _piece(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = self._behind_anchor([token_id])
        return self._known[token_id]

    def _behind_anchor(self, token_ids: list[int]) -> str:
        return self.text(self._anchor + token_ids)[self._before :]


class ResponseRecorder:
    """What is recorded of a run so far. Each step calls `record`, then `settle`; `write` makes it last."""

    def __init__(self, settings: KeepResponses, steps: int, tokenizer: Any, *, tools: bool = False):
        """`steps` is the run's last step; `tools` says whether its responses may call one."""
        self._settings = settings
        self._steps = steps
        self._schema = SCHEMA.append(WRITTEN) if tools else SCHEMA
        self._pieces = Pieces(tokenizer)
        self.rows: list[dict[str, Any]] = []
        """As in SCHEMA, ordered by step and index."""

    def record(
        self,
        step: int,
        problems: list[tuple[str, str]],
        rollout: "Rollout",
        statistics: "dict[str, torch.Tensor]",
        update: "Update",
    ) -> None:
        """Take down `per_step` responses of a rollout of B.

        The first half are its first ones, answers to the same problem if the group is large enough; the others are
        those with the largest |log p − log q| of a token in the safe vocabulary.

        Args:
            step: 1-based, above all that were recorded.
            problems: id and reference answer for each of the B responses.
            rollout: the responses.
            statistics: the trainer's (fields of dvp.core.head.TokenStatistics), each (B, T).
            update: weights and advantages of the whole rollout.
        """
        mask_BT = rollout.batch.response_BT
        log_ratio_BT = statistics["pruned_log_prob"] - rollout.infer_log_prob_BT
        largest_B = (log_ratio_BT.abs() * (mask_BT & statistics["target_in_safe"])).amax(dim=1)
        count = min(self._settings.per_step, len(mask_BT))
        chosen = dict.fromkeys(range(-(-count // 2)), FIRST)
        for index in largest_B.argsort(descending=True, stable=True).tolist():
            if len(chosen) < count:
                chosen.setdefault(index, WORST)
        for index in sorted(chosen):
            positions = mask_BT[index].nonzero()[:, 0].tolist()
            part = slice(positions[0], positions[-1] + 1)
            written_t = mask_BT[index, part]

            def own(values_BT: "torch.Tensor", index=index, part=part, written_t=written_t) -> list[float]:
                return values_BT[index, part].masked_fill(~written_t, 0.0).tolist()

            token_ids = rollout.batch.tokens_BT[index]
            response = token_ids[part].tolist()
            problem, answer = problems[index]
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
                    "rejected": _rejected(update, index),
                    "token_id": response,
                    "text": self._pieces.of(response),
                    "infer_log_prob": own(rollout.infer_log_prob_BT),
                    "log_prob": own(statistics["log_prob"]),
                    "pruned_log_prob": own(statistics["pruned_log_prob"]),
                    # What the model did not write was not pruned.
                    "in_safe": (statistics["target_in_safe"][index, part] | ~written_t).tolist(),
                    "weight": own(update.weight_BT),
                    "advantage": own(update.advantage_BT),
                    "written": written_t.tolist(),
                }
            )

    def settle(self, step: int, collapsed_at: int | None) -> None:
        """Forget what need not be kept now that `step` is finished; `collapsed_at` is the step of a collapse so far."""
        self.rows = [row for row in self.rows if self._is_kept(row["step"], step, collapsed_at)]

    def _is_kept(self, recorded: int, step: int, collapsed_at: int | None) -> bool:
        if recorded in (1, self._steps) or recorded % self._settings.every == 0:
            return True
        if collapsed_at is None and step == self._steps:
            return False
        until = step if collapsed_at is None else collapsed_at
        return until - self._settings.before_collapse <= recorded <= until

    def write(self, path: Path) -> None:
        """Write the file atomically, with the steps that are held back. Raises DvpError if it cannot be written."""
        try:
            with atomic_path(path) as temporary:
                pq.write_table(pa.Table.from_pylist(self.rows, schema=self._schema), temporary, compression="zstd")
        except OSError as error:
            raise DvpError(
                f"{path}: cannot be written ({error.strerror or error}); run again to continue from the last checkpoint"
            ) from error

    def restore(self, path: Path) -> None:
        """Go on from what `write` wrote. Raises DvpError if it is no such file."""
        self.rows = read_responses(path).to_pylist()


def read_responses(path: Path) -> pa.Table:
    """A responses.parquet, as in SCHEMA and with WRITTEN. Raises DvpError for any other file."""
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise DvpError(f"{path}: no such file; `dvp train` writes it") from None
    except (OSError, pa.ArrowException) as error:
        raise DvpError(f"{path}: not a parquet file that can be read ({' '.join(str(error).split())[:100]})") from None
    for field in (*SCHEMA, WRITTEN):
        if field is WRITTEN and field.name not in table.schema.names:  # of a run without a tool
            every = [[True] * length for length in pc.list_value_length(table["token_id"]).to_pylist()]
            table = table.append_column(WRITTEN, pa.array(every, WRITTEN.type))
        if field.name not in table.schema.names or table.schema.field(field.name).type != field.type:
            raise DvpError(f"{path}: column '{field.name}': expected {field.type}")
        if not field.nullable and table[field.name].null_count:
            raise DvpError(f"{path}: column '{field.name}': a value is missing")
    table = table.select([*SCHEMA.names, WRITTEN.name])
    lengths = [pc.list_value_length(table[name]) for name in (*PER_TOKEN, WRITTEN.name)]
    if not len(table) or any(other != lengths[0] for other in lengths) or pc.any(pc.equal(lengths[0], 0)).as_py():
        raise DvpError(f"{path}: expected rows with as many {', '.join(PER_TOKEN)} as tokens, at least one")
    return table


def _rejected(update: "Update", index: int) -> str | None:
    """Which rule dropped the whole response: the one that looks first where several do."""
    if update.weights.vetoed_B[index]:
        return VETO
    if update.weights.untrusted_B[index]:
        return TRUST_REGION
    if update.weights.filtered_B[index]:
        return K3
    return None if update.weights.kept_B[index] else BOUNDS
