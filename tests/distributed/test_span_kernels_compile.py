"""The kernels of context parallelism compile for the GPUs that have their backends. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiling import compile_kernels

pytest.importorskip("tfla.backends.hopper.fused", exc_type=ImportError)
pytestmark = pytest.mark.compiles
SPANS = ["join_spans", "join_spans back", "own_rows", "own_rows back"]
KERNELS = {
    "hopper,fused,sigmoid,128,256,bfloat16,segmented,parallel": SPANS,
    "hopper,fused,exp,64,64,bfloat16,segmented,state,parallel": ["join_max", *SPANS[:2], "own_max", *SPANS[2:]],
    "triton,fused,exp,64,128,float32,segmented,parallel": ["join_max", *SPANS[:2], "own_max", *SPANS[2:]],
}


def test_kernels_compile_and_keep_their_registers(kernel_cache: Path) -> None:
    jobs = [f"{'sm_90' if case.startswith('hopper') else 'sm_80'}:{case}" for case in KERNELS]
    answers = compile_kernels(jobs, kernel_cache)
    assert len(answers) == len(KERNELS)
    for answer in answers:
        assert answer["failure"] is None
        ours = [kernel for kernel in answer["kernels"] if kernel["kernel"].startswith(("own_", "join_"))]
        assert sorted(kernel["kernel"] for kernel in ours) == KERNELS[answer["case"]]
        assert all(kernel["spilled"] == kernel["unequal"] == 0 for kernel in ours)
