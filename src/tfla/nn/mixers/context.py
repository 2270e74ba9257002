"""The exchange between processes that share the steps of sequences: inputs of convolutions, and positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla.nn.mixers.documents import Documents
from tfla.nn.mixers.spans import Spans
from tfla.ops.context_parallel.exchange import gather
from tfla.ops.context_parallel.group import Group


class ContextPart:
    """A process's part of the steps, one or two spans of them, and its exchange with the processes of the other parts.

    Args:
        group: the argument `context_parallel` of :func:`tfla.linear_attention`.
        T: the steps of this process.

    Attributes:
        spans: the spans of all processes.
        own: the steps of each span of this process in its tensors.

    Raises:
        ValueError: T steps do not fit the order or the lengths of the group.
    """

    def __init__(self, group: Group, T: int) -> None:
        self.spans = Spans(group, T)
        self.own = self.spans.own

    def document_start(self, cu_seqlens: Tensor, device: torch.device) -> Tensor:
        """Return where documents start in this part of packed sequences: (1, T) bool.

        Args:
            cu_seqlens: the offsets of the sequences in the whole row, whose parts are equal or have the lengths of the
                group.
            device: the device of the result.
        """
        return torch.isin(self.tokens(device), cu_seqlens.to(device, torch.int64))[None]

    def tokens(self, device: torch.device) -> Tensor:
        """Return the places of this process's steps in the whole sequence, (T,) int64."""
        bounds = self.spans.bounds
        return torch.cat([torch.arange(bounds[p], bounds[p + 1], device=device) for p in self.spans.positions])

    def from_previous(self, x: Tensor) -> Tensor:
        """Return for each span of this process (spans, ...) the x of the span before it in time, zeros for the first.

        Gradients go the other way.
        """
        found: Tensor = _FromPrevious.apply(x, self)
        return found

    def carried_length(self, length: Tensor, started: Tensor, before: Tensor | None) -> tuple[list[Tensor], Tensor]:
        """Return how many tokens the first document of each span of this process has before the span, (B,) int64 each.

        The second result is the number of tokens (B,) of the last document after all spans.

        Args:
            length: (spans, B) int64, the tokens of the last document of each span, all of them if none starts there.
            started: (spans, B) bool, whether a document starts in the span.
            before: (B,) int64, the tokens of the carried document before the first span; None is 0.
        """
        every = self.gather(torch.stack([length, started.long()], 1))  # (2, B) each
        carried = [torch.zeros_like(length[0]) if before is None else before]
        for span in every:
            carried.append(torch.where(span[1] > 0, span[0], carried[-1] + span[0]))
        return [carried[position] for position in self.spans.positions], carried[-1]

    def position(self, documents: Documents, batch: int, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the positions of this process's tokens within their documents: (B, T) or (1, T) int64.

        The second result is the number of tokens (B,) of the last document after all spans.

        Args:
            documents: those of this process's tokens, by their starts.
            batch: the number of rows.
            before: (B,) int64, the tokens of the carried document before the first span; None is 0.
        """
        spans = [documents.within(steps) for steps in self.own]
        starts = [each.document_start for each in spans]
        length = torch.stack([each.length(None, batch) for each in spans])
        started = torch.stack(
            [
                torch.zeros_like(of_span, dtype=torch.bool) if each is None else each.any(1).expand(batch)
                for each, of_span in zip(starts, length, strict=True)
            ]
        )
        carried, after = self.carried_length(length, started, before)
        return torch.cat([each.position(tokens) for each, tokens in zip(spans, carried, strict=True)], 1), after

    def exchange_ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what :meth:`from_previous` does, and the x of the last span in time, (...).

        The gradients of the second from all processes are added up.
        """
        found: tuple[Tensor, Tensor] = _Ends.apply(x, self)
        return found

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the x of all spans in the order of time, from that of the spans of this process, (spans, ...)."""
        spans = self.spans
        of_ranks = gather(x, spans.group, spans.size)
        first = [of_ranks[rank, 0] for rank in range(spans.size)]
        if not spans.zigzag:
            return first
        return first + [of_ranks[rank, 1] for rank in range(spans.size - 1, -1, -1)]

    def shifted(self, x: Tensor, by: int) -> Tensor:
        """Return for each span of this process the x of the span that is ``by`` later, zeros where there is none."""
        every, found = self.gather(x), []
        for position in self.spans.positions:
            there = 0 <= position + by < len(every)
            found.append(every[position + by] if there else torch.zeros_like(every[0]))
        return torch.stack(found)


class _FromPrevious(torch.autograd.Function):
    """The exchange of :meth:`ContextPart.from_previous`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: ContextPart) -> Tensor:
        """Return x of the span before each one."""
        ctx.part = part
        return part.shifted(x, -1)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        """Return the cotangent of the span after each one."""
        return ctx.part.shifted(cotangents[0], 1), None


class _Ends(torch.autograd.Function):
    """The exchange of :meth:`ContextPart.exchange_ends`, one node so that all processes take part in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: ContextPart) -> tuple[Tensor, Tensor]:
        """Return x of the span before each one, and of the last."""
        ctx.part = part
        every = part.gather(x)
        before = [every[position - 1] if position else torch.zeros_like(every[0]) for position in part.spans.positions]
        return torch.stack(before), every[-1].clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        """Return the cotangent of the span after each one, and for the last span those of all processes."""
        part, of_last = ctx.part, cotangents[1]
        after, positions = part.shifted(cotangents[0], 1), part.spans.positions
        shares = part.gather(torch.stack([of_last, *[torch.zeros_like(of_last)] * (len(positions) - 1)]))
        total, last = torch.stack(shares).sum(0), len(part.spans.lengths) - 1
        return torch.stack([total if positions[s] == last else of_span for s, of_span in enumerate(after)]), None
