"""dq, and walking back dk: one program walks all heads it is given, with 128 rows of their states.

The partitions, and who waits for whom, are those of :mod:`.columns`. Per tile a consumer, which has 64 rows of the
state C, (dqk, dhv), as BLOCKS pieces of 128 columns, computes

    out^T = C z^T, weighted, + x^T P^T
    C     = decay C + (x w)^T y
    P     = (z y^T + delta) weighted, of the next tile: half of the updates each

x, y, z are k, v, do for dq and q, do, v for dk. What `out` is a gradient of, q or k, comes with the stage too: its
product with `out` is summed over the rows, by the warps for the carrier, which brings the sum to memory for the
gradients of the gates; then `out` overwrites it and leaves by TMA. With a normaliser there is one more column of the
state, n, and dq's walk, which has q, leaves what segments add to its cotangent. Without one, dk of heads of 128 x 128
is made with dv, by :mod:`.both`.

All of it is linear in the columns: where a program cannot hold them, dhv > 256, several share them, PIECES. Two and two
add up their outputs in memory (:mod:`.pairs`), of more what pairs leave is to be summed; the first has delta and n.
TRANSPOSED it is o and dv for dqk > 128, where :mod:`.columns` cannot hold a state: rows are those of C^T, and x, y, z
are v, k, q for o and do, q, k for dv. Where a program has all of dqk, 256, that for o has all of n, too, and divides
(:mod:`.denominators`).
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

from tfla.backends.hopper.checkpoints import put_mark, row_dots
from tfla.backends.hopper.gate_warp import ALL, Gater, GateRings, Source, load_gates
from tfla.backends.hopper.mma import (
    as_left,
    gate_matrix,
    of_product,
    product,
    put_dot,
    scaled,
    seen,
    state_pointers,
    weights,
)
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
from tfla.backends.hopper.split_reduce import PAIR, async_add, clear
from tfla.backends.hopper.store_warp import NOTHING, OF_D, OF_SUMS, Carrier, arrivals, carry
from tfla.backends.triton.gates import DELTA_P, FLOOR


class Walk(NamedTuple):
    """Constants of a kernel."""

    DX: Any
    DY: Any
    PIECES: Any  # programs that share the columns
    WIDTH: Any  # columns of one
    BLOCKS: Any  # of 128 columns of them
    L: Any  # steps of a tile
    STAGES: Any
    MARKS: Any  # steps between marks
    BACK: Any  # from the last tile to the first
    SEGMENTED: Any
    STATE: Any  # pieces start from states that are given, not from zeros
    FINAL: Any  # states behind pieces are wanted
    NORMALIZE: Any
    DELTA: Any  # delta is not zero
    TRANSPOSED: Any
    ADDS: Any  # what pieces add to the cotangent of n is wanted
    DIVIDES: Any  # outputs are divided by the denominators
    SAVE_D: Any  # which are wanted


class Outer(NamedTuple):
    """What consumers read and write in memory."""

    out: Any
    state_in: Any
    state_out: Any
    n_in: Any
    n_out: Any  # n behind pieces, or with ADDS what they add to its cotangent
    marks: Any
    n_marks: Any
    dots: Any


class Shared(NamedTuple):
    """Shared memory: what has STAGES stages, and what the consumers exchange."""

    x: Any
    y: Any
    z: Any
    w: Any  # q or k, 2 tiles a stage, one for each consumer
    p: Any  # P of this tile and of the next
    g: Any
    u: Any
    delta: Any
    s: Any  # for the carrier: parts of w . out
    full: Any
    free: Any
    ready: Any  # P of a tile, and where it divides n and the sums of P
    # Where it divides, as :mod:`.columns` has them.
    floor: Any
    matrix: Any
    n: Any
    sums: Any
    inverse: Any
    begun: Any
    d: Any


class State(NamedTuple):
    """Of a consumer, in registers."""

    C0: Any
    C1: Any  # where it has two blocks
    n: Any
    dn: Any  # what tiles add to the cotangent of n before their piece
    decay: Any  # since there
    N0: Any  # n, where it divides: 64 of the consumer's 128
    N1: Any


class Piece(NamedTuple):
    """Of work."""

    b: Any  # batch row
    h: Any  # head
    start: Any  # its first step
    steps: Any
    tiles: Any
    mark: Any  # before its first


class Mine(NamedTuple):
    """What a consumer has."""

    i: Any  # steps of a tile, which read
    j: Any  # half of them, which update
    rk: Any  # rows of n
    has_n: Any  # whether n is its program's
    rn: Any  # rows of n where it divides, of the first half of the consumer's
    row: Any  # the first of a state
    column: Any
    part: Any  # of the programs that share the columns


@gluon.jit
def load_tiles(X, Y, Z, W, shared, work, GROUP, walk):
    """The loader: one warp."""
    L: gl.constexpr = walk.L
    n = 0
    row = gl.program_id(1) // walk.PIECES * 128
    column = gl.program_id(1) % walk.PIECES * Y.block_type.shape[-1]
    for index in range(gl.program_id(0), work.pieces, gl.num_programs(0)):
        b, h, start, steps, _tile0 = piece(index, work, L, walk.SEGMENTED)
        tiles = (steps + L - 1) // L
        for i in range(0, tiles):
            t = start + (tiles - 1 - i if walk.BACK else i) * L
            end = start + steps
            s, phase = place(n, walk.STAGES)
            mbarrier.wait(shared.free.index(s), phase ^ 1)
            bar = shared.full.index(s)
            of_w: gl.constexpr = 0 if walk.TRANSPOSED else 2 * W.block_type.nbytes
            mbarrier.expect(bar, X.block_type.nbytes + Y.block_type.nbytes + Z.block_type.nbytes + of_w)
            of_x = h if walk.TRANSPOSED else h // GROUP
            of_y = h // GROUP if walk.TRANSPOSED else h
            y = coordinates(b, of_y, t, column, end, work)
            x = coordinates(b, of_x, t, row, end, work)
            async_load(Z, y, bar, shared.z.index(s))
            async_load(Y, y, bar, shared.y.index(s))
            async_load(X, x, bar, shared.x.index(s))
            if not walk.TRANSPOSED:
                async_load(W, x, bar, shared.w.index(2 * s))
                async_load(W, coordinates(b, of_x, t, row + 64, end, work), bar, shared.w.index(2 * s + 1))
            n += 1
    last_stage(n, shared.full, shared.free, walk.STAGES)


@gluon.jit
def state_block(state, at, mine, block: gl.constexpr, walk):
    """Pointers of a consumer's 128 columns of a state."""
    column = mine.column + 128 * block
    return state_pointers(state, at, mine.row, column, walk.DX, walk.DY, walk.TRANSPOSED, of_product(128))


