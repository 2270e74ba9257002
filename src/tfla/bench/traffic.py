"""The bytes that each kernel of a call moves to and from the GPU's memory, counted by Nsight Compute.

`python -m tfla.bench.traffic --out benchmarks/results/traffic.json` needs `ncu` and the right to read counters.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from tfla._util.errors import UserError
from tfla._util.files import write_json
from tfla._util.outputs import check_file
from tfla.measure.machine import environment
from tfla.measure.operator import mlstm
from tfla.measure.problem import Problem
from tfla.ops.gates import INPUT_GATES

PROBLEM = Problem(8, 8192, 16, 128, 256)  # Figure 4's, T 8,192
IMPLEMENTATIONS = (("hopper", "fused"), ("triton", "fused"), ("triton", "tfla"))
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
MARK = "spin_kernel"  # a kernel of torch that is launched as a separator
DIRECTIONS: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
NCU = ("--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none", "--print-units", "base",
       "--csv", "--page", "raw", "--metrics", f"{READ},{WRITTEN}")  # fmt: skip
Row = dict[str, Any]


def mark() -> None:
    """Launch the separator."""
    torch.cuda._sleep(1)


def child(target: Path) -> None:
    """Compile every backend and kernel, write a row for each call, and run the calls under the profiler."""
    rows: list[Row] = []
    calls = []
    for backend, kernel in IMPLEMENTATIONS:
        for gate in INPUT_GATES:
            try:
                work = mlstm(PROBLEM, gate, backend, kernel)  # type: ignore[arg-type]
            except ValueError:  # a backend for other GPUs
                continue
            for x in work.inputs:
                x.requires_grad_()
            dh = torch.randn_like(work.inputs[2])
            torch.autograd.grad(work.run(*work.inputs), work.inputs, dh)
            calls.append((work, dh))
            shape = {name: getattr(PROBLEM, name) for name in ("B", "T", "H", "dqk", "dhv")}
            rows += [{"gate": gate, "direction": d, **work.facts, **shape} for d in DIRECTIONS]
    target.write_text(json.dumps(rows))
    profile(calls)


def profile(calls: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """Run forward and backward of each call under the profiler, each after a separator."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for work, dh in calls:
        mark()
        h = work.run(*work.inputs)
        mark()
        torch.autograd.grad(h, work.inputs, dh)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def kernels(report: str) -> list[list[Row]]:
    """Return the kernels after each separator in ncu's CSV: name, bytes read and bytes written of each.

    Raises:
        ValueError: the report has no counters.
    """
    lines = report.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        said = next((line for line in lines if "ERR" in line or "rror" in line), "no kernels")
        raise ValueError(f"ncu counted nothing: {said}")
    found: list[list[Row]] = []
    for row in csv.DictReader(lines[start:]):
        if not row["ID"]:  # the line of units
            continue
        if MARK in row["Kernel Name"]:
            found.append([])
        elif found:
            read, written = (round(float(row[name].replace(",", ""))) for name in (READ, WRITTEN))
            found[-1].append({"name": row["Kernel Name"].partition("(")[0], "read": read, "written": written})
    return found


def with_kernels(rows: list[Row], report: str) -> list[Row]:
    """Return the rows of calls with their kernels.

    Raises:
        ValueError: the report has another number of calls.
    """
    parts = kernels(report)
    if len(parts) != len(rows):
        raise ValueError(f"report: got {len(parts)} calls, expected {len(rows)}")
    return [row | {"kernels": part} for row, part in zip(rows, parts, strict=True)]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code, 2 where nothing can be counted."""
    parser = argparse.ArgumentParser("python -m tfla.bench.traffic", description=__doc__)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(args)
    if given.child is not None:
        child(given.child)
        return 0
    if given.out is None:
        parser.error("--out is missing")
    try:
        check_file("out", given.out)
    except UserError as error:
        parser.error(str(error))
    if shutil.which("ncu") is None or not torch.cuda.is_available():
        print(f"{parser.prog}: error: it needs an NVIDIA GPU and ncu, of Nsight Compute", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        rows, report = Path(folder) / "rows.json", Path(folder) / "report.csv"
        me = [sys.executable, "-m", "tfla.bench.traffic", "--child", str(rows)]
        done = subprocess.run(["ncu", *NCU, "--log-file", str(report), *me], check=False)
        try:
            if done.returncode:
                raise ValueError(f"ncu ended with exit code {done.returncode}")
            found = with_kernels(json.loads(rows.read_text()), report.read_text())
        except (OSError, ValueError) as error:
            print(f"{parser.prog}: error: {error}", file=sys.stderr)
            return 2
    result = {"kind": "traffic", "environment": environment("cuda"), "rows": found}
    write_json(given.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
