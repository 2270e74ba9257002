"""The results of the paper's kernels do not depend on block sizes or chunk sizes."""

from __future__ import annotations

import importlib.util

import pytest
from cases import Implementation, check, problem, solve, truth

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

FIELDS = (
    "steps", "inner_steps", "max_contracted", "max_output", "state_rows", "state_columns", "num_warps", "stages"
)  # fmt: skip
BLOCK_SIZES = {
    "whole": (64, 64, 128, 128, 64, 128, 4, 1),
    "inner tiles": (64, 16, 128, 128, 64, 128, 4, 2),
    "blocks of head dims": (32, 32, 32, 32, 32, 32, 4, 1),
    "both": (64, 32, 32, 32, 32, 64, 8, 2),
}


CASES = [
    pytest.param(
        sizes, form, chunk_size, id=f"{name}-{form}-{chunk_size}",
        marks=[pytest.mark.interpreter] * ((name, chunk_size) == ("inner tiles", 64)),
    )
    for name, sizes in BLOCK_SIZES.items()
    for form, chunk_size in (("exp", 64), ("exp", 1000), ("sigmoid", 128))
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "form", "chunk_size"), CASES)
def test_any_block_sizes(
    implementation: Implementation, sizes: tuple[int, ...], form: str, chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation.kernel != "tfla":
        pytest.skip("has no block sizes to choose")
    from tfla.backends.triton.paper import block_sizes

    chosen = block_sizes.BlockSizes(**dict(zip(FIELDS, sizes, strict=True)))
    monkeypatch.setattr(block_sizes, "choose", lambda x, chunk_size: chosen)
    p = problem(form, dtype=implementation.widest, lengths=(90, 0, 141), Hq=1, H=2, K=40, V=70)
    check(solve(p, implementation, chunk_size=chunk_size), truth(p), p.dtype)
