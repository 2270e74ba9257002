"""dk and dv together, of heads with dqk 128 and dhv 128 without a normaliser: one program walks all heads it is given,
with whole states, and reads q, k, v and do once.

    loader                 --full_q[r]--> consumer 0, consumer 1 --free_q[r]--> loader
    loader, gater, carrier --full[s]----> consumer 0, consumer 1 --free[s]----> loader, gater, carrier
                                          consumer 0 <--ready, read--> consumer 1

    loader       by TMA q and v of a tile to stage r of READ stages, k and do to stage s of STAGES stages
    gater        its gate vectors to stage s
    carrier      to memory the sums that consumers have left in a stage, before it is filled again
    consumer 0,1 each half of the rows of the state's cotangent C, (dqk, dhv), in registers. Per tile (`walk_tile`)
        P    = v do^T by consumer 0, for dk, and k q^T by consumer 1, for dv, weighted
        dk^T = C v^T                     C, rounded, is a left operand as it lies in registers, and goes to shared
                                         memory, where dv finds the rows of both
        -- ready: both have stored P and C
        dk^T = dk^T weighted + q^T P^T   half of the rows each
        C    = decay C + (q w)^T do
        dv   = k C, weighted, + P do     half of the columns each
        -- read: both are done with k and C, and with the half of do that the other writes into
        dk   overwrites k, and dv do, and they leave by TMA; when they have left, a tile later, their stage is free,
             and that of q and v has been since both had q^T

The sums of k . dk and the products of C with states at marks are as in :mod:`.rows`.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tfla.backends.hopper.checkpoints import row_dots
from tfla.backends.hopper.dq_dk import Piece
from tfla.backends.hopper.gate_warp import Gater, GateRings, Source, load_gates
from tfla.backends.hopper.mma import as_left, gate_matrix, of_product, product, put_dot, scaled, seen, state_pointers
from tfla.backends.hopper.pipeline import (
    CARRY,
    CONSUMER,
    FILLER,
    GATES,
    OUT,
    async_load,
    async_store,
    barrier,
    barrier_of,
    matrices,
    place,
    ring_of,
    stage_barriers,
    vectors,
)
from tfla.backends.hopper.scheduler import NUMBERS, Work, coordinates, next_piece, piece, state_of
from tfla.backends.hopper.store_warp import OF_SUMS, Carrier, arrivals, carry

D = gl.constexpr(128)  # dqk and dhv
HALF = gl.constexpr(64)
# Stages of 32 KiB that fit beside C and P. Those of k and do are free later, once what overwrote them has left.
READ = gl.constexpr(2)
STAGES = gl.constexpr(3)


class Walk(NamedTuple):
    """Constants of a kernel."""

    L: Any  # steps of a tile
    MARKS: Any  # steps between marks
    BACK: Any
    SEGMENTED: Any
    STATE: Any  # pieces start from states that are given, not from zeros
    FINAL: Any  # states behind pieces are wanted


class Outer(NamedTuple):
    """What consumers read and write in memory."""

    out_k: Any
    out_v: Any
    state_in: Any
    state_out: Any
    marks: Any
    dots: Any


class Shared(NamedTuple):
    """Shared memory."""

    q: Any
    k: Any  # tiles as two halves each
    v: Any
    do: Any  # as two halves
    c: Any  # C, rounded
    p: Any  # P for dk, and two for dv, of this tile and of the one before
    g: Any
    u: Any
    s: Any  # for the carrier: parts of k . dk
    full_q: Any  # q and v of a tile are there
    free_q: Any
    full: Any  # k, do and the gate vectors are
    free: Any
    ready: Any
    read: Any


class Mine(NamedTuple):
    """What a consumer has."""

    i: Any  # steps of a tile, which read
    j: Any  # those that update
    rows: Any  # of C in shared memory
    columns: Any


class Tile(NamedTuple):
    """In shared memory."""

    q: Any
    v: Any
    k0: Any  # halves
    k1: Any
    do0: Any
    do1: Any
    g: Any
    p_k: Any  # P for dk
    p_v: Any  # P for dv


@gluon.jit
def load_tiles(tensors, shared, work, GROUP, walk):
    """The loader: one warp."""
    Q, K, V, DO = tensors
    L: gl.constexpr = walk.L
    n = 0
    for index in range(gl.program_id(0), work.pieces, gl.num_programs(0)):
        b, h, start, steps, _tile0 = piece(index, work, L, walk.SEGMENTED)
        tiles = (steps + L - 1) // L
        end = start + steps
        for i in range(0, tiles):
            t = start + (tiles - 1 - i) * L
            left_k = coordinates(b, h // GROUP, t, 0, end, work)
            left_v = coordinates(b, h, t, 0, end, work)
            s, phase = place(n, STAGES)
            mbarrier.wait(shared.free.index(s), phase ^ 1)
            bar = shared.full.index(s)
            mbarrier.expect(bar, 2 * (K.block_type.nbytes + DO.block_type.nbytes))
            async_load(DO, left_v, bar, shared.do.index(2 * s))
            async_load(DO, coordinates(b, h, t, HALF, end, work), bar, shared.do.index(2 * s + 1))
            async_load(K, left_k, bar, shared.k.index(2 * s))
            async_load(K, coordinates(b, h // GROUP, t, HALF, end, work), bar, shared.k.index(2 * s + 1))
            s, phase = place(n, READ)
            mbarrier.wait(shared.free_q.index(s), phase ^ 1)
            bar = shared.full_q.index(s)
            mbarrier.expect(bar, Q.block_type.nbytes + V.block_type.nbytes)
            async_load(V, left_v, bar, shared.v.index(s))
            async_load(Q, left_k, bar, shared.q.index(s))
            n += 1


@gluon.jit
def product_of_halves(a0, b0, a1, b1):
    """Starts a0 b0 + a1 b1."""
    return warpgroup_mma(a1, b1, product(a0, b0), is_async=True)


@gluon.jit
def tile_of(shared, r, s, n, L: gl.constexpr):
    """The n-th, its q and v in stage r, the rest in stage s."""
    return Tile(
        shared.q.index(r).reshape([L, D]),
        shared.v.index(r).reshape([L, D]),
        shared.k.index(2 * s).reshape([L, HALF]),
        shared.k.index(2 * s + 1).reshape([L, HALF]),
        shared.do.index(2 * s).reshape([L, HALF]),
        shared.do.index(2 * s + 1).reshape([L, HALF]),
        shared.g.index(s),
        shared.p.index(0),
        shared.p.index(1 + n % 2),  # the other consumer may still read that of the tile before
    )


@gluon.jit
def start_weights(tile, half: gl.constexpr):
    """Starts v do^T, for dk, or k q^T, for dv."""
    if half == 0:
        a0 = tile.v.slice(0, HALF, 1)
        a1 = tile.v.slice(HALF, HALF, 1)
        return product_of_halves(a0, tile.do0.permute((1, 0)), a1, tile.do1.permute((1, 0)))
    else:
        b0 = tile.q.slice(0, HALF, 1).permute((1, 0))
        b1 = tile.q.slice(HALF, HALF, 1).permute((1, 0))
        return product_of_halves(tile.k0, b0, tile.k1, b1)


@gluon.jit
def state_part(state, at, half: gl.constexpr, column):
    """Pointers to 64 x 64 of a consumer's rows of the at-th state."""
    return state_pointers(state, at, half * HALF, column, D, D, False, of_product(HALF), HALF, HALF)


