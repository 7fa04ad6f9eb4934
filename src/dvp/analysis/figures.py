"""Draw the figures of a report, from its estimates and series alone."""

from io import BytesIO
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

from dvp.analysis.charts import Charts
from dvp.analysis.looks import STYLE
from dvp.analysis.pages import FIGURES
from dvp.analysis.statistics import Statistic
from dvp.experiment.config import Experiment
from dvp.files import atomic_path

DPI = 110


def draw(experiment: Experiment, statistics: list[Statistic], series: pd.DataFrame) -> dict[str, Figure]:
    """Draw every figure whose quantities were measured; returns them by name."""
    charts = Charts(experiment, statistics, series)
    drawn = {name: entry.make(charts) for name, entry in FIGURES.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write folder/NAME.svg and folder/NAME.png, reduced to a palette to be small; each is whole or absent."""
    with mpl.rc_context(STYLE):
        with atomic_path(folder / f"{name}.svg") as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})
        picture = BytesIO()
        figure.savefig(picture, format="png", dpi=DPI)
    with atomic_path(folder / f"{name}.png") as temporary:
        Image.open(picture).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(temporary, "png", optimize=True)
