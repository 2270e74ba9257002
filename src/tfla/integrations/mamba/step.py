"""The decoding step of Mamba-2, and of Mamba in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tfla
from tfla._util.caching import CallCache
from tfla.integrations.mamba.serving_step import Serving, serve
from tfla.integrations.mamba.terms import (
    check_devices,
    check_operands,
    common_dtype,
    compute_output,
    log_input_gate,
    scale_by_dt,
    step_sizes,
)
from tfla.nn.validation import check_int
from tfla.ops.autocast import without_autocast
from tfla.ops.checks import check_float, check_shape
from tfla.ops.dispatch import call_signature
from tfla.ops.gates import cast
from tfla.ops.transforms import needs_dispatcher

# From the signatures of calls that have passed the checks to whether dt, A and dt_bias have one number a head.
_PER_HEAD: CallCache[bool] = CallCache()


def _is_per_head(name: str, t: Tensor, lead: tuple[int, ...], rest: tuple[int, ...]) -> bool:
    """Check t and return whether it has one number a head: shape `lead`, or a view of that expanded to lead + rest."""
    check_float(name, t)
    if t.shape == lead:
        return True
    if t.shape != (*lead, *rest):
        raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected {lead} or {(*lead, *rest)}")
    return all(t.stride(d) == 0 or t.shape[d] == 1 for d in range(len(lead), t.dim()))


def _check(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, state_batch_indices: Tensor | None,
) -> bool:  # fmt: skip
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
    per_head = [_is_per_head(*gate) for gate in gates]  # a list, so that each of them is checked
    return all(per_head)


def _check_slots(slots: Tensor, batch: int, state: Tensor) -> None:
    """Check state_batch_indices; on a GPU the values are not read, because the host would wait for them."""
    name = "state_batch_indices"
    if not isinstance(slots, Tensor) or slots.dtype not in (torch.int32, torch.int64):
        got = f"dtype {slots.dtype}" if isinstance(slots, Tensor) else type(slots).__name__
        raise TypeError(f"{name}: got {got}, expected an int32 or int64 tensor")
    check_shape(name, slots, (batch,))
    check_devices(state, {name: slots}, "state")
    if batch and slots.device.type == "cpu" and not needs_dispatcher((slots,)) and slots.max() >= state.shape[0]:
        raise ValueError(
            f"{name}: got {int(slots.max())}, expected at most {state.shape[0] - 1}, or less than 0 to skip"
        )


def _take_leading_dims(t: Tensor, dims: int) -> Tensor:
    """Return t at index 0 of all dimensions but the first `dims`."""
    while t.dim() > dims:
        t = t[..., 0]
    return t


def _append_dims(t: Tensor, dims: int) -> Tensor:
    """Return t with `dims` dimensions, where the missing ones are added last with size 1."""
    while t.dim() < dims:
        t = t[..., None]
    return t


def _step_with_head_decay(
    old: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, dt_may_be_negative: bool, overwrite: bool,
    slots: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute one step in which the state of a head has one decay, by the operator.

    Args:
        overwrite: whether the state `old` may be overwritten.
        slots: the rows of `old` that the step reads and overwrites; None takes all rows in order.

    Returns:
        y (batch, nheads, headdim), and the new state, or None where the operator has overwritten `old` with it.
    """
    v, log_i = (scale_by_dt(x, dt), None) if dt_may_be_negative else (x, log_input_gate(dt))
    dtype = common_dtype(v, B, C)
    q, k, v = (cast(t, dtype) for t in (C, B, v))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    in_place = overwrite and (old.dtype == wide or old.dtype.itemsize == 2)  # else the operator changes its dtype
    state = tfla.State(old.transpose(-1, -2))
    y, new = tfla.linear_attention_step(
        q, k, v, dt * cast(A, dt.dtype), state, log_i, scale=1.0, in_place=in_place, state_indices=slots
    )
    return y, None if in_place else new.C.transpose(-1, -2)


