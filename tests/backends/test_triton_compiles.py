"""Every shipped configuration of the Triton kernels compiles for every supported GPU and fits it. Needs no GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
SPILLED: dict[tuple[int, str], int] = {  # more than a few bytes a thread in some kernel: known, and not to grow
    (80, "100,72,bfloat16"): 208,
    (80, "128,256,bfloat16"): 200,
    (80, "128,256,float32"): 712,
    (80, "256,256,bfloat16"): 176,
    (80, "256,512,bfloat16"): 52,
    (80, "512,512,bfloat16"): 248,
    (89, "100,72,bfloat16"): 56,
    (89, "128,256,bfloat16"): 124,
    (89, "128,256,float32"): 656,
    (89, "256,256,bfloat16"): 128,
    (89, "512,512,bfloat16"): 248,
    (90, "128,256,bfloat16"): 788,
    (90, "128,256,float32"): 692,
    (90, "256,256,bfloat16"): 168,
    (90, "256,512,bfloat16"): 212,
    (90, "512,512,bfloat16"): 264,
    (100, "128,256,float32"): 864,
    (100, "256,512,bfloat16"): 52,
    (100, "512,512,bfloat16"): 244,
    (120, "128,256,bfloat16"): 120,
    (120, "128,256,float32"): 940,
    (120, "256,256,bfloat16"): 72,
    (120, "256,512,bfloat16"): 92,
    (120, "512,512,bfloat16"): 232,
}


def allowed(capability: int, case: str) -> int:
    dims = ",".join(case.split(",")[1:4])
    return SPILLED.get((capability, dims), A_FEW_BYTES)


def compile_all(capability: int) -> tuple[list[dict[str, Any]], str]:
    script = Path(__file__).with_name("compile_for.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(script), str(capability), *CASES]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    return [json.loads(line) for line in result.stdout.splitlines()], result.stderr if result.returncode else ""


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[int, Future[tuple[list[dict[str, Any]], str]]]]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {capability: pool.submit(compile_all, capability) for capability in SHARED_MEMORY}


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_compiles_and_fits(capability: int, compiled: dict[int, Future[tuple[list[dict[str, Any]], str]]]) -> None:
    rows, failure = compiled[capability].result()
    assert not failure, failure[-4000:]
    wrong = []
    print(f"\n{'sm':>4} {'case':28} {'kernel':24} registers spilled  shared")
    for row in rows:
        case, shared, spilled = row["case"], row["shared"], row["spilled"]
        print(f"{capability:4} {case:28} {row['kernel']:24} {row['registers']:9} {spilled:7} {shared:7}")
        if shared > SHARED_MEMORY[capability] or spilled > allowed(capability, case):
            wrong.append(row)
    assert {row["case"] for row in rows} == set(CASES)
    assert not wrong, wrong
