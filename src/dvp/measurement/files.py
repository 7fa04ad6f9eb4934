"""Names, bins and limits that measurements and reports share; in a file of their own so that reports load no torch."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from dvp.files import atomic_path, sha256_file

if TYPE_CHECKING:
    import pandas as pd

ENGINE = "engine"
SOURCES = (ENGINE, "shape", "bf16")
"""Distributions that stand for q: the engine's, or the trainer's own in another batch shape or under bf16 autocast."""
TABLES = ("histogram", "gaps", "bounds", "safe_sets", "prefixes", "noise")
"""The parquet files of a measurement of the mismatch."""
TOKENS = "tokens"
"""The parquet file with one row per sampled token: problem, response and position (from 0) in it, token (its id),
log_p, log_q (trainer, engine; nats); where the whole vocabulary is known, log_p_shape and log_p_bf16, log p of the
controls, and kl, KL(q‖p) there."""
# Widths from 1e-4 nats near 0 to a tenth of |d| far from it, up to 30 nats on either side; two open bins lie beyond.
D_EDGES = (-math.inf, *(1e-3 * math.sinh(step / 10) for step in range(-110, 111)), math.inf)
"""Bin edges of d, nats. All bins are (lower, upper], so that d = 0 counts as not positive."""
NARROWEST = min(edge for edge in D_EDGES if edge > 0)
"""Width of the bins of d next to 0, nats."""
NORMAL_95 = 1.959964
"""The normal quantile of a 95 % interval."""

PAIRED = {"paired_squared_bias": "weight_ess", "paired_squared_bias_pruned": "weight_ess_pruned"}
"""The squared biases against ∇J and against ∇J_mp, each with the name of the ESS of the weights behind it."""
SMALLEST_ESS = 0.5
"""The smallest usable ESS of sequence weights, over the number of responses. Below it the variance of r is above 1 and
a few responses dominate h: use the exact reference instead. From it on no weight exceeds √(2/N) of the sum of N."""


def write_tables(tables: dict[str, "pd.DataFrame"], folder: Path) -> dict[str, str]:
    """Write each table to folder/NAME.parquet; return the files' SHA-256 by file name."""
    for name, table in tables.items():
        with atomic_path(folder / f"{name}.parquet") as temporary:
            table.to_parquet(temporary, index=False)
    return {f"{name}.parquet": sha256_file(folder / f"{name}.parquet") for name in tables}
