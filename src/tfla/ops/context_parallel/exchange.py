"""The collective of context parallelism: every process gets the rows of all, in the order of ranks.

It is PyTorch's functional all_gather, which streams of a GPU wait for, but not the host, and which CUDA graphs capture.
A sum of rows is taken by each process in the same order, so that results repeat bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tfla.ops.context_parallel.cuts import ZIGZAG, Placement
from tfla.ops.context_parallel.spans import Span


def start_gather(rows: Tensor, group: str, size: int) -> Tensor:
    """Start the collective and return its result, which may be read after :func:`finish_gather`.

    Args:
        rows: (rows, ...), of equal shape on every process.
        group: the name of the process group.
        size: the number of processes.
    """
    return torch.ops._c10d_functional.all_gather_into_tensor(rows.contiguous(), size, group)


def finish_gather(gathered: Tensor, size: int) -> Tensor:
    """Return the rows of all processes, (size, rows, ...)."""
    return torch.ops._c10d_functional.wait_tensor(gathered).unflatten(0, (size, -1))


def gather(rows: Tensor, group: str, size: int) -> Tensor:
    """Return the rows of all processes, (size, rows, ...); the arguments are those of :func:`start_gather`."""
    return finish_gather(start_gather(rows, group, size), size)


def gather_together(each: list[Tensor], group: str, size: int) -> list[Tensor]:
    """Return what :func:`gather` does of several tensors (rows, ..., width), from one collective."""
    return list(gather(torch.cat(each, -1), group, size).split([rows.shape[-1] for rows in each], -1))


def ordered(x: Tensor, placement: Placement) -> Tensor:
    """Return one row of each span, (spans, ...) in the order of time, from (size, rows, ...).

    The first rows of each process are those of its spans.
    """
    return torch.cat([x[:, 0], x[:, 1].flip(0)]) if placement.order == ZIGZAG else x[:, 0]


def in_order_of_time(of_ranks: Span, placement: Placement) -> Span:
    """Return the spans of all processes as :func:`ordered` does."""
    return Span(*(None if x is None else ordered(x, placement) for x in of_ranks))  # type: ignore[arg-type]
