"""The forward and the backward of one tile: equations (T1) to (T13) of docs/mathematics.md.

Dims in einsums: r rows, h heads of q and k, g heads of v for each of them, i and j steps, k and v those of a head.
Queries are scaled. Cotangents of states are those of stabilized states, exp(m) dL/dC.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax.weights import Weights


class Tile(NamedTuple):
    """The arrays of one tile."""

    q: Array  # (r, h, L, dqk), scaled
    k: Array  # (r, h, L, dqk)
    v: Array  # (r, h, g, L, dhv)


class Carry(NamedTuple):
    """A state or its cotangent."""

    C: Array  # (r, h, g, dqk, dhv)
    n: Array | None  # (r, h, g, dqk); None: no normalizer


def outer(a: Array, b: Array, w: Array, roots: bool) -> Array:
    """Return the sum over steps of w_j a_j b_j^T, from a (r, h, j, k), b (r, h, g, j, v) and w (r, h, g, j).

    With ``roots`` w are square roots of weights that may overflow, and each factor is multiplied by one of them.
    """
    b = b * w[..., None]
    if not roots:
        return jnp.einsum("rhjk,rhgjv->rhgkv", a, b)
    return jnp.einsum("rhgjk,rhgjv->rhgkv", a[:, :, None] * w[..., None], b)


def rows(a: Array, b: Array, w: Array, roots: bool) -> Array:
    """Return the rows w_i (a b)_i, from a (r, h, i, x) or (r, h, g, i, x), b (r, h, g, x, y) and w (r, h, g, i).

    With ``roots`` w are square roots of weights that may overflow, applied before and after the product.
    """
    if roots:
        a = (a if a.ndim == 5 else a[:, :, None]) * w[..., None]
    found = jnp.einsum("rhgix,rhgxy->rhgiy" if a.ndim == 5 else "rhix,rhgxy->rhgiy", a, b)
    return found * w[..., None]


def advance(tile: Tile, w: Weights, carry: Carry, normalize: bool) -> Carry:
    """Return the state after the tile, (T5) and (T6), from the state before it."""
    C = w.scale(carry.C, w.decay) + outer(tile.k, tile.v, w.update, w.roots)
    if not normalize or carry.n is None:
        return Carry(C, None)
    return Carry(C, w.scale(carry.n, w.decay) + jnp.einsum("rhjk,rhgj->rhgk", tile.k, w.update))


def products(tile: Tile, w: Weights) -> Array:
    """Return P (T1), (r, h, g, i, j)."""
    scores = jnp.einsum("rhik,rhjk->rhij", tile.q, tile.k)
    return lower(w.scale(jnp.broadcast_to(scores[:, :, None], w.D.shape), w.D))


def lower(x: Array) -> Array:
    """Return x (..., L, L) with zeros above the diagonal, whatever has been there."""
    return jnp.where(jnp.tri(x.shape[-1], dtype=bool), x, 0)


def outputs(tile: Tile, w: Weights, carry: Carry, normalize: bool) -> tuple[Array, Array | None]:
    """Return h (r, h, g, i, v), (T2) and (T4), and the stabilized denominators d (r, h, g, i), (T3), or None."""
    P = products(tile, w)
    num = rows(tile.q, carry.C, w.inter, w.roots) + jnp.einsum("rhgij,rhgjv->rhgiv", P, tile.v)
    if not normalize:
        return num, None
    assert carry.n is not None
    d = w.scale(jnp.einsum("rhik,rhgk->rhgi", tile.q, carry.n), w.inter) + P.sum(-1)
    return num / w.denominator(d)[..., None], d


def output_cotangents(h: Array, d: Array, dh: Array, w: Weights, normalizer_grad: bool) -> tuple[Array, Array]:
    """Return the cotangents of the stabilized numerator (r, h, g, i, v) and denominator (r, h, g, i), (B1)."""
    assert w.floor is not None
    D = w.denominator(d)
    dd = jnp.zeros_like(d)
    if normalizer_grad:
        dd = jnp.where(jnp.abs(d) > w.floor, -jnp.sign(d) * (dh * h).sum(-1) / D, 0)
    return dh / D[..., None], dd


def retreat(tile: Tile, w: Weights, do: Array, dd: Array | None, carry: Carry) -> Carry:
    """Return the cotangent of the state before the tile, (T12) and (T13), from that of the state after it."""
    C = w.scale(carry.C, w.decay) + outer(tile.q, do, w.inter, w.roots)
    if dd is None or carry.n is None:
        return Carry(C, None)
    return Carry(C, w.scale(carry.n, w.decay) + jnp.einsum("rhik,rhgi->rhgk", tile.q, w.inter * dd))


class Gradients(NamedTuple):
    """The gradients of the arrays and the log-gates of one tile."""

    q: Array  # (r, h, L, dqk), of the scaled queries
    k: Array  # (r, h, L, dqk)
    v: Array  # (r, h, g, L, dhv)
    log_i: Array  # (r, h, g, L)
    log_f: Array  # (r, h, g, L)


def gradients(tile: Tile, w: Weights, do: Array, dd: Array | None, state: Carry, cotangent: Carry) -> Gradients:
    """Return the exact gradients of one tile, (T8) to (T11).

    Args:
        tile: its arrays.
        w: its weights.
        do, dd: the cotangents of the stabilized numerator and denominator; dd is None without a normalizer.
        state: the state before the tile.
        cotangent: the cotangent of the state after the tile.
    """
    q, k, v = tile
    P = products(tile, w)
    P_of_dP, D = P, w.D
    if w.roots:
        lift = w.lift()[..., None]
        dP = jnp.einsum("rhgiv,rhgjv->rhgij", do * lift, v)
        P_of_dP, D = P / lift, D / jnp.sqrt(lift)
    else:
        dP = jnp.einsum("rhgiv,rhgjv->rhgij", do, v)
    from_state = rows(do, state.C.mT, w.inter, w.roots)
    to_state = rows(v, cotangent.C.mT, w.update, w.roots)
    # A weight may overflow where a product of it and the two does not.
    passing = w.scale_root(state.C) * w.scale_root(cotangent.C)
    between = passing.sum((-2, -1))
    if dd is not None:
        assert state.n is not None
        assert cotangent.n is not None
        dP += dd[..., None]
        from_state += (w.inter * dd)[..., None] * state.n[..., None, :]
        to_state += w.update[..., None] * cotangent.n[..., None, :]
        between += (w.scale(state.n, w.decay) * cotangent.n).sum(-1)
    dP = lower(dP)
    S = w.scale(dP, D)
    reads = jnp.einsum("rhik,rhgik->rhgi", q, from_state)
    writes = jnp.einsum("rhjk,rhgjk->rhgj", k, to_state)
    log_i, log_f = log_gate_gradients(P_of_dP * dP, reads, writes, between)
    return Gradients(
        from_state.sum(2) + jnp.einsum("rhgij,rhjk->rhik", S, k),
        to_state.sum(2) + jnp.einsum("rhgij,rhik->rhjk", S, q),
        rows(k, cotangent.C, w.update, w.roots) + jnp.einsum("rhgij,rhgiv->rhgjv", P, do),
        log_i, log_f,
    )  # fmt: skip


def log_gate_gradients(terms: Array, reads: Array, writes: Array, between: Array) -> tuple[Array, Array]:
    """Return dlog_i and dlog_f (..., L) as sums over pairs of steps.

    dlog_i_j is the sum of the terms of pairs (i, j) over all i >= j, and dlog_f_t that over all i >= t > j. Both steps
    of a pair may lie in the tile of t, or one of them, or none. Each sum contains only its own terms, so that its
    rounding error is relative to them.

    Args:
        terms: (..., L, L), the terms of pairs inside the tile, 0 above the diagonal.
        reads: (..., L), the terms of each step with all steps before its tile.
        writes: (..., L), the terms of each step with all steps after its tile.
        between: (...), the terms of steps before the tile with steps after it.

    Where a sequence starts without a state, dlog_f of its first step is exactly 0.
    """
    L = terms.shape[-1]
    strictly_lower = jnp.where(jnp.tri(L, k=-1, dtype=bool), terms, 0)
    columns = strictly_lower.sum(-2)
    # The terms of each step i with all steps j < t, and the sum of these over i >= t. Differences of sums of columns
    # and rows are fewer additions, but have the rounding of pairs that a closed gate parts from those of t.
    is_before = jnp.triu(jnp.ones((L, L), terms.dtype), 1)
    earlier = jnp.matmul(strictly_lower, is_before, precision=jax.lax.Precision.HIGHEST)
    crossing = jnp.where(jnp.tri(L, dtype=bool), earlier, 0).sum(-2)
    onward = jnp.where(jnp.tri(L, dtype=bool).T, reads[..., None, :], 0).sum(-1)
    diagonal = jnp.diagonal(terms, axis1=-2, axis2=-1)
    return writes + columns + diagonal, between[..., None] + onward + before(writes) + crossing


def before(x: Array) -> Array:
    """Return the sums over all earlier elements of the last dim, (..., L) from (..., L)."""
    return jnp.where(jnp.tri(x.shape[-1], k=-1, dtype=bool), x[..., None, :], 0).sum(-1)
