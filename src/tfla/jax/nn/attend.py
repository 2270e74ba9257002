"""Causal attention within documents and windows, on blocks of queries, so that no mask of all of them is in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax.gates import widen

QUERIES = 256  # queries of a block, whose weights are in memory at once
HIDDEN = -1e30  # the logit of a key that a query does not see; finite, since padded queries may see none


def attend(
    q: Array, k: Array, v: Array, at: Array | int, first: Array | None = None, window: int | None = None,
    sinks: Array | None = None,
) -> Array:  # fmt: skip
    """Return softmax(q k^T / sqrt(d)) v over the visible keys, in float32 or float64 inside.

    Args:
        q: (B, T, H, d).
        k, v: (B, S, Hkv, d); each of the Hkv heads serves H / Hkv heads of q.
        at: the index of the key of the first query, a number or an array ().
        first: (B, T), (1, T), (B, 1) or (1, 1) int, the index of the first key that each query may see; None is 0.
        window: the number of last keys that a query sees, its own included; None is all.
        sinks: (H,), for each head the logit of a further key whose value is 0; None is no such key.

    Returns:
        (B, T, H, d) in q's dtype.
    """
    B, T, H, d = q.shape
    first = jnp.zeros((1, 1), jnp.int32) if first is None else first
    group = None if sinks is None else widen(sinks).reshape(k.shape[2], -1, 1, 1)
    grouped = q.reshape(B, T, k.shape[2], H // k.shape[2], d)
    if T <= QUERIES:
        return _block(grouped, k, v, jnp.asarray(at), first, window, group).reshape(q.shape)
    blocks = -(-T // QUERIES)

    def by_blocks(x: Array) -> Array:
        """Return x (B, T, ...) as (blocks, B, QUERIES, ...), with zeros after the last query."""
        x = jnp.pad(x, [(0, 0), (0, blocks * QUERIES - T), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(x.shape[0], blocks, QUERIES, *x.shape[2:]).swapaxes(0, 1)

    firsts = by_blocks(jnp.broadcast_to(first, (first.shape[0], T)))

    @jax.checkpoint  # the backward computes the weights of a block again
    def one(block: tuple[Array, Array, Array]) -> Array:
        n, queries, first = block
        return _block(queries, k, v, at + n * QUERIES, first, window, group)

    found = jax.lax.map(one, (jnp.arange(blocks), by_blocks(grouped), firsts))
    return found.swapaxes(0, 1).reshape(B, blocks * QUERIES, H, d)[:, :T]


def _block(q: Array, k: Array, v: Array, at: Array, first: Array, window: int | None, sinks: Array | None) -> Array:
    """Attend with the queries of a block, where there is a window to the keys of all their windows alone.

    Args:
        q: (B, T, Hkv, G, d), the queries by the heads of k and v.
        k, v, at, first, window: as in :func:`attend`.
        sinks: (Hkv, G, 1, 1) or None.

    Returns:
        (B, T, Hkv, G, d) in q's dtype.
    """
    T, S = q.shape[1], k.shape[1]
    query, low = at + jnp.arange(T)[:, None], jnp.zeros((), jnp.int32)
    if window is not None and window + T - 1 < S:
        span = window + T - 1
        low = jnp.clip(at - window + 1, 0, S - span)
        k, v = (jax.lax.dynamic_slice_in_dim(x, low, span, 1) for x in (k, v))
    key = low + jnp.arange(k.shape[1])
    visible = (key <= query) & (key >= first[..., None])  # (B or 1, T, S)
    if window is not None:
        visible &= key > query - window
    return masked(q, k, v, visible, sinks)


def masked(q: Array, k: Array, v: Array, visible: Array, sinks: Array | None) -> Array:
    """Return attention with a mask.

    Args:
        q: (B, T, Hkv, G, d).
        k, v: (B, S, Hkv, d).
        visible: (B, T, S) or (1, T, S) bool, True where a query sees a key.
        sinks: (Hkv, G, 1, 1), the logits of further keys whose values are 0, or None.

    Returns:
        (B, T, Hkv, G, d) in q's dtype.
    """
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    logits = jnp.einsum("bthgd,bshd->bhgts", q, k, preferred_element_type=dtype) * q.shape[-1] ** -0.5
    logits = jnp.where(visible[:, None, None], logits, HIDDEN)
    largest = logits.max(-1, keepdims=True)
    if sinks is not None:
        largest = jnp.maximum(largest, sinks.astype(dtype))
    largest = jax.lax.stop_gradient(largest)  # it cancels
    weights = jnp.exp(logits - largest)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(dtype) - largest)
    weights = (weights / total).astype(v.dtype)
    return jnp.einsum("bhgts,bshd->bthgd", weights, v, preferred_element_type=dtype).astype(q.dtype)
