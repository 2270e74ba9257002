"""The kernels that only `kernel="segmented"` of the delta rule has compile without spills. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiling import compile_kernels

pytest.importorskip("triton")
pytestmark = pytest.mark.compiles
OWN = ["delta_action_scan", "pass_delta_states", "pass_delta_states back"]
ONLY = "only=delta_action_scan+pass_delta_states"
CASES = ("gdn,128,128,bfloat16,segmented,state", "deltanet,64,128,bfloat16,segmented")


def test_kernels_compile_without_spills(kernel_cache: Path) -> None:
    answers = compile_kernels([f"sm_90:triton,delta,{case},{ONLY}" for case in CASES], kernel_cache)
    assert len(answers) == len(CASES)
    for answer in answers:
        assert answer["failure"] is None
        ours = answer["kernels"]
        assert sorted(kernel["kernel"] for kernel in ours) == OWN
        assert all(kernel["spilled"] == kernel["unequal"] == kernel["unset"] == 0 for kernel in ours)
