"""Results do not depend on the strides of inputs, of states, or of the cotangents that autograd passes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import TOLERANCE, Implementation, Layout, call, check, error, leaves_on, problem, solve, truth
from torch import Tensor

import tfla


def head_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x


def time_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def sparse_last_dim(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


def dims_reversed(x: Tensor) -> Tensor:
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def window(x: Tensor) -> Tensor:
    """A slice in every dim of a tensor with NaN around it."""
    return F.pad(x, (1, 2) * x.dim(), value=torch.nan)[(slice(1, -2),) * x.dim()]


@pytest.mark.parametrize("layout", [head_first, time_first, sparse_last_dim, dims_reversed, window])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("form", ["exp", "plain"])
def test_strides(implementation: Implementation, form: str, packed: bool, layout: Layout) -> None:
    p = problem(form, dtype=implementation.widest, Hq=2, H=4, T=70, lengths=(20, 0, 50) if packed else None)
    check(solve(p, implementation, layout=layout), truth(p), p.dtype)


def test_slices_of_fused_tensors(implementation: Implementation) -> None:
    p = problem(dtype=implementation.widest, carried=False)
    leaves = leaves_on(implementation, p)
    qkv = torch.cat([leaves[name].detach() for name in "qkv"], -1).requires_grad_()
    gates = torch.cat([leaves[name].detach() for name in "if"], -1).requires_grad_()
    h = tfla.mlstm(*qkv.split([5, 5, 7], -1), *gates.chunk(2, -1), **implementation.options)
    grads = torch.autograd.grad(h, [qkv, gates], p.dh.to(h))
    apart = tfla.mlstm(*leaves.values(), **implementation.options)
    expected = torch.autograd.grad(apart, [*leaves.values()], p.dh.to(h))
    assert error(h, apart) <= TOLERANCE[p.dtype]
    assert error(grads[0], torch.cat(expected[:3], -1)) <= TOLERANCE[p.dtype]
    assert error(grads[1], torch.cat(expected[3:], -1)) <= TOLERANCE[p.dtype]


def test_expanded_tensors(implementation: Implementation) -> None:
    """Stride 0: one decay a head for all steps, one v for all heads, a sum's cotangent."""
    leaves = leaves_on(implementation, problem(dtype=implementation.widest, carried=False))
    q, k, _, _, _ = leaves.values()
    v, decay = leaves["v"][:, :, :1].detach().requires_grad_(), leaves["f"][0, 0].detach().requires_grad_()
    results = []
    for copy in (False, True):
        wide = [x.contiguous() if copy else x for x in (v.expand(2, 37, 2, 7), decay.expand(2, 37, 2))]
        h = tfla.linear_attention(q, k, wide[0], F.logsigmoid(wide[1]), **implementation.options)
        dh = torch.ones((), dtype=h.dtype, device=h.device).expand(h.shape)
        results.append((h, *torch.autograd.grad(h, [q, k, v, decay], dh.contiguous() if copy else dh)))
    for a, b in zip(*results, strict=True):
        assert error(a, b) <= TOLERANCE[implementation.widest]


def test_inputs_are_only_read(implementation: Implementation) -> None:
    leaves = leaves_on(implementation, p := problem(dtype=implementation.widest))
    before = {name: x.detach().clone() for name, x in leaves.items()}
    h, state = call(p, leaves, **implementation.options)
    dh = p.dh.to(h)
    torch.autograd.backward([h, state.C], [dh, state.C.detach()])
    assert all(torch.equal(x, before[name]) for name, x in leaves.items())
    assert torch.equal(dh, p.dh.to(h))
