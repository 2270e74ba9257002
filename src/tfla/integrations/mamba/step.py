"""One step of Mamba-2 or Mamba, for decoding."""

from __future__ import annotations

import torch
from torch import Tensor

import tfla
from tfla._util.caching import CallCache
from tfla.integrations.mamba.terms import (
    check_devices,
    check_operands,
    common_dtype,
    finish,
    log_input_gate,
    scaled,
    step_sizes,
)
from tfla.ops.checks import check_float, check_shape
from tfla.ops.gates import cast
from tfla.ops.signature import observed, signature, without_autocast

# By calls that have passed the checks, whether dt, A and dt_bias have one number a head.
_PER_HEAD: CallCache[bool] = CallCache()


def _is_per_head(name: str, t: Tensor, lead: tuple[int, ...], rest: tuple[int, ...]) -> bool:
    """Return whether t has one number a head: shape lead, or a view of that expanded by the dims rest."""
    check_float(name, t)
    if t.shape == lead:
        return True
    if t.shape != (*lead, *rest):
        raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected {lead} or {(*lead, *rest)}")
    return all(t.stride(d) == 0 or t.shape[d] == 1 for d in range(len(lead), t.dim()))


def _check(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state_batch_indices: Tensor | None,
) -> bool:
    """Check the arguments; return whether dt, A and dt_bias have one number a head."""
    check_float("x", x)
    check_shape("x", x, ("batch", "nheads", "headdim"))
    check_operands(x, B, C, D, z)
    (batch, nheads, headdim), dstate = x.shape, B.shape[-1]
    check_float("state", state)
    check_shape("state", state, (batch if state_batch_indices is None else "slots", nheads, headdim, dstate))
    if state_batch_indices is not None:
        _check_slots(state_batch_indices, batch, state)
    gates = [("dt", dt, (batch, nheads), (headdim,)), ("A", A, (nheads,), (headdim, dstate))]
    if dt_bias is not None:
        gates.append(("dt_bias", dt_bias, (nheads,), (headdim,)))
    check_devices(x, {"state": state, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias})
    tied = [_is_per_head(*gate) for gate in gates]
    return all(tied)


def _check_slots(slots: Tensor, batch: int, state: Tensor) -> None:
    """Check state_batch_indices. Their values are not read on a GPU, so that nothing waits for the device."""
    name = "state_batch_indices"
    if not isinstance(slots, Tensor) or slots.dtype not in (torch.int32, torch.int64):
        got = f"dtype {slots.dtype}" if isinstance(slots, Tensor) else type(slots).__name__
        raise TypeError(f"{name}: got {got}, expected an int32 or int64 tensor")
    check_shape(name, slots, (batch,))
    check_devices(state, {name: slots}, "state")
    if batch and slots.device.type == "cpu" and not observed((slots,)) and slots.max() >= state.shape[0]:
        raise ValueError(
            f"{name}: got {int(slots.max())}, expected at most {state.shape[0] - 1}, or less than 0 to skip"
        )


def _first(t: Tensor, dims: int) -> Tensor:
    """Return a view of t with its first dims dimensions, at index 0 of the others."""
    while t.dim() > dims:
        t = t[..., 0]
    return t


def _spread(t: Tensor, dims: int) -> Tensor:
    """Return t with dims dimensions: those that it lacks are added last."""
    while t.dim() < dims:
        t = t[..., None]
    return t


def _one_decay_a_head(
    old: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, signed: bool, overwrite: bool
) -> tuple[Tensor, Tensor | None]:
    """Return y and the new state by one step of the operator; None in place of a state that it has overwritten."""
    v, log_i = (scaled(x, dt), None) if signed else (x, log_input_gate(dt))
    dtype = common_dtype(v, B, C)
    q, k, v = (cast(t, dtype) for t in (C, B, v))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    in_place = overwrite and (old.dtype == wide or old.dtype.itemsize == 2)  # else the operator changes its dtype
    state = tfla.State(old.transpose(-1, -2))
    y, new = tfla.linear_attention_step(q, k, v, dt * cast(A, dt.dtype), state, log_i, scale=1.0, in_place=in_place)
    return y, None if in_place else new.C.transpose(-1, -2)


