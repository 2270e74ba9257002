"""The public operators of the delta rule for decoding: one step, or a few steps in one call."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from tfla.backends.delta import BetaActivation, GateActivation
from tfla.ops.checks import check_scale
from tfla.ops.delta_step_dispatch import DeltaStepRequest
from tfla.ops.delta_step_operators import compute
from tfla.ops.state import State


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    state: State,
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
    in_place: bool = False,
    state_indices: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """Compute one step of :func:`delta_rule`, for decoding.

    Args:
        q, k: (B, Hq, dqk).
        v: (B, H, dhv).
        beta: (B, H), or None.
        state: :meth:`State.zeros`, or the state that :func:`delta_rule` or the last step returned, with n and m None. C
            may be bfloat16 or float16, and the new one then is too; the arithmetic is in float32, or in float64 if q
            is float64.
        log_f: (B, H) or (B, H, dqk), or None.
        read_key: (B, Hq, dqk), or None.
        read_before_decay, normalize_qk, beta_activation, gate_activation, A_log, dt_bias, lower_bound, scale: as in
            :func:`delta_rule`.
        in_place: overwrite ``state.C`` with the new C. Gradients must not be recorded.
        state_indices: (B,) int32 or int64: the states are these rows of a pool, see :func:`mlstm_step`.
        backend: the name of the backend whose kernel is used; None, or a backend without a kernel for these steps,
            leaves the choice open.

    Returns:
        h (B, H, dhv) in v's dtype, and the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`delta_rule`.
    """
    request = DeltaStepRequest(
        q=q, k=k, v=v, beta=beta, log_f=log_f, read_key=read_key, A_log=A_log, dt_bias=dt_bias, state=state,
        lengths=None, time=False, correct=True, read_before_decay=read_before_decay, normalize_qk=normalize_qk,
        beta_activation=beta_activation, gate_activation=gate_activation, lower_bound=lower_bound, return_state=True,
        in_place=in_place, scale=check_scale(scale), backend=backend, state_indices=state_indices,
    )  # fmt: skip
    return compute(request)


@overload
def delta_rule_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    state: State,
    log_f: Tensor | None = None,
    *,
    return_state: Literal[True] = True,
    lengths: Tensor | None = ...,
    read_key: Tensor | None = ...,
    read_before_decay: bool = ...,
    normalize_qk: bool = ...,
    beta_activation: BetaActivation = ...,
    gate_activation: GateActivation = ...,
    A_log: Tensor | None = ...,
    dt_bias: Tensor | None = ...,
    lower_bound: float | None = ...,
    scale: float | None = ...,
    in_place: bool = ...,
    state_indices: Tensor | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, State]: ...
@overload
def delta_rule_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    state: State,
    log_f: Tensor | None = None,
    *,
    return_state: Literal[False],
    lengths: Tensor | None = ...,
    read_key: Tensor | None = ...,
    read_before_decay: bool = ...,
    normalize_qk: bool = ...,
    beta_activation: BetaActivation = ...,
    gate_activation: GateActivation = ...,
    A_log: Tensor | None = ...,
    dt_bias: Tensor | None = ...,
    lower_bound: float | None = ...,
    scale: float | None = ...,
    in_place: bool = ...,
    state_indices: Tensor | None = ...,
    backend: str | None = ...,
) -> Tensor: ...
def delta_rule_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    state: State,
    log_f: Tensor | None = None,
    *,
    return_state: bool = True,
    lengths: Tensor | None = None,
    read_key: Tensor | None = None,
    read_before_decay: bool = False,
    normalize_qk: bool = False,
    beta_activation: BetaActivation = "none",
    gate_activation: GateActivation = "none",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    in_place: bool = False,
    state_indices: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, State] | Tensor:
    """Compute up to 32 steps of :func:`delta_rule` in one call, for speculative decoding.

    Proposed tokens are verified with ``return_state=False``. Once it is clear how many of them each sequence accepts,
    the same call with ``lengths`` returns the state after the accepted ones.

    Args:
        q, k: (B, T, Hq, dqk), T from 1 to 32.
        v: (B, T, H, dhv).
        beta: (B, T, H), or None.
        state: as in :func:`delta_rule_step`.
        log_f: (B, T, H) or (B, T, H, dqk), or None.
        return_state: also return the new state.
        lengths: (B,) int32 or int64, from 0 to T: the new state is the one after this many steps of each sequence; None
            is T. Outputs are computed for all T steps in any case.
        read_key: (B, T, Hq, dqk), or None.
        read_before_decay, normalize_qk, beta_activation, gate_activation, A_log, dt_bias, lower_bound, scale: as in
            :func:`delta_rule`.
        in_place, state_indices, backend: as in :func:`delta_rule_step`. With ``return_state=False`` no row is written.

    Returns:
        h (B, T, H, dhv) in v's dtype; with ``return_state`` also the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`delta_rule`.
    """
    request = DeltaStepRequest(
        q=q, k=k, v=v, beta=beta, log_f=log_f, read_key=read_key, A_log=A_log, dt_bias=dt_bias, state=state,
        lengths=lengths, time=True, correct=True, read_before_decay=read_before_decay, normalize_qk=normalize_qk,
        beta_activation=beta_activation, gate_activation=gate_activation, lower_bound=lower_bound,
        return_state=return_state, in_place=in_place, scale=check_scale(scale), backend=backend,
        state_indices=state_indices,
    )  # fmt: skip
    h, new = compute(request)
    return (h, new) if return_state else h
