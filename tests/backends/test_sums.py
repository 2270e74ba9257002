"""Sums of products over threads are the same in each: no addition is fused with a product. Needs no GPU."""

from __future__ import annotations

import runpy

import pytest
from cases import INTERPRETED
from compiling import SCRIPT

triton = pytest.importorskip("triton")
tl = triton.language

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tfla.backends.gpu.state_passing import rounded_product  # noqa: E402

unequal_sums = runpy.run_path(str(SCRIPT))["unequal_sums"]
pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")


@triton.jit
def sums_of_rows(X, Y, Out, ROUNDED: tl.constexpr):
    r = tl.arange(0, 16)
    at = r[:, None] * 16 + r[None, :]
    x = tl.load(X + at)
    y = tl.load(Y + at)
    products = x * y
    if ROUNDED:
        products = rounded_product(x, y)
    tl.store(Out + r, tl.sum(products, 1))


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_additions_take_in_no_product(rounded: bool, capability: int) -> None:
    signature = {"X": "*fp32", "Y": "*fp32", "Out": "*fp32", "ROUNDED": "constexpr"}
    source = ASTSource(sums_of_rows, signature, {"ROUNDED": rounded})
    target, options = GPUTarget("cuda", capability, 32), {"enable_fp_fusion": True}
    ptx = triton.compile(source, target=target, options=options).asm["ptx"]
    assert "shfl.sync.bfly" in ptx
    assert (unequal_sums(ptx) == 0) == rounded
