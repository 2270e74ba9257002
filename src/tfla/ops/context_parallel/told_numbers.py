"""The numbers that processes tell each other before a call, and the errors of a process that can tell nothing.

A process whose argument `context_parallel` is wrong does not know its group, and takes part in no collective of it. It
counts such errors, and writes the count into the store of torch.distributed. The counts are settled as follows.

- A process that waits for numbers longer than :data:`PATIENCE` reads the counts of the others. If one of them has
  raised more such errors than itself, it raises an error as well, and its collective stays open.
- Counts travel with the numbers. If a process finds that it has raised more errors than another one, the collective was
  for a call in which it has raised. The other one raises too, or has raised, and this process repeats the collective
  for its present call. All processes then are in the same call again.
- Errors that all processes have raised, since all run the same program, count for none.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tfla.backends.gpu.runtime import constant

PATIENCE = 1.0  # seconds between two looks at the store
_KEY = "tfla/context_parallel/{}"  # of the errors of a process, by its rank among all

# How many errors this process has raised that, as far as it knows, neither all processes have raised nor another one
# has raised for.
_owed = 0


@constant  # so that a call that is traced counts too
def owe_error() -> None:
    """Count an error of this process, which raises it in a call of whose group it knows nothing."""
    _owe(_owed + 1)


def _owe(count: int) -> None:
    """Set the number of errors, here and in the store."""
    global _owed
    if count == _owed:
        return
    _owed = count
    with suppress(Exception):  # without a process group there is nothing to tell
        c10d._get_default_store().set(_KEY.format(dist.get_rank()), str(count))


def _owed_by(ranks: list[int]) -> list[int]:
    """Return the errors of other processes, by their ranks among all."""
    store = c10d._get_default_store()
    found = []
    for rank in ranks:
        key = _KEY.format(rank)
        found.append(_owed if rank == dist.get_rank() else int(store.get(key)) if store.check([key]) else 0)
    return found


def _completed(work: dist.Work, on_cpu: bool) -> bool:
    """Return whether a collective is completed, after a wait of at most :data:`PATIENCE`."""
    if on_cpu:
        with suppress(RuntimeError):  # also that of the wait; the work itself raises its own error later
            work.wait(timedelta(seconds=PATIENCE))
        return work.is_completed()
    until = time.monotonic() + PATIENCE
    while not work.is_completed() and time.monotonic() < until:  # a wait would be one of the stream alone
        time.sleep(1e-3)
    return work.is_completed()


class RefusedError(Exception):
    """Other processes, whose ranks are `ranks`, have raised an error in a call for which this process waits."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


def exchange_numbers(own: list[int], device: torch.device, group: str, size: int) -> list[list[int]]:
    """Return the numbers of all processes of a group, in the order of ranks.

    Args:
        own: those of this process, as many on each.
        device: a device that the group serves.
        group: the name of the process group.
        size: the number of processes.

    Raises:
        RefusedError: processes have raised an error in a call of which they did not know the group.
        RuntimeError: the time limit of the group is over, or another process has ended.
    """
    while True:
        found = _gather([_owed, *own], device, group, size)
        counts = [count for count, *_ in found]
        more = _unshared(counts)
        of_this = more[dist.get_rank(_process_group(group))]
        if not any(more):
            _owe(0)
            return [numbers for _, *numbers in found]
        if not of_this:
            _owe(0)
            raise RefusedError([rank for rank, count in enumerate(more) if count])
        _owe(of_this - 1)


def _unshared(counts: list[int]) -> list[int]:
    """Return the errors that not all processes have raised."""
    return [count - min(counts) for count in counts]


def _process_group(group: str) -> dist.ProcessGroup:
    """Return the process group of a name."""
    return c10d._resolve_process_group(group)  # type: ignore[arg-type]


def _gather(own: list[int], device: torch.device, group: str, size: int) -> list[list[int]]:
    """Return the rows of all processes, or raise as :func:`exchange_numbers`."""
    process_group = _process_group(group)
    numbers = torch.tensor([own], device=device)
    every = numbers.new_empty(size, len(own))
    # The name before PyTorch 2.13 is deprecated.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: Any = gather(every, numbers, group=process_group, async_op=True)
    while not _completed(work, device.type == "cpu"):
        try:
            more = _unshared(_owed_by(dist.get_process_group_ranks(process_group)))
        except RuntimeError:  # the process that holds the store has ended; soon the collective says so
            continue
        if any(more) and not more[dist.get_rank(process_group)]:
            _owe(0)
            raise RefusedError([rank for rank, count in enumerate(more) if count])
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"context_parallel: this process has waited for the other ones of {size}, of which one has raised an error "
            f"of its own, has ended, or makes no such call: {error}"
        ) from error
    return every.tolist()
