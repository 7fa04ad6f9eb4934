"""What the report shows of the stage `mismatch`: statistics with intervals, two tables, figures."""

from pathlib import Path

from dvp.analysis import mismatch_figures, mismatch_tables
from dvp.analysis.mismatch_inputs import read_measurements
from dvp.analysis.mismatch_statistics import statistics
from dvp.analysis.statistics import Measured
from dvp.experiment.config import Experiment


def measured(experiment: Experiment, results: Path) -> Measured:
    """Read and check every measurement of the stage `mismatch`, and make of them what the report shows.

    results : the experiment's own folder (results/E).
    Raises DvpError, naming the file, for a missing, stale, altered or malformed one.
    """
    every = read_measurements(experiment, results)
    found = [one for measurements in every for one in statistics(experiment, measurements)]
    return Measured(
        statistics=found,
        tables=mismatch_tables.tables(experiment, every, found),
        figures=mismatch_figures.figures(experiment, every, found),
        sources=tuple(source for measurements in every for source in measurements.sources),
    )
