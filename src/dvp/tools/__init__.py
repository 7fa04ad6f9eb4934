"""Tools that a response may call. `make_tool` starts the tool that an experiment asks for; see tool.py."""

from importlib import import_module

from dvp.experiment.tools import Tools
from dvp.tools.tool import Tool


def make_tool(settings: Tools) -> Tool:
    """Start the tool that an experiment's settings name. Raises DvpError if it does not work on this machine."""
    module, name = settings.program.split(":")
    return getattr(import_module(module), name)(settings)
