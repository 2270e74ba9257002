"""Recurrences with several writes in each step on JAX, as calls of the delta rule over more steps."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from tfla._util.shapes import check_input_shapes
from tfla.jax import checks
from tfla.jax.choice import Offsets
from tfla.jax.delta.api import delta_rule
from tfla.jax.state import State
from tfla.ops.delta_checks import check_gates_shape
from tfla.ops.states_every import check_options


def delta_product(
    q: Array,
    k: Array,
    v: Array,
    beta: Array | None,
    log_f: Array | None = None,
    *,
    writes: int,
    normalize_qk: bool = False,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    cu_seqlens: Offsets | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
    kernel: str | None = None,
    context_parallel: str | None = None,
    state_indices: Array | None = None,
    states_every: int | None = None,
) -> Array | tuple[Array, State] | tuple[Array, State, State]:
    """Compute (Gated) DeltaProduct over whole sequences: the delta rule with several writes in each step.

    This is :func:`tfla.delta_product` on arrays of JAX. The state decays before the first write of a step and is read
    by q after the last one.

    Args:
        q: (B, T, Hq, dqk).
        k: (B, T x writes, Hq, dqk), the keys of a step next to each other.
        v: (B, T x writes, H, dhv).
        beta: (B, T x writes, H); None is 1.
        log_f: (B, T, H) or (B, T, H, dqk); None is no decay.
        writes: the number of writes in each step.
        normalize_qk: divide q and k by sqrt(their squared norm + 1e-6).
        scale, initial_state, return_state, chunk_size, backend, kernel, context_parallel, state_indices: as in
            :func:`delta_rule`.
        cu_seqlens: the offsets of packed sequences in steps, not in writes.
        states_every: also return the states after every so many steps, not writes.

    Returns:
        h (B, T, H, dhv); with ``return_state`` also the :class:`State`, and with ``states_every`` the states between.

    Raises:
        ValueError, TypeError: as :func:`delta_rule`.
    """
    checks.check_static(writes=writes, return_state=return_state)
    if isinstance(writes, bool) or not isinstance(writes, int):
        raise TypeError(f"writes: got {type(writes).__name__}, expected an int")
    if writes < 1:
        raise ValueError(f"writes: got {writes}, expected at least 1")
    checks.check_float("q", q)
    checks.check_shape("q", q, ("B", "T", "H", "dqk"))
    B, T = q.shape[:2]
    for name, x, dims in (("k", k, ("H", "dqk")), ("v", v, ("H", "dhv")), ("beta", beta, ("H",))):
        if name != "beta" or x is not None:
            checks.check_float(name, x)
            checks.check_shape(name, x, (B, T * writes, *dims))

    def beside(x: Array, before: int, after: int) -> Array:  # zeros for the other writes of each step
        margins = [(0, 0), (0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)]
        return jnp.pad(jnp.asarray(x)[:, :, None], margins).reshape(B, T * writes, *x.shape[2:])

    if log_f is not None:
        checks.check_float("log_f", log_f)
        check_gates_shape(log_f, (B, T, v.shape[2]), q.shape[3])
        log_f = beside(log_f, 0, writes - 1)
    found: Any = delta_rule(
        beside(q, writes - 1, 0), k, v, beta, log_f, normalize_qk=normalize_qk, scale=scale,
        initial_state=initial_state, return_state=return_state,
        cu_seqlens=_stretched(cu_seqlens, writes, q, context_parallel), chunk_size=chunk_size,
        backend=backend, kernel=kernel, context_parallel=context_parallel, state_indices=state_indices,
        states_every=_in_writes(states_every, writes, return_state, context_parallel),
    )  # fmt: skip
    return _last_writes(found, writes, return_state)


def dplr(
    q: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    log_f: Array,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    cu_seqlens: Offsets | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
    kernel: str | None = None,
    context_parallel: str | None = None,
    state_indices: Array | None = None,
    states_every: int | None = None,
) -> Array | tuple[Array, State] | tuple[Array, State, State]:
    """Compute a recurrence with a diagonal plus low-rank transition over whole sequences.

    This is :func:`tfla.dplr` on arrays of JAX. For every head and step t:

        C_t = diag(exp(log_f_t)) C_{t-1} + b_t (C_{t-1}^T a_t)^T + k_t v_t^T        h_t = scale C_t^T q_t

    Args:
        q, k, a, b: (B, T, Hq, dqk).
        v: (B, T, H, dhv).
        log_f: (B, T, H) or (B, T, H, dqk).
        scale, initial_state, return_state, chunk_size, backend, kernel, context_parallel, state_indices: as in
            :func:`delta_rule`.
        cu_seqlens: the offsets of packed sequences in steps.
        states_every: also return the states after every so many steps.

    Returns:
        h (B, T, H, dhv); with ``return_state`` also the :class:`State`, and with ``states_every`` the states between.

    Raises:
        ValueError, TypeError: as :func:`delta_rule`.
    """
    checks.check_static(return_state=return_state)
    for name, x in {"q": q, "k": k, "a": a, "b": b}.items():
        checks.check_float(name, x)
        checks.check_shape(name, x, ("B", "T", "H", "dqk") if name == "q" else tuple(q.shape))
        if not checks.same_dtype(x, q):
            raise TypeError(f"{name}: got dtype {x.dtype}, expected that of q, {q.dtype}")
    checks.check_float("v", v)
    check_input_shapes(q, k, v, {}, time=True)
    checks.check_float("log_f", log_f)
    check_gates_shape(log_f, tuple(v.shape[:3]), q.shape[3])

    def each(first: Array, second: Array) -> Array:
        return jnp.stack([first, second], 2).reshape(first.shape[0], 2 * first.shape[1], *first.shape[2:])

    zero, one = jnp.zeros_like, jnp.ones(v.shape[:-1], jnp.float32)
    found: Any = delta_rule(
        each(zero(q), q), each(b, k), each(zero(v), v), each(-one, one), each(log_f, zero(log_f)),
        read_key=each(a, zero(a)), read_before_decay=True, scale=scale, initial_state=initial_state,
        return_state=return_state, cu_seqlens=_stretched(cu_seqlens, 2, q, context_parallel), chunk_size=chunk_size,
        backend=backend, kernel=kernel, context_parallel=context_parallel, state_indices=state_indices,
        states_every=_in_writes(states_every, 2, return_state, context_parallel),
    )  # fmt: skip
    return _last_writes(found, 2, return_state)


def _last_writes(found: Any, writes: int, return_state: bool) -> Any:
    """Return h after the last write of each step, and the states where they were asked for."""
    h = (found[0] if return_state else found)[:, writes - 1 :: writes]
    return (h, *found[1:]) if return_state else h


def _in_writes(states_every: int | None, writes: int, return_state: bool, axis: str | None) -> int | None:
    """Return a checked number of steps between states as a number of writes, or None."""
    if states_every is None:
        return None
    checks.check_static(states_every=states_every, return_state=return_state)
    check_options(states_every, return_state, axis)
    return writes * states_every


def _stretched(cu_seqlens: Any, factor: int, q: Array, axis: str | None) -> Any:
    """Return the offsets of packed sequences whose steps are `factor` ones; static ones stay static."""
    if cu_seqlens is None:
        return None
    checks.check_cu_seqlens(cu_seqlens, q, axis)
    return tuple(n * factor for n in cu_seqlens) if isinstance(cu_seqlens, tuple) else cu_seqlens * np.int32(factor)
