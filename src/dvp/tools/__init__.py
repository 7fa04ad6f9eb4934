"""The tools that a response may call. `make_tool` starts the one that an experiment asks for; see tool.py."""

from dvp.experiment.tools import Calculator, Tools
from dvp.tools.tool import Tool


def make_tool(settings: Tools) -> Tool:
    """The tool of an experiment. Raises DvpError if it does not work on this machine."""
    if isinstance(settings, Calculator):
        from dvp.tools.calculator import CalculatorTool

        return CalculatorTool()
    from dvp.tools.python import PythonTool

    return PythonTool(settings)
