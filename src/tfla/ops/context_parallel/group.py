"""The processes that share a sequence, and the order in which they have its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch.distributed as dist

from tfla.backends.gpu.runtime import constant
from tfla.ops.context_parallel.cuts import CONTIGUOUS, ORDERS, Placement

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ContextParallel:
    """The cut of sequences among the processes of a group, for the argument `context_parallel` of the operators.

    With order "contiguous" process r has the r-th span of steps. With order "zigzag" the steps are cut into 2 R spans
    for R processes, and process r has spans r and 2 R - 1 - r, one after the other, as context-parallel attention has
    them for balance.

    Args:
        group: a process group, or a one-dimensional DeviceMesh such as `mesh["cp"]`.
        order: "contiguous" or "zigzag".
        lengths: the steps of each span in the order of time, equal on every process: R numbers, or 2 R with "zigzag".
            None: a dense batch may be cut contiguously anywhere, since each process knows its own part; packed
            sequences and "zigzag" are cut into equal spans.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, what was given and what is allowed.
    """

    def __init__(
        self, group: dist.ProcessGroup | DeviceMesh, *, order: str = CONTIGUOUS, lengths: Sequence[int] | None = None
    ) -> None:
        if order not in ORDERS:
            raise ValueError(f"order: got {order!r}, allowed are {', '.join(map(repr, ORDERS))}")
        process_group = _process_group(group)
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        placement = Placement(rank, size, order, ())
        if lengths is not None:
            lengths = tuple(lengths)
            if any(isinstance(n, bool) or not isinstance(n, int) for n in lengths):
                raise TypeError(f"lengths: got {lengths}, expected ints")
            if len(lengths) != placement.spans or min(lengths) < 1:
                raise ValueError(f"lengths: got {lengths}, expected {placement.spans} numbers of at least 1")
            placement = placement._replace(lengths=lengths)
        self.placement, self.group_name = placement, process_group.group_name

    def __repr__(self) -> str:
        rank, size, order, lengths = self.placement
        return f"ContextParallel(rank {rank} of {size}, order={order!r}, lengths={lengths or None})"


Group: TypeAlias = "dist.ProcessGroup | DeviceMesh | ContextParallel"


def _process_group(group: object) -> dist.ProcessGroup:
    """Return the process group of a group or of a one-dimensional mesh."""
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("context_parallel: got a process group without this process, expected one with it")
    if isinstance(group, dist.ProcessGroup):
        return group
    if hasattr(group, "get_group") and hasattr(group, "ndim"):  # a DeviceMesh, without its import
        if group.ndim != 1:
            names = getattr(group, "mesh_dim_names", None)
            raise ValueError(
                f"context_parallel: got a DeviceMesh of {group.ndim} dimensions{f' {names}' if names else ''}, "
                'expected one dimension, such as mesh["cp"]'
            )
        return group.get_group()
    raise TypeError(
        f"context_parallel: got {type(group).__name__}, expected a process group, a one-dimensional DeviceMesh or "
        "tfla.distributed.ContextParallel"
    )


@constant
def context_parallel_of(group: object, writes: int = 1) -> tuple[Placement, str]:
    """Return the placement and the name of the process group of the argument `context_parallel`.

    Args:
        group: the argument.
        writes: the number of steps for the operator in each step that the argument counts.

    Raises:
        TypeError, ValueError: it is none of what the operators take.
    """
    given = group if isinstance(group, ContextParallel) else ContextParallel(group)  # type: ignore[arg-type]
    placement = given.placement
    return placement._replace(lengths=tuple(n * writes for n in placement.lengths)), given.group_name


@constant
def _limits(group: object) -> tuple[int | None, bool]:
    """Return the steps that this process has by the lengths, None without any, and whether it has two equal spans."""
    placement, _ = context_parallel_of(group)
    lengths = placement.lengths
    return (sum(lengths[p] for p in placement.positions), False) if lengths else (None, placement.spans_here == 2)


def check_traced_part(group: object, T: int) -> None:
    """Raise unless this process's part of a traced call, T steps, fits the order and the lengths of the group.

    T may be a symbol, with which the tracer computes little.
    """
    steps, in_two = _limits(group)
    if steps is not None and steps != T:
        raise ValueError(f"q: got T = {T}, expected {steps}, by the lengths of context_parallel")
    if in_two and T % 2:
        raise ValueError(f"q: got T = {T}, expected an even number of steps with order 'zigzag' and no lengths")
