"""The functions that the JAX kernels of mlstm_kernels compute, by tfla's operator.

With the max state m_t (1) and the denominator d_t = scale n_t^T q_t of the stabilized state, that is

    h_t = num_t / (max(|d_t|, exp(-m_t)) + eps)

where tfla's operator has no eps. The dimension of heads comes before that of time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tfla.integrations.arguments import check_epsilon, check_flags
from tfla.integrations.mlstm_kernels import shapes
from tfla.integrations.mlstm_kernels.variants import KernelVariant
from tfla.jax.api import compute_with_offset
from tfla.jax.checks import check_float, check_shape
from tfla.jax.gates import clamp, log_gates
from tfla.jax.state import State
from tfla.jax.steps import step_with_offset
from tfla.ops.gates import LOG_GATE_MIN

States = tuple[Array, ...]
Result = Array | tuple[Array, States]
MAX_EXP = 1e30  # bounds exp(-m), which overflows where all gates are closed; it is then the whole denominator


def check_inputs(q: Any, k: Any, v: Any, i: Any, f: Any) -> None:
    """Check the dtypes and the shapes of q, k (B, NH, S, DHQK), v (B, NH, S, DHHV) and i, f (B, NH, S)."""
    shapes.check_inputs(check_float, check_shape, q, k, v, i, f)


def max_states(log_i: Array, log_f: Array, initial_m: Array) -> Array:
    """Compute the max states m_t = max(log_f_t + m_{t-1}, log_i_t), (1), as a differentiable function.

    Args:
        log_i, log_f: (B, T, H).
        initial_m: m_0, (B, H). From LOG_GATE_MIN on, the result is the row maximum of (29).
    """

    def compose(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return a[0] + b[0], jnp.maximum(a[1] + b[0], b[1])

    total, largest = jax.lax.associative_scan(compose, (log_f, log_i), axis=1)
    return jnp.maximum(largest, total + initial_m[:, None])


def _read_initial_state(normalize: bool, sigmoid: bool, q: Any, v: Any, c: Any, n: Any, m: Any) -> State | None:
    """Return the initial state as tfla's operator takes it, or None where c, n and m are None.

    Those of the three that are None become zeros. With a sigmoid input gate m has no effect.
    """
    if c is None and n is None and m is None:
        return None
    (B, H, _, K), V = q.shape, v.shape[3]
    zeros = jnp.zeros((B, H), jnp.float64 if q.dtype == jnp.float64 else jnp.float32)
    for name, t, shape in (("c_initial", c, (B, H, K, V)), ("n_initial", n, (B, H, K))):
        if t is not None:
            check_float(name, t)
            check_shape(name, t, shape)
    if m is not None:
        check_float("m_initial", m)
        if m.ndim == 3:
            check_shape("m_initial", m, (B, H, 1))
            m = m[..., 0]
        check_shape("m_initial", m, (B, H))
    c = jnp.broadcast_to(zeros[..., None, None], (B, H, K, V)) if c is None else c
    if not normalize:
        return State(c)
    n = jnp.broadcast_to(zeros[..., None], (B, H, K)) if n is None else n
    return State(c, n, zeros if sigmoid or m is None else m)


def compute_sequence(
    variant: KernelVariant,
    q: Array,
    k: Array,
    v: Array,
    i: Array,
    f: Array,
    c_initial: Array | None,
    n_initial: Array | None,
    m_initial: Array | None,
    return_last_states: bool,
    eps: float,
    *,
    normalize: bool = True,
    autocast_dtype: Any = None,
) -> Result:
    """Compute the outputs of a batch of sequences of any length.

    Args:
        variant: the kernel's properties.
        q, k: (B, NH, S, DHQK).
        v: (B, NH, S, DHHV).
        i, f: (B, NH, S), pre-activations of the gates.
        c_initial, n_initial, m_initial: (B, NH, DHQK, DHHV), (B, NH, DHQK) and (B, NH) or (B, NH, 1); zeros if None.
        return_last_states: also return the last states.
        eps: the number that is added to the stabilized denominator max(|d|, exp(-m)).
        normalize: divide by the denominator.
        autocast_dtype: the dtype to which q, k and v are cast before products; None leaves them.

    Returns:
        h (B, NH, S, DHHV) in the dtype of q; with `return_last_states` also (c, n, m), or (c, n) with a sigmoid input
        gate.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    check_inputs(q, k, v, i, f)
    check_epsilon("eps", eps)
    check_flags(return_last_states=return_last_states, normalize=normalize)
    if variant.parallel and (return_last_states or not (c_initial is None and n_initial is None and m_initial is None)):
        raise ValueError("return_last_states, c_initial, n_initial, m_initial: parallel kernels have no states")
    sigmoid, dtype = variant.input_gate == "sigmoid", q.dtype
    state = _read_initial_state(normalize, sigmoid, q, v, c_initial, n_initial, m_initial)
    if autocast_dtype is not None and dtype != jnp.float64:
        q, k, v = (t.astype(autocast_dtype) for t in (q, k, v))
    q, k, v, i, f = (jnp.swapaxes(t, 1, 2) for t in (q, k, v, i, f))
    log_i, log_f = log_gates(i, f, variant.input_gate)
    m0 = jnp.zeros(log_f[:, 0].shape, log_f.dtype) if state is None or state.m is None else clamp(state.m)
    m, offset = None, None
    if normalize:
        m = max_states(log_i, log_f, m0.astype(log_f.dtype))
        if not variant.exact_gradients:
            m = jax.lax.stop_gradient(m)
        fixed = jax.lax.stop_gradient(m)
        if sigmoid:  # the kernel has no max state
            offset = eps * jnp.minimum(jnp.exp(-fixed), MAX_EXP)
        elif variant.parallel:
            own = max_states(log_i, log_f, jnp.full_like(m0, LOG_GATE_MIN).astype(log_f.dtype))
            own = own if variant.exact_gradients else jax.lax.stop_gradient(own)
            offset = eps * jnp.exp(own - fixed)
        else:
            offset = eps * jnp.exp(m - fixed)
    h, last = compute_with_offset(
        q, k, v, log_i, log_f, normalize, state, offset if eps else None, variant.exact_gradients
    )
    h = jnp.swapaxes(h, 1, 2).astype(dtype)
    if not return_last_states:
        return h
    if not normalize:
        return h, (last.C, jnp.zeros(last.C.shape[:3], last.C.dtype))
    assert last.n is not None
    assert last.m is not None
    assert m is not None
    if sigmoid:
        scale = jnp.exp(last.m)
        return h, (last.C * scale[..., None, None], last.n * scale[..., None])
    # The operator's states carry no gradient of m. `dm` is 0 and carries it: C and n shrink where m grows.
    dm = (m[:, -1] - jax.lax.stop_gradient(m[:, -1])).astype(last.C.dtype)
    scale = jnp.exp(-dm)
    return h, (last.C * scale[..., None, None], last.n * scale[..., None], last.m + dm)


