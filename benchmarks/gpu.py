"""Measure this project on one GPU in ten minutes: a line of JSON for each case, the most important first.

    PYTHONPATH=src python benchmarks/gpu.py

Each case is a process of its own with a time limit, and the parent does not use CUDA, so that all GPU memory is free
for the next case. A line is written whole or not at all, even if the benchmark is killed. Models are created with
random weights. With --tiny, every case that needs no CUDA runs at sizes for a CPU, with the same engine and trainer.
"""

import argparse
import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# Layers of Qwen3-8B, whole Qwen3-0.6B, tiny: hidden size, heads, key-value heads, intermediate size.
LAYERS, WHOLE, TINY = (4096, 32, 8, 12288), (1024, 16, 8, 3072), (64, 2, 1, 96)
LOG_RHO = -13.0
DENSE = 33  # bytes per logit of the dense path's backward pass: 37 to 41 GB for 8,192 tokens
RESULT = "found: "  # prefix of the line of a case's output that is its result
TINY_LIMIT = 900  # seconds for any case on a CPU
THREADS = str(len(os.sched_getaffinity(0)))


class Place(NamedTuple):
    """Settings of a run: whether sizes are tiny, and a folder that all cases share."""

    tiny: bool
    folder: Path


class SkippedError(Exception):
    """Raised where a case cannot run; the message says why."""


class Case(NamedTuple):
    """A measurement, and the seconds that it may take on a GPU."""

    measure: Callable[[Place], dict]
    limit: float


def need_cuda() -> None:
    """Raise SkippedError if there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise SkippedError("needs CUDA")


def free_bytes() -> int:
    """Return the free bytes of the GPU's memory, or of this machine's if there is no GPU."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def made_model(place: Place, name: str, shape: tuple[int, ...], layers: int) -> Path:
    """Create a Qwen3 with random weights and a tokenizer of bytes, once for all cases; return its folder.

    The weights are large enough for distributions that are far from uniform.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from dvp.training.base import train_tokenizer

    folder, part = place.folder / name, place.folder / f"{name}.{os.getpid()}"
    if folder.exists():
        return folder
    shape = TINY if place.tiny else shape
    tokenizer = train_tokenizer(iter(["what is 1 and 2?"]), 258)
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    options = dict(zip(names, shape, strict=True)) | {"num_hidden_layers": layers, "head_dim": 128}
    options |= {"vocab_size": 500 if place.tiny else 151_936, "tie_word_embeddings": shape is not LAYERS}
    options |= {"initializer_range": 2 * shape[0] ** -0.5, "eos_token_id": tokenizer.eos_token_id}
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(Qwen3Config(**options), dtype=torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder)
    return folder


def whole(place: Place) -> Path:
    """Create a model of Qwen3-0.6B's sizes and return its folder."""
    return made_model(place, "whole", WHOLE, 2 if place.tiny else 28)


def environment(place: Place) -> dict:
    """Describe device, commit and versions, and measure a matrix product and a copy."""
    import torch
    from torch.utils.benchmark import timer  # waits for the GPU

    from dvp.provenance import device, git_commit

    on_gpu = torch.cuda.is_available()
    options = {"device": "cuda" if on_gpu else "cpu", "dtype": torch.bfloat16}
    size = 256 if place.tiny else 8192
    a, b = torch.randn(size, size, **options), torch.empty(size * size * 8, **options)
    seconds = {}
    for name, function in (("product", lambda: a @ a), ("copy", b.clone)):
        function()
        began = timer()
        for _ in range(5):
            function()
        seconds[name] = (timer() - began) / 5
    of_gpu = {}
    if on_gpu:
        properties = torch.cuda.get_device_properties(0)
        of_gpu = {"bytes": properties.total_memory, "capability": torch.cuda.get_device_capability()}
        of_gpu |= {"driver": torch._C._cuda_getDriverVersion(), "cudnn": torch.backends.cudnn.version()}
    return {
        "device": device(),
        "git_commit": git_commit(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]},
        **of_gpu,
        "bf16_tflops": 2 * size**3 / seconds["product"] / 1e12,
        "copy_tb_s": 2 * b.nbytes / seconds["copy"] / 1e12,
    }


def gpu_tests(_place: Place) -> dict:
    """Run the tests that are skipped without a GPU, and return the outcome of each."""
    need_cuda()
    import pytest

    class Outcomes(dict):
        def pytest_runtest_logreport(self, report):
            if report.when == "call" or not report.passed:
                self[report.nodeid] = report.outcome

    outcomes = Outcomes()
    files = [str(ROOT / f"tests/core/test_{name}.py") for name in ("head", "rows")]
    pytest.main(["-q", "-p", "no:cacheprovider", "-k", "a_gpu", *files], plugins=[outcomes])
    return {"tests": outcomes}


