"""The kernels that a forward and a backward of each family launch, in order. Needs no GPU: nothing runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("tfla.backends.hopper.fused", exc_type=ImportError)

DUMP = Path(__file__).with_name("dump_launches.py")
GATES = ["chunk_aggregates", "chunk_gates"]
LAUNCHES = {
    "triton,fused,exp,64,128,bfloat16,segmented": [
        *GATES, "o_dv_scan", "pass_states", "normalizer_scan", "pass_states", "normalizer_scan", "o_dv_scan",
        *GATES, "compute_delta", "o_dv_scan", "pass_states", "dq_dk_scan", "normalizer_scan", "pass_states",
        "dq_dk_scan", "o_dv_scan", "gate_gradients",
    ],
    "triton,tfla,exp,64,128,bfloat16,segmented": [
        *GATES, "chunk_states", "chunk_outputs",
        *GATES, "compute_delta", "chunk_states", "chunk_outputs", "chunk_outputs", "chunk_outputs",
        "chunk_gate_gradients",
    ],
    "hopper,fused,exp,128,256,bfloat16,segmented": [
        *GATES, "segment_states_kernel", "pass_states", "pass_states", "o_dv_kernel",
        *GATES, "segment_states_kernel", "pass_states", "o_dv_kernel", "dq_dk_kernel", "pass_states", "dq_dk_kernel",
        "gate_gradients",
    ],
    "hopper,fused,exp,128,256,bfloat16,packed": [
        "bound_sequences", "schedule_packed", *GATES, "o_dv_kernel",
        "bound_sequences", "schedule_packed", *GATES, "o_dv_kernel", "dq_dk_kernel", "dq_dk_kernel", "gate_gradients",
    ],
    "hopper,fused,sigmoid,128,128,bfloat16,whole": ["o_dv_kernel", "dq_dk_kernel", "dk_dv_kernel", "gate_gradients"],
    "hopper,fused,exp,64,64,bfloat16,segmented": [
        *GATES, "small_head_kernel", "pass_states", "pass_states", "small_head_kernel",
        *GATES, "small_head_kernel", "pass_states", "small_head_kernel", "normalizer_scan", "pass_states",
        "small_head_kernel", "gate_gradients",
    ],
}  # fmt: skip


def dumped(*arguments: str) -> dict[str, list[str]]:
    """The lines of each call."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    answer = subprocess.run(
        [sys.executable, DUMP, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    lines, call = defaultdict(list), ""
    for line in answer.stdout.splitlines():
        if call == "##" or line == "##":
            call = line
        else:
            lines[call].append(line)
    return lines


@pytest.fixture(scope="module")
def calls() -> dict[str, list[str]]:
    return dumped(*LAUNCHES)


@pytest.mark.parametrize("case", LAUNCHES)
def test_kernels_and_their_order(case: str, calls: dict[str, list[str]]) -> None:
    kernels = [line.partition("[")[0] for line in calls[case] if re.match(r"\w+\[", line)]
    assert kernels == LAUNCHES[case]


def test_operands_have_been_made_before() -> None:
    """Every call of a sample: an operand is an input, 0 to 15, or the result of a step before."""
    calls = dumped("--sampled", "40")
    assert len(calls) >= 40
    for lines in calls.values():
        made: set[str] = set()
        for line in lines:
            result, _, step = line.partition(" = ") if line.startswith("%") else ("", "", line)
            used = set(re.findall(r"%\d+", step))
            assert all(x in made or int(x[1:]) <= 15 for x in used), line
            made.add(result)
