"""Tests that the Hopper kernels compile, fit a multiprocessor and keep their MMAs asynchronous. No GPU is needed.

With TFLA_COMPILE=record, or =all, more combinations of gates, head dims and variants are compiled. Where Triton is too
old for the kernels, the backend warns once.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
from compiling import compile_kernels

from tfla.backends import hopper

# Among these forms each kernel has each value of each of its constants and each dtype at least once.
CASES = [
    "sigmoid,128,256,float16",
    "sigmoid,128,128,bfloat16,segmented,state",
    "exp,128,256,bfloat16,segmented,state,only=o_dv_kernel",
    "exp,128,256,bfloat16,packed,segmented,state",
    "exp,1024,1024,bfloat16",
    "exp,64,64,float16,segmented,state",
    "exp,128,64,bfloat16,segmented",
    "sigmoid,128,64,bfloat16,grouped",
    "exp,256,512,bfloat16,packed,state",
    "exp,64,128,bfloat16,packed,state",
    "exp,160,320,bfloat16,segmented,state,only=segment_states_kernel",
    "sigmoid,40,56,bfloat16,packed,state",
    "plain,128,128,float16,packed",
    "exp,128,256,bfloat16,packed,rows,only=o_dv_kernel",
    "exp,256,512,bfloat16,packed,rows,only=dq_dk_kernel",
    "exp,64,64,bfloat16,packed,rows,only=small_head_kernel",
    "exp,128,256,bfloat16,packed,rows,low,only=o_dv_kernel",
    "exp,256,512,bfloat16,packed,rows,low,only=dq_dk_kernel",
    "exp,64,64,bfloat16,packed,rows,low,only=small_head_kernel",
    "exp,96,200,bfloat16,packed,rows,only=o_dv_kernel",
    "exp,160,320,bfloat16,packed,rows,only=dq_dk_kernel",
    "exp,64,72,bfloat16,packed,rows,only=small_head_kernel",
]
DELTA_CASES = [
    "gdn,128,128,bfloat16,float32",
    "gdn,128,128,bfloat16,packed,state",
    "gdn,128,256,bfloat16,float32,single",
    "gdn,128,256,bfloat16,packed,state",
    "deltanet,64,128,bfloat16,state",
    "gdn,128,128,bfloat16,normalized",
    "gdn,128,256,bfloat16,normalized,only=dq_dk_kernel",
]
if os.environ.get("TFLA_COMPILE", ""):  # other combinations of the same constants
    CASES = [case if ",rows" in case else case.partition(",only=")[0] for case in CASES]
    CASES += [
        "sigmoid,128,128,float16,packed,grouped",
        "exp,128,256,bfloat16",
        "exp,128,128,bfloat16",
        "sigmoid,128,256,bfloat16",
        "exp,256,512,bfloat16,segmented,state",
        "sigmoid,512,512,float16",
        "exp,64,128,bfloat16,segmented,state",
        "sigmoid,64,128,bfloat16,grouped",
        "exp,128,256,bfloat16,packed",
        "exp,64,64,bfloat16,packed,state",
        "plain,128,256,bfloat16,segmented,state",
        "plain,64,64,bfloat16",
    ]
    DELTA_CASES += [
        "gdn,128,128,bfloat16,single",
        "deltanet,72,256,bfloat16,packed,state,normalized,forward",
        "gdn,128,128,bfloat16,packed,state,normalized",
        "gdn,128,256,bfloat16,packed,state,normalized",
    ]
KERNELS = [
    name + implementation
    for name in ("o_dv_kernel", "dq_dk_kernel", "segment_states_kernel", "small_head_kernel")
    for implementation in ("", " back", " indexed")
] + ["dk_dv_kernel back"]
SHARED = 232_448  # bytes of shared memory that a program can have
SPILLED = 320  # bytes, mostly addresses in the 24 registers of the load and gate warps, and the ends of segments

# Bytes that threads spill: mostly addresses of producers, and of states at the ends of work tiles.
DELTA_SPILLED = {
    "delta_h_kernel": 64, "solve_kernel": 24, "dq_dk_kernel": 64, "delta_dv_dk_kernel": 96, "delta_dq_dk_kernel": 128,
}  # fmt: skip
WITH_NORMS_SPILLED = DELTA_SPILLED | {  # where the kernels divide q and k by their norms
    "delta_h_kernel": 128, "dq_dk_kernel": 120, "delta_dv_dk_kernel": 112, "delta_dq_dk_kernel": 176,
}  # fmt: skip


def triton_version() -> tuple[int, ...]:
    if importlib.util.find_spec("triton") is None:
        return ()
    return tuple(map(int, importlib.metadata.version("triton").split(".")[:2]))


# The same with gates by channel, case by case: addresses and numbers of a tile, once a tile. Some gates are float32.
# Triton 3.9 compiles with the ptxas of CUDA 13.4 for sm_90, which spills up to 324 bytes and does not pass.
KDA_GRADIENTS = 32
NARROW_SCANS = {"channel_h_kernel": 16, "channel_dv_kernel": 0}
WIDE_SCANS = {"channel_h_kernel": 32, "channel_dv_kernel": 32}
CHANNEL_SPILLED = {
    "kda,128,128,bfloat16,float32": {
        "channel_gradients_kernel": KDA_GRADIENTS, "channel_operands_kernel": 128, "solve_kernel": 0, **NARROW_SCANS,
    },
    "kda,128,128,bfloat16,normalized,activated": {
        "channel_gradients_kernel": KDA_GRADIENTS, "channel_operands_kernel": 160, "solve_kernel": 0, **NARROW_SCANS,
    },
    "kda,128,128,bfloat16,sigmoid": {"channel_gradients_kernel": KDA_GRADIENTS},
    "kda,64,128,bfloat16,packed,state": {"channel_gradients_kernel": KDA_GRADIENTS, **NARROW_SCANS},
    "kda,96,128,bfloat16,packed,state,float32,single": {
        "channel_gradients_kernel": KDA_GRADIENTS, "channel_operands_kernel": 128, "solve_kernel": 0, **NARROW_SCANS,
    },
    "gla,256,512,bfloat16,float32": {
        "channel_gradients_kernel": 32, "channel_operands_kernel": 128, **WIDE_SCANS,
    },
    "gla,256,512,bfloat16": {"channel_gradients_kernel": 32},
    "gla,256,512,bfloat16,packed,state,weighted": {"channel_gradients_kernel": 32, **WIDE_SCANS},
}  # fmt: skip


def too_old() -> bool:
    return triton_version() < (3, 6)


@pytest.mark.compiles
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_compiles_and_fits(kernel_cache: Path) -> None:
    if too_old():
        pytest.skip("Gluon has no warpgroup MMAs before Triton 3.6")
    answers = compile_kernels([f"sm_90:hopper,fused,{case}" for case in CASES], kernel_cache)
    assert len(answers) == len(CASES)
    for answer in answers:
        assert answer["failure"] is None
        rows = [row for row in answer["kernels"] if row["kernel"] in KERNELS]
        if only := answer["case"].partition(",only=")[2]:
            assert {row["kernel"].split()[0] for row in rows} == {only}, answer
        else:
            dk_with_dv = any(row["kernel"].startswith(("small_head_kernel", "dk_dv_kernel")) for row in rows)
            assert len(rows) >= (3 if dk_with_dv else 4)
        assert not any(row["unequal"] for row in answer["kernels"]), answer  # sums must not differ between threads
        for row in rows:
            assert row["shared"] <= SHARED, row
            assert row["spilled"] <= SPILLED, row
            assert row["serialized"] == 0, row


@pytest.mark.compiles
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_delta_rule_compiles_and_fits(kernel_cache: Path) -> None:
    if too_old():
        pytest.skip("Gluon has no warpgroup MMAs before Triton 3.6")
    answers = compile_kernels([f"sm_90:hopper,delta,{case}" for case in DELTA_CASES], kernel_cache)
    assert len(answers) == len(DELTA_CASES)
    for answer in answers:
        assert answer["failure"] is None
        rows = [row for row in answer["kernels"] if row["kernel"] in DELTA_SPILLED]
        # Where dhv is above 128 there is a scan for each 128 columns against time, and with time one for each reader.
        wide = answer["case"].split(",")[4] == "256"
        with_time = (
            {"delta_dv_dk_kernel": 2, "dq_dk_kernel": 2} if wide else {"delta_dv_dk_kernel": 1, "delta_dq_dk_kernel": 1}
        )
        gradients = {} if "forward" in answer["case"] else with_time
        spilled = WITH_NORMS_SPILLED if "normalized" in answer["case"] else DELTA_SPILLED
        if triton_version() < (3, 7) and wide:  # it spills more addresses at the ends of packed sequences with states
            spilled = spilled | {"delta_dv_dk_kernel": 120}
        expected = {"solve_kernel": 1, "delta_h_kernel": 1, **gradients}
        if only := answer["case"].partition(",only=")[2]:
            expected = {only: expected[only]}
        assert Counter(row["kernel"] for row in rows) == expected
        for row in rows:
            assert row["shared"] <= SHARED, row
            assert row["spilled"] <= spilled[row["kernel"]], row
            assert row["serialized"] == row["unequal"] == row["unset"] == 0, row


@pytest.mark.compiles
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_gates_by_channel_compile_and_fit(kernel_cache: Path) -> None:
    if too_old():
        pytest.skip("Gluon has no warpgroup MMAs before Triton 3.6")
    jobs = [f"sm_90:hopper,delta,{case},only={'+'.join(CHANNEL_SPILLED[case])}" for case in CHANNEL_SPILLED]
    answers = compile_kernels(jobs, kernel_cache)
    assert len(answers) == len(CHANNEL_SPILLED)
    for answer in answers:
        assert answer["failure"] is None
        spilled = CHANNEL_SPILLED[answer["case"].removeprefix("hopper,delta,").partition(",only=")[0]]
        rows = [row for row in answer["kernels"] if row["kernel"] in spilled]
        assert {row["kernel"] for row in rows} == spilled.keys(), answer
        for row in rows:
            assert row["shared"] <= SHARED, row
            assert row["spilled"] <= spilled[row["kernel"]], row
            assert row["serialized"] == row["unequal"] == row["unset"] == 0, row


def test_says_once_that_triton_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tfla.backends.hopper.fused", None)  # importing it fails
    monkeypatch.delattr(hopper, "fused", raising=False)
    hopper._error_of_kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match="using the Triton backend"):
            assert "Triton 3.6 or newer" in (hopper._cannot_build() or "")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert hopper._cannot_build() is not None
    finally:
        hopper._error_of_kernels.cache_clear()
