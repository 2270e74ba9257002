"""Batches of sequences of different lengths: their layouts in a tensor, and the reversal of each sequence.

A batch lies in x (B, T, ...) in one of three ways: every row is a sequence of T steps; row b is a sequence of
``lengths[b]`` steps and padding; or, with B = 1, the sequences lie one after another, from ``cu_seqlens[s]`` to
``cu_seqlens[s + 1]``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from tfla.nn.mixers.documents import Documents
from tfla.nn.validation import describe


@dataclass(frozen=True)
class Sequences:
    """The sequences of a batch in a tensor (B, T, ...).

    Attributes:
        lengths: (B,) int64, the steps of each row before its padding; None without padding.
        cu_seqlens: (sequences + 1,) int64, the offsets of packed sequences; None if each row is a sequence.
        document_start: (B, T) bool, True at steps before which states are reset; None if there are none.
    """

    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None
    document_start: Tensor | None = None

    def padding(self, x: Tensor) -> Tensor | None:
        """Return which steps of x (B, T, ...) are padding: (B, T, 1) bool, or None without padding."""
        if self.lengths is None:
            return None
        return (torch.arange(x.shape[1], device=x.device) >= self.lengths[:, None])[..., None]

    def reverse(self, x: Tensor) -> Tensor:
        """Return x (B, T, ...) with the steps of each sequence in reverse order; padding keeps its place.

        Values of lengths and cu_seqlens outside of 0 to T count as the nearest of these.
        """
        # On a GPU the values are not checked; an index outside of x would end the process there.
        if self.cu_seqlens is not None:
            offsets = self.cu_seqlens.clamp(0, x.shape[1])
            token = torch.arange(x.shape[1], device=x.device)
            sequence = torch.bucketize(token, offsets, right=True).clamp(1, len(offsets) - 1)
            start, end = offsets[sequence - 1], offsets[sequence]
            # A step outside of all sequences stays where it is.
            return x.index_select(1, torch.where((start <= token) & (token < end), start + end - 1 - token, token))
        if self.lengths is None:
            return x.flip(1)
        token = torch.arange(x.shape[1], device=x.device)
        length = self.lengths.clamp(0, x.shape[1])[:, None]
        index = torch.where(token < length, length - 1 - token, token)
        return torch.take_along_dim(x, index.view(*index.shape, *[1] * (x.dim() - 2)), 1)

    def reversed(self) -> Sequences:
        """Return the layout of :meth:`reverse` of the batch.

        In reverse order the first step of a document is its last one, so that the step after it starts a document.
        """
        if self.document_start is None:
            return self
        start = F.pad(self.reverse(self.document_start)[:, :-1], (1, 0))
        if self.cu_seqlens is not None:
            # The last document of a sequence ends where the sequence does, and starts none in the next sequence.
            documents = Documents(start, None, self.cu_seqlens)
            start = start & (documents.token != documents.first())
        return replace(self, document_start=start)


def reverse_sequences(x: Tensor, *, lengths: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return a batch with the steps of each sequence in reverse order, as a bidirectional layer reads it.

    The reverse of the reverse is the batch itself. Padding and steps outside of all sequences stay where they are.

    Args:
        x: (B, T, ...), any dtype.
        lengths: (B,) int, the number of steps of each row before its padding, from 0 to T; None stands for T.
        cu_seqlens: (sequences + 1,) int, for B = 1: the offsets of packed sequences, from 0 to T, which never fall.

    Returns:
        a tensor like x.

    Raises:
        TypeError, ValueError: x has fewer than two dimensions, lengths or cu_seqlens are no tensors of integers or do
            not fit x, or both are given. Their values are read on a CPU outside of traced and mapped calls, since the
            host would wait for a GPU; else values outside of 0 to T count as the nearest of these.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {describe(x)}, expected a tensor")
    if x.dim() < 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected (B, T, ...)")
    if lengths is not None and cu_seqlens is not None:
        raise ValueError("lengths, cu_seqlens: got both, expected at most one of them")
    if lengths is not None:
        return Sequences(lengths=check_lengths(lengths, x)).reverse(x)
    if cu_seqlens is None:
        return x.flip(1)
    if len(x) != 1:
        raise ValueError(f"cu_seqlens: got it with {len(x)} rows of x, expected one row")
    _check_integers("cu_seqlens", cu_seqlens)
    if len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens: got {len(cu_seqlens)} offsets, expected at least 2")
    _check_has_values("cu_seqlens", cu_seqlens, x)
    if _is_readable(cu_seqlens):
        _check_values_of_offsets(cu_seqlens, x.shape[1])
    return Sequences(cu_seqlens=cu_seqlens.to(x.device, torch.int64)).reverse(x)


def check_lengths(lengths: Tensor, x: Tensor) -> Tensor:
    """Check the lengths (B,) of the rows of x (B, T, ...) and return them as int64 on its device.

    The values of lengths on a GPU are not checked, because the host would wait for the device.
    """
    _check_integers("lengths", lengths)
    if len(lengths) != len(x):
        raise ValueError(f"lengths: got shape {tuple(lengths.shape)}, expected ({len(x)},), one for each sequence")
    if _is_readable(lengths) and len(lengths):
        low, high = (int(n) for n in torch.aminmax(lengths))
        if low < 0 or high > x.shape[1]:
            raise ValueError(f"lengths: got from {low} to {high}, expected from 0 to {x.shape[1]}, the steps of a row")
    _check_has_values("lengths", lengths, x)
    return lengths.to(x.device, torch.int64)


def _check_has_values(name: str, given: Tensor, x: Tensor) -> None:
    """Raise if a tensor is on the meta device, and x is not."""
    if given.device.type == "meta" != x.device.type:
        raise ValueError(f"{name}: got device meta, expected that of the input, {x.device}")


def _is_readable(x: Tensor) -> bool:
    """Return whether the host can read x without waiting: x is on the CPU, and neither traced nor mapped by vmap."""
    plain = not torch.compiler.is_compiling() and type(x) is Tensor
    return plain and x.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _check_values_of_offsets(cu_seqlens: Tensor, T: int) -> None:
    """Raise unless the offsets of packed sequences are from 0 to T and never fall; they need not cover all steps."""
    offsets: list[int] = cu_seqlens.tolist()
    if min(offsets) < 0 or max(offsets) > T:
        low, high = min(offsets), max(offsets)
        raise ValueError(f"cu_seqlens: got from {low} to {high}, expected from 0 to {T}, the steps of x")
    if any(a > b for a, b in itertools.pairwise(offsets)):
        raise ValueError(f"cu_seqlens: got {offsets}, expected values that never fall")


def _check_integers(name: str, x: Tensor) -> None:
    """Raise unless x is a tensor of int32 or int64 with one dimension."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: got {describe(x)}, expected an int64 tensor")
    if x.dim() != 1:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected one dimension")


def packed_places(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    """Return the places of the steps of a PackedSequence in a tensor that has its sequences one after another.

    Args:
        packed: the sequences. Its rows are ordered by time, and for each time by the lengths of sequences.

    Returns:
        the place (steps,) of each row of ``packed.data``, and the offsets (sequences + 1,) of the sequences in their
        order before they were sorted, both int64 on the device of the data.
    """
    device = packed.data.device
    counts = packed.batch_sizes.to(device, non_blocking=True)  # (T,), the number of sequences with a step of each time
    first_row = F.pad(counts.cumsum(0), (1, 0))  # (T + 1,), the first row of each time
    row = torch.arange(len(packed.data), device=device)
    time = torch.bucketize(row, first_row, right=True) - 1
    order, sequence = packed.sorted_indices, row - first_row[time]
    if order is None:
        order = torch.arange(int(packed.batch_sizes[0]), device=device)
    sequence = order[sequence]
    lengths = torch.zeros_like(order).index_add_(0, sequence, torch.ones_like(row))
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    return offsets[sequence] + time, offsets
