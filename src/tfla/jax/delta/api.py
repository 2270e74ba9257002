"""The public operator of the delta rule over whole sequences on JAX."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tfla.backends.delta import BetaActivation, GateActivation
from tfla.jax import checks
from tfla.jax.choice import DELTA_KERNELS, Offsets, choose
from tfla.jax.chunkwise import CHUNK
from tfla.jax.delta import chunkwise, kernels, reference
from tfla.jax.delta.activations import log_gate
from tfla.jax.delta.checks import check_arrays, check_rule
from tfla.jax.delta.inputs import DeltaArrays, DeltaSpec, Rule
from tfla.jax.delta.packed_parts import initial_states
from tfla.jax.inputs import acc_dtype
from tfla.jax.packed_parts import Parts
from tfla.jax.spans import PackedSteps, of_last_device
from tfla.jax.state import State
from tfla.jax.state_pool import attend_by_index, check_without_axis
from tfla.jax.states_every import with_states_every
from tfla.ops.checks import check_chunk_size, check_flags


def prepare(
    x: DeltaArrays, state: State | None, return_state: bool, correct: bool, read_before_decay: bool,
    normalize_qk: bool, beta_activation: str, gate_activation: str, lower_bound: float | None, scale: float | None,
    cu_seqlens: Offsets | None, chunk_size: int | None, backend: str | None, kernel: str | None,
    context_parallel: str | None,
) -> tuple[DeltaSpec, DeltaArrays]:  # fmt: skip
    """Check a call and return its options and its arrays.

    Args:
        x: the arrays, without the initial state and offsets.
        state, cu_seqlens: the initial state and the offsets of packed sequences.
        correct: whether the rule subtracts its prediction.
        return_state, read_before_decay, normalize_qk, beta_activation, gate_activation, lower_bound, scale: as in
            :func:`delta_rule`.
        chunk_size, backend, kernel, context_parallel: as in :func:`delta_rule`.

    Raises:
        ValueError, TypeError: as :func:`delta_rule`.
    """
    scale = checks.check_scale(scale)
    checks.check_static(
        chunk_size=chunk_size, read_before_decay=read_before_decay, normalize_qk=normalize_qk,
        lower_bound=lower_bound, return_state=return_state,
    )  # fmt: skip
    check_chunk_size(chunk_size)
    check_flags(read_before_decay=read_before_decay, normalize_qk=normalize_qk, return_state=return_state)
    check_arrays(x)
    rule = check_rule(
        x, scale, correct, read_before_decay, normalize_qk, beta_activation, gate_activation, lower_bound
    )  # fmt: skip
    is_open, wanted = backend is None and kernel is None, (kernel, chunk_size)
    backend, kernel, chunk_size = choose(backend, kernel, chunk_size, DELTA_KERNELS)
    # Kernels run packed calls of each device.
    allowed = ("chunkwise",) if cu_seqlens is None else ("chunkwise", *kernels.BACKENDS)
    checks.check_context_parallel(context_parallel, backend, allowed)
    if cu_seqlens is not None:
        checks.check_cu_seqlens(cu_seqlens, x.q, context_parallel)
    sequences = x.q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if state is not None:
        checks.check_state(state, sequences, x.q, x.v, False, "initial_state")
    x = DeltaArrays(*(None if t is None else jnp.asarray(t) for t in x))  # type: ignore[arg-type]
    if is_open:
        packed: Any = None if cu_seqlens is None else jax.ShapeDtypeStruct((sequences + 1,), jnp.int32)
        axis = context_parallel if cu_seqlens is None else None
        asked = DeltaSpec(rule, backend, kernel, chunk_size, sequences, None, axis)
        best = kernels.choose(asked, x._replace(cu_seqlens=packed))
        backend, kernel, chunk_size = choose(best, *wanted, DELTA_KERNELS)
    if cu_seqlens is not None and context_parallel is not None:
        if state is None and not return_state and backend == "chunkwise":
            x, rule = _divide_packed(x, rule, cu_seqlens, context_parallel)
            cu_seqlens, sequences = None, 1
        else:  # the call of this device, with sequences of its own
            parts = Parts.of(x.q.shape[1], cu_seqlens, context_parallel)
            state = initial_states(parts, rule, x, state, chunk_size if backend == "chunkwise" else CHUNK)
            cu_seqlens, context_parallel = parts.offsets, None
    concrete = isinstance(cu_seqlens, tuple | np.ndarray)
    offsets = tuple(int(t) for t in cu_seqlens) if concrete else None  # type: ignore[union-attr]
    x = x._replace(C=None if state is None else state.C, cu_seqlens=None if concrete else cu_seqlens)  # type: ignore[arg-type]
    spec = DeltaSpec(rule, backend, kernel, chunk_size, sequences, offsets, context_parallel)
    if backend in kernels.BACKENDS:
        spec = kernels.with_kernel(spec, x, *wanted)
    return spec, DeltaArrays(*(None if t is None else jnp.asarray(t) for t in x))  # type: ignore[arg-type]


def _divide_packed(x: DeltaArrays, rule: Rule, cu_seqlens: Offsets, axis: str) -> tuple[DeltaArrays, Rule]:
    """Return the arrays and the rule of one sequence that acts as the packed ones, see :class:`.PackedSteps`."""
    steps = PackedSteps(x.v.shape[1], cu_seqlens, axis)
    log_f = jnp.zeros(x.v.shape[:-1], acc_dtype(x.q))
    if x.log_f is not None:  # a gate is closed after its activation
        log_f = log_gate(x.log_f, rule.gate_activation, x.A_log, x.dt_bias, rule.lower_bound)
    read_key = x.read_key
    if rule.read_before_decay:  # which a closed gate comes too late for
        read_key = steps.read_keys(x.k if read_key is None else read_key)
    x = x._replace(v=steps.values(x.v), log_f=steps.close(log_f), read_key=read_key, A_log=None, dt_bias=None)
    return x, rule._replace(gate_activation="none", lower_bound=0.0)


def run(
    return_state: bool, parts: Parts | None, spec: DeltaSpec, x: DeltaArrays
) -> Array | tuple[Array, State]:  # fmt: skip
    """Compute a call that has been checked.

    Args:
        return_state: whether it returns the state.
        parts: those of packed sequences whose states are asked for, on the devices of a mesh axis.
        spec, x: its options and arrays.
    """
    if spec.backend in kernels.BACKENDS:
        h, C = kernels.compute(kernels.prepare(spec, x, bool(return_state)), spec, x)
    else:
        h, C = (reference if spec.backend == "reference" else chunkwise).compute(spec, x)
    if not return_state:
        return h
    state = State(C if spec.axis is None else of_last_device(C, spec.axis))
    return h, state if parts is None else parts.final(state)


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array | None,
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
    """Compute the gated delta rule over whole sequences.

    This is :func:`tfla.delta_rule` on arrays of JAX, with the same arguments. For every head and step t, with the read
    key r_t = k_t:

        C'_t = diag(exp(log_f_t)) C_{t-1}        E_t = v_t - C'_t^T r_t
        C_t  = C'_t + beta_t k_t E_t^T           h_t = scale C_t^T q_t

    Without log_f it is DeltaNet, with one log-gate for each step Gated DeltaNet, with one for each key channel KDA.

    Args:
        q, k: (B, T, Hq, dqk), float64, float32, bfloat16 or float16. Hq divides H, and each head of q and k serves
            H / Hq heads of v. The rule needs beta |k|^2 <= 2 to be stable.
        v: (B, T, H, dhv), dtype of q.
        beta: (B, T, H), write strengths in any float dtype; None is 1.
        log_f: (B, T, H) or (B, T, H, dqk), log-gates in any float dtype; None is no decay. They are clamped to
            [-1e5, 5e4], so that -inf closes a gate.
        read_key: (B, T, Hq, dqk), dtype of q, the keys by which the state is read; None is k.
        read_before_decay: E_t = v_t - C_{t-1}^T r_t.
        normalize_qk: divide q, k and read_key by sqrt(their squared norm + 1e-6).
        beta_activation: "none", "sigmoid" for sigmoid(beta), or "2sigmoid" for 2 sigmoid(beta).
        gate_activation: "none"; "softplus" for log-gates -exp(A_log) softplus(log_f + dt_bias); or "sigmoid" for
            lower_bound sigmoid(exp(A_log) (log_f + dt_bias)).
        A_log: (H,), of the gates' activation; None is 0, for "sigmoid" alone.
        dt_bias: (H,), or (H, dqk) with gates for each channel, of the gates' activation; None is 0.
        lower_bound: the smallest log-gate of "sigmoid".
        scale: the factor of the queries, a finite number without a gradient; None is 1/sqrt(dqk).
        initial_state: the state before the first step of each sequence, with n and m None; None is zero.
        return_state: also return the state after the last step.
        cu_seqlens, chunk_size: as in :func:`mlstm`.
        backend: "hopper" or "triton", the kernels for NVIDIA GPUs, for bfloat16; "chunkwise"; or "reference" for the
            equations as they are written, which also have derivatives in forward mode. None is the first of them that
            runs the call; on a GPU without kernels for it, a warning says once why.
        kernel: the name of one of the backend's kernels; None chooses it.
        context_parallel: the name of a mesh axis over whose devices the sequence is divided, as in :func:`mlstm`. The
            kernels for GPUs compute packed sequences alone, "chunkwise" all.
        state_indices: (sequences,) int32 or int64: the states are these rows of a pool, see :func:`mlstm`.
        states_every: n, with ``return_state``: also return the states after every n steps, see :func:`mlstm`.

    Returns:
        h (B, T, H, dhv) in v's dtype; with ``return_state`` also the :class:`State`, and with ``states_every`` the
        states in between.

    Raises:
        ValueError, TypeError: an argument is invalid; the message names it, what was given and what is allowed.
    """
    options: dict[str, Any] = {
        "read_before_decay": read_before_decay, "normalize_qk": normalize_qk, "beta_activation": beta_activation,
        "gate_activation": gate_activation, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound,
        "scale": scale, "chunk_size": chunk_size, "backend": backend, "kernel": kernel,
    }  # fmt: skip
    if states_every is not None:
        given = {"q": q, "k": k, "v": v, "beta": beta, "log_f": log_f, "read_key": read_key}

        def part(**arrays: Any) -> Any:
            """Compute some steps, of arrays that may be left out."""
            missing: dict[str, Any] = dict.fromkeys(given)
            return delta_rule(**missing | arrays, **options)

        every: Any = DeltaArrays(q, k, v, beta, log_f, read_key, A_log, dt_bias, None, None)
        check = functools.partial(check_arrays, every)
        return with_states_every(
            part, check, given, states_every, normalize=False, initial_state=initial_state, return_state=return_state,
            cu_seqlens=cu_seqlens, context_parallel=context_parallel, state_indices=state_indices,
        )  # fmt: skip
    if state_indices is not None:
        check_without_axis(context_parallel)
        of_rows = functools.partial(
            delta_rule, q, k, v, beta, log_f, read_key=read_key, return_state=return_state, cu_seqlens=cu_seqlens,
            **options,
        )  # fmt: skip
        return attend_by_index(of_rows, initial_state, state_indices, return_state, q, cu_seqlens)
    x: Any = DeltaArrays(q, k, v, beta, log_f, read_key, A_log, dt_bias, None, None)
    prepared = prepare(
        x, initial_state, return_state, True, read_before_decay, normalize_qk, beta_activation, gate_activation,
        lower_bound, scale, cu_seqlens, chunk_size, backend, kernel, context_parallel,
    )  # fmt: skip
    return run(return_state, Parts.to_join(return_state, q, cu_seqlens, context_parallel), *prepared)
