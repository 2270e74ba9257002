"""The kernels that only `kernel="segmented"` of the delta rule has compile without spills. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiling import compile_kernels

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.compiles
OWN = ["delta_action_scan", "pass_delta_states", "pass_delta_states back"]
ONLY = "only=delta_action_scan+pass_delta_states"
CASES = ("gdn,128,128,bfloat16,segmented,state", "deltanet,64,128,bfloat16,segmented")


def test_the_scan_for_transitions_on_hopper_compiles(kernel_cache: Path) -> None:
    """It spills addresses of producers and of states, and no number of a tile."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        pytest.skip("Gluon has no warpgroup MMAs before Triton 3.6")
    jobs = [f"sm_90:hopper,delta,{case},only=delta_action_kernel" for case in CASES]
    for answer in compile_kernels(jobs, kernel_cache):
        assert answer["failure"] is None
        (kernel,) = answer["kernels"]
        assert kernel["spilled"] <= 64
        assert kernel["shared"] <= 232_448
        assert kernel["serialized"] == kernel["unequal"] == kernel["unset"] == 0


def test_kernels_compile_without_spills(kernel_cache: Path) -> None:
    answers = compile_kernels([f"sm_90:triton,delta,{case},{ONLY}" for case in CASES], kernel_cache)
    assert len(answers) == len(CASES)
    for answer in answers:
        assert answer["failure"] is None
        ours = answer["kernels"]
        assert sorted(kernel["kernel"] for kernel in ours) == OWN
        assert all(kernel["spilled"] == kernel["unequal"] == kernel["unset"] == 0 for kernel in ours)
