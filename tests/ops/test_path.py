"""The path of q from the public functions to the kernels: at most eight files, none of which it returns to.

The path is the chain of open frames when Triton is asked to launch a kernel: each function of the library that has been
entered with q, or with the context that holds q, and not left. A call that gives its value back before, such as a check
or the choice of a plan, is no part of it. Frames in a row in one file are one stop. docs/architecture.md has the paths.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("tfla.backends.hopper.fused", exc_type=ImportError)

ROOT = Path(__file__).parents[2]
MOST = 8
LAUNCH = "backends/gpu/replay.py"  # hands a kernel and its operands to Triton
# The kernel of each family of kernels that computes h.
KERNELS_OF_H = {
    "triton,fused,exp,64,128,bfloat16,segmented": "o_dv_scan",
    "triton,tfla,exp,64,128,bfloat16,segmented": "chunk_outputs",
    "hopper,fused,exp,128,256,bfloat16,segmented": "o_dv_kernel",
    "hopper,fused,exp,64,64,bfloat16,segmented": "small_head_kernel",
}
CASES = [
    *KERNELS_OF_H,
    "triton,fused,sigmoid,100,72,bfloat16,packed",
    "triton,fused,exp,24,40,float32,packed segmented",
    "triton,fused,exp,512,40,float32,whole grouped",
    "triton,steps,exp,64,128,bfloat16,one",
    "triton,steps,sigmoid,24,40,float32,several",
    "hopper,fused,sigmoid,128,128,bfloat16,whole",
    "hopper,fused,exp,1024,128,bfloat16,whole",
    "hopper,fused,exp,128,256,bfloat16,packed",
]


class Launch(NamedTuple):
    """A kernel, its file, and the files of the open frames."""

    kernel: str
    file: str
    path: list[str]


@functools.cache
def launches() -> dict[str, list[Launch]]:
    """The launches of all cases, forward and backward, without a GPU."""
    script = ROOT / "tests" / "backends" / "dump_paths.py"
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    answer = subprocess.run([sys.executable, script, *CASES], env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    found: dict[str, list[Launch]] = {case: [] for case in CASES}
    for case, *launch in map(json.loads, answer.stdout.splitlines()):
        found[case].append(Launch(*launch))
    return found


@pytest.mark.parametrize("case", CASES)
def test_eight_files_and_no_return(case: str) -> None:
    """Every launch of a forward and of a backward, the file of the kernel counted too."""
    found = launches()[case]
    starts = {launch.path[0] for launch in found}
    assert starts == ({"ops/steps.py"} if ",steps," in case else {"ops/api.py", "ops/registration.py"})
    for kernel, file, path in found:
        assert len(set(path)) == len(path), f"{kernel}: returns in {path}"
        assert len({*path, file}) <= MOST, f"{kernel} in {file}: {path}"
        assert path[-1] == LAUNCH
        # A kernel stands in the file of its launcher, or in one that is visited for it alone.
        assert file == path[-2] or file not in path, f"{kernel} in {file}: {path}"


def documented() -> dict[str, list[str]]:
    """The paths of the table in docs/architecture.md, by the kernel that they lead to."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page[page.index("| kernel | path |") :]
    rows = [line.split("|")[1:3] for line in table[: table.index("\n\n")].splitlines()[2:]]
    return {kernel.strip(" `"): re.findall(r"`([^`]+)`", path) for kernel, path in rows}


def test_the_page_has_these_paths() -> None:
    """The page has the paths of forwards, to the kernels that compute h."""
    found = {}
    for case, kernel in KERNELS_OF_H.items():
        *_, launch = (x for x in launches()[case] if x.kernel == kernel and x.path[0] == "ops/api.py")
        further = [] if launch.file in launch.path else [launch.file]
        found[kernel] = [*launch.path[:-1], *further]
    assert documented() == found


def test_the_page_names_the_longest_path() -> None:
    longest = max((len({*path, file}) for found in launches().values() for _, file, path in found), default=0)
    assert longest == MOST, "the page says that the longest path has eight files"
