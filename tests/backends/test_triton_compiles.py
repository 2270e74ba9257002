"""Every shipped configuration of the Triton kernels compiles for the supported GPUs and fits them. Needs no GPU.

Each configuration is compiled for Hopper and for one of the others in turn, and each kernel in one of its
configurations for each of them. The records of registers, spills and shared memory are in `compiled/`, one file for
each tested version of Triton; more than on record is a regression. The first of these commands compiles every
configuration for every GPU and writes the record, after a change that is meant; the second compiles every combination
of options, which takes hours:

    TFLA_COMPILE=record python -m pytest tests/backends/test_triton_compiles.py
    TFLA_COMPILE=all python -m pytest tests/backends/test_triton_compiles.py
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Container
from itertools import product
from pathlib import Path

import pytest
from compiling import compile_kernels

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

TARGETS = {  # bytes of shared memory that a program can have
    "sm_80": 166_912,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
}
A_FEW_BYTES = 36  # that a thread may spill
ALLOCATED = 8  # registers are handed out in so many at once
# Gate or model, dqk, dhv, dtype, what else, as compile_for.py reads them. All dims, dtypes and variants at least once.
CASES = {
    "fused": [
        "exp,64,64,bfloat16",
        "sigmoid,64,128,float16,packed",
        "sigmoid,128,128,bfloat16,segmented,state",
        "exp,128,256,bfloat16",
        "exp,128,256,float32",
        "exp,256,256,float16,packed,segmented",
        "exp,256,512,bfloat16",
        "exp,256,512,float32",
        "exp,512,512,bfloat16",
        "exp,512,512,float32",
        "exp,100,72,bfloat16",
        "plain,64,128,bfloat16,packed,segmented,state",
        "sigmoid,64,64,float32,packed",
    ],
    "tfla": [
        "exp,64,128,float32",
        "exp,128,256,bfloat16",
        "sigmoid,1024,1024,float16,packed,state",
        "plain,64,64,float32",
    ],
    "steps": [
        "exp,64,64,float32",
        "exp,256,512,bfloat16",
        "sigmoid,256,512,bfloat16,low",
        "exp,512,1024,float16,several",
        "sigmoid,100,72,bfloat16,several,low",
    ],
    "model": [
        "exp,256,512,bfloat16",
        "exp,256,512,bfloat16,several",
        "exp,256,512,float16,many",
        "sigmoid,128,256,float32,several",
        "sigmoid,128,256,float32,many",
    ],
    "delta": [
        "gdn,128,128,bfloat16,packed,state",
        "deltanet,128,256,bfloat16",
        "kda,128,128,bfloat16,state",
        "gla,256,512,bfloat16",
        "comba,13,35,bfloat16,state",
        "gdn,256,256,bfloat16,packed,state,strided",
    ],
    "delta_steps": [
        "gdn,128,128,bfloat16",
        "kda,100,72,float16,several",
        "comba,256,256,bfloat16,several,low",
        "gla,256,512,float32",
    ],
    "convolution": [
        "4,2048,bfloat16",
        "4,2048,bfloat16,bias,packed",
        "2,100,float16,state",
        "5,1024,float32,bias,packed,state",
    ],
    "activations": ["softplus,128,bfloat16", "sigmoid,100,bfloat16,channels"],
    "rotation": ["128,bfloat16"],
    "losses": ["50257,bfloat16", "50264,float32"],
    "norm": ["silu,256,bfloat16", "sigmoid,128,float32,centered", "silu,4096,bfloat16,first,skip"],
}
# Compiled for Hopper alone, to save time.
HOPPER = (
    "exp,512,512,bfloat16",
    "sigmoid,64,64,float32,packed",
    "deltanet,128,256,bfloat16",
    "comba,13,35,bfloat16,state",
    "gdn,256,256,bfloat16,packed,state,strided",
)
AMD = ("exp,128,256,bfloat16", "exp,128,256,float32")
# A form is compiled for Hopper and for one of these in turn; those of EVERYWHERE, or for a record, for all.
IN_TURN = ("sm_80", "sm_120", "sm_89", "sm_100")
EVERYWHERE = (
    "sigmoid,256,512,bfloat16,low",
    "sigmoid,100,72,bfloat16,several,low",
    "gdn,128,128,bfloat16,packed,state",
    "kda,128,128,bfloat16,state",
)
# Kernels that too few other forms have: of these forms they alone are compiled for the GPUs that are not in turn.
SCARCE = {
    "exp,256,256,float16,packed,segmented": ("normalizer_scan",),
    "exp,512,512,float32": ("sum_denominators",),
    "plain,64,128,bfloat16,packed,segmented,state": ("o_dv_scan", "pass_states"),
}
MODE = os.environ.get("TFLA_COMPILE", "")
if MODE == "all":
    DIMS = ("64,64", "64,128", "128,128", "128,256", "256,256", "256,512", "512,512", "512,1024", "100,72")
    DTYPES = ("bfloat16", "float16", "float32")
    GATES = {"fused": ("exp", "sigmoid", "plain"), "tfla": ("exp", "sigmoid", "plain"), "steps": ("exp", "sigmoid")}
    VARIANTS = dict.fromkeys(("fused", "tfla"), ("", ",packed", ",segmented", ",packed,segmented,state"))
    GATES |= dict.fromkeys(("delta", "delta_steps"), ("gdn", "deltanet", "kda", "gla", "comba"))
    VARIANTS |= dict.fromkeys(("steps", "delta_steps"), ("", ",low", ",several", ",several,low"))
    VARIANTS["delta"] = ("", ",packed,state")
    CASES = {
        kernel: [f"{gate},{dims},{x}{y}" for gate, dims, x, y in product(GATES[kernel], DIMS, DTYPES, VARIANTS[kernel])]
        if kernel in GATES
        else forms
        for kernel, forms in CASES.items()
    }


def targets_of(form: str, place: int) -> list[str]:
    """Return the GPUs for which the form at this place of its kernels' list is compiled."""
    others = IN_TURN if MODE or form in EVERYWHERE else (IN_TURN[place % len(IN_TURN)],)
    return [
        target
        for target in TARGETS
        if target == "sm_90" or (target in others and form not in HOPPER) or (target == "gfx942" and form in AMD)
    ]


