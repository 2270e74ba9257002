"""The forward and the backward of one block of the delta rule: n successive tiles of L steps for N heads.

Tensors are (n, N, L, d). Products inside tiles are batched over all tiles; those with the state, a buffer
(N, dqk, dhv), go from tile to tile. The equations are those of docs/delta-rule.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.backends.chunkwise.channel_decays import ChannelDecays
from tfla.backends.chunkwise.corrections import corrections
from tfla.backends.chunkwise.step_decays import Reader, StepDecays

Decays = StepDecays | ChannelDecays


class Block(NamedTuple):
    """The inputs of one block."""

    q: Tensor  # (n, N, L, dqk)
    k: Tensor  # (n, N, L, dqk)
    v: Tensor  # (n, N, L, dhv)
    beta: Tensor  # (n, N, L)
    read_key: Tensor | None  # (n, N, L, dqk); None: no correction
    decays: Decays
    scale: float
    read_before_decay: bool

    @property
    def readers(self) -> Tensor:
        """The read keys in the rows of the steps whose decayed state they read.

        A read before the decay of step i is one after the decay of step i - 1. The first step then reads the state
        before the tile alone, and the last row is zero.
        """
        assert self.read_key is not None
        return _earlier(self.read_key) if self.read_before_decay else self.read_key

    @property
    def read_start(self) -> Tensor:
        """The decays from the start of the tile to what the read keys read, (n, N, L, 1 or dqk)."""
        start = self.decays.start
        return F.pad(start[..., :-1, :], (0, 0, 1, 0), value=1.0) if self.read_before_decay else start

    def read_scores(self, decayed: Tensor) -> Tensor:
        """Return what each row of `readers` reads of each write of its tile, (n, N, L, L), from `decayed_readers`."""
        S = self.decays.scores(self.readers, decayed)
        return S if self.read_before_decay else S.tril_(-1)

    def decayed_readers(self, r_in: Tensor) -> Tensor:
        """Return `readers` times the decays from the start of the tile, from the read keys times `read_start`."""
        return _earlier(r_in) if self.read_before_decay else r_in


def _earlier(x: Tensor) -> Tensor:
    """Return the rows one step earlier, zero in the last."""
    return F.pad(x[..., 1:, :], (0, 0, 0, 1))


def _later(x: Tensor) -> Tensor:
    """Return the rows one step later, zero in the first."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0))


