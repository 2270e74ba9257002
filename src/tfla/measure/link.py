"""The rates of the link between the devices of several processes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tfla.measure.timing import Sampling, clock_of, measure

COUNTED = Sampling(repeats=9, warmup=3, pause=0.0, patience=float("inf"), sustained=0.0)  # as often on every process


def link(device: str) -> dict[str, float]:
    """Measure the link by an all_gather of the default process group.

    Returns:
        "seconds", the time of one number from each process, and "bytes_per_second" of large tensors: what a process
        receives from all others, divided by the time.
    """
    cuda = device.startswith("cuda")
    count = dist.get_world_size()
    found = {}
    for name, size in (("seconds", 1), ("bytes_per_second", 2**26 if cuda else 2**18)):
        own = torch.ones(size, device="cuda" if cuda else "cpu")
        every = torch.empty(count * size, device=own.device)

        def call(every: torch.Tensor = every, own: torch.Tensor = own) -> None:
            dist.all_gather_into_tensor(every, own)

        seconds = measure(call, clock_of(device), COUNTED)["seconds"]
        found[name] = seconds if name == "seconds" else (count - 1) * own.nbytes / seconds
    return found