COMPILED = {
    f"triton,{kernel},{form}": targets_of(form, place)
    for kernel, forms in CASES.items()
    for place, form in enumerate(forms)
}
PARTLY = {  # the GPUs for which only the kernels of SCARCE are compiled
    f"triton,{kernel},{form}": [x for x in IN_TURN if x not in COMPILED[f"triton,{kernel},{form}"]]
    for kernel, forms in CASES.items()
    for form in forms
    if form in SCARCE
}

Resources = tuple[int, int, int]  # registers of a thread, bytes that it spills, bytes of shared memory of a program
Found = dict[str, dict[str, dict[str, Resources]]]  # by case, target and kernel
THIS = Path(__file__)
RECORDS = THIS.with_name("compiled")


def installed() -> str:
    return importlib.metadata.version("triton").split("+")[0]


def recorded() -> Found:
    """Return the record of the installed Triton, or of the last version before it that has one."""

    def order(version: str) -> list[int]:
        return [int(n) for n in version.split(".")]

    versions = [path.stem for path in RECORDS.glob("*.json") if order(path.stem) <= order(installed())]
    return json.loads((RECORDS / f"{max(versions, key=order)}.json").read_text()) if versions else {}


def record(found: Found) -> None:
    """A line for each case and target; cases that were not selected keep theirs."""
    path = RECORDS / f"{installed()}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    cases = []
    for case, targets in {case: found.get(case, before.get(case, {})) for case in COMPILED}.items():
        lines = [f"    {json.dumps(target)}: {json.dumps(kernels)}" for target, kernels in targets.items()]
        cases.append(f"  {json.dumps(case)}: {{\n" + ",\n".join(lines) + "\n  }")
    RECORDS.mkdir(exist_ok=True)
    path.write_text("{\n" + ",\n".join(cases) + "\n}\n")


