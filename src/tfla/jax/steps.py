"""The public operators for decoding on JAX: one step, or a few steps in one call, from a given state to the next."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax import checks, step_kernels
from tfla.jax.choice import choose
from tfla.jax.delta import channel_gates
from tfla.jax.delta.channel_gates import has_channel_gates
from tfla.jax.explicit import across_explicit_axes
from tfla.jax.gates import clamp, log_gates
from tfla.jax.inputs import acc_dtype, vary_alike
from tfla.jax.reference import Triple, step
from tfla.jax.scans import over_steps
from tfla.jax.state import State
from tfla.jax.state_pool import check_pool
from tfla.jax.step_kernels import KernelOptions, PlainSteps, StepInputs, by_index
from tfla.ops.checks import check_flags, check_input_gate
from tfla.ops.gates import InputGate


class StepSpec(NamedTuple):
    """The options of a call, all of them static."""

    scale: float
    gates: str  # what the gates are, as in tfla.jax.gates.log_gates
    normalize: bool
    eps: float  # added to the stabilized denominator
    m_gradient: bool  # differentiate m too


Given = tuple[Array, Array, Array, Array | None, Array]  # q, k, v and the gates, with a dim of time


@functools.partial(jax.jit, static_argnums=0)
def _compute(spec: StepSpec, given: Given, state: State, lengths: Array | None) -> tuple[Array, State]:
    """Compute the steps one after another, (1)-(8) or (22)-(24).

    Returns:
        h (B, T, H, dhv) in v's dtype, and the state after ``lengths`` steps of each sequence (after all where None).
    """
    q, k, v, i, f, lengths = vary_alike(*given, lengths)
    dtype, group, out_dtype = acc_dtype(q), v.shape[2] // q.shape[2], v.dtype
    if i is None:
        log_f = clamp(f)
        log_i = jnp.zeros_like(log_f)
    else:
        log_i, log_f = log_gates(i, f, spec.gates)
    C = state.C.astype(dtype)
    n = None if state.n is None else state.n.astype(dtype)
    m = None if state.m is None else clamp(state.m).astype(dtype)
    if lengths is not None and n is not None and m is not None and not spec.m_gradient:
        # A state after no steps, too, has the derivatives in m in C and n: m is then a constant.
        weight = jnp.exp(m - jax.lax.stop_gradient(m))
        C, n, m = weight[..., None, None] * C, weight[..., None] * n, jax.lax.stop_gradient(m)
    q, k = (jnp.repeat(t.astype(dtype), group, 2) for t in (q, k))
    parts = tuple(jnp.moveaxis(t.astype(dtype), 1, 0) for t in (q, k, v, log_i, log_f))
    C, n, m, *_ = vary_alike(C, n, m, q, lengths)

    def one(state: Triple, part: Any) -> tuple[Array, Triple]:
        q, k, v, log_i, log_f = part
        return step(q, k, v, log_i, log_f, state, spec.scale, spec.normalize, eps=spec.eps, m_gradient=spec.m_gradient)

    h, (C, n, m) = over_steps(one, (C, n, m), parts, lengths)
    h = h.astype(out_dtype)

    def as_kept(x: Array, given: Array | None) -> Array:  # a state of 16 bits stays so
        assert given is not None
        return x.astype(given.dtype if given.dtype.itemsize == 2 else dtype)

    if state.n is None:
        return h, State(as_kept(C, state.C))
    return h, State(as_kept(C, state.C), as_kept(n, state.n), m if spec.m_gradient else jax.lax.stop_gradient(m))


def _steps(
    given: Given, time: bool, state: State, lengths: Array | None, scale: float | None, gates: str, normalize: bool,
    return_state: bool, in_place: bool, backend: str | None, eps: float = 0.0, m_gradient: bool = False,
    state_indices: Array | None = None,
) -> tuple[Array, State]:  # fmt: skip
    """Check a call and compute it.

    Args:
        given: q, k, v and the two gates, (B, ...) for one step, or (B, T, ...) with ``time``.
        time: whether ``given`` has a dimension of time.
        state, lengths, scale, return_state, in_place, backend: as in :func:`mlstm_steps`.
        gates: what the gates are, as in :func:`tfla.jax.gates.log_gates`.
        normalize: whether the state has n and m.
        eps: is added to the stabilized denominator.
        m_gradient: differentiate m too.
        state_indices: as in :func:`mlstm_step`.
    """
    scale = checks.check_scale(scale)
    checks.check_static(normalize=normalize, return_state=return_state, in_place=in_place)
    check_flags(normalize=normalize, return_state=return_state, in_place=in_place)
    checks.check_in_place(in_place)
    choose(backend, None, None)
    q, k, v, i, f = given
    names = ("log_i", "log_f") if gates == "log" else ("i", "f")
    # Of all gates only log_i may be None.
    present = {name: x for name, x in zip(names, (i, f), strict=True) if x is not None or name != "log_i"}
    checks.check_inputs(q, k, v, present, time=time)
    sequences = q.shape[0]
    if state_indices is not None:
        check_pool(state, state_indices, q.shape[0], "state", return_state)
        sequences = state.C.shape[0]
    checks.check_state(state, sequences, q, v, normalize, "state")
    if time:
        checks.check_few_steps(v, return_state, lengths)
    checks.check_lengths(lengths, v)
    spec = StepSpec(q.shape[-1] ** -0.5 if scale is None else scale, gates, bool(normalize), eps, m_gradient)
    arrays = (None if x is None else jnp.asarray(x) for x in given)
    if not time:
        arrays = (None if x is None else x[:, None] for x in arrays)
    rest = (None if t is None else jnp.asarray(t) for t in (*state, lengths, state_indices))
    x = StepInputs(*arrays, *rest)  # type: ignore[arg-type]
    gpu = None if m_gradient else step_kernels.choose(backend, x)  # the kernel's m has no gradient
    if gpu is None:
        h, *new = _plain(spec, x)
    else:
        plain = PlainSteps(_plain, spec)
        options = KernelOptions(spec.scale, gates, eps, return_state)
        h, *new = step_kernels.compute(step_kernels.spec_of(gpu, options, x, plain), x)
        if new[2] is not None:
            new[2] = jax.lax.stop_gradient(new[2])
    return h if time else h[:, 0], State(*new) if return_state else state


@across_explicit_axes
def _plain(spec: StepSpec, x: StepInputs) -> tuple[Array, Array, Array | None, Array | None]:
    """Compute the steps in plain JAX: h and the new C, n and m."""
    h, new = by_index(lambda state: _compute(spec, x[:5], state, x.lengths), State(x.C, x.n, x.m), x.indices)
    return h, *new


def mlstm_step(
    q: Array,
    k: Array,
    v: Array,
    i: Array,
    f: Array,
    state: State,
    *,
    input_gate: InputGate = "exp",
    scale: float | None = None,
    in_place: bool = False,
    state_indices: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, State]:
    """Compute one step of :func:`mlstm`, for decoding.

    This is :func:`tfla.mlstm_step` on arrays of JAX. With m_t = max(log_f_t + m_{t-1}, log_i_t), (1), the stored state
    is

        C_t = exp(log_f_t + m_{t-1} - m_t) C_{t-1} + exp(log_i_t - m_t) k_t v_t^T        n_t likewise, of k_t alone
        h_t = scale C_t^T q_t / max(abs(scale n_t^T q_t), exp(-m_t))

    and for the sigmoid input gate that of :func:`mlstm`, without m and the denominator.

    Args:
        q, k, v: (B, Hq, dqk), (B, Hq, dqk), (B, H, dhv), as one step of :func:`mlstm`.
        i, f: (B, H), pre-activations, any float dtype.
        state: :meth:`State.zeros`, or the state that :func:`mlstm` or the last step returned. C and n may be bfloat16
            or float16, and the new ones then are too; the arithmetic is in float32, or in float64 if q is float64.
        input_gate, scale: as in :func:`mlstm`.
        in_place: must be False, since arrays of JAX are never overwritten. To let XLA use the memory of the old state
            for the new one, donate it: ``jax.jit(step, donate_argnames="state")``.
        state_indices: (B,) int32 or int64: ``state`` is a pool of any number of states, of which sequence b has row
            ``state_indices[b]``, and the new pool is returned. Rows are read and overwritten where they are if the pool
            is donated. Indices may be -1, for which h is 0, and must otherwise differ.
        backend: as in :func:`mlstm`; the steps are the same for all.

    Returns:
        h (B, H, dhv) in v's dtype, and the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    check_input_gate(input_gate)
    given = q, k, v, i, f
    return _steps(
        given, False, state, None, scale, input_gate, input_gate == "exp", True, in_place, backend,
        state_indices=state_indices,
    )  # fmt: skip


