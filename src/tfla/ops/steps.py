"""The public operators for decoding: one step, or a few steps in one call, from a given state to the next."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from tfla._util.caching import CallCache
from tfla.backends import BACKENDS, StepInputs, select_steps
from tfla.backends.base import Gates, Replay, StepSpec
from tfla.backends.reference import bounded_denominator
from tfla.backends.reference import step as reference_step
from tfla.ops import channel_gates, checks
from tfla.ops.autocast import autocast, without_autocast
from tfla.ops.channel_gates import has_channel_gates
from tfla.ops.dispatch import call_signature
from tfla.ops.gates import InputGate, clamp, log_gates
from tfla.ops.state import State
from tfla.ops.step_operators import checked_lengths, steps, steps_
from tfla.ops.transforms import PLAIN, needs_dispatcher, transforms_active


def _by_reference(x: StepInputs, spec: StepSpec) -> tuple[Tensor, State]:
    """Compute the steps one after another with the reference: differentiable, on any device.

    Equations (1)-(8) or (22)-(24); `spec.eps` is added to the denominator that is stabilized by exp(-m).

    Returns:
        h (B, T, H, dhv) in v's dtype, and the state after `x.lengths` steps of each sequence (after all T where None).
    """
    dtype, group = x.acc_dtype, x.v.shape[2] // x.q.shape[2]
    q, k = (t.repeat_interleave(group, 2).to(dtype) if group > 1 else t.to(dtype) for t in (x.q, x.k))
    if spec.gates != "log":
        assert x.i is not None
        log_i, log_f = log_gates(x.i, x.f, spec.gates)
    else:
        log_f = clamp(x.f)
        log_i = torch.zeros_like(log_f) if x.i is None else clamp(x.i)
    none = x.C.new_empty(0)
    normalize = x.n is not None
    n, m = (none, none) if x.n is None or x.m is None else (x.n.to(dtype), clamp(x.m).to(dtype))
    now = kept = x.C.to(dtype), n, m
    hs = []
    lengths = x.lengths
    if lengths is not None and lengths.device.type == "cpu" and needs_dispatcher((lengths,)):
        lengths = checked_lengths(lengths, x.v.shape[1])
    with without_autocast(x.q.device.type):
        for t in range(x.v.shape[1]):
            q_t, k_t, v_t, i_t, f_t = (part[:, t].to(dtype) for part in (q, k, x.v, log_i, log_f))
            h, d, now = reference_step(q_t, k_t, v_t, i_t, f_t, *now, spec.scale, normalize)
            if spec.eps:
                d = bounded_denominator(d, now[2])
                h = h * (d / (d + spec.eps))[..., None]
            hs.append(h.to(x.v.dtype))
            if lengths is None:
                kept = now
            else:
                at = t < lengths
                kept = tuple(
                    torch.where(at.view(-1, *[1] * (a.dim() - 1)), a, b) if a.dim() > 1 else a
                    for a, b in zip(now, kept, strict=True)
                )  # type: ignore[assignment]
    C, n, m = kept
    C = C.to(x.kept_dtype(x.C))
    return torch.stack(hs, 1), State(C) if x.n is None else State(C, n.to(x.kept_dtype(x.n)), m)


# Calls that have passed the checks, each with its recorded launches where it has any.
_CALLS: CallCache[tuple[Replay | None]] = CallCache()


def _steps(
    given: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
    time: bool,
    state: State,
    lengths: Tensor | None,
    scale: float | None,
    gates: Gates,
    normalize: bool,
    return_state: bool,
    in_place: bool,
    backend: str | None,
    eps: float = 0.0,
) -> tuple[Tensor, State]:
    """Check a call, or find it among those that have passed the checks, and run it from the given state.

    Args:
        given: q, k, v and the two gates, (B, ...) for one step, or (B, T, ...) with ``time``.
        time: whether ``given`` has a dimension of time.
        state, lengths, scale, return_state, in_place, backend: as in :func:`mlstm_steps`.
        gates: what the gates are, as in :class:`Spec`.
        normalize: whether the state has n and m.
        eps: is added to the stabilized denominator.

    Returns:
        h, with a dimension of time where ``given`` has one, and the new state (of empty tensors without return_state).
    """
    if type(given[0]) not in PLAIN and hasattr(given[0], "device_mesh"):
        return _sharded_steps(
            given, time, state, lengths, scale, gates, normalize, return_state, in_place, backend, eps
        )
    scale = checks.check_scale(scale)
    call = call_signature(given, state, lengths, time, scale, gates, normalize, return_state, in_place, backend, eps)
    cached = None if call is None else _CALLS.get(call)
    if cached is None:
        checks.check_flags(normalize=normalize, return_state=return_state, in_place=in_place)
        _check(given, time, state, gates, normalize)
        if time:
            checks.check_few_steps(given[2], return_state, lengths, in_place)
        checks.check_lengths(lengths, given[2])
    if cached is not None and cached[0] is not None:
        h, C, n, m = cached[0]((*given, *state, lengths, state.C if in_place else None))
        return h if time else h.squeeze(1), State(C, n, m) if normalize else State(C)
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*given, *state))
    transformed = transforms_active()
    parts = autocast(*given[:3]) + given[3:]
    x = StepInputs(*(t if time or t is None else t.unsqueeze(1) for t in parts), *state, lengths)  # type: ignore[call-arg, arg-type]
    spec = StepSpec(x.q.shape[-1] ** -0.5 if scale is None else scale, gates, return_state, eps)
    if in_place:
        checks.check_in_place(state, x.kept_dtype(state.C), recorded, transformed)
    chosen = select_steps(backend, x, BACKENDS)
    replay = None
    if chosen is None or recorded or transformed:  # the kernels have no rules for transforms
        h, new = _by_reference(x, spec)
        if in_place:
            new = State(state.C.copy_(new.C), new.n, new.m)
    else:
        options = spec.scale, gates, chosen.name
        if in_place:
            h, n, m = steps_(*x, *options, eps)
            C = state.C
        else:
            h, C, n, m = steps(*x, *options, return_state, eps)
        new = State(C, n, m) if normalize else State(C)
        if call is not None and all(a is b for a, b in zip(parts, given, strict=True)):
            replay = chosen.steps_replay(x, spec, C if in_place else None)
    _CALLS.add(call, (replay,))
    return h if time else h.squeeze(1), new


def _sharded_steps(
    given: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
    time: bool,
    state: State,
    lengths: Tensor | None,
    scale: float | None,
    gates: Gates,
    normalize: bool,
    return_state: bool,
    *options: Any,
) -> tuple[Tensor, State]:
    """Run :func:`_steps` on the local tensors of DTensors."""
    from tfla.ops import sharded

    def run(given: Any, state: State, lengths: Tensor | None) -> Tensor | tuple[Tensor, State]:
        found = _steps(given, time, state, lengths, scale, gates, normalize, return_state, *options)
        return found if return_state else found[0]

    found = sharded.steps(given, gates, time, state, lengths, run)
    return (found, state) if isinstance(found, Tensor) else found


def _check(
    given: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
    time: bool,
    state: State,
    gates: Gates,
    normalize: bool,
) -> None:
    """Check shapes, dtypes and devices of the inputs and of the state.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """
    q, k, v, i, f = given
    checks.check_inputs(q, k, v, checks.named_gates(i, f, gates), time=time)
    checks.check_state(state, q.shape[0], q, v, normalize, "state")


def mlstm_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: State,
    *,
    input_gate: InputGate = "exp",
    scale: float | None = None,
    in_place: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """Compute one step of :func:`mlstm`, for decoding.

    On an NVIDIA GPU the step is one kernel if no gradients are recorded. With m_t = max(log_f_t + m_{t-1}, log_i_t),
    (1), the stored state is

        C_t = exp(log_f_t + m_{t-1} - m_t) C_{t-1} + exp(log_i_t - m_t) k_t v_t^T        n_t likewise, of k_t alone
        h_t = scale C_t^T q_t / max(abs(scale n_t^T q_t), exp(-m_t))

    and for the sigmoid input gate that of :func:`mlstm`, without m and the denominator.

    Args:
        q, k, v: (B, Hq, dqk), (B, Hq, dqk), (B, H, dhv), as one step of :func:`mlstm`.
        i, f: (B, H), pre-activations, any float dtype.
        state: :meth:`State.zeros`, or the state that :func:`mlstm` or the last step returned. C and n may be bfloat16
            or float16, and the new ones then are too; the arithmetic is in float32, or in float64 if q is float64.
        input_gate, scale: as in :func:`mlstm`.
        in_place: overwrite ``state.C``, by far the largest part of the state, with the new C. The new n and m are new
            tensors, because every program of a head reads the old ones. Gradients must not be recorded.
        backend: the name of the backend whose kernel is used; None, or a backend without a kernel for these steps,
            leaves the choice open.

    Returns:
        h (B, H, dhv) in v's dtype, and the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    checks.check_input_gate(input_gate)
    given = q, k, v, i, f
    return _steps(given, False, state, None, scale, input_gate, input_gate == "exp", True, in_place, backend)


