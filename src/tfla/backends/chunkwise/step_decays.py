"""The products of keys inside tiles with one gate for each step: matrix products, times a matrix of decays."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tfla.backends.chunkwise.gate_gradients import before, crossing, onward
from tfla.backends.chunkwise.gates import cumulative_sum


class Reader(NamedTuple):
    """Vectors that read the writes of their tile, and the cotangent of what they read."""

    x: Tensor  # (n, N, L, dqk)
    decayed: Tensor  # (n, N, L, dqk), times the decay from the start of the tile
    weights: Tensor  # (n, N, L, L), the cotangent of the scores, 0 above the diagonal


class TileGradients(NamedTuple):
    """The gradients of products inside tiles."""

    readers: list[Tensor]  # (n, N, L, dqk) each
    k: Tensor  # (n, N, L, dqk)
    log_f: Tensor  # (n, N, L) or (n, N, L, dqk), with the terms of all pairs of steps


class StepDecays:
    """The decays of n tiles of L steps for N heads, with one gate for each step, and keys k as writers.

    D_ij, for i >= j, is the decay from after step j to step i, `start` the decay from the start of the tile to each
    step, and `whole` that of the tile; `k_end` is k times the decay from after its step to the end of the tile.
    """

    def __init__(self, log_f: Tensor, k: Tensor) -> None:
        """Compute the decays from log-gates (n, N, L) for keys (n, N, L, dqk)."""
        b, low = cumulative_sum(log_f)
        last, last_low = b[..., -1:], low[..., -1:]
        self.k = k
        self.start = (b + low).exp().unsqueeze(-1)  # (n, N, L, 1)
        self.k_end = k * ((last - b) + (last_low - low)).exp().unsqueeze(-1)
        self.whole = (last + last_low).exp().unsqueeze(-1)  # (n, N, 1, 1)
        D = (b.unsqueeze(-1) - b.unsqueeze(-2)).add_(low.unsqueeze(-1) - low.unsqueeze(-2))
        self.D = D.exp_().tril_()

    def end(self, x: Tensor) -> Tensor:
        """Multiply x (n, N, L, dqk) in place by the decays from after each step to the end of the tile."""
        b = self.D[..., -1, :].unsqueeze(-1)
        return x.mul_(b)

    def scores(self, readers: Tensor, decayed: Tensor) -> Tensor:
        """Return what each step reads of each write, for i >= j, (n, N, L, L)."""
        return (readers @ self.k.mT).mul_(self.D)

    def gradients(self, readers: list[Reader], reads: Tensor, writes: Tensor, across: Tensor) -> TileGradients:
        """Return the gradients of all products inside tiles, and of the log-gates.

        Args:
            readers: the queries, and the read keys where there is a correction.
            reads: (n, N, L, dqk), the terms of each step with all steps before its tile.
            writes: (n, N, L, dqk), the terms of each step with all steps after its tile.
            across: (n, N, dqk), the terms of steps before a tile with steps after it.
        """
        found, to_k, of_pairs = [], [], []
        for reader in readers:
            S = reader.weights * self.D
            found.append(S @ self.k)
            to_k.append(S.mT @ reader.x)
            of_pairs.append(S.mul_(reader.x @ self.k.mT))
        dk = to_k[0] if len(to_k) == 1 else to_k[0].add_(to_k[1])
        terms = of_pairs[0] if len(of_pairs) == 1 else of_pairs[0].add_(of_pairs[1])
        terms = terms.tril_(-1)
        dg = across.sum(-1, keepdim=True) + onward(reads.sum(-1)) + before(writes.sum(-1))
        return TileGradients(found, dk, dg + crossing(terms))
