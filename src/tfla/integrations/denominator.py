"""The operator with a number added to its denominator, as other implementations of the mLSTM have it:

    h_t = scale C_t^T q_t / (max(|d_t|, 1) + e_t),    d_t = scale n_t^T q_t

Exactly, with exact gradients: dividing h by 1 + e / max(|d|, 1) and the cotangent by the same makes every product that
a backend's backward forms ((T8) to (T13) of docs/mathematics.md) that of the larger denominator. Transforms of PyTorch
see the same function as two calls of the operator without a normalizer, one for the numerator and one for d.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tfla.ops.api import linear_attention, prepare
from tfla.ops.checks import check_inputs
from tfla.ops.choice import choose
from tfla.ops.signature import without_autocast
from tfla.ops.state import State
from tfla.ops.transforms import transforms_active

WITHOUT_FLOAT64 = ("mps",)
LARGEST = 1e30  # of exp(-m): closed gates overflow it, and then it is the whole denominator


def max_states(log_i: Tensor, log_f: Tensor, first: Tensor | float) -> Tensor:
    """Compute m_t = max(log_f_t + m_{t-1}, log_i_t) (1) from m_0 = first (B, H), for log-gates (B, T, H).

    The sums are float64, or float32 on a device without it. With first = -inf the result is the largest weight of any
    step so far, the row maximum of (29).
    """
    dtype = torch.float32 if log_f.device.type in WITHOUT_FLOAT64 else torch.float64
    b = log_f.to(dtype).cumsum(1)
    seen = (log_i.to(dtype) - b).cummax(1).values
    first = first.to(dtype)[:, None] if isinstance(first, Tensor) else torch.full_like(seen[:, :1], first)
    return b + torch.maximum(seen, first)


def _compose(
    tensors: Sequence[Tensor | None], m: Tensor, offset: Tensor, normalizer_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute h and the final C and n by calls of the operator, with which every transform composes.

    With the max states m as constants, which cancel out, log_f_t + m_{t-1} - m_t and log_i_t - m_t (6), (7) are the
    log-gates of a form without max state.

    Args:
        tensors: q, k, v, log_i, log_f and the initial C, n, m as backends read them; the last three may be None.
    """
    q, k, v, log_i, log_f, C, n, m0 = tensors
    assert q is not None
    assert k is not None
    assert v is not None
    assert log_i is not None
    assert log_f is not None
    dtype, m = offset.dtype, m.detach()
    first = torch.zeros_like(m[:, 0]) if m0 is None else m0.detach()
    log_f = (log_f + (torch.cat([first[:, None], m[:, :-1]], 1) - m)).to(dtype)
    log_i = (log_i - m).to(dtype)
    state_C, state_n = None, None
    if C is not None and n is not None:
        change = torch.ones_like(first) if m0 is None else torch.exp(m0 - first)  # 1, with the derivative of m0
        change = change[..., None, None].to(dtype)
        state_C, state_n = State(C.to(dtype) * change), State(n[..., None].to(dtype) * change)
    q, k, wide_v = (t.to(dtype) for t in (q, k, v))  # a numerator is not bounded as h is
    ones = torch.ones((), dtype=dtype, device=v.device).expand(*v.shape[:3], 1)
    with without_autocast(v.device.type):
        num, last_C = linear_attention(q, k, wide_v, log_f, log_i, initial_state=state_C, return_state=True)
        d, last_n = linear_attention(q, k, ones, log_f, log_i, initial_state=state_n, return_state=True)
    bound = torch.maximum(d[..., 0].abs(), _floor(m, dtype))
    denominator = (bound if normalizer_grad else bound.detach()) + offset
    return (num / denominator[..., None]).to(v.dtype), last_C.C, last_n.C[..., 0]


def _floor(m: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exp(-m), the smallest denominator, as a constant that is neither 0 nor infinite."""
    return torch.exp(-m.detach()).clamp(torch.finfo(dtype).tiny, LARGEST).to(dtype)


class _Attend(torch.autograd.Function):
    """`tfla::attend` with a normalizer; the max states are `m` and `offset` is exp(-m) e, both (B, T, H)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_i: Tensor, log_f: Tensor, C: Tensor | None,
        n: Tensor | None, m0: Tensor | None, m: Tensor, offset: Tensor, options: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        h, *state, d, chunk_C, chunk_n = torch.ops.tfla.attend(
            q, k, v, log_i, log_f, C, n, m0, None, *options, True, True
        )
        bound = torch.maximum(d.abs(), _floor(m, offset.dtype))
        ratio = bound / (bound + offset)
        h.mul_(ratio[..., None])
        ctx.save_for_backward(q, k, v, log_i, log_f, C, n, m0, m, offset, h, d, chunk_C, chunk_n, ratio)
        ctx.options = options
        ctx.mark_non_differentiable(state[-1])
        ctx.set_materialize_grads(False)
        return h, *state

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, m, offset, h, d, chunk_C, chunk_n, ratio = ctx.saved_tensors
        dh, dC, dn, _ = cotangents
        if torch.is_grad_enabled():  # a graph of the backward is wanted, in which h is a function of the inputs
            return *_recorded_gradients(inputs, m, offset, (dh, dC, dn), ctx.options[2]), None
        dh = torch.zeros_like(h) if dh is None else dh
        d_offset = None
        if ctx.needs_input_grad[9]:
            d_offset = -torch.einsum("bthv,bthv->bth", dh, h) / (torch.maximum(d.abs(), _floor(m, d.dtype)) + offset)
        scaled = dh * ratio[..., None].to(dh.dtype)
        grads = torch.ops.tfla.attend_backward(*inputs, None, h, d, chunk_C, chunk_n, scaled, dC, dn, *ctx.options)
        of_inputs = (None if t is None else g for t, g in zip(inputs, grads, strict=True))
        return *of_inputs, None, d_offset, None


def _recorded_gradients(
    tensors: Sequence[Tensor | None], m: Tensor, offset: Tensor, cotangents: Sequence[Tensor | None],
    normalizer_grad: bool,
) -> list[Tensor | None]:  # fmt: skip
    """Compute the gradients of `tensors`, m (None) and `offset` with a graph of their own."""
    # Views tell arguments apart that are one tensor.
    views = [t if t is None or not t.requires_grad else t.view_as(t) for t in tensors]
    offset = offset.view_as(offset)
    given = [
        (t, c) for t, c in zip(_compose(views, m, offset, normalizer_grad), cotangents, strict=True) if c is not None
    ]
    arguments = *views, None, offset
    wanted = [t for t in arguments if t is not None and t.requires_grad]
    outputs, known = [t for t, _ in given], [c for _, c in given]
    grads = iter(torch.autograd.grad(outputs, wanted, known, create_graph=True, allow_unused=True))
    return [next(grads) if t is not None and t.requires_grad else None for t in arguments]


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
    dtype = x.acc_dtype
    if transforms_active():
        h, C, n = _compose(x[:8], m, offset.to(dtype), normalizer_grad)
        return h, State(C, n, m[:, -1].detach().to(dtype))
    grads = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*x, offset))
    chosen, kernel, steps = choose(x, True, None, None, None if grads else q.shape[1])
    options = (q.shape[-1] ** -0.5, True, normalizer_grad, steps, chosen.name, kernel)
    h, C, n, last = _Attend.apply(*x[:8], m.detach(), offset.to(dtype), options)
    return h, State(C, n, last)
