"""Every shipped configuration of the Triton kernels compiles for every supported GPU and fits it. Needs no GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes that a program can have
CASES = [  # gate, dqk, dhv, dtype, chunk size
    *(f"exp,{dims},bfloat16" for dims in ("64,64", "64,128", "128,128", "256,256", "256,512", "512,512", "100,72")),
    "exp,128,256,bfloat16,128",
    "sigmoid,128,256,bfloat16",
    "exp,64,64,float32",
    "exp,128,256,float32",
]
if os.environ.get("TFLA_COMPILE_ALL") == "1":
    CASES = [
        f"{gate},{dims},{dtype},{chunk}"
        for gate in ("exp", "sigmoid")
        for dims in ("64,64", "64,128", "128,128", "128,256", "256,256", "256,512", "512,512", "512,1024", "100,72")
        for dtype in ("bfloat16", "float16", "float32")
        for chunk in (128, 256)
    ]

A_FEW_BYTES = 36
SPILLED: dict[tuple[int, str], int] = {  # more than a few bytes a thread: known, and not to grow
}


def allowed(capability: int, case: str) -> int:
    dims = ",".join(case.split(",")[1:4])
    return SPILLED.get((capability, dims), A_FEW_BYTES)


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_compiles_and_fits(capability: int) -> None:
    script = Path(__file__).with_name("compile_for.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(script), str(capability), *CASES]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    wrong = []
    print(f"\n{'sm':>4} {'case':28} {'kernel':24} registers spilled  shared")
    for row in rows:
        case, shared, spilled = row["case"], row["shared"], row["spilled"]
        print(f"{capability:4} {case:28} {row['kernel']:24} {row['registers']:9} {spilled:7} {shared:7}")
        if shared > SHARED_MEMORY[capability] or spilled > allowed(capability, case):
            wrong.append(row)
    assert {row["case"] for row in rows} == set(CASES)
    assert not wrong, wrong
