"""The public operators of the delta rule for decoding: one step, or a few steps in one call."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from tfla.backends import DELTA_BACKENDS, select_steps
from tfla.backends.delta import BetaActivation, DeltaSpec, DeltaStepInputs, GateActivation
from tfla.backends.reference_delta import step
from tfla.ops import checks, delta_checks
from tfla.ops.autocast import autocast, without_autocast
from tfla.ops.checked_lengths import checked_lengths
from tfla.ops.delta_activations import activated
from tfla.ops.state import State
from tfla.ops.transforms import needs_dispatcher


class StepRequest(NamedTuple):
    """The arguments of one call of a few steps; tensors have a dimension of time with `time`."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_f: Tensor | None
    read_key: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    state: State
    lengths: Tensor | None
    time: bool
    correct: bool
    read_before_decay: bool
    normalize_qk: bool
    beta_activation: BetaActivation
    gate_activation: GateActivation
    lower_bound: float | None
    return_state: bool
    in_place: bool
    scale: float | None
    backend: str | None


def run(request: StepRequest) -> tuple[Tensor, State]:
    """Check a call and compute it from the given state.

    Returns:
        h, with a dimension of time where the request has one, and the new state.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """
    _check(request)
    x = _inputs(request)
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)
    by_dispatcher = needs_dispatcher(x)
    if request.in_place:
        checks.check_in_place(
            request.state, x.kept_dtype, recorded, by_dispatcher and not torch.compiler.is_compiling()
        )
    spec = DeltaSpec(
        scale=x.q.shape[-1] ** -0.5 if request.scale is None else request.scale,
        correct=request.correct,
        read_before_decay=bool(request.read_before_decay),
        chunk_size=1,
        kernel="",
        save=False,
        final_state=bool(request.return_state),
        normalize_qk=bool(request.normalize_qk),
        beta_activation=request.beta_activation,
        gate_activation=request.gate_activation,
        lower_bound=request.lower_bound or 0.0,
    )
    chosen = select_steps(request.backend, x, DELTA_BACKENDS)
    if chosen is None or recorded or by_dispatcher:
        h, C = _by_reference(x, spec)
        if request.in_place:
            C = request.state.C.copy_(C)
    else:
        h, C = chosen.steps(x, spec, request.state.C if request.in_place else None)
    return h if request.time else h.squeeze(1), State(C)


def _check(request: StepRequest) -> None:
    """Check the arguments of a call.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """
    q, k, v, beta, log_f, read_key, A_log, dt_bias, state, lengths = request[:10]
    checks.check_flags(
        read_before_decay=request.read_before_decay, normalize_qk=request.normalize_qk,
        return_state=request.return_state, in_place=request.in_place,
    )  # fmt: skip
    delta_checks.check_tensors(q, k, v, beta, log_f, read_key, A_log, dt_bias, time=request.time)
    delta_checks.check_activations(
        beta, log_f, A_log, dt_bias, request.beta_activation, request.gate_activation, request.lower_bound
    )
    checks.check_state(state, q.shape[0], q, v, False, "state")
    if request.time:
        checks.check_few_steps(v, request.return_state, lengths, request.in_place)
    checks.check_lengths(lengths, v)


def _inputs(request: StepRequest) -> DeltaStepInputs:
    """Return the inputs with a dimension of time, under autocast in its dtype."""
    q, k, v, beta, log_f, read_key, A_log, dt_bias, state, lengths = request[:10]
    q, k, v = autocast(q, k, v)
    if read_key is not None:
        (read_key,) = autocast(read_key)

    def timed(t: Tensor) -> Tensor:
        return t if request.time else t.unsqueeze(1)

    beta, log_f, read_key = (None if t is None else timed(t) for t in (beta, log_f, read_key))
    return DeltaStepInputs(timed(q), timed(k), timed(v), beta, log_f, read_key, A_log, dt_bias, state.C, lengths)


def _by_reference(x: DeltaStepInputs, spec: DeltaSpec) -> tuple[Tensor, Tensor]:
    """Compute the steps one after another with the reference: differentiable, on any device.

    Returns:
        h (B, T, H, dhv) in v's dtype, and C after `x.lengths` steps of each sequence (after all T where None).
    """
    dtype, group = x.acc_dtype, x.v.shape[2] // x.q.shape[2]
    lengths = x.lengths
    if lengths is not None and lengths.device.type == "cpu" and needs_dispatcher((lengths,)):
        lengths = checked_lengths(lengths, x.v.shape[1])
    with without_autocast(x.q.device.type):
        x = activated(x, spec.normalize_qk, spec.beta_activation, spec.gate_activation, spec.lower_bound)
        q, k = (t.to(dtype).repeat_interleave(group, 2) for t in (x.q, x.k))
        r = k if x.read_key is None else x.read_key.to(dtype).repeat_interleave(group, 2)
        gates = x.v.shape[:3]
        beta = q.new_ones(gates) if x.beta is None else x.beta.to(dtype)
        log_f = q.new_zeros(gates) if x.log_f is None else x.log_f.to(dtype)
        log_f = log_f if log_f.dim() == 4 else log_f.unsqueeze(-1)
        C = kept = x.C.to(dtype)
        hs = []
        for t in range(x.v.shape[1]):
            h, C = step(
                q[:, t], k[:, t], x.v[:, t].to(dtype), beta[:, t], log_f[:, t], r[:, t], C, spec.scale, spec.correct,
                spec.read_before_decay,
            )  # fmt: skip
            hs.append(h.to(x.v.dtype))
            kept = C if lengths is None else torch.where((t < lengths).view(-1, 1, 1, 1), C, kept)
    return torch.stack(hs, 1), kept.to(x.kept_dtype)


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
        backend: the name of the backend whose kernel is used; None, or a backend without a kernel for these steps,
            leaves the choice open.

    Returns:
        h (B, H, dhv) in v's dtype, and the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`delta_rule`.
    """
    return run(
        StepRequest(
            q, k, v, beta, log_f, read_key, A_log, dt_bias, state, None, False, True, read_before_decay, normalize_qk,
            beta_activation, gate_activation, lower_bound, True, in_place, checks.check_scale(scale), backend,
        )
    )  # fmt: skip


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
        in_place, backend: as in :func:`delta_rule_step`.

    Returns:
        h (B, T, H, dhv) in v's dtype; with ``return_state`` also the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`delta_rule`.
    """
    h, new = run(
        StepRequest(
            q, k, v, beta, log_f, read_key, A_log, dt_bias, state, lengths, True, True, read_before_decay, normalize_qk,
            beta_activation, gate_activation, lower_bound, return_state, in_place, checks.check_scale(scale), backend,
        )
    )  # fmt: skip
    return (h, new) if return_state else h
