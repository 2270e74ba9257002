"""The measurement of errors on this machine, written as JSON: `python -m tfla.paper.numerics.run --help`."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tfla._util.device import check_device
from tfla._util.errors import UserError
from tfla._util.files import write_json
from tfla._util.options import check_count
from tfla._util.outputs import check_file
from tfla.measure.machine import environment
from tfla.paper.numerics.measure import Grid, Row, implementations, measure
from tfla.paper.numerics.problem import REGIMES

ON_CPU = Grid(T=2048, chunk_sizes=(64, 128, 256, 512, 1024, 2048), lengths=(512, 2048, 8192), heads=1)


def _measure_all(implementation: str, dtype: str, grid: Grid, device: str) -> list[Row]:
    """Measure one implementation in a process of the pool, on one thread."""
    torch.set_num_threads(1)
    return list(measure(implementation, dtype, grid, device))


def run(device: str, grid: Grid, processes: int) -> dict[str, Any]:
    """Measure all implementations that run on the device, in several processes: most of the time is compilation."""
    begin = time.perf_counter()
    todo = implementations(device)
    rows: dict[tuple[str, str], list[Row]] = {}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        jobs = {
            pool.submit(_measure_all, implementation, dtype, grid, device): (implementation, dtype)
            for implementation, dtype in todo
        }
        for job in as_completed(jobs):
            rows[jobs[job]] = job.result()
            failed = sum("failed" in row for row in rows[jobs[job]])
            note = f", {failed} of {len(rows[jobs[job]])} failed" if failed else ""
            print(f"{time.perf_counter() - begin:6.1f} s  {' '.join(jobs[job])}{note}", file=sys.stderr, flush=True)
    return {
        "kind": "numerics", "environment": environment(device), "grid": asdict(grid), "regimes": REGIMES,
        "rows": [row for key in todo for row in rows[key]],
    }  # fmt: skip


def main(args: Sequence[str] | None = None) -> int:
    """Measure and write the result; return the exit code, 2 where the device cannot be used."""
    parser = argparse.ArgumentParser("python -m tfla.paper.numerics.run", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to measure")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--processes", type=int, help="how many implementations at a time (default: 12 on a GPU, 1 on a CPU)"
    )
    given = parser.parse_args(args)
    try:
        check_file("out", given.out)
        if given.processes is not None:
            check_count("processes", given.processes, 1, 1024)
        check_device(given.device)
    except (UserError, ValueError) as error:
        parser.error(str(error))
    on_gpu = given.device.startswith("cuda")
    try:
        result = run(given.device, Grid() if on_gpu else ON_CPU, given.processes or (12 if on_gpu else 1))
    except (RuntimeError, AssertionError) as error:
        print(f"{parser.prog}: error: {given.device}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    write_json(given.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
