"""What one GPU says of this project in ten minutes, as JSON: the head, the trainer, `dvp mismatch` at Qwen's V.

    PYTHONPATH=src python benchmarks/gpu.py

Models are made on the spot, with random weights. What no time is left for is left out, and what fails says why and ends
nothing else. With --tiny it tries itself, also on a CPU.
"""

import argparse
import gc
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import head as bench
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from dvp.core.batch import Batch
from dvp.core.safe_vocabulary import FixedRho
from dvp.experiment.training import TrainingConfig
from dvp.files import write_json
from dvp.provenance import git_commit, processor
from dvp.training.backend import Trainer
from dvp.training.base import train_tokenizer

ROOT, DEVICE = Path(__file__).parents[1], "cuda" if torch.cuda.is_available() else "cpu"
# Qwen3-8B's layers, the whole of Qwen3-0.6B: hidden size, heads, those of keys and values, intermediate size.
LAYERS, WHOLE, TINY = (4096, 32, 8, 12288), (1024, 16, 8, 3072), (64, 2, 1, 96)
SECONDS = 560  # at most, as a GPU is lent for ten minutes
SAFE = FixedRho(math.exp(bench.LOG_RHO))


def make_model(folder: Path, shape: tuple[int, ...], layers: int) -> Path:
    """A Qwen3 of random weights, which have preferences, with a tokenizer of bytes."""
    tokenizer = train_tokenizer(iter(["what is 1 and 2?"]), 258)
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    options = dict(zip(names, shape, strict=True)) | {"num_hidden_layers": layers, "head_dim": 128}
    options |= {"vocab_size": 500 if shape is TINY else 151_936, "tie_word_embeddings": shape is not LAYERS}
    options |= {"initializer_range": 2 * shape[0] ** -0.5, "eos_token_id": tokenizer.eos_token_id}
    with torch.device(DEVICE):
        AutoModelForCausalLM.from_config(Qwen3Config(**options), dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def head(tiny: bool, _folder: Path, _until: float) -> Iterator[dict]:
    """Three bare products, the head each way, whole logits, and Liger's head where it is installed."""
    sizes = [*bench.SIZES["cuda"], bench.Size(9216, 1024), bench.Size(9216, 2048)]
    for size in [bench.Size(48, 8, 300)] if tiny else sizes:
        variants = bench.backward_variants(*bench.problem(size, torch.bfloat16, DEVICE))
        yield {"shape": size._asdict()} | bench.measure("forward + backward", torch.bfloat16, variants, 3, DEVICE)


def trainer(tiny: bool, folder: Path, _until: float) -> Iterator[dict]:
    """The trainer's passes; those of six layers less those of two are of four layers alone."""
    settings = {"steps": 1, "prompts_per_step": 1, "group_size": 1, "checkpoint_every": 1, "learning_rate": 1e-6}
    settings |= {"tokens_per_micro_batch": 9216, "max_response_tokens": 9000, "gradient_checkpointing": True}
    for layers in (1, 2) if tiny else (2, 6):
        model = make_model(folder / f"layers-{layers}", TINY if tiny else LAYERS, layers)
        for name in ("zero1_bf16", "zero3_bf16"):
            options = json.loads((ROOT / f"config/deepspeed/{name}.json").read_text(encoding="utf-8"))
            made = Trainer(model, TrainingConfig(**settings, deepspeed=name), options)
            yield from ({"deepspeed": name, "layers": layers} | found for found in _passes(made, tiny))
            del made
            gc.collect()  # a trainer is a circle of references
            torch.cuda.empty_cache()


def _passes(made: Trainer, tiny: bool) -> Iterator[dict]:
    for rows, length in ((2, 64),) if tiny else ((1, 9216), (2, 4608), (8, 1152)):
        tokens, prompt = torch.randint(5, 258, (rows, length)).tolist(), length // 8
        batch = Batch.collate([row[:prompt] for row in tokens], [row[prompt:] for row in tokens], 0)
        given_N = torch.full((rows * (length - prompt),), 1e-3)
        update = partial(made.forward_backward, batch, SAFE, attrgetter("objective"), coefficient_N=given_N)
        variants = {"score": partial(made.score, batch, SAFE), "update": partial(update, last=False)}
        variants |= {"update with the optimiser's step": partial(update, last=True)}
        yield {"rows": rows, "length": length} | bench.measure("trainer", torch.bfloat16, variants, 3, DEVICE)


def mismatch(tiny: bool, folder: Path, until: float) -> Iterator[dict]:
    """`dvp mismatch` of a whole model, an engine at a time."""
    model, problems = make_model(folder / "whole", TINY if tiny else WHOLE, 2 if tiny else 28), folder / "sums.jsonl"
    lines = [json.dumps({"problem": f"what is {one} and {one}?", "answer": str(2 * one)}) for one in range(8)]
    problems.write_text("\n".join(lines) + "\n", encoding="utf-8")
    size = ["--count", 2, "--responses", 2, "--response-tokens", 8] if tiny else ["--response-tokens", 256]
    for engine in ("bf16",) if tiny else ("bf16", "bf16_fp8kv"):
        asked = ["--model", model, "--engine", engine, "--problems", problems, "--output", folder / engine, *size]
        command = [sys.executable, "-m", "dvp.cli", "mismatch", *map(str, asked)]
        began = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=until - began, check=False)
        said = (done.stderr if done.returncode else done.stdout)[-4000:].splitlines()
        yield {"engine": engine, "status": done.returncode, "seconds": time.monotonic() - began, "said": said}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, metavar="FILE", default=Path("results/bench/gpu.json"))
    parser.add_argument("--tiny", action="store_true", help="sizes that any machine computes at once")
    asked = parser.parse_args()
    until = time.monotonic() + SECONDS
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else processor()
    result: dict = {"device": device, "tiny": asked.tiny, "git_commit": git_commit()}
    with TemporaryDirectory() as folder:
        for part in (head, trainer, mismatch):
            result[name := part.__name__] = []
            try:
                for finding in part(asked.tiny, Path(folder), until):
                    result[name].append(finding)
                    if time.monotonic() > until:
                        raise TimeoutError(f"{SECONDS} s are over")
            except Exception as error:  # whatever a GPU has against it, the next part goes on
                result[name].append({"failed": " ".join(f"{type(error).__name__}: {error}".split())[:300]})
            write_json(asked.output, result)
            print(f"{name}: {json.dumps(result[name], indent=1)}", flush=True)


if __name__ == "__main__":
    main()
