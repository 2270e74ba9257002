"""The processes that train several small models at once."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from tfla.paper.evidence.task import Row
from tfla.paper.evidence.training import Run, train_and_measure


def train_runs(
    runs: Sequence[Run], device: str, cuda_graph: bool, processes: int, budget: float | None
) -> Iterator[tuple[Run, Row | str]]:
    """Yield each run with its results, in the order in which runs end, or with the line that says why it failed.

    Args:
        runs: the runs.
        device: the device that all of them share.
        cuda_graph: as :func:`tfla.paper.evidence.training.train_and_measure` has it.
        processes: runs at a time; one is trained in this process.
        budget: the seconds after which no result is waited for; runs that have not ended then are given up.
    """
    end = None if budget is None else time.monotonic() + budget
    if processes == 1:
        for run in runs:
            if end is not None and time.monotonic() > end:
                return
            yield run, _attempt(train_and_measure, run, device, cuda_graph)
        return
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # CUDA cannot be used in a forked process
    executor = ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,))
    try:
        futures = {executor.submit(train_and_measure, run, device, cuda_graph): run for run in runs}
        for future in as_completed(futures, None if end is None else max(0.0, end - time.monotonic())):
            yield futures[future], _attempt(future.result)
    except TimeoutError:
        pass
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()


def _attempt(function: Callable[..., Row], *args: object) -> Row | str:
    """Return the results of a run, or why it failed."""
    try:
        return function(*args)
    except Exception as error:  # the other runs go on
        return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"
