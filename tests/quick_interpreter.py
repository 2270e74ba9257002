"""Triton's interpreter without work that it does again and again, for tests that wait for it.

The results are the same in every bit. The interpreter scans and reduces with a function of a kernel one element after
another; here a call has all elements of one position along the axis. It replaces the functions of Triton's language at
each call of a jitted function; here it does at each launch. It makes a table of dtypes at each operation, and types and
shapes for each tensor; here it makes them once. It computes overflows of integers for assertions that its options leave
out; here it does not.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Array = np.ndarray[Any, Any]


def results_by_position(op: Any, given: Sequence[tl.tensor], axis: int) -> Iterator[list[Array]]:
    """Yield what the function of a scan or a reduction makes of the values up to each position along an axis."""
    columns = [np.moveaxis(x.handle.data, axis, 0) for x in given]
    kinds = [x.dtype for x in given]
    upto = [column[0] for column in columns]
    yield upto
    for i in range(1, len(columns[0])):
        both = zip([*upto, *(column[i] for column in columns)], 2 * kinds, strict=True)
        found = op.combine_fn.fn(*(op.to_tensor(x, kind) for x, kind in both))
        values = [
            x.handle.data if isinstance(x, tl.tensor) else x for x in (found if isinstance(found, tuple) else (found,))
        ]
        upto = [
            np.broadcast_to(value, x.shape or (1,)).reshape(x.shape).astype(x.dtype)
            for value, x in zip(values, upto, strict=True)
        ]
        yield upto


def scan(op: Any, given: Sequence[tl.tensor]) -> list[tl.tensor]:
    """Return the inclusive scan with any function."""
    found = zip(*results_by_position(op, given, op.axis), strict=True)
    return [op.to_tensor(np.stack(x, op.axis), t.dtype) for x, t in zip(found, given, strict=True)]


def reduce(op: Any, given: Sequence[tl.tensor]) -> list[tl.tensor]:
    """Return the reduction with any function, over one axis or over all elements."""
    if op.axis is None:
        flat = [op.to_tensor(x.handle.data.flatten(), x.dtype) for x in given]
        *_, found = results_by_position(op, flat, 0)
        shape = [1] * given[0].handle.data.ndim if op.keep_dims else []
        found = [x.reshape(shape) for x in found]
    else:
        *_, found = results_by_position(op, given, op.axis)
        found = [np.expand_dims(x, op.axis) for x in found] if op.keep_dims else found
    return [op.to_tensor(x, t.dtype) for x, t in zip(found, given, strict=True)]


def remembering_dtypes(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `_get_np_dtype` with a table that is kept."""
    known: dict[str, Any] = {}

    def found(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = original(kind)
        return known[name]

    return found


def replacing_once(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `_patch_lang`, which replaces functions of the language, for calls where they are replaced already."""
    nothing_to_restore = getattr(interpreter, "_LangPatchScope", lambda: None)

    @functools.cache
    def languages(fn: Any) -> list[Any]:
        return [x for x in fn.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core)]

    def replace(fn: Any) -> Any:
        replaced = [not tl.core.is_builtin(language.load) for language in languages(fn)]
        return nothing_to_restore() if replaced and all(replaced) else original(fn)

    return replace


def remembering_blocks(original: Callable[..., None]) -> Callable[..., None]:
    """Return `block_type.__init__` with a table of what types of the same element and shape consist of."""
    known: dict[tuple[str, tuple[Any, ...]], dict[str, Any]] = {}
    at_once: dict[tuple[str, int], dict[str, Any]] = {}  # by the identity of a shape, whose numbers need not be read

    def initialize(self: Any, element_ty: Any, shape: Any) -> None:
        found = at_once.get((element_ty.name, id(shape)))
        if found is None or found["shape"] is not shape:
            numbers = tuple(x.value if isinstance(x, tl.constexpr) else x for x in shape)
            found = known.get((element_ty.name, numbers))
            if found is None:
                original(self, element_ty, shape)
                found = {**self.__dict__, "of_tensors": []}
                known[element_ty.name, numbers] = at_once[element_ty.name, id(self.shape)] = found
        self.__dict__.update(found)
        self.element_ty = element_ty

    return initialize


def remembering_shapes(original: Callable[..., None]) -> Callable[..., None]:
    """Return `tensor.__init__`, which takes the shape and the size from an earlier tensor of the same type."""
    of_scalars: list[Any] = []

    def initialize(self: Any, handle: Any, type: Any) -> None:
        known = getattr(type, "of_tensors", None) if type.is_block() else of_scalars
        if known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known
        else:
            original(self, handle, type)
            if known is not None:
                known.extend((self.shape, self.numel))

    return initialize


def only_where_shapes_differ(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `broadcast_impl_value`, which returns tensors of one shape as they are."""

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape and lhs.shape else original(self, lhs, rhs)

    return broadcast


def only_where_types_differ(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `binary_op_type_checking_impl`, which returns tensors of one shape and type of numbers as they are."""

    def check(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        # The fourth flag is div_or_mod: a quotient of two float16 tensors is computed in float32.
        alike = (
            isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and lhs.dtype is rhs.dtype
            and lhs.shape is rhs.shape and not lhs.dtype.is_ptr() and len(flags) < 4 and not named.get("div_or_mod")
        )  # fmt: skip
        return (lhs, rhs) if alike else original(self, lhs, rhs, *flags, **named)

    return check


def use_quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.ScanOps, "generic_scan", scan)
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", reduce)
    monkeypatch.setattr(interpreter, "_get_np_dtype", remembering_dtypes(interpreter._get_np_dtype))
    monkeypatch.setattr(interpreter, "_patch_lang", replacing_once(interpreter._patch_lang))
    monkeypatch.setattr(tl.block_type, "__init__", remembering_blocks(tl.block_type.__init__))
    monkeypatch.setattr(tl.tensor, "__init__", remembering_shapes(tl.tensor.__init__))
    semantic = TritonSemantic
    monkeypatch.setattr(semantic, "broadcast_impl_value", only_where_shapes_differ(semantic.broadcast_impl_value))
    check = semantic.binary_op_type_checking_impl
    monkeypatch.setattr(semantic, "binary_op_type_checking_impl", only_where_types_differ(check))
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # with `debug` assertions report overflows
        monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
