"""The public operators over whole sequences on JAX: the mLSTM and scalar-gated linear attention."""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tfla.jax import checks, chunkwise, kernels, reference
from tfla.jax.choice import Offsets, choose
from tfla.jax.delta import channel_gates
from tfla.jax.delta.channel_gates import has_channel_gates
from tfla.jax.gates import clamp, log_gates
from tfla.jax.inputs import Inputs, Spec, acc_dtype
from tfla.jax.packed_parts import Parts, initial_states
from tfla.jax.plans import KernelInputs, KernelSpec
from tfla.jax.spans import PackedSteps, of_last_device
from tfla.jax.state import State
from tfla.jax.state_pool import attend_by_index, check_without_axis
from tfla.jax.states_every import with_states_every
from tfla.ops.checks import check_chunk_size, check_flags, check_input_gate
from tfla.ops.gates import InputGate


def check_arrays(q: Array, k: Array, v: Array, i: Array | None, f: Array, gates: str) -> None:
    """Check shapes and dtypes of a call.

    Args:
        q, k, v, i, f: its arrays, with gates of each step.
        gates: what the gates are, as in :func:`tfla.jax.gates.log_gates`.
    """
    names = ("log_i", "log_f") if gates == "log" else ("i", "f")
    # Of all gates only log_i may be None.
    given = {name: t for name, t in zip(names, (i, f), strict=True) if t is not None or name != "log_i"}
    checks.check_inputs(q, k, v, given, time=True)