def step_with_offset(q: Array, k: Array, v: Array, i: Array, f: Array, state: State, eps: float) -> tuple[Array, State]:
    """Compute :func:`mlstm_step` with an exponential gate and the denominator max(abs(scale n^T q), exp(-m)) + eps.

    The gradient of m is that of (1).
    """
    return _steps((q, k, v, i, f), False, state, None, None, "exp", True, True, False, None, eps, True)


def linear_attention_step(
    q: Array,
    k: Array,
    v: Array,
    log_f: Array,
    state: State,
    log_i: Array | None = None,
    *,
    normalize: bool = False,
    scale: float | None = None,
    in_place: bool = False,
    state_indices: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, State]:
    """Compute one step of :func:`linear_attention`, for decoding.

    Args:
        q, k, v: (B, Hq, dqk), (B, Hq, dqk), (B, H, dhv).
        log_f: (B, H), or (B, H, dqk) without ``normalize``: log-gates, any float dtype.
        log_i: (B, H), log-gates, any float dtype; None is 0.
        state: as in :func:`mlstm_step`; without ``normalize`` its n and m are None.
        normalize, scale: as in :func:`linear_attention`.
        in_place, state_indices, backend: as in :func:`mlstm_step`.

    Returns:
        h (B, H, dhv) in v's dtype, and the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    if has_channel_gates(log_f, time=False):
        more = (False, True, in_place, scale, backend, state_indices)
        return channel_gates.steps(q, k, v, log_f, log_i, normalize, state, None, *more)
    given = q, k, v, log_i, log_f
    options = scale, "log", normalize, True, in_place, backend
    return _steps(given, False, state, None, *options, state_indices=state_indices)


@overload
def mlstm_steps(
    q: Array, k: Array, v: Array, i: Array, f: Array, state: State, *, return_state: Literal[True] = True,
    lengths: Array | None = ..., input_gate: InputGate = ..., scale: float | None = ..., in_place: bool = ...,
    state_indices: Array | None = ..., backend: str | None = ...,
) -> tuple[Array, State]: ...  # fmt: skip
@overload
def mlstm_steps(
    q: Array, k: Array, v: Array, i: Array, f: Array, state: State, *, return_state: Literal[False],
    lengths: Array | None = ..., input_gate: InputGate = ..., scale: float | None = ..., in_place: bool = ...,
    state_indices: Array | None = ..., backend: str | None = ...,
) -> Array: ...  # fmt: skip
def mlstm_steps(
    q: Array,
    k: Array,
    v: Array,
    i: Array,
    f: Array,
    state: State,
    *,
    return_state: bool = True,
    lengths: Array | None = None,
    input_gate: InputGate = "exp",
    scale: float | None = None,
    in_place: bool = False,
    state_indices: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, State] | Array:
    """Compute up to 32 steps of :func:`mlstm` in one call, for speculative decoding.

    Args:
        q, k, v: (B, T, Hq, dqk), (B, T, Hq, dqk), (B, T, H, dhv), as in :func:`mlstm`, T from 1 to 32.
        i, f: (B, T, H), pre-activations, any float dtype.
        state: as in :func:`mlstm_step`.
        return_state: also return the new state.
        lengths: (B,) int32 or int64, from 0 to T: the new state is the one after this many steps of each sequence; None
            is T. Outputs are computed for all T steps in any case. Where they are traced, they are clamped to [0, T].
        input_gate, scale, in_place, state_indices, backend: as in :func:`mlstm_step`.

    Returns:
        h (B, T, H, dhv) in v's dtype; with ``return_state`` also the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    check_input_gate(input_gate)
    given = q, k, v, i, f
    found = _steps(
        given, True, state, lengths, scale, input_gate, input_gate == "exp", return_state, in_place, backend,
        state_indices=state_indices,
    )  # fmt: skip
    return found if return_state else found[0]


