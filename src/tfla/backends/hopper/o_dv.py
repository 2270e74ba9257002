"""o, and walking back dv: one program walks all heads it is given, with BLOCKS x 128 columns of their states.

    loader, gaters, carrier --full[s]--> consumer 0, consumer 1 --free[s]--> loader, gaters, carrier
                                         consumer 0 <--ready[n % 2], begun--> consumer 1

    loader       tiles of x, z, y by TMA to stage s of a ring of STAGES stages
    gaters       their gate vectors to the same stage; in turn with one block, whose tiles are done sooner, or with n
    carrier      to memory d, or delta, of what consumers have left in a stage, before it is filled again
    consumer 0,1 each half of the columns of the state C^T, (dhv, dqk), in registers. Per tile n (`walk_tile`)
        out^T = C^T z^T, weighted, + y^T P^T   the state, rounded, is a left operand as it lies in registers
        C^T   = decay C^T + (y w)^T x
        P     = z x^T, weighted, of the next tile: half of the updates each, exchanged through shared memory
        out   overwrites the tile of y and leaves by TMA; when it has left, a tile later, the stage is free

x, y, z are k, v, q for o and q, do, k for dv, as in :mod:`tfla.backends.triton.walk`. With a normaliser o's consumers
also have half of n each, and dv's read h as well: delta is made of do . h, and only this walk has time for its bytes.
Without one, dv of heads of 128 x 128 is made with dk, by :mod:`.both`.
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

from tfla.backends.hopper.gate_warp import Gater, GateRings, Source, load_gates
from tfla.backends.hopper.mma import as_left, gate_matrix, of_product, product, put_dot, scaled, seen
from tfla.backends.hopper.normalizer import (
    divided,
    first_n,
    no_n,
    put_inverse,
    put_n,
    put_sums,
    read_n,
    rows_of_n,
    update_n,
)
from tfla.backends.hopper.pipeline import (
    CARRY,
    CONSUMER,
    CONSUMER_MOST,
    FILLER,
    FILLER_LEAST,
    GATES,
    OUT,
    Place,
    async_load,
    async_store,
    barrier,
    barrier_of,
    barriers,
    last_stage,
    matrices,
    next_stage,
    place,
    ring_of,
    stage_barriers,
    vectors,
)
from tfla.backends.hopper.scheduler import NUMBERS, Work, coordinates, next_piece, piece, state_of
from tfla.backends.hopper.store_warp import NOTHING, OF_D, OF_DELTA, Carrier, arrivals, carry
from tfla.backends.triton.gates import FLOOR


class Walk(NamedTuple):
    """Constants of a kernel."""

    DK: Any
    DV: Any
    BLOCKS: Any  # of 64 columns that a consumer has
    L: Any  # steps of a tile
    STAGES: Any
    BACK: Any  # from the last tile to the first
    SEGMENTED: Any
    STATE: Any  # pieces start from states that are given, not from zeros
    FINAL: Any  # states behind pieces are wanted
    NORMALIZE: Any
    SAVE_D: Any  # d is wanted
    DELTA: Any  # the gate vector DELTA_P has -u and gets -u (y . y2), which are do and h


class Outer(NamedTuple):
    """What consumers read and write in memory."""

    out: Any
    state_in: Any
    state_out: Any
    n_in: Any
    n_out: Any


class Shared(NamedTuple):
    """Shared memory: what has STAGES stages, what the consumers exchange, and what only a normaliser takes."""

    x: Any
    y: Any  # 2 tiles a stage, one for each consumer
    z: Any
    y2: Any
    p: Any  # P of this tile and of the next
    g: Any
    w: Any
    full: Any
    free: Any
    ready: Any  # P of a tile, and with a normaliser n and the sums of P
    floor: Any  # exp(-m)
    matrix: Any  # weights of updates as a right operand
    n: Any  # of this tile and of the next, as `put_n` has it
    sums: Any  # of rows of P, two for each tile
    inverse: Any  # 1 / max(|d|, exp(-m)), one for each consumer
    begun: Any  # n that a piece starts from
    d: Any  # for the carrier: d, or parts of do . h


class State(NamedTuple):
    """Of a consumer, in registers."""

    C0: Any
    C1: Any  # where it has two blocks
    n: Any  # columns, of which the first three add up to n


class Piece(NamedTuple):
    """Of work."""

    b: Any  # batch row
    h: Any  # head
    start: Any  # its first step
    steps: Any
    tiles: Any


class Mine(NamedTuple):
    """What a consumer has."""

    i: Any  # steps of a tile, which read
    j: Any  # half of them, which update
    rk: Any  # half of n
    column: Any  # the first of a state, and of y


@gluon.jit
def load_tiles(X, Y, Z, Y2, shared, work, GROUP, walk):
    """The loader: one warp."""
    L: gl.constexpr = walk.L
    WIDTH: gl.constexpr = 64 * walk.BLOCKS
    each_y: gl.constexpr = 4 if walk.DELTA else 2
    n = 0
    column = gl.program_id(1) * (2 * WIDTH)
    for index in range(gl.program_id(0), work.pieces, gl.num_programs(0)):
        b, h, start, steps, _tile0 = piece(index, work, L, walk.SEGMENTED)
        tiles = (steps + L - 1) // L
        for i in range(0, tiles):
            t = start + (tiles - 1 - i if walk.BACK else i) * L
            end = start + steps
            s, phase = place(n, walk.STAGES)
            mbarrier.wait(shared.free.index(s), phase ^ 1)
            bar = shared.full.index(s)
            mbarrier.expect(bar, X.block_type.nbytes + Z.block_type.nbytes + each_y * Y.block_type.nbytes)
            async_load(Z, coordinates(b, h // GROUP, t, 0, end, work), bar, shared.z.index(s))
            async_load(X, coordinates(b, h // GROUP, t, 0, end, work), bar, shared.x.index(s))
            y = coordinates(b, h, t, column, end, work)
            y_right = coordinates(b, h, t, column + WIDTH, end, work)
            async_load(Y, y, bar, shared.y.index(2 * s))
            async_load(Y, y_right, bar, shared.y.index(2 * s + 1))
            if walk.DELTA:
                async_load(Y2, y, bar, shared.y2.index(2 * s))
                async_load(Y2, y_right, bar, shared.y2.index(2 * s + 1))
            n += 1
    last_stage(n, shared.full, shared.free, walk.STAGES)


@gluon.jit
def state_pointers(state, at, column, walk):
    """Of 64 columns of a state (dqk, dhv), transposed."""
    layout: gl.constexpr = of_product(walk.DK)
    v = column + gl.arange(0, 64, gl.SliceLayout(1, layout))
    k = gl.arange(0, walk.DK, gl.SliceLayout(0, layout))
    return state + at.to(gl.int64) * (walk.DK * walk.DV) + gl.expand_dims(v, 1) + gl.expand_dims(k, 0) * walk.DV


@gluon.jit
def first_state(index, mine, outer, work, walk):
    """That a piece of work starts from."""
    C0 = gl.zeros([64, walk.DK], gl.float32, of_product(walk.DK))
    C1 = gl.zeros([64, walk.DK], gl.float32, of_product(walk.DK))
    N = no_n()
    if walk.STATE:
        at = state_of(index, work)
        if walk.BLOCKS == 2:
            C1 = gl.load(state_pointers(outer.state_in, at, mine.column + 64, walk)).to(gl.float32)
        C0 = gl.load(state_pointers(outer.state_in, at, mine.column, walk)).to(gl.float32)
        if walk.NORMALIZE:
            N = first_n(gl.load(outer.n_in + at.to(gl.int64) * walk.DK + mine.rk))
    return State(C0, C1, N)


@gluon.jit
def leave_state(state, index, mine, outer, work, walk):
    """That behind a piece of work."""
    at = state_of(index, work)
    if walk.BLOCKS == 2:
        gl.store(state_pointers(outer.state_out, at, mine.column + 64, walk), state.C1)
    gl.store(state_pointers(outer.state_out, at, mine.column, walk), state.C0)
    if walk.NORMALIZE:
        gl.store(outer.n_out + at.to(gl.int64) * walk.DK + mine.rk, gl.sum(state.n, 1))


@gluon.jit
def next_weights(shared, s, half: gl.constexpr, walk):
    """Starts z x^T of the tile in stage s for one half of the updates."""
    L: gl.constexpr = walk.L
    z = shared.z.index(s).reshape([L, walk.DK])
    x = shared.x.index(s).reshape([L, walk.DK]).slice(half * (L // 2), L // 2, 0).permute((1, 0))
    return product(z, x)


@gluon.jit
def tile_of(shared, s, n, half: gl.constexpr, walk):
    """x, the consumer's y, z, gate vectors and P^T of the n-th tile, in stage s."""
    z = shared.z.index(s).reshape([walk.L, walk.DK])
    x = shared.x.index(s).reshape([walk.L, walk.DK])
    y = shared.y.index(2 * s + half)
    return x, y, z, shared.g.index(s), shared.p.index(n % 2).permute((1, 0))


