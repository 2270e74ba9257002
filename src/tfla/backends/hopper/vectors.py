"""Gate vectors: from memory, some of them made of others, or without a normaliser, where nothing beyond a tile has a
part in them, all made of the gates."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tfla.backends.triton.gates import (
    CLOSED,
    COLUMN,
    DECAY,
    INTER,
    ROW,
    TOTAL,
    UPDATE,
    VECTORS,
    exponent,
    finite_log_gate,
)

# Which of the gate vectors a walk makes.
NONE = gl.constexpr(0)
SOME = gl.constexpr(1)  # INTER, UPDATE and DECAY, of the others
ALL = gl.constexpr(2)  # of the gates


class Source(NamedTuple):
    """Of the gate vectors of a walk."""

    vectors: Any  # (H, tiles, VECTORS, L)
    i_gate: Any  # (B, T, H)
    f_gate: Any
    ib: Any  # strides
    it: Any
    ih: Any
    fb: Any
    ft: Any
    fh: Any
    scale: Any
    log_scale: Any  # base 2
    MADE: Any  # NONE, SOME or ALL, where `vectors` are none
    INPUT_GATE: Any
    SIGMOID_I: Any
    SIGMOID_F: Any


@triton.jit
def _added(a, b):
    return a + b


@triton.jit
def tile_vectors(
    i, f, inside, scale, log_scale, INPUT_GATE: tl.constexpr, SIGMOID_I: tl.constexpr, SIGMOID_F: tl.constexpr
):
    """ROW, COLUMN, INTER, UPDATE and DECAY of a tile, of its gates as the model has them.

    As in `chunk_gates`, sums are float64.
    """
    f = tl.where(inside, exponent(finite_log_gate(f, SIGMOID_F, True).to(tl.float64)), 0.0)
    if INPUT_GATE:
        i = tl.where(inside, exponent(finite_log_gate(i, SIGMOID_I, True).to(tl.float64)), CLOSED)
    else:
        i = tl.where(inside, 0.0, CLOSED)
    b = tl.associative_scan(f, 0, _added)
    g = tl.gather(b, inside.to(tl.int32) * 0 + (b.shape[0] - 1), 0)  # a sum would take as long as the scan
    row = b.to(tl.float32)
    column = (i - b + log_scale).to(tl.float32)
    return row, column, tl.exp2(row) * scale, tl.exp2((g - b + i).to(tl.float32)), tl.exp2(g.to(tl.float32))


@gluon.jit
def gates_of(source, b, h, start):
    """Pointers to those of a piece of work."""
    i = source.i_gate + (b.to(gl.int64) * source.ib + h.to(gl.int64) * source.ih)
    f = source.f_gate + (b.to(gl.int64) * source.fb + h.to(gl.int64) * source.fh)
    first = gl.to_tensor(start).to(gl.int64)
    return i + first * source.it, f + first * source.ft


@gluon.jit
def load_gates_at(at, stride, step, steps, r):
    """Steps from `step` on, of those that a piece has."""
    t = step + r
    # What L2 keeps longest: a sector has gates of eight heads, whose programs are not at the same tile.
    return gl.load(at + t.to(gl.int64) * stride, mask=(t >= 0) & (t < steps), other=0.0, eviction_policy="evict_last")


@gluon.jit
def load_gates_of(at_i, at_f, step, steps, r, source):
    """Of a tile, or where the piece has none zeros; i is f where there is none."""
    f = load_gates_at(at_f, source.ft, step, steps, r)
    if source.INPUT_GATE:
        return load_gates_at(at_i, source.it, step, steps, r), f
    else:
        return f, f


@gluon.jit
def stored_vectors(source, tile, r):
    """As `tile_vectors`, of the tile-th of all heads."""
    L: gl.constexpr = r.shape[0]
    at = source.vectors + tile * (VECTORS * L) + r
    row = gl.load(at + ROW * L)
    column = gl.load(at + COLUMN * L)
    if source.MADE == SOME:
        total = gl.load(source.vectors + tile * (VECTORS * L) + TOTAL * L + r * 0)
        return row, column, gl.exp2(row) * source.scale, gl.exp2(total + (column - source.log_scale)), gl.exp2(total)
    inter = gl.load(at + INTER * L)
    update = gl.load(at + UPDATE * L)
    return row, column, inter, update, gl.load(at + DECAY * L)
