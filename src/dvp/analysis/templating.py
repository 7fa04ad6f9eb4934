"""The environment of the Jinja templates in templates/."""

import jinja2

TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("dvp.analysis"),
    autoescape=jinja2.select_autoescape(["html.j2"]),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
