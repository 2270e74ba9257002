"""Rows of a pool of states by index: read, and written in a new pool, which has the memory of a donated one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from tfla.jax import checks
from tfla.jax.explicit import axes_of, divided
from tfla.jax.inputs import acc_dtype
from tfla.jax.rows import check_once, is_readable
from tfla.jax.state import State


def check_pool(pool: object, indices: Any, sequences: int, name: str, overwritten: object = True) -> None:
    """Check a pool, whose parts have equal rows, and the indices (sequences,) of them: -1 or a row, each at most once.

    The values of arrays that are traced or on other devices than CPUs are not checked: the host would wait for them.

    Args:
        pool: the states.
        indices: the indices.
        sequences: how many there have to be.
        name: the name of the argument that is the pool.
        overwritten: whether the call overwrites the rows.

    Raises:
        ValueError, TypeError: they do not fit; the message says what is allowed.
    """
    if not isinstance(pool, State):
        raise TypeError(f"state_indices: got them with {name} {type(pool).__name__}, expected tfla.jax.State, the pool")
    checks.check_float(f"{name}.C", pool.C)
    checks.check_shape(f"{name}.C", pool.C, ("rows", "H", "dqk", "dhv"))
    for part, x, dims in (("n", pool.n, ("H", "dqk")), ("m", pool.m, ("H",))):
        if x is not None:  # rows that are not there would be read as zeros
            checks.check_float(f"{name}.{part}", x)
            checks.check_shape(f"{name}.{part}", x, (pool.C.shape[0], *dims))
    if overwritten and pool.m is not None and pool.m.dtype.itemsize == 2:  # to round it would scale C and n
        raise TypeError(f"{name}.m: got dtype {pool.m.dtype}, expected float32 to be overwritten")
    if not checks.is_array(indices) or str(indices.dtype) not in checks.INTS:
        got = indices.dtype if checks.is_array(indices) else type(indices).__name__
        raise TypeError(f"state_indices: got {got}, expected an int32 or int64 array")
    checks.check_shape("state_indices", indices, (sequences,))
    if not is_readable(indices):
        return
    values, rows = np.asarray(indices), pool.C.shape[0]
    for index in values[(values < -1) | (values >= rows)][:1]:
        raise ValueError(f"state_indices: got {index}, expected -1 or from 0 to {rows - 1}, a row of the state")
    check_once("state_indices", values[values >= 0], "row at most once")


def like(mask: Array, x: Array) -> Array:
    """Return a mask (B,) with as many dims as x."""
    return mask.reshape(-1, *[1] * (x.ndim - 1))


def read_rows(pool: State, indices: Array) -> State:
    """Return the states of the pool at indices (B,); those at -1 are zero."""

    def rows(x: Array, at: Array) -> Array:
        return x.at[at].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    found = (None if x is None else divided(rows, axes_of(indices) + axes_of(x)[1:], x, indices) for x in pool)
    return State(*found)  # type: ignore[arg-type]


def write_rows(pool: State, indices: Array, states: State) -> State:
    """Return the pool with its rows at indices (B,) replaced by the states (B, ...); states at -1 are left out.

    The new pool is divided over devices as the old one, whose memory it can then have.
    """

    def rows(own: Array, at: Array, new: Array) -> Array:
        return own.at[at].set(new.astype(own.dtype), mode="drop", wrap_negative_indices=False)

    pairs = zip(pool, states, strict=True)
    found = (a if a is None or b is None else divided(rows, axes_of(a), a, indices, b) for a, b in pairs)
    return State(*found)  # type: ignore[arg-type]


def check_without_axis(context_parallel: object) -> None:
    """Raise ValueError if a call by indices divides its sequences over a mesh axis."""
    if context_parallel is not None:
        raise ValueError("state_indices: got them with context_parallel, expected at most one of them")


def attend_by_index(
    run: Callable[..., Any], pool: State | None, indices: Any, return_state: bool, q: Any, cu_seqlens: Any
) -> Any:
    """Compute a call over whole sequences whose initial states are rows of a pool, and its final states too.

    Args:
        run: the operator with all arguments but `initial_state`.
        pool: the pool.
        indices: (sequences,), the rows; -1 is a state of zero, which is not kept.
        return_state: whether the call returns its final states.
        q, cu_seqlens: the queries and the offsets of the call.

    Returns:
        h; with `return_state` also the new pool.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    checks.check_static(return_state=return_state)
    checks.check_float("q", q)
    sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    check_pool(pool, indices, sequences, "initial_state", return_state)
    assert pool is not None
    at = jnp.asarray(indices)
    pool = State(*(None if x is None else jnp.asarray(x) for x in pool))  # type: ignore[arg-type]
    rows = State(*(None if x is None else x.astype(acc_dtype(q)) for x in read_rows(pool, at)))  # type: ignore[arg-type]
    found = run(initial_state=rows)
    return (found[0], write_rows(pool, at, found[1])) if return_state else found