def forward(x: Block, C: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the forward of a block, and update C in place to the state after it.

    Returns:
        h, E (n, N, L, dhv) and X (n, N, L, L), None without correction.
    """
    decays, beta = x.decays, x.beta.unsqueeze(-1)
    q_in, k_out = x.q * decays.start, decays.k_end * beta
    P = decays.scores(x.q, q_in).mul_(x.beta.unsqueeze(-2))
    h = torch.empty_like(x.v)
    if x.read_key is None:
        for ht, qt, kt, vt, whole in zip(h, q_in, k_out, x.v, decays.whole, strict=True):
            torch.bmm(qt, C, out=ht)
            C.mul_(whole).baddbmm_(kt.mT, vt)
        h += P @ x.v
        return h.mul_(x.scale), x.v, None
    r_in = x.read_key * x.read_start
    M = x.read_scores(x.decayed_readers(r_in))
    X = corrections(_later(M) if x.read_before_decay else M, x.beta)
    XB = X * x.beta.unsqueeze(-2)
    E = torch.empty_like(x.v)
    for ht, Et, qt, rt, kt, vt, XBt, whole in zip(h, E, q_in, r_in, k_out, x.v, XB, decays.whole, strict=True):
        R = torch.baddbmm(vt, rt, C, alpha=-1.0)
        torch.baddbmm(R, XBt, R, alpha=-1.0, out=Et)
        torch.bmm(qt, C, out=ht)
        C.mul_(whole).baddbmm_(kt.mT, Et)
    h += P @ E
    return h.mul_(x.scale), E, X


def final_state(x: Block, E: Tensor, C: Tensor) -> Tensor:
    """Return the state after the block, without its outputs."""
    k_out = x.decays.k_end * x.beta.unsqueeze(-1)
    C = C.clone()
    for kt, Et, whole in zip(k_out, E, x.decays.whole, strict=True):
        C.mul_(whole).baddbmm_(kt.mT, Et)
    return C


def cotangent(x: Block, X: Tensor | None, do: Tensor, dC: Tensor) -> None:
    """Update dC in place to the cotangent of the state before the block, without gradients of its inputs.

    The arguments are those of :func:`backward`.
    """
    decays, beta, do = x.decays, x.beta.unsqueeze(-1), do * x.scale
    q_in = x.q * decays.start
    r_in = None if x.read_key is None else x.read_key * x.read_start
    Z = decays.scores(x.q, q_in).mT @ do
    for t in reversed(range(len(Z))):
        write = Z[t].baddbmm_(decays.k_end[t], dC)
        if X is not None:
            write.baddbmm_(X[t].mT, write * beta[t], alpha=-1.0)
        dC.mul_(decays.whole[t]).baddbmm_(q_in[t].mT, do[t])
        if r_in is not None:
            dC.baddbmm_(r_in[t].mT, write * beta[t], alpha=-1.0)


class Gradients(NamedTuple):
    """The gradients of one block; `k` has those of the write keys alone."""

    q: Tensor  # (n, N, L, dqk)
    k: Tensor  # (n, N, L, dqk)
    v: Tensor  # (n, N, L, dhv)
    beta: Tensor  # (n, N, L)
    read_key: Tensor | None  # (n, N, L, dqk)
    log_f: Tensor  # (n, N, L) or (n, N, L, dqk)


def backward(x: Block, E: Tensor, X: Tensor | None, do: Tensor, C: Tensor, dC: Tensor) -> Gradients:
    """Compute the exact gradients of a block, and update dC in place to the cotangent of the state before the block.

    Args:
        x: the inputs of the block; v is not read.
        E, X: what the forward stored.
        do: (n, N, L, dhv), the cotangent of h.
        C: (N, dqk, dhv), the state before the block.
        dC: (N, dqk, dhv), the cotangent of the state after the block.
    """
    decays, beta = x.decays, x.beta.unsqueeze(-1)
    do = do * x.scale
    q_in, k_end = x.q * decays.start, decays.k_end
    r_in = None if x.read_key is None else x.read_key * x.read_start
    # The states before the tiles, then from the last tile to the first Z = dU - X^T B dU.
    starts = [C]
    for kt, bt, Et, whole in zip(k_end[:-1], beta[:-1], E[:-1], decays.whole[:-1], strict=True):
        starts.append((starts[-1] * whole).baddbmm_((kt * bt).mT, Et))
    Z = decays.scores(x.q, q_in).mT @ do
    dv, dk, dq = torch.empty_like(Z), torch.empty_like(k_end), torch.empty_like(q_in)
    dr = None if r_in is None else torch.empty_like(r_in)
    across = []
    for t in reversed(range(len(starts))):
        Zt, dvt, whole = Z[t], dv[t], decays.whole[t]
        Zt.baddbmm_(k_end[t], dC)
        if X is not None:
            Zt.baddbmm_(X[t].mT, Zt * beta[t], alpha=-1.0)
        torch.mul(Zt, beta[t], out=dvt)
        torch.bmm(E[t], dC.mT, out=dk[t])
        torch.bmm(do[t], starts[t].mT, out=dq[t])
        dC.mul_(whole)
        across.append(torch.linalg.vecdot(starts[t], dC))
        dC.baddbmm_(q_in[t].mT, do[t])
        if dr is not None and r_in is not None:
            torch.bmm(dvt, starts[t].mT, out=dr[t])
            dC.baddbmm_(r_in[t].mT, dvt, alpha=-1.0)
    dq.mul_(decays.start)
    decays.end(dk).mul_(beta)
    reads, writes = x.q * dq, x.k * dk
    weights = (do @ E.mT).tril_().mul_(x.beta.unsqueeze(-2))
    readers = [Reader(x.q, q_in, weights)]
    if dr is not None and r_in is not None and x.read_key is not None:
        dr.mul_(x.read_start).neg_()
        of_read_key, dE = x.read_key * dr, dv
        if x.read_before_decay:
            of_read_key, dE = _earlier(of_read_key), _earlier(dE)
        reads += of_read_key
        weights = (dE @ E.mT).tril_(0 if x.read_before_decay else -1).mul_(-x.beta.unsqueeze(-2))
        readers.append(Reader(x.readers, x.decayed_readers(r_in), weights))
    tile = decays.gradients(readers, reads, writes, torch.stack(across[::-1]))
    dq += tile.readers[0]
    dk += tile.k
    if dr is not None:
        dr += _later(tile.readers[1]) if x.read_before_decay else tile.readers[1]
    return Gradients(dq, dk, dv, torch.linalg.vecdot(Z, E), dr, tile.log_f)
