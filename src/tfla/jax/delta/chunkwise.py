"""The chunkwise form of the delta rule on any device: a `lax.scan` over tiles, with the exact closed-form backward.

As in :mod:`tfla.jax.chunkwise`, the state before each chunk is stored for the backward, which computes the states and
the prediction errors of a chunk again. What does not depend on the state is computed for all tiles of a chunk at once.
With `DeltaSpec.axis` the sequence is divided over the devices of a mesh axis: :mod:`.spans` has the exchange of states.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax.chunkwise import TILE
from tfla.jax.delta import spans, tile
from tfla.jax.delta.inputs import DeltaArrays, DeltaInputs, DeltaSpec, activated
from tfla.jax.delta.spans import Action
from tfla.jax.delta.tile import Tile
from tfla.jax.explicit import across_explicit_axes
from tfla.jax.grid import Grid, Memory, last_of_sequences
from tfla.jax.inputs import acc_dtype
from tfla.jax.tile import Carry
from tfla.jax.tiles import tiling

Results = tuple[Array, Array]  # h and the final C


class Problem(NamedTuple):
    """The tiles of one call, in chunks: leading dims (chunks, tiles of a chunk)."""

    tiles: Tile
    sequence: Array | None  # the sequence of each tile, N where there is none; None: not packed
    starts: Array | None  # whether it is the first tile of its sequence; None: not packed


def tile_steps(T: int, chunk_size: int) -> int:
    """Return the steps of a tile: the largest power of 2 that is at most 64 and `chunk_size`, and that T needs."""
    steps = min(TILE, chunk_size)
    return min(1 << (steps.bit_length() - 1), 1 << (T - 1).bit_length())


def stored_states(chunk_size: int, T: int, rows: int, sequences: int | None) -> int:
    """Return how many states of each head are stored for the backward; ``sequences`` are packed ones."""
    steps = tile_steps(T, chunk_size)
    tiles = -(-T // steps) if sequences is None else T // steps + sequences
    return rows * -(-tiles // max(1, chunk_size // steps))


def _grid(spec: DeltaSpec, x: DeltaInputs) -> Grid:
    """Return the tiles of a call, in chunks. Steps that a last tile lacks have no write, no decay and no query."""
    T = x.v.shape[1]
    return Grid.of(tiling(T, tile_steps(T, spec.chunk_size), x.cu_seqlens, spec.offsets), spec.chunk_size)


def _problem(spec: DeltaSpec, x: DeltaInputs, grid: Grid) -> Problem:
    """Return the tiles of a call."""
    dtype = acc_dtype(x.q)
    tiles = Tile(
        grid.split(x.q, dtype=dtype) * spec.rule.scale, grid.split(x.k, dtype=dtype), grid.split(x.v, x.group, dtype),
        grid.split(x.beta, x.group), grid.split(x.log_f, x.group),
        None if x.read_key is None else grid.split(x.read_key, dtype=dtype),
    )  # fmt: skip
    return Problem(tiles, *grid.sequences(x.C.shape[0]))


def _carry(x: DeltaInputs, C: Array) -> Carry:
    """Return states (N, H, ...) with groups of heads, (N, Hq, group, ...), as a carry without a normalizer."""
    return Carry(C.reshape(C.shape[0], x.q.shape[2], x.group, *C.shape[2:]), None)


def _states(x: DeltaInputs, carry: Carry) -> Array:
    """Return the states of a carry as (N, H, dqk, dhv)."""
    return carry.C.reshape(x.C.shape)


def _through(memory: Memory, at: Any) -> tuple[Memory, tuple[Array, Array]]:
    """Advance the state by one tile: the state before it, and its prediction errors."""
    m, sequence, starts = at
    C = memory.load(sequence, starts).C
    E, after = tile.advance(m, C)
    return memory.store(sequence, memory.now._replace(C=after)), (C, E)


def _forward(spec: DeltaSpec, x: DeltaInputs, C: Array, save: bool) -> tuple[Results, Carry | None]:
    """Compute h and the final states from states C before the first tile, and with ``save`` those before chunks."""
    grid = _grid(spec, x)
    memory = Memory.start(_carry(x, C), grid.tiling.packing is not None)

    def chunk(memory: Memory, at: Problem) -> tuple[Memory, Any]:
        """Compute the tiles of a chunk: the states and errors one tile after another, then h of all of them."""
        before, b = memory.now, tile.prepare(spec.rule, at.tiles)
        memory, (C, E) = jax.lax.scan(_through, memory, (b.moves, at.sequence, at.starts))
        h = b.moves.q_in @ C + tile.query_scores(b) @ (b.moves.beta * E)
        return memory, (h, before if save else None)

    memory, (h, before) = jax.lax.scan(chunk, memory, _problem(spec, x, grid))
    return (grid.join(h, True).astype(x.v.dtype), _states(x, memory.last)), before


def _own_action(spec: DeltaSpec, x: DeltaInputs) -> Action:
    """Return how this device's part of the sequence acts on a state; that of the first one begins with the given state.

    With a correction, the matrix is what the steps make of the identity where they write no values.
    """
    assert spec.axis is not None
    grid, V = _grid(spec, x), x.v.shape[3]
    C = _carry(x, jnp.where(jax.lax.axis_index(spec.axis) == 0, x.C, 0)).C

    def one(C: Array, m: tile.Moves) -> tuple[Array, None]:
        return tile.advance(m, C)[1], None

    def chunk(C: Array, at: Tile) -> tuple[Array, None]:
        m = tile.prepare(spec.rule, at).moves
        return jax.lax.scan(one, C, tile.without_values(m) if spec.rule.correct else m)

    start = tile.with_identity(C) if spec.rule.correct else C
    last, _ = jax.lax.scan(chunk, start, _problem(spec, x, grid).tiles)
    if spec.rule.correct:
        return Action(last[..., V:], last[..., :V])
    return Action(jnp.exp(x.log_f.sum(1)).reshape(*C.shape[:3], x.log_f.shape[3], 1), last)


def _own_cotangent(spec: DeltaSpec, tiles: Tile, do: Array, last: Array) -> Array:
    """Return the cotangent of the state before this device's part, from that after it and from the outputs."""

    def one(dC: Array, at: Any) -> tuple[Array, None]:
        m, from_queries, do = at
        return tile.retreat(m, from_queries, do, dC)[1], None

    def chunk(dC: Array, at: Any) -> tuple[Array, None]:
        tiles, do = at
        b = tile.prepare(spec.rule, tiles)
        return jax.lax.scan(one, dC, (b.moves, tile.query_scores(b).mT @ do, do), reverse=True)

    return jax.lax.scan(chunk, last, (tiles, do), reverse=True)[0]


