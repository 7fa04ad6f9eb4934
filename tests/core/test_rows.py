"""The three forms of the row sums against float64, and each other: tiles, compiled, and Triton's kernels."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dvp.core import rows
from dvp.core.rows import RowCoefficients, RowSums, row_gradient_, row_sums
from rounding import rounding

V = 37
SHIFT = 88
"""The largest −log of a float32: e to the power of a shift is off by as many roundings as the shift is large."""
EXACT = ("maximum", "safe_size")
"""Fields of RowSums without rounding."""


def assert_sums(found: RowSums, expected: RowSums, vocabulary: int) -> None:
    """Assert that sums of as many terms of one sign agree up to rounding, and to what becomes 0 as too small."""
    lost = vocabulary * SHIFT * torch.finfo(torch.float32).tiny
    for name, actual, wanted in zip(RowSums._fields, found, expected, strict=True):
        rtol, atol = (0.0, 0.0) if name in EXACT else (rounding(vocabulary + SHIFT), lost)
        torch.testing.assert_close(
            actual.cpu(), wanted, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_gradient(found: torch.Tensor, expected: torch.Tensor, coefficients: RowCoefficients) -> None:
    """Assert that e·(a + b·shift + c + d·shift) agrees up to rounding: |shift|·e is below 1, and so is e."""
    size = sum(part.abs() for part in coefficients).max().item()
    stored = 0 if found.dtype == torch.float32 else rounding(1, dtype=found.dtype)
    torch.testing.assert_close(found.cpu(), expected, rtol=stored, atol=rounding(8, size))


def float64_sums(logits, log_rho):
    """RowSums, one row and one entry at a time."""
    results = []
    for z_V, threshold in zip(np.asarray(logits, dtype=np.float64), log_rho, strict=True):
        shift_V = z_V - z_V.max()
        parts = {True: [0.0, 0.0, 0.0, 0.0], False: [0.0, 0.0, 0.0, 0.0]}
        for shift in shift_V:
            of = parts[bool(np.float32(shift) >= np.float32(threshold))]
            of[0] += 1
            of[1] += np.exp(shift)
            of[2] += np.exp(shift) * shift
            of[3] += np.exp(2 * shift)
        safe, pruned = parts[True], parts[False]
        results.append([z_V.max(), safe[0], safe[1], pruned[1], safe[2], pruned[2], safe[3], pruned[3]])
    return np.array(results).T


def float64_gradient(logits, log_rho, coefficients):
    shift = np.asarray(logits, dtype=np.float64)
    shift = shift - shift.max(axis=1, keepdims=True)
    a, b, c, d = (np.asarray(part, dtype=np.float64)[:, None] for part in coefficients)
    safe = shift.astype(np.float32) >= np.asarray(log_rho, dtype=np.float32)[:, None]
    return np.exp(shift) * (a + b * shift + safe * (c + d * shift))


# Differences of multiples of 1/8 are exact, so that fp32 and float64 agree on who is safe.
LOGITS = hnp.arrays(np.float32, (5, V), elements=st.integers(-80, 80).map(lambda k: k / 8))
LOG_RHO = hnp.arrays(np.float32, (5,), elements=st.sampled_from([-np.inf, -13.0, -3.1, -0.01, 0.0]))


@settings(max_examples=60)
@given(logits=LOGITS, log_rho=LOG_RHO, coefficients=hnp.arrays(np.float32, (4, 5), elements=st.floats(-2, 2, width=32)))
def test_sums_and_gradient_against_float64(logits, log_rho, coefficients):
    z, threshold = torch.tensor(logits), torch.tensor(log_rho)
    sums = row_sums(z, threshold, z[:, 0])
    assert_sums(sums, RowSums(*torch.tensor(float64_sums(logits, log_rho), dtype=torch.float32)), V)
    given_coefficients = RowCoefficients(*torch.tensor(coefficients))
    row_gradient_(z, sums.maximum, threshold, given_coefficients)
    expected = torch.tensor(float64_gradient(logits, log_rho, coefficients), dtype=torch.float32)
    assert_gradient(z, expected, given_coefficients)


def problem(row_count, vocabulary, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(row_count, vocabulary, generator=generator)).to(dtype)
    log_rho = torch.tensor([-torch.inf, -13.0, -3.1])[torch.arange(row_count) % 3]
    coefficients = RowCoefficients(*torch.randn(4, row_count, generator=generator))
    return logits, log_rho, coefficients


@pytest.mark.parametrize("tile", [1, 5 * V, 10**9])
def test_tiles_change_nothing(tile, monkeypatch):
    logits, log_rho, coefficients = problem(12, V, torch.float32)
    expected = rows._row_sums(logits, log_rho)
    monkeypatch.setattr(rows, "TILE", tile)
    sums = row_sums(logits, log_rho, logits[:, 0])
    assert_sums(sums, expected, V)
    whole = logits.clone()
    rows._row_gradient_(whole, sums.maximum, log_rho, *coefficients)
    row_gradient_(logits, sums.maximum, log_rho, coefficients)
    assert_gradient(logits, whole, coefficients)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_form_agrees_with_the_plain_one(dtype):
    """A vocabulary large enough to be compiled; the plain form is the reference that the tests above have checked."""
    logits, log_rho, coefficients = problem(5, rows.COMPILED_VOCABULARY + 3, dtype)
    if torch._dynamo.config.disable:
        pytest.skip("TORCHDYNAMO_DISABLE is set")
    assert rows._compiled(rows._row_sums) is not None
    plain, compiled = rows._row_sums(logits, log_rho), row_sums(logits, log_rho, logits[:, 0])
    assert_sums(compiled, plain, logits.shape[1])
    expected = logits.clone()
    rows._row_gradient_(expected, plain.maximum, log_rho, *coefficients)
    row_gradient_(logits, plain.maximum, log_rho, coefficients)
    assert_gradient(logits, expected, coefficients)


@pytest.mark.slow
def test_without_a_compiler_the_plain_form_runs_and_says_so():
    """In a process of its own, whose PATH has no C++ compiler and whose cache is empty."""
    code = (
        "import torch; from dvp.core import rows; rows.COMPILED_VOCABULARY = 8\n"
        "sums = rows.row_sums(torch.zeros(2, 9), torch.zeros(2), torch.zeros(2))\n"
        "print(sums.safe_sum.tolist())"
    )
    environment = {"PATH": "/nonexistent", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "CXX": "/nonexistent/c++"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[9.0, 9.0]"
    assert "warning: torch cannot compile here" in result.stderr


def guesses(logits):
    """Each row's maximum or another entry, in turn."""
    maximum, first = logits.float().amax(dim=1), logits[:, 0].float()
    return torch.where(torch.arange(len(logits)) % 2 == 0, maximum, first)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_agrees_with_the_cpu(dtype):
    logits, log_rho, coefficients = problem(9, 10_007, dtype)
    sums = row_sums(logits, log_rho, guesses(logits))
    on_gpu = row_sums(logits.cuda(), log_rho.cuda(), guesses(logits).cuda())
    assert_sums(on_gpu, sums, logits.shape[1])
    gradient = logits.cuda()
    moved = RowCoefficients(*(part.cuda() for part in coefficients))
    row_gradient_(gradient, on_gpu.maximum, log_rho.cuda(), moved)
    row_gradient_(logits, sums.maximum, log_rho, coefficients)
    assert_gradient(gradient, logits, coefficients)