def compute_step(
    q: Array, k: Array, v: Array, i: Array, f: Array, c: Array, n: Array, m: Array, eps: float, state_dtype: Any
) -> tuple[Array, States]:
    """Compute one step of mLSTMexp.

    Args:
        q, k: (B, NH, DHQK).
        v: (B, NH, DHHV).
        i, f: (B, NH, 1), pre-activations of the gates.
        c, n, m: the state before the step, (B, NH, DHQK, DHHV), (B, NH, DHQK) and (B, NH, 1).
        eps: the number that is added to the stabilized denominator max(|d|, exp(-m)).
        state_dtype: the dtype of the new state; None is that of the old one.

    Returns:
        h (B, NH, DHHV) in the dtype of v, and the new state (c, n, m).

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    check_epsilon("eps", eps)
    shapes.check_step(check_float, check_shape, q, v, i, f, c, n, m)
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    kept = c.dtype if state_dtype is None else jnp.dtype(state_dtype)
    state = State(c.astype(wide), n.astype(wide), m[..., 0].astype(wide))
    h, new = step_with_offset(q, k, v, i[..., 0], f[..., 0], state, eps)
    assert new.n is not None
    assert new.m is not None
    return h, (new.C.astype(kept), new.n.astype(kept), new.m[..., None].astype(kept))
