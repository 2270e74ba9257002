"""The operator with a number e_t added to its denominator, as other implementations of the mLSTM have it.

    h_t = scale C_t^T q_t / (max(|d_t|, 1) + e_t),    d_t = scale n_t^T q_t

h and all its gradients are exact. The operator's h is multiplied by

    r_t = b_t / (b_t + e_t),    b_t = max(|d_t|, 1)

and so is the cotangent dh_t that its backward takes. Every product that the backward forms, (T8) to (T13) of
docs/mathematics.md, is then that of the larger denominator. Where PyTorch transforms the call (`torch.func`, second
derivatives), h is the quotient of two calls of the operator without a normalizer, one for the numerator and one for d.

Stabilized by the max state m, as the operator computes them, d_t, 1 and e_t are multiplied by exp(-m_t): "offset" is
exp(-m_t) e_t, and b_t is max(|d_t|, exp(-m_t)).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tfla.backends import Inputs
from tfla.backends.base import Spec
from tfla.ops.api import linear_attention
from tfla.ops.autocast import without_autocast
from tfla.ops.dispatch import Request, check, choose
from tfla.ops.operators import attend
from tfla.ops.state import State
from tfla.ops.transforms import transforms_active

DEVICES_WITHOUT_FLOAT64 = ("mps",)
MAX_EXP = 1e30  # bounds exp(-m), which overflows where all gates are closed; it is then the whole denominator


def max_states(log_i: Tensor, log_f: Tensor, initial_m: Tensor | float) -> Tensor:
    """Compute the max states m_t = max(log_f_t + m_{t-1}, log_i_t) (1).

    With b_t the sum of log_f up to step t, m_t = b_t + max(m_0, max_{s <= t} (log_i_s - b_s)).

    Args:
        log_i, log_f: (B, T, H).
        initial_m: m_0, (B, H) or a number. With -inf the result is the row maximum of (29).

    Returns:
        m (B, T, H) in float64, or in float32 on a device without float64.
    """
    dtype = torch.float32 if log_f.device.type in DEVICES_WITHOUT_FLOAT64 else torch.float64
    b = log_f.to(dtype).cumsum(1)
    largest = (log_i.to(dtype) - b).cummax(1).values
    if isinstance(initial_m, Tensor):
        initial_m = initial_m.to(dtype)[:, None]
    else:
        initial_m = torch.full_like(largest[:, :1], initial_m)
    return b + torch.maximum(largest, initial_m)


def _attend_composed(
    tensors: Sequence[Tensor | None], m: Tensor, offset: Tensor, normalizer_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute h as the quotient of two calls of the operator, which every transform of PyTorch can differentiate.

    The max states m cancel out, so they are constants here. log_f_t + m_{t-1} - m_t and log_i_t - m_t, (6) and (7), are
    then the log-gates of a recurrence without max state.

    Args:
        tensors: q, k, v, log_i, log_f and the initial C, n, m as backends read them; the last three may be None.
        m: (B, T, H).
        offset: (B, T, H), exp(-m) e.
        normalizer_grad: whether gradients pass through the denominator.

    Returns:
        h (B, T, H, dhv), and C (B, H, dqk, dhv) and n (B, H, dqk) after the last step.
    """
    q, k, v, log_i, log_f, C, n, m0 = tensors
    assert q is not None
    assert k is not None
    assert v is not None
    assert log_i is not None
    assert log_f is not None
    dtype, m = offset.dtype, m.detach()
    initial_m = torch.zeros_like(m[:, 0]) if m0 is None else m0.detach()
    log_f = (log_f + (torch.cat([initial_m[:, None], m[:, :-1]], 1) - m)).to(dtype)
    log_i = (log_i - m).to(dtype)
    state_C, state_n = None, None
    if C is not None and n is not None:
        scale = torch.ones_like(initial_m) if m0 is None else torch.exp(m0 - initial_m)  # 1, with the derivative of m0
        scale = scale[..., None, None].to(dtype)
        state_C, state_n = State(C.to(dtype) * scale), State(n[..., None].to(dtype) * scale)
    q, k, wide_v = (t.to(dtype) for t in (q, k, v))  # the numerator, unlike h, may overflow float16
    ones = torch.ones((), dtype=dtype, device=v.device).expand(*v.shape[:3], 1)
    with without_autocast(v.device.type):
        num, last_C = linear_attention(q, k, wide_v, log_f, log_i, initial_state=state_C, return_state=True)
        d, last_n = linear_attention(q, k, ones, log_f, log_i, initial_state=state_n, return_state=True)
    denominator = torch.maximum(d[..., 0].abs(), _min_denominator(m, dtype))
    denominator = (denominator if normalizer_grad else denominator.detach()) + offset
    return (num / denominator[..., None]).to(v.dtype), last_C.C, last_n.C[..., 0]