def _step_with_element_decay(
    old: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one step in which each element of the state has a decay of its own, in plain PyTorch.

    Its operations read or write the state about ten times; torch.compile fuses them.

    Returns:
        y (batch, nheads, headdim) and the new state.
    """
    group = x.shape[1] // B.shape[1]
    dt, A = _append_dims(dt, 3), _append_dims(A, 3)
    B, C = (t.repeat_interleave(group, 1) if group > 1 else t for t in (B, C))
    decayed = torch.exp(dt[..., None] * A) * old
    dtx, B, C = (cast(t, decayed.dtype) for t in (dt * x, B, C))
    new = torch.addcmul(decayed, dtx[..., None], B[:, :, None])
    return (new @ C[..., None])[..., 0], new


def _keeps_dtype(state: Tensor, *operands: Tensor) -> bool:
    """Return whether the operator on operands of these dtypes writes a new state in the dtype of the old one."""
    wide = torch.float64 if torch.float64 in [t.dtype for t in operands] else torch.float32
    return state.dtype == wide or (state.dtype.itemsize == 2 and state.dtype.is_floating_point)


def _redirect_skipped_rows(
    slots: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor | None]:
    """Return slots of which none is negative, which row writes each of them, inputs of the step that match, and z.

    A row whose slot is negative becomes a copy of the first row whose slot is not, so that both write the same state.
    If all slots are negative, all rows leave the state of slot 0 as it is. No value is read on the host.

    Returns:
        The slots; (batch,) bool, False for a copy, through whose state no gradient may pass; x, dt, B, C; and z.
    """
    own = torch.arange(len(slots), device=slots.device)
    if not len(slots):
        return slots, own >= 0, (x, dt, B, C), z
    valid = slots >= 0
    rows = torch.where(valid, own, valid.to(torch.int8).argmax())
    all_skipped = ~valid[rows]

    def of_rows(t: Tensor) -> Tensor:
        return t[rows].masked_fill(_append_dims(all_skipped, t.dim()), 0.0)

    inputs = of_rows(x), of_rows(dt), of_rows(B), of_rows(C)
    return slots[rows].clamp(min=0), rows == own, inputs, None if z is None else of_rows(z)


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
    pad_slot_id: int = -1,
    *,
    dst_state_batch_indices: Tensor | None = None,
    null_block_id: int = -1,
    out: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
) -> Tensor:
    """Compute one step for decoding.

    The function stands in for ``mamba_ssm.ops.triton.selective_state_update.selective_state_update``, and with the
    further options, which have no gradients, for the functions of that name in vLLM and flashinfer. For each head

        h <- exp(dt A) h + dt B x^T        y = (C^T h + D x) silu(z)

    Where dt, A and dt_bias have one number a head, as in Mamba-2, the step is one kernel on an NVIDIA GPU. Where they
    have more, as in Mamba, each element of the state has a decay of its own, and plain PyTorch computes the step.

    The shapes may also be those of Mamba, which lack the dimension of heads: state (batch, dim, dstate), x, z and dt
    (batch, dim), A (dim, dstate), B and C (batch, dstate), D and dt_bias (dim,).

    Args:
        state: (batch, nheads, headdim, dstate), the h above, any float dtype; it is updated in place.
        x: (batch, nheads, headdim).
        dt: (batch, nheads) or (batch, nheads, headdim). It may be 0 or negative after bias and softplus.
        A: (nheads,) or (nheads, headdim, dstate). For A, dt and dt_bias a view that is expanded from one number a head
            counts as one number a head.
        B, C: (batch, ngroups, dstate), where ngroups divides nheads.
        D: (nheads,) or (nheads, headdim), or None for no skip connection.
        z: (batch, nheads, headdim), or None for no output gate.
        dt_bias: (nheads,) or (nheads, headdim), or None.
        dt_softplus: take softplus of dt + dt_bias.
        state_batch_indices: (batch,) int, the row of `state` that each step updates, no row twice. A step whose index
            is negative is skipped: its output is 0, and it changes no state. None takes all rows in order. With one
            decay a head, and without gradients, the kernel reads and overwrites the rows where they are.
        pad_slot_id, null_block_id: indices that are skipped like negative ones, as in vLLM's function.
        dst_state_batch_indices: the rows of `state` that get the new states, in place of those of
            state_batch_indices, which are then as they were. Like these, (batch,), or (batch, columns), of which the
            first column counts without num_accepted_tokens.
        out: a tensor like x, which gets the output and is returned.
        num_accepted_tokens: (batch,) int, the number of tokens that the last call has proposed and that were accepted.
            Both indices then have a column for each token, (batch, tokens): a sequence starts from the row of its last
            accepted token, the first column if none is, and the state after each token goes to the row of its column.
        cu_seqlens: (batch + 1,) int, the offsets of packed sequences: x, dt, B, C and z are (tokens, ...).
        disable_state_update: whether `state` stays as it is.
        intermediate_states_buffer: (rows, tokens, nheads, headdim, dstate), which gets the state after each token.
        intermediate_state_indices: (batch,) int, the row of the buffer of each sequence; None takes all in order.

    Several tokens of each sequence, x (batch, T, nheads, headdim) and the others likewise, are computed one after the
    other, on copies of the states. So are packed ones.

    Returns:
        out, in the shape and dtype of x.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    if type(pad_slot_id) is not int:
        check_int("pad_slot_id", pad_slot_id, -(2**63))
    if type(null_block_id) is not int:
        check_int("null_block_id", null_block_id, -(2**63))
    for skipped in (pad_slot_id, null_block_id):
        if isinstance(state_batch_indices, Tensor) and skipped >= 0:
            state_batch_indices = state_batch_indices.masked_fill(state_batch_indices == skipped, -1)
        if isinstance(dst_state_batch_indices, Tensor) and skipped >= 0:
            dst_state_batch_indices = dst_state_batch_indices.masked_fill(dst_state_batch_indices == skipped, -1)
    if out is not None:  # before a state is changed
        check_float("x", x)
        check_float("out", out)
        check_shape("out", out, tuple(x.shape))
    options = Serving(
        dst_state_batch_indices, num_accepted_tokens, cu_seqlens, disable_state_update, intermediate_states_buffer,
        intermediate_state_indices,
    )  # fmt: skip
    several = isinstance(x, Tensor) and isinstance(state, Tensor) and x.dim() == state.dim()
    if several or options.asked() or (isinstance(state_batch_indices, Tensor) and state_batch_indices.dim() == 2):

        def step(states: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None, rows: Tensor) -> Tensor:
            return selective_state_update(states, x, dt, A, B, C, D, z, dt_bias, dt_softplus, rows)

        found = serve(step, state, x, dt, B, C, z, state_batch_indices, options)
        return found if out is None else out.copy_(found)
    if out is not None:
        found = selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices)
        return out.copy_(found)
    if isinstance(state, Tensor) and state.dim() == 3:
        operands = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
        return _step_without_heads(state, operands, dt_softplus, state_batch_indices)
    call = call_signature((x, state, dt, A, B, C, D, z, dt_bias), None, state_batch_indices)
    per_head = None if call is None else _PER_HEAD.get(call)
    if per_head is None:
        per_head = _check(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices)
        _PER_HEAD.add(call, per_head)
    if per_head:
        dt, A = _take_leading_dims(dt, 2), _take_leading_dims(A, 1)
        dt_bias = None if dt_bias is None else _take_leading_dims(dt_bias, 1)
    elif dt_bias is not None:
        dt, dt_bias = _append_dims(dt, 3), _append_dims(dt_bias, 2)
    dt = step_sizes(dt, dt_bias, dt_softplus)
    old, slots, writes, inputs = state, None, None, (x, dt, B, C)
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (state, x, dt, A, B, C))
    read = (x, B, C) if dt_softplus else (x, dt, B, C)  # of the operator, whose values are dt x without softplus
    by_index = state_batch_indices is not None and per_head and not recorded and _keeps_dtype(state, *read)
    if state_batch_indices is not None and by_index:
        slots = state_batch_indices.clamp(min=-1)
    elif state_batch_indices is not None:
        slots, writes, inputs, z = _redirect_skipped_rows(state_batch_indices, *inputs, z)  # type: ignore[assignment]
        old = state[slots]
    x_in, dt, B, C = inputs
    if recorded and slots is None:
        old = state.clone()  # the backward needs the state from before the step
    with without_autocast(x.device.type):
        new: Tensor | None
        if per_head:
            overwrite = by_index or (slots is None and not recorded)
            rows = slots if by_index else None
            y, new = _step_with_head_decay(old, x_in, dt, A, B, C, not dt_softplus, overwrite, rows)
        else:
            y, new = _step_with_element_decay(old, x_in, dt, A, B, C)
        if new is not None and slots is not None:
            new = cast(new, state.dtype)
            if slots.numel():  # if all are skipped, slot 0 stays as it is, without a rounding to the operator's dtype
                new = torch.where((state_batch_indices >= 0).any(), new, old)  # type: ignore[operator, union-attr]
            if writes is not None and recorded:  # index_put hands the gradient of a row to every copy that writes it
                new = torch.where(writes[:, None, None, None], new, new.detach())
            state[slots] = new
        elif new is not None:
            state.copy_(new)
        y = compute_output(y, x_in, D, z)
    if state_batch_indices is None:
        return y
    return y.masked_fill((state_batch_indices < 0)[:, None, None], 0.0)


