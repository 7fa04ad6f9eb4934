"""Make the base model: a tiny Qwen3 that the pipeline trains itself, or a model that exists already.

The tiny model is warm-started on worked solutions, a share of which is careless on purpose: it can do the task but
samples slips, so that RL has something to elicit. In every case the output is an ordinary Hugging Face directory that
transformers and vLLM both load.
"""

import math
import os
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dvp.core.batch import Batch
from dvp.data.prompts import read_problems
from dvp.data.sources import GENERATORS
from dvp.data.stories import MARK, Story
from dvp.errors import DvpError
from dvp.experiment.base import (
    CONFIG_NAMES,
    HubBase,
    Pretrained,
    PretrainedArchitecture,
    TrainedBase,
    WheelBase,
    stored_sizes,
)
from dvp.experiment.config import Experiment
from dvp.experiment.data import GeneratedSource
from dvp.experiment.tools import Tools
from dvp.files import atomic_path, checksums
from dvp.hub import download
from dvp.progress import Progress
from dvp.training.models import check_model
from dvp.training.wheel import convert_wheel

END = "<|endoftext|>"
PAD = "<|pad|>"
MOST_TRIES = 10  # problems generated per problem wanted, as those that are evaluated are left out
MICRO_BATCH_TOKENS = 2048  # per pass of the warm start


def make_base(experiment: Experiment, data: Path, folder: Path) -> dict:
    """Write the base model to `folder` (data: the prepared data's folder) and return its manifest.

    Raises DvpError for a model that cannot be used (see `check_model`), or when the hub or the index cannot be reached.
    """
    base = experiment.base
    details = _train(experiment, base, data, folder) if isinstance(base, TrainedBase) else _fetch(base, folder)
    if not isinstance(base, TrainedBase) and base.architecture:
        _check_architecture(base.architecture, folder)
    return {"kind": base.kind, **details, "files": checksums(folder)}


def _check_architecture(expected: PretrainedArchitecture, folder: Path) -> None:
    """Raise DvpError, naming the first key, unless the model in `folder` has the shape that the experiment states."""
    stored = stored_sizes(folder)
    for key, value in expected.model_dump(exclude_none=True).items():
        if stored[key] != value:
            name = CONFIG_NAMES.get(key, key)
            raise DvpError(f"base.architecture.{key}: {value}, but {folder}/config.json has {name} {stored[key]}")


