"""The documents of a call over whole sequences."""

from __future__ import annotations

import torch
from torch import Tensor

BEFORE_ALL = -(2**31)  # the start of a document that began before the call, where its length does not matter


class Documents:
    """The first tokens of the documents of a call, given by ``document_start``, by ``cu_seqlens``, or by neither.

    Args:
        x: (B, T, ...), from which the number of tokens and the device are read.
        document_start: (B, T) bool, True at the first token of each document; or None.
        cu_seqlens: (sequences + 1,) int, the offsets of packed sequences; or None.
        token: (T,) int64, the places of the tokens among those that the offsets count; None is from 0 on.
    """

    def __init__(
        self, x: Tensor, document_start: Tensor | None, cu_seqlens: Tensor | None, token: Tensor | None = None
    ) -> None:
        self.token = torch.arange(x.shape[1], device=x.device) if token is None else token
        self.document_start = document_start
        self.offsets = None if cu_seqlens is None else cu_seqlens.to(x.device, torch.int64)

    @property
    def single(self) -> bool:
        """True if each row is one document, or the continuation of one."""
        return self.document_start is None and self.offsets is None

    def sequence(self) -> Tensor:
        """Return the packed sequence (T,) of every token."""
        assert self.offsets is not None
        # Empty sequences share their offset with the next one; the last of them has the token.
        return torch.bucketize(self.token, self.offsets, right=True) - 1

    def first(self, before: Tensor | None = None) -> Tensor:
        """Return the index of the first token of each token's document.

        Args:
            before: (B,) or (sequences,), the number of tokens of the carried document before this call; None is 0.

        Returns:
            (B, T), (1, T) or (B, 1) int64, negative where the document began before the call.
        """
        if self.offsets is not None:
            starts = self.offsets[:-1] if before is None else self.offsets[:-1] - before
            return starts[self.sequence().clamp(0, len(starts) - 1)][None]
        carried = self.token.new_zeros(1) if before is None else -before
        if self.document_start is None:
            return carried[:, None]
        return self.last_start(carried[:, None])

    def last_start(self, carried: Tensor | int) -> Tensor:
        """Return the index (B, T) of the last document start up to each token; ``carried`` where there is none."""
        assert self.document_start is not None
        start = torch.where(self.document_start, self.token, BEFORE_ALL).cummax(1).values
        return torch.where(start < 0, carried, start)

    def within(self, steps: slice) -> Documents:
        """Return the documents of some tokens of a call that is not packed."""
        starts = self.document_start
        return Documents(self.token[None, steps], None if starts is None else starts[:, steps], None)

    def boundaries(self) -> Tensor | None:
        """Return the first token of each token's document as :meth:`first` does; carried ones begin before all tokens.

        None where each row is one document.
        """
        if self.offsets is not None:
            return self.first()
        return None if self.document_start is None else self.last_start(BEFORE_ALL)

    def position(self, before: Tensor | None) -> Tensor:
        """Return the positions of all tokens within their documents: (B, T) or (1, T) int64."""
        return self.token - self.first(before)

    def length(self, before: Tensor | None, batch: int) -> Tensor:
        """Return how many tokens the last document of each row, or each packed sequence, has after the call: (B,)."""
        if self.offsets is not None:
            lengths = self.offsets[1:] - self.offsets[:-1]
            return lengths if before is None else lengths + before
        # Rows of their own, since a state may become a pool, whose rows are overwritten.
        return (len(self.token) - self.first(before)[:, -1]).expand(batch).contiguous()