def step_with_offset(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: State, eps: float
) -> tuple[Tensor, State]:
    """Compute :func:`mlstm_step` with an exponential gate and the denominator max(abs(scale n^T q), exp(-m)) + eps."""
    return _steps((q, k, v, i, f), False, state, None, None, "exp", True, True, False, None, eps)


def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    state: State,
    log_i: Tensor | None = None,
    *,
    normalize: bool = False,
    scale: float | None = None,
    in_place: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """Compute one step of :func:`linear_attention`, for decoding.

    Args:
        q, k, v: (B, Hq, dqk), (B, Hq, dqk), (B, H, dhv).
        log_f: (B, H), or (B, H, dqk) without ``normalize``: log-gates, any float dtype.
        log_i: (B, H), log-gates, any float dtype; None is 0.
        state: as in :func:`mlstm_step`; without ``normalize`` its n and m are None.
        normalize, scale: as in :func:`linear_attention`.
        in_place, backend: as in :func:`mlstm_step`.

    Returns:
        h (B, H, dhv) in v's dtype, and the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    if has_channel_gates(log_f, time=False):
        scale = checks.check_scale(scale)
        return channel_gates.steps(q, k, v, log_f, log_i, normalize, state, None, False, True, in_place, scale, backend)
    given = q, k, v, log_i, log_f
    return _steps(given, False, state, None, scale, "log", normalize, True, in_place, backend)


@overload
def mlstm_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: State,
    *,
    return_state: Literal[True] = True,
    lengths: Tensor | None = ...,
    input_gate: InputGate = ...,
    scale: float | None = ...,
    in_place: bool = ...,
    backend: str | None = ...,
) -> tuple[Tensor, State]: ...
@overload
def mlstm_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: State,
    *,
    return_state: Literal[False],
    lengths: Tensor | None = ...,
    input_gate: InputGate = ...,
    scale: float | None = ...,
    in_place: bool = ...,
    backend: str | None = ...,
) -> Tensor: ...
def mlstm_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: State,
    *,
    return_state: bool = True,
    lengths: Tensor | None = None,
    input_gate: InputGate = "exp",
    scale: float | None = None,
    in_place: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, State] | Tensor:
    """Compute up to 32 steps of :func:`mlstm` in one call, for speculative decoding.

    The state is read once and written once. Proposed tokens are verified with ``return_state=False``, which writes no
    state. Once it is clear how many of them each sequence accepts, the same call with ``lengths`` returns the state
    after the accepted ones. The equations are those of :func:`mlstm_step`.

    Args:
        q, k, v: (B, T, Hq, dqk), (B, T, Hq, dqk), (B, T, H, dhv), as in :func:`mlstm`, T from 1 to 32.
        i, f: (B, T, H), pre-activations, any float dtype.
        state: as in :func:`mlstm_step`.
        return_state: also return the new state.
        lengths: (B,) int32 or int64, from 0 to T: the new state is the one after this many steps of each sequence; None
            is T. Outputs are computed for all T steps in any case. On a CPU, values out of range are an error, in
            compiled functions too; on a GPU they are not read on the host, so that the call does not wait for the
            device, and are clamped to [0, T].
        input_gate, scale, in_place, backend: as in :func:`mlstm_step`.

    Returns:
        h (B, T, H, dhv) in v's dtype; with ``return_state`` also the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    checks.check_input_gate(input_gate)
    given = q, k, v, i, f
    found = _steps(given, True, state, lengths, scale, input_gate, input_gate == "exp", return_state, in_place, backend)
    return found if return_state else found[0]