def train_tokenizer(documents: Iterator[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with each digit on its own.

    Raises DvpError if the documents cannot fill the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() != vocabulary_size:
        raise DvpError(
            f"base.tokenizer: the documents fill only {tokenizer.get_vocab_size()} of {vocabulary_size} entries; "
            "ask for more documents or a smaller vocabulary"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def _train(experiment: Experiment, base: TrainedBase, data: Path, folder: Path) -> dict:
    source = experiment.sources[base.source]
    evaluated = set(read_problems(data / "eval.parquet")["problem"])
    stories = _fresh(source, base, evaluated)
    tokenizer = train_tokenizer(
        (
            "".join([f"{story.problem}\n", *(text for text, _ in segments(story.solution, experiment.tools))])
            for story in stories[: base.tokenizer.documents]
        ),
        base.tokenizer.vocabulary_size,
    )
    torch.manual_seed(base.seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=base.tokenizer.vocabulary_size,
            **{CONFIG_NAMES.get(key, key): value for key, value in base.architecture.model_dump().items()},
            # 0.02, the default, is meant for thousands of dimensions; at a hundred it costs twice the steps and leaves
            # a model whose loss is so sharp that RL cannot move it.
            initializer_range=base.architecture.hidden_size**-0.5,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).float()
    loss = _warm_start(experiment, base, model, tokenizer, stories)
    with atomic_path(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "warm_start_final_loss": loss,
        "warm_start": base.warm_start.model_dump(mode="json"),
    }


def _fresh(source: GeneratedSource, base: TrainedBase, evaluated: set[str]) -> list[Story]:
    """Generate stories for the tokenizer and the warm start, none of which is an evaluation problem.

    Raises DvpError if too few of the generated problems are not evaluated.
    """
    wanted = max(base.tokenizer.documents, base.warm_start.steps * base.warm_start.batch_size)
    # Another stream than the experiment's problems, which use source.seed itself.
    generate = GENERATORS[source.generator].generate
    stories = generate(MOST_TRIES * wanted, seed=source.seed + 1_000_003, steps=tuple(source.steps))
    found = list(islice((story for story in stories if story.problem not in evaluated), wanted))
    if len(found) < wanted:
        raise DvpError(
            f"sources.{base.source}: of {MOST_TRIES * wanted} problems only {len(found)} are not evaluated; "
            "evaluate fewer, or make them longer (steps)"
        )
    return found


def _warm_start(
    experiment: Experiment,
    base: TrainedBase,
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    stories: list[Story],
) -> float:
    """Train the model on prompt + worked solution, loss on the solution; return the mean loss of the last 20 steps."""
    settings = base.warm_start
    # The model was made on the CPU, so that it starts with the same weights everywhere.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    careless = GENERATORS[experiment.sources[base.source].generator].careless
    rng = random.Random(base.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    warmup = max(1, settings.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / settings.steps)),
    )
    losses = []
    progress = Progress("warm start", settings.steps)
    for step in range(settings.steps):
        examples = stories[step * settings.batch_size : (step + 1) * settings.batch_size]
        prompts = [experiment.data.prompt_template.replace("{problem}", story.problem) for story in examples]
        answers = [
            careless(story, settings.careless_error, rng)
            if rng.random() < settings.careless_fraction
            else story.solution
            for story in examples
        ]
        answer_ids, written = _encoded([segments(answer, experiment.tools) for answer in answers], tokenizer)
        batch = Batch.collate(tokenizer(prompts)["input_ids"], answer_ids, tokenizer.pad_token_id, written)
        optimizer.zero_grad()
        loss = 0.0
        for rows_b in batch.micro_batches(MICRO_BATCH_TOKENS):
            part = batch.rows(rows_b).to(device)
            # Right padding under a causal mask: no real position sees a pad, so no attention mask is needed.
            hidden = model.model(part.tokens_BT).last_hidden_state[:, :-1]
            used = part.response_BT[:, 1:]
            sum_ = torch.nn.functional.cross_entropy(
                model.lm_head(hidden[used]), part.tokens_BT[:, 1:][used], reduction="sum"
            )
            mean = sum_ / batch.response_BT.sum()
            mean.backward()
            loss += mean.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss)
        progress.step(step + 1, f"loss {losses[-1]:.3f}")
    return sum(losses[-20:]) / len(losses[-20:])


def segments(solution: str, tools: Tools | None) -> list[tuple[str, bool]]:
    """Split a worked solution, as written with a tool, into parts that are encoded separately, each with who writes it.

    That is True for the model, and False for an answer of the tool with its delimiters, as dvp.rollout.turns puts them.
    Without a tool there is one part.
    """
    if tools is None:
        return [(MARK.sub(r"\1 = \2.", solution), True)]
    parts, start, own = [], 0, ""
    for mark in MARK.finditer(solution):
        own += solution[start : mark.start()] + tools.call[0] + mark[1] + tools.call[1]
        parts += [(own, True), *((part, False) for part in (tools.answer[0], mark[2], tools.answer[1]))]
        start, own = mark.end(), ""
    return [*parts, (solution[start:], True)]


def _encoded(
    solutions: list[list[tuple[str, bool]]], tokenizer: PreTrainedTokenizerFast
) -> tuple[list[list[int]], list[list[bool]]]:
    """Return the token ids of solutions in segments, each ended, and which of them the model writes."""
    ids = iter(tokenizer([text for parts in solutions for text, _ in parts])["input_ids"])
    tokens, written = [], []
    for parts in solutions:
        pairs = [(token, own) for _, own in parts for token in next(ids)]
        tokens.append([*(token for token, _ in pairs), tokenizer.eos_token_id])
        written.append([*(own for _, own in pairs), True])
    return tokens, written


def _fetch(base: Pretrained, folder: Path) -> dict:
    """Link an existing model into `folder`, file by file: weights stay where they are."""
    if isinstance(base, HubBase):
        elsewhere = "download it elsewhere and use `base: {kind: local, path: FOLDER}`"
        try:
            source = download(base.path, base.revision, elsewhere)
        except DvpError as error:
            raise DvpError(f"base.path: {error}") from None
        details = {"path": base.path, "revision": base.revision}
    elif isinstance(base, WheelBase):
        source = convert_wheel(base)
        details = {"path": str(source), **base.model_dump(include={"package", "version", "sha256", "file", "credit"})}
    else:
        source = Path(base.path).resolve()
        details = {"path": str(source)}
    check_model(source)
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        for file in sorted(source.iterdir()):
            if file.suffix in (".json", ".safetensors", ".txt", ".jinja"):
                os.symlink(file.resolve(), temporary / file.name)
    return details
