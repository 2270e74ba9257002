"""The forward and the backward of one block: n successive tiles of L steps for N heads, whose products are batched.

Tensors are (n, N, L, d). Every output is a product inside the tile (quadratic in L) plus one with a state, (44)-(56)
forward, and backward the same with the roles of q, k, v and their cotangents exchanged. The state is one buffer
(N, dqk, dhv) that is updated from tile to tile, so that it stays in the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tfla.backends.base import Spec
from tfla.backends.chunkwise.gate_gradients import log_gate_gradients
from tfla.backends.chunkwise.gates import TileGates
from tfla.backends.chunkwise.workspace import Workspace


def normalizer_states(k_up: Tensor, gates: TileGates, n: Tensor) -> Tensor:
    """Return the normalizer before each tile and after the last one, (n + 1, N, 1, dqk); k_up is k times `update`."""
    states = [n]
    for decay, added in zip(gates.decay[..., 0], k_up.sum(2), strict=True):
        states.append(torch.addcmul(added, decay, states[-1]))
    return torch.stack(states).unsqueeze(2)


def normalizer_cotangents(added: Tensor | None, gates: TileGates, dn: Tensor) -> Tensor:
    """Return the cotangents of the result of `normalizer_states`, (n + 1, N, 1, dqk).

    Args:
        added: q dd, (n, N, L, dqk), or None where dd is zero.
        gates: the weights of the tiles.
        dn: the cotangent of the normalizer after the last tile, (N, dqk).
    """
    states = [dn]
    sums = torch.zeros_like(dn).expand(gates.decay.shape[0], *dn.shape) if added is None else added.sum(2)
    for decay, tile in zip(gates.decay[..., 0].flip(0), sums.flip(0), strict=True):
        states.append(torch.addcmul(tile, decay, states[-1]))
    return torch.stack(states[::-1]).unsqueeze(2)


def advance(C: Tensor, decay: Tensor, k_up: Tensor, v: Tensor) -> None:
    """Update C over one tile in place, C <- decay C + k_up^T v, (39)-(43)."""
    C.mul_(decay).baddbmm_(k_up.mT, v)


def final_state(
    k: Tensor, v: Tensor, gates: TileGates, C: Tensor, n: Tensor, spec: Spec, work: Workspace
) -> tuple[Tensor, Tensor]:
    """Return the state (C, n) after the block, without its outputs."""
    k_up = work.mul("k_up", k, gates.update)
    C = C.clone()
    for tile in zip(gates.decay, k_up, v, strict=True):
        advance(C, *tile)
    return C, normalizer_states(k_up, gates, n)[-1, :, 0] if spec.normalize else n


def forward(
    q: Tensor, k: Tensor, v: Tensor, gates: TileGates, C: Tensor, n: Tensor, spec: Spec, work: Workspace
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute the forward of a block, (44)-(56), and update C in place to the one after the block.

    Returns:
        the numerators (n, N, L, dhv), the stabilized denominators d (n, N, L, 1), and n after the block.
    """
    q_in, k_up = work.mul("q_in", q, gates.inter), work.mul("k_up", k, gates.update)
    if gates.all_factored:
        q, k = q_in, k_up
    else:
        q = work.mul("q", q, gates.shares(gates.inter)[0])
        k = work.mul("k", k, gates.shares(gates.update)[0])
    P = work.bmm("P", q, k.mT).mul_(gates.inside(work)).tril_()
    out = work("out", *v.shape)
    for o, Pt, qt, kt, vt, decay in zip(out, P, q_in, k_up, v, gates.decay, strict=True):
        torch.bmm(Pt, vt, out=o)
        o.baddbmm_(qt, C)
        advance(C, decay, kt, vt)
    if not spec.normalize:
        return out, None, n
    ns = normalizer_states(k_up, gates, n)
    d = P.sum(-1, keepdim=True) + work.mul("q_in", q_in, ns[:-1]).sum(-1, keepdim=True)
    return out, d, ns[-1, :, 0]


