"""Models that are cases of linear_attention and mlstm, against their own formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from cases import TOLERANCE, Implementation, error
from torch import Tensor

import tfla

pytestmark = pytest.mark.interpreter

B, T, H, K, V = 2, 23, 3, 5, 7
Draw = Callable[..., Tensor]


@pytest.fixture
def draw(implementation: Implementation) -> Draw:
    """Random tensors that want a gradient."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64).to(implementation.widest)
        return x.to(implementation.device).requires_grad_()

    return normal


def check_same(implementation: Implementation, o: Tensor, ref: Tensor, leaves: Sequence[Tensor]) -> None:
    """The same outputs, and the same gradients of a random function of them."""
    do = torch.randn(ref.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(ref)
    grads, expected = (torch.autograd.grad(x, leaves, do, retain_graph=True) for x in (o, ref))
    for a, b in zip((o, *grads), (ref, *expected), strict=True):
        assert error(a, b) <= TOLERANCE[implementation.widest]


def lower(decay: Tensor) -> Tensor:
    """Zero above the diagonal of the last two dims."""
    return torch.where(torch.ones(T, T, device=decay.device).tril().bool(), decay, 0.0)


def test_plain_linear_attention(implementation: Implementation, draw: Draw) -> None:
    """o_t = (k_1 v_1^T + ... + k_t v_t^T)^T q_t."""
    q, k, v = draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V)
    ref = torch.einsum("bthk,bthkv->bthv", q, torch.einsum("bthk,bthv->bthkv", k, v).cumsum(1))
    no_decay = q.new_zeros(B, T, H)
    check_same(
        implementation, tfla.linear_attention(q, k, v, no_decay, scale=1.0, **implementation.options), ref, [q, k, v]
    )


def test_retnet(implementation: Implementation, draw: Draw) -> None:
    """o = (Q K^T * gamma^(i - j)) V, with one gamma a head."""
    q, k, v = draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V)
    gamma = 1 - 2.0 ** -torch.arange(2, 2 + H, device=implementation.device, dtype=q.dtype)
    t = torch.arange(T, device=implementation.device)
    decay = lower(gamma[:, None, None] ** (t[:, None] - t).clamp(min=0))
    ref = torch.einsum("bihk,bjhk,hij,bjhv->bihv", q, k, decay, v) * K**-0.5
    o = tfla.linear_attention(q, k, v, gamma.log().expand(B, T, H), **implementation.options)
    check_same(implementation, o, ref, [q, k, v])


def test_simple_gla(implementation: Implementation, draw: Draw) -> None:
    """o = (Q K^T * exp(b_i - b_j)) V, b the cumulative log-decays."""
    q, k, v, g = draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V), draw(B, T, H)
    log_f = torch.nn.functional.logsigmoid(g)
    b = log_f.cumsum(1).transpose(1, 2)
    decay = lower(torch.exp((b[..., :, None] - b[..., None, :]).clamp(max=0)))
    ref = torch.einsum("bihk,bjhk,bhij,bjhv->bihv", q, k, decay, v) * K**-0.5
    check_same(implementation, tfla.linear_attention(q, k, v, log_f, **implementation.options), ref, [q, k, v, g])


def test_mamba2_ssd(implementation: Implementation, draw: Draw) -> None:
    """s_t = exp(A dt_t) s_{t-1} + dt_t b_t x_t^T, y_t = s_t^T c_t; b and c shared by the heads of a group."""
    groups = 3
    c, b, x = draw(B, T, groups, K), draw(B, T, groups, K), draw(B, T, 2 * groups, V)
    A, dt_raw = draw(2 * groups), draw(B, T, 2 * groups)
    dt, decay = torch.nn.functional.softplus(dt_raw), -A.exp()
    s, ys = x.new_zeros(B, 2 * groups, K, V), []
    for t in range(T):
        b_t, c_t = (z[:, t].repeat_interleave(2, 1) for z in (b, c))
        update = dt[:, t, :, None, None] * b_t[..., :, None] * x[:, t, :, None, :]
        s = (dt[:, t] * decay).exp()[..., None, None] * s + update
        ys.append(torch.einsum("bhkv,bhk->bhv", s, c_t))
    y = tfla.linear_attention(c, b, x, decay * dt, dt.log(), scale=1.0, **implementation.options)
    check_same(implementation, y, torch.stack(ys, 1), [c, b, x, A, dt_raw])


def test_mlstm_exp_is_parallel_attention_with_gates(implementation: Implementation, draw: Draw) -> None:
    """(27)-(35) without stabilisation."""
    q, k, v, i, f = draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V), draw(B, T, H), draw(B, T, H)
    b = torch.nn.functional.logsigmoid(f).cumsum(1).transpose(1, 2)
    D = lower(torch.exp((b[..., :, None] - b[..., None, :]).tril() + i.transpose(1, 2)[..., None, :]))
    S = torch.einsum("bihk,bjhk,bhij->bhij", q, k, D) * K**-0.5
    ref = torch.einsum("bhij,bjhv->bihv", S / S.sum(-1, keepdim=True).abs().clamp(min=1), v)
    check_same(implementation, tfla.mlstm(q, k, v, i, f, **implementation.options), ref, [q, k, v, i, f])


def test_mlstm_sigmoid_is_linear_attention_with_sigmoid_gates(implementation: Implementation, draw: Draw) -> None:
    q, k, v, i, f = draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V), draw(B, T, H), draw(B, T, H)
    log_f, log_i = f.sigmoid().log(), i.sigmoid().log()
    ref = tfla.linear_attention(q, k, v, log_f, log_i, **implementation.options)
    check_same(
        implementation, tfla.mlstm(q, k, v, i, f, input_gate="sigmoid", **implementation.options), ref, [q, k, v, i, f]
    )
