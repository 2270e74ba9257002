"""The process in which one implementation is timed: it reads jobs and writes rows, both as lines of JSON.

A crash of an implementation ends this process alone; :mod:`tfla.bench.worker_pool` reports it.
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

from tfla.bench.parallel_compilation import compiled_together
from tfla.measure.errors import describe_error
from tfla.measure.link import link
from tfla.measure.machine import environment, rates
from tfla.measure.memory import peak_bytes
from tfla.measure.problem import Problem, Work, call_of
from tfla.measure.timing import Sampling, clock_of, measure

Send = Callable[[dict[str, Any]], None]
BROKEN = 3  # exit code after an error from which the device does not recover


def _usable(device: str) -> bool:
    """Free cached memory of the device and return whether it can still be used."""
    try:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def join_processes(place: dict[str, Any], device: str) -> None:
    """Connect this process with the others that run the same implementation, each on a GPU of its own.

    Args:
        place: its "rank", their "count", the "port" of the store at which they meet, and their name there, "group".
        device: the kind of device.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(place["rank"])
    os.environ |= {"RANK": str(place["rank"]), "LOCAL_RANK": str(place["rank"]), "WORLD_SIZE": str(place["count"])}
    store = dist.PrefixStore(place["group"], dist.TCPStore("127.0.0.1", place["port"], is_master=False))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=place["rank"], world_size=place["count"],
        device_id=torch.device("cuda", place["rank"]) if cuda else None,
    )  # fmt: skip


def time_it(job: dict[str, Any], send: Send) -> None:
    """Time an implementation and send one row for each direction of the job, with the error where it raises one."""
    problem, sampling = Problem(**job["problem"]), Sampling(**job["sampling"])
    work: Work | None = None
    for direction in job["directions"]:
        row: dict[str, Any] = {"direction": direction}
        try:
            if work is None:
                if job.get("place") is not None:
                    join_processes(job["place"], problem.device)
                module, _, name = job["make"].partition(":")
                work = getattr(importlib.import_module(module), name)(problem, **job["options"])
            call = call_of(work, direction)
            if job["only_compile"]:
                call()
                continue
            clock = clock_of(problem.device, job["host"], together=job.get("place") is not None)
            row |= measure(call, clock, sampling, job["sustained"])
            row |= work.facts
            peak = None if job["host"] else peak_bytes(call, problem.device)
            row |= {} if peak is None else {"peak_bytes": peak}
        except Exception as error:  # whatever the implementation raises is its result
            row = {"direction": direction, "error": describe_error(error)}  # no times of a call that also failed
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
    """Do one job and send its rows."""
    if job["kind"] == "machine":
        found = {"environment": environment(job["device"])}
        send(found | {"rates": rates(job["device"], Sampling(**job["sampling"]))})
        _usable(job["device"])  # gives the memory back
    elif job["kind"] == "link":
        try:
            join_processes(job["place"], job["device"])
            send({"link": link(job["device"])})
        except Exception as error:  # such as fewer GPUs than processes
            send({"error": describe_error(error)})
    else:
        time_it(job, send)
    send({"done": True})


def main() -> None:
    """Do the jobs that arrive on stdin, until it is closed."""
    # stdout is redirected to stderr, so that what an implementation prints does not mix with the rows.
    rows = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with compiled_together():
        for line in sys.stdin:
            serve(json.loads(line), lambda row: print(json.dumps(row), file=rows, flush=True))


if __name__ == "__main__":
    main()
