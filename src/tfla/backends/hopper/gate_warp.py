"""The gate warp: it brings the gate vectors of a tile to shared memory, or makes them from the gates."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tfla.backends.hopper.mma import split_in_three
from tfla.backends.hopper.pipeline import (
    COLUMN_EXPONENT,
    ROW_EXPONENT,
    STATE_WEIGHT,
    TILE_DECAY,
    barrier,
    producer_tail,
    stage_and_phase,
)
from tfla.backends.hopper.scheduler import get_work_tile, num_tiles
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


class GateBuffers(NamedTuple):
    """Of the heads of a program one after another, each in STAGES stages."""

    vectors: Any  # READ, WRITE, OUT and CARRY
    weights: Any  # of updates, as the sum of two of low precision
    extra: Any = None  # one more gate vector
    matrix: Any = None  # the weights also as the sum of three, rows of a right operand


class GateWarpConfig(NamedTuple):
    """What the gaters of a walk are to do."""

    L: Any
    STAGES: Any
    REVERSE: Any
    IS_SEGMENTED: Any
    EXTRA: Any = None  # which one is `extra`
    NUM_SPLITS: Any = 1  # of programs that share columns of a state the first has the extra vector, the others zeros
    SKIP_LAST: Any = False  # as in `num_tiles`
    HEADS: Any = 1  # of a program, where a piece of work is one of that many heads
    GATE_WARPS: Any = 1  # that take turns; those that a kernel starts beyond them do nothing
    HAS_OUTPUT: Any = True  # else the place of OUT has the weights of updates, in float32


@gluon.jit
def run_gate_warp(warp_index: gl.constexpr, source, buffers, full, empty, params, tiles_per_head, config):
    """A gater: one warp brings the gate vectors of a tile, of one head, when it is its turn."""
    L: gl.constexpr = config.L
    HEADS: gl.constexpr = config.HEADS
    GATE_WARPS: gl.constexpr = config.GATE_WARPS
    layout: gl.constexpr = gl.BlockedLayout([L // 32], [32], [1], [0])
    r = gl.arange(0, L, layout)
    n = warp_index
    before = 0  # turns of pieces before
    num_work_tiles = params.num_work_tiles if warp_index < GATE_WARPS else 0
    for index in range(gl.program_id(0), num_work_tiles, gl.num_programs(0)):
        b, h, start, steps, tile0 = get_work_tile(index, params, L, config.IS_SEGMENTED)
        tiles = num_tiles(index, start, steps, params, L, config.REVERSE, config.SKIP_LAST)
        first = n - before
        if source.GATES == RECOMPUTED:
            i_gate, f_gate = load_gates_of_iteration(first, b, h, start, steps, tiles, source, r, config)
        for i in range(first, tiles * HEADS, GATE_WARPS):
            t = tile_of_iteration(i, tiles, config)
            head = i % HEADS
            tile = (h * HEADS + head).to(gl.int64) * tiles_per_head + tile0 + t
            if source.GATES == RECOMPUTED:
                row, column, inter, update, decay = compute_gate_vectors(
                    i_gate, f_gate, t * L + r < steps, source.scale, source.log_scale, source.INPUT_GATE,
                    source.SIGMOID_I, source.SIGMOID_F,
                )  # fmt: skip
                # Those of the next turn, on their way while this one waits for its stage. The compiler is not to know
                # that they follow those of this one: pointers that it moves along take registers.
                later = i + GATE_WARPS + (n >> 30)
                i_gate, f_gate = load_gates_of_iteration(later, b, h, start, steps, tiles, source, r, config)
            else:
                row, column, inter, update, decay = load_gate_vectors(source, tile, r)
            s, phase = stage_and_phase(n // HEADS, config.STAGES)
            mbarrier.wait(empty.index(s), phase ^ 1)
            at = head * config.STAGES + s
            g = buffers.vectors.index(at)
            g.slice(ROW_EXPONENT * L, L, 0).store(column if config.REVERSE else row)
            g.slice(COLUMN_EXPONENT * L, L, 0).store(row if config.REVERSE else column)
            g.slice(STATE_WEIGHT * L, L, 0).store(update if config.REVERSE == config.HAS_OUTPUT else inter)
            g.slice(TILE_DECAY * L, L, 0).store(decay)
            if config.EXTRA is not None:
                has_extra = r * 0 + gl.program_id(1) % config.NUM_SPLITS == 0
                extra = source.vectors + tile * (VECTORS * L) + config.EXTRA * L + r
                buffers.extra.index(at).store(gl.load(extra, mask=has_extra, other=0.0))
            store_update_weights(inter if config.REVERSE else update, buffers, at, L)
            barrier()
            mbarrier.arrive(full.index(s), count=1)
            n += GATE_WARPS
        before += tiles * HEADS
    if n == before and warp_index < GATE_WARPS:
        producer_tail(n // HEADS, full, empty, config.STAGES, HEADS)


@gluon.jit
def tile_of_iteration(i, tiles, config):
    """Where in its piece the tile of the i-th turn is."""
    return tiles - 1 - i // config.HEADS if config.REVERSE else i // config.HEADS


@gluon.jit
def load_gates_of_iteration(i, b, h, start, steps, tiles, source, r, config):
    """Of the i-th turn of a piece, or where it has none zeros."""
    at_i, at_f = gate_pointers(source, b, h * config.HEADS + i % config.HEADS, start)
    return load_tile_gates(at_i, at_f, tile_of_iteration(i, tiles, config) * config.L, steps, r, source)


@gluon.jit
def store_update_weights(update, buffers, at, L: gl.constexpr):
    """As the sum of two of low precision. For n of three: where |d| is next to exp(-m), its last digits decide on the
    whole gradient of the denominator."""
    w = buffers.weights.index(at)
    high, middle, low = split_in_three(update, w.dtype)
    w.slice(0, L, 0).store(high)
    w.slice(L, L, 0).store(middle)
    if buffers.matrix is not None:
        layout: gl.constexpr = gl.BlockedLayout([8, L // 32], [1, 32], [1, 1], [1, 0])
        row = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, layout)), 1)
        high = gl.expand_dims(gl.convert_layout(high, gl.SliceLayout(0, layout)), 0)
        middle = gl.expand_dims(gl.convert_layout(middle, gl.SliceLayout(0, layout)), 0)
        low = gl.expand_dims(gl.convert_layout(low, gl.SliceLayout(0, layout)), 0)
        rows = gl.where(row == 0, high, gl.where(row == 1, middle, gl.where(row == 2, low, 0.0)))
        buffers.matrix.index(at).store(rows.to(w.dtype))
        fence_async_shared()


# Which of the gate vectors a walk makes.
LOADED = gl.constexpr(0)
PARTIAL = gl.constexpr(1)  # INTER, UPDATE and DECAY, of the others
RECOMPUTED = gl.constexpr(2)  # of the gates


class GateSource(NamedTuple):
    """Of the gate vectors of a walk."""

    vectors: Any  # (H, tiles, VECTORS, L)
    i_gate: Any  # (B, T, H)
    f_gate: Any
    stride_ib: Any  # strides
    stride_it: Any
    stride_ih: Any
    stride_fb: Any
    stride_ft: Any
    stride_fh: Any
    scale: Any
    log_scale: Any  # base 2
    GATES: Any  # NONE, SOME or ALL, where `vectors` are none
    INPUT_GATE: Any
    SIGMOID_I: Any
    SIGMOID_F: Any


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def compute_gate_vectors(
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
    b = tl.associative_scan(f, 0, _add)
    g = tl.gather(b, inside.to(tl.int32) * 0 + (b.shape[0] - 1), 0)  # a sum would take as long as the scan
    row = b.to(tl.float32)
    column = (i - b + log_scale).to(tl.float32)
    return row, column, tl.exp2(row) * scale, tl.exp2((g - b + i).to(tl.float32)), tl.exp2(g.to(tl.float32))


@gluon.jit
def gate_pointers(source, b, h, start):
    """Pointers to those of a piece of work."""
    i = source.i_gate + (b.to(gl.int64) * source.stride_ib + h.to(gl.int64) * source.stride_ih)
    f = source.f_gate + (b.to(gl.int64) * source.stride_fb + h.to(gl.int64) * source.stride_fh)
    first = gl.to_tensor(start).to(gl.int64)
    return i + first * source.stride_it, f + first * source.stride_ft


@gluon.jit
def load_gate_steps(at, stride, step, steps, r):
    """Steps from `step` on, of those that a piece has."""
    t = step + r
    # What L2 keeps longest: a sector has gates of eight heads, whose programs are not at the same tile.
    return gl.load(at + t.to(gl.int64) * stride, mask=(t >= 0) & (t < steps), other=0.0, eviction_policy="evict_last")


@gluon.jit
def load_tile_gates(at_i, at_f, step, steps, r, source):
    """Of a tile, or where the piece has none zeros; i is f where there is none."""
    f = load_gate_steps(at_f, source.stride_ft, step, steps, r)
    if source.INPUT_GATE:
        return load_gate_steps(at_i, source.stride_it, step, steps, r), f
    else:
        return f, f


@gluon.jit
def load_gate_vectors(source, tile, r):
    """As `compute_gate_vectors`, of the tile-th of all heads."""
    L: gl.constexpr = r.shape[0]
    at = source.vectors + tile * (VECTORS * L) + r
    row = gl.load(at + ROW * L)
    column = gl.load(at + COLUMN * L)
    if source.GATES == PARTIAL:
        total = gl.load(source.vectors + tile * (VECTORS * L) + TOTAL * L + r * 0)
        return row, column, gl.exp2(row) * source.scale, gl.exp2(total + (column - source.log_scale)), gl.exp2(total)
    inter = gl.load(at + INTER * L)
    update = gl.load(at + UPDATE * L)
    return row, column, inter, update, gl.load(at + DECAY * L)
