"""A profile of one call of a series by streams: the times in which a GPU computes, communicates, or does neither."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

COMMUNICATION = "nccl"  # in the names of kernels that send
MARK = "spin_kernel"  # in the name of the kernel of torch.cuda._sleep
LONGEST = 5  # kernels of a stream that are named


class Kernel(NamedTuple):
    """A kernel or a copy on a GPU; times are in seconds."""

    name: str
    stream: int
    start: float
    stop: float


Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the times that any of the spans covers, in order and without overlaps."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def length(spans: Sequence[Span]) -> float:
    """Return the sum of the lengths of spans."""
    return sum(stop - start for start, stop in spans)


def summary(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Return the seconds in which the kernels of one call compute, communicate, and leave the GPU idle.

    Returns:
        "seconds" from the first start to the last end, "computing" and "sending" (whenever any kernel of that kind
        runs), "exposed" (sending while nothing computes), "idle" (neither), and "streams": for each stream by its
        number, its "busy" seconds, its number of "kernels", and its "longest" kernels by name, summed.
    """
    if not kernels:
        return {"seconds": 0.0, "computing": 0.0, "sending": 0.0, "exposed": 0.0, "idle": 0.0, "streams": {}}
    sends = union((k.start, k.stop) for k in kernels if COMMUNICATION in k.name.lower())
    computes = union((k.start, k.stop) for k in kernels if COMMUNICATION not in k.name.lower())
    either = length(union([*sends, *computes]))
    seconds = max(k.stop for k in kernels) - min(k.start for k in kernels)
    streams: dict[str, Any] = {}
    for stream in sorted({k.stream for k in kernels}):
        own = [k for k in kernels if k.stream == stream]
        of_name: dict[str, float] = {}
        for k in own:
            of_name[k.name] = of_name.get(k.name, 0.0) + k.stop - k.start
        longest = sorted(of_name.items(), key=lambda item: -item[1])[:LONGEST]
        busy = length(union((k.start, k.stop) for k in own))
        streams[str(stream)] = {"busy": busy, "kernels": len(own), "longest": dict(longest)}
    return {
        "seconds": seconds, "computing": length(computes), "sending": length(sends),
        "exposed": either - length(computes), "idle": seconds - either, "streams": streams,
    }  # fmt: skip


def profiled(run: Callable[[], Any]) -> dict[str, Any]:
    """Run a call twice under PyTorch's profiler and return the :func:`summary` of the second one's kernels.

    The second call begins with the lead that the host has over the GPU after the first one, as a call of a series does.
    On a CPU there are no kernels.
    """
    if not torch.cuda.is_available():
        run()
        run()
        return summary([])
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda._sleep(1)  # marks the end of the first call
        run()
        torch.cuda.synchronize()
    events = profile.profiler.kineto_results.events()
    cuda = torch.autograd.DeviceType.CUDA
    return summary(
        after_mark(
            [
                Kernel(e.name(), e.device_resource_id(), e.start_ns() * 1e-9, (e.start_ns() + e.duration_ns()) * 1e-9)
                for e in events
                if e.device_type() == cuda and e.duration_ns()
            ]
        )
    )


def after_mark(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels that start after the last kernel of `torch.cuda._sleep` has ended."""
    mark = max(k.stop for k in kernels if MARK in k.name)
    return [k for k in kernels if k.start >= mark]