@gluon.jit
def first_state(index, mine, outer, work, walk):
    """That a piece of work starts from."""
    C0 = gl.zeros([64, 128], gl.float32, of_product(128))
    C1 = gl.zeros([64, 128], gl.float32, of_product(128))
    N = gl.zeros([64], gl.float32, gl.SliceLayout(1, of_product(walk.L)))
    dn = gl.zeros([64], gl.float32, gl.SliceLayout(1, of_product(walk.L)))
    N0, N1 = no_n(), no_n()
    if walk.STATE:
        at = state_of(index, work)
        C0 = gl.load(state_block(outer.state_in, at, mine, 0, walk)).to(gl.float32)
        if walk.BLOCKS == 2:
            C1 = gl.load(state_block(outer.state_in, at, mine, 1, walk)).to(gl.float32)
        if walk.NORMALIZE:
            N = gl.load(outer.n_in + at.to(gl.int64) * walk.DX + mine.rk, mask=mine.has_n, other=0.0)
        if walk.DIVIDES:
            n_in = outer.n_in + at.to(gl.int64) * walk.DY + mine.rn
            N0, N1 = first_n(gl.load(n_in)), first_n(gl.load(n_in + 64))
    return State(C0, C1, N, dn, 1.0, N0, N1)


@gluon.jit
def leave_state(state, index, mine, outer, work, walk):
    """That behind a piece of work."""
    at = state_of(index, work)
    gl.store(state_block(outer.state_out, at, mine, 0, walk), state.C0)
    if walk.BLOCKS == 2:
        gl.store(state_block(outer.state_out, at, mine, 1, walk), state.C1)
    if walk.NORMALIZE:
        gl.store(outer.n_out + at.to(gl.int64) * walk.DX + mine.rk, state.n, mask=mine.has_n)
    if walk.DIVIDES:
        n_out = outer.n_out + at.to(gl.int64) * walk.DY + mine.rn
        first = mine.rn * 0 + gl.program_id(1) == 0
        gl.store(n_out, gl.sum(state.N0, 1), mask=first)
        gl.store(n_out + 64, gl.sum(state.N1, 1), mask=first)