@gluon.jit
def put_state(C0, C1, to, v):
    """C v^T; C, rounded, goes to shared memory."""
    A = as_left(C0.to(v.dtype), HALF)
    dk = product(A, v.slice(0, HALF, 1).permute((1, 0)))
    to.slice(0, HALF, 1).store(C0.to(v.dtype))
    dk, A = warpgroup_mma_wait(0, deps=[dk, A])
    A = as_left(C1.to(v.dtype), HALF)
    dk = warpgroup_mma(A, v.slice(HALF, HALF, 1).permute((1, 0)), dk, is_async=True)
    to.slice(HALF, HALF, 1).store(C1.to(v.dtype))
    fence_async_shared()
    dk, A = warpgroup_mma_wait(0, deps=[dk, A])
    return dk


@gluon.jit
def leave_dots(C0, C1, mark, outer, half: gl.constexpr):
    """Of what C is a cotangent of at a mark with C, a part for each warp."""
    layout: gl.constexpr = of_product(HALF)
    dot = row_dots(C0, outer.marks, mark, half * HALF, 0, D, D, layout)
    dot += row_dots(C1, outer.marks, mark, half * HALF, HALF, D, D, layout)
    warps = gl.sum(gl.reshape(dot, [4, 16]), 1)
    gl.store(outer.dots + mark * 8 + half * 4 + gl.arange(0, 4, warps.type.layout), warps)


