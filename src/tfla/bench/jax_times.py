"""Times of operators called from JAX and from PyTorch, on one GPU in one run: `python -m tfla.bench.jax_times`.

A first call is made in a process of its own, with an empty cache of Triton. The samples of this library from PyTorch
and from JAX are taken in turn, in one process for each shape, so that they see the same clock of the GPU. With several
workers, processes compile in parallel, and none uses the GPU while another one takes samples. A sample is a run of
calls back to back. The host enqueues them faster than the GPU computes them, so that their mean time is the GPU's.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tfla.bench.jax_calls import TOKENS, Operation, Ready, from_jax, from_torch, samples_in_turn

HEADS = 16
HEAD_DIMS = ((128, 256), (256, 512))
LENGTHS = (512, 8192, TOKENS)
OWN = ("PyTorch", "JAX")  # this library
NAMES = (*OWN, "mlstm_kernels.jax", "jax-linear-attention")
DELTA = {"gdn": (16, 128, 128), "kda": (32, 128, 128), "gla": (8, 256, 512)}  # heads, dqk and dhv
DELTA_STEPS = 8192
Row = dict[str, Any]


class Case(NamedTuple):
    """The measurements that one process makes of an operator."""

    operation: Operation
    names: tuple[str, ...]  # of the implementations
    first: bool  # whether it times first calls and measures their memory
    samples: bool  # whether it takes samples, of the implementations in turn


def _operations(options: argparse.Namespace) -> list[Operation]:
    """Return the operators and sizes that the options of the command select."""
    found = []
    if "mlstm" in options.models:
        for heads, form, T in itertools.product(options.head_dims, options.forms, options.lengths):
            dqk, dhv = (int(d) for d in heads.split("x"))
            found.append(Operation("mlstm", form, HEADS, dqk, dhv, T))
    return found + [Operation(model, "", *DELTA[model], DELTA_STEPS) for model in options.models if model in DELTA]


def _cases(options: argparse.Namespace) -> tuple[list[Case], list[Case]]:
    """Return the cases of this library and of others that the options select, first calls before samples."""
    operations, own = _operations(options), tuple(name for name in options.names if name in OWN)
    firsts = [Case(operation, (name,), True, False) for operation in operations for name in own]
    in_turn = [Case(operation, own, False, True) for operation in operations if own]
    others = [
        Case(operation, (name,), True, True)
        for operation in operations if operation.model == "mlstm"
        for name in options.names if name not in OWN
    ]  # fmt: skip
    return firsts + in_turn, others


@contextlib.contextmanager
def _holding(lock: Path | None, how: int) -> Iterator[None]:
    """Hold the lock: alone with fcntl.LOCK_EX, to take samples, or with others with fcntl.LOCK_SH, to use the GPU."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, how)  # closing the file releases it
        yield


def measure(case: Case, repeats: int, calls: int, lock: Path | None = None, backend: str | None = None) -> list[Row]:
    """Return the rows of a case: one for each implementation and direction, or for one that failed.

    Args:
        case: what is measured.
        repeats: the samples of an implementation.
        calls: the calls of a sample, at least.
        lock: the lock that processes share.
        backend: the backend of this library from JAX; None: the kernels for this GPU, or an error if they do not run.
    """
    with _holding(lock, fcntl.LOCK_SH):
        made = {name: _ready(name, case.operation, backend) for name in case.names}
    ready = {name: found for name, found in made.items() if isinstance(found, list)}
    failed = [found for found in made.values() if isinstance(found, dict)]
    rows = [[one.facts() if case.first else {"direction": one.direction} for one in found] for found in ready.values()]
    if case.samples and ready:
        with _holding(lock, fcntl.LOCK_EX):
            for place, of_direction in enumerate(zip(*ready.values(), strict=True)):
                for found, times in zip(rows, samples_in_turn(of_direction, repeats, calls), strict=True):
                    found[place] |= times
    return [{"name": name} | row for name, found in zip(ready, rows, strict=True) for row in found] + failed


def _ready(name: str, operation: Operation, backend: str | None) -> list[Ready] | Row:
    """Return the calls of an implementation, or its row where it fails."""
    try:
        return list(from_torch(operation) if name == "PyTorch" else from_jax(name, operation, backend))
    except Exception as error:
        return _error(name, error)


