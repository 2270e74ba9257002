"""The forward and the backward of tiles of the delta rule: (D5) to (D17) of docs/delta-rule.md.

Arrays of a tile are (..., g, L, d): g heads of v for each head of q and k, and L steps. Queries are scaled. What does
not depend on the state is computed for any number of tiles at once, in leading dims; :class:`Moves` is what a state
needs to get from tile to tile.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tfla.jax.delta import decays
from tfla.jax.delta.decays import Decays, Reader, diagonal_blocks, merged
from tfla.jax.delta.inputs import Rule


class Tile(NamedTuple):
    """The arrays of tiles."""

    q: Array  # (..., L, dqk), scaled
    k: Array  # (..., L, dqk)
    v: Array  # (..., g, L, dhv)
    beta: Array  # (..., g, L)
    log_f: Array  # (..., g, L, 1) or (..., g, L, dqk)
    read_key: Array | None  # (..., L, dqk); None: no correction


class Moves(NamedTuple):
    """The factors by which a state and its cotangent go through tiles."""

    q_in: Array  # (..., g, L, dqk), the queries times the decays from the start of the tile
    r_in: Array | None  # (..., g, L, dqk), the read keys likewise
    k_end: Array  # (..., g, L, dqk), the keys times the decays to the end of the tile
    beta: Array  # (..., g, L, 1)
    X: Array | None  # (..., g, L, L), (D5)
    v: Array  # (..., g, L, dhv)
    whole: Array  # (..., g, dqk or 1, 1), the decay over the tile


class Block(NamedTuple):
    """The tiles, what follows from them without a state, and their decays."""

    q: Array  # (..., g, L, dqk)
    k: Array  # (..., g, L, dqk)
    read_key: Array | None  # (..., g, L, dqk)
    read_start: Array | None  # (..., g, L, dqk or 1), the decays from the start of the tile to what read keys read
    decays: Decays
    moves: Moves


def earlier(x: Array) -> Array:
    """Return the rows one step earlier, zero in the last."""
    return jnp.concatenate([x[..., 1:, :], jnp.zeros_like(x[..., :1, :])], -2)


def later(x: Array) -> Array:
    """Return the rows one step later, zero in the first."""
    return jnp.concatenate([jnp.zeros_like(x[..., :1, :]), x[..., :-1, :]], -2)


def corrections(M: Array, beta: Array) -> Array:
    """Return X = M (I + B M)^-1 (D5), (..., L, L), from a strictly lower M and beta (..., L, 1), by block inversion.

    From the diagonal blocks X1 and X2 of two halves follows X21 = (I - X2 B2) M21 (I - B1 X1). Products are in full
    precision on every device, since errors of a level grow in the next ones.
    """
    L = M.shape[-1]
    X = jnp.zeros_like(M[..., :1])[..., None]
    s = 1
    while s < L:
        X1, X2 = X[..., 0::2, :, :], X[..., 1::2, :, :]
        b1, b2 = decays.halves(beta, s)
        M21 = diagonal_blocks(M, 2 * s)[..., s:, :s]
        Y = M21 - jnp.matmul(M21 * b1.mT, X1, precision="highest")
        X = merged(X, Y - jnp.matmul(X2 * b2.mT, Y, precision="highest"))
        s *= 2
    return X[..., 0, :, :]


def prepare(rule: Rule, tile: Tile) -> Block:
    """Return what follows from tiles without a state."""
    shape = (*tile.v.shape[:-1], tile.k.shape[-1])
    q, k = (jnp.broadcast_to(t[..., None, :, :], shape) for t in (tile.q, tile.k))
    d, beta = decays.decays(tile.log_f), tile.beta[..., None]
    r = read_start = r_in = X = None
    if tile.read_key is not None:
        r, read_start = jnp.broadcast_to(tile.read_key[..., None, :, :], shape), d.start
        if rule.read_before_decay:  # as after the decay of the step before; the first step reads the state itself
            read_start = jnp.concatenate([jnp.ones_like(d.start[..., :1, :]), d.start[..., :-1, :]], -2)
            M = later(decays.scores(d, earlier(r), k))
        else:
            M = jnp.tril(decays.scores(d, r, k), -1)
        X, r_in = corrections(M, beta), r * read_start
    return Block(q, k, r, read_start, d, Moves(q * d.start, r_in, k * d.end, beta, X, tile.v, d.whole))


def advance(m: Moves, C: Array) -> tuple[Array, Array]:
    """Return the prediction errors E (..., g, L, dhv), (D6) and (D7), and the state after a tile, (D9)."""
    E = m.v
    if m.r_in is not None and m.X is not None:
        R = m.v - m.r_in @ C
        E = R - m.X @ (m.beta * R)
    return E, m.whole * C + m.k_end.mT @ (m.beta * E)


def query_scores(b: Block) -> Array:
    """Return P, what queries read of the writes of their tile, without beta."""
    return decays.scores(b.decays, b.q, b.k)


def retreat(m: Moves, from_queries: Array, do: Array, dC: Array) -> tuple[Array, Array]:
    """Return Z (D10), (D11) and the cotangent of the state before a tile, (D13).

    Args:
        m: the factors of the tile.
        from_queries: (..., g, L, dhv), P^T do.
        do: (..., g, L, dhv), the cotangent of h.
        dC: the cotangent of the state after the tile.
    """
    Z = from_queries + m.k_end @ dC
    dC = m.whole * dC + m.q_in.mT @ do
    if m.r_in is not None and m.X is not None:
        Z = Z - m.X.mT @ (m.beta * Z)
        dC = dC - m.r_in.mT @ (m.beta * Z)
    return Z, dC


def gradients(rule: Rule, b: Block, do: Array, E: Array, Z: Array, C: Array, dC: Array) -> Tile:
    """Return the exact gradients of tiles, (D12) and (D14) to (D17).

    Args:
        rule: the options.
        b: the tiles.
        do: (..., g, L, dhv), the cotangent of h.
        E, Z: (..., g, L, dhv), the prediction errors, and what :func:`retreat` returns.
        C: (..., g, dqk, dhv), the states before the tiles.
        dC: (..., g, dqk, dhv), the cotangents of the states after the tiles.
    """
    m, d = b.moves, b.decays
    dv, BE = m.beta * Z, m.beta * E
    dq = (do @ C.mT) * d.start
    dk = (BE @ dC.mT) * d.end
    reads, writes = b.q * dq, b.k * dk
    readers = [Reader(b.q, jnp.tril(do @ BE.mT))]
    dr = None
    if b.read_key is not None and b.read_start is not None:
        dr = -(dv @ C.mT) * b.read_start
        reads_by_keys, x, dE = b.read_key * dr, b.read_key, dv
        if rule.read_before_decay:
            reads_by_keys, x, dE = earlier(reads_by_keys), earlier(x), earlier(dE)
        reads = reads + reads_by_keys
        readers.append(Reader(x, -jnp.tril(dE @ BE.mT, 0 if rule.read_before_decay else -1)))
    across = (C * dC * m.whole).sum(-1)
    inside = decays.gradients(d, readers, b.k, reads, writes, across)
    if dr is not None:
        dr = dr + (later(inside.readers[1]) if rule.read_before_decay else inside.readers[1])
        dr = dr.sum(-3)
    return Tile(
        (dq + inside.readers[0]).sum(-3), (dk + inside.k).sum(-3), dv, (Z * E).sum(-1), inside.log_f, dr
    )  # fmt: skip


def with_identity(C: Array) -> Array:
    """Return states [C | I]."""
    return jnp.concatenate([C, jnp.zeros_like(C[..., :1]) + jnp.eye(C.shape[-2], dtype=C.dtype)], -1)


def without_values(m: Moves) -> Moves:
    """Return moves for states [C | I], in which nothing is written to the columns after those of C."""
    return m._replace(v=jnp.pad(m.v, [(0, 0)] * (m.v.ndim - 1) + [(0, m.k_end.shape[-1])]))