def mismatch(place: Place, engine: str, backend: str | None = None) -> dict:
    """Run `dvp mismatch` on the whole model with an engine.

    backend : vLLM's attention backend instead of the project's choice; CUDA_HOME is then unset, without which
        FlashInfer's must compile.
    """
    if backend is not None:
        need_cuda()
        os.environ.pop("CUDA_HOME", None)
        from dvp.rollout.vllm import configure_environment

        configure_environment(int(THREADS))
        import vllm

        made = vllm.LLM
        vllm.LLM = lambda *given, **options: made(*given, **options | {"attention_backend": backend})
    from dvp import cli

    model, problems = whole(place), place.folder / "sums.jsonl"
    lines = [json.dumps({"problem": f"what is {one} and {one}?", "answer": str(2 * one)}) for one in range(8)]
    problems.write_text("\n".join(lines) + "\n", encoding="utf-8")
    output = place.folder / f"mismatch-{os.getpid()}"
    asked = ["--model", model, "--engine", engine, "--problems", problems, "--output", output, "--threads", THREADS]
    size = ["--count", 2, "--responses", 2, "--response-tokens", 8] if place.tiny else ["--response-tokens", 256]
    if cli.main(["mismatch", *map(str, [*asked, *size])]):
        raise SystemExit(2)  # it has said why
    found = json.loads((output / engine / "mismatch.json").read_text(encoding="utf-8"))
    return (
        {"attention": backend}
        | {key: found[key] for key in found if isinstance(found[key], int | float)}
        | {"kl": found["kl"]}
    )


