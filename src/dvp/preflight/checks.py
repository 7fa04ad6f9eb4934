"""Checks of a preflight that need the trainer or an engine, and their tolerances.

A check measures, reports the measured value and the allowed one in a sentence, and passes or fails.
"""

import os
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import torch

from dvp.analysis.forecast import forecast
from dvp.analysis.mismatch_advice import percent
from dvp.core.batch import Batch
from dvp.core.vocabulary_mismatch import normalised
from dvp.errors import DvpError
from dvp.measurement.mismatch import MIS
from dvp.preflight.report import Verdict
from dvp.training import ranks
from dvp.training.agreement import Compared, own_logits
from dvp.training.backend import Trainer

FORWARD_LIMIT = 1e-3
"""Allowed difference of log-probs in nats, both in fp32. Another order of summation in the head of an 8B model changes
them by 1e-5, a scaled or capped logit by tenths."""
MOVED_SHARE = 0.1
"""Allowed distance of a reloaded engine from a fresh one, as a share of the distance that training has moved them. An
engine that kept its old weights is off by a share of 1."""
SAME_ENGINE = 1e-3
"""Nats by which two engines with the same weights may differ in any case."""
POSITIONS = 32
"""Tokens of a response at which trainer and engine are compared."""
KEPT = 0.05
"""The forecast warns if MIS would keep a smaller share of the responses."""


def check_compilers() -> None:
    """Raise DvpError if a machine with a GPU lacks the headers or compiler that Triton and Inductor use at run time."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    lacking = [] if header.is_file() else [f"{header} (the package python3-dev or python3-devel)"]
    if "CC" not in os.environ and not any(map(shutil.which, ("gcc", "clang"))):
        lacking.append("a C compiler (gcc)")
    if torch.cuda.is_available() and lacking:
        raise DvpError(f"this node lacks {' and '.join(lacking)}, with which Triton compiles the kernels of a GPU")


def check_forward(trainer: Trainer, prompts: list[list[int]], temperature: float) -> Verdict:
    """Compare the trainer's fp32 log-probs of the prompts' own tokens with the model's own forward pass."""
    batch = Batch.collate([prompt[:1] for prompt in prompts], [prompt[1:] for prompt in prompts], pad=0)
    ours_N = trainer.score(batch, None, bf16=False)["log_prob"][batch.response_BT]
    log_p_NV = normalised(own_logits(trainer.policy.model, batch) / temperature)
    tokens_N = batch.tokens_BT[:, 1:][batch.response_BT[:, 1:]].to(log_p_NV.device)
    theirs_N = log_p_NV.gather(1, tokens_N[:, None]).squeeze(1).cpu()
    largest = max(ranks.gather((ours_N - theirs_N).abs().max().item()))
    return Verdict(
        largest <= FORWARD_LIMIT,
        f"log-probs are up to {largest:.2g} nats off the model's own forward pass, {FORWARD_LIMIT:g} are allowed",
        {"max_abs_delta_log_prob": largest, "limit": FORWARD_LIMIT, "tokens": len(ours_N)},
    )


def check_mismatch(compared: Compared, longest: int) -> Verdict:
    """Judge the mismatch of engine and trainer; forecast the share of responses of `longest` tokens that MIS keeps."""
    law_N = compared.log_ratio_N.numpy()
    kept = forecast(law_N, np.full(len(law_N), 1 / len(law_N)), {"MIS": MIS}, [longest])["MIS"][longest]
    problem, few = (
        compared.problem(),
        "" if kept >= KEPT else ": WARNING, a finer engine or shorter responses leave more",
    )
    return Verdict(
        problem is None,
        problem
        or f"engine and trainer are apart by KL {compared.kl:.2g} nats per token at {compared.positions} positions; of "
        f"that {compared.error:.2g} are not of its weights' rounding, {compared.limit:.2g} are allowed; MIS would keep "
        f"{percent(kept)} of responses of {longest:,} tokens{few}",
        {name: getattr(compared, name) for name in ("kl", "error", "limit", "rounding", "positions")} | {"mis": kept},
    )


def check_same_engine(reloaded_NV: torch.Tensor, fresh_NV: torch.Tensor, before_NV: torch.Tensor) -> Verdict:
    """Check that an engine reloaded in memory has the same weights as a freshly started one.

    Arguments are log-probs (N, V) of the next token after the same N prompts: by the reloaded engine, by the fresh one,
    and by the engine before any training step. The last measures how far training has moved the weights.
    """
    apart, moved = (
        float((other_NV - fresh_NV).abs().mul(fresh_NV.exp()).sum(dim=-1).max())
        for other_NV in (reloaded_NV, before_NV)
    )
    limit = max(SAME_ENGINE, MOVED_SHARE * moved)
    return Verdict(
        apart <= limit and moved > apart,
        f"{apart:.2g} nats apart (the mean over a distribution, at the worst of {len(fresh_NV)} prompts), {limit:.2g} "
        f"are allowed; training has moved them by {moved:.2g}",
        {"apart": apart, "moved": moved, "limit": limit},
    )
