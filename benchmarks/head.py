"""Cost of the head relative to alternatives, as ratios within one run: `make bench`.

The head is compared with the bare matrix products that any head needs, with the dense path that trainers commonly use
(whole logits, a pass for each statistic), with the chunked formulation that fused heads fall back to, and on a GPU with
Liger's fused head if installed. The variant "head" computes gradients of known coefficients, in one pass. Variants take
turns, round by round, so that a busy machine slows all of them; ratios are medians over the rounds.

It needs only torch (with triton on a GPU), so that it runs wherever there is a GPU for a few minutes:

    PYTHONPATH=src python benchmarks/head.py --device cuda

With `--profile` it prints instead the kernels that take the head's time.

Shape suffixes: N flattened tokens, V vocabulary, H hidden.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.utils.benchmark import timer  # waits for the GPU

from dvp.core.advantages import optimal_token_proxy
from dvp.core.diagnostics import mismatch_metrics
from dvp.core.head import token_statistics
from dvp.provenance import device as device_name
from dvp.provenance import git_commit, processor

CHUNK = 1024  # rows at a time in the chunked formulations
LOG_RHO = -13.0
ANCHORS = """Reported by others, not measured here: one H200, bfloat16, forward + backward, N = H = 4,096,
V = 131,072: Liger's fused head 24.9 ms and 1.3 GiB, verl's torch path 50.9 ms and 4.0 GiB."""
# Stands in for the rule FixedRho, which needs pydantic.
SAFE = SimpleNamespace(log_rho=lambda logits_NV: logits_NV.new_full((len(logits_NV),), LOG_RHO, dtype=torch.float32))
statistics_of = partial(token_statistics, safe=SAFE)


class Size(NamedTuple):
    """Size of the problem: N tokens of H hidden features over a vocabulary of V."""

    tokens: int
    hidden: int
    vocabulary: int = 151_936  # Qwen's


# The second size is the one at which others have reported their times (ANCHORS).
SIZES = {"cpu": (Size(2048, 1024), None), "cuda": (Size(8192, 4096), Size(4096, 4096, 131_072))}


def problem(size: Size, dtype: torch.dtype, device: str, *, frequencies: bool = False) -> tuple[torch.Tensor, ...]:
    """Create hidden states, weight and targets, and run the head once to compile kernels and fill memory pools.

    The logits are noise with a standard deviation of 3: V_S is half of the vocabulary, a different half in each row.
    With `frequencies` they are noise with a standard deviation of 2 around −2 log rank, as of a confident model with
    tokens most of which are rare everywhere: V_S is some hundred tokens, and the union over a chunk's rows is a few
    thousand.
    """
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device, "dtype": dtype}
    hidden_NH = torch.randn(size.tokens, size.hidden, **options)
    weight_VH = torch.randn(size.vocabulary, size.hidden, **options) * ((2 if frequencies else 3) / size.hidden**0.5)
    targets_N = torch.randint(size.vocabulary, (size.tokens,), generator=generator, device=device)
    if frequencies:
        hidden_NH[:, 0] = 1.0
        weight_VH[:, 0] = -2 * torch.arange(1, size.vocabulary + 1, device=device).log().to(dtype)
        targets_N %= 16
    inputs = hidden_NH.requires_grad_(), weight_VH.requires_grad_(), targets_N
    _head_backward(hidden_NH[:2], weight_VH, targets_N[:2])
    return inputs


def forward_variants(*inputs: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the variants of a pass without gradients."""
    hidden_NH, weight_VH, _ = inputs
    variants = {
        "bare product": lambda: hidden_NH @ weight_VH.t(),
        "head": lambda: statistics_of(*inputs),
        "head, logits in float32": lambda: statistics_of(*inputs, logits_dtype=torch.float32),
        "head + OTB + diagnostics": lambda: _method(*inputs),
        "dense": lambda: dense(*inputs),
        "chunked log-prob and entropy": lambda: chunked(*inputs, entropy=True),
        "chunked log-prob alone": lambda: chunked(*inputs, entropy=False),
    }
    return {name: torch.no_grad()(variant) for name, variant in variants.items()}


