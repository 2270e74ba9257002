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


def test_launches_of_renamed_kernels_are_compared(tmp_path: Path) -> None:
    launch = "rows[(1, 2)] %1 %9 150 | BK=64 BACK=True num_warps=4 -> registers=80 spills=0 shared=8 ptx=1a"
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_text(f"##\ncase\n%9 = new (1, 2) (2, 1) float32\n{launch}\n")

    def difference(changed: str, other: str) -> str:
        text = before.read_text("utf-8").replace("rows[", "dq_dk[").replace("BACK=", "REVERSE=").replace(changed, other)
        after.write_text(text)
        command = [sys.executable, DUMP.with_name("compare_launches.py"), before, after]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "rows is dq_dk: 1 launches" in difference("", "")
    assert "different" not in difference("", "")
    for changed, other, what in (
        ("%1 %9", "%9 %1", "operands"), ("(1, 2)] ", "(2, 2)] ", "grid"), ("shared=8", "shared=9", "shared"),
        ("ptx=1a", "ptx=1b", "ptx"), ("(1, 2) (2, 1)", "(2, 2) (2, 1)", "results made"),
        ("REVERSE=True", "REVERSE=False", "constants"),
    ):  # fmt: skip
        assert f"different {what} of" in difference(changed, other), what
    assert "(none) is dq_dk: 1 launches" in difference("dq_dk[", "dq_dk[(1,)] %9 | num_warps=1\ndq_dk[")
