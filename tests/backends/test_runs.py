"""The scans of `tfla.backends.gpu.scan` agree with NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import INTERPRETED
from hypothesis import given
from hypothesis import strategies as st

triton = pytest.importorskip("triton")
tl = triton.language

from tfla.backends.gpu.scan import RUN, running_max, running_sum, step_indices, store_steps, total_sum  # noqa: E402

DEVICES = [
    pytest.param(
        "cpu",
        marks=[pytest.mark.interpreter, pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")],
    ),
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


@triton.jit
def scans(x, first, sums, totals, before, upto, HEADS: tl.constexpr, TILES: tl.constexpr, L: tl.constexpr):
    """Store running maxima of x, (HEADS, TILES * L), over all steps, and sums over the steps of each tile."""
    CHUNK: tl.constexpr = TILES * L
    h = tl.arange(0, HEADS)
    values = tl.load(x + h[:, None, None] * CHUNK + step_indices(CHUNK))
    at = h[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    there = at >= 0
    before_each, upto_each = running_max(values.to(tl.float32), tl.load(first + h)[:, None])
    store_steps(before + at, before_each, there)
    store_steps(upto + at, upto_each, there)
    values = tl.reshape(values, (HEADS, TILES, L // RUN, RUN))
    store_steps(sums + at, running_sum(values), there)
    tl.store(totals + h[:, None] * TILES + tl.arange(0, TILES)[None, :], total_sum(values))


@pytest.mark.parametrize("device", DEVICES)
@given(
    heads=st.sampled_from([1, 2, 4]),
    tiles=st.sampled_from([1, 2, 8]),
    L=st.sampled_from([16, 32, 64]),
    seed=st.integers(0, 2**32 - 1),
)
def test_as_numpy_has_them(device: str, heads: int, tiles: int, L: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(heads, tiles * L)) * 10.0 ** rng.integers(-3, 5)
    x[rng.random(x.shape) < 0.05] = -1e9  # steps that weigh nothing
    first = rng.choice([-np.inf, 0.0, 1e3], size=heads)
    on_device = [torch.from_numpy(t).to(device) for t in (x, first)]
    sums, before, upto = (torch.full_like(on_device[0], torch.nan) for _ in range(3))
    totals = torch.full((heads, tiles), torch.nan, dtype=torch.float64, device=device)
    scans[(1,)](*on_device, sums, totals, before, upto, HEADS=heads, TILES=tiles, L=L, num_warps=4)

    parts = x.reshape(heads, tiles, L)
    scale = np.abs(parts).sum(2, keepdims=True)
    found = sums.cpu().numpy().reshape(parts.shape)
    assert (np.abs(found - parts.cumsum(2)) <= 1e-14 * scale).all()
    assert (np.abs(totals.cpu().numpy() - parts.sum(2)) <= 1e-14 * scale[..., 0]).all()
    single = np.concatenate([first[:, None], x.astype(np.float32)], axis=1)
    maxima = np.maximum.accumulate(single, axis=1)
    assert np.array_equal(before.cpu().numpy(), maxima[:, :-1])
    assert np.array_equal(upto.cpu().numpy(), maxima[:, 1:])


@pytest.mark.parametrize("device", DEVICES)
def test_nan_is_not_seen_before_it_comes(device: str) -> None:
    x = torch.randn(2, 64, dtype=torch.float64, device=device)
    x[1, 30] = torch.nan
    first = torch.zeros(2, dtype=torch.float64, device=device)
    sums, before, upto = (torch.zeros_like(x) for _ in range(3))
    totals = torch.zeros(2, 1, dtype=torch.float64, device=device)
    scans[(1,)](x, first, sums, totals, before, upto, HEADS=2, TILES=1, L=64, num_warps=4)
    assert not sums[0].isnan().any()
    assert not sums[1, :30].isnan().any()
    assert sums[1, 30:].isnan().all()
