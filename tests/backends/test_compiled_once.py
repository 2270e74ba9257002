"""After the first call with a long batch, calls with other lengths compile no kernel. Needs no GPU.

On one, `test_compiled_once_for_all_lengths` sees less: what tests before it have compiled is there already.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from compiling import compile_kernels

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
def test_other_lengths_compile_nothing(backend: str, kernel_cache: Path) -> None:
    pytest.importorskip("triton")
    pytest.importorskip(f"tfla.backends.{backend}.fused", exc_type=ImportError)
    forms = [f"{backend},{form}" for form in FORMS[backend]]
    answers = compile_kernels([f"sm_90:{form},lengths" for form in forms], kernel_cache)
    assert {a["case"].removesuffix(",lengths"): (a["failure"], a["kernels"]) for a in answers} == dict.fromkeys(
        forms, (None, [])
    )