def _min_denominator(m: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exp(-m), the smallest stabilized denominator, without gradient and neither 0 nor infinite."""
    return torch.exp(-m.detach()).clamp(torch.finfo(dtype).tiny, MAX_EXP).to(dtype)


class _AttendWithOffset(torch.autograd.Function):
    """The operator `tfla::attend` with a normalizer and `offset`, which is exp(-m) e.

    Inputs are those of the operator but for cu_seqlens, then the max states m and the offset, both (B, T, H), the name
    of the backend and its options.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_i: Tensor, log_f: Tensor, C: Tensor | None,
        n: Tensor | None, m0: Tensor | None, m: Tensor, offset: Tensor, backend: str, spec: Spec,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        x = Inputs(q, k, v, log_i, log_f, C, n, m0, None)
        h, *state, d, chunk_C, chunk_n = attend.forward(*attend.forward_schema.pack(x, (), backend, spec))
        denominator = torch.maximum(d.abs(), _min_denominator(m, offset.dtype))
        ratio = denominator / (denominator + offset)
        h.mul_(ratio[..., None])
        ctx.save_for_backward(q, k, v, log_i, log_f, C, n, m0, m, offset, h, d, chunk_C, chunk_n, ratio)
        ctx.backend, ctx.spec = backend, spec
        ctx.mark_non_differentiable(state[-1])
        ctx.set_materialize_grads(False)
        return h, *state

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, m, offset, h, d, chunk_C, chunk_n, ratio = ctx.saved_tensors
        dh, dC, dn, _ = cotangents
        if torch.is_grad_enabled():  # create_graph=True: the saved h would be a constant
            normalizer_grad = ctx.spec.normalizer_grad
            return *_differentiable_gradients(inputs, m, offset, (dh, dC, dn), normalizer_grad), None, None
        dh = torch.zeros_like(h) if dh is None else dh
        d_offset = None
        if ctx.needs_input_grad[9]:
            denominator = torch.maximum(d.abs(), _min_denominator(m, d.dtype)) + offset
            d_offset = -torch.einsum("bthv,bthv->bth", dh, h) / denominator
        dh = dh * ratio[..., None].to(dh.dtype)
        further = h, d, chunk_C, chunk_n, dh, dC, dn
        args = attend.backward_schema.pack(Inputs(*inputs, None), further, ctx.backend, ctx.spec)  # type: ignore[call-arg]
        grads = attend.backward(*args)
        input_grads = (None if t is None else g for t, g in zip(inputs, grads, strict=True))
        return *input_grads, None, d_offset, None, None


def _differentiable_gradients(
    tensors: Sequence[Tensor | None], m: Tensor, offset: Tensor, cotangents: Sequence[Tensor | None],
    normalizer_grad: bool,
) -> list[Tensor | None]:  # fmt: skip
    """Compute the gradients of `tensors`, m (always None) and `offset`, and record their graph.

    Args:
        cotangents: those of h, C and n; each may be None.
    """
    # Views give arguments that are the same tensor gradients of their own.
    views = [t if t is None or not t.requires_grad else t.view_as(t) for t in tensors]
    offset = offset.view_as(offset)
    results = _attend_composed(views, m, offset, normalizer_grad)
    used = [(t, c) for t, c in zip(results, cotangents, strict=True) if c is not None]
    arguments = *views, None, offset
    leaves = [t for t in arguments if t is not None and t.requires_grad]
    outputs, grad_outputs = [t for t, _ in used], [c for _, c in used]
    grads = iter(torch.autograd.grad(outputs, leaves, grad_outputs, create_graph=True, allow_unused=True))
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
    """Compute normalized linear attention with e added to the denominator.

    Args:
        q, k: (B, T, H, dqk).
        v: (B, T, H, dhv).
        log_i, log_f: (B, T, H).
        m: (B, T, H), the max states, from those of `state` or from 0.
        offset: (B, T, H), exp(-m) e. It gets a gradient.
        state: the initial state, or None.
        normalizer_grad: whether gradients pass through the denominator.

    Returns:
        h (B, T, H, dhv), and the state after the last step.

    Raises:
        ValueError, TypeError: an input does not fit; the message names it, what it is and what is allowed.
    """
    request = Request(
        q=q, k=k, v=v, i=log_i, f=log_f, state=state, lengths=None, gates="exp", normalize=True, return_state=True,
        scale=None, backend=None,
    )  # fmt: skip
    x = check(request)
    dtype = x.acc_dtype
    if transforms_active():
        h, C, n = _attend_composed(x[:8], m, offset.to(dtype), normalizer_grad)
        return h, State(C, n, m[:, -1].detach().to(dtype))
    grads = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*x, offset))
    chosen, kernel, steps = choose(x, True, None, None, None if grads else q.shape[1])
    spec = Spec(
        scale=q.shape[-1] ** -0.5, normalize=True, normalizer_grad=normalizer_grad, chunk_size=steps, kernel=kernel,
        save=True, final_state=True,
    )  # fmt: skip
    h, C, n, last = _AttendWithOffset.apply(*x[:8], m.detach(), offset.to(dtype), chosen.name, spec)
    return h, State(C, n, last)
