"""The rotary embedding in eager mode on a GPU, and its kernel, equal their formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_kernels import DEVICE, RUNS, TOLERANCE, bfloat16, check  # noqa: F401
from torch import Tensor

from tfla.backends.gpu.runtime import INTERPRETED
from tfla.nn.mixers import rotary

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 1e-14}


def by_formula(x: Tensor, position: Tensor) -> Tensor:
    """Turn pairs of channels as complex numbers, in float64."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    angle = position[..., None, None] * rotary.ROTARY_BASE ** -(torch.arange(half, device=x.device).double() / half)
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows", [1, 2])
def test_rotation_and_its_gradients(device: str, dtype: torch.dtype, rows: int) -> None:
    """Positions are those of all rows, or of each; x may be a part of another tensor."""
    x = torch.randn(2, 9, 3, 20, device=device, dtype=dtype)[..., :10].requires_grad_()
    dy, position = torch.randn_like(x), torch.randint(0, 50, (rows, 9), device=device)
    table = rotary.cos_sin(position, 5, torch.promote_types(dtype, torch.float32))
    y = rotary._Rotation.apply(x, table)
    (dx,) = torch.autograd.grad(y, x, dy)
    wide = x.detach().double().requires_grad_()
    truth = by_formula(wide, position)
    (expected,) = torch.autograd.grad(truth, wide, dy.double())
    for found, other in ((y, truth), (dx, expected)):
        assert found.dtype == dtype
        assert (found.detach().double() - other).norm() <= ROUNDING[dtype] * other.norm()


@pytest.mark.parametrize(
    ("shape", "rows", "dtype"),
    [
        ((2, 37, 3, 130), (1, 37), torch.float32),  # more than one program, channels that are no power of 2
        ((3, 1, 2, 8), (3, 1), torch.float32),  # a step, each sequence at a position of its own
        ((1, 5, 2, 2), (5,), torch.float16),
        ((2, 20, 4, 128), (20,), torch.bfloat16),
        ((0, 5, 2, 6), (5,), torch.float32),
    ],
)
class TestKernel:
    """The kernel itself."""

    pytestmark = RUNS

    def test_formula(
        self, shape: tuple[int, ...], rows: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if INTERPRETED:  # where calls in bfloat16 run in PyTorch
            monkeypatch.setattr(rotary, "tensors_unsupported", lambda *_: None)
        launches: list[Any] = []
        rotated = rotary._rotated
        monkeypatch.setattr(rotary, "_rotated", lambda *x: [launches.append(x), rotated(*x)][1])
        x, dy = (torch.randn(*shape, 2, device=DEVICE).to(dtype)[..., 0] for _ in range(2))
        position = torch.randint(0, 50, rows, device=DEVICE)
        table = rotary.cos_sin(position, shape[-1] // 2, torch.float32)
        y = rotary._Rotation.apply(x.requires_grad_(), table)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert len(launches) == 2
        wide = x.detach().double().requires_grad_()
        truth = by_formula(wide, position)
        for found, expected in ((y, truth), (dx, torch.autograd.grad(truth, wide, dy.double())[0])):
            assert found.dtype == dtype
            check(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_second_derivatives(device: str) -> None:
    """A rotation by the same angles back gives what was there."""
    x = torch.randn(1, 4, 2, 6, device=device, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x).requires_grad_()
    table = rotary.cos_sin(torch.arange(4, device=device), 3, torch.float64)
    (dx,) = torch.autograd.grad(rotary._Rotation.apply(x, table), x, dy, create_graph=True)
    (again,) = torch.autograd.grad(dx, dy, dx.detach())
    torch.testing.assert_close(again, dy.detach())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_eager_calls_on_a_gpu_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    apply = rotary._Rotation.apply
    monkeypatch.setattr(rotary._Rotation, "apply", lambda *x: [calls.append(x), apply(*x)][1])
    q, k = (torch.randn(1, 4, 2, 6, device="cuda") for _ in range(2))
    found = rotary.rotate_both(q, k, torch.arange(4, device="cuda"))
    assert len(calls) == 2
    torch.testing.assert_close(found[0].double(), by_formula(q, torch.arange(4, device="cuda")), atol=1e-6, rtol=1e-6)
    torch.func.jvp(lambda q: rotary.rotate_both(q, k, torch.arange(4, device="cuda"))[0], (q,), (q,))
    assert len(calls) == 2  # jvp takes operations that it knows
