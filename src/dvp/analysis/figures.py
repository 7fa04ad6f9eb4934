"""Draw the figures of a report, from its estimates and series alone, as shown.yaml declares them."""

from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

from dvp.analysis.charts import COORDINATES, intervals, lines, present
from dvp.analysis.looks import STYLE, Looks
from dvp.analysis.points import BASE, role, where_of
from dvp.analysis.shown import shown
from dvp.analysis.statistics import Statistic, to_frame
from dvp.experiment.config import Experiment
from dvp.files import atomic_path

DPI = 110


def draw(experiment: Experiment, statistics: list[Statistic], series: pd.DataFrame) -> dict[str, Figure]:
    """Draw every declared figure whose quantities were measured; returns them by name."""
    table, looks, drawn = as_drawn(experiment, statistics, series), Looks(experiment), {}
    kinds = {"intervals": intervals, "lines": lines}
    for name, declared in shown("figures").items():
        declaration = _filled(declared, experiment)
        own = table
        for key, values in declaration.get("where", {}).items():
            own = own[own[key].isin(values)]
        for key, values in declaration.get("unless", {}).items():
            own = own[~own[key].isin(values)]
        known = set(own["quantity"])
        if present(declaration, own) and set(declaration.get("needs", [])) <= known:
            drawn[name] = kinds[declaration["kind"]](looks, declaration, own)
    return drawn


def as_drawn(experiment: Experiment, statistics: list[Statistic], series: pd.DataFrame) -> pd.DataFrame:
    """Join estimates and series into one table with every coordinate, `none` where it does not apply.

    Adds role, of a grid point or the base model (dvp.analysis.points.role); at, `at ρ` for evaluations sampled at a ρ;
    and only_rho, that ρ if training had none.
    """
    table = pd.concat([to_frame(statistics), series], ignore_index=True)
    coordinates = [*COORDINATES, *experiment.axes]
    table = table.reindex(columns=[*dict.fromkeys([*table, *coordinates, "x"])])
    table[coordinates] = table[coordinates].astype(object).fillna("none")
    roles = {
        tuple(where_of(experiment, point).values()): role(experiment, point) for point in (None, *experiment.points)
    }
    places = zip(*(table[key] for key in ["method", "engine", "rho", *experiment.axes]), strict=True)
    only = (table["evaluated_rho"] != table["rho"]) & (table["evaluated_rho"] != "own")
    return table.assign(
        role=[roles.get(place if place[0] != BASE else place[:3], "") for place in places],
        only_rho=table["evaluated_rho"].where(only, "none"),
        at=np.where(table["evaluated_rho"] == "none", "none", "at ρ"),
    )


def _filled(value: Any, experiment: Experiment) -> Any:
    """Fill the experiment's names into the texts of a declaration, and make a single quantity a list."""
    if isinstance(value, dict):
        filled = {key: _filled(one, experiment) for key, one in value.items() if key != "caption"}
        if isinstance(filled.get("quantity"), str):
            filled["quantity"] = [filled["quantity"]]
        return filled
    if isinstance(value, list):
        return [_filled(one, experiment) for one in value]
    task, engine = experiment.report.task, experiment.engines[experiment.evaluation.engine].in_words
    text = "held-out problems" if task == "held_out" else task
    names = {"task": text, "engine": engine, "k": experiment.evaluation.samples_per_problem[task]}
    return value.format(**names) if isinstance(value, str) else value


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write folder/NAME.svg and folder/NAME.png, reduced to a palette to be small; each is whole or absent."""
    with mpl.rc_context(STYLE):
        with atomic_path(folder / f"{name}.svg") as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})
        picture = BytesIO()
        figure.savefig(picture, format="png", dpi=DPI)
    with atomic_path(folder / f"{name}.png") as temporary:
        Image.open(picture).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(temporary, "png", optimize=True)
