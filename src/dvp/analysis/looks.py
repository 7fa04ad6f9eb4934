"""Colours, markers and names in figures: a family of methods has one colour in every experiment.

Nothing here is random or dated, so that the same data give the same figure byte for byte.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import pandas as pd
from matplotlib.colors import to_hex, to_rgb

from dvp.analysis.formats import rho_text
from dvp.analysis.points import BASE, policy_label
from dvp.core.importance import ImportanceRule
from dvp.experiment.config import Experiment
from dvp.experiment.grid import parse_rho
from dvp.experiment.methods import Method
from dvp.progress import setting_as_read

# Okabe and Ito: distinguishable with the common colour-vision deficiencies. Methods of one family differ in marker and
# line style.
FAMILIES = {
    "no correction": "#0072B2",
    "token, truncate": "#E69F00",
    "sequence, mask": "#009E73",
    "sequence, truncate": "#56B4E9",
    "other correction": "#D55E00",
    "otb": "#CC79A7",
    "other advantage or loss": "#5D3A9B",
    "mask or decay": "#303030",
}
DARK = "#404040"
PALETTE = tuple(FAMILIES.values())  # for engines
OTHERS = (PALETTE[0], PALETTE[4], DARK, PALETTE[2], PALETTE[1])  # for coordinates other than methods and engines
LIGHTER = 0.25  # share of white in the colour of a method without a safe vocabulary
GREYS = ("#707070", "#A0A0A0", "#404040")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*")
LINES = ("-", (0, (5, 1.2, 1, 1.2)), (0, (1, 1)), (0, (7, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (9, 1, 3, 1)))
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "dvp",
    "svg.fonttype": "path",
}
_WORDS = {
    "bf16": "trainer against itself in bf16",
    "shape": "trainer against itself, other batch shape",
    "infer": "weighted by the engine's π_infer",
    "train": "weighted by the trainer's π_train (control)",
    "scaled_above": "largest |d| of a bin where d > 0 (q > p)",
    "scaled_below": "largest |d| of a bin where d < 0 (q < p)",
    "scaled_mean": "mean |d| of a bin",
    "literal_bound": "literal bound, 1 − p",
    "sharp_bound": "sharp bound where d < 0, at the largest ε_max",
    "squared_bias": "against other samples",
    "paired_squared_bias": "paired, by the same samples",
}


def family(method: Method) -> str:
    """Return the family of a method, a key of FAMILIES."""
    correction = method.importance
    if method.advantage.startswith("otb"):
        return "otb"
    if method.advantage != "rloo" or method.loss.kind != "reinforce":
        return "other advantage or loss"
    if method.mask is not None or method.learning_rate_decay is not None:
        return "mask or decay"
    if correction == ImportanceRule():
        return "no correction"
    return correction.family if correction.family in FAMILIES else "other correction"


class Looks:
    """Colours, names and order of the lines and rows in an experiment's figures."""

    def __init__(self, experiment: Experiment):
        self.experiment = experiment
        self.identity = ["method", "engine", "rho", *experiment.axes]
        """The columns that identify a grid point."""
        self._others: dict[str, str] = {}

    @cached_property
    def _engines(self) -> dict[str, str]:
        experiment = self.experiment
        measured = [part.engines for part in (experiment.mismatch, experiment.bias) if part is not None]
        names = [
            *(engine for engines in measured for engine in engines),
            experiment.evaluation.engine,
            *(point.engine for point in experiment.points),
            *(sampler.engine for _, sampler in experiment.further_evaluations),
        ]
        return {name: PALETTE[place % len(PALETTE)] for place, name in enumerate(dict.fromkeys(names))}

    def color(self, row: Any, by: str) -> str:
        """Return a row's colour by the column `by`: its method's family, its engine (dark without one), or another."""
        value = row[by]
        if by in ("engine", "evaluated_on"):
            return self._engines.get(value, DARK)
        if by != "method":
            return self._others.setdefault(value, OTHERS[len(self._others) % len(OTHERS)])
        if value in (BASE, "none"):
            return "black"
        if row["role"] == "control":
            controls = dict.fromkeys(
                point.method for point in self.experiment.points if self.experiment.is_control(point)
            )
            return GREYS[list(controls).index(value) % len(GREYS)]
        method = self.experiment.methods[value]
        hue = FAMILIES[family(method)]
        return hue if method.safe_vocabulary else to_hex([part + (1 - part) * LIGHTER for part in to_rgb(hue)])

    def name(self, row: Any, columns: Sequence[str]) -> str:
        """Describe a row by some of its coordinates, without those that are `none`."""
        named = {column: self._named(column, row[column]) for column in columns if row[column] != "none"}
        if {"policy", "engine"} <= named.keys():  # a policy has the engine of its training in its name
            named["engine"] = f"measured on {named['engine']}"
        return ", ".join(named.values())

    def _named(self, column: str, value: str) -> str:
        if column == "method":
            return "base model" if value == BASE else self.experiment.methods[value].label
        if column in ("engine", "evaluated_on"):
            engine = self.experiment.engines.get(value)
            text = engine.in_words if engine else value
            return text if column == "engine" else f"sampled on {text}"
        if column == "policy":
            return policy_label(self.experiment, value)
        if column in self.experiment.axes:
            return setting_as_read(column, value)
        texts = {
            "rho": f"ρ\u00a0=\u00a0{rho_text(value)}",
            "only_rho": f"ρ\u00a0=\u00a0{rho_text(value)} in evaluation only",
            "margin": f"trainer prunes at ρ·e^(−2·{value})",
        }
        return texts.get(column, _WORDS.get(value, value))

    def by_family(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Sort estimators: one without a safe vocabulary, then the same with each, the largest fixed ρ first."""
        methods = self.experiment.methods
        kinds = [methods[name].model_dump_json(exclude={"label", "safe_vocabulary"}) for name in rows["method"]]
        first = {kind: place for place, kind in reversed(list(enumerate(kinds)))}

        def order(kind: str, method: str, rho: str) -> tuple:
            rule = methods[method].safe_vocabulary
            return first[kind], rule is not None, bool(rule) and rule.rule != "fixed", -self.rho(rho)

        keys = list(map(order, kinds, rows["method"], rows["rho"]))
        return rows.iloc[sorted(range(len(keys)), key=keys.__getitem__)]

    @staticmethod
    def rho(text: str) -> float:
        """Return ρ as a number; 0 for `none`."""
        return 0.0 if text == "none" else parse_rho(text)
