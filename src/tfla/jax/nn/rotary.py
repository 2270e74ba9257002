"""The rotary position embedding, :mod:`tfla.nn.mixers.rotary` on arrays of JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from tfla.jax.gates import widen
from tfla.nn.mixers.rotary import ROTARY_BASE


def rotate_both(q: Array, k: Array, position: Array, base: float = ROTARY_BASE) -> tuple[Array, Array]:
    """Apply the rotary embedding to queries and keys (..., heads, d), d even, at token positions (...) or (1, T)."""
    half = q.shape[-1] // 2
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    angle = position[..., None, None].astype(dtype) * base ** -(jnp.arange(half, dtype=dtype) / half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    def rotate(x: Array) -> Array:
        a, b = jnp.split(widen(x), 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    return rotate(q), rotate(k)
