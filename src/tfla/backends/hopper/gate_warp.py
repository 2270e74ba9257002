"""The gate warp: it brings the gate vectors of a tile to shared memory, or makes them from the gates."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tfla.backends.hopper.mma import in_three
from tfla.backends.hopper.pipeline import CARRY, OUT, READ, WRITE, barrier, last_stage, place
from tfla.backends.hopper.scheduler import piece, tiles_of
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


class GateRings(NamedTuple):
    """Of the heads of a program one after another, each in STAGES stages."""

    vectors: Any  # READ, WRITE, OUT and CARRY
    weights: Any  # of updates, as the sum of two of low precision
    extra: Any = None  # one more gate vector
    matrix: Any = None  # the weights also as the sum of three, rows of a right operand


class Gater(NamedTuple):
    """What the gaters of a walk are to do."""

    L: Any
    STAGES: Any
    BACK: Any
    SEGMENTED: Any
    EXTRA: Any = None  # which one is `extra`
    PIECES: Any = 1  # of programs that share columns of a state the first has the extra vector, the others zeros
    SKIP: Any = False  # as in `tiles_of`
    HEADS: Any = 1  # of a program, where a piece of work is one of that many heads
    GATERS: Any = 1  # that take turns; those that a kernel starts beyond them do nothing
    OUTPUTS: Any = True  # else the place of OUT has the weights of updates, in float32


@gluon.jit
def load_gates(turn: gl.constexpr, source, rings, full, free, work, tiles_of_head, gater):
    """A gater: one warp brings the gate vectors of a tile, of one head, when it is its turn."""
    L: gl.constexpr = gater.L
    HEADS: gl.constexpr = gater.HEADS
    GATERS: gl.constexpr = gater.GATERS
    layout: gl.constexpr = gl.BlockedLayout([L // 32], [32], [1], [0])
    r = gl.arange(0, L, layout)
    n = turn
    before = 0  # turns of pieces before
    pieces = work.pieces if turn < GATERS else 0
    for index in range(gl.program_id(0), pieces, gl.num_programs(0)):
        b, h, start, steps, tile0 = piece(index, work, L, gater.SEGMENTED)
        tiles = tiles_of(index, start, steps, work, L, gater.BACK, gater.SKIP)
        first = n - before
        if source.MADE == ALL:
            i_gate, f_gate = gates_of_turn(first, b, h, start, steps, tiles, source, r, gater)
        for i in range(first, tiles * HEADS, GATERS):
            t = tile_of_turn(i, tiles, gater)
            head = i % HEADS
            tile = (h * HEADS + head).to(gl.int64) * tiles_of_head + tile0 + t
            if source.MADE == ALL:
                row, column, inter, update, carry = tile_vectors(
                    i_gate, f_gate, t * L + r < steps, source.scale, source.log_scale, source.INPUT_GATE,
                    source.SIGMOID_I, source.SIGMOID_F,
                )  # fmt: skip
                # Those of the next turn, on their way while this one waits for its stage. The compiler is not to know
                # that they follow those of this one: pointers that it moves along take registers.
                later = i + GATERS + (n >> 30)
                i_gate, f_gate = gates_of_turn(later, b, h, start, steps, tiles, source, r, gater)
            else:
                row, column, inter, update, carry = stored_vectors(source, tile, r)
            s, phase = place(n // HEADS, gater.STAGES)
            mbarrier.wait(free.index(s), phase ^ 1)
            at = head * gater.STAGES + s
            g = rings.vectors.index(at)
            g.slice(READ * L, L, 0).store(column if gater.BACK else row)
            g.slice(WRITE * L, L, 0).store(row if gater.BACK else column)
            g.slice(OUT * L, L, 0).store(update if gater.BACK == gater.OUTPUTS else inter)
            g.slice(CARRY * L, L, 0).store(carry)
            if gater.EXTRA is not None:
                has_extra = r * 0 + gl.program_id(1) % gater.PIECES == 0
                extra = source.vectors + tile * (VECTORS * L) + gater.EXTRA * L + r
                rings.extra.index(at).store(gl.load(extra, mask=has_extra, other=0.0))
            put_update_weights(inter if gater.BACK else update, rings, at, L)
            barrier()
            mbarrier.arrive(full.index(s), count=1)
            n += GATERS
        before += tiles * HEADS
    if n == before and turn < GATERS:
        last_stage(n // HEADS, full, free, gater.STAGES, HEADS)


@gluon.jit
def tile_of_turn(i, tiles, gater):
    """Where in its piece the tile of the i-th turn is."""
    return tiles - 1 - i // gater.HEADS if gater.BACK else i // gater.HEADS


@gluon.jit
def gates_of_turn(i, b, h, start, steps, tiles, source, r, gater):
    """Of the i-th turn of a piece, or where it has none zeros."""
    at_i, at_f = gates_of(source, b, h * gater.HEADS + i % gater.HEADS, start)
    return load_gates_of(at_i, at_f, tile_of_turn(i, tiles, gater) * gater.L, steps, r, source)


@gluon.jit
def put_update_weights(update, rings, at, L: gl.constexpr):
    """As the sum of two of low precision. For n of three: where |d| is next to exp(-m), its last digits decide on the
    whole gradient of the denominator."""
    w = rings.weights.index(at)
    high, middle, low = in_three(update, w.dtype)
    w.slice(0, L, 0).store(high)
    w.slice(L, L, 0).store(middle)
    if rings.matrix is not None:
        layout: gl.constexpr = gl.BlockedLayout([8, L // 32], [1, 32], [1, 1], [1, 0])
        row = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, layout)), 1)
        high = gl.expand_dims(gl.convert_layout(high, gl.SliceLayout(0, layout)), 0)
        middle = gl.expand_dims(gl.convert_layout(middle, gl.SliceLayout(0, layout)), 0)
        low = gl.expand_dims(gl.convert_layout(low, gl.SliceLayout(0, layout)), 0)
        rows = gl.where(row == 0, high, gl.where(row == 1, middle, gl.where(row == 2, low, 0.0)))
        rings.matrix.index(at).store(rows.to(w.dtype))
        fence_async_shared()


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
