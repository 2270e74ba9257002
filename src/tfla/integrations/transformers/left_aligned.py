"""The order of tokens in which all padding of a batch precedes the tokens of each row."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.integrations.transformers.padding import repeat_last_outputs, select_new_tokens


class LeftAligned(NamedTuple):
    """A batch whose padding is moved to the left, where it is a document of its own that no token depends on.

    Attributes:
        mask: (B, T) bool, True at tokens, in the order of the caller.
        order: (B, T) int64, the position of the caller for each position of the model; None where they are the same.
        document_start: (B, T) bool, True at the first token of each row, in the order of the model.
    """

    mask: Tensor
    order: Tensor | None
    document_start: Tensor

    @property
    def empty(self) -> Tensor:
        """Return which rows have no token, (B,) bool."""
        return ~self.mask.any(1)

    def starts(self, more: Tensor | None, seq_idx: Tensor | None) -> Tensor:
        """Return where documents start, (B, T) bool in the order of the model.

        Args:
            more: (B, T) bool in the order of the caller, True at tokens that also start one; None is no others.
            seq_idx: (B, T) int in the order of the caller, the index of the document to which a token belongs, or None.
                A document also starts at a token whose index is not that of the token before, without padding.
        """
        found = self.document_start
        if more is not None:
            found = found | self._in_order(more & self.mask)
        if seq_idx is not None:
            changes = F.pad(self._in_order(seq_idx).diff(dim=1) != 0, (1, 0))
            found = found | (changes & self._in_order(self.mask))
        return found

    def _in_order(self, t: Tensor) -> Tensor:
        """Return t (B, T) in the order of the model."""
        return t if self.order is None else t.gather(1, self.order)

    def arrange(self, x: Tensor) -> Tensor:
        """Return x (B, T, d) in the order of the model."""
        return x if self.order is None else x.gather(1, self.order[..., None].expand_as(x))

    def restore(self, y: Tensor) -> Tensor:
        """Return y (B, T, d) in the order of the caller; padding has the output of the token before it, if any."""
        if self.order is None:
            return y
        order = self.order.to(y.device)  # the blocks may be on several devices
        back = torch.empty_like(y).scatter(1, order[..., None].expand_as(y), y)
        return repeat_last_outputs(back, self.mask)


def left_align(attention_mask: Tensor | None, batch: int, steps: int, continues: bool) -> LeftAligned | None:
    """Return how the tokens of a call are arranged; None where none of them is padding.

    Args:
        attention_mask: (B, S) with S >= steps, nonzero at tokens; its last columns belong to this call. Or None.
        batch: number of rows.
        steps: number of positions of this call.
        continues: whether the rows continue sequences of a cache.

    Raises:
        ValueError: the mask has another shape, or there is padding in a call that continues sequences.
    """
    mask = select_new_tokens(attention_mask, batch, steps)
    if mask is None:
        return None
    compiling = torch.compiler.is_compiling()  # reading a value of the mask would break the graph
    if not compiling and bool(mask.all()):
        return None
    if continues:
        if compiling:
            return None
        raise ValueError("attention_mask: got padding after the tokens of a cache, expected it in the first call alone")
    left = not compiling and bool((mask == mask.cummax(1).values).all())
    order = None if left else mask.to(torch.int8).argsort(dim=1, stable=True)
    aligned = mask if order is None else mask.gather(1, order)
    return LeftAligned(mask, order, aligned & (aligned.cumsum(1) == 1))