@gluon.jit
def block_of(y, block: gl.constexpr, walk):
    """64 columns of a tile, transposed."""
    return y.reshape([walk.L, 64 * walk.BLOCKS]).slice(64 * block, 64, 1).permute((1, 0))


@gluon.jit
def put_dots(y, y2, to, half: gl.constexpr, walk):
    """y . y2 of each step over the consumer's columns, as the diagonal of y2 y^T: with two blocks the CUDA cores take
    longer for it alone than the tensor cores for all of it."""
    WIDTH: gl.constexpr = 64 * walk.BLOCKS
    y = y.reshape([walk.L, WIDTH])
    y2 = y2.reshape([walk.L, WIDTH])
    products = warpgroup_mma_wait(0, deps=[product(y2, y.permute((1, 0)))])
    layout: gl.constexpr = products.type.layout
    i = gl.expand_dims(gl.arange(0, walk.L, gl.SliceLayout(1, layout)), 1)
    j = gl.expand_dims(gl.arange(0, walk.L, gl.SliceLayout(0, layout)), 0)
    to.slice(half * walk.L, walk.L, 0).store(gl.sum(gl.where(i == j, products, 0.0), 1))


@gluon.jit
def start_output(C, z):
    """Starts C^T z^T. The state, rounded, is the left operand: to be waited for with the product."""
    A = as_left(C.to(z.dtype), z.shape[0])
    return product(A, z.permute((1, 0))), A


