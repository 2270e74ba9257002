"""The gate warp, which stores the gate vectors of each tile to shared memory.

For each tile and head it stores, in the names of `docs/mathematics.md`:

    vector            with time     against time
    ROW_EXPONENT      ROW           COLUMN           exponents of the gate matrix by output step
    COLUMN_EXPONENT   COLUMN        ROW              exponents of the gate matrix by update step
    STATE_WEIGHT      INTER, a      UPDATE, w        weight of the state in each output
    update weights    UPDATE, w     INTER, a'        weight of each step in the update of the state
    TILE_DECAY        DECAY, g      DECAY, g         decay of the state over the tile

Either a gate kernel has written all of them to global memory (LOADED), or it has written ROW, COLUMN and the sum TOTAL
of a tile, from which the gate warp computes the rest (PARTIAL), or the gate warp computes all of them from the gates
(RECOMPUTED). The last is possible without a normalizer, since no gate vector then depends on other tiles. A kernel can
start several gate warps, which take tiles in turn.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tfla.backends.gpu import gate_kernels
from tfla.backends.gpu.context import LaunchContext
from tfla.backends.gpu.gate_kernels import (
    CLOSED,
    COLUMN,
    DECAY,
    INTER,
    ROW,
    TOTAL,
    UPDATE,
    VECTORS,
    base2_exponent,
    finite_log_gate,
)
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

# Values of GATES: which gate vectors the gate warp computes.
LOADED = gl.constexpr(0)  # none
PARTIAL = gl.constexpr(1)  # INTER, UPDATE and DECAY, from the others
RECOMPUTED = gl.constexpr(2)  # all, from the gates


class GateSource(NamedTuple):
    """The source of the gate vectors of a kernel: the vectors in global memory, or the gates that the caller gave."""

    vectors: Any  # (H, tiles, VECTORS, L), float32, unused with RECOMPUTED
    i_gate: Any  # input gates, (B, T, H), read with RECOMPUTED
    f_gate: Any  # forget gates, (B, T, H), read with RECOMPUTED
    stride_ib: Any  # strides of the gates: input or forget, by batch row, token and head
    stride_it: Any
    stride_ih: Any
    stride_fb: Any
    stride_ft: Any
    stride_fh: Any
    scale: Any  # the factor of q
    log_scale: Any  # its logarithm in base 2
    GATES: Any  # LOADED, PARTIAL or RECOMPUTED
    INPUT_GATE: Any  # with RECOMPUTED: whether there is an input gate
    SIGMOID_I: Any  # with RECOMPUTED: whether log i is logsigmoid(i), not i
    SIGMOID_F: Any  # with RECOMPUTED: whether log f is logsigmoid(f), not f
    # With WRITES: 1 / |k|, and that of q or k, which reads, (B, T, H) float32; None: q and k are as they are.
    key_norms: Any = None
    reader_norms: Any = None


class GateBuffers(NamedTuple):
    """The shared memory of the gate vectors: for each head of the program STAGES stages, (heads * STAGES, ...)."""

    vectors: Any  # (…, NUM_GATE_VECTORS L), float32: ROW_EXPONENT, COLUMN_EXPONENT, STATE_WEIGHT, TILE_DECAY
    weights: Any  # (…, 2 L), 16-bit: the update weights as a sum of two
    extra: Any = None  # (…, L), float32: the gate vector EXTRA
    matrix: Any = None  # (…, 8, L), 16-bit: the update weights as a sum of three rows, a right operand
    same: Any = None  # (…, L), float32: with WRITES do . E of each step, times beta and `scale`


class GateWarpConfig(NamedTuple):
    """The constants of the gate warps of a kernel."""

    L: Any  # steps of a tile
    STAGES: Any  # stages of the ring
    REVERSE: Any  # whether the scan goes against time
    IS_SEGMENTED: Any  # whether sequences are cut into segments, each a work tile
    EXTRA: Any = None  # index of one more gate vector that the consumers need, FLOOR or DELTA_P
    NUM_SPLITS: Any = 1  # programs that share the columns of a state: the first has EXTRA, the others zeros instead
    SKIP_LAST: Any = False  # whether the last segment of a sequence has no tiles, see `num_tiles`
    HEADS: Any = 1  # heads that a program computes at once; a work tile is then one of that many heads
    GATE_WARPS: Any = 1  # gate warps that share the tiles; a warp with a higher index does nothing
    HAS_OUTPUT: Any = True  # without outputs STATE_WEIGHT has the update weights instead, in float32
    WRITES: Any = False  # the delta rule: `i_gate` is beta, `scale` a factor of reads, `f_gate` do . E for `same`


@gluon.jit
def run_gate_warp(warp_index: gl.constexpr, source, buffers, full, empty, params, tiles_per_head, config):
    """Store the gate vectors of the tiles of one gate warp.

    An iteration is one tile of one head: iteration i of a work tile is head i % HEADS of its tile i // HEADS in the
    direction of the scan. Warp w of GATE_WARPS takes every GATE_WARPS-th iteration from w on, over all work tiles.

    Args:
        warp_index: Which gate warp of the kernel this is.
        source: Where the gate vectors come from.
        buffers: Where they go in shared memory.
        full: Full barriers of the ring, (STAGES).
        empty: Empty barriers of the ring, (STAGES).
        params: The numbers of the scheduler.
        tiles_per_head: Tiles of one head over all batch rows.
        config: Constants.
    """
    L: gl.constexpr = config.L
    HEADS: gl.constexpr = config.HEADS
    GATE_WARPS: gl.constexpr = config.GATE_WARPS
    layout: gl.constexpr = gl.BlockedLayout([L // 32], [32], [1], [0])
    r = gl.arange(0, L, layout)
    n = warp_index  # iterations before the current one, over all work tiles
    before = 0  # iterations of the work tiles before this one
    num_work_tiles = params.num_work_tiles if warp_index < GATE_WARPS else 0
    for index in range(gl.program_id(1), num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, first_tile = get_work_tile(index, params, L, config.IS_SEGMENTED)
        tiles = num_tiles(index, start, steps, params, L, config.REVERSE, config.SKIP_LAST)
        first = n - before
        if source.GATES == RECOMPUTED:
            i_gate, f_gate = load_gates_of_iteration(first, b, h, start, steps, tiles, source, r, config)
        for i in range(first, tiles * HEADS, GATE_WARPS):
            t = tile_of_iteration(i, tiles, config)
            head = i % HEADS
            tile = (h * HEADS + head).to(gl.int64) * tiles_per_head + first_tile + t
            # (1) The gate vectors of the tile, (L) each.
            if source.GATES == RECOMPUTED:
                row, column, inter, update, decay = compute_gate_vectors(
                    i_gate, f_gate, t * L + r < steps, source.scale, source.log_scale, source.INPUT_GATE,
                    source.SIGMOID_I, source.SIGMOID_F,
                )  # fmt: skip
                # Load the gates of the next iteration while this one waits for its stage. `n >> 30` is 0; it hides from
                # the compiler that these addresses follow the current ones, for which it would keep pointers.
                later = i + GATE_WARPS + (n >> 30)
                i_gate, f_gate = load_gates_of_iteration(later, b, h, start, steps, tiles, source, r, config)
            else:
                row, column, inter, update, decay = load_gate_vectors(source, tile, r)
            if config.WRITES:
                at_beta, at_same = gate_pointers(source, b, h, start)
                beta = load_gate_steps(at_beta, source.stride_it, t * L, steps, r).to(gl.float32)  # (L)
                inter = inter * source.scale
                if source.key_norms is not None:  # factors of what steps write and read
                    at_norms = (b.to(gl.int64) * params.T + start + t * L + r) * params.H + h
                    exists = t * L + r < steps
                    beta *= gl.load(source.key_norms + at_norms, mask=exists, other=1.0)
                    of_reader = gl.load(source.reader_norms + at_norms, mask=exists, other=1.0)  # (L)
                    row += gl.log2(of_reader)
                    inter *= of_reader
                update = update * beta
                if buffers.same is not None:
                    same = load_gate_steps(at_same, source.stride_ft, t * L, steps, r) * (beta * source.scale)  # (L)
                    if source.key_norms is not None:
                        same *= of_reader
            # (2) The consumers have released the stage.
            s, phase = stage_and_phase(n // HEADS, config.STAGES)
            mbarrier.wait(empty.index(s), phase ^ 1)
            # (3) The vectors to shared memory, in the order of the scan: rows of P are outputs, columns are updates.
            at = head * config.STAGES + s
            g = buffers.vectors.index(at)
            g.slice(ROW_EXPONENT * L, L, 0).store(column if config.REVERSE else row)
            g.slice(COLUMN_EXPONENT * L, L, 0).store(row if config.REVERSE else column)
            g.slice(STATE_WEIGHT * L, L, 0).store(update if config.REVERSE == config.HAS_OUTPUT else inter)
            g.slice(TILE_DECAY * L, L, 0).store(decay)
            if config.WRITES:
                buffers.extra.index(at).store(beta * source.scale)
                if buffers.same is not None:
                    buffers.same.index(at).store(same)
            elif config.EXTRA is not None:
                has_extra = r * 0 + gl.program_id(0) % config.NUM_SPLITS == 0
                extra = source.vectors + tile * (VECTORS * L) + config.EXTRA * L + r
                buffers.extra.index(at).store(gl.load(extra, mask=has_extra, other=0.0))
            store_update_weights(inter if config.REVERSE else update, buffers, at, L)
            # (4) All threads of the warp have stored their part: one arrival for the head.
            barrier()
            mbarrier.arrive(full.index(s), count=1)
            n += GATE_WARPS
        before += tiles * HEADS
    if n == before and warp_index < GATE_WARPS:  # the iteration after the last one is this warp's
        producer_tail(n // HEADS, full, empty, config.STAGES, HEADS)


@gluon.jit
def tile_of_iteration(i, tiles, config):
    """Return the index of the tile of iteration i inside its work tile."""
    return tiles - 1 - i // config.HEADS if config.REVERSE else i // config.HEADS


@gluon.jit
def load_gates_of_iteration(i, b, h, start, steps, tiles, source, r, config):
    """Return input and forget gates of iteration i, (L) each, or zeros where the work tile has no such iteration."""
    at_i, at_f = gate_pointers(source, b, h * config.HEADS + i % config.HEADS, start)
    return load_tile_gates(at_i, at_f, tile_of_iteration(i, tiles, config) * config.L, steps, r, source)


@gluon.jit
def store_update_weights(update, buffers, at, L: gl.constexpr):
    """Store the update weights of a tile to stage `at`, as a sum of two numbers of low precision each.

    For n, `buffers.matrix` gets them as a sum of three, in rows of a right operand (8, L): where |d| is next to
    exp(-m), the last digits of n decide on the whole gradient of the denominator.
    """
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


@triton.jit
def _add(a, b):
    """Return `a + b`, the operator of the scan over the forget gates."""
    return a + b


@triton.jit
def compute_gate_vectors(
    i, f, inside, scale, log_scale, INPUT_GATE: tl.constexpr, SIGMOID_I: tl.constexpr, SIGMOID_F: tl.constexpr
):
    """Return ROW, COLUMN, INTER, UPDATE and DECAY of a tile, (L) each, from the gates of the model.

    With b the sums of log2 f from the start of the tile, g the sum over all of it and i in base 2: ROW = b, COLUMN = i
    - b + log2 scale, INTER = scale 2^b, UPDATE = 2^(g - b + i), DECAY = 2^g. Sums are float64, as in `chunk_gates` of
    `gate_kernels.py`.

    Args:
        i: Input gates, (L); unused without INPUT_GATE.
        f: Forget gates, (L).
        inside: Which steps the tile has, (L). Other steps have weight 0 and do not decay the state.
        scale: The factor of q, positive.
        log_scale: Its logarithm in base 2.
        INPUT_GATE: Whether there is an input gate.
        SIGMOID_I: Whether log i is logsigmoid(i), not i.
        SIGMOID_F: Whether log f is logsigmoid(f), not f.
    """
    f = tl.where(inside, base2_exponent(finite_log_gate(f, SIGMOID_F, True).to(tl.float64)), 0.0)
    if INPUT_GATE:
        i = tl.where(inside, base2_exponent(finite_log_gate(i, SIGMOID_I, True).to(tl.float64)), CLOSED)
    else:
        i = tl.where(inside, 0.0, CLOSED)
    b = tl.associative_scan(f, 0, _add)
    g = tl.gather(b, inside.to(tl.int32) * 0 + (b.shape[0] - 1), 0)  # the last sum
    row = b.to(tl.float32)
    column = (i - b + log_scale).to(tl.float32)
    return row, column, tl.exp2(row) * scale, tl.exp2((g - b + i).to(tl.float32)), tl.exp2(g.to(tl.float32))


@gluon.jit
def gate_pointers(source, b, h, start):
    """Return pointers to the input and forget gate of head `h` at step `start` of batch row `b`."""
    i = source.i_gate + (b.to(gl.int64) * source.stride_ib + h.to(gl.int64) * source.stride_ih)
    f = source.f_gate + (b.to(gl.int64) * source.stride_fb + h.to(gl.int64) * source.stride_fh)
    first = gl.to_tensor(start).to(gl.int64)
    return i + first * source.stride_it, f + first * source.stride_ft


@gluon.jit
def load_gate_steps(at, stride, step, steps, r):
    """Return the gates of steps `step + r` of a work tile of `steps` steps, (L), with zeros outside of it."""
    t = step + r
    # A sector has the gates of eight heads, and their programs are not at the same tile: L2 has to keep it.
    return gl.load(at + t.to(gl.int64) * stride, mask=(t >= 0) & (t < steps), other=0.0, eviction_policy="evict_last")


@gluon.jit
def load_tile_gates(at_i, at_f, step, steps, r, source):
    """Return input and forget gates of the tile from `step` on, (L) each; without an input gate f stands for both."""
    f = load_gate_steps(at_f, source.stride_ft, step, steps, r)
    if source.INPUT_GATE:
        return load_gate_steps(at_i, source.stride_it, step, steps, r), f
    else:
        return f, f


@gluon.jit
def load_gate_vectors(source, tile, r):
    """Return ROW, COLUMN, INTER, UPDATE and DECAY of a tile, (L) each, as a gate kernel has written them.

    With PARTIAL only ROW, COLUMN and the sum TOTAL are in memory, and the rest follows from these.

    Args:
        source: Where the gate vectors are.
        tile: Index of the tile over all heads.
        r: Indices of the steps, (L).
    """
    L: gl.constexpr = r.shape[0]
    at = source.vectors + tile * (VECTORS * L) + r
    row = gl.load(at + ROW * L)  # (L)
    column = gl.load(at + COLUMN * L)  # (L)
    if source.GATES == PARTIAL:
        total = gl.load(source.vectors + tile * (VECTORS * L) + TOTAL * L + r * 0)
        return row, column, gl.exp2(row) * source.scale, gl.exp2(total + (column - source.log_scale)), gl.exp2(total)
    inter = gl.load(at + INTER * L)  # (L)
    update = gl.load(at + UPDATE * L)  # (L)
    return row, column, inter, update, gl.load(at + DECAY * L)


class GateVectors(NamedTuple):
    """The gate vectors of a call, and how the gate warps of its kernels get them."""

    vectors: Tensor  # (H, tiles, VECTORS, L) float32; with RECOMPUTED any tensor
    constants: dict[str, int]  # GATES, INPUT_GATE, SIGMOID_I and SIGMOID_F of the kernel that reads them


def launch(ctx: LaunchContext, m_final: Tensor | None = None, d: Tensor | None = None) -> GateVectors:
    """Compute the gate vectors that the gate warps do not compute themselves.

    The gate warps compute all gate vectors where no two programs would compute the same ones and there is no
    normalizer. Otherwise the kernel reads vectors that do not depend on what the caller's gates are (logarithms or
    pre-activations), so that one compiled kernel serves all of them.

    Args:
        ctx: The context of the call.
        m_final: Output for the max states after the sequences, (N, H), or None.
        d: The denominators of the forward, (B, T, H), for the gate vectors of the backward.

    Returns:
        The gate vectors, and the constants that tell a kernel what they are.
    """
    one_program = ctx.K <= 128  # has all rows of a state
    if one_program and not ctx.spec.normalize:
        return GateVectors(ctx.x.log_f, {"GATES": RECOMPUTED.value, **ctx.gate_forms})
    # PARTIAL only in the forward: the scans for dq and dk have no time for more exponentials. COLUMN contains the
    # scale, so that weights cannot be computed from it where the scale is 0.
    partial = one_program and d is None and ctx.spec.scale != 0
    vectors = gate_kernels.launch(ctx, m_final=m_final, d=d, total_only=partial)
    constants = {"GATES": (PARTIAL if partial else LOADED).value}
    return GateVectors(vectors, constants | dict.fromkeys(ctx.gate_forms, False))
