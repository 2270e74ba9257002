"""The process in which one contender runs: jobs come in as lines of JSON, rows go out as such.

A crash of a contender ends this process alone; :mod:`tfla.bench.crew` sees it and says how.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from tfla.bench.candidates import compiled_together
from tfla.measure.errors import describe_error
from tfla.measure.machine import environment, rates
from tfla.measure.memory import peak_bytes
from tfla.measure.problem import Problem, Work, call_of
from tfla.measure.timing import Sampling, clock_of, measure

Send = Callable[[dict[str, Any]], None]
BROKEN = 3  # exit code after an error that the device does not recover from


def _usable(device: str) -> bool:
    try:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def time_it(job: dict[str, Any], send: Send) -> None:
    """A row for every direction of the job; a contender that raises is a row with its error."""
    problem, sampling = Problem(**job["problem"]), Sampling(**job["sampling"])
    work: Work | None = None
    for direction in job["directions"]:
        row: dict[str, Any] = {"direction": direction}
        try:
            if work is None:
                module, _, name = job["make"].partition(":")
                work = getattr(importlib.import_module(module), name)(problem, **job["options"])
            call = call_of(work, direction)
            if job["only_compile"]:
                call()
                continue
            row |= measure(call, clock_of(problem.device, job["host"]), sampling, job["sustained"])
            row |= work.facts
            peak = None if job["host"] else peak_bytes(call, problem.device)
            row |= {} if peak is None else {"peak_bytes": peak}
        except Exception as error:  # whatever a contender raises is its result
            row["error"] = describe_error(error)
            del error
        call = None  # type: ignore[assignment]  # frees the cotangent
        if not job["only_compile"]:
            send(row)
        if "error" in row and not _usable(problem.device):
            sys.exit(BROKEN)
    del work
    gc.collect()
    _usable(problem.device)


def serve(job: dict[str, Any], send: Send) -> None:
    if job["kind"] == "machine":
        found = {"environment": environment(job["device"])}
        send(found | {"rates": rates(job["device"], Sampling(**job["sampling"]))})
        _usable(job["device"])  # gives the memory back
    else:
        time_it(job, send)
    send({"done": True})


def main() -> None:
    # What a contender prints must not get between the rows.
    rows = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with compiled_together():
        for line in sys.stdin:
            serve(json.loads(line), lambda row: print(json.dumps(row), file=rows, flush=True))


if __name__ == "__main__":
    main()
