"""The chunks of tiles of one call, and the state that runs through them, of dense batches and of packed sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax.tile import Carry
from tfla.jax.tiles import Tiling


class Grid(NamedTuple):
    """The numbers of chunks and tiles of one call."""

    tiling: Tiling
    chunks: int
    per_chunk: int  # tiles

    @staticmethod
    def of(tiling: Tiling, chunk_size: int) -> Grid:
        """Return the tiles in chunks of as equal numbers of tiles as possible, of at most `chunk_size` steps."""
        chunks = -(-tiling.tiles // max(1, chunk_size // tiling.steps))
        return Grid(tiling, chunks, -(-tiling.tiles // chunks))

    def chunked(self, x: Array) -> Array:
        """Return x (n, ...) as (chunks, tiles of a chunk, ...); tiles that are missing are 0."""
        missing = self.chunks * self.per_chunk - x.shape[0]
        if missing:
            x = jnp.concatenate([x, jnp.zeros((missing, *x.shape[1:]), x.dtype)])
        return x.reshape(self.chunks, self.per_chunk, *x.shape[1:])

    def flat(self, x: Array) -> Array:
        """Return (chunks, tiles of a chunk, ...) as (n, ...)."""
        return x.reshape(self.chunks * self.per_chunk, *x.shape[2:])[: self.tiling.tiles]

    def split(self, x: Array, group: int = 0, dtype: Any = None) -> Array:
        """Return (B, T, heads, ...) as tiles in chunks; with `group`, heads that share q and k have their own dim."""
        tiles = self.tiling.split(x)
        tiles = tiles if dtype is None else tiles.astype(dtype)
        return self.chunked(group_heads(tiles, group) if group else tiles)

    def join(self, x: Array, grouped: bool = False) -> Array:
        """Return tiles in chunks as (B, T, heads, ...)."""
        x = self.flat(x)
        if grouped:
            x = x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])
        return self.tiling.join(x)

    def sequences(self, count: int) -> tuple[Array | None, Array | None]:
        """Return the sequence of each tile, `count` where there is none, and whether it is the first of its sequence.

        Without packed sequences both are None.
        """
        packing = self.tiling.packing
        if packing is None:
            return None, None
        # Tiles that fill up the last chunk are of no sequence.
        return self.chunked(packing.sequence - count) + count, self.chunked(packing.starts)


def last_of_sequences(sequence: Array) -> Array:
    """Return whether each tile is the last one of its sequence: the next one is of another."""
    every = sequence.ravel()
    return jnp.concatenate([every[1:] != every[:-1], jnp.ones(1, bool)]).reshape(sequence.shape)


def group_heads(x: Array, group: int) -> Array:
    """Return (n, R, H, ...) as (n, R, Hq, group, ...)."""
    return x.reshape(*x.shape[:2], x.shape[2] // group, group, *x.shape[3:])


class Memory(NamedTuple):
    """The states that a scan over tiles carries.

    A dense batch has one state for each row, `now`. Packed sequences share one row: where a tile starts a sequence, the
    state of that sequence replaces the running one.
    """

    now: Carry  # the running state
    every: Carry | None  # of packed sequences, the state after the last tile so far of each, at first the initial one

    @staticmethod
    def start(states: Carry, packed: bool) -> Memory:
        """Return the memory before the first tile, from the initial states of all sequences."""
        if not packed:
            return Memory(states, None)
        return Memory(jax.tree.map(lambda t: t[:1], states), states)

    def load(self, sequence: Array | None, when: Array | None) -> Carry:
        """Return the running state, or where ``when`` is true the state of the sequence that a tile belongs to."""
        if self.every is None:
            return self.now
        assert sequence is not None
        assert when is not None
        row = jnp.minimum(sequence, self.every.C.shape[0] - 1)
        return jax.tree.map(lambda now, kept: jnp.where(when, kept[row][None], now), self.now, self.every)

    def store(self, sequence: Array | None, now: Carry) -> Memory:
        """Return the memory after a tile of a sequence: ``now`` is the running state and that of the sequence."""
        if self.every is None:
            return Memory(now, None)
        kept = jax.tree.map(lambda kept, now: kept.at[sequence].set(now[0], mode="drop"), self.every, now)
        return Memory(now, kept)

    @property
    def last(self) -> Carry:
        """The states of all sequences."""
        return self.now if self.every is None else self.every
