"""The chunkwise form on any device: a `lax.scan` over tiles of 64 steps, with the exact closed-form backward.

A sequence is divided into chunks of `chunk_size` steps, and the state before each chunk is stored for the backward,
which computes the states before the tiles of a chunk again. The equations of a tile are in :mod:`tfla.jax.tile`. With
`Spec.axis` the sequence is divided over the devices of a mesh axis: :mod:`tfla.jax.spans` has the exchange of states.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax import spans, tile
from tfla.jax.explicit import across_explicit_axes
from tfla.jax.grid import Grid, Memory, group_heads, last_of_sequences
from tfla.jax.inputs import Inputs, Spec, acc_dtype, vary_alike
from tfla.jax.tile import Carry, Tile
from tfla.jax.tiles import tiling
from tfla.jax.weights import TileGates, tile_gates, weights
from tfla.ops.gates import LOG_GATE_MIN

TILE = 64  # steps of a tile
CHUNK = 1024  # the default chunk size

Results = tuple[Array, Array, Array | None, Array | None]  # h and the final C, n, m


class Problem(NamedTuple):
    """The tiles of one call, in chunks: leading dims (chunks, tiles of a chunk)."""

    tiles: Tile
    gates: TileGates
    sequence: Array | None  # the sequence of each tile, N where there is none; None: not packed
    starts: Array | None  # whether it is the first tile of its sequence; None: not packed


def stored_states(spec: Spec, T: int, rows: int, sequences: int | None) -> int:
    """Return how many states of each head are stored for the backward; ``sequences`` are packed ones."""
    steps = min(TILE, spec.chunk_size, T)
    tiles = -(-T // steps) if sequences is None else T // steps + sequences
    return rows * -(-tiles // max(1, spec.chunk_size // steps))


def _grid(spec: Spec, x: Inputs) -> Grid:
    """Return the tiles of a call, in chunks."""
    T = x.v.shape[1]
    return Grid.of(tiling(T, min(TILE, spec.chunk_size, T), x.cu_seqlens, spec.offsets), spec.chunk_size)


def _gates(spec: Spec, x: Inputs, grid: Grid, m: Array | None) -> TileGates:
    """Return the log-weights of all tiles, in chunks and with groups of heads, from the initial max states m."""
    log_i, log_f = grid.tiling.split(x.log_i, LOG_GATE_MIN), grid.tiling.split(x.log_f)
    gates = tile_gates(log_i, log_f, m, grid.tiling)
    if x.offset is not None:
        gates = gates._replace(offset=grid.tiling.split(x.offset))
    return jax.tree.map(lambda t: grid.chunked(group_heads(t, x.group)) if t.ndim == 4 else grid.chunked(t), gates)


def _problem(spec: Spec, x: Inputs, grid: Grid, gates: TileGates) -> Problem:
    """Return the tiles of a call."""
    dtype = acc_dtype(x.q)
    tiles = Tile(
        grid.split(x.q, dtype=dtype) * spec.scale, grid.split(x.k, dtype=dtype), grid.split(x.v, x.group, dtype)
    )
    return Problem(tiles, gates, *grid.sequences(x.C.shape[0]))


def _carry(x: Inputs, C: Array, n: Array | None) -> Carry:
    """Return states (N, H, ...) with groups of heads, (N, Hq, group, ...)."""
    shape = C.shape[0], x.q.shape[2], x.group
    return Carry(C.reshape(*shape, *C.shape[2:]), None if n is None else n.reshape(*shape, n.shape[2]))


def _states(x: Inputs, carry: Carry) -> tuple[Array, Array | None]:
    """Return the C and n of a carry as (N, H, ...)."""
    n = None if carry.n is None else carry.n.reshape(x.C.shape[:3])
    return carry.C.reshape(x.C.shape), n


def _scan_forward(
    spec: Spec, p: Problem, memory: Memory, save: bool
) -> tuple[Memory, tuple[Array, Array | None], Carry | None]:
    """Compute all tiles: the last memory, h and d of all tiles, and with ``save`` the states before chunks."""
    store = spec.store_dtype

    def one(memory: Memory, at: Problem) -> tuple[Memory, tuple[Array, Array | None]]:
        """Compute a tile."""
        w = weights(at.gates, spec.grows)
        state = memory.load(at.sequence, at.starts)
        found = tile.outputs(at.tiles, w, state, spec.normalize)
        return memory.store(at.sequence, tile.advance(at.tiles, w, state, spec.normalize)), found

    def chunk(memory: Memory, at: Problem) -> tuple[Memory, Any]:
        """Compute the tiles of a chunk, and keep the state before it in the dtype of stored states."""
        before = memory.now
        if store is not None:
            before = before._replace(C=before.C.astype(store))
        memory, found = jax.lax.scan(one, memory, at)
        return memory, (found, before if save else None)

    memory, (found, before) = jax.lax.scan(chunk, memory, p)
    return memory, found, before


class Residuals(NamedTuple):
    """The results of the forward that the backward needs."""

    x: Inputs
    m: Array | None  # (N, H), the max states at the starts of sequences, on this device
    h: Array
    d: Array | None  # of all tiles; None: no normalizer
    gates: TileGates
    before: Carry  # the states before chunks


def _forward(spec: Spec, x: Inputs, save: bool) -> tuple[Results, Residuals | None]:
    """Compute the outputs, the final states and, with ``save``, what the backward needs."""
    grid = _grid(spec, x)
    C, n, m = x.C, x.n, x.m
    if spec.axis is not None:
        C, n, m = spans.initial_state(spec, x, _span_state(spec, x, grid))
    gates = _gates(spec, x, grid, m)
    p = _problem(spec, x, grid, gates)
    memory = Memory.start(_carry(x, C, n), grid.tiling.packing is not None)
    memory, (h, d), before = _scan_forward(spec, p, memory, save)
    h = grid.join(h, True).astype(x.v.dtype)
    C, n = _states(x, memory.last)
    m_end = _last_m(spec, x, grid, gates, m)
    results = h, C, n, m_end
    if not save:
        return results, None
    assert before is not None
    return results, Residuals(x, m, h, d, gates, before)


def _last_m(spec: Spec, x: Inputs, grid: Grid, gates: TileGates, m: Array | None) -> Array | None:
    """Return the max states after the last step of each sequence, (N, H)."""
    if gates.m is None:
        return None
    every = grid.flat(gates.m)
    every = every.reshape(*every.shape[:2], x.v.shape[2], every.shape[-1])
    packing = grid.tiling.packing
    if packing is None or m is None:
        return every[-1, :, :, -1]
    # Steps that a last tile lacks leave m as it is.
    return jnp.where(packing.empty[:, None], m, every[packing.last, 0, :, -1])


def _where(condition: Array, arrays: Any) -> Any:
    """Return the arrays where a condition holds, else zeros."""
    return jax.tree.map(lambda t: jnp.where(condition, t, 0), arrays)


def _span_state(spec: Spec, x: Inputs, grid: Grid) -> spans.Span:
    """Return what this device's part of the sequence does to a state, from k, v and the gates alone.

    The first device starts from the initial state, the others from zero.
    """
    first = jax.lax.axis_index(spec.axis) == 0
    C, n = _where(first, (x.C, x.n))
    m = None if x.m is None else jnp.where(first, x.m, LOG_GATE_MIN)
    gates = _gates(spec, x, grid, m)
    p = _problem(spec, x, grid, gates)

    def one(state: Carry, at: Problem) -> tuple[Carry, None]:
        return tile.advance(at.tiles, weights(at.gates, spec.grows), state, spec.normalize), None

    flat = jax.tree.map(grid.flat, p)
    last, _ = jax.lax.scan(one, _carry(x, C, n), flat)
    return spans.Span(x.log_f.sum(1), *_states(x, last), _last_m(spec, x, grid, gates, m))


def _span_cotangent(spec: Spec, p: Problem, each: tuple[Array, Array | None], last: Carry) -> tuple[Array, Carry]:
    """Return the log-decay of this device's part and the cotangent of the state before it, from that after it."""

    def one(cotangent: Carry, at: tuple[Problem, Any]) -> tuple[Carry, Array]:
        p, (do, dd) = at
        w = weights(p.gates, spec.grows)
        return tile.retreat(p.tiles, w, do, dd, cotangent), w.log_inter[..., -1]

    flat = jax.tree.map(lambda t: t.reshape(t.shape[0] * t.shape[1], *t.shape[2:]), (p, each))
    cotangent, log_decays = jax.lax.scan(one, last, flat, reverse=True)
    return log_decays.sum(0), cotangent


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(spec: Spec, x: Inputs) -> Results:
    """Compute h (B, T, H, dhv) and the final C, n and m, of which m carries no gradient.

    With `Spec.axis` the initial state is read on the first device only, and the final one is that of the last device.
    """
    return _forward(spec, x, False)[0]