def _step_without_heads(
    state: Tensor, operands: dict[str, Any], dt_softplus: bool, state_batch_indices: Tensor | None
) -> Tensor:
    """Compute a step with Mamba's shapes, (batch, dim), as a step with one head whose head dim is dim.

    Args:
        operands: the arguments x, dt, A, B, C, D, z and dt_bias by name.
    """
    slots, dim, dstate = state.shape
    check_float("x", operands["x"])
    check_shape("x", operands["x"], (slots if state_batch_indices is None else "batch", dim))
    batch = operands["x"].shape[0]
    shapes: dict[str, tuple[int, ...]] = {
        "dt": (batch, dim), "A": (dim, dstate), "B": (batch, dstate), "C": (batch, dstate), "D": (dim,),
        "z": (batch, dim), "dt_bias": (dim,),
    }  # fmt: skip
    for name, shape in shapes.items():
        if operands[name] is not None or name in ("dt", "A", "B", "C"):
            check_float(name, operands[name])
            check_shape(name, operands[name], shape)
    shared = ("A", "D", "dt_bias")  # without the dimension of the batch
    one_head: dict[str, Any] = {
        name: t if t is None else t[None] if name in shared else t[:, None] for name, t in operands.items()
    }  # fmt: skip
    out = selective_state_update(
        state[:, None], **one_head, dt_softplus=dt_softplus, state_batch_indices=state_batch_indices
    )
    return out[:, 0]
