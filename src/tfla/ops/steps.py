"""Decoding: one step or a few at once, from a state to the next."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from tfla._util.caching import CallCache
from tfla.backends import StepInputs, select_steps
from tfla.backends.base import Again, Gates, StepSpec
from tfla.backends.reference import bounded_denominator
from tfla.backends.reference import step as reference_step
from tfla.ops import checks
from tfla.ops.api import autocast
from tfla.ops.dispatch import call_signature, without_autocast
from tfla.ops.gates import InputGate, clamp, log_gates
from tfla.ops.registration import checked_lengths, steps, steps_
from tfla.ops.state import State
from tfla.ops.transforms import needs_dispatcher, transforms_active


def _by_reference(x: StepInputs, spec: StepSpec) -> tuple[Tensor, State]:
    """Step by step, differentiable."""
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


# Calls that have passed the checks, and what does their steps at once, if anything.
_KNOWN: CallCache[tuple[Again | None]] = CallCache()


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
    """Tensors q, k, v and the gates, (B, ...) or with time (B, T, ...), from the state on."""
    scale = checks.check_scale(scale)
    call = call_signature(given, state, lengths, time, scale, gates, normalize, return_state, in_place, backend, eps)
    known = None if call is None else _KNOWN.get(call)
    if known is None:
        checks.check_flags(normalize=normalize, return_state=return_state, in_place=in_place)
        _check(given, time, state, gates, normalize)
        if time:
            checks.check_few_steps(given[2], return_state, lengths, in_place)
        checks.check_lengths(lengths, given[2])
    if known is not None and known[0] is not None:
        h, C, n, m = known[0]((*given, *state, lengths, state.C if in_place else None))
        return h if time else h.squeeze(1), State(C, n, m) if normalize else State(C)
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*given, *state))
    transformed = transforms_active()
    parts = autocast(*given[:3]) + given[3:]
    x = StepInputs(*(t if time or t is None else t.unsqueeze(1) for t in parts), *state, lengths)  # type: ignore[call-arg, arg-type]
    spec = StepSpec(x.q.shape[-1] ** -0.5 if scale is None else scale, gates, return_state, eps)
    if in_place:
        checks.check_in_place(state, x.kept_dtype(state.C), recorded, transformed)
    chosen = select_steps(backend, x)
    again = None
    if chosen is None or recorded or transformed:  # kernels have no rule for transforms
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
            again = chosen.steps_again(x, spec, C if in_place else None)
    _KNOWN.add(call, (again,))
    return h if time else h.squeeze(1), new


def _check(
    given: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
    time: bool,
    state: State,
    gates: Gates,
    normalize: bool,
) -> None:
    q, k, v, *rest = given
    names = ("log_i", "log_f") if gates == "log" else ("i", "f")
    # An input gate may be left out where it is a log-gate.
    present = {name: x for name, x in zip(names, rest, strict=True) if x is not None or name != "log_i"}
    checks.check_inputs(q, k, v, present, state, time=time)  # type: ignore[arg-type]
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
    """One step of :func:`mlstm`, for decoding: one kernel on an NVIDIA GPU where no gradients are recorded.

    Args:
        q, k, v: (B, Hq, dqk), (B, Hq, dqk), (B, H, dhv), as one step of :func:`mlstm`.
        i, f: (B, H), pre-activations.
        state: :meth:`State.zeros`, or what :func:`mlstm` or the last step returned. C and n may be kept in bfloat16 or
            float16 and then stay so; the arithmetic is in float32, or float64 where q is.
        input_gate, scale: as in :func:`mlstm`.
        in_place: overwrite ``state.C``, by far the largest part of the state, with the new one; n and m, which all
            programs of a head read, are new tensors. Only where no gradients are recorded.
        backend: whose kernel; None, or a backend that has none, picks.

    Returns:
        h (B, H, dhv) in v's dtype, and the new state.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    checks.check_input_gate(input_gate)
    given = q, k, v, i, f
    return _steps(given, False, state, None, scale, input_gate, input_gate == "exp", True, in_place, backend)


def step_with_offset(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: State, eps: float
) -> tuple[Tensor, State]:
    """:func:`mlstm_step` with exponential gate and eps added to the denominator, which is stabilised by exp(-m)."""
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
    """One step of :func:`linear_attention`, log-gates (B, H); all else is as in :func:`mlstm_step`."""
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
    """A handful of steps at once, the state being read once and written once, as speculative decoding wants them.

    Tokens that another model proposes are verified with ``return_state=False``, which writes no state. When it is
    known how many of them each sequence keeps, the same call with ``lengths`` gives the state behind those.

    Args:
        q, k, v, i, f: (B, T, ...), as in :func:`mlstm`, T from 1 to 32.
        state: as in :func:`mlstm_step`.
        return_state: also return the new state; else the state stays as it is.
        lengths: (B,) int32 or int64, from 0 to T: how many steps of each sequence the new state has behind it; None is
            all of them. Outputs are of all T steps whatever it says. On a CPU other values are an error, in compiled
            functions too; on a GPU they are not read on the host, so that nothing waits for the device, and are clamped
            to [0, T].
        input_gate, scale, in_place, backend: as in :func:`mlstm_step`.

    Returns:
        h (B, T, H, dhv) in v's dtype; with ``return_state`` also the new state.

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
    """A handful of steps of :func:`linear_attention`, as :func:`mlstm_steps` does them; log-gates (B, T, H)."""
    given = q, k, v, log_i, log_f
    found = _steps(given, True, state, lengths, scale, "log", normalize, return_state, in_place, backend)
    return found if return_state else found[0]