class Gradients(NamedTuple):
    """The gradients of one block in the workspace: of q, k, v, the log-gates (n, N, L), and n before the block."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_i: Tensor
    log_f: Tensor
    n: Tensor


def backward(
    q: Tensor, k: Tensor, v: Tensor, gates: TileGates, C: Tensor, n: Tensor, h: Tensor, d: Tensor, dh: Tensor,
    dC: Tensor, dn: Tensor, spec: Spec, work: Workspace,
) -> Gradients:  # fmt: skip
    """Compute the exact gradients of a block, and update dC in place to the cotangent of the state before the block.

    do and dd are the cotangents of the stabilized numerator and denominator. Cotangents of states are exp(m) dL/dC.

    Args:
        q, k, v, gates: the inputs of the block.
        C, n: the state before the block.
        h, d: the outputs of the forward.
        dh: the cotangent of h.
        dC, dn: the cotangents of the state after the block.
        spec: the options of the call.
        work: the buffers.
    """
    do, dd = dh, None
    if spec.normalize:
        D = torch.maximum(d.abs(), gates.floor)
        do = torch.div(dh, D, out=work("do", *dh.shape))
        if spec.normalizer_grad:
            dd = -torch.linalg.vecdot(dh, h).unsqueeze(-1) * d.sign() * (d.abs() > gates.floor) / D
    q_in, k_up = work.mul("q_in", q, gates.inter), work.mul("k_up", k, gates.update)
    if gates.all_factored:
        by_q, by_k = gates.inter, gates.update
        q, k, do_in, v_up, dd_in = q_in, k_up, do, v, dd
    else:
        (by_q, by_do), (by_k, by_v) = gates.shares(gates.inter), gates.shares(gates.update)
        q, k = work.mul("q", q, by_q), work.mul("k", k, by_k)
        do_in, v_up = work.mul("do_in", do, by_do), work.mul("v_up", v, by_v)
        dd_in = None if dd is None else dd * by_do

    weights = gates.inside(work)
    P = work.bmm("P", q, k.mT).mul_(weights).tril_()
    # First the products with the states between tiles, then those inside each tile.
    dq, dk, dv = work("dq", *q.shape), work("dk", *k.shape), work("dv", *v.shape)
    starts, ends = [C], work("states", q.shape[0], *C.shape)
    for out, g, k_in, vt, decay, end in zip(dq, do_in, k_up, v, gates.decay, ends, strict=True):
        torch.bmm(g, starts[-1].mT, out=out)
        torch.mul(starts[-1], decay, out=end)
        starts.append(end.baddbmm_(k_in.mT, vt))
    passing = []  # <C, decay dC> of the state before a tile and the cotangent after it
    each = zip(dv, dk, P.mT, q, do, do_in, k_up, v_up, gates.decay, starts[:-1], strict=True)
    for out_v, out_k, Pt, qt, g, g_in, k_in, v_in, decay, start in reversed(list(each)):
        torch.bmm(Pt, g, out=out_v)
        out_v.baddbmm_(k_in, dC)
        torch.bmm(v_in, dC.mT, out=out_k)
        passing.append(torch.linalg.vecdot(start.flatten(1), dC.mul_(decay).flatten(1)))
        dC.baddbmm_(qt.mT, g_in)
    between = torch.stack(passing[::-1])
    if spec.normalize:
        dns = normalizer_cotangents(None if dd_in is None else work.mul("scratch", q, dd_in), gates, dn)
        ns = normalizer_states(k_up, gates, n)
        if dd_in is not None:
            dq += work.mul("scratch", ns[:-1], dd_in)
        dk += dns[1:] if gates.all_factored else work.mul("scratch", dns[1:], by_v)
        between += (ns[:-1] * gates.decay * dns[1:]).sum((2, 3))
        dn = dns[0, :, 0]
    reads, writes = (work.mul("scratch", a, b).sum(-1) for a, b in ((q, dq), (k, dk)))
    dS = work.each_bmm("dS", do, v.mT)
    if dd is not None:
        dS += dd
    terms = P.mul_(dS.tril_())
    dlog_i, dlog_f = log_gate_gradients(terms, reads, writes, between)
    dS.mul_(weights)
    for out, S, x in ((dq, dS, k), (dk, dS.mT, q)):
        out.flatten(0, 1).baddbmm_(S.flatten(0, 1), x.flatten(0, 1))
    return Gradients(dq.mul_(by_q), dk.mul_(by_k), dv, dlog_i, dlog_f, dn)
