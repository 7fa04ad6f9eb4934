"""What the head costs, as ratios within one run: `make bench`.

The head is compared with the bare matrix products that it cannot do without, with the dense path that trainers
commonly take (whole logits, a pass for each statistic), and with the chunked formulation that fused heads fall back to.
Variants take turns, round by round, so that a busy machine slows all of them; ratios are medians over the rounds.

Shape suffixes: N flattened tokens, V vocabulary, H hidden.
"""

import argparse
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from dvp.core.advantages import optimal_token_proxy
from dvp.core.diagnostics import mismatch_metrics
from dvp.core.head import token_statistics
from dvp.core.safe_vocabulary import FixedRho
from dvp.files import write_json
from dvp.provenance import git_commit

RHO = FixedRho(math.exp(-13))
VOCABULARY = 151_936  # Qwen's
CHUNK = 1024  # rows at a time in the chunked formulations


@dataclass(frozen=True)
class Size:
    """How large the problem is: N tokens of H hidden features."""

    tokens: int
    hidden: int


SIZES = {"cpu": Size(2048, 1024), "cuda": Size(8192, 4096)}
CASES = {
    "cpu": [("forward", torch.float32), ("forward + backward", torch.float32), ("forward", torch.bfloat16)],
    "cuda": [("forward", torch.bfloat16), ("forward + backward", torch.bfloat16)],
}


def bench(output: Path, rounds: int) -> None:
    """Run every case on the GPU if there is one, else on the CPU; print the table, write the JSON file."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = SIZES[device]
    cases = []
    for name, dtype in CASES[device]:
        problem = problem(size, dtype, device)
        warm_up(*problem)
        variants = forward_variants(*problem) if name == "forward" else backward_variants(*problem)
        cases.append(measure(name, dtype, variants, rounds, device))
        del problem, variants  # before the next one takes as much
    result = {
        "device": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "triton")} | {"python": platform.python_version()},
        "git_commit": git_commit(),
        "shape": {"tokens": size.tokens, "hidden": size.hidden, "vocabulary": VOCABULARY},
        "rounds": rounds,
        "cases": cases,
    }
    write_json(output, result)
    print(format_table(result))
    print(f"\nwritten to {output}")


def format_table(result: dict) -> str:
    """The ratios as text, one line a variant: time over the bare products, median (lowest to highest), memory."""
    shape = result["shape"]
    lines = [
        f"{result['device']}, {result['threads']} threads; N = {shape['tokens']:,} tokens, H = {shape['hidden']:,}, "
        f"V = {shape['vocabulary']:,}; {result['rounds']} rounds",
        "",
        f"{'case':<30}{'variant':<34}{'seconds':>9}{'× bare':>8}{'(range)':>15}{'extra memory':>14}",
    ]
    for case in result["cases"]:
        for name, variant in case["variants"].items():
            low, high = min(variant["ratios"]), max(variant["ratios"])
            lines.append(
                f"{case['name'] + ', ' + case['dtype']:<30}{name:<34}{variant['seconds']:>9.3g}{variant['ratio']:>8.2f}"
                f"{f'({low:.2f}–{high:.2f})':>15}{variant['extra_mib']:>10,.0f} MiB"
            )
    return "\n".join(lines)


def problem(size: Size, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with a standard deviation of 3, so that V_S is neither everything nor a handful."""
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device, "dtype": dtype}
    hidden_NH = torch.randn(size.tokens, size.hidden, **options).requires_grad_()
    weight_VH = (torch.randn(VOCABULARY, size.hidden, **options) * (3 / math.sqrt(size.hidden))).requires_grad_()
    targets_N = torch.randint(VOCABULARY, (size.tokens,), generator=generator, device=device)
    return hidden_NH, weight_VH, targets_N


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
        "head + OTB + diagnostics": method,
        "dense": lambda: dense(hidden_NH, weight_VH, targets_N),
        "chunked log-prob and entropy": lambda: chunked(hidden_NH, weight_VH, targets_N, entropy=True),
        "chunked log-prob alone": lambda: chunked(hidden_NH, weight_VH, targets_N, entropy=False),
    }
    return {name: torch.no_grad()(variant) for name, variant in variants.items()}


def backward_variants(hidden_NH, weight_VH, targets_N) -> dict[str, Callable[[], object]]:
    @torch.no_grad()
    def bare():
        """The logits, the logits again, and the products for both gradients."""
        hidden_NH @ weight_VH.t()
        logits_NV = hidden_NH @ weight_VH.t()
        return logits_NV @ weight_VH, logits_NV.t() @ hidden_NH

    def head():
        statistics = token_statistics(hidden_NH, weight_VH, targets_N, safe=RHO)
        return torch.autograd.grad(statistics.pruned_log_prob.sum(), (hidden_NH, weight_VH))

    return {"bare products": bare, "head": head}


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
    with tqdm(total=(rounds + 1) * len(variants), desc=f"{name}, {label}", leave=False) as bar:
        for turn in range(rounds + 1):
            for variant, function in variants.items():
                if turn == 0:  # shows how much memory is needed, and is not timed
                    extra[variant] = _peak_mib(function, device)
                else:
                    seconds[variant].append(_time(function, device))
                bar.update()
    bare = seconds[next(iter(variants))]
    ratios = {variant: [one / other for one, other in zip(seconds[variant], bare, strict=True)] for variant in variants}
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


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the head against bare matrix products and the dense path.")
    parser.add_argument("--output", type=Path, default=Path("results/bench/head.json"), metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="timed rounds of each case (default: 3)")
    options = parser.parse_args()
    bench(options.output, options.rounds)


if __name__ == "__main__":
    main()
