"""The part that one process has of the steps of sequences, and the positions of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from tfla.nn.mixers.documents import Documents
from tfla.nn.mixers.spans import Spans
from tfla.ops.context_parallel.call import check_global_offsets
from tfla.ops.context_parallel.cuts import check_offsets
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

    def check_offsets(self, cu_seqlens: Tensor, x: Tensor) -> None:
        """Raise unless the offsets of packed sequences are those of the whole row, of which x (1, T, ...) is a part."""
        check_global_offsets(cu_seqlens, x)
        if not torch.compiler.is_compiling():
            check_offsets(cu_seqlens.tolist(), self.spans.bounds[-1], self.spans.size)

    def document_start(self, cu_seqlens: Tensor, device: torch.device) -> Tensor:
        """Return where documents start in this part of packed sequences: (1, T) bool.

        Args:
            cu_seqlens: the offsets of the sequences in the whole row, whose parts are equal or have the lengths of the
                group.
            device: the device of the result.
        """
        return torch.isin(self.tokens(device), cu_seqlens.to(device, torch.int64))[None]

    def sequences(self, cu_seqlens: Tensor, x: Tensor) -> Documents:
        """Return the packed sequences of the whole row, for the steps of this process; ``x`` is (1, T, ...)."""
        return Documents(x, None, cu_seqlens, self.tokens(x.device))

    def tokens(self, device: torch.device) -> Tensor:
        """Return the places of this process's steps in the whole sequence, (T,) int64."""
        bounds = self.spans.bounds
        return torch.cat([torch.arange(bounds[p], bounds[p + 1], device=device) for p in self.spans.positions])

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

    def gather(self, x: Tensor) -> Tensor:
        """Return the x of all spans in the order of time, (all spans, ...), from that of this process, (spans, ...)."""
        return self.in_time(gather(x, self.spans.group, self.spans.size))

    def in_time(self, x: Tensor) -> Tensor:
        """Return (all spans, ...) in the order of time from the spans of all processes, (processes, spans, ...)."""
        return torch.cat([x[:, 0], x[:, 1].flip(0)]) if self.spans.zigzag else x[:, 0]