def _one_decay_an_element(old: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Return y and the new state, whose elements all may decay differently.

    The state passes through memory about ten times, once for each operation and operand; torch.compile fuses them.
    """
    group = x.shape[1] // B.shape[1]
    dt, A = _spread(dt, 3), _spread(A, 3)
    B, C = (t.repeat_interleave(group, 1) if group > 1 else t for t in (B, C))
    decayed = torch.exp(dt[..., None] * A) * old
    dtx, B, C = (cast(t, decayed.dtype) for t in (dt * x, B, C))
    new = torch.addcmul(decayed, dtx[..., None], B[:, :, None])
    return (new @ C[..., None])[..., 0], new


def _skip(slots: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return slots that are all valid, and the step's inputs to match; no value is read on the host.

    A row whose slot is negative repeats the first row that has one, so that both write the same state. If there is
    none, all rows leave the state of slot 0 as it is.
    """
    if not len(slots):
        return slots, (x, dt, B, C)
    taken = slots >= 0
    rows = torch.where(taken, torch.arange(len(slots), device=slots.device), taken.to(torch.int8).argmax())
    idle = ~taken[rows]
    x, dt, B = (t[rows].masked_fill(_spread(idle, t.dim()), 0.0) for t in (x, dt, B))
    return slots[rows].clamp(min=0), (x, dt, B, C[rows])


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
    """Compute one step for decoding; as ``mamba_ssm.ops.triton.selective_state_update.selective_state_update``.

    Where dt, A and dt_bias have one number a head, as in Mamba-2, the step is one kernel on an NVIDIA GPU. Where they
    have more, as in Mamba, each element of the state has a decay of its own, and plain PyTorch computes the step.

    Args:
        state: (batch, nheads, headdim, dstate), any float dtype; updated in place.
        x: (batch, nheads, headdim); z the same.
        dt: (batch, nheads) or (batch, nheads, headdim). It may be 0 or negative after bias and softplus.
        A: (nheads,) or (nheads, headdim, dstate); dt_bias: (nheads,) or (nheads, headdim). A view that is expanded from
            one number a head counts as one number a head.
        B, C: (batch, ngroups, dstate); D: (nheads,) or (nheads, headdim). All may have float dtypes of their own.
        state_batch_indices: (batch,) int, the row of state that each step updates, no row twice; None: all in order. A
            step whose index is negative is skipped: its output is 0, and it changes no state.

    Mamba's shapes are taken as well, which lack the dimension of heads: state (batch, dim, dstate), x, z and dt
    (batch, dim), A (dim, dstate), B and C (batch, dstate), D and dt_bias (dim,).

    Returns:
        out (batch, nheads, headdim), or (batch, dim), in x's dtype.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    if isinstance(state, Tensor) and state.dim() == 3:
        return _without_heads(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices)
    call = signature((x, state, dt, A, B, C, D, z, dt_bias), None, state_batch_indices)
    per_head = None if call is None else _PER_HEAD.get(call)
    if per_head is None:
        per_head = _check(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices)
        _PER_HEAD.add(call, per_head)
    if per_head:
        dt, A, dt_bias = _first(dt, 2), _first(A, 1), None if dt_bias is None else _first(dt_bias, 1)
    elif dt_bias is not None:
        dt, dt_bias = _spread(dt, 3), _spread(dt_bias, 2)
    dt = step_sizes(dt, dt_bias, dt_softplus)
    old, slots, given = state, None, (x, dt, B, C)
    if state_batch_indices is not None:
        slots, given = _skip(state_batch_indices, *given)  # type: ignore[assignment]
        old = state[slots]
    given_x, dt, B, C = given
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (state, given_x, dt, A, B, C))
    if recorded and slots is None:
        old = state.clone()  # the backward reads it after the state has been overwritten
    with without_autocast(x.device.type):
        new: Tensor | None
        if per_head:
            overwrite = slots is None and not recorded
            y, new = _one_decay_a_head(old, given_x, dt, A, B, C, not dt_softplus, overwrite)
        else:
            y, new = _one_decay_an_element(old, given_x, dt, A, B, C)
        if new is not None and slots is not None:
            state[slots] = cast(new, state.dtype)
        elif new is not None:
            state.copy_(new)
        out = finish(y, x, D, z)
    if state_batch_indices is None:
        return out
    return out.masked_fill((state_batch_indices < 0)[:, None, None], 0.0)


def _without_heads(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    state_batch_indices: Tensor | None,
) -> Tensor:
    """Compute the step of Mamba's shapes as that of one head."""
    slots, dim, dstate = state.shape
    batch = slots if state_batch_indices is None else "batch"
    check_float("x", x)
    check_shape("x", x, (batch, dim))
    rows = x.shape[0]
    shapes: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "dt": (dt, (rows, dim)), "A": (A, (dim, dstate)), "B": (B, (rows, dstate)), "C": (C, (rows, dstate)),
        "D": (D, (dim,)), "z": (z, (rows, dim)), "dt_bias": (dt_bias, (dim,)),
    }  # fmt: skip
    for name, (t, shape) in shapes.items():
        if t is not None or name in ("dt", "A", "B", "C"):
            check_float(name, t)
            check_shape(name, t, shape)  # type: ignore[arg-type]
    x, dt, B, C = (t[:, None] for t in (x, dt, B, C))
    z = None if z is None else z[:, None]
    D, dt_bias = (None if t is None else t[None] for t in (D, dt_bias))
    out = selective_state_update(state[:, None], x, dt, A[None], B, C, D, z, dt_bias, dt_softplus, state_batch_indices)
    return out[:, 0]
