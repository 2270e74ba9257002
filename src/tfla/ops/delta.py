"""The public operator of the delta rule over whole sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from tfla.backends.delta import BetaActivation, GateActivation
from tfla.ops import checks
from tfla.ops.delta_dispatch import DeltaRequest
from tfla.ops.delta_operator import compute
from tfla.ops.state import State
from tfla.ops.states_every import with_states_every

if TYPE_CHECKING:
    from tfla.ops.context_parallel.group import Group


@overload
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_f: Tensor | None = None,
    *,
    return_state: Literal[False] = False,
    read_key: Tensor | None = ...,
    read_before_decay: bool = ...,
    normalize_qk: bool = ...,
    beta_activation: BetaActivation = ...,
    gate_activation: GateActivation = ...,
    A_log: Tensor | None = ...,
    dt_bias: Tensor | None = ...,
    lower_bound: float | None = ...,
    scale: float | None = ...,
    initial_state: State | None = ...,
    cu_seqlens: Tensor | None = ...,
    chunk_size: int | None = ...,
    backend: str | None = ...,
    kernel: str | None = ...,
    context_parallel: Group | None = ...,
    state_indices: Tensor | None = ...,
    states_every: None = ...,
) -> Tensor: ...
@overload
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_f: Tensor | None = None,
    *,
    return_state: Literal[True],
    read_key: Tensor | None = ...,
    read_before_decay: bool = ...,
    normalize_qk: bool = ...,
    beta_activation: BetaActivation = ...,
    gate_activation: GateActivation = ...,
    A_log: Tensor | None = ...,
    dt_bias: Tensor | None = ...,
    lower_bound: float | None = ...,
    scale: float | None = ...,
    initial_state: State | None = ...,
    cu_seqlens: Tensor | None = ...,
    chunk_size: int | None = ...,
    backend: str | None = ...,
    kernel: str | None = ...,
    context_parallel: Group | None = ...,
    state_indices: Tensor | None = ...,
    states_every: None = ...,
) -> tuple[Tensor, State]: ...
@overload
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_f: Tensor | None = None,
    *,
    return_state: Literal[True],
    read_key: Tensor | None = ...,
    read_before_decay: bool = ...,
    normalize_qk: bool = ...,
    beta_activation: BetaActivation = ...,
    gate_activation: GateActivation = ...,
    A_log: Tensor | None = ...,
    dt_bias: Tensor | None = ...,
    lower_bound: float | None = ...,
    scale: float | None = ...,
    initial_state: State | None = ...,
    cu_seqlens: Tensor | None = ...,
    chunk_size: int | None = ...,
    backend: str | None = ...,
    kernel: str | None = ...,
    context_parallel: Group | None = ...,
    state_indices: Tensor | None = ...,
    states_every: int,
) -> tuple[Tensor, State, State]: ...
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_f: Tensor | None = None,
    *,
    read_key: Tensor | None = None,
    read_before_decay: bool = False,
    normalize_qk: bool = False,
    beta_activation: BetaActivation = "none",
    gate_activation: GateActivation = "none",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
    kernel: str | None = None,
    context_parallel: Group | None = None,
    state_indices: Tensor | None = None,
    states_every: int | None = None,
) -> Tensor | tuple[Tensor, State] | tuple[Tensor, State, State]:
    """Compute the gated delta rule over whole sequences.

    For every head and step t, with the read key r_t = k_t:

        C'_t = diag(exp(log_f_t)) C_{t-1}        E_t = v_t - C'_t^T r_t
        C_t  = C'_t + beta_t k_t E_t^T           h_t = scale C_t^T q_t

    Without log_f it is DeltaNet, with one log-gate for each step Gated DeltaNet, with one for each key channel KDA;
    Comba has its own read key and ``read_before_decay``, GDN-2 its own read key. docs/delta-rule.md derives the
    equations and the exact gradients.

    Args:
        q, k: (B, T, Hq, dqk), float64, float32, bfloat16 or float16. Hq divides H, and each head of q and k serves
            H / Hq heads of v. The rule needs beta |k|^2 <= 2 to be stable: k is normalized, or see ``normalize_qk``.
        v: (B, T, H, dhv), dtype of q. Any strides; a dense last dimension is read without a copy. Under autocast q, k,
            v and read_key are cast to its dtype.
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
        cu_seqlens: (sequences + 1,) int32 or int64, for B = 1: the offsets of packed sequences, as in
            :func:`tfla.mlstm`.
        chunk_size: the distance in steps between the states that are stored for the backward; None chooses it.
        backend: the name of the implementation; None chooses the fastest one that supports the inputs.
        kernel: the name of one of the backend's kernels; None chooses it.
        context_parallel: the processes that share the steps of all sequences, as in :func:`tfla.mlstm`.
        state_indices: (sequences,) int32 or int64: the states are these rows of a pool, see :func:`tfla.mlstm`. Where
            no gradients are recorded and a batch is (1, B T, ...) without a copy, the GPU kernels read and overwrite
            the rows of a pool in float32, bfloat16 or float16 themselves, "segmented" those of every batch; a sequence
            whose row the pool does not have gets NaN and writes nothing. Other calls gather and scatter the rows.
        states_every: also return the states after every so many steps, see :func:`tfla.mlstm`.

    Returns:
        h (B, T, H, dhv) in v's dtype; with ``return_state`` also the :class:`State`.

    Raises:
        ValueError, TypeError: an argument is invalid; the message names it, what was given and what is allowed.

    NaN and infinity in an input stay in their sequence and in the heads that read them, as :func:`tfla.mlstm` says.

    All tensors may be DTensors that are sharded over B or the heads, A_log and dt_bias over the heads; results are then
    sharded like v.
    """
    if states_every is not None:
        return with_states_every(
            delta_rule, {"q": q, "k": k, "v": v, "beta": beta, "log_f": log_f, "read_key": read_key}, states_every,
            initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens,
            context_parallel=context_parallel, state_indices=state_indices, read_before_decay=read_before_decay,
            normalize_qk=normalize_qk, beta_activation=beta_activation, gate_activation=gate_activation, A_log=A_log,
            dt_bias=dt_bias, lower_bound=lower_bound, scale=scale, chunk_size=chunk_size, backend=backend,
            kernel=kernel,
        )  # fmt: skip
    request = DeltaRequest(
        q=q, k=k, v=v, beta=beta, log_f=log_f, read_key=read_key, A_log=A_log, dt_bias=dt_bias, state=initial_state,
        cu_seqlens=cu_seqlens, correct=True, read_before_decay=read_before_decay, normalize_qk=normalize_qk,
        beta_activation=beta_activation, gate_activation=gate_activation, lower_bound=lower_bound,
        return_state=return_state, scale=checks.check_scale(scale), chunk_size=chunk_size, backend=backend,
        kernel=kernel,
    )  # fmt: skip
    return compute(request, context_parallel, state_indices)