def interpreted(code):
    """Run code where Triton's interpreter runs kernels on the CPU: it must be asked for before triton is imported."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
    }
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("agreed")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_triton_kernels_agree_with_the_plain_form(dtype):
    interpreted(f"""
import torch
from triton.runtime.interpreter import InterpreterBuilder
from dvp.core import rows, rows_triton
from test_rows import assert_gradient, assert_sums, guesses, problem
loads, load = [], InterpreterBuilder.create_masked_load
InterpreterBuilder.create_masked_load = lambda *of, **options: loads.append(None) or load(*of, **options)
rows_triton.SUMS_BLOCK = rows_triton.GRADIENT_BLOCK = 16  # a row takes several blocks, the last one partly filled
logits, log_rho, coefficients = problem(6, {V}, torch.{dtype})
logits[4] = 1.0
logits[5] = -200.0  # e of the first guess overflows
logits[5, 30] = 200.0
plain = rows._row_sums(logits, log_rho)
for guess in (plain.maximum, logits[:, 0].float(), guesses(logits)):
    actual = rows_triton.row_sums(logits, log_rho, guess)
    assert_sums(actual, plain, {V})
expected = logits.clone()
rows._row_gradient_(expected, plain.maximum, log_rho, *coefficients)
view = torch.empty(6, {V} + 3, dtype=torch.{dtype})[:, :{V}]
view.copy_(logits)  # a row's stride is not its length
rows_triton.row_gradient_(view, plain.maximum, log_rho, coefficients)
assert_gradient(view, expected, coefficients)
empty = rows_triton.row_sums(logits[:0], log_rho[:0], log_rho[:0])
assert all(part.shape == (0,) for part in empty)
# A row whose maximum is guessed is read once, in blocks and after two scalars.
for guess, times in (logits[:1].float().amax(dim=1), 1), (logits[:1].float().amin(dim=1), 2):
    loads.clear()
    rows_triton.row_sums(logits[:1], log_rho[:1], guess)
    assert len(loads) == 2 + times * -(-{V} // 16)
broken = logits.clone()
broken[2, 20] = torch.nan
nan = rows_triton.row_sums(broken, log_rho, logits[:, 0].float())
assert (nan.safe_sum + nan.pruned_sum).isnan().tolist() == [False, False, True, False, False, False]
print("agreed")
""")


@pytest.mark.parametrize("logits", ["*fp32", "*bf16"])
def test_the_kernels_compile_for_a_gpu_where_there_is_none(logits, tmp_path, monkeypatch):
    """To machine code of an H100, by the assembler that comes with Triton."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from dvp.core import rows_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"logits": logits, "rows": "i32", "vocabulary": "i32", "stride": "i32", "BLOCK": "constexpr"}
    for kernel, block, warps in (
        (rows_triton._sums_kernel, rows_triton.SUMS_BLOCK, rows_triton.SUMS_WARPS),
        (rows_triton._gradient_kernel, rows_triton.GRADIENT_BLOCK, rows_triton.GRADIENT_WARPS),
    ):
        signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
        source = ASTSource(kernel, signature=signature, constexprs={"BLOCK": block})
        assert compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["cubin"]