def linear_attention_steps(
    q: Array,
    k: Array,
    v: Array,
    log_f: Array,
    state: State,
    log_i: Array | None = None,
    *,
    normalize: bool = False,
    return_state: bool = True,
    lengths: Array | None = None,
    scale: float | None = None,
    in_place: bool = False,
    state_indices: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, State] | Array:
    """Compute up to 32 steps of :func:`linear_attention` in one call.

    Args:
        q, k, v: (B, T, Hq, dqk), (B, T, Hq, dqk), (B, T, H, dhv), T from 1 to 32.
        log_f: (B, T, H), or (B, T, H, dqk) without ``normalize``: log-gates, any float dtype.
        log_i: (B, T, H), log-gates, any float dtype; None is 0.
        state: as in :func:`linear_attention_step`.
        normalize, scale: as in :func:`linear_attention`.
        return_state, lengths, in_place, state_indices, backend: as in :func:`mlstm_steps`.

    Returns:
        h (B, T, H, dhv) in v's dtype; with ``return_state`` also the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    if has_channel_gates(log_f):
        more = (True, return_state, in_place, scale, backend, state_indices)
        found = channel_gates.steps(q, k, v, log_f, log_i, normalize, state, lengths, *more)
        return found if return_state else found[0]
    given = q, k, v, log_i, log_f
    options = scale, "log", normalize, return_state, in_place, backend
    found = _steps(given, True, state, lengths, *options, state_indices=state_indices)
    return found if return_state else found[0]
