"""The parts that the scans of the delta rule share: vectors of a tile and states; for h and dv also P and X.

A program has 128 columns of dhv of each of its work tiles. Two consumers hold 64 of them each, as the transposed state,
C^T or dC^T, (64, ROWS), in registers. Both need P of every tile, (L, L), and compute half of its columns each. The
equations are those of `tfla.backends.triton.delta_kernels`.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from tfla.backends.gpu.context import time_strides
from tfla.backends.gpu.gate_kernels import COLUMN, DECAY, INTER, ROW, UPDATE, VECTORS
from tfla.backends.hopper import host, mma, pipeline, scheduler
from tfla.backends.hopper.pipeline import COLUMN_EXPONENT, ROW_EXPONENT

if TYPE_CHECKING:
    from tfla.backends.gpu.context import LaunchContext
    from tfla.backends.triton.delta import DeltaContext

ROWS = gl.constexpr(128)  # dqk of the kernel; TMA reads zeros where heads are narrower
COLUMNS = gl.constexpr(128)  # columns of dhv that a program computes

# Vectors of a stage, NUM_VECTORS of L float32 numbers each, after ROW_EXPONENT and COLUMN_EXPONENT of `pipeline`.
READ_WEIGHT = gl.constexpr(2)  # a, the weight of the state in what each step reads
WRITE = gl.constexpr(3)  # beta
UPDATE_WEIGHT = gl.constexpr(4)  # w, the weight of each step in the update of the state; with time times beta
TILE_DECAY = gl.constexpr(5)  # g, the same number in each element
SAME_STEP = gl.constexpr(6)  # scale do . E beta, for dq and dk alone
NUM_VECTORS = gl.constexpr(8)  # a power of two; seven are used
# More of them where the kernels divide q and k by their norms: r is 1 / |k| and r_q is 1 / |q|, with EPS under the
# root. UPDATE_WEIGHT then has the factor r, and SAME_STEP the factor r r_q. `delta_dq_dk.py` has further vectors.
KEY_READ_WEIGHT = gl.constexpr(8)  # a r, the weight of the state in what each step reads by its key
KEY_WRITE = gl.constexpr(9)  # beta r
QUERY_NORM = gl.constexpr(10)  # r_q, not for h
KEY_NORM = gl.constexpr(11)  # r, not for h
QUERY_READ_WEIGHT = gl.constexpr(12)  # a r_q, not for h
NUM_VECTORS_NORMALIZED = gl.constexpr(16)
EPS = gl.constexpr(1e-6)  # is added to squared norms


class Config(NamedTuple):
    """The constants of the kernels."""

    DK: Any  # dqk of the tensors, up to ROWS
    DV: Any  # dhv of the tensors
    L: Any  # steps of a tile
    GATED: Any  # gates decay the state
    REVERSE: Any  # scan against time, for dv
    SAVE: Any  # store E; unused for dv
    USE_INITIAL_STATE: Any  # start from `state_in`, not from zeros
    STORE_FINAL_STATE: Any  # store the states after work tiles to `state_out`
    BY_KEYS: Any = False  # consumers hold 64 rows of the state, by COLUMNS, not 64 of its transpose, by ROWS
    CHECKPOINT_STEPS: Any = 0  # steps between checkpoints, for dq and dk
    IS_SEGMENTED: Any = False  # no work tile is a segment
    NORMALIZED: Any = False  # q and k are divided by their norms
    INDEXED: Any = False  # `state_in` and `state_out` are pools, and the schedule has the rows; for h
    BLOCK: Any = 0  # the block of COLUMNS columns that a launch computes, for dv and dk_w


class FragmentIds(NamedTuple):
    """The indices of what a consumer holds."""

    i: Any  # rows of P, which are the steps that read, (L)
    j: Any  # columns of P, which are the steps that write, (L / 2); 0 is the first one of the consumer's half
    column: Any  # the first column of dhv that the consumer computes; with BY_KEYS the first of dqk


class WorkTile(NamedTuple):
    """The work tile that a program computes."""

    b: Any  # batch row
    h: Any  # head
    start: Any  # first token in the batch row
    steps: Any  # number of steps


class WriteSource(NamedTuple):
    """The source of the vectors of the gate warp."""

    vectors: Any  # (H, tiles, VECTORS, L), float32, read with GATED
    beta: Any  # (B, T, H)
    stride_b: Any  # strides of beta, by batch row, token and head
    stride_t: Any
    stride_h: Any
    tiles_per_head: Any  # tiles of one head over all batch rows
    key_norms: Any = None  # r, (B, T, H) float32, with NORMALIZED
    query_norms: Any = None  # r_q, likewise; None for h, whose kernel computes it, and for the action of spans
    do_e: Any = None  # do . E, (B, T, H), for dq and dk alone
    scale: Any = None  # the factor of the queries, likewise


@gluon.jit
def fragment_ids(half: gl.constexpr, config, column: gl.constexpr = 0):
    """Return the indices of what this consumer holds; the launch computes the columns from `column` on."""
    L: gl.constexpr = config.L
    i = gl.arange(0, L, gl.SliceLayout(1, mma.accumulator_layout(L // 2)))
    j = gl.arange(0, L // 2, gl.SliceLayout(0, mma.accumulator_layout(L // 2)))
    return FragmentIds(i=i, j=j, column=gl.program_id(0) * COLUMNS + (column + half * 64))


@gluon.jit
def inverse_norm(square):
    """Return 1 / sqrt(square + 1e-6) for squared norms."""
    return gl.rsqrt(square + EPS)


@gluon.constexpr_function
def count_vectors(normalized):
    """Return the number of vectors of a stage."""
    return NUM_VECTORS_NORMALIZED if normalized else NUM_VECTORS


@gluon.jit
def count_tiles(index, steps, params, config):
    """Return the number of tiles of work tile `index`, 0 where no state after it is read.

    Where sequences are segments, `params.segments` of each whole sequence, nothing reads what the last segment adds,
    nor the transition of the first one, nor without SAVE that of the last one.
    """
    tiles = (steps + config.L - 1) // config.L
    if params.segments is None:
        return tiles
    else:
        place = scheduler.state_index(index, params) // params.H % params.segments
        is_last = place + 1 == params.segments
        adds = gl.program_id(0) * COLUMNS < config.DV
        unread = is_last if adds else (place == 0) | (is_last & (not config.SAVE))
        return gl.where(unread, 0, tiles)


@gluon.jit
def run_gate_warp(source, vectors, full, empty, params, STAGES: gl.constexpr, config):
    """Store the vectors of each tile to shared memory: gate vectors, beta and norms, and products of these.

    Args:
        source: Where they come from.
        vectors: Shared memory for them, (STAGES, `count_vectors` L).
        full: Full barriers of this ring, (STAGES).
        empty: Empty barriers, (STAGES).
        params: The numbers of the scheduler.
        STAGES: Stages of the ring.
        config: Constants.
    """
    L: gl.constexpr = config.L
    r = gl.arange(0, L, gl.BlockedLayout([L // 32], [32], [1], [0]))
    n = 0
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, first_tile = scheduler.get_work_tile(index, params, L, False)
        beta = source.beta + (b.to(gl.int64) * source.stride_b + h.to(gl.int64) * source.stride_h)
        beta += gl.to_tensor(start).to(gl.int64) * source.stride_t
        if config.NORMALIZED:
            norms_at = (b.to(gl.int64) * params.T + start) * params.H + h
        if source.do_e is not None:
            do_e_at = source.do_e + ((b.to(gl.int64) * params.T + start) * params.H + h)
        gates = source.vectors + (h.to(gl.int64) * source.tiles_per_head + first_tile) * (VECTORS * L)
        tiles = count_tiles(index, steps, params, config)
        for i in range(0, tiles):
            tile = tiles - 1 - i if config.REVERSE else i
            t = tile * L + r
            # A sector has beta of several heads, and their programs are not at the same tile: L2 has to keep it.
            write = gl.load(
                beta + t.to(gl.int64) * source.stride_t, mask=t < steps, other=0.0, eviction_policy="evict_last"
            ).to(gl.float32)  # (L)
            if config.GATED:
                at = gates + tile * (VECTORS * L) + r
                row = gl.load(at + ROW * L)  # (L)
                column = gl.load(at + COLUMN * L)  # (L)
                read_weight = gl.load(at + INTER * L)  # (L)
                update_weight = gl.load(at + UPDATE * L)  # (L)
                decay = gl.load(at + DECAY * L)  # (L)
            else:
                row = r.to(gl.float32) * 0.0
                column = row
                read_weight = row + 1.0
                update_weight = read_weight
                decay = read_weight
            if not config.REVERSE:
                update_weight *= write
            if config.NORMALIZED:
                at = norms_at + t.to(gl.int64) * params.H
                of_key = gl.load(source.key_norms + at, mask=t < steps, other=0.0)  # r, (L)
                update_weight *= of_key
                if source.query_norms is not None:
                    of_query = gl.load(source.query_norms + at, mask=t < steps, other=0.0)  # r_q, (L)
            if source.do_e is not None:
                do_e = gl.load(do_e_at + t.to(gl.int64) * params.H, mask=t < steps, other=0.0)
                same = do_e * write * source.scale  # (L)
                if config.NORMALIZED:
                    same *= of_key * of_query
            s, bar = pipeline.acquire(n, full, empty, STAGES)
            g = vectors.index(s)
            if source.do_e is not None:
                g.slice(SAME_STEP * L, L, 0).store(same)
            g.slice(ROW_EXPONENT * L, L, 0).store(row)
            g.slice(COLUMN_EXPONENT * L, L, 0).store(column)
            g.slice(READ_WEIGHT * L, L, 0).store(read_weight)
            g.slice(WRITE * L, L, 0).store(write)
            g.slice(UPDATE_WEIGHT * L, L, 0).store(update_weight)
            g.slice(TILE_DECAY * L, L, 0).store(decay)
            if config.NORMALIZED:
                g.slice(KEY_READ_WEIGHT * L, L, 0).store(read_weight * of_key)
                g.slice(KEY_WRITE * L, L, 0).store(write * of_key)
                if source.query_norms is not None:
                    g.slice(KEY_NORM * L, L, 0).store(of_key)
                    g.slice(QUERY_NORM * L, L, 0).store(of_query)
                    g.slice(QUERY_READ_WEIGHT * L, L, 0).store(read_weight * of_query)
            pipeline.barrier()
            mbarrier.arrive(bar, count=1)
            n += 1
    pipeline.producer_tail(n, full, empty, STAGES)


@gluon.jit
def locate_state(state, index, ids, params, config, AT_END: gl.constexpr, block: gl.constexpr = 0):
    """Return pointers to what the consumer holds of a state, (64, ROWS) or (64, COLUMNS), and which of them exist.

    Of a state with several blocks of 128 it is block `block`. With INDEXED a sequence may have no state. AT_END says
    that it is the state after a work tile.
    """
    BY_ROWS: gl.constexpr = AT_END and config.BY_KEYS
    layout: gl.constexpr = mma.accumulator_layout(ROWS)
    at = scheduler.state_index(index, params, config.INDEXED, AT_END)
    DX: gl.constexpr = config.DK if config.BY_KEYS else config.DV
    DY: gl.constexpr = config.DV if config.BY_KEYS else config.DK
    pointers = mma.state_pointers(
        state, at, ids.column, block * ROWS, DX, DY, not config.BY_KEYS, layout, BY_ROWS=BY_ROWS
    )
    x = ids.column + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    y = block * ROWS + gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, layout)), 0)
    exists = (x < DX) & (y < DY)
    if config.INDEXED:
        exists = exists & (at >= 0)
    return pointers, exists


@gluon.jit
def load_vector(g, WHICH: gl.constexpr, L: gl.constexpr, layout: gl.constexpr):
    """Return a vector of a tile as weights of the columns of a matrix in `layout`, (1, L)."""
    return gl.expand_dims(g.slice(WHICH * L, L, 0).load(gl.SliceLayout(0, layout)), 0)


@gluon.jit
def issue_scores(shared, s, half: gl.constexpr, config):
    """Start S = q k^T of the tile in stage s for one half of the columns: (L, dqk) @ (dqk, L / 2)."""
    L: gl.constexpr = config.L
    q = shared.q.index(s).reshape([L, ROWS])
    k = shared.k.index(s).reshape([L, ROWS]).slice(half * (L // 2), L // 2, 0).permute((1, 0))
    return mma.issue_mma(q, k)


@gluon.jit
def load_of_reads(g, OF_QUERIES: gl.constexpr, L: gl.constexpr, layout: gl.constexpr, config):
    """Return a, the weights of the state in what steps read by queries or by keys, as weights of columns, (1, L)."""
    normalized: gl.constexpr = QUERY_READ_WEIGHT if OF_QUERIES else KEY_READ_WEIGHT
    return load_vector(g, normalized if config.NORMALIZED else READ_WEIGHT, L, layout)


@gluon.jit
def load_row_norms(g, WHICH: gl.constexpr, L: gl.constexpr, layout: gl.constexpr):
    """Return QUERY_NORM or KEY_NORM of a tile as factors of the rows of a matrix in `layout`, (L, 1)."""
    return gl.expand_dims(g.slice(WHICH * L, L, 0).load(gl.SliceLayout(1, layout)), 1)


@gluon.jit
def load_decays(shared, s, half: gl.constexpr, config):
    """Return D of the tile in stage s for one half of the columns, (L, L / 2), unmasked."""
    L: gl.constexpr = config.L
    layout: gl.constexpr = mma.accumulator_layout(L // 2)
    if config.GATED:
        return mma.load_gate_matrix(shared.g.index(s), L, half, layout)
    else:
        return gl.zeros([L, L // 2], gl.float32, layout) + 1.0


@gluon.jit
def load_scaled_decays(gmem, shared, s, half: gl.constexpr, config):
    """Return D times scale of the tile in stage s for one half of the columns, (L, L / 2), unmasked."""
    return load_decays(shared, s, half, config) * gmem.scale


@gluon.jit
def store_scores(S, D, n, ids, shared, half: gl.constexpr, config):
    """Store the consumer's half of P of tile n, which is S * D, masked, and tell the other consumer."""
    L: gl.constexpr = config.L
    P = mma.apply_causal_mask(S, D, ids.i, ids.j, half, False)
    shared.p.index(n % 2).slice(half * (L // 2), L // 2, 1).store(P.to(shared.p.dtype))
    fence_async_shared()  # MMAs read P through the asynchronous proxy
    pipeline.barrier()  # all warps of this consumer have stored
    mbarrier.arrive(shared.ready.index(n % 2), count=1)


@gluon.jit
def range_factors(R, N):
    """Return powers of two that bring the rows of R and N, (64, L), to the range of float16, and those that undo it.

    The largest number of a row gets the exponent 14, as in `scaled_product` of the Triton kernels.
    """
    top = gl.max(gl.maximum(gl.abs(R), gl.abs(N)), 1)
    exponent = gl.maximum(top.to(gl.int32, bitcast=True) & 0x7F800000, 15 << 23)
    down = ((254 << 23) - exponent + (14 << 23)).to(gl.float32, bitcast=True)
    up = (exponent - (14 << 23)).to(gl.float32, bitcast=True)
    return gl.expand_dims(down, 1), gl.expand_dims(up, 1)


@gluon.jit
def issue_correction(R, write, x, L: gl.constexpr):
    """Start R - (R * write) x, (64, L) = (64, L) (L, L), in the range of float16 where x is.

    Without `write`, None, x has these weights.

    Returns:
        The result times powers of two, and its left operand in registers. Both must be waited for.
        The factors of the rows that undo these powers.
    """
    N = -R if write is None else R * (-write)
    down, up = range_factors(R, N)
    A = mma.to_left_operand((N * down).to(x.dtype), L)
    return warpgroup_mma(A, x, R * down, is_async=True), A, up


@gluon.jit
def load_tile_decay(g, L: gl.constexpr):
    """Return the decay of the state over a tile, (1, 1)."""
    layout: gl.constexpr = gl.SliceLayout(0, mma.accumulator_layout(ROWS))
    return gl.expand_dims(g.slice(TILE_DECAY * L, 1, 0).load(layout), 0)


@gluon.jit
def output_coordinates(t, work_tile, ids, params):
    """Return the TMA coordinates of what the consumer stores of the tile at step `t` of a work tile."""
    end = work_tile.start + work_tile.steps
    return scheduler.tile_coordinates(work_tile.b, work_tile.h, work_tile.start + t, ids.column, end, params)


@gluon.jit
def checkpoint_index(step, work_tile, params, config):
    """Return the index of the checkpoint at `step` of a work tile among those of all heads."""
    first = (work_tile.b.to(gl.int64) * params.T + work_tile.start) // config.CHECKPOINT_STEPS - 1
    return (first + step // config.CHECKPOINT_STEPS) * params.H + work_tile.h


@gluon.jit
def load_state(index, ids, gmem, params, config, block: gl.constexpr = 0):
    """Return what the consumer holds of the state that work tile `index` starts from, see `locate_state`."""
    C = gl.zeros([64, ROWS], gl.float32, mma.accumulator_layout(ROWS))
    if config.USE_INITIAL_STATE:
        pointers, exists = locate_state(gmem.state_in, index, ids, params, config, False, block)
        C = gl.load(pointers, mask=exists, other=0.0).to(gl.float32)
        if config.INDEXED:
            lacks_row = scheduler.state_index(index, params, True) < -params.H
            C = gl.where(lacks_row, float("nan"), C)
    return C


@gluon.jit
def store_state(C, index, ids, gmem, params, config, block: gl.constexpr = 0):
    """Store what the consumer holds of the state after work tile `index`, with STORE_FINAL_STATE."""
    if config.STORE_FINAL_STATE:
        pointers, exists = locate_state(gmem.state_out, index, ids, params, config, True, block)
        gl.store(pointers, C.to(gmem.state_out.dtype.element_ty), mask=exists)


# Scalar arguments that Triton must not specialize on, so that one compiled kernel serves all lengths.
RUNTIME_SCALARS = [
    "T", "tiles_per_head", "H", "group_size", "num_work_tiles", "stride_b", "stride_t", "stride_h", "scale",
]  # fmt: skip


def kernel_scalars(ctx: "DeltaContext") -> tuple[Any, ...]:
    """Return the numbers that the kernels take after their tensors, RUNTIME_SCALARS."""
    base = ctx.base
    return (
        base.T, base.tiles, base.H, base.group, base.segments * base.H, *time_strides(ctx.beta), ctx.spec.scale
    )  # fmt: skip


def descriptors_for_dv(ctx: "DeltaContext", dh: Tensor, E: Tensor, X: Tensor, dv: Tensor) -> tuple[Any, ...]:
    """Return the TMA descriptors with which `delta_dv_dk_kernel` begins: of q, k, dh, E, X and dv."""
    base, rows, half = ctx.base, ROWS.value, COLUMNS.value // 2
    operands = (ctx.x.q, rows), (ctx.x.k, rows), (dh, half), (E, half), (X, base.L), (dv, half)
    return tuple(host.descriptor(base, x, width) for x, width in operands)


def new_dots(base: "LaunchContext", *shape: int) -> tuple[Tensor, Tensor]:
    """Return outputs for dbeta and do . E, float32; 0 at steps of no sequence, which no kernel stores."""
    new = base.zeros if base.packed else base.new
    return new(*shape), new(*shape)
