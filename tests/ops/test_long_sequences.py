"""Rounding errors do not accumulate along a sequence, with resets and without."""

from __future__ import annotations

import pytest
import torch
from cases import Implementation, call, check, gradients, leaves_on, problem, solve, truth
from torch import Tensor

import tfla


@pytest.fixture
def long_way(implementation: Implementation) -> Implementation:
    if implementation.small_only:
        pytest.skip("too slow for long sequences")
    return implementation


@pytest.mark.parametrize("reset", [-1e4, -1e5])
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_resets_every_few_steps(long_way: Implementation, form: str, reset: float) -> None:
    """65,536 steps of documents of a few steps each: errors are those of the same steps without resets.

    The exponential of a reset is 0 in float64 too: the truth is that of a batch of stretches, each starting with one.
    """
    rows, length = 32, 2048
    p = problem(form, B=rows, T=length, Hq=1, H=1, K=4, V=4, carried=False, dtype=torch.float32)
    p = p.but(dstate=tfla.State(*(None if x is None else torch.zeros_like(x) for x in p.dstate)))
    resets = torch.rand(p.f.shape, generator=torch.Generator().manual_seed(0)) < 0.2
    resets[:, 0] = True
    stretches = p.but(f=torch.where(resets, reset, p.f))
    steps = {name: getattr(stretches, name).flatten(0, 1)[None] for name in ("q", "k", "v", "i", "f", "dh")}
    whole = stretches.but(**steps, dstate=tfla.State(*(None if x is None else x[:1] for x in p.dstate)))
    leaves = leaves_on(long_way, whole)
    found = gradients(whole, leaves, *call(whole, leaves, **long_way.options), m=None)

    def per_step(quantities: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: quantities[name].reshape(rows, length, 1, -1) for name in ("h", "dq", "dk", "dv", "di", "df")}

    check(per_step(found), per_step(truth(stretches)), torch.float32)
    stretch_by_stretch = per_step(solve(p, long_way))
    for name, x in per_step(found).items():
        with_resets = (x - per_step(truth(stretches))[name]).norm()
        without = (stretch_by_stretch[name] - per_step(truth(p))[name]).norm()
        assert with_resets <= 1.5 * without, name


@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_nothing_is_forgotten(long_way: Implementation, form: str) -> None:
    """8,192 steps under an open forget gate."""
    p = problem(form, B=1, T=8192, Hq=1, H=1, K=4, V=4, positive_qk=True, dtype=torch.float32)
    p = p.but(f=torch.full_like(p.f, 10.0))
    check(solve(p, long_way), truth(p), torch.float32)


@pytest.mark.parametrize("form", ["exp", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_two_thousand_steps(long_way: Implementation, form: str, dtype: torch.dtype) -> None:
    p = problem(form, B=1, T=2048, Hq=1, H=2, K=16, V=16, f_mean=5.0, dtype=dtype)
    check(solve(p, long_way), truth(p), dtype)
    check(solve(p, long_way, chunk_size=100), truth(p), dtype)
