"""Names, bins and limits of what measurements write and reports read; apart, so that reports load no torch."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from dvp.files import atomic_path, sha256_file

if TYPE_CHECKING:
    import pandas as pd

ENGINE = "engine"
SOURCES = (ENGINE, "shape", "bf16")
"""Whose distribution is q: the engine's, or the trainer's own in another batch shape or under bf16 autocast."""
TABLES = ("histogram", "gaps", "bounds", "safe_sets", "prefixes", "noise")
"""The parquet files of a measurement of the mismatch."""
TOKENS = "tokens"
"""And another one, a row a sampled token: problem, response and position (from 0) in it, token (its id), log_p, log_q
(trainer, engine; nats); where the whole vocabulary is known, log_p_shape and log_p_bf16, log p of the controls, and kl,
KL(q‖p) there."""
# Steps of 1e-4 nats near 0, of a tenth of |d| far from it, to 30 nats on either side; what is beyond has bins as well.
D_EDGES = (-math.inf, *(1e-3 * math.sinh(step / 10) for step in range(-110, 111)), math.inf)
"""Of d, nats. All bins are (lower, upper], so that d = 0 counts as not positive."""
NARROWEST = min(edge for edge in D_EDGES if edge > 0)
"""Width of the bins of d next to 0, nats."""
NORMAL_95 = 1.959964
"""The quantile of a normal interval."""

PAIRED = {"paired_squared_bias": "weight_ess", "paired_squared_bias_pruned": "weight_ess_pruned"}
"""The squared biases against ∇J and against ∇J_mp, and what the ESS of the weights behind each is called."""
SMALLEST_ESS = 0.5
"""Of the sequence weights, over the number of responses. Below it the variance of r is above 1 and a few responses
carry h: the exact reference is to be used instead. From it on no weight has more than √(2/N) of the sum of N."""


def write_tables(tables: dict[str, "pd.DataFrame"], folder: Path) -> dict[str, str]:
    """Write each as NAME.parquet; their SHA-256 by file name."""
    for name, table in tables.items():
        with atomic_path(folder / f"{name}.parquet") as temporary:
            table.to_parquet(temporary, index=False)
    return {f"{name}.parquet": sha256_file(folder / f"{name}.parquet") for name in tables}