def preflight(place: Place, engine: str) -> dict:
    """Run the preflight of `smoke_gpu` with responses of 512 tokens."""
    from dvp.experiment.loading import load_experiment, write_resolved

    folder = place.folder / "smoke_gpu"
    if not folder.exists():
        loaded = load_experiment("smoke_gpu")
        training, base = {"max_response_tokens": 512}, {}
        if place.tiny:
            training |= {"max_response_tokens": 16, "prompts_per_step": 2, "group_size": 2}
            sizes = {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate_size": 96}
            base["architecture"] = loaded.base.architecture.model_copy(update=sizes)
            tokenizer = {"vocabulary_size": 512, "documents": 2000}
            base["tokenizer"] = loaded.base.tokenizer.model_copy(update=tokenizer)
        changed = {"training": loaded.training.model_copy(update=training)}
        changed |= {"base": loaded.base.model_copy(update=base)}
        write_resolved(loaded.model_copy(update=changed), folder)
    config = ["--config", str(folder / "config.yaml")]
    verbs = [["prepare", *config], ["base", *config, "--threads", THREADS]]
    if (folder / "base/manifest.json").exists():
        verbs = []
    for verb in (*verbs, ["preflight", *config, "--engine", engine, "--threads", THREADS]):
        done = subprocess.run([sys.executable, "-m", "dvp.cli", *verb], stdout=sys.stderr, check=False)
        if done.returncode:
            break
    for name in ("preflight.json", "report.json"):
        with suppress(OSError):
            found = json.loads((folder / f"preflight/engine~{engine}/{name}").read_text(encoding="utf-8"))
            return {"passed": found["passed"], "checks": found["checks"], "seconds_each": found["seconds"]}
    raise SystemExit(2)  # it has said why


def decode(place: Place, processor: bool) -> dict:
    """Measure sampling with a fixed ρ at several batch sizes, by vLLM's min_p or by the project's logits processor."""
    from dvp.rollout.vllm import VllmEngine, configure_environment

    configure_environment(int(THREADS))
    from dvp.core.safe_vocabulary import FixedRho
    from dvp.experiment.training import EngineConfig
    from dvp.rollout.engine import Sampling

    sizes, tokens = ((2, 4), 8) if place.tiny else ((64, 128, 256), 256)
    rule = FixedRho(math.exp(LOG_RHO))
    engine = VllmEngine(
        whole(place),
        EngineConfig(dtype="bfloat16"),
        max_model_len=tokens + 16,
        max_num_seqs=max(sizes),
        seed=0,
        rules=[rule],
        report_sets=processor,
    )
    asked = Sampling(max_tokens=tokens, safe_vocabulary=rule, to_the_end=True)
    speeds = {}
    for size in (sizes[0], *sizes):  # the first call compiles
        prompts = [[5 + row % 200, 7, 11] for row in range(size)]
        began = time.perf_counter()
        engine.generate(prompts, asked, list(range(size)))
        speeds[size] = size * tokens / (time.perf_counter() - began)
    return {"tokens_per_second": speeds}


def trainer(place: Place, deepspeed: str, cudnn: bool) -> dict:
    """Measure the trainer's passes over six of Qwen3-8B's layers, with cuDNN's attention or without, as with vLLM."""
    if cudnn:
        need_cuda()
    import head as bench
    import torch

    from dvp.core.batch import Batch
    from dvp.core.safe_vocabulary import FixedRho
    from dvp.experiment.training import TrainingConfig
    from dvp.training.backend import Trainer

    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    settings = {"steps": 1, "prompts_per_step": 1, "group_size": 1, "checkpoint_every": 1, "learning_rate": 1e-6}
    settings |= {"tokens_per_micro_batch": 9216, "max_response_tokens": 9000, "gradient_checkpointing": True}
    model = made_model(place, "layers", LAYERS, 2 if place.tiny else 6)
    options = json.loads((ROOT / f"config/deepspeed/{deepspeed}.json").read_text(encoding="utf-8"))
    made, safe = Trainer(model, TrainingConfig(**settings, deepspeed=deepspeed), options), FixedRho(math.exp(LOG_RHO))
    passes = []
    for rows, length in ((2, 64),) if place.tiny else ((1, 9216), (2, 4608), (8, 1152)):
        tokens, prompt = torch.randint(5, 258, (rows, length)).tolist(), length // 8
        batch = Batch.collate([row[:prompt] for row in tokens], [row[prompt:] for row in tokens], 0)
        given_N = torch.full((rows * (length - prompt),), 1e-3)
        update = partial(made.forward_backward, batch, safe, attrgetter("objective"), coefficient_N=given_N)
        variants = {"score": partial(made.score, batch, safe), "update": partial(update, last=False)}
        variants |= {"update with the optimiser's step": partial(update, last=True)}
        found = bench.measure("trainer", torch.bfloat16, variants, 3, made.device.type)
        passes.append({"rows": rows, "length": length} | found)
    return {"passes": passes}


def head(place: Place, tokens: int, hidden: int, vocabulary: int) -> dict:
    """Measure bare products, the head's variants, whole logits if they fit in memory, and Liger's head if installed."""
    import head as bench
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = bench.Size(48, 8, 300) if place.tiny else bench.Size(tokens, hidden, vocabulary)
    variants = bench.backward_variants(*bench.problem(size, torch.bfloat16, device))
    left_out = {}
    if (dense := DENSE * size.tokens * size.vocabulary) > (free := free_bytes()):
        del variants["dense"]
        left_out = {"left_out": f"dense: needs {dense / 1e9:.0f} GB, free are {free / 1e9:.0f}"}
    return (
        {"shape": size._asdict()} | bench.measure("forward + backward", torch.bfloat16, variants, 3, device) | left_out
    )


FP8 = {"engine": "bf16_fp8kv"}
CASES = {
    "environment": Case(environment, 60),
    "tests of a GPU": Case(gpu_tests, 90),
    "mismatch, bf16": Case(partial(mismatch, engine="bf16"), 120),
    "mismatch, fp32": Case(partial(mismatch, engine="fp32"), 120),
    "mismatch, 8-bit cache, TRITON_ATTN": Case(partial(mismatch, **FP8, backend="TRITON_ATTN"), 120),
    "mismatch, 8-bit cache, FLASHINFER": Case(partial(mismatch, **FP8, backend="FLASHINFER"), 120),
    "preflight, bf16": Case(partial(preflight, engine="bf16"), 400),
    "preflight, fp32": Case(partial(preflight, engine="fp32"), 300),
    "decode, min_p": Case(partial(decode, processor=False), 120),
    "decode, processor": Case(partial(decode, processor=True), 120),
    **{
        f"trainer, {name}, cuDNN attention {'on' if cudnn else 'off'}": Case(
            partial(trainer, deepspeed=f"{name}_bf16", cudnn=cudnn), 90
        )
        for name in ("zero1", "zero3")
        for cudnn in (False, True)
    },
    **{
        f"head, {' x '.join(map(str, size))}": Case(
            partial(head, tokens=size[0], hidden=size[1], vocabulary=size[2]), 60
        )
        for size in ((8192, 4096, 151_936), (4096, 4096, 131_072), (9216, 1024, 151_936), (9216, 2048, 151_936))
    },
}


def run_case(name: str, place: Place) -> None:
    """Measure a case in this process and print its result as a line that begins with RESULT."""
    try:
        found = {"status": "ok"} | CASES[name].measure(place)
    except SkippedError as reason:
        found = {"status": f"skipped: {reason}"}
    print(f"\n{RESULT}{json.dumps(found)}", flush=True)


def process(command: list[str], limit: float) -> dict:
    """Run a command that prints a result as `run_case` does, and return it with the seconds it took.

    After `limit` seconds the command and all that it has started are killed.
    """
    began = time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    child = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
    timed_out = False
    try:
        said = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    if timed_out:
        said = child.communicate()
    if results := [line for line in said[0].splitlines() if line.startswith(RESULT)]:
        found = json.loads(results[-1].removeprefix(RESULT))
    else:
        status = f"timed out after {limit:g} s" if timed_out else f"failed with status {child.returncode}"
        found = {"status": status, "said": "".join(said)[-2000:].splitlines()[-12:]}
    return found | {"seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, metavar="FILE", default=Path("results/bench/gpu.jsonl"))
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases with this in their name")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent process
        run_case(asked.case, Place(asked.tiny, asked.folder))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder, open(asked.output, "wb", buffering=0) as file:
        for name in (name for name in CASES if asked.only in name):
            command = [sys.executable, __file__, "--case", name, "--folder", folder, *["--tiny"] * asked.tiny]
            found = process(command, TINY_LIMIT if asked.tiny else CASES[name].limit)
            line = json.dumps({"case": name, "tiny": asked.tiny} | found) + "\n"
            file.write(line.encode())  # one write call, so that the line is whole or absent
            print(line, end="", flush=True)


if __name__ == "__main__":
    main()
