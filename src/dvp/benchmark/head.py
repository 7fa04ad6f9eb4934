"""What the head costs, as ratios within one run: `make bench`.

The head is compared with the bare matrix products that it cannot do without, with the dense path that trainers
commonly take (whole logits, a pass for each statistic), and with the chunked formulation that fused heads fall back to.
Variants take turns, round by round, so that a busy machine slows all of them; ratios are medians over the rounds.

It needs nothing but torch (with triton on a GPU), so that it runs wherever there is a GPU for a few minutes:

    PYTHONPATH=src python -m dvp.benchmark.head --device cuda

With `--profile` it says instead in which kernels the head's time goes.

Shape suffixes: N flattened tokens, V vocabulary, H hidden.
"""

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch

from dvp.core.advantages import optimal_token_proxy
from dvp.core.diagnostics import mismatch_metrics
from dvp.core.head import token_statistics
from dvp.errors import DvpError
from dvp.provenance import git_commit, processor

CHUNK = 1024  # rows at a time in the chunked formulations
ANCHORS = """Reported by others, not measured here: one H200, bfloat16, forward + backward, N = H = 4,096,
V = 131,072: Liger's fused head 24.9 ms and 1.3 GiB, verl's torch path 50.9 ms and 4.0 GiB."""


class MinP:
    """The rule of dvp.core.safe_vocabulary.FixedRho, whose settings model would need pydantic."""

    def __init__(self, rho: float):
        self.rho = rho

    def log_rho(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """See SafeVocabulary.log_rho."""
        return logits_NV.new_full((len(logits_NV),), math.log(self.rho), dtype=torch.float32)


RHO = MinP(math.exp(-13))


@dataclass(frozen=True)
class Size:
    """How large the problem is: N tokens of H hidden features over a vocabulary of V."""

    tokens: int
    hidden: int
    vocabulary: int = 151_936  # Qwen's


@dataclass(frozen=True)
class Case:
    """Variants of one computation on one problem, of which the first is what the others are divided by."""

    name: str
    dtype: torch.dtype
    size: Size
    variants: Callable[..., dict[str, Callable[[], object]]]
    """Made from hidden states, weight and targets."""
    frequencies: bool = False
    """See `problem`."""


def cases(main: Size, anchors: Size | None, device: str) -> list[Case]:
    """What is measured on a device; `anchors` : the size at which others have reported their times."""
    both = "forward + backward"
    listed = [
        Case("forward", torch.bfloat16, main, forward_variants),
        Case(both, torch.bfloat16, main, backward_variants),
        Case(f"{both}, few safe", torch.bfloat16, main, pruned_variants, frequencies=True),
    ]
    if device == "cpu":
        listed = [
            Case("forward", torch.float32, main, forward_variants),
            Case(both, torch.float32, main, backward_variants),
            Case(f"{both}, few safe", torch.float32, main, pruned_variants, frequencies=True),
            *listed[:2],
        ]
    return (
        listed if anchors is None else [*listed, Case(f"{both}, anchors'", torch.bfloat16, anchors, backward_variants)]
    )


SIZES = {"cpu": (Size(2048, 1024), None), "cuda": (Size(8192, 4096), Size(4096, 4096, 131_072))}


def bench(output: Path, rounds: int, device: str) -> None:
    """Run every case on the device ("cpu" or "cuda"); print the table, write the JSON file.

    Raises DvpError if there is no such device.
    """
    _check(device)
    measured = []
    for case in cases(*SIZES[device], device):
        inputs = problem(case.size, case.dtype, device, frequencies=case.frequencies)
        warm_up(*inputs)
        variants = case.variants(*inputs)
        measured.append({"shape": asdict(case.size)} | measure(case.name, case.dtype, variants, rounds, device))
        del inputs, variants  # before the next one takes as much
    result = {
        "device": _device(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "triton": _triton(), "python": platform.python_version()},
        "git_commit": git_commit(),
        "rounds": rounds,
        "cases": measured,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(format_table(result))
    print(f"\nwritten to {output}")


def profile(device: str) -> str:
    """The kernels of one pass of the head each way, longest first, those of 1 % and more: text.

    Raises DvpError if there is no such device.
    """
    _check(device)
    size, dtype = SIZES[device][0], torch.float32 if device == "cpu" else torch.bfloat16
    inputs = problem(size, dtype, device)
    lines = [f"{_device(device)}, N = {size.tokens:,}, H = {size.hidden:,}, V = {size.vocabulary:,}, {dtype}"]
    for name, variants in (("forward", forward_variants), ("forward + backward", backward_variants)):
        head = variants(*inputs)["head"]
        head()  # compiles
        with torch.profiler.profile() as run:
            seconds = _time(head, device)
        on = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
        kernels = [
            (event.self_device_time_total if device == "cuda" else event.self_cpu_time_total, event.count, event.key)
            for event in run.key_averages()
            if event.device_type == on
        ]
        total = sum(microseconds for microseconds, _, _ in kernels)
        lines += ["", f"{name}: {total / 1e3:.2f} ms of kernels in {1e3 * seconds:.2f} ms"]
        lines += [
            f"{microseconds / 1e3:>9.2f} ms {count:>5} ×  {key[:100]}"
            for microseconds, count, key in sorted(kernels, reverse=True)
            if microseconds >= 0.01 * total
        ]
    return "\n".join(lines)


def _check(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise DvpError("--device cuda: torch finds no GPU here")


def _device(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else processor()


def format_table(result: dict) -> str:
    """The ratios as text, one line a variant: time over the bare products, median (lowest to highest), memory."""
    lines = [f"{result['device']}, {result['threads']} threads; {result['rounds']} rounds"]
    shape = None
    for case in result["cases"]:
        if case["shape"] != shape:
            shape = case["shape"]
            lines += [
                "",
                f"N = {shape['tokens']:,} tokens, H = {shape['hidden']:,}, V = {shape['vocabulary']:,}",
                f"{'case':<40}{'variant':<34}{'seconds':>9}{'× bare':>8}{'(range)':>15}{'extra memory':>14}",
            ]
        for name, variant in case["variants"].items():
            low, high = min(variant["ratios"]), max(variant["ratios"])
            lines.append(
                f"{case['name'] + ', ' + case['dtype']:<40}{name:<34}{variant['seconds']:>9.3g}{variant['ratio']:>8.2f}"
                f"{f'({low:.2f}–{high:.2f})':>15}{variant['extra_mib']:>10,.0f} MiB"
            )
    return "\n".join([*lines, "", ANCHORS])


def problem(
    size: Size, dtype: torch.dtype, device: str, *, frequencies: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight and targets.

    The logits are noise with a standard deviation of 3: V_S is half of the vocabulary, another half in each row. With
    `frequencies` they are noise with one of 2 around −2 log rank, which assumes sure states and tokens of which most
    are rare in all of them: V_S is some hundred tokens, and a chunk's rows have a few thousand between them.
    """
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device, "dtype": dtype}
    hidden_NH = torch.randn(size.tokens, size.hidden, **options)
    deviation = 2 if frequencies else 3
    weight_VH = torch.randn(size.vocabulary, size.hidden, **options) * (deviation / math.sqrt(size.hidden))
    targets_N = torch.randint(size.vocabulary, (size.tokens,), generator=generator, device=device)
    if frequencies:
        hidden_NH[:, 0] = 1.0
        weight_VH[:, 0] = -2 * torch.arange(1, size.vocabulary + 1, device=device).log().to(dtype)
        targets_N %= 16
    return hidden_NH.requires_grad_(), weight_VH.requires_grad_(), targets_N


def warm_up(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor) -> None:
    """Compile what is compiled, and let libraries take the working memory that they keep."""
    statistics = token_statistics(hidden_NH[:2], weight_VH, targets_N[:2], safe=RHO)
    torch.autograd.grad(statistics.pruned_log_prob.sum(), (hidden_NH, weight_VH))


def forward_variants(hidden_NH, weight_VH, targets_N) -> dict[str, Callable[[], object]]:
    def method():
        """Everything that a run with DVP, OTB and the diagnostics asks of the head."""
        statistics = token_statistics(hidden_NH, weight_VH, targets_N, safe=RHO)
        log_ratio_1N = (statistics.pruned_log_prob - statistics.log_prob)[None]
        mismatch_metrics(log_ratio_1N, statistics.target_in_safe[None])
        return optimal_token_proxy(statistics.pruned_log_prob, statistics.pruned_sum_p_squared)

    variants = {
        "bare product": lambda: hidden_NH @ weight_VH.t(),
        "head": lambda: token_statistics(hidden_NH, weight_VH, targets_N, safe=RHO),
        **_in_fp32(
            lambda: token_statistics(hidden_NH, weight_VH, targets_N, safe=RHO, logits_dtype=torch.float32), hidden_NH
        ),
        "head + OTB + diagnostics": method,
        "dense": lambda: dense(hidden_NH, weight_VH, targets_N),
        "chunked log-prob and entropy": lambda: chunked(hidden_NH, weight_VH, targets_N, entropy=True),
        "chunked log-prob alone": lambda: chunked(hidden_NH, weight_VH, targets_N, entropy=False),
    }
    return {name: torch.no_grad()(variant) for name, variant in variants.items()}


def backward_variants(hidden_NH, weight_VH, targets_N) -> dict[str, Callable[[], object]]:
    def head(**options):
        statistics = token_statistics(hidden_NH, weight_VH, targets_N, safe=RHO, **options)
        return torch.autograd.grad(statistics.pruned_log_prob.sum(), (hidden_NH, weight_VH))

    return {
        "bare products": _bare_products(hidden_NH, weight_VH),
        "head": head,
        **_in_fp32(lambda: head(logits_dtype=torch.float32), hidden_NH),
    }


def pruned_variants(hidden_NH, weight_VH, targets_N) -> dict[str, Callable[[], object]]:
    """What leaving out the tokens that all rows prune saves."""

    def head(of_all: bool):
        statistics = token_statistics(hidden_NH, weight_VH, targets_N, safe=RHO)
        # The full log-prob has a gradient at every token, of size 0 here.
        loss = statistics.pruned_log_prob.sum() + (0 * statistics.log_prob.sum() if of_all else 0)
        return torch.autograd.grad(loss, (hidden_NH, weight_VH))

    return {
        "bare products": _bare_products(hidden_NH, weight_VH),
        "head": lambda: head(False),
        "head, nothing left out": lambda: head(True),
    }


def _bare_products(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> Callable[[], object]:
    """The logits, the logits again, and the products for both gradients."""

    @torch.no_grad()
    def bare():
        hidden_NH @ weight_VH.t()
        logits_NV = hidden_NH @ weight_VH.t()
        return logits_NV @ weight_VH, logits_NV.t() @ hidden_NH

    return bare


def _in_fp32(head: Callable[[], object], hidden_NH: torch.Tensor) -> dict[str, Callable[[], object]]:
    """`training.head_dtype: float32`, where that is not what the head does anyway."""
    return {"head, logits in float32": head} if hidden_NH.dtype == torch.bfloat16 else {}


def dense(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same statistics as trainers compute them from whole logits: log p, log p^mp, entropy and Σp²."""
    logits_NV = (hidden_NH @ weight_VH.t()).float()
    log_prob_N = logits_NV.log_softmax(dim=1).gather(1, targets_N[:, None])[:, 0]
    entropy_N = -(logits_NV.softmax(dim=1) * logits_NV.log_softmax(dim=1)).sum(dim=1)
    sum_p_squared_N = ((2 * logits_NV).logsumexp(dim=1) - 2 * logits_NV.logsumexp(dim=1)).exp()
    maximum_N1 = logits_NV.amax(dim=1, keepdim=True)
    masked_NV = torch.where(logits_NV >= maximum_N1 + math.log(RHO.rho), logits_NV, maximum_N1 - 50)
    pruned_log_prob_N = masked_NV.log_softmax(dim=1).gather(1, targets_N[:, None])[:, 0]
    return log_prob_N, pruned_log_prob_N, entropy_N, sum_p_squared_N


def chunked(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor, entropy: bool) -> torch.Tensor:
    """Log-probs, and entropies if asked for, some rows at a time in plain torch: what fused heads fall back to."""
    parts = []
    for hidden_nH, targets_n in zip(hidden_NH.split(CHUNK), targets_N.split(CHUNK), strict=True):
        logits_nV = (hidden_nH @ weight_VH.t()).float()
        lse_n = logits_nV.logsumexp(dim=1)
        columns = [logits_nV.gather(1, targets_n[:, None])[:, 0] - lse_n]
        if entropy:
            columns.append(lse_n - (logits_nV.softmax(dim=1) * logits_nV).sum(dim=1))
        parts.append(torch.stack(columns))
    return torch.cat(parts, dim=1)


def measure(name: str, dtype: torch.dtype, variants: dict[str, Callable], rounds: int, device: str) -> dict:
    """Time the variants in turns; the first one is what the others are divided by."""
    label = str(dtype).removeprefix("torch.")
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    extra = {}
    for turn in range(rounds + 1):
        print(f"{name}, {label}: {f'round {turn} of {rounds}' if turn else 'memory'}", file=sys.stderr)
        for variant, function in variants.items():
            if turn == 0:  # shows how much memory is needed, and is not timed
                extra[variant] = _peak_mib(function, device)
            else:
                seconds[variant].append(_time(function, device))
    bare = seconds[next(iter(variants))]
    ratios = {variant: [own / other for own, other in zip(seconds[variant], bare, strict=True)] for variant in variants}
    return {
        "name": name,
        "dtype": label,
        "variants": {
            variant: {
                "seconds": median(seconds[variant]),
                "ratio": median(ratios[variant]),
                "ratios": ratios[variant],
                "extra_mib": extra[variant],
            }
            for variant in variants
        },
    }


def _time(function: Callable, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = function()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    del result
    return seconds


def _peak_mib(function: Callable, device: str) -> float:
    """Memory that the function needs at its peak beyond what is there before, its result included."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark starts anew
    before = _status_kib("VmRSS")
    function()
    return (_status_kib("VmHWM") - before) / 2**10


def _status_kib(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise KeyError(key)


def _triton() -> str | None:
    try:
        return version("triton")
    except ImportError:
        return None


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the head against bare matrix products and the dense path.")
    parser.add_argument("--device", choices=SIZES, help="default: the GPU if there is one")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--output", type=Path, metavar="FILE", help="default: results/bench/DEVICE.json")
    what.add_argument("--profile", action="store_true", help="print the head's kernels, and measure nothing else")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="timed rounds of each case (default: 3)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected 1 or more")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if options.profile:
            print(profile(device))
            return
        bench(options.output or Path(f"results/bench/{device}.json"), options.rounds, device)
    except DvpError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