def partial_jobs(cases: Container[str]) -> list[str]:
    """Return the jobs that compile the kernels of SCARCE alone."""
    only = {case: "+".join(SCARCE[case.split(",", 2)[2]]) for case in PARTLY if case in cases}
    return [f"{target}:{case},only={kernels}" for case, kernels in only.items() for target in PARTLY[case]]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, kernel_cache: Path) -> tuple[Found, dict[str, list[str]]]:
    """The most that any form of a kernel takes, and by case what did not compile, of the cases that are selected."""
    items = [item for item in request.session.items if item.path == THIS and "compiled" in item.fixturenames]
    selected = {item.callspec.params["case"] for item in items}
    cases = {case: targets for case, targets in COMPILED.items() if case in selected}
    jobs = [f"{target}:{case}" for case, targets in cases.items() for target in targets]
    answers = compile_kernels([*jobs, *partial_jobs(selected)], kernel_cache)
    found: Found = {case: {target: {} for target in (*cases[case], *PARTLY.get(case, ()))} for case in cases}
    failures: dict[str, list[str]] = defaultdict(list)
    for answer in answers:
        answer["case"] = answer["case"].partition(",only=")[0]
        kernels = found[answer["case"]][answer["target"]]
        for row in answer["kernels"]:
            now = row["registers"], row["spilled"], row["shared"]
            before = kernels.get(row["kernel"], now)
            if row.get("unequal"):
                failures[answer["case"]].append(f"{answer['target']} {row['kernel']}: threads get different sums")
            if row.get("unset"):
                failures[answer["case"]].append(f"{answer['target']} {row['kernel']}: descriptors are not set")
            kernels[row["kernel"]] = max(now[0], before[0]), max(now[1], before[1]), max(now[2], before[2])
        if answer["failure"] and "ROCm linker" not in answer["failure"]:  # Triton before 3.5 brings none
            failures[answer["case"]].append(f"{answer['target']}: {answer['failure']}")
    if MODE == "record":
        record(found)
    return found, failures


def regression(target: str, now: Resources, before: Resources | None) -> bool:
    """Against what was recorded, or else what every kernel keeps to. AMD GPUs are compiled for, not supported."""
    unknown = sys.maxsize, 0 if target.startswith("sm_") else sys.maxsize, TARGETS[target]
    registers, spilled, shared = before or unknown
    limits = registers + ALLOCATED, max(spilled, A_FEW_BYTES), min(shared, TARGETS[target])
    return any(x > limit for x, limit in zip(now, limits, strict=True))


def test_each_kernel_is_compiled_for_each_gpu() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for case, by_target in recorded().items():
        for kernel in {kernel for kernels in by_target.values() for kernel in kernels}:
            scarce = SCARCE.get(case.split(",", 2)[2], ())
            found[kernel].update(COMPILED[case], PARTLY[case] if kernel.split()[0] in scarce else ())
    assert found
    for kernel, targets in found.items():
        assert targets >= {target for target in TARGETS if target.startswith("sm_")}, kernel


@pytest.mark.parametrize("case", COMPILED)
def test_compiles_and_fits(
    case: str, compiled: tuple[Found, dict[str, list[str]]], record_property: Callable[[str, object], None]
) -> None:
    found, failures = compiled
    assert not failures[case], "\n".join(failures[case])
    before = recorded().get(case, {})
    wrong = []
    table = [f"{case:60}" + "".join(f"{target:>16}" for target in TARGETS)]
    for kernel in dict.fromkeys(kernel for kernels in found[case].values() for kernel in kernels):
        line = f"    {kernel:56}"
        for target in TARGETS:
            now = found[case].get(target, {}).get(kernel)
            line += f"{'/'.join(map(str, now)) if now else '-':>16}"
            if now and regression(target, now, limit := before.get(target, {}).get(kernel)):
                wrong.append(f"{target} {kernel}: {now}, recorded is {limit}")
        table.append(line)
    record_property("table", "\n".join(table))
    assert not wrong, "\n".join(["registers, bytes spilled, shared memory", *wrong])


@pytest.mark.compiles
def test_scans_on_rows_of_a_pool_compile(kernel_cache: Path) -> None:
    form = "triton,fused,exp,128,256,bfloat16,packed"
    jobs = [f"{gpu}:{form},rows,only=o_dv_scan" for gpu in IN_TURN]
    jobs += [f"{gpu}:{form},segmented,rows,only=pass_states" for gpu in IN_TURN]
    jobs += [f"{gpu}:{form},segmented,rows,low,only=pass_states" for gpu in IN_TURN]  # in bfloat16
    answers = compile_kernels(jobs, kernel_cache)
    assert len(answers) == len(jobs)
    for answer in answers:
        assert answer["failure"] is None
        kernels = [row["kernel"] for row in answer["kernels"]]
        assert f"{answer['case'].partition(',only=')[2]} indexed" in kernels, answer
