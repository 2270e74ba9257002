"""The products of keys inside a tile with gates for each step or for each step and key channel, by levels.

What step i reads of step j is the sum over channels of r_i k_j exp(log_f_{j+1} + ... + log_f_i). A level of s steps has
the pairs whose step j is in an even block of s steps and whose step i is in the odd block after it. Their decay is the
product of that from j to the end of the even block and that from the start of the odd block to i. Both exponents are
sums of log-gates, none is a difference: with gates of at most 1 no factor exceeds 1, and nothing cancels. Every pair of
different steps belongs to exactly one level. Tiles have L steps, a power of 2.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax.tile import log_gate_gradients


class Level(NamedTuple):
    """The decays of the pairs of one level of s steps; c is 1, or dqk with gates by channel."""

    start: Array  # (..., L / 2s, s, c), of odd blocks, from their start to each step
    end: Array  # (..., L / 2s, s, c), of even blocks, from after each step to their end


class Decays(NamedTuple):
    """The decays of tiles of L steps; c is 1, or dqk with gates by channel."""

    levels: tuple[Level, ...]  # of 1, 2, 4, ... L / 2 steps
    start: Array  # (..., L, c), from the start of the tile to each step
    end: Array  # (..., L, c), from after each step to the end of the tile
    whole: Array  # (..., c, 1), of the tile


class Reader(NamedTuple):
    """Vectors that read the writes of their tile, and the cotangent of what they read."""

    x: Array  # (..., L, dqk)
    weights: Array  # (..., L, L), the cotangent of the scores, 0 above the diagonal


class TileGradients(NamedTuple):
    """The gradients of products inside tiles."""

    readers: list[Array]  # (..., L, dqk) each
    k: Array  # (..., L, dqk)
    log_f: Array  # (..., L, c), with the terms of all pairs of steps


def halves(x: Array, s: int) -> tuple[Array, Array]:
    """Return the even and the odd blocks of s rows of (..., L, d), each (..., L / 2s, s, d)."""
    blocks = x.reshape(*x.shape[:-2], x.shape[-2] // (2 * s), 2, s, x.shape[-1])
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def joined(even: Array, odd: Array) -> Array:
    """Return the rows (..., L, d) of even and odd blocks."""
    *lead, n, s, d = even.shape
    return jnp.stack([even, odd], -3).reshape(*lead, n * 2 * s, d)


def diagonal_blocks(S: Array, s: int) -> Array:
    """Return the diagonal blocks of s rows of (..., L, L), (..., L / s, s, s)."""
    n = S.shape[-1] // s
    blocks = S.reshape(*S.shape[:-2], n, s, n, s)
    return jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)


def merged(S: Array, below: Array) -> Array:
    """Return diagonal blocks of 2s rows from those of s rows, (..., 2n, s, s), and the blocks below, (..., n, s, s)."""
    even, odd = S[..., 0::2, :, :], S[..., 1::2, :, :]
    return jnp.concatenate([jnp.concatenate([even, jnp.zeros_like(below)], -1), jnp.concatenate([below, odd], -1)], -2)


def decays(log_f: Array) -> Decays:
    """Return the decays of log-gates (..., L, c)."""
    start, end, levels = log_f, jnp.zeros_like(log_f), []
    s = 1
    while s < log_f.shape[-2]:
        (even, odd), (end_even, end_odd) = halves(start, s), halves(end, s)
        levels.append(Level(jnp.exp(odd), jnp.exp(end_even)))
        start = joined(even, odd + even[..., -1:, :])
        end = joined(end_even + odd[..., -1:, :], end_odd)
        s *= 2
    start = jnp.exp(start)
    return Decays(tuple(levels), start, jnp.exp(end), start[..., -1, :, None])


def between(d: Decays) -> Array:
    """Return the decay from after step j to step i, for i >= j, else 0: (..., L, L) with one gate for each step."""
    D = jnp.ones_like(d.start)[..., None]
    for level in d.levels:
        D = merged(D, level.start * level.end.mT)
    return D[..., 0, :, :]


def scores(d: Decays, x: Array, k: Array) -> Array:
    """Return what each step reads of each write, for i >= j, else 0: (..., L, L) from x and k (..., L, dqk)."""
    if d.start.shape[-1] == 1:
        return (x @ k.mT) * between(d)
    S = (x * k).sum(-1)[..., None, None]
    for n, level in enumerate(d.levels):
        S = merged(S, (halves(x, 1 << n)[1] * level.start) @ (halves(k, 1 << n)[0] * level.end).mT)
    return S[..., 0, :, :]


def rows_before(x: Array) -> Array:
    """Return the sums over the rows before each."""
    return jnp.pad(jnp.cumsum(x, -2)[..., :-1, :], [(0, 0)] * (x.ndim - 2) + [(1, 0), (0, 0)])


def rows_onward(x: Array) -> Array:
    """Return the sums over each row and all later ones."""
    return jax.lax.cumsum(x, x.ndim - 2, reverse=True)


def gradients(d: Decays, readers: list[Reader], k: Array, reads: Array, writes: Array, across: Array) -> TileGradients:
    """Return the gradients of all products inside tiles, and of the log-gates (D17).

    A log-gate gets the terms of the pairs of steps that it is between, and only these.

    Args:
        d: the decays.
        readers: the queries, and the read keys where there is a correction.
        k: (..., L, dqk), the keys of the writes.
        reads: (..., L, dqk), the terms of each step with all steps before its tile.
        writes: (..., L, dqk), the terms of each step with all steps after its tile.
        across: (..., dqk), the terms of steps before a tile with steps after it.
    """
    if d.start.shape[-1] == 1:
        return _of_steps(d, readers, k, reads, writes, across)
    found, dk = [], jnp.zeros_like(k)
    log_f = across[..., None, :] + rows_onward(reads) + rows_before(writes)
    for x, weights in readers:
        itself = jnp.diagonal(weights, axis1=-2, axis2=-1)[..., None]
        dx = itself * k
        dk += itself * x
        for n, level in enumerate(d.levels):
            s = 1 << n
            r, w = halves(x, s)[1] * level.start, halves(k, s)[0] * level.end
            S = diagonal_blocks(weights, 2 * s)[..., s:, :s]
            to_r, to_k = S @ w, S.mT @ r
            zero = jnp.zeros_like(r)
            log_f += joined(rows_before(to_k * w), rows_onward(to_r * r))
            dx += joined(zero, to_r * level.start)
            dk += joined(to_k * level.end, zero)
        found.append(dx)
    return TileGradients(found, dk, log_f)


def _of_steps(d: Decays, readers: list[Reader], k: Array, reads: Array, writes: Array, across: Array) -> TileGradients:
    """Return :func:`gradients` with one gate for each step."""
    D, found = between(d), []
    dk, terms = jnp.zeros_like(k), jnp.zeros_like(D)
    for x, weights in readers:
        S = weights * D
        found.append(S @ k)
        dk += S.mT @ x
        terms += S * (x @ k.mT)
    _, log_f = log_gate_gradients(terms, reads.sum(-1), writes.sum(-1), across.sum(-1))
    return TileGradients(found, dk, log_f[..., None])