def backward_variants(*inputs: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the variants of a pass with the gradients of hidden states and weight."""
    given_N = torch.ones(len(inputs[0]), device=inputs[0].device)
    variants = {
        "bare products": lambda: _bare_products(*inputs),
        "head": lambda: _head_known(*inputs, given_N),
        "head, logits in float32": lambda: _head_known(*inputs, given_N, logits_dtype=torch.float32),
        "head, two passes": lambda: _head_backward(*inputs),
        "dense": lambda: torch.autograd.grad(dense(*inputs)[1].sum(), inputs[:2]),
    }
    if inputs[0].is_cuda and find_spec("liger_kernel"):
        variants |= {
            "Liger": lambda: _liger(*inputs, None),
            "Liger, sums in float32": lambda: _liger(*inputs, torch.float32),
        }
    return variants


def pruned_variants(*inputs: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return variants that show the saving from leaving out the tokens that all rows prune."""
    given_N = torch.ones(len(inputs[0]), device=inputs[0].device)
    return {
        "bare products": lambda: _bare_products(*inputs),
        "head": lambda: _head_known(*inputs, given_N),
        "head, two passes": lambda: _head_backward(*inputs),
        # The full log-prob has a gradient at every token, of size 0 here.
        "head, two passes, nothing left out": lambda: _head_backward(*inputs, full=0.0),
    }


def _head_known(hidden_NH, weight_VH, targets_N, given_N, **options):
    found = statistics_of(hidden_NH, weight_VH, targets_N, coefficient_N=given_N, **options)
    return torch.autograd.grad(found.objective, (hidden_NH, weight_VH))


def _liger(hidden_NH, weight_VH, targets_N, sums: torch.dtype | None):
    """Run Liger's fused linear cross-entropy on a GPU: log-probs alone, without pruning."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

    loss, *_ = Liger.apply(hidden_NH, weight_VH, targets_N, None, None, -100, 0.0, 0.0, "sum", None, False, sums)
    return torch.autograd.grad(loss, (hidden_NH, weight_VH))


def _head_backward(hidden_NH, weight_VH, targets_N, full: float | None = None, **options):
    found = statistics_of(hidden_NH, weight_VH, targets_N, **options)
    loss = found.pruned_log_prob.sum() + (0 if full is None else full * found.log_prob.sum())
    return torch.autograd.grad(loss, (hidden_NH, weight_VH))


def _method(*inputs: torch.Tensor) -> torch.Tensor:
    """Compute all that a run with DVP, OTB and the diagnostics needs of the head."""
    found = statistics_of(*inputs)
    mismatch_metrics((found.pruned_log_prob - found.log_prob)[None], found.target_in_safe[None])
    return optimal_token_proxy(found.pruned_log_prob, found.pruned_sum_p_squared)


@torch.no_grad()
def _bare_products(hidden_NH, weight_VH, _targets_N) -> tuple[torch.Tensor, ...]:
    """Compute the logits and the products for both gradients."""
    logits_NV = hidden_NH @ weight_VH.t()
    return logits_NV @ weight_VH, logits_NV.t() @ hidden_NH


def dense(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute log p, log p^mp, entropy and Σp² from whole logits, as trainers commonly do; each (N,)."""
    logits_NV = (hidden_NH @ weight_VH.t()).float()
    log_prob_N = logits_NV.log_softmax(dim=1).gather(1, targets_N[:, None])[:, 0]
    entropy_N = -(logits_NV.softmax(dim=1) * logits_NV.log_softmax(dim=1)).sum(dim=1)
    sum_p_squared_N = ((2 * logits_NV).logsumexp(dim=1) - 2 * logits_NV.logsumexp(dim=1)).exp()
    maximum_N1 = logits_NV.amax(dim=1, keepdim=True)
    masked_NV = torch.where(logits_NV >= maximum_N1 + LOG_RHO, logits_NV, maximum_N1 - 50)
    pruned_log_prob_N = masked_NV.log_softmax(dim=1).gather(1, targets_N[:, None])[:, 0]
    return log_prob_N, pruned_log_prob_N, entropy_N, sum_p_squared_N


def chunked(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor, entropy: bool) -> torch.Tensor:
    """Compute log-probs, and entropies if asked for, by chunks of rows in plain torch, the fallback of fused heads."""
    parts = []
    for hidden_nH, targets_n in zip(hidden_NH.split(CHUNK), targets_N.split(CHUNK), strict=True):
        logits_nV = (hidden_nH @ weight_VH.t()).float()
        lse_n = logits_nV.logsumexp(dim=1)
        columns = [logits_nV.gather(1, targets_n[:, None])[:, 0] - lse_n]
        if entropy:
            columns.append(lse_n - (logits_nV.softmax(dim=1) * logits_nV).sum(dim=1))
        parts.append(torch.stack(columns))
    return torch.cat(parts, dim=1)


def cases(device: str) -> list[tuple]:
    """List the cases of a device: name, dtype, size, function that makes the variants, and `frequencies` of problem."""
    main, anchors = SIZES[device]
    both, fp32, bf16 = "forward + backward", torch.float32, torch.bfloat16
    forward = ("forward", forward_variants, False)
    backward = (both, backward_variants, False)
    pruned = (f"{both}, few safe", pruned_variants, True)
    types = [(fp32, [forward, backward, pruned]), (bf16, [forward, backward])]
    listed = [
        (name, dtype, main, made, frequencies)
        for dtype, kinds in (types if device == "cpu" else [(bf16, [forward, backward, pruned])])
        for name, made, frequencies in kinds
    ]
    return listed + ([(f"{both}, anchors'", bf16, anchors, backward_variants, False)] if anchors else [])


def measure(name: str, dtype: torch.dtype, variants: dict[str, Callable], rounds: int, device: str) -> dict:
    """Time the variants in turns and measure their memory; ratios are relative to the first variant."""
    label = str(dtype).removeprefix("torch.")
    if dtype == torch.float32:
        variants = {key: value for key, value in variants.items() if key != "head, logits in float32"}  # the default
    extra = {variant: _peak_mib(function, device) for variant, function in variants.items()}
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for turn in range(rounds):
        print(f"{name}, {label}: round {turn + 1} of {rounds}", file=sys.stderr)
        for variant, function in variants.items():
            seconds[variant].append(_seconds(function))
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


def _seconds(function: Callable[[], object]) -> float:
    started = timer()
    result = function()
    seconds = timer() - started
    del result  # its memory is freed outside of what is timed
    return seconds


def _peak_mib(function: Callable[[], object], device: str) -> float:
    """Return the function's peak memory in MiB beyond what was in use before, its result included."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # resets Linux's high-water mark
    before = _status_kib("VmRSS")
    function()
    return (_status_kib("VmHWM") - before) / 2**10


def _status_kib(key: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1])


def format_table(result: dict) -> str:
    """Format the ratios as text, one line per variant: seconds, ratio to the bare products (range), extra memory."""
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
            spread = f"({min(variant['ratios']):.2f}–{max(variant['ratios']):.2f})"
            lines.append(
                f"{case['name'] + ', ' + case['dtype']:<40}{name:<34}{variant['seconds']:>9.3g}{variant['ratio']:>8.2f}"
                f"{spread:>15}{variant['extra_mib']:>10,.0f} MiB"
            )
    return "\n".join([*lines, "", ANCHORS])


def page_table(result: dict) -> str:
    """Format the ratios of the head, with the dense path's in parentheses, as a Markdown table for a page."""
    lines = [
        f"{result['device']}, {result['threads']} threads, commit {result['git_commit'][:7]}:",
        "",
        "| pass | head | over the bare products (dense) | MiB beyond the inputs (dense) |",
        "|---|---|---|---|",
    ]
    for case in result["cases"]:
        dense = case["variants"].get("dense")
        for name, own in case["variants"].items():
            if name in ("head", "head + OTB + diagnostics"):
                ratio, mib = f"{own['ratio']:.2f}", f"{own['extra_mib']:,.0f}"
                if dense:
                    ratio, mib = f"{ratio} ({dense['ratio']:.2f})", f"{mib} ({dense['extra_mib']:,.0f})"
                cells = (f"{case['name']}, {case['dtype']}", name.removeprefix("head + "), ratio, mib)
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fill(page: Path, result: dict) -> None:
    """Put the table between the marks <!--head--> and <!--/head--> of a page."""
    before, mark, rest = page.read_text(encoding="utf-8").partition("<!--head-->\n")
    _, end, after = rest.partition("\n<!--/head-->")
    page.write_text(before + mark + page_table(result) + end + after, encoding="utf-8")


def bench(output: Path, rounds: int, device: str, page: Path | None = None, only: str = "") -> None:
    """Run the cases of a device ("cpu" or "cuda"), print the table, and write the JSON file after each case.

    page : a page of the documentation whose table is replaced.
    only : part of the name and dtype of the cases to run, as printed while they run.
    """
    result: dict = {
        "device": device_name() if device == "cuda" else processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {
            "torch": torch.__version__,
            "triton": __import__("triton").__version__ if find_spec("triton") else None,
            "python": platform.python_version(),
        },
        "git_commit": git_commit(),
        "rounds": rounds,
        "cases": [],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    for name, dtype, size, made, frequencies in cases(device):
        if only not in f"{name}, {str(dtype).removeprefix('torch.')}":
            continue
        variants = made(*problem(size, dtype, device, frequencies=frequencies))
        result["cases"].append({"shape": size._asdict()} | measure(name, dtype, variants, rounds, device))
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        del variants  # frees memory for the next case
    if page is not None:
        fill(page, result)
    print(f"{format_table(result)}\n\nwritten to {output}")


def profile(device: str) -> None:
    """Print the kernels of one forward pass of the head and of one with backward, longest first."""
    inputs = problem(SIZES[device][0], torch.float32 if device == "cpu" else torch.bfloat16, device)
    for name, variants in (("forward", forward_variants), ("forward + backward", backward_variants)):
        head = variants(*inputs)["head"]
        head()  # compile first
        with torch.profiler.profile() as run:
            seconds = _seconds(head)
        print(f"\n{name}: {1e3 * seconds:.2f} ms")
        order = f"self_{device}_time_total"
        print(run.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=100))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Measure the head against bare matrix products and the dense path.")
    parser.add_argument("--device", choices=SIZES, help="default: the GPU if there is one")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--output", type=Path, metavar="FILE", help="default: results/bench/DEVICE.json")
    what.add_argument("--profile", action="store_true", help="print the head's kernels, and measure nothing else")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="put the ratios into a page, as results/reference/bench/README.md"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help='such cases, as "forward + backward, float32"')
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="timed rounds of each case (default: 3)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected 1 or more")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: --device cuda: torch finds no GPU here")
    if options.profile:
        profile(device)
    else:
        bench(
            options.output or Path(f"results/bench/{device}.json"), options.rounds, device, options.page, options.only
        )


if __name__ == "__main__":
    main()