@gluon.jit
def start_weights(shared, s, half: gl.constexpr, walk):
    """Starts z y^T of the tile in stage s for one half of the updates."""
    L: gl.constexpr = walk.L
    z = shared.z.index(s).reshape([L, walk.WIDTH])
    y = shared.y.index(s).reshape([L, walk.WIDTH]).slice(half * (L // 2), L // 2, 0).permute((1, 0))
    return product(z, y)


@gluon.jit
def put_weights(S, D, shared, s, n, mine, half: gl.constexpr, walk):
    """Weights what `start_weights` has made of the n-th tile, in stage s, by D, and says that P is there."""
    L: gl.constexpr = walk.L
    delta = shared.delta.index(s)
    to = shared.p.index(n % 2)
    if walk.DELTA:
        if walk.BACK:
            add = gl.expand_dims(delta.slice(half * (L // 2), L // 2, 0).load(gl.SliceLayout(0, S.type.layout)), 0)
        else:
            add = gl.expand_dims(delta.load(gl.SliceLayout(1, S.type.layout)), 1)
        S += add
    P = seen(S, D, mine.i, mine.j, half, walk.BACK)
    if walk.DIVIDES:
        put_sums(P, shared, n, half)
    to.slice(half * (L // 2), L // 2, 1).store(P.to(to.dtype))
    fence_async_shared()
    barrier()
    mbarrier.arrive(shared.ready.index(n % 2), count=1)


@gluon.jit
def leave_dots(state, mark, mine, half: gl.constexpr, outer, walk):
    """Of what the state is a cotangent of at a mark with it, a part for each warp."""
    layout: gl.constexpr = of_product(128)
    dot = row_dots(state.C0, outer.marks, mark, mine.row, mine.column, walk.DX, walk.DY, layout)
    if walk.BLOCKS == 2:
        dot += row_dots(state.C1, outer.marks, mark, mine.row, mine.column + 128, walk.DX, walk.DY, layout)
    if walk.NORMALIZE:
        n_mark = gl.load(outer.n_marks + mark * walk.DX + mine.rk, mask=mine.has_n, other=0.0)
        dot += gl.convert_layout(state.n * n_mark, gl.SliceLayout(1, layout), assert_trivial=True)
    warps = gl.sum(gl.reshape(dot, [4, 16]), 1)
    at = outer.dots + (mark * gl.num_programs(1) + gl.program_id(1)) * 8 + half * 4
    gl.store(at + gl.arange(0, 4, warps.type.layout), warps)


@gluon.jit
def leave_mark(state, mark, mine, outer, walk):
    """The state before a mark."""
    put_mark(state.C0, outer.marks, mark, mine.row, mine.column, walk.DX, walk.DY)
    if walk.BLOCKS == 2:
        put_mark(state.C1, outer.marks, mark, mine.row, mine.column + 128, walk.DX, walk.DY)
    if walk.NORMALIZE:
        gl.store(outer.n_marks + mark * walk.DX + mine.rk, state.n, mask=mine.has_n)


@gluon.jit
def update_state(C0, C1, carry, x_t, y, u, walk):
    """Starts decay C + (x w)^T y."""
    B = scaled(x_t, u, walk.L, gl.DotOperandLayout(0, of_product(128), 2))
    C0 = warpgroup_mma(B, y.slice(0, 128, 1), C0 * carry, is_async=True)
    if walk.BLOCKS == 2:
        C1 = warpgroup_mma(B, y.slice(128, 128, 1), C1 * carry, is_async=True)
    return C0, C1, B


@gluon.jit
def update_vector(N, x, shared, s, walk):
    """decay n + x w."""
    L: gl.constexpr = walk.L
    layout: gl.constexpr = of_product(L)
    N = N * gl.max(shared.g.index(s).slice(CARRY * L, 1, 0).load(gl.SliceLayout(0, layout)), 0)
    if walk.DELTA or not walk.BACK:
        # Not of A and B, whose registers MMAs read, and not before `out` has left: there are too few.
        update = weights(shared.u.index(s), L, gl.SliceLayout(0, layout))
        if walk.BACK:
            update = update * shared.delta.index(s).load(gl.SliceLayout(0, layout))
        N += gl.sum(x.load(layout).to(gl.float32) * gl.expand_dims(update, 0), 1)
    return N


@gluon.jit
def add_up(dn, decay, q_t, g, delta, L: gl.constexpr):
    """dn with what a tile adds, and the decay up to the next."""
    layout: gl.constexpr = of_product(L)
    by_step: gl.constexpr = gl.SliceLayout(0, layout)
    weight = g.slice(OUT * L, L, 0).load(by_step) * delta.load(by_step) * decay
    dn += gl.sum(q_t.load(layout).to(gl.float32) * gl.expand_dims(weight, 0), 1)
    return dn, decay * gl.max(g.slice(CARRY * L, 1, 0).load(by_step), 0)


@gluon.jit
def from_state(state, place_n, z, shared, walk):
    """C z^T + n delta^T, back C z^T + n, weighted. Meanwhile the previous output leaves, and its stage is free."""
    L: gl.constexpr = walk.L
    by_step: gl.constexpr = gl.SliceLayout(0, of_product(L))
    dtype: gl.constexpr = shared.x.dtype
    s, _phase, n = place_n
    A = as_left(state.C0.to(dtype), L)
    out = product(A, z.slice(0, 128, 1).permute((1, 0)))
    tma.store_wait(0)
    mbarrier.arrive(shared.free.index((s + walk.STAGES - 1) % walk.STAGES), count=1, pred=n > 0)
    out, A = warpgroup_mma_wait(0, deps=[out, A])
    if walk.BLOCKS == 2:
        A = as_left(state.C1.to(dtype), L)
        out = warpgroup_mma(A, z.slice(128, 128, 1).permute((1, 0)), out, is_async=True)
        out, A = warpgroup_mma_wait(0, deps=[out, A])
    if walk.NORMALIZE:
        if walk.BACK:
            out += gl.expand_dims(state.n, 1)
        elif walk.DELTA:
            out += gl.expand_dims(state.n, 1) * gl.expand_dims(shared.delta.index(s).load(by_step), 0)
    return out * gl.expand_dims(shared.g.index(s).slice(OUT * L, L, 0).load(by_step), 0)


@gluon.jit
def leave_output(w, t, at, mine, outer, work, walk):
    """The output, which lies in w, of the tile at step t of a piece."""
    end = at.start + at.steps
    if walk.PIECES == 1:
        async_store(outer.out, coordinates(at.b, at.h, at.start + t, mine.row, end, work), w)
    else:
        column = at.h * (walk.PIECES // PAIR) + mine.part // PAIR
        async_add(outer.out, coordinates(at.b, column, at.start + t, mine.row, end, work), w)


@gluon.jit
def next_tile(state, B, place_n, shared, mine, half: gl.constexpr, walk):
    """The next tile arrives, and its P is made, while the updates of the state, which read B, are on their way."""
    L: gl.constexpr = walk.L
    C0, C1, N, dn, decay, N0, N1 = state
    s, phase = next_stage(place_n.s, place_n.phase, walk.STAGES)
    n = place_n.n + 1
    mbarrier.wait(shared.full.index(s), phase)
    S = start_weights(shared, s, half, walk)
    D = gate_matrix(shared.g.index(s), L, half, of_product(L // 2))
    if walk.DIVIDES:
        put_n(gl.sum(N0, 1), shared.n.index(n % 2), half * 128)
        put_n(gl.sum(N1, 1), shared.n.index(n % 2), half * 128 + 64)
        S = warpgroup_mma_wait(0, deps=[S])
    elif walk.BLOCKS == 2:
        S, C0, C1, B = warpgroup_mma_wait(0, deps=[S, C0, C1, B])
    else:
        S, C0, B = warpgroup_mma_wait(0, deps=[S, C0, B])
    put_weights(S, D, shared, s, n, mine, half, walk)
    return State(C0, C1, N, dn, decay, N0, N1), Place(s, phase, n)


@gluon.jit
def at_mark(state, t, at, mine, outer, work, half: gl.constexpr, walk):
    """What is due behind the tile at step t of a piece, if there a mark is."""
    step = t if walk.BACK else t + walk.L
    if step % walk.MARKS == 0 and step < at.steps and step > 0:
        mark = at.mark + step // walk.MARKS * work.H
        if walk.BACK:
            leave_dots(state, mark, mine, half, outer, walk)
        else:
            leave_mark(state, mark, mine, outer, walk)


@gluon.jit
def walk_tile(state, place_n, step, at, mine, outer, shared, work, half: gl.constexpr, walk):
    """A tile, of which P is there already, to the departure of its output; P of the next tile, which arrives."""
    L: gl.constexpr = walk.L
    s, _phase, n = place_n
    x = shared.x.index(s).reshape([L, 128]).slice(half * 64, 64, 1).permute((1, 0))
    y = shared.y.index(s).reshape([L, walk.WIDTH])
    z = shared.z.index(s).reshape([L, walk.WIDTH])
    w = shared.w.index(2 * s + half)
    w_t = w.reshape([L, 64]).permute((1, 0))
    g = shared.g.index(s)
    t = (at.tiles - 1 - step if walk.BACK else step) * L
    carry = gl.expand_dims(g.slice(CARRY * L, 1, 0).load(gl.SliceLayout(0, of_product(128))), 0)
    out = from_state(state, place_n, z, shared, walk)
    C0, C1, N, dn, decay, N0, N1 = state
    if walk.DIVIDES:  # before more is in registers
        mbarrier.wait(shared.ready.index(n % 2), (n // 2) & 1)
        d = warpgroup_mma_wait(0, deps=[read_n(z, shared, n)])
        put_inverse(d, shared, s, n, half, L, walk.SAVE_D)
    x_t = x.load(of_product(L))
    if not walk.DIVIDES:
        mbarrier.wait(shared.ready.index(n % 2), (n // 2) & 1)
    A = as_left(x_t, L)
    out = warpgroup_mma(A, shared.p.index(n % 2).permute((1, 0)), out, is_async=True)
    C0, C1, B = update_state(C0, C1, carry, x_t, y, shared.u.index(s), walk)
    out, A = warpgroup_mma_wait(walk.BLOCKS, deps=[out, A])
    if walk.DIVIDES:
        out = divided(out, shared, half)
    if not walk.TRANSPOSED:
        put_dot(out, w_t, shared.s.index(s), half, L)
    if walk.ADDS:
        dn, decay = add_up(dn, decay, w_t, g, shared.delta.index(s), L)
    w_t.store(out.to(w.dtype))
    fence_async_shared()
    leave_output(w, t, at, mine, outer, work, walk)
    if walk.NORMALIZE:
        N = update_vector(N, x, shared, s, walk)
    if walk.DIVIDES:
        N0 = update_n(N0, y, half * 128, shared, s, L)
        N1 = update_n(N1, y, half * 128 + 64, shared, s, L)
        C0, C1, B, N0, N1 = warpgroup_mma_wait(0, deps=[C0, C1, B, N0, N1])  # P in flight, too, takes more registers
    state, place_n = next_tile(State(C0, C1, N, dn, decay, N0, N1), B, place_n, shared, mine, half, walk)
    if not walk.TRANSPOSED:
        at_mark(state, t, at, mine, outer, work, half, walk)
    return state, place_n


@gluon.jit
def consume(half: gl.constexpr, outer, shared, work, walk):
    """One warpgroup, with 64 rows."""
    L: gl.constexpr = walk.L
    of_p: gl.constexpr = of_product(L // 2)
    i = gl.arange(0, L, gl.SliceLayout(1, of_p))
    j = gl.arange(0, L // 2, gl.SliceLayout(0, of_p))
    row = gl.program_id(1) // walk.PIECES * 128 + half * 64
    part = gl.program_id(1) % walk.PIECES
    rk = row + gl.arange(0, 64, gl.SliceLayout(1, of_product(L)))
    mine = Mine(i, j, rk, rk * 0 + part == 0, rows_of_n(half * 128), row, part * walk.WIDTH, part)
    place_n = Place(0, 0, 0)
    mbarrier.wait(shared.full.index(0), 0)
    S = warpgroup_mma_wait(0, deps=[start_weights(shared, 0, half, walk)])
    put_weights(S, gate_matrix(shared.g.index(0), L, half, of_p), shared, 0, 0, mine, half, walk)
    turn = 0
    index = gl.program_id(0)
    while index < work.pieces:
        b, h, start, steps, _tile0 = piece(index, work, L, walk.SEGMENTED, True)
        tiles = (steps + L - 1) // L
        mark = ((b.to(gl.int64) * work.T + start) // walk.MARKS - 1) * work.H + h
        at = Piece(b, h, start, steps, tiles, mark)
        state = first_state(index, mine, outer, work, walk)
        if walk.DIVIDES:
            put_n(gl.sum(state.N0, 1), shared.n.index(place_n.n % 2), half * 128)
            put_n(gl.sum(state.N1, 1), shared.n.index(place_n.n % 2), half * 128 + 64)
            fence_async_shared()
            barrier()
            mbarrier.arrive(shared.begun, count=1)
            mbarrier.wait(shared.begun, turn)
            turn ^= 1
        for step in range(0, tiles):
            state, place_n = walk_tile(state, place_n, step, at, mine, outer, shared, work, half, walk)
        if walk.FINAL:
            leave_state(state, index, mine, outer, work, walk)
        if walk.ADDS:
            at_n = outer.n_out + state_of(index, work).to(gl.int64) * walk.DX + mine.rk
            gl.store(at_n, state.dn, mask=mine.has_n)
        index = next_piece(index)
    tma.store_wait(0)
    if not walk.TRANSPOSED or walk.SAVE_D:
        mbarrier.arrive(shared.free.index((place_n.s + walk.STAGES - 1) % walk.STAGES), count=1)


@gluon.jit(do_not_specialize=NUMBERS)
def rows(
    X, Y, Z, W, Out, gates, i_gate, f_gate, w_out, state_in, state_out, n_in, n_out, marks, n_marks, dots, cleared,
    order, T, tiles_of_head, H, GROUP, length, pieces, ib, it, ih, fb, ft, fh, scale, log_scale,
    DX: gl.constexpr, DY: gl.constexpr, PIECES: gl.constexpr, L: gl.constexpr, STAGES: gl.constexpr,
    MARKS: gl.constexpr, BACK: gl.constexpr, SEGMENTED: gl.constexpr, STATE: gl.constexpr, FINAL: gl.constexpr,
    NORMALIZE: gl.constexpr, DELTA: gl.constexpr, TRANSPOSED: gl.constexpr, DIVIDES: gl.constexpr,
    SAVE_D: gl.constexpr, PACKED: gl.constexpr, MADE: gl.constexpr, INPUT_GATE: gl.constexpr,
    SIGMOID_I: gl.constexpr, SIGMOID_F: gl.constexpr,
):  # fmt: skip
    """States are (DX, DY), TRANSPOSED in memory (DY, DX); then W and the marks are not used, and w_out gets d.

    Outputs of pairs of PIECES programs, each with as many of the columns, lie side by side as if each head were so
    many. cleared: zeros, one for each pair.
    """
    WIDTH: gl.constexpr = DY // PIECES
    ADDS: gl.constexpr = SEGMENTED and NORMALIZE and DELTA and not BACK
    partitions(
        (X, Y, Z, W),
        Source(
            gates, i_gate, f_gate, ib, it, ih, fb, ft, fh, scale, log_scale, MADE, INPUT_GATE, SIGMOID_I, SIGMOID_F
        ),
        w_out, cleared, tiles_of_head, GROUP,
        Outer(Out, state_in, state_out, n_in, n_out, marks, n_marks, dots),
        Work(T, H, length, pieces, order if PACKED else None),
        Walk(
            DX, DY, PIECES, WIDTH, WIDTH // 128, L, STAGES, MARKS, BACK, SEGMENTED, STATE, FINAL, NORMALIZE, DELTA,
            TRANSPOSED, ADDS, DIVIDES, SAVE_D,
        ),
    )  # fmt: skip


@gluon.jit
def second(source, rings, out, zeros, cleared, full, free, work, tiles_of_head, gater, walk):
    """The second gater, or of a pair the clearer."""
    if walk.PIECES == 1:
        load_gates(1, source, rings, full, free, work, tiles_of_head, gater)
    else:
        clear(out, zeros, cleared, full, free, work, walk)


@gluon.jit
def partitions(tensors, source, w_out, cleared, tiles_of_head, GROUP, outer, work, walk):
    """Gives them shared memory, and starts them."""
    X, Y, Z, W = tensors
    L: gl.constexpr = walk.L
    STAGES: gl.constexpr = walk.STAGES
    dtype: gl.constexpr = X.dtype
    x = ring_of(X, STAGES)
    y = ring_of(Y, STAGES)
    z = ring_of(Z, STAGES)
    w = ring_of(W, 2 * STAGES)
    p = matrices(dtype, 2, L, L)
    g = vectors(gl.float32, STAGES, GATES * L)
    u = vectors(dtype, STAGES, 2 * L)
    delta = vectors(gl.float32, STAGES, L)
    s = delta if walk.TRANSPOSED else vectors(gl.float32, STAGES, 8 * L)
    d = vectors(gl.float32, STAGES, L) if walk.DIVIDES else s
    floor = vectors(gl.float32, STAGES, L) if walk.DIVIDES else None
    matrix = matrices(dtype, STAGES, 8, L) if walk.DIVIDES else None
    n = matrices(dtype, 2, 8, walk.DY) if walk.DIVIDES else None
    sums = vectors(gl.float32, 4, L) if walk.DIVIDES else None
    inverse = vectors(gl.float32, 2, L) if walk.DIVIDES else None
    begun = barrier_of(2) if walk.DIVIDES else None
    CARRIED: gl.constexpr = OF_SUMS if not walk.TRANSPOSED else (OF_D if walk.SAVE_D else NOTHING)
    PAIRS: gl.constexpr = walk.PIECES > 1
    zeros = ring_of(outer.out, 1) if PAIRS else x
    full, free = stage_barriers(STAGES, arrivals(CARRIED) + (1 if PAIRS else 0), 2)
    ready = barriers(2, 2)
    fence_async_shared()
    shared = Shared(x, y, z, w, p, g, u, delta, s, full, free, ready, floor, matrix, n, sums, inverse, begun, d)
    rings = GateRings(g, u, floor if walk.DIVIDES else delta, matrix)
    gater: gl.constexpr = Gater(
        L,
        STAGES,
        walk.BACK,
        walk.SEGMENTED,
        FLOOR if walk.DIVIDES else (DELTA_P if walk.DELTA else None),
        walk.PIECES,
        GATERS=2 if walk.DIVIDES or (source.MADE == ALL and walk.BLOCKS == 2 and not PAIRS) else 1,
    )
    consumer: gl.constexpr = CONSUMER_MOST if walk.DIVIDES else CONSUMER
    filler: gl.constexpr = FILLER_LEAST if walk.DIVIDES else FILLER
    gl.warp_specialize(
        [
            (consume, (0, outer, shared, work, walk)),
            (consume, (1, outer, shared, work, walk)),
            (load_tiles, (X, Y, Z, W, shared, work, GROUP, walk)),
            (load_gates, (0, source, rings, full, free, work, tiles_of_head, gater)),
            (second, (source, rings, outer.out, zeros, cleared, full, free, work, tiles_of_head, gater, walk)),
            (carry, (
                d, w_out, source.vectors, full, free, work, tiles_of_head,
                Carrier(L, STAGES, walk.BACK, walk.SEGMENTED, CARRIED),
            )),
        ],
        [4, 1, 1, 1, 1],
        [consumer, filler, filler, filler, filler],
    )  # fmt: skip
