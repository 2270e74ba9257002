"""The steps of all processes that share sequences, for layers that need all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.nn.mixers.spans import Spans
from tfla.ops.context_parallel.group import context_parallel_of
from tfla.ops.context_parallel.parts import check_parts
from tfla.ops.context_parallel.refusals import checked, refuse
from tfla.ops.transforms import needs_dispatcher

R = TypeVar("R")


def all_gather(x: Tensor, dim: int, group: str) -> Tensor:
    """Return the tensors of all processes, one after the other in a dimension; their gradients are added up.

    Args:
        x: this process's tensor, of equal shape on all processes.
        dim: the dimension.
        group: the name of the process group.
    """
    import torch.distributed._functional_collectives as collectives

    # The name before PyTorch 2.13 is deprecated.
    run: Any = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
    found: Tensor = run(x.contiguous(), dim, group)
    return found


def start_shared(
    group: Any,
    x: Tensor,
    read: Tensor,
    cu_seqlens: Tensor | None,
    *,
    check: Callable[[], object],
    start: Callable[[], R],
    equal: bool = True,
) -> tuple[Tensor, R | None]:
    """Check a call of a layer on every process that shares its steps, before any of them waits for another one.

    Args:
        group: the argument `context_parallel` of :func:`tfla.mlstm`.
        x: (B, T, d_model), the input of the layer.
        read: (B, T, ...), what the layer computes from next.
        cu_seqlens: the offsets of packed sequences.
        check: raises an error of arguments that the processes do not compare.
        start: raises an error of this process's part; eager calls compare all parts before.
        equal: whether dense parts have to be equal too, without lengths.

    Returns:
        ``read`` and the result of ``start``. In a traced call that is refused, the output of the layer and None; its
        graph raises the error when it runs.

    Raises:
        ValueError, TypeError: the arguments of a process are invalid; every process raises an error.
    """
    placement, name = context_parallel_of(group)
    compiling = torch.compiler.is_compiling()

    def prepare() -> R | None:
        """Check what is known without the other processes."""
        check()
        return start() if compiling else None

    try:
        found = prepare()
    except Exception as error:
        return refuse(error, prepare, placement, name, (x,), cu_seqlens, [x.shape])[0], None
    if compiling:
        return checked(placement, name, read, cu_seqlens, equal), found
    if not needs_dispatcher((x, cu_seqlens)):
        check_parts(placement, name, x, cu_seqlens, name="x", equal=equal)
    return read, start()


class SharedSteps:
    """The steps of sequences that several processes share.

    Args:
        group: the argument `context_parallel` of :func:`tfla.mlstm`. Without lengths all parts are equal.
        T: the steps of this process.

    Attributes:
        here: the steps of each span of this process in its tensors.
        own: the same steps in the whole sequence.
        total: the number of all steps.

    Raises:
        ValueError: T steps do not fit the order or the lengths of the group.
    """

    def __init__(self, group: Any, T: int) -> None:
        self.spans = Spans(group, T)
        bounds = self.spans.bounds
        self.here, self.total = self.spans.own, bounds[-1]
        self.own = [slice(bounds[position], bounds[position + 1]) for position in self.spans.positions]

    def gather(self, x: Tensor) -> Tensor:
        """Return the steps of all processes in the order of time: (B, T, ...) -> (B, all steps, ...).

        The gradient of a step is the sum of those of all processes.
        """
        if x.dtype == torch.bool:  # not a dtype of NCCL
            return self.gather(x.to(torch.uint8)).bool()
        spans = self.spans
        held = [sum(spans.lengths[position] for position in spans.of_rank(rank)) for rank in range(spans.size)]
        most = max(held)
        padded = F.pad(x, (*(0, 0) * (x.dim() - 2), 0, most - x.shape[1])) if most > x.shape[1] else x.contiguous()
        every = all_gather(padded, 1, spans.group)
        if not spans.zigzag and min(held) == most:
            return every
        parts: list[Any] = [None] * len(spans.lengths)
        for rank in range(spans.size):
            start = rank * most
            for position in spans.of_rank(rank):
                parts[position] = every[:, start : start + spans.lengths[position]]
                start += spans.lengths[position]
        return torch.cat(parts, 1)

    def of_whole(self, x: Tensor) -> Tensor:
        """Return this process's steps of a tensor of all steps: (B, all steps, ...) -> (B, T, ...)."""
        return torch.cat([x[:, steps] for steps in self.own], 1)
