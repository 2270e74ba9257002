"""The division of sequences into tiles of L steps, of dense batches and of packed sequences.

Tiled arrays are (n, R, heads, L, ...): n tiles one after another, in each of R rows. A dense batch has a row for each
sequence. Packed sequences share one row, and each starts with a new tile, so that nothing passes from one to the next.
Steps that a last tile lacks have gates that leave the state as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array


class Packing(NamedTuple):
    """The tiles of packed sequences; n is a bound of their number that does not depend on the lengths."""

    token: Array  # (n, L): the token of each step
    valid: Array  # (n, L): whether there is such a step
    sequence: Array  # (n,): the sequence of each tile; N for tiles that are not used
    starts: Array  # (n,): whether a tile is the first one of its sequence
    tile_of: Array  # (T,): the tile of each token
    step_of: Array  # (T,): its step in that tile
    inside: Array  # (T,): whether a token belongs to a sequence
    last: Array  # (N,): the last tile of each sequence
    empty: Array  # (N,): whether a sequence has no steps


class Tiling(NamedTuple):
    """The tiles of one call."""

    steps: int  # L, of one tile
    tiles: int  # n
    length: int  # T
    packing: Packing | None  # None for a dense batch

    def split(self, x: Array, fill: float = 0.0) -> Array:
        """Return (B, T, heads, ...) as tiles (n, R, heads, L, ...), with ``fill`` in steps that are not there."""
        if self.packing is not None:
            valid = self.packing.valid.reshape(*self.packing.valid.shape, *[1] * (x.ndim - 2))
            return jnp.moveaxis(jnp.where(valid, x[0][self.packing.token], fill), 1, 2)[:, None]
        missing = self.tiles * self.steps - self.length
        if missing:
            x = jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)
        x = x.reshape(x.shape[0], self.tiles, self.steps, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    def join(self, tiles: Array) -> Array:
        """Return (n, R, heads, L, ...) as (B, T, heads, ...), with zeros at tokens outside of all sequences."""
        if self.packing is not None:
            x = jnp.moveaxis(tiles[:, 0], 2, 1)[self.packing.tile_of, self.packing.step_of]
            inside = self.packing.inside.reshape(-1, *[1] * (x.ndim - 1))
            return jnp.where(inside, x, 0)[None]
        x = jnp.moveaxis(tiles, (0, 2), (1, 3))
        return x.reshape(x.shape[0], self.tiles * self.steps, *x.shape[3:])[:, : self.length]


def tiling(length: int, steps: int, cu_seqlens: Array | None, offsets: tuple[int, ...] | None) -> Tiling:
    """Return the tiles of sequences of ``length`` steps, or of packed sequences.

    Args:
        length: T.
        steps: the steps of a tile.
        cu_seqlens: the offsets of packed sequences (N + 1,). They are clamped to [0, T] and to values that never fall.
        offsets: the same where they are known when the call is traced; there are then no unused tiles.
    """
    if offsets is not None:
        lengths = np.diff(offsets)
        bound = int(sum(-(-lengths // steps)))
        return Tiling(steps, bound, length, _packing(jnp.asarray(offsets, jnp.int32), length, steps, bound))
    if cu_seqlens is not None:
        bound = length if steps == 1 else length // steps + cu_seqlens.shape[0] - 1
        at = jnp.clip(cu_seqlens.astype(jnp.int32), 0, length)
        at = jnp.max(jnp.where(jnp.tri(at.shape[0], dtype=bool), at, 0), 1)
        return Tiling(steps, bound, length, _packing(at, length, steps, bound))
    return Tiling(steps, -(-length // steps), length, None)


def _packing(at: Array, length: int, steps: int, bound: int) -> Packing:
    """Return the tiles of packed sequences from their offsets, which go up within [0, length]."""
    count = -(-(at[1:] - at[:-1]) // steps)  # tiles of each sequence
    last = jnp.cumsum(count)
    first = last - count
    tile = jnp.arange(bound, dtype=jnp.int32)
    sequence = jnp.searchsorted(last, tile, side="right").astype(jnp.int32)
    row = jnp.minimum(sequence, at.shape[0] - 2)
    used = sequence < at.shape[0] - 1
    own = tile - first[row]
    token = (at[row] + own * steps)[:, None] + jnp.arange(steps, dtype=jnp.int32)[None]
    valid = used[:, None] & (token < at[row + 1][:, None])
    every = jnp.arange(length, dtype=jnp.int32)
    of = jnp.searchsorted(at, every, side="right").astype(jnp.int32) - 1
    inside = (of >= 0) & (of < at.shape[0] - 1)
    of = jnp.clip(of, 0, at.shape[0] - 2)
    since = every - at[of]
    return Packing(
        jnp.minimum(token, length - 1), valid, sequence, used & (own == 0),
        first[of] + since // steps, since % steps, inside, jnp.maximum(last - 1, 0), count == 0,
    )  # fmt: skip