def prepare(
    q: Array, k: Array, v: Array, i: Array | None, f: Array, gates: str, normalize: bool, initial_state: State | None,
    return_state: bool, cu_seqlens: Offsets | None, chunk_size: int | None, scale: float | None, backend: str | None,
    kernel: str | None, normalizer_grad: bool, store_dtype: Any, context_parallel: str | None,
) -> tuple[Spec, Inputs] | tuple[KernelSpec, KernelInputs]:  # fmt: skip
    """Check a call and return its options and its arrays as the implementations read them.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    store_dtype = checks.check_store_dtype(store_dtype)
    checks.check_static(
        chunk_size=chunk_size, normalize=normalize, return_state=return_state, normalizer_grad=normalizer_grad
    )
    check_chunk_size(chunk_size)
    scale = checks.check_scale(scale)
    check_flags(normalize=normalize, return_state=return_state, normalizer_grad=normalizer_grad)
    check_arrays(q, k, v, i, f, gates)
    given_chunk_size = chunk_size
    is_open = backend is None and kernel is None
    chosen, kernel, chunk_size = choose(backend, kernel, chunk_size)
    checks.check_context_parallel(context_parallel, chosen, (*kernels.BACKENDS, "chunkwise"))
    if cu_seqlens is not None:
        checks.check_cu_seqlens(cu_seqlens, q, context_parallel)
    sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is not None:
        checks.check_state(initial_state, sequences, q, v, normalize, "initial_state")
    q, k, v = map(jnp.asarray, (q, k, v))
    if cu_seqlens is not None and context_parallel is not None:
        if initial_state is None and not return_state:
            steps = PackedSteps(q.shape[1], cu_seqlens, context_parallel)
            f, v, cu_seqlens = steps.close(jnp.asarray(f)), steps.values(v), None
        else:  # the call of this device, with sequences of its own
            parts = Parts.of(q.shape[1], cu_seqlens, context_parallel)
            initial_state = initial_states(parts, k, v, i, f, gates, normalize, initial_state)
            cu_seqlens, context_parallel = parts.offsets, None
    if is_open:
        chosen = kernels.choose(q, k, v, i, f, initial_state, cu_seqlens, context_parallel) or chosen
    sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if chosen in kernels.BACKENDS:
        return kernels.prepare(
            q, k, v, i, f, gates, normalize, initial_state, return_state, cu_seqlens, given_chunk_size, scale, chosen,
            normalizer_grad, store_dtype, context_parallel,
        )  # fmt: skip
    dtype = acc_dtype(q)
    if i is None:
        log_f = clamp(jnp.asarray(f))
        log_i = jnp.zeros_like(log_f)
    else:
        log_i, log_f = log_gates(jnp.asarray(i), jnp.asarray(f), gates)
    H, K, V = v.shape[2], q.shape[3], v.shape[3]
    state = (
        State.zeros(sequences, H, K, V, normalize=normalize, dtype=dtype) if initial_state is None else initial_state
    )
    C, n = jnp.asarray(state.C).astype(dtype), None if state.n is None else jnp.asarray(state.n).astype(dtype)
    m = None if state.m is None else clamp(jnp.asarray(state.m)).astype(dtype)
    concrete = isinstance(cu_seqlens, tuple | np.ndarray)
    offsets = tuple(int(x) for x in cu_seqlens) if concrete else None  # type: ignore[union-attr]
    at = None if concrete or cu_seqlens is None else jnp.asarray(cu_seqlens)
    spec = Spec(
        backend=chosen, kernel=kernel, scale=q.shape[3] ** -0.5 if scale is None else scale, normalize=bool(normalize),
        normalizer_grad=bool(normalizer_grad), chunk_size=chunk_size, grows=gates == "log" and not normalize,
        store_dtype=store_dtype, offsets=offsets, axis=context_parallel,
    )  # fmt: skip
    return spec, Inputs(q, k, v, log_i.astype(dtype), log_f.astype(dtype), C, n, m, at)


def _run(
    return_state: bool, parts: Parts | None, spec: Spec | KernelSpec, x: Inputs | KernelInputs
) -> Array | tuple[Array, State]:
    """Compute a call that has been checked.

    Args:
        return_state: whether it returns the state.
        parts: those of packed sequences whose states are asked for, on the devices of a mesh axis.
        spec, x: its options and arrays.
    """
    if isinstance(spec, KernelSpec):
        assert isinstance(x, KernelInputs)
        h, C, n, m = kernels.compute(spec, x)
        normalize = spec.options.normalize
    else:
        assert isinstance(x, Inputs)
        h, C, n, m = (reference if spec.backend == "reference" else chunkwise).compute(spec, x)
        normalize = spec.normalize
    if not return_state:
        return h
    if spec.axis is not None:
        C, n, m = of_last_device((C, n, m), spec.axis)
    state = State(C, n, jax.lax.stop_gradient(m)) if normalize else State(C)
    return h, state if parts is None else parts.final(state)


def compute_with_offset(
    q: Array, k: Array, v: Array, log_i: Array, log_f: Array, normalize: bool, state: State | None,
    offset: Array | None, normalizer_grad: bool,
) -> tuple[Array, State]:  # fmt: skip
    """Compute linear attention with a number added to its denominator, for interfaces of other libraries.

    Args:
        q, k, v, log_i, log_f, normalize, normalizer_grad: as in :func:`linear_attention`.
        state: the initial state, or None.
        offset: (B, T, H), added to the stabilized denominator max(|d|, exp(-m)); it gets a gradient. None is 0.

    Returns:
        h (B, T, H, dhv) in v's dtype, and the state after the last step.
    """
    spec, x = prepare(
        q, k, v, log_i, log_f, "log", normalize, state, True, None, None, None, "chunkwise", None, normalizer_grad,
        None, None,
    )  # fmt: skip
    assert isinstance(spec, Spec)
    assert isinstance(x, Inputs)
    found = _run(True, None, spec, x._replace(offset=None if offset is None else offset.astype(x.log_f.dtype)))
    assert isinstance(found, tuple)
    h, last = found
    return h, last


@overload
def mlstm(
    q: Array, k: Array, v: Array, i: Array, f: Array, *, return_state: Literal[False] = False,
    input_gate: InputGate = ..., initial_state: State | None = ..., cu_seqlens: Offsets | None = ...,
    chunk_size: int | None = ..., scale: float | None = ..., backend: str | None = ..., kernel: str | None = ...,
    normalizer_grad: bool = ..., store_dtype: Any = ..., context_parallel: str | None = ...,
    state_indices: Array | None = ..., states_every: None = ...,
) -> Array: ...  # fmt: skip
@overload
def mlstm(
    q: Array, k: Array, v: Array, i: Array, f: Array, *, return_state: Literal[True], input_gate: InputGate = ...,
    initial_state: State | None = ..., cu_seqlens: Offsets | None = ..., chunk_size: int | None = ...,
    scale: float | None = ..., backend: str | None = ..., kernel: str | None = ..., normalizer_grad: bool = ...,
    store_dtype: Any = ..., context_parallel: str | None = ..., state_indices: Array | None = ...,
    states_every: None = ...,
) -> tuple[Array, State]: ...  # fmt: skip
@overload
def mlstm(
    q: Array, k: Array, v: Array, i: Array, f: Array, *, return_state: Literal[True], states_every: int,
    input_gate: InputGate = ..., initial_state: State | None = ..., cu_seqlens: Offsets | None = ...,
    chunk_size: int | None = ..., scale: float | None = ..., backend: str | None = ..., kernel: str | None = ...,
    normalizer_grad: bool = ..., store_dtype: Any = ..., context_parallel: str | None = ...,
    state_indices: Array | None = ...,
) -> tuple[Array, State, State]: ...  # fmt: skip
def mlstm(
    q: Array,
    k: Array,
    v: Array,
    i: Array,
    f: Array,
    *,
    input_gate: InputGate = "exp",
    initial_state: State | None = None,
    return_state: bool = False,
    cu_seqlens: Offsets | None = None,
    chunk_size: int | None = None,
    scale: float | None = None,
    backend: str | None = None,
    kernel: str | None = None,
    normalizer_grad: bool = True,
    store_dtype: Any = None,
    context_parallel: str | None = None,
    state_indices: Array | None = None,
    states_every: int | None = None,
) -> Array | tuple[Array, State] | tuple[Array, State, State]:
    """Compute the mLSTM over whole sequences: mLSTMexp, equations (1)-(8) of the paper, or mLSTMsig, (22)-(24).

    This is :func:`tfla.mlstm` on arrays of JAX, with the same arguments. For every head and step t, with log_f =
    logsigmoid(f), and log_i = i (mLSTMexp) or logsigmoid(i) (mLSTMsig):

        C_t = exp(log_f_t) C_{t-1} + exp(log_i_t) k_t v_t^T        n_t = exp(log_f_t) n_{t-1} + exp(log_i_t) k_t
        h_t = scale C_t^T q_t / max(abs(scale n_t^T q_t), 1)       mLSTMsig: h_t = scale C_t^T q_t

    Under `jax.jit`, options are static: pass them by `functools.partial` or as ``static_argnames``.

    Args:
        q, k: (B, T, Hq, dqk), float64, float32, bfloat16 or float16. Hq divides H, and each head of q and k serves
            H / Hq heads of v.
        v: (B, T, H, dhv), dtype of q. Float32 is multiplied as `jax.default_matmul_precision` says; arithmetic on
            bfloat16 and float16 inputs is in float32.
        i, f: (B, T, H), pre-activations of the input and the forget gate, any float dtype. Infinite ones are allowed
            and act as fully closed or fully open gates.
        input_gate: "exp" (mLSTMexp, with a normalizer n and a max state m) or "sigmoid" (mLSTMsig, with neither).
        initial_state: the state before the first step of each sequence; None is zero.
        return_state: also return the state after the last step.
        cu_seqlens: (sequences + 1,) int32 or int64, for B = 1: the first step of each packed sequence and, last, T.
            Sequences may be empty. An array of JAX may be traced, so that one compiled function serves all lengths;
            its values are then not checked but clamped to [0, T] and to a sequence that never decreases, and steps
            outside of all sequences have outputs of zero. A tuple of ints or an array of NumPy is static, and a
            function is compiled for each.
        chunk_size: the distance in steps between the states that are stored for the backward; None is 1,024, or what
            the cost model of the kernels for GPUs chooses.
        scale: the factor of the queries, a finite number without a gradient; None is 1/sqrt(dqk).
        backend: "hopper" or "triton", the kernels for GPUs, "chunkwise", or "reference" for the equations as they are
            written, which also have derivatives in forward mode. None is the first of them that runs the call; on a GPU
            without kernels for it, a warning says once why.
        kernel: the name of one of the backend's kernels; None chooses it.
        normalizer_grad: False leaves the denominator of (4) out of the gradient, as the paper does.
        store_dtype: the dtype of the states stored for the backward. bfloat16 halves their memory and rounds the states
            from which gradients are computed; None is float32 (float64 with float64 inputs).
        context_parallel: the name of a mesh axis over whose devices the sequence is divided, in order, inside
            `jax.shard_map`. Each device passes its own steps. ``initial_state`` is that before the first device's
            part, and the returned state that after the last device's part, on all devices. ``cu_seqlens`` are offsets
            in the whole sequence, the same on all devices, and so are the states of all packed sequences.
        state_indices: (sequences,) int32 or int64: ``initial_state`` is a pool of any number of states, and sequence s
            starts from row ``state_indices[s]``, or at -1 from zero. With ``return_state`` the new pool is returned,
            whose rows are the final states; donate the old one. Indices other than -1 must differ.
        states_every: n, with ``return_state``: also return the states after every n steps, with two dims of the batch,
            (B, T // n, H, ...). Of packed sequences, whose offsets must not be traced, the one after step (j + 1) n of
            sequence s is in [0, cu_seqlens[s] // n + j], and rows of none are zero.

    Returns:
        h (B, T, H, dhv) in v's dtype, before norm and output gate; with ``return_state`` also the :class:`State`, and
        with ``states_every`` the states in between.

    Raises:
        ValueError, TypeError: an argument is invalid; the message names it, what was given and what is allowed.
    """
    check_input_gate(input_gate)
    if states_every is not None:
        every = functools.partial(
            mlstm, input_gate=input_gate, chunk_size=chunk_size, scale=scale, backend=backend, kernel=kernel,
            normalizer_grad=normalizer_grad, store_dtype=store_dtype,
        )  # fmt: skip
        return with_states_every(
            every, functools.partial(check_arrays, q, k, v, i, f, input_gate),
            {"q": q, "k": k, "v": v, "i": i, "f": f}, states_every, normalize=input_gate == "exp",
            initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens,
            context_parallel=context_parallel, state_indices=state_indices,
        )  # fmt: skip
    if state_indices is not None:
        check_without_axis(context_parallel)
        run = functools.partial(
            mlstm, q, k, v, i, f, input_gate=input_gate, return_state=return_state, cu_seqlens=cu_seqlens,
            chunk_size=chunk_size, scale=scale, backend=backend, kernel=kernel, normalizer_grad=normalizer_grad,
            store_dtype=store_dtype,
        )  # fmt: skip
        return attend_by_index(run, initial_state, state_indices, return_state, q, cu_seqlens)
    prepared = prepare(
        q, k, v, i, f, input_gate, input_gate == "exp", initial_state, return_state, cu_seqlens, chunk_size, scale,
        backend, kernel, normalizer_grad, store_dtype, context_parallel,
    )  # fmt: skip
    return _run(return_state, Parts.to_join(return_state, q, cu_seqlens, context_parallel), *prepared)


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    log_f: Array,
    log_i: Array | None = None,
    *,
    normalize: bool = False,
    initial_state: State | None = None,
    return_state: bool = False,
    cu_seqlens: Offsets | None = None,
    chunk_size: int | None = None,
    scale: float | None = None,
    backend: str | None = None,
    kernel: str | None = None,
    normalizer_grad: bool = True,
    store_dtype: Any = None,
    context_parallel: str | None = None,
    state_indices: Array | None = None,
    states_every: int | None = None,
) -> Array | tuple[Array, State] | tuple[Array, State, State]:
    """Compute gated linear attention over whole sequences.

    This is :func:`tfla.linear_attention` on arrays of JAX, with the same arguments. For every head and step t:

        C_t = diag(exp(log_f_t)) C_{t-1} + exp(log_i_t) k_t v_t^T        h_t = scale C_t^T q_t

    Args:
        q, k, v: as in :func:`mlstm`.
        log_f: (B, T, H), or (B, T, H, dqk) without ``normalize`` and ``store_dtype``: log-gates, any float dtype.
        log_i: (B, T, H), log-gates, any float dtype; None is 0. All log-gates are clamped to [-1e5, 5e4]. Results with
            gates above 0 are correct as long as the states and the results fit into float32, and the sum of log-gates
            over 64 steps is at most 176; with gates for each channel at most 88.
        normalize: divide h_t by max(abs(scale n_t^T q_t), 1) with n_t = exp(log_f_t) n_{t-1} + exp(log_i_t) k_t, as
            mLSTMexp does.
        initial_state, return_state, cu_seqlens, chunk_size, scale: as in :func:`mlstm`. Without ``normalize`` a state
            has n and m None.
        backend, kernel, normalizer_grad, store_dtype, context_parallel, state_indices, states_every: as in
            :func:`mlstm`.

    Returns:
        h (B, T, H, dhv) in v's dtype; with ``return_state`` also the :class:`State`, and with ``states_every`` the
        states in between.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    checks.check_static(normalize=normalize)
    if states_every is not None:
        every = functools.partial(
            linear_attention, normalize=normalize, chunk_size=chunk_size, scale=scale, backend=backend, kernel=kernel,
            normalizer_grad=normalizer_grad, store_dtype=store_dtype,
        )  # fmt: skip
        check = functools.partial(check_arrays, q, k, v, log_i, log_f, "log")
        if has_channel_gates(log_f):
            check = functools.partial(channel_gates.check_call, q, k, v, log_f, log_i, normalize, store_dtype)
        return with_states_every(
            every, check, {"q": q, "k": k, "v": v, "log_f": log_f, "log_i": log_i}, states_every,
            normalize=bool(normalize), initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens,
            context_parallel=context_parallel, state_indices=state_indices,
        )  # fmt: skip
    if state_indices is not None:
        check_without_axis(context_parallel)
        run = functools.partial(
            linear_attention, q, k, v, log_f, log_i, normalize=normalize, return_state=return_state,
            cu_seqlens=cu_seqlens, chunk_size=chunk_size, scale=scale, backend=backend, kernel=kernel,
            normalizer_grad=normalizer_grad, store_dtype=store_dtype,
        )  # fmt: skip
        return attend_by_index(run, initial_state, state_indices, return_state, q, cu_seqlens)
    if has_channel_gates(log_f):
        checks.check_static(normalizer_grad=normalizer_grad)
        check_flags(normalizer_grad=normalizer_grad)
        return channel_gates.linear_attention(
            q, k, v, log_f, log_i, normalize, initial_state, return_state, cu_seqlens, chunk_size, scale, backend,
            kernel, store_dtype, context_parallel,
        )  # fmt: skip
    prepared = prepare(
        q, k, v, log_i, log_f, "log", normalize, initial_state, return_state, cu_seqlens, chunk_size, scale,
        backend, kernel, normalizer_grad, store_dtype, context_parallel,
    )  # fmt: skip
    return _run(return_state, Parts.to_join(return_state, q, cu_seqlens, context_parallel), *prepared)
