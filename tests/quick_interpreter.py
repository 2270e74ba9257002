"""Triton's interpreter without work that it does again and again, for tests that wait for it.

The results are the same in every bit. The interpreter scans and reduces with a function of a kernel one element after
another; here a call has all elements of one position along the axis. It replaces the functions of Triton's language at
each call of a jitted function; here it does at each launch. It builds a table of dtypes at each operation; here once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import triton.language as tl
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


def use_quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.ScanOps, "generic_scan", scan)
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", reduce)
    monkeypatch.setattr(interpreter, "_get_np_dtype", remembering_dtypes(interpreter._get_np_dtype))
    monkeypatch.setattr(interpreter, "_patch_lang", replacing_once(interpreter._patch_lang))
