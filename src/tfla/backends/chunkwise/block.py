"""The work on a block: n successive tiles of L steps for N heads, all tiles at once as batched matrix products.

Tensors are (n, N, L, d); states before each tile and behind the last, (n + 1, N, dqk, dhv), live for one block only.
Every output is a product inside the tile (quadratic in L) plus one with a state: (44)-(56) forward, and backward the
same with the roles of q, k, v and their cotangents exchanged.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tfla.backends.base import Spec
from tfla.backends.chunkwise.gates import TileGates
from tfla.backends.chunkwise.workspace import Workspace, bmm_into


def _bmm_add(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """out + a @ b, in place."""
    out.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1))
    return out


def _carry_on(states: Tensor, carry: Tensor, reverse: bool) -> None:
    """Turns what each tile adds into states: forward, row t + 1 gains row t decayed; reverse, row t gains row t + 1."""
    rows = states.unbind(0)
    tiles = range(len(rows) - 1)
    decay = carry.diagonal(-1, 1, 2)  # (N, n)
    scalars = decay[0].tolist() if decay.shape[0] == 1 else None
    for t in reversed(tiles) if reverse else tiles:
        source, target = (t + 1, t) if reverse else (t, t + 1)
        if scalars is not None:
            rows[target].add_(rows[source], alpha=scalars[t])
        else:
            rows[target].add_(rows[source] * decay[:, t, None, None])


def memory_states(k_up: Tensor, v: Tensor, gates: TileGates, C: Tensor, work: Workspace) -> Tensor:
    """C before each tile and behind the last, (39)-(43), (n + 1, N, dqk, dhv). k_up is k weighted by `update`."""
    out = work("states", k_up.shape[0] + 1, *C.shape)
    out[0] = C
    bmm_into(out[1:], k_up.transpose(-1, -2), v)
    _carry_on(out, gates.carry, reverse=False)
    return out


def normalizer_states(k_up: Tensor, gates: TileGates, n: Tensor) -> Tensor:
    """n before each tile and behind the last, (n + 1, N, 1, dqk)."""
    added = torch.cat([n[None], k_up.sum(2)]).transpose(0, 1)
    return (gates.carry @ added).transpose(0, 1).unsqueeze(2)


def final_state(
    k: Tensor, v: Tensor, gates: TileGates, C: Tensor, n: Tensor, spec: Spec, work: Workspace
) -> tuple[Tensor, Tensor]:
    """Only the state behind the block. C lives in the workspace."""
    k_up = work.mul("k_up", k, gates.update)
    n_end = normalizer_states(k_up, gates, n)[-1, :, 0] if spec.normalize else n
    return memory_states(k_up, v, gates, C, work)[-1], n_end


def forward(
    q: Tensor, k: Tensor, v: Tensor, gates: TileGates, C: Tensor, n: Tensor, spec: Spec, work: Workspace
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Numerators (n, N, L, dhv), stabilised d (n, N, L, 1), the state behind the block; C lives in the workspace."""
    P = work.bmm("P", q, k.transpose(-1, -2)).mul_(gates.matrix(work))
    q_in, k_up = work.mul("q_in", q, gates.inter), work.mul("k_up", k, gates.update)
    states = memory_states(k_up, v, gates, C, work)
    out = _bmm_add(work.bmm("out", P, v), q_in, states[:-1])
    if not spec.normalize:
        return out, None, states[-1], n
    ns = normalizer_states(k_up, gates, n)
    d = P.sum(-1, keepdim=True) + work.mul("q_in", q_in, ns[:-1]).sum(-1, keepdim=True)
    return out, d, states[-1], ns[-1, :, 0]


class Gradients(NamedTuple):
    """Cotangents of one block, in the workspace: q, k, v like the inputs, log-gates (N, n L), the state before it."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_i: Tensor
    log_f: Tensor
    C: Tensor
    n: Tensor


def backward(
    q: Tensor, k: Tensor, v: Tensor, gates: TileGates, C: Tensor, n: Tensor, h: Tensor, d: Tensor, dh: Tensor,
    dC: Tensor, dn: Tensor, spec: Spec, work: Workspace,
) -> Gradients:  # fmt: skip
    """Exact gradients of a block from the state before it and the cotangents of its outputs and of the state behind it.

    do, dd are the cotangents of the stabilised numerator and denominator; states' cotangents are exp(m) dL/dC.
    """
    do, dd = dh, None
    if spec.normalize:
        D = torch.maximum(d.abs(), gates.floor)
        do = torch.div(dh, D, out=work("do", *dh.shape))
        if spec.normalizer_grad:
            dd = -work.mul("out", dh, h).sum(-1, keepdim=True) * d.sign() * (d.abs() > gates.floor) / D
    k_up = work.mul("k_up", k, gates.update)
    states = memory_states(k_up, v, gates, C, work)

    weights = gates.matrix(work)
    dS = work.bmm("dS", do, v.transpose(-1, -2))
    if dd is not None:
        dS += dd
    dS *= weights
    P = work.bmm("P", q, k.transpose(-1, -2)).mul_(weights)

    # Cotangents of the states: the same recurrence backwards, with q and do in place of k and v.
    do_in = work.mul("do_in", do, gates.inter)
    grads = work("grads", *states.shape)
    bmm_into(grads[:-1], q.transpose(-1, -2), do_in)
    grads[-1] = dC
    _carry_on(grads, gates.carry, reverse=True)

    dq = _bmm_add(work.bmm("dq", dS, k), do_in, states[:-1].transpose(-1, -2))
    dv = _bmm_add(work.bmm("out", P.transpose(-1, -2), do), k_up, grads[1:])
    v_up = work.mul("do_in", v, gates.update)
    dk = _bmm_add(work.bmm("dk", dS.transpose(-1, -2), q), v_up, grads[1:].transpose(-1, -2))
    # At the end of every tile the sum that is dlog_f is known directly: <C, dC>, and <n, dn>.
    tile_ends = torch.matmul(states[1:].flatten(2).unsqueeze(2), grads[1:].flatten(2).unsqueeze(3)).squeeze(3)
    if spec.normalize:
        added = torch.cat([torch.zeros_like(q[:, :, 0]), dn[None]])
        if dd is not None:
            dd_in = dd * gates.inter
            added[:-1] = work.mul("q_in", q, dd_in).sum(2)
        dns = (gates.carry.transpose(1, 2) @ added.transpose(0, 1)).transpose(0, 1).unsqueeze(2)
        ns = normalizer_states(k_up, gates, n)
        if dd is not None:
            dq += work.mul("q_in", ns[:-1], dd_in)
        dk += work.mul("q_in", dns[1:], gates.update)
        tile_ends = tile_ends + (ns[1:] * dns[1:]).sum(-1)
        dn = dns[0, :, 0]

    def per_step(a: Tensor, b: Tensor) -> Tensor:
        return work.mul("q_in", a, b).sum(-1).transpose(0, 1).flatten(1)

    dlog_i = per_step(k, dk)
    falls = per_step(q, dq) - dlog_i
    falls = falls.unflatten(1, (-1, q.shape[2]))
    dlog_f = (falls.flip(-1).cumsum(-1).flip(-1) + tile_ends.transpose(0, 1)).flatten(1)
    return Gradients(dq, dk, dv, dlog_i, dlog_f, grads[0], dn)
