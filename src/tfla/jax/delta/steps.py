"""The public operators of the delta rule for decoding on JAX: one step, or a few steps in one call."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tfla.backends.delta import BetaActivation, GateActivation
from tfla.jax import checks
from tfla.jax.choice import DELTA_KERNELS, choose
from tfla.jax.delta import step_kernels
from tfla.jax.delta.checks import check_arrays, check_rule
from tfla.jax.delta.inputs import DeltaArrays, Rule, activated
from tfla.jax.delta.reference import Sequence, step, with_heads_of_v
from tfla.jax.explicit import across_explicit_axes
from tfla.jax.inputs import vary_alike
from tfla.jax.scans import over_steps
from tfla.jax.state import State
from tfla.jax.state_pool import check_pool
from tfla.jax.step_kernels import PlainSteps, by_index
from tfla.ops.checks import check_flags


@functools.partial(jax.jit, static_argnums=0)
def _compute(rule: Rule, given: DeltaArrays, lengths: Array | None) -> tuple[Array, Array]:
    """Compute the steps one after another: h (B, T, H, dhv), and C after ``lengths`` steps of each sequence."""
    assert given.C is not None
    kept_dtype = given.C.dtype if given.C.dtype.itemsize == 2 else None  # a state of 16 bits stays so
    x = activated(rule, given, given.q.shape[0])
    C, lengths, *every = vary_alike(x.C, lengths, *with_heads_of_v(x))
    parts = Sequence(*(jnp.moveaxis(t, 1, 0) for t in every))

    def one(state: Any, part: Any) -> tuple[Array, Any]:
        h, C = step(rule, part, *state)
        return h, (C,)

    h, (C,) = over_steps(one, (C,), parts, lengths)
    return h.astype(x.v.dtype), C if kept_dtype is None else C.astype(kept_dtype)


@across_explicit_axes
def _plain(rule: Rule, x: step_kernels.StepArrays) -> tuple[Array, Array]:
    """Compute the steps in plain JAX: h and the new C."""

    def compute(state: State) -> tuple[Array, State]:
        h, C = _compute(rule, DeltaArrays(*x[:8], state.C, None), x.lengths)
        return h, State(C)

    h, new = by_index(compute, State(x.C), x.indices)
    return h, new.C


def run(
    x: DeltaArrays, time: bool, state: State, lengths: Array | None, correct: bool, read_before_decay: bool,
    normalize_qk: bool, beta_activation: str, gate_activation: str, lower_bound: float | None, scale: float | None,
    return_state: bool, in_place: bool, backend: str | None, state_indices: Array | None,
) -> tuple[Array, State]:  # fmt: skip
    """Check a call of steps and compute it.

    Args:
        x: the arrays without the state, (B, ...) for one step, or (B, T, ...) with ``time``.
        time: whether ``x`` has a dim of time.
        correct: whether the rule subtracts its prediction.
        state, lengths, read_before_decay, normalize_qk, beta_activation, gate_activation, lower_bound, scale: as in
            :func:`delta_rule_steps`.
        return_state, in_place, backend, state_indices: as in :func:`delta_rule_steps`.
    """
    scale = checks.check_scale(scale)
    flags = {"read_before_decay": read_before_decay, "normalize_qk": normalize_qk, "return_state": return_state}
    checks.check_static(**flags, in_place=in_place, lower_bound=lower_bound)
    check_flags(**flags, in_place=in_place)
    checks.check_in_place(in_place)
    choose(backend, None, None, DELTA_KERNELS)
    check_arrays(x, time=time)
    rule = check_rule(
        x, scale, correct, read_before_decay, normalize_qk, beta_activation, gate_activation, lower_bound
    )  # fmt: skip
    sequences = x.q.shape[0]
    if state_indices is not None:
        check_pool(state, state_indices, sequences, "state")
        sequences = state.C.shape[0]
    checks.check_state(state, sequences, x.q, x.v, False, "state")
    if time:
        checks.check_few_steps(x.v, return_state, lengths)
    checks.check_lengths(lengths, x.v)
    given = [None if t is None else jnp.asarray(t) for t in x._replace(C=state.C)]
    if not time:
        given[:6] = [None if t is None else t[:, None] for t in given[:6]]
    ints = (None if t is None else jnp.asarray(t) for t in (lengths, state_indices))
    arrays = step_kernels.StepArrays(*given[:9], *ints)  # type: ignore[arg-type]
    gpu = step_kernels.choose(backend, arrays)
    if gpu is None:
        h, C = _plain(rule, arrays)
    else:
        spec = step_kernels.spec_of(gpu, rule, arrays, return_state, PlainSteps(_plain, rule))
        h, C = step_kernels.compute(spec, arrays)
    return h if time else h[:, 0], State(C) if return_state else state


def delta_rule_step(
    q: Array,
    k: Array,
    v: Array,
    beta: Array | None,
    state: State,
    log_f: Array | None = None,
    *,
    read_key: Array | None = None,
    read_before_decay: bool = False,
    normalize_qk: bool = False,
    beta_activation: BetaActivation = "none",
    gate_activation: GateActivation = "none",
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    in_place: bool = False,
    state_indices: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, State]:
    """Compute one step of :func:`delta_rule`, for decoding.

    Args:
        q, k: (B, Hq, dqk).
        v: (B, H, dhv).
        beta: (B, H), or None.
        state: :meth:`State.zeros` with ``normalize=False``, or the state that :func:`delta_rule` or the last step
            returned. C may be bfloat16 or float16, and the new one then is too; the arithmetic is in float32, or in
            float64 if q is float64.
        log_f: (B, H) or (B, H, dqk), or None.
        read_key: (B, Hq, dqk), or None.
        read_before_decay, normalize_qk, beta_activation, gate_activation, A_log, dt_bias, lower_bound, scale: as in
            :func:`delta_rule`.
        in_place: must be False, as in :func:`mlstm_step`; donate the state instead.
        state_indices: (B,) int32 or int64: ``state`` is a pool, see :func:`mlstm_step`.
        backend: as in :func:`delta_rule`; the steps are the same for all.

    Returns:
        h (B, H, dhv) in v's dtype, and the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`delta_rule`.
    """
    given: Any = DeltaArrays(q, k, v, beta, log_f, read_key, A_log, dt_bias, None, None)
    return run(
        given, False, state, None, True, read_before_decay, normalize_qk, beta_activation, gate_activation,
        lower_bound, scale, True, in_place, backend, state_indices,
    )  # fmt: skip


def delta_rule_steps(
    q: Array,
    k: Array,
    v: Array,
    beta: Array | None,
    state: State,
    log_f: Array | None = None,
    *,
    return_state: bool = True,
    lengths: Array | None = None,
    read_key: Array | None = None,
    read_before_decay: bool = False,
    normalize_qk: bool = False,
    beta_activation: BetaActivation = "none",
    gate_activation: GateActivation = "none",
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    in_place: bool = False,
    state_indices: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, State] | Array:
    """Compute up to 32 steps of :func:`delta_rule` in one call, for speculative decoding.

    Args:
        q, k: (B, T, Hq, dqk), T from 1 to 32.
        v: (B, T, H, dhv).
        beta: (B, T, H), or None.
        state: as in :func:`delta_rule_step`.
        log_f: (B, T, H) or (B, T, H, dqk), or None.
        return_state, lengths: as in :func:`mlstm_steps`.
        read_key: (B, T, Hq, dqk), or None.
        read_before_decay, normalize_qk, beta_activation, gate_activation, A_log, dt_bias, lower_bound, scale: as in
            :func:`delta_rule`.
        in_place, state_indices, backend: as in :func:`delta_rule_step`.

    Returns:
        h (B, T, H, dhv) in v's dtype; with ``return_state`` also the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`delta_rule`.
    """
    given: Any = DeltaArrays(q, k, v, beta, log_f, read_key, A_log, dt_bias, None, None)
    found = run(
        given, True, state, lengths, True, read_before_decay, normalize_qk, beta_activation, gate_activation,
        lower_bound, scale, return_state, in_place, backend, state_indices,
    )  # fmt: skip
    return found if return_state else found[0]
