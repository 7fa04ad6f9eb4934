"""The measurements of the stage `mismatch`, read and checked, and how often a bootstrap replicate counts each problem.

Everything that is shown of them is a ratio of sums over problems, so a replicate is a number of times that each problem
counts; the first replicate counts each once: the value itself.

Shape suffixes: R replicates, the value first; U units, a problem of a seed; K columns; S seeds; P problems.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from dvp.analysis import bootstrap
from dvp.analysis.inputs import check_fresh
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.grid import Measurement
from dvp.files import read_json, verify_checksums
from dvp.measurement.mismatch_files import TABLES


@dataclass(frozen=True)
class Measurements:
    """The measurements of one policy and engine, all seeds."""

    policy: str
    engine: str
    tables: dict[str, pd.DataFrame]
    """As written by dvp.measurement.mismatch, with `unit`, the index of a problem of a seed."""
    draws_RU: np.ndarray
    sources: tuple[str, ...]

    @property
    def where(self) -> dict[str, str]:
        return {"policy": self.policy, "engine": self.engine}

    def sums(self, rows: pd.DataFrame, columns: list[str]) -> np.ndarray:
        """Sums of the columns over the rows, (R, K)."""
        per_unit = rows.groupby("unit")[columns].sum().reindex(range(self.draws_RU.shape[1]), fill_value=0.0)
        return self.draws_RU @ per_unit.to_numpy(dtype=float)

    def ratio(self, rows: pd.DataFrame, above: str, below: str) -> np.ndarray:
        """Σ above / Σ below, (R,); NaN where there is nothing."""
        sums_RK = self.sums(rows, [above, below])
        with np.errstate(divide="ignore", invalid="ignore"):
            return sums_RK[:, 0] / sums_RK[:, 1]

    def binned(self, rows: pd.DataFrame, key: str, column: str) -> tuple[np.ndarray, np.ndarray]:
        """(values of `key`, sums of `column` (R, K)), a column for each value, in increasing order."""
        wide = rows.pivot_table(index="unit", columns=key, values=column, aggfunc="sum", fill_value=0.0)
        per_unit = wide.reindex(range(self.draws_RU.shape[1]), fill_value=0.0)
        return per_unit.columns.to_numpy(dtype=float), self.draws_RU @ per_unit.to_numpy(dtype=float)


def read_measurements(experiment: Experiment, results: Path) -> list[Measurements]:
    """All measurements, those of one policy and engine together. Raises DvpError."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for measurement in experiment.measurements("mismatch"):
        policy = measurement.policy if measurement.policy == "base" else measurement.policy.path
        groups.setdefault((policy, measurement.engine), []).append(measurement)
    evaluation = experiment.evaluation
    draws_RU = draws(
        len(experiment.seeds), experiment.mismatch.problems, evaluation.bootstrap_resamples, evaluation.seed
    )
    return [
        _read_group(experiment, results, policy, engine, measurements, draws_RU)
        for (policy, engine), measurements in groups.items()
    ]


def _read_group(
    experiment: Experiment,
    results: Path,
    policy: str,
    engine: str,
    measurements: list[Measurement],
    draws_RU: np.ndarray,
) -> Measurements:
    problems = experiment.mismatch.problems
    frames: dict[str, list[pd.DataFrame]] = {name: [] for name in TABLES}
    for number, measurement in enumerate(measurements):
        read = _read_measurement(experiment, results, measurement)
        names = list(dict.fromkeys(read["noise"]["problem"]))
        if len(names) != problems:
            where = results / "mismatch" / measurement.path / "noise.parquet"
            raise DvpError(f"{where}: problem: expected {problems} different ones, found {len(names)}")
        unit = {name: number * problems + index for index, name in enumerate(names)}
        for name, table in read.items():
            frames[name].append(table.assign(unit=table["problem"].map(unit)))
    sources = tuple(f"mismatch/{measurement.path}/mismatch.json" for measurement in measurements)
    tables = {name: pd.concat(parts, ignore_index=True) for name, parts in frames.items()}
    return Measurements(policy, engine, tables, draws_RU, sources)


def _read_measurement(experiment: Experiment, results: Path, measurement: Measurement) -> dict[str, pd.DataFrame]:
    folder = results / "mismatch" / measurement.path
    path = folder / "mismatch.json"
    record = read_json(path, "config_hash", "measurement", "git_commit", "tracking_key", "files")
    check_fresh(path, record, experiment.config_hash("mismatch", measurement=measurement))
    if record["measurement"] != measurement.path:
        raise DvpError(f"{path}: measurement: expected '{measurement.path}', found {record['measurement']!r}")
    verify_checksums(folder, record["files"])
    tables = {}
    for name in TABLES:
        try:
            tables[name] = pd.read_parquet(folder / f"{name}.parquet")
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DvpError(f"{folder / name}.parquet: cannot be read ({str(error).splitlines()[0]})") from None
    return tables


def draws(seeds: int, problems: int, resamples: int, seed: int) -> np.ndarray:
    """How often each unit counts, (1 + resamples, seeds · problems): seeds are drawn (from three on), then problems.

    The same for all policies and engines, which share their problems: their differences are paired.
    """
    rng = np.random.default_rng(seed)
    units = seeds * problems
    drawn_RS = np.tile(np.arange(seeds), (resamples, 1))
    if bootstrap.resamples_seeds(range(seeds)):
        drawn_RS = rng.integers(seeds, size=(resamples, seeds))
    drawn_RSP = drawn_RS[..., None] * problems + rng.integers(problems, size=(resamples, seeds, problems))
    flat = drawn_RSP.reshape(resamples, units) + units * np.arange(resamples)[:, None]
    counts_RU = np.bincount(flat.ravel(), minlength=resamples * units).reshape(resamples, units)
    return np.concatenate([np.ones((1, units)), counts_RU])
