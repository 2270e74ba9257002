"""The operator with a number added to its denominator, as other implementations of the mLSTM have it:

    h_t = scale C_t^T q_t / (max(|d_t|, 1) + e_t),    d_t = scale n_t^T q_t

Exactly, with exact gradients: dividing h by 1 + e / max(|d|, 1) and the cotangent by the same makes every product that
a backend's backward forms ((T8) to (T13) of docs/mathematics.md) that of the larger denominator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla.ops.api import prepare
from tfla.ops.checks import check_inputs
from tfla.ops.choice import choose
from tfla.ops.state import State

LARGEST = 1e30  # of exp(-m): closed gates overflow it, and then it is the whole denominator


def max_states(log_i: Tensor, log_f: Tensor, first: Tensor | float) -> Tensor:
    """m_t = max(log_f_t + m_{t-1}, log_i_t) (1) from m_0 = first (B, H), for log-gates (B, T, H), in float64.

    With first = -inf it is the largest weight of any step so far, the row maximum of (29).
    """
    b = log_f.double().cumsum(1)
    seen = (log_i.double() - b).cummax(1).values
    first = first.double()[:, None] if isinstance(first, Tensor) else torch.full_like(seen[:, :1], first)
    return b + torch.maximum(seen, first)


class _Attend(torch.autograd.Function):
    """`tfla::attend` with a normaliser; `floor` is exp(-m) and `offset` exp(-m) e, both (B, T, H)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_i: Tensor | None, log_f: Tensor, C: Tensor | None,
        n: Tensor | None, m: Tensor | None, floor: Tensor, offset: Tensor, options: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        h, *state, d, chunk_C, chunk_n = torch.ops.tfla.attend(
            q, k, v, log_i, log_f, C, n, m, None, *options, True, True
        )
        bound = torch.maximum(d.abs(), floor)
        ratio = bound / (bound + offset)
        h.mul_(ratio[..., None])
        ctx.save_for_backward(q, k, v, log_i, log_f, C, n, m, h, d, chunk_C, chunk_n, ratio, bound + offset)
        ctx.options = options
        ctx.mark_non_differentiable(state[-1])
        ctx.set_materialize_grads(False)
        return h, *state

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, h, d, chunk_C, chunk_n, ratio, denominator = ctx.saved_tensors
        dh, dC, dn, _ = cotangents
        dh = torch.zeros_like(h) if dh is None else dh
        d_offset = None
        if ctx.needs_input_grad[9]:
            d_offset = -torch.einsum("bthv,bthv->bth", dh, h) / denominator
        scaled = dh * ratio[..., None].to(dh.dtype)
        grads = torch.ops.tfla.attend_backward(*inputs, None, h, d, chunk_C, chunk_n, scaled, dC, dn, *ctx.options)
        of_inputs = (None if t is None else g for t, g in zip(inputs, grads, strict=True))
        return *of_inputs, None, d_offset, None


def attend_with_offset(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_i: Tensor,
    log_f: Tensor,
    m: Tensor,
    offset: Tensor,
    state: State | None,
    normalizer_grad: bool,
) -> tuple[Tensor, State]:
    """Compute normalized linear attention, q, k, v (B, T, H, d), with exp(-m) e = `offset` (B, T, H).

    `offset` gets a gradient; `m` are the max states from `state`, or from 0.

    Returns:
        h (B, T, H, dhv) and the state after the last step.

    Raises:
        ValueError, TypeError: an input does not fit.
    """
    check_inputs(q, k, v, {"i": log_i, "f": log_f}, None, time=True)
    x = prepare(q, k, v, log_i, log_f, True, state, None, None)
    grads = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*x, offset))
    chosen, kernel, steps = choose(x, True, None, None, None if grads else q.shape[1])
    options = (q.shape[-1] ** -0.5, True, normalizer_grad, steps, chosen.name, kernel)
    dtype = x.acc_dtype
    floor = torch.exp(-m.detach()).clamp(torch.finfo(dtype).tiny, LARGEST).to(dtype)
    h, C, n, last = _Attend.apply(*x[:8], floor, offset.to(dtype), options)
    return h, State(C, n, last)