def _attend_forward(spec: Spec, x: Inputs) -> tuple[Results, Residuals]:
    results, kept = _forward(spec, x, True)
    assert kept is not None
    return results, kept


def _attend_backward(spec: Spec, kept: Residuals, cotangents: Results) -> tuple[Inputs]:
    """Compute the exact gradients, from the last chunk to the first (docs/mathematics.md)."""
    x, dtype = kept.x, acc_dtype(kept.x.q)
    dh, dC, dn, _ = cotangents
    grid = _grid(spec, x)
    p = _problem(spec, x, grid, kept.gates)
    h, dh = (grid.split(t, x.group, dtype) for t in (kept.h, dh))
    last = _carry(x, dC, dn)

    def cotangents_of(at: Problem, h: Array, d: Array | None, dh: Array) -> tuple[Array, Array | None]:
        """Return the cotangents of the numerator and the denominator of a tile, (B1)."""
        if d is None:
            return dh, None
        return tile.output_cotangents(h, d, dh, weights(at.gates, spec.grows), spec.normalizer_grad)

    if spec.axis is not None:
        is_last = jax.lax.axis_index(spec.axis) == jax.lax.axis_size(spec.axis) - 1
        last = _where(is_last, last)
        each = jax.vmap(jax.vmap(cotangents_of))(p, h, kept.d, dh)
        last = spans.final_cotangent(spec, *_span_cotangent(spec, p, each, last), last)
    packed = grid.tiling.packing is not None
    memory = Memory.start(last, packed)
    initial = _carry(x, x.C, x.n)

    def rebuild(state: Carry, at: Problem) -> tuple[Carry, Carry]:
        """Return the state after a tile and that before it, which the backward reads."""
        state = Memory(state, initial if packed else None).load(at.sequence, at.starts)
        return tile.advance(at.tiles, weights(at.gates, spec.grows), state, spec.normalize), state

    def one(memory: Memory, at: Any) -> tuple[Memory, tile.Gradients]:
        """Compute the gradients of a tile, and the cotangent of the state before it."""
        p, h, d, dh, state, ends = at
        cotangent = memory.load(p.sequence, ends)
        w = weights(p.gates, spec.grows)
        do, dd = cotangents_of(p, h, d, dh)
        found = tile.gradients(p.tiles, w, do, dd, state, cotangent)
        return memory.store(p.sequence, tile.retreat(p.tiles, w, do, dd, cotangent)), found

    def chunk(memory: Memory, at: Any) -> tuple[Memory, tile.Gradients]:
        """Compute the states before the tiles of a chunk again, then the gradients from its last tile to its first."""
        p, h, d, dh, before, ends = at
        before = jax.tree.map(lambda t, like: t.astype(like.dtype), before, memory.now)
        _, states = jax.lax.scan(rebuild, before, p)
        return jax.lax.scan(one, memory, (p, h, d, dh, states, ends), reverse=True)

    ends = None if p.sequence is None else last_of_sequences(p.sequence)
    memory, g = jax.lax.scan(chunk, memory, (p, h, kept.d, dh, kept.before, ends), reverse=True)
    dC0, dn0 = _states(x, memory.last)
    dm0 = None
    if spec.axis is not None:  # the others' initial states are not read
        dC0, dn0 = _where(jax.lax.axis_index(spec.axis) == 0, (dC0, dn0))
    d_offset = None
    if x.offset is not None:
        D = jax.vmap(jax.vmap(lambda gates, d: weights(gates, False).denominator(d)))(kept.gates, kept.d)
        d_offset = grid.join(-(dh * h).sum(-1) / D, True)
    if x.n is not None and dn0 is not None:
        dm0 = (x.C * dC0).sum((-2, -1)) + (x.n * dn0).sum(-1)
    return (
        Inputs(
            grid.join(g.q * spec.scale).astype(x.q.dtype), grid.join(g.k).astype(x.k.dtype),
            grid.join(g.v, True).astype(x.v.dtype), grid.join(g.log_i, True), grid.join(g.log_f, True),
            dC0, dn0, dm0, None, d_offset,
        ),
    )  # fmt: skip


attend.defvjp(_attend_forward, _attend_backward)


@across_explicit_axes
@functools.partial(jax.jit, static_argnums=0)
def compute(spec: Spec, x: Inputs) -> Results:
    """Compute :func:`attend` as one compiled function, also where the caller is not compiled."""
    return attend(spec, Inputs(*vary_alike(*x)))
