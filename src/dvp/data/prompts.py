"""A prompt's token ids, the same for training and evaluation."""

from typing import Any

import pandas as pd

from dvp.errors import DvpError


def encode_prompts(tokenizer: Any, problems: pd.DataFrame, chat: bool, where: str) -> list[list[int]]:
    """Token ids of each problem's prompt. Raises DvpError, naming the row of `where` and its id."""
    encoded = []
    for row, problem in problems.iterrows():
        try:
            encoded.append(encode_prompt(tokenizer, problem["prompt"], chat))
        except DvpError as error:
            raise DvpError(f"{where}: row {row + 1} (id {problem['id']}): {error}") from None
    return encoded


def encode_prompt(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    """Token ids of a prompt; with `chat`, of the conversation in which it is the user's first message.

    Raises DvpError if the prompt contains a control token of the tokenizer, which would let a problem end its own turn,
    or if `chat` is asked for and the tokenizer has no chat template.
    """
    for token in tokenizer.all_special_tokens:
        if token in prompt:
            raise DvpError(f"the prompt contains the control token '{token}'; remove it from the data or the template")
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    if tokenizer.chat_template is None:
        raise DvpError("data.chat: the base model's tokenizer has no chat template; set data.chat to false")
    messages = [{"role": "user", "content": prompt}]
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)[
            "input_ids"
        ]
    )


def short_enough(prompts: list[list[int]], limit: int | None) -> list[int]:
    """The indices of the prompts (token ids) of at most `limit` tokens; of all without a limit.

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
    """The id to pad with. Padding is neither attended to nor scored: without a token for it, the end token serves."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
