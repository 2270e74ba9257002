"""Tests of the gate vectors that the Hopper gate warp computes from the gates, in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from cases import INTERPRETED
from torch import Tensor
from torch.nn.functional import logsigmoid

triton = pytest.importorskip("triton")
tl = triton.language
gate_warp = pytest.importorskip("tfla.backends.hopper.gate_warp", exc_type=ImportError)
compute_gate_vectors = gate_warp.compute_gate_vectors

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter"),
]
L = 64
SCALE = 0.125


@triton.jit
def kernel(  # type: ignore[no-untyped-def]
    i, f, out, steps, scale, log_scale, L: tl.constexpr, INPUT_GATE: tl.constexpr, SIGMOID_I: tl.constexpr,
    SIGMOID_F: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, L)
    row, column, inter, update, decay = compute_gate_vectors(
        tl.load(i + r), tl.load(f + r), r < steps, scale, log_scale, INPUT_GATE, SIGMOID_I, SIGMOID_F
    )
    tl.store(out + r, row)
    tl.store(out + L + r, column)
    tl.store(out + 2 * L + r, inter)
    tl.store(out + 3 * L + r, update)
    tl.store(out + 4 * L + r, decay)


def computed(i: Tensor, f: Tensor, steps: int, **forms: bool) -> Tensor:
    """Return ROW, COLUMN, INTER, UPDATE and DECAY of a tile of `steps` steps, (5, L)."""
    out = torch.empty(5, L)
    kernel[(1,)](i, f, out, steps, SCALE, math.log2(SCALE), L=L, **forms)
    return out


def expected(log_i: Tensor, log_f: Tensor, steps: int) -> tuple[Tensor, ...]:
    """Return exponents in base 2, in float64: ROW_i + COLUMN_j at (i, j), and those of INTER, UPDATE and DECAY."""
    inside = torch.arange(L) < steps
    log_i, log_f = (x.double().clamp(-1e5, 5e4) / math.log(2) for x in (log_i, log_f))
    i = torch.where(inside, log_i.clamp(min=-150), -150)
    f = torch.where(inside, log_f.clamp(min=-150), 0)
    b = f.cumsum(0)
    s = math.log2(SCALE)
    return b[:, None] - b + i + s, b + s, b[-1] - b + i, b[-1:].expand(L)


def check(i: Tensor, f: Tensor, steps: int, log_i: Tensor, log_f: Tensor, **forms: bool) -> None:
    """Check exponents up to the rounding of float32 sums from the start of the tile."""
    row, column, *rest = computed(i, f, steps, **forms).double()
    pairs, *weights = expected(log_i, log_f, steps)
    kept = torch.ones(L, L).tril().bool() & (pairs > -100)
    rounding = 2.0**-24 * (row.abs()[:, None] + column.abs() + 10) + 1e-6
    assert (((row[:, None] + column) - pairs).abs() <= rounding)[kept].all()
    for found, exponent in zip(rest, weights, strict=True):
        torch.testing.assert_close(found, exponent.exp2(), rtol=1e-5, atol=2.0**-126)


@pytest.mark.parametrize("steps", [1, 37, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sigmoid_gates(steps: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    i, f = torch.randn(L).to(dtype), (2 * torch.randn(L)).to(dtype)
    forms = {"INPUT_GATE": True, "SIGMOID_I": True, "SIGMOID_F": True}
    check(i, f, steps, logsigmoid(i.double()), logsigmoid(f.double()), **forms)


@pytest.mark.parametrize("resets", [1, 5, 60])
def test_resets(resets: int) -> None:
    """Gates beside resets still count."""
    torch.manual_seed(resets)
    i, f = torch.randn(L), logsigmoid(3 + torch.randn(L))
    f[torch.randperm(L)[:resets]] = torch.tensor([-1e4, float("-inf")]).repeat(30)[:resets]
    check(i, f, L, i, f, INPUT_GATE=True, SIGMOID_I=False, SIGMOID_F=False)


def test_without_input_gate() -> None:
    f = torch.linspace(-1, 0.5, L)  # the state may grow
    check(f, f, 40, torch.zeros(L), f, INPUT_GATE=False, SIGMOID_I=False, SIGMOID_F=False)


def test_nan_stays() -> None:
    f = torch.full((L,), -0.1)
    f[40] = float("nan")
    row, _, inter, update, decay = computed(f, f, L, INPUT_GATE=False, SIGMOID_I=False, SIGMOID_F=False)
    assert row[:40].isfinite().all()
    assert inter[:40].isfinite().all()
    assert all(x.isnan().all() for x in (row[40:], inter[40:], update, decay))
