"""bfloat16 in Triton's interpreter, which computes with the bits of its numbers as with integers.

NumPy has no bfloat16. Here its arithmetic is that of float32, rounded to the nearest even number, and its matrix
products accumulate in float32, as those of GPUs do. Float32 operands of matrix products in tf32 lose the bits that MMAs
do not read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

Array = np.ndarray[Any, Any]


def widened(bits: Array) -> Array:
    """Return bfloat16 numbers, given as uint16, in float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(x: Array) -> Array:
    """Return float32 numbers as bfloat16, in uint16, rounded to the nearest even number."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), np.uint32(0x7FC0), nearest).astype(np.uint16)


def tf32(x: Array) -> Array:
    """Return float32 numbers without the bits that tf32 does not have, which MMAs cut off."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def is_bfloat16(x: TensorHandle) -> bool:
    return bool(x.dtype.scalar == tl.bfloat16)


def values(x: TensorHandle) -> Array:
    return widened(x.data) if is_bfloat16(x) else x.data


def cast(self: Any, src: TensorHandle, dst_type: Any, *rounding: Any, original: Callable[..., Any]) -> TensorHandle:
    """Replace casts from and to bfloat16."""
    to = dst_type.scalar
    if is_bfloat16(src) and to != tl.bfloat16:
        return TensorHandle(widened(src.data).astype(interpreter._get_np_dtype(dst_type)), to)
    if to == tl.bfloat16 and not is_bfloat16(src):
        return TensorHandle(rounded(src.data.astype(np.float32)), to)
    return original(self, src, dst_type, *rounding)  # type: ignore[no-any-return]


def binary(self: Any, lhs: TensorHandle, rhs: TensorHandle, op: Any, original: Callable[..., Any]) -> TensorHandle:
    """Replace arithmetic and comparisons of two bfloat16 tensors."""
    if not is_bfloat16(lhs) or op in (np.bitwise_and, np.bitwise_or, np.bitwise_xor):
        return original(self, lhs, rhs, op)  # type: ignore[no-any-return]
    found = op(widened(lhs.data), widened(rhs.data))
    return TensorHandle(rounded(found) if found.dtype == np.float32 else found, lhs.dtype.scalar)


def dot(
    self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, input_precision: Any, imprecise: Any
) -> TensorHandle:
    """Replace matrix products."""
    left, right = values(a), values(b)
    if a.dtype.scalar == tl.float32 and "TF32" in str(input_precision) and "x3" not in str(input_precision):
        left, right = tf32(left), tf32(right)
    return TensorHandle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def constant(self: Any, value: float) -> TensorHandle:
    """Stand for `get_bf16`, which the interpreter lacks."""
    return TensorHandle(rounded(np.array([value])), tl.bfloat16)


def use_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels that the interpreter runs compute with bfloat16."""
    builder = interpreter.InterpreterBuilder

    def replace(name: str, function: Callable[..., Any]) -> None:
        original = getattr(builder, name)
        monkeypatch.setattr(builder, name, lambda *args: function(*args, original=original))

    for name in ("cast_impl", "create_fp_to_fp"):
        replace(name, cast)
    replace("binary_op", binary)
    monkeypatch.setattr(builder, "create_dot", dot)
    monkeypatch.setattr(builder, "get_bf16", constant, raising=False)