def linear_attention_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    state: State,
    log_i: Tensor | None = None,
    *,
    normalize: bool = False,
    return_state: bool = True,
    lengths: Tensor | None = None,
    scale: float | None = None,
    in_place: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, State] | Tensor:
    """Compute up to 32 steps of :func:`linear_attention` in one call.

    Args:
        q, k, v: (B, T, Hq, dqk), (B, T, Hq, dqk), (B, T, H, dhv), T from 1 to 32.
        log_f: (B, T, H), or (B, T, H, dqk) without ``normalize``: log-gates, any float dtype.
        log_i: (B, T, H), log-gates, any float dtype; None is 0.
        state: as in :func:`linear_attention_step`.
        normalize, scale: as in :func:`linear_attention`.
        return_state, lengths, in_place, backend: as in :func:`mlstm_steps`.

    Returns:
        h (B, T, H, dhv) in v's dtype; with ``return_state`` also the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    if has_channel_gates(log_f):
        scale = checks.check_scale(scale)
        h, new = channel_gates.steps(
            q, k, v, log_f, log_i, normalize, state, lengths, True, return_state, in_place, scale, backend
        )
        return (h, new) if return_state else h
    given = q, k, v, log_i, log_f
    found = _steps(given, True, state, lengths, scale, "log", normalize, return_state, in_place, backend)
    return found if return_state else found[0]
