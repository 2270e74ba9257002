"""Tests that the quick interpreter computes what Triton's own does, in every bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import INTERPRETED

pytest.importorskip("triton")
import triton
import triton.language as tl
from quick_interpreter import replacing_once
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter"),
]
OWN = {
    (interpreter, "_get_np_dtype"): interpreter._get_np_dtype,
    (interpreter, "_patch_lang"): interpreter._patch_lang,
    (interpreter.ScanOps, "generic_scan"): interpreter.ScanOps.generic_scan,
    (interpreter.ReduceOps, "generic_reduce"): interpreter.ReduceOps.generic_reduce,
    (interpreter.interpreter_builder, "options"): interpreter.interpreter_builder.options,
    (tl.block_type, "__init__"): tl.block_type.__init__,
    (tl.tensor, "__init__"): tl.tensor.__init__,
    (TritonSemantic, "broadcast_impl_value"): TritonSemantic.broadcast_impl_value,
    (TritonSemantic, "binary_op_type_checking_impl"): TritonSemantic.binary_op_type_checking_impl,
}


@triton.jit
def _follow(factor_a, added_a, factor_b, added_b):
    return factor_a * factor_b, added_a * factor_b + added_b


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b) * 1.0


@triton.jit
def scans_kernel(x, y, out, AXIS: tl.constexpr, REVERSE: tl.constexpr):
    """Store two scans of x and y, (4, 8, 2), of a recurrence, and one of maxima."""
    at = tl.arange(0, 4)[:, None, None] * 16 + tl.arange(0, 8)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    a, b = tl.associative_scan((tl.load(x + at), tl.load(y + at)), AXIS, _follow, reverse=REVERSE)
    tl.store(out + at, a)
    tl.store(out + 64 + at, b)
    tl.store(out + 128 + at, tl.associative_scan(tl.load(x + at), AXIS, _largest, reverse=REVERSE))


@triton.jit
def reductions_kernel(x, out, AXIS: tl.constexpr, KEEP: tl.constexpr, SIZE: tl.constexpr):
    """Store the reduction of x, (4, 16), over one axis, or over all elements where AXIS is None."""
    found = tl.reduce(tl.load(x + tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :]), AXIS, _largest, KEEP)
    if SIZE > 1 or KEEP:
        tl.store(out + tl.arange(0, SIZE), tl.reshape(found, (SIZE,)))
    else:
        tl.store(out, found)


@triton.jit
def row_kernel(x, out):
    """Store the scan of a vector and its reduction."""
    row = tl.load(x + tl.arange(0, 16))
    tl.store(out + tl.arange(0, 16), tl.associative_scan(row, 0, _largest))
    tl.store(out + 16, tl.reduce(row, 0, _largest))


@triton.jit
def arithmetic_kernel(x, counts, out, n, slope):
    """Store what operators make of vectors, matrices, scalars and constants of several dtypes: 7 x 32 numbers."""
    i, j = tl.arange(0, 4)[:, None], tl.arange(0, 8)[None, :]
    at = i * 8 + j
    a, b = tl.load(x + at), tl.load(x + 32 + at, mask=at < n, other=0.5)
    row, column = tl.load(x + j), tl.load(x + i)
    number = tl.load(counts + at)
    tl.store(out + at, a * b - row / 2 + column * slope)
    tl.store(out + 32 + at, a.to(tl.float16) * b.to(tl.float16) / (a.to(tl.float16) + 3))
    tl.store(out + 64 + at, tl.where((a > b) & (number % 3 != 0), 1.0 - a, a + tl.load(x + n)))
    tl.store(out + 96 + at, number // 3 * n - number + 2147483647)  # it overflows
    tl.store(out + 128 + at, tl.maximum(number.to(tl.int64), -1) * (2 + n) / 7)
    tl.store(out + 160 + at, tl.sum(a, 1)[:, None] + tl.max(b, 0)[None, :] + tl.sum(tl.sum(a, 1), 0))
    tl.store(out + 192 + at, tl.exp(-a) + tl.zeros((4, 8), tl.float32) + tl.full((4, 8), 3, tl.int32))


@triton.jit
def _double(x):
    return x + x


@triton.jit
def twice_kernel(x, out):
    """Store 4 x."""
    at = tl.arange(0, 8)
    tl.store(out + at, _double(_double(tl.load(x + at))))


@triton.jit
def unequal_kernel(x):
    """Add vectors of two lengths."""
    tl.store(x + tl.arange(0, 4), tl.load(x + tl.arange(0, 4)) + tl.load(x + tl.arange(0, 8)))


@triton.jit
def pointers_kernel(x):
    """Add two pointers."""
    tl.store(x + tl.arange(0, 8) + x, 1.0)


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 1.0


def check_both(monkeypatch: pytest.MonkeyPatch, size: int, run: Callable[[torch.Tensor], None]) -> None:
    """Compare what the quick interpreter stores with what Triton's own does."""
    found = torch.full((2, size), torch.nan)
    run(found[0])
    for (owner, name), own in OWN.items():
        monkeypatch.setattr(owner, name, own)
    run(found[1])
    assert torch.equal(found[0], found[1])  # NaN equals nothing


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_scans(axis: int, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = values(2, 64)
    check_both(monkeypatch, 192, lambda out: scans_kernel[(1,)](x, y, out, axis, reverse))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("axis", "size"), [(0, 16), (1, 4), (None, 1)])
def test_reductions(axis: int | None, size: int, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = values(64)
    check_both(monkeypatch, size, lambda out: reductions_kernel[(1,)](x, out, axis, keep, size))


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    x = values(16)
    check_both(monkeypatch, 17, lambda out: row_kernel[(1,)](x, out))


def test_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    x, counts = values(80), torch.arange(-9, 23, dtype=torch.int32)
    check_both(monkeypatch, 224, lambda out: arithmetic_kernel[(1,)](x, counts, out, 20, 0.3))


def test_operands_of_unequal_types_are_refused() -> None:
    with pytest.raises(interpreter.InterpreterError, match="incompatible dimensions"):
        unequal_kernel[(1,)](values(8))
    with pytest.raises(interpreter.InterpreterError, match="cannot add pointers"):
        pointers_kernel[(1,)](values(8))


def test_dtypes() -> None:
    names = ("int1", "int8", "uint16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    kinds = [getattr(tl, name) for name in names]
    kinds += [tl.pointer_type(kind) for kind in kinds]
    for kind in [*kinds, *(tl.block_type(kind, [2, 4]) for kind in kinds)]:
        for _ in range(2):
            assert interpreter._get_np_dtype(kind) == OWN[interpreter, "_get_np_dtype"](kind)


def test_functions_are_replaced_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    def replace(fn: Any) -> Any:
        launches.append(fn)
        return OWN[interpreter, "_patch_lang"](fn)

    monkeypatch.setattr(interpreter, "_patch_lang", replacing_once(replace))
    x, out = values(8), torch.zeros(8)
    twice_kernel[(1,)](x, out)
    assert torch.equal(out, 4 * x)
    assert len(launches) <= 1  # older versions of Triton leave functions replaced
