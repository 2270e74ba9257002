"""Interface of mamba_ssm's Mamba-2 functions: per head, with dt > 0 and A, and B and C shared by a group of heads,

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T        y_t = C_t^T h_t + D x_t

which is linear attention with q = C, k = B, v = x, log_f = dt A, log_i = log dt and scale 1.
Names, argument order, layouts and defaults are those of mamba_ssm 2.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import tfla
from tfla.backends.known import Known
from tfla.ops.checks import check_float, check_shape
from tfla.ops.gates import cast
from tfla.ops.signature import signature, without_autocast

__all__ = ["mamba_chunk_scan_combined", "selective_state_update"]
TINY = 1e-30  # added to dt, so that its gradient at 0 is that of dt B x^T and not 0 / 0


def _limited(dt: Tensor, dt_limit: tuple[float, float], positive: bool) -> Tensor:
    """dt clamped; limits that change nothing are not passed over."""
    low, high = dt_limit
    if not 0 <= low <= high:
        raise ValueError(f"dt_limit: got {dt_limit}, expected 0 <= min <= max")
    least, most = None if positive and low == 0 else low, None if high == math.inf else high
    return dt if least is most is None else dt.clamp(least, most)


def _steps(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool) -> Tensor:
    """dt with bias and softplus, in at least float32."""
    dt = dt if dt.dtype == torch.float64 else cast(dt, torch.float32)
    dt = dt if dt_bias is None else dt + dt_bias
    return F.softplus(dt) if dt_softplus else dt


def _output(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """The skip connection and the gate; D in float32 makes the sum so, and its own gradient."""
    if D is not None:
        y = y + x * (D if D.dim() == 2 else D[:, None])
    return cast(y if z is None else y * F.silu(z), x.dtype)


def _check_parts(x: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None) -> None:
    """What scan and step have in common; x ends in (nheads, headdim), B in (ngroups, dstate)."""
    for name, t in {"x": x, "B": B, "C": C}.items():
        check_float(name, t)
    *batch, nheads, headdim = x.shape
    check_shape("B", B, (*batch, "ngroups", "dstate"))
    check_shape("C", C, tuple(B.shape))
    if nheads % B.shape[-2]:
        raise ValueError(f"B: got {B.shape[-2]} groups, expected a divisor of the {nheads} heads of x")
    for name, t in {"B": B, "C": C}.items():
        if t.dtype != x.dtype:
            raise TypeError(f"{name}: got dtype {t.dtype}, expected that of x, {x.dtype}")
    if z is not None:
        check_shape("z", z, tuple(x.shape))
    if D is not None and D.shape != (nheads, headdim):
        check_shape("D", D, (nheads,))


def _first_states(initial_states: Tensor, sequences: int, shape: tuple[int, ...]) -> Tensor:
    """As tfla has states. Of packed sequences one given state is that of the first, as in mamba_ssm."""
    check_float("initial_states", initial_states)
    rows = 1 if sequences > 1 and initial_states.shape[0] == 1 else sequences
    check_shape("initial_states", initial_states, (rows, *shape))
    states = initial_states.transpose(-1, -2)
    return states if rows == sequences else F.pad(states, (0, 0, 0, 0, 0, 0, 0, sequences - 1))


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Mamba-2 over whole sequences; as ``mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined``.

    Args:
        x: (batch, seqlen, nheads, headdim); z the same.
        dt: (batch, seqlen, nheads), any float dtype; it gets dt_bias (nheads,), softplus if asked for, and is clamped
            to dt_limit.
        A: (nheads,), usually negative; D: (nheads,) or (nheads, headdim).
        B, C: (batch, seqlen, ngroups, dstate), dtype of x; ngroups divides nheads.
        chunk_size: of no effect; tfla picks the distance between stored states itself.
        initial_states: (batch, nheads, headdim, dstate).
        seq_idx: (batch, seqlen) int, which sequence a step belongs to: the state starts at zero where it changes. The
            initial state is that of sequence 0.
        cu_seqlens: (sequences + 1,) int, for batch 1: where packed sequences start and, last, seqlen. They are kept
            apart without seq_idx too. initial_states may then have a row for each sequence; one row is the first's.
        return_final_states: also return the state behind the last step, (batch, nheads, headdim, dstate).
        return_varlen_states: also return the state behind each packed sequence, last of all. It has a gradient here.

    Returns:
        out (batch, seqlen, nheads, headdim) in x's dtype, or a tuple of it and the states asked for, in float32
        (float64 where x is).

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    check_shape("x", x, ("batch", "seqlen", "nheads", "headdim"))
    _check_parts(x, B, C, D, z)
    batch, seqlen, nheads, headdim = x.shape
    check_shape("dt", dt, (batch, seqlen, nheads))
    for name, t in {"A": A, "dt_bias": dt_bias}.items():
        if t is not None:
            check_shape(name, t, (nheads,))
    if return_varlen_states and cu_seqlens is None:
        raise ValueError("cu_seqlens: got None, expected a tensor with return_varlen_states")
    dt = _limited(_steps(dt, dt_bias, dt_softplus), dt_limit, dt_softplus)
    log_f = dt * cast(A, dt.dtype)
    if seq_idx is not None:
        check_shape("seq_idx", seq_idx, (batch, seqlen))
        starts = torch.diff(seq_idx, dim=1, prepend=torch.zeros_like(seq_idx[:, :1])) != 0
        log_f = log_f.masked_fill(starts[..., None], -math.inf)
    state = None
    if initial_states is not None:
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = tfla.State(_first_states(initial_states, sequences, (nheads, headdim, B.shape[-1])))
    gates = log_f, torch.log(dt + TINY)
    with without_autocast(x.device.type):
        if not (return_final_states or return_varlen_states):  # last segments then need no state behind them
            y = tfla.linear_attention(C, B, x, *gates, scale=1.0, initial_state=state, cu_seqlens=cu_seqlens)
            assert isinstance(y, Tensor)
            return _output(y, x, D, z)
        y, last = tfla.linear_attention(
            C, B, x, *gates, scale=1.0, initial_state=state, return_state=True, cu_seqlens=cu_seqlens
        )
        results: tuple[Tensor, ...] = (_output(y, x, D, z),)
    states = last.C.transpose(-1, -2)
    if return_final_states:
        results += (states if cu_seqlens is None else states[-1:],)
    if return_varlen_states:
        results += (states,)
    return results


def _per_head(name: str, t: Tensor, lead: tuple[int, ...], rest: tuple[int, ...]) -> Tensor:
    """One number a head: t is (*lead,), or an expanded view of that with the dims `rest` behind."""
    if t.shape == lead:
        return t
    check_shape(name, t, (*lead, *rest))
    if any(t.stride(d) != 0 and t.shape[d] > 1 for d in range(len(lead), t.dim())):
        raise ValueError(
            f"{name}: got strides {t.stride()}, expected one number a head: shape {lead}, or a view of that expanded to"
            f" {(*lead, *rest)}"
        )
    for _ in rest:
        t = t[..., 0]
    return t


_KNOWN: Known[bool] = Known()  # steps that have passed the checks


def _kept(state: Tensor, x: Tensor) -> bool:
    """Whether a step leaves the state in its dtype."""
    return state.dtype.itemsize == 2 or state.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """One step of Mamba-2 for decoding; as ``mamba_ssm.ops.triton.selective_state_update.selective_state_update``.

    Args:
        state: (batch, nheads, headdim, dstate), any float dtype; updated in place.
        x: (batch, nheads, headdim); z the same.
        dt: (batch, nheads), or expanded to (batch, nheads, headdim); not negative once bias and softplus are applied.
        A: (nheads,), or expanded to (nheads, headdim, dstate); dt_bias: (nheads,), or expanded to (nheads, headdim).
        B, C: (batch, ngroups, dstate), dtype of x; D: (nheads,) or (nheads, headdim).
        state_batch_indices: (batch,) int, rows of `state` that these steps are of; None: all in order.

    Returns:
        out (batch, nheads, headdim) in x's dtype.

    Raises:
        ValueError, TypeError: an argument does not fit, such as an A that is not one number a head (that is Mamba,
            not Mamba-2).
    """
    call = signature((x, state, dt, A, B, C, D, z, dt_bias), None, state_batch_indices)
    if call is None or _KNOWN.get(call) is None:
        check_shape("x", x, ("batch", "nheads", "headdim"))
        _check_parts(x, B, C, D, z)
        check_float("state", state)
        batch = x.shape[0] if state_batch_indices is None else "batch"
        check_shape("state", state, (batch, *x.shape[1:], B.shape[-1]))
        if state_batch_indices is not None:
            check_shape("state_batch_indices", state_batch_indices, (x.shape[0],))
        _KNOWN.add(call, True)
    batch, nheads, headdim = x.shape
    dstate = B.shape[-1]
    dt = _per_head("dt", dt, (batch, nheads), (headdim,))
    A = _per_head("A", A, (nheads,), (headdim, dstate))
    dt_bias = None if dt_bias is None else _per_head("dt_bias", dt_bias, (nheads,), (headdim,))
    dt = _steps(dt, dt_bias, dt_softplus)
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (state, x, dt, A, B, C))
    in_place = state_batch_indices is None and not recorded and _kept(state, x)
    old = state
    if state_batch_indices is not None:
        old = state[state_batch_indices]
    with without_autocast(x.device.type):
        y, new = tfla.linear_attention_step(
            C, B, x, dt * cast(A, dt.dtype), tfla.State(old.transpose(-1, -2)), torch.log(dt + TINY), scale=1.0,
            in_place=in_place,
        )  # fmt: skip
        if state_batch_indices is not None:
            state[state_batch_indices] = new.C.transpose(-1, -2).to(state.dtype)
        elif not in_place:
            state.copy_(new.C.transpose(-1, -2))
        return _output(y, x, D, z)
