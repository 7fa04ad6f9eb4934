"""The text that stands in templates/: pages, and the notes under the tables."""

from typing import Any

import jinja2

from dvp.experiment.config import Experiment

TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("dvp.analysis"),
    autoescape=jinja2.select_autoescape(["html.j2"]),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def notes(name: str, experiment: Experiment | None = None, **values: Any) -> list[str]:
    """The paragraphs of templates/notes/NAME.j2; of an experiment's table after its scale and declarations."""
    own = [f"Scale: {experiment.scale}", *experiment.report.declarations] if experiment else []
    text = TEMPLATES.get_template(f"notes/{name}.j2").render(experiment=experiment, **values)
    return own + [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]