class Residuals(NamedTuple):
    """The results of the forward that the backward needs."""

    x: DeltaInputs
    before: Carry  # the states before chunks
    A: Array | None  # the transition of this device's part, with `DeltaSpec.axis`


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(spec: DeltaSpec, x: DeltaInputs) -> Results:
    """Compute h (B, T, H, dhv) and the final C.

    With `DeltaSpec.axis` the initial state is read on the first device only, and the final one is that after the part
    of each device.
    """
    return _forward(spec, x, _start(spec, x)[0], False)[0]


def _start(spec: DeltaSpec, x: DeltaInputs) -> tuple[Array, Array | None]:
    """Return the state before the first step on this device, and the transition of its part of the sequence."""
    if spec.axis is None:
        return x.C, None
    own = _own_action(spec, x)
    return spans.initial_state(spec, _carry(x, x.C).C, own).reshape(x.C.shape), own.A


def _attend_forward(spec: DeltaSpec, x: DeltaInputs) -> tuple[Results, Residuals]:
    C, A = _start(spec, x)
    results, before = _forward(spec, x, C, True)
    assert before is not None
    return results, Residuals(x, before, A)


def _attend_backward(spec: DeltaSpec, kept: Residuals, cotangents: Results) -> tuple[DeltaInputs]:
    """Compute the exact gradients, from the last chunk to the first (docs/delta-rule.md)."""
    x, (dh, last) = kept.x, cotangents
    grid = _grid(spec, x)
    p = _problem(spec, x, grid)
    packed = grid.tiling.packing is not None
    initial = _carry(x, x.C)
    ends = None if p.sequence is None else last_of_sequences(p.sequence)

    def back(memory: Memory, at: Any) -> tuple[Memory, tuple[Array, Array]]:
        """Take the cotangent of the state back by one tile."""
        m, from_queries, do, sequence, end = at
        dC = memory.load(sequence, end).C
        Z, before = tile.retreat(m, from_queries, do, dC)
        return memory.store(sequence, memory.now._replace(C=before)), (Z, dC)

    def chunk(memory: Memory, at: Any) -> tuple[Memory, Tile]:
        """Compute the states and errors of a chunk again, take the cotangent back through it, then all gradients."""
        p, do, before, ends = at
        b = tile.prepare(spec.rule, p.tiles)
        rebuilt = Memory(before, initial if packed else None)
        _, (C, E) = jax.lax.scan(_through, rebuilt, (b.moves, p.sequence, p.starts))
        from_queries = tile.query_scores(b).mT @ do
        moves = b.moves, from_queries, do, p.sequence, ends
        memory, (Z, dC) = jax.lax.scan(back, memory, moves, reverse=True)
        return memory, tile.gradients(spec.rule, b, do, E, Z, C, dC)

    do = grid.split(dh, x.group, acc_dtype(x.q))
    end = _carry(x, last)
    if spec.axis is not None and kept.A is not None:
        rank, size = jax.lax.axis_index(spec.axis), jax.lax.axis_size(spec.axis)
        dC = jnp.where(rank == size - 1, end.C, 0)
        own = Action(kept.A, _own_cotangent(spec, p.tiles, do, dC))
        end = end._replace(C=spans.final_cotangent(spec, dC, own))
    memory = Memory.start(end, packed)
    memory, g = jax.lax.scan(chunk, memory, (p, do, kept.before, ends), reverse=True)
    dC0 = _states(x, memory.last)
    if spec.axis is not None:  # the others' initial states are not read
        dC0 = jnp.where(jax.lax.axis_index(spec.axis) == 0, dC0, 0)
    return (
        DeltaInputs(
            grid.join(g.q * spec.rule.scale).astype(x.q.dtype), grid.join(g.k).astype(x.k.dtype),
            grid.join(g.v, True).astype(x.v.dtype), grid.join(g.beta, True), grid.join(g.log_f, True),
            None if g.read_key is None else grid.join(g.read_key).astype(x.q.dtype), dC0, None,
        ),
    )  # fmt: skip


attend.defvjp(_attend_forward, _attend_backward)


@across_explicit_axes
@functools.partial(jax.jit, static_argnums=0)
def compute(spec: DeltaSpec, x: DeltaArrays) -> Results:
    """Compute :func:`attend` of arrays before their activations as one compiled function."""
    return attend(spec, activated(spec.rule, x, spec.sequences))