def _error(name: str, error: Exception) -> Row:
    """Return the row of an implementation that failed."""
    return {"name": name, "error": f"{type(error).__name__}: {error}"[:300]}


def _merged(rows: list[Row]) -> list[Row]:
    """Return one row for what several processes measured of one implementation in one direction."""
    found: dict[str, Row] = {}
    for row in rows:
        key = json.dumps([row[name] for name in ("name", "model", "form", "heads", "dqk", "dhv", "x")])
        if "error" in row:
            found.setdefault(f"{key} error", row)
        else:
            found.setdefault(f"{key} {row['direction']}", {}).update(row)
    return list(found.values())


def _facts(operation: Operation) -> Row:
    """Return what the rows of an operator say of it."""
    return {key: value for key, value in operation._asdict().items() if key != "T"} | {"x": operation.T}


def _one(options: argparse.Namespace) -> None:
    """Print the rows of one case, in a process of its own, as lines of JSON."""
    operation, *rest = json.loads(options.one)
    case = Case(Operation(*operation), *rest)
    facts = _facts(case.operation)
    try:
        rows = measure(case, options.repeats, options.calls, options.lock)
    except Exception as error:
        rows = [_error(name, error) for name in case.names]
    for row in rows:
        print(json.dumps({"name": row["name"]} | facts | row), flush=True)


def main() -> None:
    """Measure all implementations and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--models", nargs="+", default=["mlstm"], choices=["mlstm", *DELTA])
    parser.add_argument("--forms", nargs="+", default=["exp"], choices=["exp", "sigmoid"], help="of the mLSTM")
    parser.add_argument("--head-dims", nargs="+", default=[f"{K}x{V}" for K, V in HEAD_DIMS], help="of the mLSTM")
    parser.add_argument("--names", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="of the mLSTM")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile in parallel")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which every process ends")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        _one(options)
        return
    for T in options.lengths:
        if T < 1 or TOKENS % T:
            parser.error(f"argument --lengths: got {T}, expected divisors of {TOKENS}")
    if min(options.repeats, options.calls, options.workers) < 1:
        parser.error("argument --repeats, --calls or --workers: got less than 1")
    end = time.monotonic() + options.budget
    found: list[Row] = []
    with tempfile.NamedTemporaryFile() as lock:
        options.lock = lock.name
        # Other libraries come last, fewer at once: three that wait for their turns can fill a GPU of 139 GiB.
        for cases, workers in zip(_cases(options), (options.workers, max(1, options.workers // 6)), strict=True):
            with ThreadPoolExecutor(workers) as pool:
                for rows in pool.map(lambda case: _in_a_process(case, options, end), cases):
                    found += rows
    from tfla.measure.machine import environment, installed_version

    machine = environment("cuda")
    machine["versions"] |= {n: v for n in ("jax", "jaxlib") if (v := installed_version(n))}
    config = {key: value for key, value in vars(options).items() if key not in ("out", "one", "lock")}
    options.out.write_text(
        json.dumps({"kind": "jax", "environment": machine, "config": config, "rows": _merged(found)}, indent=1) + "\n"
    )


def _in_a_process(case: Case, options: argparse.Namespace, end: float) -> list[Row]:
    """Return the rows of one case, measured in a process of its own with an empty cache of Triton.

    Args:
        case: what the process measures.
        options: the options of the command.
        end: the time after which the process ends, of `time.monotonic`.
    """
    left = end - time.monotonic()
    if left <= 0:
        return []
    with tempfile.TemporaryDirectory() as cache:
        command = [
            sys.executable, "-m", "tfla.bench.jax_times", "--one", json.dumps(case), "--repeats", str(options.repeats),
            "--calls", str(options.calls), "--lock", str(options.lock), "--out", str(options.out),
        ]  # fmt: skip
        kept = {"TRITON_CACHE_DIR": cache, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        try:
            done = subprocess.run(
                command, env=os.environ | kept, capture_output=True, text=True, check=False, timeout=left
            )
            said, status = done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            said, status = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or "", 0
    rows = [line for line in said.splitlines() if line.startswith("{")]
    if status:  # it was killed, or failed before it could say why
        error_rows = ({"name": name, "error": f"the process ended with status {status}"} for name in case.names)
        rows += [json.dumps(row | _facts(case.operation)) for row in error_rows]
    print("\n".join(rows), flush=True)
    return [json.loads(row) for row in rows]


if __name__ == "__main__":
    main()