@gluon.jit
def walk_tile(C0, C1, n, step, at, mine, outer, shared, work, half: gl.constexpr, walk):
    """A tile, from its arrival to the departure of its dk and dv."""
    L: gl.constexpr = walk.L
    row: gl.constexpr = half * HALF
    layout: gl.constexpr = of_product(HALF)
    dtype: gl.constexpr = shared.c.dtype
    t = (at.tiles - 1 - step) * L
    r, phase_r = place(n, READ)
    s, phase = place(n, STAGES)
    tile = tile_of(shared, r, s, n, L)
    g = tile.g
    mbarrier.wait(shared.full.index(s), phase)
    mbarrier.wait(shared.full_q.index(r), phase_r)
    S = start_weights(tile, half)
    # The stage of the previous tile is free once its outputs have left.
    tma.store_wait(0)
    mbarrier.arrive(shared.free.index((s + STAGES - 1) % STAGES), count=1, pred=n > 0)
    gate = gate_matrix(g, L, 0, layout, 1)
    S = warpgroup_mma_wait(0, deps=[S])
    P = seen(S, gate, mine.i, mine.j, 0, True).to(dtype)
    (tile.p_k if half == 0 else tile.p_v).store(P)
    dk = put_state(C0, C1, mine.rows, tile.v)
    barrier()
    mbarrier.arrive(shared.ready, count=1)
    q_t = tile.q.slice(row, HALF, 1).permute((1, 0)).load(layout)
    weight = gl.expand_dims(g.slice(OUT * L, L, 0).load(gl.SliceLayout(0, layout)), 0)
    mbarrier.wait(shared.ready, n & 1)
    A = as_left(q_t, HALF)
    dk = warpgroup_mma(A, tile.p_k.permute((1, 0)), dk * weight, is_async=True)
    B = scaled(q_t, shared.u.index(s), L, gl.DotOperandLayout(0, layout, 2))
    carry = gl.expand_dims(g.slice(CARRY * L, 1, 0).load(gl.SliceLayout(0, layout)), 0)
    C0 = warpgroup_mma(B, tile.do0, C0 * carry, is_async=True)
    C1 = warpgroup_mma(B, tile.do1, C1 * carry, is_async=True)
    dk, A = warpgroup_mma_wait(2, deps=[dk, A])
    barrier()  # not before MMAs have taken q_t: the copy engine does not wait for loads that are on their way
    mbarrier.arrive(shared.free_q.index(r), count=1)
    my_k = shared.k.index(2 * s + half)
    k_t = my_k.reshape([L, HALF]).permute((1, 0))
    put_dot(dk, k_t, shared.s.index(s), half, L)
    C0, C1, B = warpgroup_mma_wait(0, deps=[C0, C1, B])
    dv = product_of_halves(tile.k0, mine.columns.slice(0, HALF, 0), tile.k1, mine.columns.slice(HALF, HALF, 0))
    weight = gl.expand_dims(g.slice(OUT * L, L, 0).load(gl.SliceLayout(1, layout)), 1)
    dv = warpgroup_mma_wait(0, deps=[dv])
    barrier()
    mbarrier.arrive(shared.read, count=1)
    my_do = shared.do.index(2 * s + half)
    dv = warpgroup_mma(tile.p_v, my_do.reshape([L, HALF]), dv * weight, is_async=True)
    mbarrier.wait(shared.read, n & 1)
    k_t.store(dk.to(dtype))
    dv = warpgroup_mma_wait(0, deps=[dv])
    barrier()  # no warp's MMA reads do any more
    my_do.reshape([L, HALF]).store(dv.to(dtype))
    fence_async_shared()  # would wait for a copy that is on its way: both go after it
    barrier()
    async_store(outer.out_k, coordinates(at.b, at.h, at.start + t, row, at.start + at.steps, work), my_k)
    async_store(outer.out_v, coordinates(at.b, at.h, at.start + t, row, at.start + at.steps, work), my_do)
    n += 1
    if t % walk.MARKS == 0 and t > 0:
        leave_dots(C0, C1, at.mark + t // walk.MARKS * work.H, outer, half)
    return C0, C1, n


@gluon.jit
def consume(half: gl.constexpr, outer, shared, work, walk):
    """One warpgroup, with 64 rows as two pieces of 64 columns."""
    L: gl.constexpr = walk.L
    layout: gl.constexpr = of_product(HALF)
    i = gl.arange(0, L, gl.SliceLayout(1, layout))
    j = gl.arange(0, L, gl.SliceLayout(0, layout))
    mine = Mine(i, j, shared.c.slice(half * HALF, HALF, 0), shared.c.slice(half * HALF, HALF, 1))
    n = 0
    index = gl.program_id(0)
    while index < work.pieces:
        b, h, start, steps, _tile0 = piece(index, work, L, walk.SEGMENTED, True)
        tiles = (steps + L - 1) // L
        mark = ((b.to(gl.int64) * work.T + start) // walk.MARKS - 1) * work.H + h
        at = Piece(b, h, start, steps, tiles, mark)
        C0 = gl.zeros([HALF, HALF], gl.float32, layout)
        C1 = gl.zeros([HALF, HALF], gl.float32, layout)
        if walk.STATE:
            first = state_of(index, work)
            C0 = gl.load(state_part(outer.state_in, first, half, 0)).to(gl.float32)
            C1 = gl.load(state_part(outer.state_in, first, half, HALF)).to(gl.float32)
        for step in range(0, tiles):
            C0, C1, n = walk_tile(C0, C1, n, step, at, mine, outer, shared, work, half, walk)
        if walk.FINAL:
            last = state_of(index, work)
            gl.store(state_part(outer.state_out, last, half, 0), C0)
            gl.store(state_part(outer.state_out, last, half, HALF), C1)
        index = next_piece(index)
    tma.store_wait(0)
    mbarrier.arrive(shared.free.index((n + STAGES - 1) % STAGES), count=1)


@gluon.jit(do_not_specialize=NUMBERS)
def both(
    Q, K, V, DO, OutK, OutV, gates, i_gate, f_gate, w_out, state_in, state_out, marks, dots, order,
    T, tiles_of_head, H, GROUP, length, pieces, ib, it, ih, fb, ft, fh, scale, log_scale,
    L: gl.constexpr, MARKS: gl.constexpr, BACK: gl.constexpr, SEGMENTED: gl.constexpr, STATE: gl.constexpr,
    FINAL: gl.constexpr, PACKED: gl.constexpr,
    MADE: gl.constexpr, INPUT_GATE: gl.constexpr, SIGMOID_I: gl.constexpr, SIGMOID_F: gl.constexpr,
):  # fmt: skip
    """The walk is back. Tiles of Q and V are whole, of the others half as wide."""
    partitions(
        (Q, K, V, DO),
        Source(
            gates, i_gate, f_gate, ib, it, ih, fb, ft, fh, scale, log_scale, MADE, INPUT_GATE, SIGMOID_I, SIGMOID_F
        ),
        w_out, tiles_of_head, GROUP, Outer(OutK, OutV, state_in, state_out, marks, dots),
        Work(T, H, length, pieces, order if PACKED else None), Walk(L, MARKS, BACK, SEGMENTED, STATE, FINAL),
    )  # fmt: skip


@gluon.jit
def partitions(tensors, source, w_out, tiles_of_head, GROUP, outer, work, walk):
    """Gives them shared memory, and starts them."""
    Q, K, V, DO = tensors
    L: gl.constexpr = walk.L
    dtype: gl.constexpr = Q.dtype
    q = ring_of(Q, READ)
    v = ring_of(V, READ)
    k = ring_of(K, 2 * STAGES)
    do = ring_of(DO, 2 * STAGES)
    c = gl.allocate_shared_memory(dtype, [D, D], gl.NVMMASharedLayout(128, 16, 2))
    p = matrices(dtype, 3, L, L)
    g = vectors(gl.float32, STAGES, GATES * L)
    u = vectors(dtype, STAGES, 2 * L)
    sums = vectors(gl.float32, STAGES, 8 * L)
    full_q, free_q = stage_barriers(READ, 1, 2)
    full, free = stage_barriers(STAGES, arrivals(OF_SUMS), 2)
    ready = barrier_of(2)
    read = barrier_of(2)
    fence_async_shared()
    shared = Shared(q, k, v, do, c, p, g, u, sums, full_q, free_q, full, free, ready, read)
    rings = GateRings(g, u)
    gater: gl.constexpr = Gater(L, STAGES, walk.BACK, walk.SEGMENTED)
    gl.warp_specialize(
        [
            (consume, (0, outer, shared, work, walk)),
            (consume, (1, outer, shared, work, walk)),
            (load_tiles, (tensors, shared, work, GROUP, walk)),
            (load_gates, (0, source, rings, full, free, work, tiles_of_head, gater)),
            (carry, (
                sums, w_out, source.vectors, full, free, work, tiles_of_head,
                Carrier(L, STAGES, walk.BACK, walk.SEGMENTED, OF_SUMS),
            )),
        ],
        [4, 1, 1, 1],
        [CONSUMER, FILLER, FILLER, FILLER],
    )  # fmt: skip
