"""The exchange between processes that share the steps of sequences: inputs of convolutions, and positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla.ops.context_parallel.cuts import CONTIGUOUS
from tfla.ops.context_parallel.exchange import finish_gather, start_gather
from tfla.ops.context_parallel.group import Group, context_parallel_of


class ContextPart:
    """A process's part of the steps, and its exchange with the processes of the other parts.

    Args:
        group: the processes, in the order of their parts.

    Raises:
        ValueError: the parts are not contiguous.
    """

    def __init__(self, group: Group) -> None:
        placement, self.group = context_parallel_of(group)
        if placement.order != CONTIGUOUS:
            raise ValueError(
                f"context_parallel: got the order {placement.order!r}, expected {CONTIGUOUS!r} for this mixer"
            )
        self.rank, self.size, self.lengths = placement.rank, placement.size, placement.lengths

    def document_start(self, cu_seqlens: Tensor, x: Tensor) -> Tensor:
        """Return where documents start in x (1, T, ...), a part of packed sequences: (1, T) bool.

        Args:
            cu_seqlens: the offsets of the sequences in the whole row.
            x: this process's part; all parts are equal, or have the lengths of the group.
        """
        steps = x.shape[1]
        before = sum(self.lengths[: self.rank]) if self.lengths else self.rank * steps
        token = torch.arange(before, before + steps, device=x.device)
        return torch.isin(token, cu_seqlens.to(x.device, torch.int64))[None]

    def from_previous(self, x: Tensor) -> Tensor:
        """Return x of the process before this one, zeros on the first one; gradients go the other way."""
        found: Tensor = _FromPrevious.apply(x, self)
        return found

    def carried_length(self, length: Tensor, started: Tensor) -> Tensor:
        """Return how many tokens the document that goes on in this part has before it: (B,) int64.

        Args:
            length: (B,) int64, the tokens of the last document of this part, all of them if none starts here.
            started: (B,) bool, whether a document starts in this part.
        """
        parts = self.gather(torch.stack([length, started.long()]))  # (size, 2, B)
        carried = torch.zeros_like(length)
        for part in range(self.rank):
            carried = torch.where(parts[part, 1] > 0, parts[part, 0], carried + parts[part, 0])
        return carried

    def gather(self, x: Tensor) -> Tensor:
        """Return x of all processes: (size, ...)."""
        return finish_gather(start_gather(x[None], self.group, self.size), self.size)[:, 0]


class _FromPrevious(torch.autograd.Function):
    """The exchange of :meth:`ContextPart.from_previous`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: ContextPart) -> Tensor:
        """Return x of the process before this one."""
        ctx.part = part
        every = part.gather(x)
        return every[part.rank - 1] if part.rank else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        """Return the cotangent of the process after this one."""
        part, cotangent = ctx.part, cotangents[0]
        every = part.gather(cotangent)
        return every[part.rank + 1] if part.rank + 1 < part.size else torch.zeros_like(cotangent), None
