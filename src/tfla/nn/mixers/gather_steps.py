"""The steps of all processes that share sequences, for layers that need all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla.ops.context_parallel.cuts import CONTIGUOUS
from tfla.ops.context_parallel.group import context_parallel_of


def own_steps(group: Any, T: int) -> tuple[slice, int, str]:
    """Return which steps of a sequence this process has, the number of all steps, and the name of the process group.

    Args:
        group: the argument `context_parallel` of :func:`tfla.mlstm`.
        T: the steps of this process, as many as those of every other one.

    Raises:
        ValueError: the sequence is cut in another way than in equal parts in the order of the processes.
    """
    placement, name = context_parallel_of(group)
    if placement.order != CONTIGUOUS or len(set(placement.lengths)) > 1:
        raise ValueError(
            f"context_parallel: got order {placement.order!r} and lengths {placement.lengths or None}, expected equal "
            f"parts in order {CONTIGUOUS!r} for attention"
        )
    return slice(placement.rank * T, (placement.rank + 1) * T), placement.size * T, name


def gather_steps(x: Tensor, name: str) -> Tensor:
    """Return the steps of all processes of a group: (B, T, ...) -> (B, R T, ...).

    The gradient of a step is the sum of those of all processes.

    Args:
        x: the steps of this process.
        name: the name of the process group.
    """
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    if x.dtype == torch.bool:  # not a dtype of NCCL
        return gather_steps(x.to(torch.uint8), name).bool()
    group: Any = name
    return all_gather_tensor_autograd(x.contiguous(), 1, group)
