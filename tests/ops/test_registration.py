"""An operator other than the library's: autograd, transforms and tracing follow from its registration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tfla.ops.dispatch import Plan
from tfla.ops.registration import DifferentiableOperator
from tfla.ops.transforms import needs_dispatcher


class Inputs(NamedTuple):
    v: Tensor  # (B, T)
    weight: Tensor  # (T,)
    start: Tensor | None  # (B,)
    cu_seqlens: Tensor | None


class Options(NamedTuple):
    factor: float
    save: bool
    final_state: bool


class Outputs(NamedTuple):
    h: Tensor  # (B, T)
    last: Tensor  # (B,)
    squares: Tensor  # (B, T)


def plain(x: Inputs, spec: Options) -> Outputs:
    """h_t = start + factor sum over s <= t of weight_s v_s^2, and its last value."""
    h = spec.factor * (x.weight * x.v.square()).cumsum(1)
    if x.start is not None:
        h = h + x.start[:, None]
    return Outputs(h, h[:, -1].clone() if spec.final_state else h.new_zeros(0), h.new_zeros(0))


class WeightedSquares:
    name = "weighted squares"

    def forward(self, x: Inputs, spec: Options) -> Outputs:
        return plain(x, spec)._replace(squares=x.v.square() if spec.save else x.v.new_zeros(0))

    def forward_replay(self, x: Inputs, spec: Options) -> None:
        return None

    def backward(self, x: Inputs, out: Outputs, dh: Tensor, dlast: Tensor | None, spec: Options) -> Sequence[Any]:
        d = dh.clone()
        if dlast is not None:
            d[:, -1] += dlast
        d_sum = spec.factor * d.flip(1).cumsum(1).flip(1)
        return 2 * x.v * x.weight * d_sum, (out.squares * d_sum).sum(0), d.sum(1)


def shapes(x: Inputs, backend: str, spec: Options) -> tuple[Tensor, ...]:
    last, squares = (x.v.shape[:1] if spec.final_state else (0,)), (x.v.shape if spec.save else (0,))
    return x.v.new_empty(x.v.shape), x.v.new_empty(last), x.v.new_empty(squares)


BACKENDS = {"weighted squares": WeightedSquares()}
operator = DifferentiableOperator(
    "weighted_squares_of_a_test", inputs=Inputs, spec=Options, outputs=Outputs, backend_before="save",
    cotangents=("dh", "dlast"), saved=("squares",), backends=BACKENDS, check=lambda x: None, shapes=shapes,
    gradients=lambda x, found: tuple(found), num_read=lambda spec: 2 if spec.final_state else 1,
    results=lambda spec, out: tuple(out[: 2 if spec.final_state else 1]), differentiable=plain,
    flops=(lambda x, backend, spec: 3 * x.v[1], lambda x, backend, spec: 5 * x.v[1]), without_batch=("weight",),
)  # fmt: skip


def call(v: Tensor, weight: Tensor, start: Tensor | None = None, final_state: bool = True) -> tuple[Tensor, ...]:
    x = Inputs(v, weight, start, None)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)
    found: tuple[Tensor, ...] = operator(
        x, Plan(BACKENDS["weighted squares"], Options(0.5, save, final_state), needs_dispatcher(x), False, False)
    )
    return found


def expected(v: Tensor, weight: Tensor, start: Tensor | None = None) -> tuple[Tensor, ...]:
    return tuple(plain(Inputs(v, weight, start, None), Options(0.5, False, True))[:2])


def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*n, dtype=torch.float64, generator=generator).requires_grad_() for n in ((3, 5), (5,), (3,))]


def total(fn: Any) -> Any:
    return lambda *x: sum((h * torch.linspace(1, 2, h.numel()).view(h.shape)).sum() for h in fn(*x))


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-12, atol=1e-12) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_gradients(compiled: bool) -> None:
    x = leaves()
    found = torch.compile(call, backend="aot_eager", fullgraph=True)(*x) if compiled else call(*x)
    assert same(found, expected(*x))
    grads = [torch.autograd.grad(sum(t.square().sum() for t in out), x) for out in (found, expected(*x))]
    assert same(*grads)


def test_an_input_and_a_result_may_be_left_out() -> None:
    v, weight, _ = leaves()
    (h,) = call(v, weight, final_state=False)
    (dv,) = torch.autograd.grad(h.sum(), [v])
    assert same([dv], torch.autograd.grad(expected(v, weight)[0].sum(), [v]))


def test_second_derivatives() -> None:
    assert torch.autograd.gradgradcheck(call, leaves())


@pytest.mark.parametrize("of", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
@pytest.mark.parametrize("argument", [0, 1, 2])
def test_transforms(of: Any, argument: int) -> None:
    x = [t.detach() for t in leaves()]
    found, right = (of(total(fn), argnums=argument)(*x) for fn in (call, expected))
    assert same([found], [right])


@pytest.mark.parametrize("in_dims", [(0, None, None), (0, 0, None), (None, 0, 0)])
def test_vmap_of_values_and_gradients(in_dims: tuple[int | None, ...]) -> None:
    """Also over the weight, which has no dimension of the batch."""
    x = [t.detach() if dim is None else torch.stack([t.detach(), 2 * t.detach()])
         for t, dim in zip(leaves(), in_dims, strict=True)]  # fmt: skip
    for fn in (lambda f: f, lambda f: torch.func.grad(total(f), argnums=(0, 1, 2))):
        assert same(torch.vmap(fn(call), in_dims)(*x), torch.vmap(fn(expected), in_dims)(*x))


def test_opcheck() -> None:
    x = leaves()
    torch.library.opcheck(operator.forward, (*x, None, 0.5, "weighted squares", True, True))
    x = [t.detach() for t in x]
    args = (*x, None, x[0].square(), torch.ones_like(x[0]), torch.ones_like(x[2]), 0.5, "weighted squares")
    torch.library.opcheck(operator.backward, args)


def test_counted_flops() -> None:
    with FlopCounterMode(display=False) as counter:
        total(call)(*leaves()).backward()
    assert counter.get_total_flops() == 3 * 5 + 5 * 5
