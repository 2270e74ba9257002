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


class Gradients(NamedTuple):
    """Cotangents of one block; q, k, v like the inputs, log-gates (N, n L)."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_i: Tensor
    log_f: Tensor
    C: Tensor
    n: Tensor


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b over the two leading dims; they are one batch dim where strides allow it without a copy."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


def _bmm_add(out: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """out + scale a @ b, in place."""
    out.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1), alpha=scale)
    return out


def _carry_on(states: Tensor, carry: Tensor, reverse: bool) -> None:
    """Turns what each tile adds into states: forward, row t + 1 gains row t decayed; reverse, row t gains row t + 1."""
    tiles = range(states.shape[0] - 1)
    decay = carry.diagonal(-1, 1, 2)  # (N, n)
    scalars = decay[0].tolist() if decay.shape[0] == 1 else None
    for t in reversed(tiles) if reverse else tiles:
        source, target = (t + 1, t) if reverse else (t, t + 1)
        if scalars is not None:
            states[target].add_(states[source], alpha=scalars[t])
        else:
            states[target].add_(states[source] * decay[:, t, None, None])


def memory_states(k: Tensor, v: Tensor, gates: TileGates, C: Tensor, out: Tensor) -> Tensor:
    """C before each tile and behind the last, (39)-(43), into out (n + 1, N, dqk, dhv). k is weighted by `update`."""
    torch.bmm(k.flatten(0, 1).mT, v.flatten(0, 1), out=out[1:].flatten(0, 1))
    out[0] = C
    _carry_on(out, gates.carry, reverse=False)
    return out


def normalizer_states(k: Tensor, gates: TileGates, n: Tensor) -> Tensor:
    """n before each tile and behind the last, (n + 1, N, dqk, 1)."""
    added = torch.cat([n[None], k.sum(2)]).transpose(0, 1)
    return (gates.carry @ added).transpose(0, 1).unsqueeze(-1)


def forward(
    q: Tensor, k: Tensor, v: Tensor, gates: TileGates, C: Tensor, n: Tensor, spec: Spec, work: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """h (n, N, L, dhv), the stabilised d (n, N, L), and the state behind the block. ``work`` holds the states."""
    P = torch.baddbmm(
        q.new_empty(()), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=spec.scale
    ).mul_(gates.matrix(q.dtype)).unflatten(0, q.shape[:2])  # fmt: skip
    q, k = q * gates.inter, k * gates.update
    states = memory_states(k, v, gates, C, work)
    h = _bmm_add(_bmm(P, v), q, states[:-1], spec.scale)
    if not spec.normalize:
        return h, None, states[-1], n
    ns = normalizer_states(k, gates, n)
    d = _bmm_add(P.sum(-1, keepdim=True), q, ns[:-1], spec.scale).squeeze(-1)
    h /= torch.maximum(d.abs(), gates.floor).unsqueeze(-1)
    return h, d, states[-1], ns[-1].squeeze(-1)


def final_state(
    k: Tensor, v: Tensor, gates: TileGates, C: Tensor, n: Tensor, spec: Spec, work: Tensor
) -> tuple[Tensor, Tensor]:
    """Only the state behind the block."""
    k = k * gates.update
    return memory_states(k, v, gates, C, work)[-1], (
        normalizer_states(k, gates, n)[-1].squeeze(-1) if spec.normalize else n
    )


def backward(
    q: Tensor, k: Tensor, v: Tensor, gates: TileGates, C: Tensor, n: Tensor, h: Tensor, d: Tensor, dh: Tensor,
    dC: Tensor, dn: Tensor, spec: Spec, work: Tensor, work_grad: Tensor,
) -> Gradients:  # fmt: skip
    """Exact gradients of a block from the state before it and the cotangents of its outputs and of the state behind it.

    do, dd are the cotangents of the stabilised numerator and denominator; states' cotangents are exp(m) dL/dC.
    """
    do, dd = dh, None
    if spec.normalize:
        D = torch.maximum(d.abs(), gates.floor)
        do = dh / D.unsqueeze(-1)
        if spec.normalizer_grad:
            dd = -(dh * h).sum(-1) * d.sign() * (d.abs() > gates.floor) / D
    k_up = k * gates.update
    states = memory_states(k_up, v, gates, C, work)

    weights = gates.matrix(q.dtype).mul_(spec.scale).unflatten(0, q.shape[:2])
    dS = _bmm(do, v.transpose(-1, -2))
    if dd is not None:
        dS += dd.unsqueeze(-1)
    dS *= weights
    P = _bmm(q, k.transpose(-1, -2)).mul_(weights)

    # Cotangents of the states: the same recurrence backwards, with q and do in place of k and v.
    do_in = do * gates.inter
    grads = work_grad
    torch.baddbmm(
        q.new_empty(()), q.flatten(0, 1).mT, do_in.flatten(0, 1), beta=0, alpha=spec.scale, out=grads[:-1].flatten(0, 1)
    )
    grads[-1] = dC
    _carry_on(grads, gates.carry, reverse=True)

    dq = _bmm_add(_bmm(dS, k), do_in, states[:-1].transpose(-1, -2), spec.scale)
    dv = _bmm_add(_bmm(P.transpose(-1, -2), do), k_up, grads[1:])
    dk = _bmm_add(_bmm(dS.transpose(-1, -2), q), v * gates.update, grads[1:].transpose(-1, -2))
    running = torch.einsum("nkv,nkv->n", states[-1], grads[-1])
    if dd is not None:
        ns = normalizer_states(k_up, gates, n)
        dd_in = (dd.unsqueeze(-1) * gates.inter).mul_(spec.scale)
        added = torch.cat([(q * dd_in).sum(2), dn[None]]).transpose(0, 1)
        dns = (gates.carry.transpose(1, 2) @ added).transpose(0, 1).unsqueeze(-2)
        _bmm_add(dq, dd_in, ns[:-1].transpose(-1, -2))
        _bmm_add(dk, gates.update, dns[1:])
        running = running + (ns[-1] * dns[-1].transpose(-1, -2)).sum((-2, -1))
        dn = dns[0].squeeze(-2)
    elif spec.normalize:  # dn still reaches the keys through the state behind the sequence
        dns = (gates.carry[:, -1:].transpose(1, 2) * dn[:, None]).transpose(0, 1).unsqueeze(-2)
        _bmm_add(dk, gates.update, dns[1:])
        running = running + (normalizer_states(k_up, gates, n)[-1].squeeze(-1) * dn).sum(-1)
        dn = dns[0].squeeze(-2)

    def per_step(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(-1).transpose(0, 1).flatten(1)

    dlog_i = per_step(k, dk)
    falls = per_step(q, dq) - dlog_i
    dlog_f = falls.flip(-1).cumsum(-1).flip(-1) + running[:, None]
    return Gradients(dq, dk, dv, dlog_i, dlog_f, grads[0], dn)
