"""Which part of a response states its answer, for a model that thinks before it answers."""

from typing import Any

from dvp.data.prompts import render
from dvp.errors import DvpError
from dvp.experiment.data import DataConfig

TAGS = ("<think>", "</think>")


def before_response(tokenizer: Any, data: DataConfig) -> str | None:
    """What `verifier.grade` takes as `thinking`, in training, evaluation and measurements alike.

    None: all of a response counts. Else only what follows its last </think>; "<think>" if prompts end inside of one,
    "" if it is the response that opens one.
    Raises DvpError if it is asked for and the tags are special tokens, which the text of a response does not have.
    """
    asked = data.answer_after_thinking
    if asked is None:
        asked = data.chat and TAGS[0] in str(tokenizer.chat_template)
    if not asked:
        return None
    if special := sorted(set(TAGS) & set(tokenizer.all_special_tokens)):
        raise DvpError(
            f"data.answer_after_thinking: {special[0]} is a special token of the tokenizer, and responses are graded "
            "without those; expected false"
        )
    prompt = render(tokenizer, data.prompt_template) if data.chat else data.prompt_template
    return TAGS[0] if prompt.rfind(TAGS[0]) > prompt.rfind(TAGS[1]) else ""
