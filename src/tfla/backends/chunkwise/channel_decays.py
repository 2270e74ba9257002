"""The products of keys inside tiles with a gate for each step and key channel.

What step i reads of step j is the sum over channels of r_i k_j exp(log_f_{j+1} + ... + log_f_i). Where no decay of a
tile is too small, that is one product of r_i start_i and k_j / start_j, where start_i is the decay from the start of
the tile to step i. In other tiles it is computed by levels. A level of s steps has the pairs whose step j is in an even
block of s steps and whose step i is in the odd block after it. Their decay is the product of that from j to the end of
the even block and that from the start of the odd block to i. Both are products of gates: with gates of at most 1 no
factor exceeds 1, and no gate is too small. Every pair of different steps belongs to exactly one level, or to a small
block in which no decay is too small.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.backends.chunkwise.step_decays import Reader, TileGradients

SMALLEST, LARGEST = 2.0**-50, 2.0**50  # decays whose inverses and their products are in the range of float32
SMALL_BLOCK = 16


class Level(NamedTuple):
    """The factors of the pairs of one level of s steps; blocks are (n, N, L / 2s, s, dqk)."""

    s: int
    start: Tensor  # decays of the odd blocks from their start to each step
    end: Tensor  # decays of the even blocks from after each step to their end
    k_end: Tensor  # the keys of the even blocks times `end`


def _halves(x: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """Return the even and the odd blocks of s rows, each (n, N, L / 2s, s, d), views."""
    blocks = x.unflatten(-2, (-1, 2, s))
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def _beside(S: Tensor, s: int) -> Tensor:
    """Return the blocks of (n, N, L, L) whose rows are in odd blocks and columns in the even ones before, a view."""
    blocks = S.unflatten(-1, (-1, 2, s)).unflatten(-4, (-1, 2, s))[..., :, 1, :, :, 0, :]
    return blocks.diagonal(0, -4, -2).movedim(-1, -3)


def _inside(S: Tensor, s: int) -> Tensor:
    """Return the diagonal blocks of s rows of (n, N, L, L), (n, N, L / s, s, s), a view."""
    return S.unflatten(-1, (-1, s)).unflatten(-3, (-1, s)).diagonal(0, -4, -2).movedim(-1, -3)


def _before(x: Tensor) -> Tensor:
    """Return the sums over the rows before each."""
    return F.pad(x[..., :-1, :].cumsum(-2), (0, 0, 1, 0))


def _onward(x: Tensor) -> Tensor:
    """Return the sums over each row and all later ones."""
    return x.flip(-2).cumsum(-2).flip(-2)


def _bounded(start: Tensor) -> bool:
    """Return whether the inverses of decays are in the range of float32."""
    low, high = torch.aminmax(start)
    return bool((low >= SMALLEST) & (high <= LARGEST))


class ChannelDecays:
    """The decays of n tiles of L steps for N heads, with a gate for each step and key channel, and keys k as writers.

    `start`, `whole` and `k_end` are as in :class:`~tfla.backends.chunkwise.step_decays.StepDecays`. L is a power of 2.
    """

    def __init__(self, log_f: Tensor, k: Tensor) -> None:
        """Compute the decays from log-gates (n, N, L, dqk) for keys of the same shape."""
        f, L = log_f.exp(), log_f.shape[-2]
        self.k = k
        self.levels: list[Level] = []
        self.base, base_start = 1, None  # steps of the blocks whose decays are bounded, and the decays from their start
        start, s = f.clone(), 1
        while s < L:
            even, odd = _halves(start, s)
            odd.mul_(even[..., -1:, :])
            s *= 2
            if s == SMALL_BLOCK < L and _bounded(start):
                self.base, base_start = s, start.clone()
        if L > 1 and _bounded(start):
            self.base, base_start = L, start
        self.start = start  # (n, N, L, dqk)
        self.whole = start[..., -1, :].unsqueeze(-1)  # (n, N, dqk, 1)
        self.base_start = base_start
        self.k_inverse = None if base_start is None else k / base_start
        self._end: Tensor | None = None
        if self.base == L and self.k_inverse is not None:
            self.k_end = self.k_inverse * self.whole.mT
        else:
            self._end = self._by_levels(f, base_start, k)
            self.k_end = k * self._end

    def _by_levels(self, f: Tensor, start: Tensor | None, k: Tensor) -> Tensor:
        """Compute the levels from that of the blocks of `base` steps on, and return the decays to the tile's end."""
        s, L = self.base, f.shape[-2]
        if start is None:
            start, end = f, torch.ones_like(f)
        else:
            blocks = start.unflatten(-2, (-1, s))
            end = (blocks[..., -1:, :] / blocks).flatten(-3, -2)
        while s < L:
            (even, odd), (end_even, end_odd) = _halves(start, s), _halves(end, s)
            self.levels.append(Level(s, odd, end_even, _halves(k, s)[0] * end_even))
            of_even, of_odd = even[..., -1:, :], odd[..., -1:, :]
            start = torch.stack([even, odd * of_even], -3).flatten(-4, -2)
            end = torch.stack([end_even * of_odd, end_odd], -3).flatten(-4, -2)
            s *= 2
        return end

    def end(self, x: Tensor) -> Tensor:
        """Multiply x (n, N, L, dqk) in place by the decays from after each step to the end of the tile."""
        return x.div_(self.start).mul_(self.whole.mT) if self._end is None else x.mul_(self._end)

    def scores(self, readers: Tensor, decayed: Tensor) -> Tensor:
        """Return what each step reads of each write, for i >= j, (n, N, L, L)."""
        L = readers.shape[-2]
        if self.base == L and self.k_inverse is not None:
            return (decayed @ self.k_inverse.mT).tril_()
        S = readers.new_zeros((*readers.shape[:-1], L))
        if self.k_inverse is not None and self.base_start is not None:
            r, w = (x.unflatten(-2, (-1, self.base)) for x in (readers * self.base_start, self.k_inverse))
            _inside(S, self.base).copy_(r @ w.mT)
            S.tril_(-1)
        for level in self.levels:
            _beside(S, level.s).copy_((_halves(readers, level.s)[1] * level.start) @ level.k_end.mT)
        S.diagonal(0, -2, -1).copy_(torch.linalg.vecdot(readers, self.k))
        return S

    def gradients(self, readers: list[Reader], reads: Tensor, writes: Tensor, across: Tensor) -> TileGradients:
        """Return the gradients of all products inside tiles, and of the log-gates.

        A log-gate gets the terms of the pairs of steps that it is between, level by level. The arguments are those of
        :meth:`~tfla.backends.chunkwise.step_decays.StepDecays.gradients`.
        """
        L = reads.shape[-2]
        found, dk, dg = [], torch.zeros_like(reads), across.unsqueeze(-2) + _onward(reads)
        gains = writes  # of the log-gates of later steps of the tile
        for reader in readers:
            itself = reader.weights.diagonal(0, -2, -1).unsqueeze(-1)
            dr = torch.zeros_like(reads)
            if self.k_inverse is not None and self.base_start is not None:
                decayed = reader.decayed if self.base == L else reader.x * self.base_start
                r, w = (x.unflatten(-2, (-1, self.base)) for x in (decayed, self.k_inverse))
                S = reader.weights.tril(-1) if self.base == L else _inside(reader.weights, self.base).tril(-1)
                S = S.unsqueeze(-3) if self.base == L else S
                dr = (S @ w).flatten(-3, -2).mul_(self.base_start)
                to_k = (S.mT @ r).flatten(-3, -2).div_(self.base_start)
                of_pairs = torch.mul(self.k, to_k).addcmul_(reader.x, dr, value=-1.0)
                if self.base == L:
                    gains = gains + of_pairs
                else:
                    dg += _before(of_pairs.unflatten(-2, (-1, self.base))).flatten(-3, -2)
                dk += to_k
            for s, start, end, k_end in self.levels:
                r, S = _halves(reader.x, s)[1] * start, _beside(reader.weights, s)
                to_r, to_k = S @ k_end, S.mT @ r
                dg_even, dg_odd = _halves(dg, s)
                dg_odd += _onward(to_r * r)
                dg_even += _before(to_k * k_end)
                _halves(dr, s)[1].add_(to_r.mul_(start))
                _halves(dk, s)[0].add_(to_k.mul_(end))
            found.append(dr.addcmul_(itself, self.k))
            dk.addcmul_(itself, reader.x)
        return TileGradients(found, dk, dg.add_(_before(gains)))
