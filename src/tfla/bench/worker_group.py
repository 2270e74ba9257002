"""Workers that run one implementation together: processes with a GPU each, whose rows are merged into one."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import torch.distributed as dist

from tfla.bench.worker_pool import WorkerDied, WorkerPool

Row = dict[str, Any]
GRACE_SECONDS = 10.0  # for the others, after one process has failed: they may wait for it in a collective


_NUMBERS = itertools.count()  # of the groups that have met


@functools.cache
def _meeting_point() -> dist.TCPStore:
    """Return the store at which all groups of this process meet.

    It listens from here on, at a port of the system's choice, so that nothing else can take the port of a group.
    """
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _names(name: str, count: int) -> list[str]:
    """Return the names of the processes of an implementation."""
    return [f"{name}, process {rank}" for rank in range(count)]


def start_together(pool: WorkerPool, name: str, count: int) -> None:
    """Start all processes of an implementation, so that they import their modules at the same time."""
    for each in _names(name, count):
        pool.of(each)


def ask_together(pool: WorkerPool, name: str, count: int, job: Row, limit: float) -> Iterator[Row]:
    """Yield the rows of a job that ``count`` processes do together.

    The times of a row are those of the slowest process, its bytes those of the process that needs most. If any process
    fails, its error is the row, and all of them are dismissed, since the others may wait for it for ever.

    Raises:
        WorkerDied: a process ended before its job was done, or all of them took longer than ``limit`` seconds.
    """
    names = _names(name, count)
    rows = dict[int, list[Row]]()
    place = {"count": count, "port": _meeting_point().port, "group": f"group {next(_NUMBERS)}"}
    start_together(pool, name, count)
    failed: WorkerDied | None = None

    def one(rank: int) -> list[Row]:
        found = []
        for row in pool.of(names[rank]).ask(job | {"place": place | {"rank": rank}}, limit):
            found.append(row)
            if "error" in row:
                break
        return found

    with ThreadPoolExecutor(count) as threads:
        futures: dict[Future[list[Row]], int] = {threads.submit(one, rank): rank for rank in range(count)}
        left, killed, end = set(futures), False, time.monotonic() + limit + GRACE_SECONDS
        while left:
            done, left = wait(left, max(0.0, end - time.monotonic()), FIRST_COMPLETED)
            for future in done:
                error = future.exception()
                if error is None:
                    rows[futures[future]] = future.result()
                elif not isinstance(error, WorkerDied):
                    raise error
                elif failed is None and not (killed and rows):  # a process that was killed here is not the cause
                    failed = error
            if failed is not None or any("error" in row for found in rows.values() for row in found):
                end = min(end, time.monotonic() + GRACE_SECONDS)
            if not done:
                killed = True
                for future in left:
                    pool.of(names[futures[future]]).kill()
    broken = [row for rank in sorted(rows) for row in rows[rank] if "error" in row]
    if failed is not None or broken:
        for each in names:
            pool.dismiss(each)
    if failed is not None:  # the errors of the others only say that this process is gone
        raise failed
    if broken:
        yield broken[0]
        return
    for parts in zip(*(rows[rank] for rank in range(count)), strict=True):
        yield merged(parts)


def merged(parts: tuple[Row, ...]) -> Row:
    """Return the row of several processes: the most seconds and bytes of all of them, the rest from the first."""
    row = dict(parts[0])
    for key in ("seconds", "min", "max", "peak_bytes", "allocated_bytes"):
        values = [part[key] for part in parts if part.get(key) is not None]
        if values:
            row[key] = max(values)
    return row | {"processes": len(parts)}


def dismiss_together(pool: WorkerPool, name: str, count: int) -> None:
    """Stop all processes of an implementation."""
    for each in _names(name, count):
        pool.dismiss(each)