@gluon.jit
def add_updates(out, weight, y_t, p):
    """Starts out, weighted, + y^T P^T."""
    A = as_left(y_t, p.shape[1])
    return warpgroup_mma(A, p, out * weight, is_async=True), A


@gluon.jit
def update(C, carry, y_t, w, x):
    """Starts decay C + (y w)^T x."""
    B = scaled(y_t, w, x.shape[0], gl.DotOperandLayout(0, of_product(x.shape[1]), 2))
    return warpgroup_mma(B, x, C * carry, is_async=True), B


@gluon.jit
def first_block(C, out, weight, y_t, to, p, x, carry, shared, s, n, half: gl.constexpr, walk):
    """Ends that of two: its output goes over its columns of y, and its state is behind the tile."""
    if walk.NORMALIZE:
        d = read_n(shared.z.index(s).reshape([walk.L, walk.DK]), shared, n)
    out, A = add_updates(out, weight, y_t, p)
    C, B = update(C, carry, y_t, shared.w.index(s), x)
    if walk.NORMALIZE:
        out, A, d = warpgroup_mma_wait(1, deps=[out, A, d])
        put_inverse(d, shared, s, n, half, walk.L, walk.SAVE_D)
        out = divided(out, shared, half)
    else:
        out, A = warpgroup_mma_wait(1, deps=[out, A])
    to.store(out.to(to.dtype))
    C, B = warpgroup_mma_wait(0, deps=[C, B])
    return C


