"""The notes under a table: what shown.yaml says of it, with the numbers that it was made of."""

from collections.abc import Sequence
from typing import Any

import jinja2

from dvp.analysis.estimates import share_of_runs
from dvp.analysis.mismatch import TAIL, over_what
from dvp.analysis.pages import TEMPLATES
from dvp.analysis.points import point_name, role, seeds_text, where_of
from dvp.analysis.shown import shown
from dvp.analysis.statistics import Statistic, lookup
from dvp.analysis.training import LAST_STEPS
from dvp.evaluation import bootstrap
from dvp.experiment.config import Experiment
from dvp.experiment.grid import settings_as_read
from dvp.measurement.files import SMALLEST_ESS
from dvp.progress import setting_as_read

CLOSE = 0.05  # runs whose sampled tokens differ by no more count as runs of equal cost


def notes(
    declared: dict[str, Any],
    experiment: Experiment | None,
    statistics: list[Statistic],
    rows: list[dict[str, Any]],
    **about: Any,
) -> list[str]:
    """The paragraphs of its `sentences`, then of an experiment's table its scale and declarations, then its `notes`.

    rows : their cells by name.
    """
    about |= {"smallest_ess": SMALLEST_ESS, "rows": rows, "tail": TAIL}
    if experiment is not None:
        about |= _about(experiment, statistics)
    environment = TEMPLATES.overlay(loader=jinja2.DictLoader(shown("notes")), autoescape=False)

    def paragraphs(key: str) -> list[str]:
        text = environment.from_string(declared.get(key, "")).render(about)
        return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]

    own = [f"Scale: {experiment.scale}", *experiment.report.declarations] if experiment else []
    return [*paragraphs("sentences"), *own, *paragraphs("notes")]


def _about(experiment: Experiment, statistics: list[Statistic]) -> dict[str, Any]:
    """What notes can name. `values`, `has` and `percents` are of a statistic by its name, wherever it is defined."""
    steps = [experiment.training_of(point).steps for point in experiment.points]

    def values(name: str) -> list[float]:
        return [one.value for one in statistics if one.name == name and one.value == one.value]

    def percents(name: str, scale: float = 1) -> str | None:
        """The smallest and the largest, as text."""
        found = [scale * value for value in values(name)]
        ends = sorted({f"{value:.1f}" for value in (min(found), max(found))}, key=float) if found else []
        return " to ".join(ends) or None

    return {
        "experiment": experiment,
        "evaluation": experiment.evaluation,
        "k": experiment.evaluation.samples_per_problem[experiment.report.task],
        "count": len(experiment.seeds),
        "seeds": seeds_text(experiment),
        "covers_seeds": bootstrap.covers_seeds(experiment.seeds),
        "over": bootstrap.over(experiment.seeds),
        "over_mismatch": over_what(experiment),
        "reference": experiment.reference_point,
        "reference_settings": ", ".join(settings_as_read(experiment.settings_of(experiment.reference_point))),
        "control": "control" in [role(experiment, point) for point in experiment.points],
        "steps": span(steps),
        "last": min(LAST_STEPS, max(steps)),
        "shortest": min(steps),
        "settings": settings_note(experiment, statistics),
        "goals": {one.where["task"]: 100 * one.value for one in statistics if one.name == "target_score"},
        "values": values,
        "has": lambda name: bool(values(name)),
        "percents": percents,
        "name": lambda point: point_name(experiment, point),
        "none_of": lambda runs: share_of_runs(0, runs)[2],
    }


def settings_note(experiment: Experiment, statistics: list[Statistic]) -> str:
    """Which settings the rows differ in, and which sizes of a step and of a run are equal; empty if they do not differ.

    Sizes follow from the settings, the tokens of a run are sampled_tokens.
    """
    known, axes = lookup(statistics), experiment.axes
    every = [experiment.training_of(point) for point in experiment.points]
    sampled = [known("sampled_tokens", where_of(experiment, point)) for point in experiment.points]
    if not axes or None in sampled:
        return ""
    responses = [training.prompts_per_step * training.group_size for training in every]
    sizes = {
        "prompts per step": [training.prompts_per_step for training in every],
        "responses per step": responses,
        "steps": [training.steps for training in every],
        "responses of a run": [one * training.steps for one, training in zip(responses, every, strict=True)],
        "sampled tokens of a run": [one.value for one in sampled],
    }
    equal, differing = [], []
    for name, values in sizes.items():
        close = name == "sampled tokens of a run" and max(values) - min(values) <= CLOSE * max(values)
        within = f", within {100 * CLOSE:g} %" if close else ""
        (equal if close or min(values) == max(values) else differing).append(f"{name} ({span(values)}{within})")
    names = ", ".join(map(setting_as_read, axes))
    return (
        f"The rows differ in training settings: {names}. Equal in all of them: {', '.join(equal) or 'nothing'}. "
        f"Not equal: {', '.join(differing) or 'nothing'}."
    )


def span(values: Sequence[float]) -> str:
    """The value, or the smallest to the largest: `48`, `1,536 to 12,288`; of large numbers three digits."""
    first, last = (f"{float(f'{end:.3g}') if end >= 1e5 else end:,.0f}" for end in (min(values), max(values)))
    return first if first == last else f"{first} to {last}"
