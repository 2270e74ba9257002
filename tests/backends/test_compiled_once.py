"""Behind a first, long batch of a form no other length compiles anything. Needs no GPU.

On one, `test_compiled_once_for_all_lengths` sees less: what tests before it have compiled is there already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FORMS = {
    "triton": [
        "fused,exp,128,256,bfloat16",
        "fused,exp,128,256,bfloat16,packed",
        "fused,exp,128,256,bfloat16,state",
        "tfla,exp,128,256,bfloat16",
    ],
    "hopper": [
        "fused,exp,256,256,bfloat16",
        "fused,exp,256,256,bfloat16,packed,state",
        "fused,sigmoid,128,128,bfloat16",
        "fused,exp,64,64,bfloat16,state",
    ],
}


@pytest.mark.compiles
@pytest.mark.parametrize("backend", FORMS)
def test_other_lengths_compile_nothing(backend: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    pytest.importorskip(f"tfla.backends.{backend}.launch", exc_type=ImportError)
    forms = [f"{backend},{form}" for form in FORMS[backend]]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(Path(__file__).with_name("compile_for.py"))]
    command += [f"sm_90:{form},lengths" for form in forms]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert {a["case"].removesuffix(",lengths"): (a["failure"], a["kernels"]) for a in answers} == dict.fromkeys(
        forms, (None, [])
    )