@gluon.jit
def walk_tile(state, place_n, step, at, mine, outer, shared, work, half: gl.constexpr, walk):
    """A tile, of which P is there already, to the departure of its output; P of the next tile, which arrives."""
    L: gl.constexpr = walk.L
    STAGES: gl.constexpr = walk.STAGES
    of_out: gl.constexpr = of_product(L)
    C, C1, N = state
    s, phase, n = place_n
    x, y, z, g, p = tile_of(shared, s, n, half, walk)
    t = (at.tiles - 1 - step if walk.BACK else step) * L
    carry = gl.expand_dims(g.slice(CARRY * L, 1, 0).load(gl.SliceLayout(0, of_product(walk.DK))), 0)
    y_b = block_of(y, 0, walk)
    if walk.DELTA and walk.BLOCKS == 2:
        put_dots(y, shared.y2.index(2 * s + half), shared.d.index(s), half, walk)
    out, A = start_output(C, z)
    # The stage of the previous tile is free once its output has left.
    tma.store_wait(0)
    mbarrier.arrive(shared.free.index((s + STAGES - 1) % STAGES), count=1, pred=n > 0)
    weight = gl.expand_dims(g.slice(OUT * L, L, 0).load(gl.SliceLayout(0, of_out)), 0)
    out, A = warpgroup_mma_wait(0, deps=[out, A])
    y_t = y_b.load(of_out)
    if walk.DELTA and walk.BLOCKS == 1:
        put_dot(y_t, block_of(shared.y2.index(2 * s + half), 0, walk), shared.d.index(s), half, L)
    mbarrier.wait(shared.ready.index(n % 2), (n // 2) & 1)
    if walk.BLOCKS == 2:
        C0 = first_block(C, out, weight, y_t, y_b, p, x, carry, shared, s, n, half, walk)
        C = C1
        y_b = block_of(y, 1, walk)
        out, A = start_output(C, z)
        weight = gl.expand_dims(g.slice(OUT * L, L, 0).load(gl.SliceLayout(0, of_out)), 0)
        out, A = warpgroup_mma_wait(0, deps=[out, A])
        y_t = y_b.load(of_out)
    elif walk.NORMALIZE:
        d = warpgroup_mma_wait(0, deps=[read_n(z, shared, n)])
        put_inverse(d, shared, s, n, half, L, walk.SAVE_D)
    out, A = add_updates(out, weight, y_t, p)
    C, B = update(C, carry, y_t, shared.w.index(s), x)
    if walk.NORMALIZE:
        N = update_n(N, x, half * 64, shared, s, L)
    # The next tile arrives, and its P is made, while the products of this one are on their way.
    s, phase = next_stage(s, phase, STAGES)
    n += 1
    mbarrier.wait(shared.full.index(s), phase)
    S = next_weights(shared, s, half, walk)
    if walk.NORMALIZE:
        out, A = warpgroup_mma_wait(3, deps=[out, A])  # all but C, N and S
        out = divided(out, shared, half)
    else:
        out, A = warpgroup_mma_wait(2, deps=[out, A])
    y_b.store(out.to(y.dtype))
    fence_async_shared()
    async_store(outer.out, coordinates(at.b, at.h, at.start + t, mine.column, at.start + at.steps, work), y)
    D = gate_matrix(shared.g.index(s), L, half, of_product(L // 2))
    if walk.NORMALIZE:
        S, C, B, N = warpgroup_mma_wait(0, deps=[S, C, B, N])
    else:
        S, C, B = warpgroup_mma_wait(0, deps=[S, C, B])
    P = seen(S, D, mine.i, mine.j, half, walk.BACK)
    if walk.NORMALIZE:
        put_sums(P, shared, n, half)
        put_n(gl.sum(N, 1), shared.n.index(n % 2), half * 64)
    shared.p.index(n % 2).slice(half * (L // 2), L // 2, 1).store(P.to(y.dtype))
    fence_async_shared()
    barrier()
    mbarrier.arrive(shared.ready.index(n % 2), count=1)
    if walk.BLOCKS == 2:
        return State(C0, C, N), Place(s, phase, n)
    else:
        return State(C, C1, N), Place(s, phase, n)


@gluon.jit
def consume(half: gl.constexpr, outer, shared, work, walk):
    """One warpgroup, with BLOCKS x 64 columns; with a normaliser also half of n."""
    L: gl.constexpr = walk.L
    i = gl.arange(0, L, gl.SliceLayout(1, of_product(L // 2)))
    j = gl.arange(0, L // 2, gl.SliceLayout(0, of_product(L // 2)))
    rk = rows_of_n(half * 64)
    column = gl.program_id(1) * (128 * walk.BLOCKS) + half * (64 * walk.BLOCKS)
    mine = Mine(i, j, rk, column)
    place_n = Place(0, 0, 0)
    mbarrier.wait(shared.full.index(0), 0)
    S = next_weights(shared, 0, half, walk)
    D = gate_matrix(shared.g.index(0), L, half, of_product(L // 2))
    S = warpgroup_mma_wait(0, deps=[S])
    P = seen(S, D, mine.i, mine.j, half, walk.BACK)
    if walk.NORMALIZE:
        put_sums(P, shared, 0, half)
    shared.p.index(0).slice(half * (L // 2), L // 2, 1).store(P.to(shared.p.dtype))
    fence_async_shared()
    barrier()
    mbarrier.arrive(shared.ready.index(0), count=1)
    turn = 0
    index = gl.program_id(0)
    while index < work.pieces:
        b, h, start, steps, _tile0 = piece(index, work, L, walk.SEGMENTED, True)
        tiles = (steps + L - 1) // L
        at = Piece(b, h, start, steps, tiles)
        state = first_state(index, mine, outer, work, walk)
        if walk.NORMALIZE:
            put_n(gl.sum(state.n, 1), shared.n.index(place_n.n % 2), half * 64)
            fence_async_shared()
            barrier()
            mbarrier.arrive(shared.begun, count=1)
            mbarrier.wait(shared.begun, turn)
            turn ^= 1
        for step in range(0, tiles):
            state, place_n = walk_tile(state, place_n, step, at, mine, outer, shared, work, half, walk)
        if walk.FINAL:
            leave_state(state, index, mine, outer, work, walk)
        index = next_piece(index)
    tma.store_wait(0)
    if walk.SAVE_D or walk.DELTA:
        mbarrier.arrive(shared.free.index((place_n.s + walk.STAGES - 1) % walk.STAGES), count=1)


@gluon.jit(do_not_specialize=NUMBERS)
def columns(
    X, Y, Z, Y2, Out, gates, i_gate, f_gate, state_in, state_out, n_in, n_out, d_out, order,
    T, tiles_of_head, H, GROUP, length, pieces, ib, it, ih, fb, ft, fh, scale, log_scale,
    DK: gl.constexpr, DV: gl.constexpr, BLOCKS: gl.constexpr, L: gl.constexpr, STAGES: gl.constexpr,
    BACK: gl.constexpr, SEGMENTED: gl.constexpr, STATE: gl.constexpr, FINAL: gl.constexpr,
    NORMALIZE: gl.constexpr, SAVE_D: gl.constexpr, DELTA: gl.constexpr, PACKED: gl.constexpr,
    MADE: gl.constexpr, INPUT_GATE: gl.constexpr, SIGMOID_I: gl.constexpr, SIGMOID_F: gl.constexpr,
):  # fmt: skip
    """Fills Out, and of the rest what the constants say."""
    partitions(
        X, Y, Z, Y2,
        Source(
            gates, i_gate, f_gate, ib, it, ih, fb, ft, fh, scale, log_scale, MADE, INPUT_GATE, SIGMOID_I, SIGMOID_F
        ),
        d_out, tiles_of_head, GROUP, Outer(Out, state_in, state_out, n_in, n_out),
        Work(T, H, length, pieces, order if PACKED else None),
        Walk(DK, DV, BLOCKS, L, STAGES, BACK, SEGMENTED, STATE, FINAL, NORMALIZE, SAVE_D, DELTA),
    )  # fmt: skip


@gluon.jit
def partitions(X, Y, Z, Y2, source, d_out, tiles_of_head, GROUP, outer, work, walk):
    """Gives them shared memory, and starts them."""
    L: gl.constexpr = walk.L
    STAGES: gl.constexpr = walk.STAGES
    dtype: gl.constexpr = X.dtype
    x = ring_of(X, STAGES)
    z = ring_of(Z, STAGES)
    y = ring_of(Y, 2 * STAGES)
    y2 = ring_of(Y, 2 * STAGES) if walk.DELTA else None
    p = matrices(dtype, 2, L, L)
    g = vectors(gl.float32, STAGES, GATES * L)
    w = vectors(dtype, STAGES, 2 * L)
    floor = vectors(gl.float32, STAGES, L) if walk.NORMALIZE else None
    matrix = matrices(dtype, STAGES, 8, L) if walk.NORMALIZE else None
    n = matrices(dtype, 2, 8, walk.DK) if walk.NORMALIZE else None
    sums = vectors(gl.float32, 4, L) if walk.NORMALIZE else None
    inverse = vectors(gl.float32, 2, L) if walk.NORMALIZE else None
    d = g  # with nothing to carry anything
    if walk.NORMALIZE or walk.DELTA:
        parts: gl.constexpr = 2 if walk.BLOCKS == 2 else 8  # of `put_dots` or `put_dot`, both consumers'
        d = vectors(gl.float32, STAGES, (parts if walk.DELTA else 1) * L)
    consumer: gl.constexpr = CONSUMER_MOST if walk.BLOCKS == 2 else CONSUMER
    filler: gl.constexpr = FILLER_LEAST if walk.BLOCKS == 2 else FILLER
    CARRIED: gl.constexpr = OF_DELTA if walk.DELTA else (OF_D if walk.SAVE_D else NOTHING)
    full, free = stage_barriers(STAGES, arrivals(CARRIED), 2)
    ready = barriers(2, 2)
    begun = barrier_of(2) if walk.NORMALIZE else None
    fence_async_shared()
    shared = Shared(x, y, z, y2, p, g, w, full, free, ready, floor, matrix, n, sums, inverse, begun, d)
    rings = GateRings(g, w, floor, matrix)
    gater: gl.constexpr = Gater(
        L, STAGES, walk.BACK, walk.SEGMENTED, FLOOR if walk.NORMALIZE else None,
        GATERS=2 if walk.BLOCKS == 1 or walk.NORMALIZE else 1,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consume, (0, outer, shared, work, walk)),
            (consume, (1, outer, shared, work, walk)),
            (load_tiles, (X, Y, Z, Y2, shared, work, GROUP, walk)),
            (load_gates, (0, source, rings, full, free, work, tiles_of_head, gater)),
            (load_gates, (1, source, rings, full, free, work, tiles_of_head, gater)),
            (carry, (
                d, d_out, source.vectors, full, free, work, tiles_of_head,
                Carrier(L, STAGES, walk.BACK, walk.SEGMENTED, CARRIED),
            )),
        ],
        [4, 1, 1, 1, 1],
        [consumer, filler, filler, filler, filler],
    )  # fmt: skip
