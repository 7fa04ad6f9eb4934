"""Read prepared problems and encode their prompts as token ids, the same in all stages and on every day.

Also says which part of a response is graded.
"""

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from dvp.data.sources import first_line
from dvp.errors import DvpError
from dvp.experiment.data import DataConfig

TODAY = datetime(2024, 7, 26)
"""The date given to a chat template that reads the clock, as prompts must not change from day to day."""
ANOTHER_DAY = datetime(2031, 11, 5, 13, 14, 15)
THINKING = ("<think>", "</think>")


def read_problems(path: Path, task: str | None = None) -> pd.DataFrame:
    """Return the rows of train.parquet, or those of one task of eval.parquet, with their row numbers in the file.

    The stage has verified the checksums of the files.
    """
    problems = pd.read_parquet(path)
    return problems if task is None else problems[problems["task"] == task]


def encode_prompts(tokenizer: Any, problems: pd.DataFrame, chat: bool, where: str) -> list[list[int]]:
    """Return the token ids of each problem's prompt; warn of a chat template that reads the clock.

    Raises DvpError, naming the row of `where` and its id, for what `encode_prompt` refuses, and for two prompts of the
    same token ids that differ in more than white space.
    """
    encoded: list[list[int]] = []
    seen: dict[tuple[int, ...], tuple[str, str]] = {}
    for row, problem in problems.iterrows():
        here, prompt = f"row {row + 1} (id {problem['id']})", problem["prompt"]
        try:
            encoded.append(encode_prompt(tokenizer, prompt, chat))
            if len(encoded) == 1 and chat and render(tokenizer, prompt) != render(tokenizer, prompt, ANOTHER_DAY):
                print(
                    f"warning: the chat template reads the clock; every prompt says {TODAY:%d %B %Y}", file=sys.stderr
                )
        except DvpError as error:
            raise DvpError(f"{where}: {here}: {error}") from None
        there, other = seen.setdefault(tuple(encoded[-1]), (here, prompt))
        if other.split() != prompt.split():
            raise DvpError(
                f"{where}: {here}: the prompt has the same tokens as that of {there}, another problem; remove one "
                "or take a model whose tokenizer keeps what they differ in"
            )
    return encoded


def encode_prompt(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    """Return the token ids of a prompt; with `chat`, of the conversation in which it is the user's first message.

    An end token that the tokenizer appends to every text is left out: the response would begin behind the end. Raises
    DvpError if the prompt contains a control token of the tokenizer, which would let a problem end its own turn, or if
    `chat` is asked for and the chat template is missing, fails, leaves out the prompt or ends with the end token.
    """
    for token in tokenizer.all_special_tokens:
        if token in prompt:
            raise DvpError(f"the prompt contains the control token '{token}'; remove it from the data or the template")
    if not chat:
        ids = list(tokenizer(prompt)["input_ids"])
        return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
    if tokenizer.chat_template is None:
        raise DvpError("data.chat: the base model's tokenizer has no chat template; set data.chat to false")
    text, change = render(tokenizer, prompt), "change it in the model's folder or set data.chat to false"
    if prompt.strip() not in text:
        raise DvpError(f"the chat template leaves out the prompt's text, and gives {text[-60:]!r}; {change}")
    if tokenizer.eos_token and text.rstrip().endswith(tokenizer.eos_token):
        raise DvpError(f"the chat template ends the prompt with the end token '{tokenizer.eos_token}'; {change}")
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def render(tokenizer: Any, prompt: str, now: datetime = TODAY) -> str:
    """Return the text of a conversation from the prompt, its first message, to the response.

    Raises DvpError if the chat template fails.
    """
    messages = [{"role": "user", "content": prompt}]
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, strftime_now=now.strftime
        )
    except Exception as error:  # a template may raise anything
        raise DvpError(f"the chat template fails: {first_line(error)}") from None


def before_response(tokenizer: Any, data: DataConfig) -> str | None:
    """Return the argument `thinking` of `verifier.grade`, for training, evaluation and measurements alike.

    None: all of a response counts. Else only what follows its last </think> does; "<think>" if prompts end inside of
    one, "" if the response opens it. Raises DvpError if thinking is to be left out and the tags are special tokens,
    which the text of a response does not have.
    """
    asked = data.answer_after_thinking
    if asked is None:
        asked = data.chat and THINKING[0] in str(tokenizer.chat_template)
    if not asked:
        return None
    if special := sorted(set(THINKING) & set(tokenizer.all_special_tokens)):
        raise DvpError(
            f"data.answer_after_thinking: {special[0]} is a special token of the tokenizer, and responses are graded "
            "without those; expected false"
        )
    prompt = render(tokenizer, data.prompt_template) if data.chat else data.prompt_template
    return THINKING[0] if prompt.rfind(THINKING[0]) > prompt.rfind(THINKING[1]) else ""


def short_enough(prompts: list[list[int]], limit: int | None) -> list[int]:
    """Return the indices of the prompts (token ids) of at most `limit` tokens; all of them without a limit.

    Raises DvpError if there is none.
    """
    kept = [index for index, prompt in enumerate(prompts) if limit is None or len(prompt) <= limit]
    if not kept:
        raise DvpError(
            f"training.max_prompt_tokens: all {len(prompts)} prompts have more than {limit} tokens; the shortest has "
            f"{min(map(len, prompts))}"
        )
    return kept


def padding_token(tokenizer: Any) -> int:
    """Return the id to pad with: the padding token, or the end token if there is none.

    Padding is neither attended to nor scored, so either serves.
    """
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
