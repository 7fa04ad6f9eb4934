"""The tool `dictionary`: how a word is spelt backwards."""

from collections.abc import Sequence

from dvp.experiment.tools import Dictionary
from dvp.tools.tool import Answer


class DictionaryTool:
    """A Tool; see tool.py."""

    def __init__(self, settings: Dictionary) -> None:
        self._longest = settings.longest

    def answers(self, calls: Sequence[str]) -> list[Answer]:
        """See Tool.answers."""
        return [Answer(call[::-1]) if len(call) <= self._longest else Answer("too long", failed=True) for call in calls]
