"""What one GPU says of this project in ten minutes, as JSON: the head, the trainer, `dvp mismatch` at Qwen's V.

    PYTHONPATH=src python benchmarks/gpu.py

Models are made on the spot, with random weights. What no time is left for is left out, and what fails says why and ends
nothing else. With --tiny it tries itself, also on a CPU.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import head as bench
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from dvp.core.batch import Batch
from dvp.core.safe_vocabulary import FixedRho
from dvp.experiment.training import TrainingConfig
from dvp.files import write_json
from dvp.provenance import device as device_name
from dvp.provenance import git_commit, processor
from dvp.training.backend import Trainer
from dvp.training.base import train_tokenizer

ROOT, DEVICE = Path(__file__).parents[1], "cuda" if torch.cuda.is_available() else "cpu"
# Qwen3-8B's layers, the whole of Qwen3-0.6B: hidden size, heads, those of keys and values, intermediate size.
LAYERS, WHOLE, TINY = (4096, 32, 8, 12288), (1024, 16, 8, 3072), (64, 2, 1, 96)
SAFE = FixedRho(math.exp(bench.LOG_RHO))
WORDS = ("apples", "pears", "seven", "twelve", "minus", "hours", "a dozen", "twice", "thirty", "bananas", "coins") * 9


def make_model(folder: Path, shape: tuple[int, ...], layers: int) -> Path:
    """A Qwen3 of random weights, which have preferences, with a tokenizer of 300 entries."""
    tokenizer = train_tokenizer((f"what is {word} and {word[::-1]}?" for word in WORDS), 300)
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
    """Seconds and GiB of the trainer's passes; those of six layers less those of two are of four layers alone."""
    settings = {"steps": 1, "prompts_per_step": 1, "group_size": 1, "checkpoint_every": 1, "learning_rate": 1e-6}
    settings |= {"tokens_per_micro_batch": 9216, "max_response_tokens": 9000, "gradient_checkpointing": True}
    for layers in (1, 2) if tiny else (2, 6):
        model = make_model(folder / f"layers-{layers}", TINY if tiny else LAYERS, layers)
        for name in ("zero1_bf16", "zero3_bf16"):
            options = json.loads((ROOT / f"config/deepspeed/{name}.json").read_text(encoding="utf-8"))
            made = Trainer(model, TrainingConfig(**settings, deepspeed=name), options)
            for rows, length in ((2, 64),) if tiny else ((1, 9216), (2, 4608), (8, 1152)):
                tokens = torch.randint(5, 300, (rows, length)).tolist()
                batch = Batch.collate([row[: length // 8] for row in tokens], [row[length // 8 :] for row in tokens], 0)
                yield {"deepspeed": name, "layers": layers, "rows": rows, "length": length} | _passes(made, batch)


def _passes(made: Trainer, batch: Batch) -> dict:
    """Seconds of scoring, of an update's forward and backward pass, and of the optimiser; memory at the peak."""
    given_N = torch.ones(int(batch.response_BT.sum()))
    update = partial(made.forward_backward, batch, SAFE, lambda found: found.objective / len(given_N))
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = {"score": _median(partial(made.score, batch, SAFE)), "update": _median(partial(update, False, given_N))}
    found["optimiser"] = _median(partial(update, True, given_N)) - found["update"]
    return found | {"peak_gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else None}


def _median(function: Callable[[], object]) -> float:
    return median([bench._seconds(function) for _ in range(4)][1:])  # the first one compiles


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


PARTS = {part.__name__: part for part in (head, trainer, mismatch)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure what a GPU can say of this project in ten minutes.")
    parser.add_argument("--output", type=Path, metavar="FILE", default=Path("results/bench/gpu.json"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=560, metavar="N", help="at most (default: 560)")
    parser.add_argument("--tiny", action="store_true", help="sizes that any machine computes at once")
    asked = parser.parse_args()
    until = time.monotonic() + asked.seconds
    result = {"device": device_name() if DEVICE == "cuda" else processor(), "tiny": asked.tiny, "commit": git_commit()}
    with TemporaryDirectory() as folder:
        for name in asked.parts:
            result[name] = []
            try:
                for finding in PARTS[name](asked.tiny, Path(folder), until):
                    result[name].append(finding)
                    if time.monotonic() > until:
                        raise TimeoutError(f"{asked.seconds:g} s are over")
            except Exception as error:  # whatever a GPU has against it, the next part goes on
                result[name].append({"failed": " ".join(f"{type(error).__name__}: {error}".split())[:300]})
            write_json(asked.output, result)
            print(f"{name}: {json.dumps(result[name], indent=1)}", flush=True)


if __name__ == "__main__":
    main()
