"""o, dq, or dk and dv together, of heads so narrow that one warpgroup has a whole state C, (dqk, dhv), in registers.

    loader, gaters --full[s]--> consumers --free[s]--> loader, gaters
    loader --full_m[head]--> consumer --free_m[head]--> loader        with MARKED, walking back
    consumer 1 --given--> consumer 0 --taken--> consumer 1            with SHARED and KEYS

    loader     tiles of x, y, zk, zv by TMA to stage s of a ring of STAGES stages, and the states of marks
    gaters     the gate vectors of the heads in turn to the same stage
    consumers  a head each. C, rounded, is in shared memory, a right operand. Per tile (`walk_tile`)
        out_v = zk C, weighted, + P y        P = zk x^T, weighted              with VALUES
        out_k = zv C^T, weighted, + P x      P = (zv y^T + delta), weighted    with KEYS; dq's finds delta
        C     = decay C + (x w)^T y
        out_v overwrites y, with KEYS zv, and out_k zk, and they leave by TMA; when they have left, a tile later, the
        stage is free

    result   | x, y  | zk, zv
    o        | k, v  | q
    dq       | k, v  | q, do
    dk, dv   | q, do | k, v     walking back
    a state  | k, v  |          or q, do, its cotangent: what a segment adds to it

A program has HEADS heads at a time, two where shared memory holds their tiles. Where both have the same q and k,
SHARED, a stage has those once, and what both add to dq or dk leaves as one. n is summed in float32.

For the gradients of the gates, with KEYS, the sums over dqk of zk . out_k go to memory, which are those of q . dq or
k . dk. With MARKED the walk for dq leaves the state before every MARKS-th step of a piece but the first, by TMA as it
lies in shared memory. The loader of the walk back brings those of a tile after the tile, one for each consumer, into a
place that is free once the consumer has added up <C, dC> of the one before, which is what that walk leaves.
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
from tfla.backends.hopper.mma import as_left, gate_matrix, of_product, product, scaled, seen, state_pointers, weights
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
    next_stage,
    place,
    ring_of,
    stage_barriers,
    vectors,
)
from tfla.backends.hopper.scheduler import NUMBERS, Work, coordinates, next_piece, piece, state_of, tiles_of
from tfla.backends.triton.gates import DELTA_P, FLOOR, VECTORS


class Walk(NamedTuple):
    """Constants of a kernel."""

    HEADS: Any  # of a program
    SHARED: Any  # they share q and k
    COPIES: Any  # of tiles of q or k in a stage
    DK: Any
    DV: Any
    L: Any  # steps of a tile
    STAGES: Any
    MARKS: Any  # steps between marks
    BACK: Any  # from the last tile to the first
    SEGMENTED: Any
    STATE: Any  # pieces start from states that are given, not from zeros
    FINAL: Any  # states behind pieces are wanted
    SKIP: Any  # nothing of the last segment of a sequence
    VALUES: Any  # out_v is wanted
    KEYS: Any  # out_k is wanted
    READS: Any  # one of them is
    NORMALIZE: Any
    SAVE_D: Any  # d is wanted
    DELTA: Any  # delta is not zero
    FINDS: Any  # walking forth: it is not known yet, the gate vector DELTA_P has -u
    MARKED: Any  # there are marks


class Outer(NamedTuple):
    """What consumers read and write in memory."""

    out_v: Any
    out_k: Any
    marks: Any
    state_in: Any
    state_out: Any
    n_in: Any
    n_out: Any
    n_marks: Any
    decays: Any
    w_out: Any
    d_out: Any
    dots: Any
    gates: Any


class Shared(NamedTuple):
    """Shared memory; what a walk does not have is another of them."""

    x: Any  # COPIES tiles a stage
    y: Any  # HEADS tiles a stage
    zk: Any
    zv: Any
    c: Any  # C of each head, rounded
    n: Any
    full: Any
    free: Any
    part: Any  # of dq or dk, of the second head, which the first adds to its own
    given: Any  # it is there
    taken: Any  # it has been read
    m: Any  # states at a mark, one for each head
    full_m: Any
    free_m: Any


class State(NamedTuple):
    """Of a head, in registers."""

    C: Any
    n: Any
    decay: Any  # since it was zero


class Place(NamedTuple):
    """Of a tile."""

    s: Any  # its stage
    phase: Any  # of the barriers of the stage
    n: Any  # tiles before it
    marked: Any  # marks before it


class Piece(NamedTuple):
    """Of work, of one head."""

    b: Any  # batch row
    hp: Any  # which HEADS heads
    h: Any  # which head
    start: Any  # its first step
    steps: Any
    tiles: Any
    first: Any  # `start` among the steps of all batch rows
    tile0: Any  # its first tile among those of all heads


class Tile(NamedTuple):
    """In shared memory, of one head."""

    c: Any
    n: Any
    part: Any
    x: Any
    y: Any
    zk: Any
    zv: Any
    g: Any
    u: Any
    e: Any  # exp(-m), or delta


class Mine(NamedTuple):
    """Indices in layouts of a consumer's registers."""

    i: Any  # steps, which read
    j: Any  # steps that update
    rk: Any  # of n
    rl: Any  # steps of out_k
    rd: Any  # steps of out_v
    one: Any  # a single zero


@gluon.jit
def load_tiles(tensors, shared, work, GROUP, walk):
    """The loader: one warp."""
    X, Y, ZK, ZV, Marks = tensors
    L: gl.constexpr = walk.L
    HEADS: gl.constexpr = walk.HEADS
    COPIES: gl.constexpr = walk.COPIES
    of_k: gl.constexpr = X.block_type.nbytes * (2 if walk.READS else 1) * COPIES
    of_v: gl.constexpr = Y.block_type.nbytes * (2 if walk.KEYS else 1) * HEADS
    n = 0
    marked = 0
    for index in range(gl.program_id(0), work.pieces, gl.num_programs(0)):
        b, h, start, steps, _tile0 = piece(index, work, L, walk.SEGMENTED)
        tiles = tiles_of(index, start, steps, work, L, walk.BACK, walk.SKIP)
        for i in range(0, tiles):
            step = (tiles - 1 - i if walk.BACK else i) * L
            t = start + step
            end = start + steps
            s, phase = place(n, walk.STAGES)
            mbarrier.wait(shared.free.index(s), phase ^ 1)
            bar = shared.full.index(s)
            mbarrier.expect(bar, of_k + of_v)
            for e in gl.static_range(COPIES):
                x = coordinates(b, (h * HEADS + e) // GROUP, t, 0, end, work)
                async_load(X, x, bar, shared.x.index(COPIES * s + e))
                if walk.READS:
                    async_load(ZK, x, bar, shared.zk.index(COPIES * s + e))
            for e in gl.static_range(HEADS):
                y = coordinates(b, h * HEADS + e, t, 0, end, work)
                async_load(Y, y, bar, shared.y.index(HEADS * s + e))
                if walk.KEYS:
                    async_load(ZV, y, bar, shared.zv.index(HEADS * s + e))
            n += 1
            if walk.MARKED and walk.BACK and step > 0 and step % walk.MARKS == 0:
                for e in gl.static_range(HEADS):
                    mbarrier.wait(shared.free_m.index(e), (marked & 1) ^ 1)
                    mbarrier.expect(shared.full_m.index(e), Marks.block_type.nbytes)
                    row = mark_of(b, start, step, h * HEADS + e, work, walk) * walk.DK
                    async_load(Marks, [row.to(gl.int32), 0], shared.full_m.index(e), shared.m.index(e))
                marked += 1


@gluon.jit
def mark_of(b, start, step, h, work, walk):
    """Which mark of which head, the piece of b having begun with step `start`."""
    heads = work.H * walk.HEADS
    return ((b.to(gl.int64) * work.T + start) // walk.MARKS - 1 + step // walk.MARKS) * heads + h


@gluon.jit
def own(ring, index: gl.constexpr, n):
    """The index-th of a ring. The compiler is not to know that no tile n changes it: what it would find out early about
    its addresses takes registers all the way."""
    return ring.index(index + (n >> 30))


@gluon.jit
def tile_of(shared, rings, s, n, head: gl.constexpr, walk):
    """The n-th, in stage s."""
    L: gl.constexpr = walk.L
    copy: gl.constexpr = 0 if walk.SHARED else head
    of_gates = head * walk.STAGES + s
    return Tile(
        own(shared.c, head, n),
        own(shared.n, head, n),
        own(shared.part, 0, n),
        shared.x.index(walk.COPIES * s + copy).reshape([L, walk.DK]),
        shared.y.index(walk.HEADS * s + head).reshape([L, walk.DV]),
        shared.zk.index(walk.COPIES * s + copy).reshape([L, walk.DK]),
        shared.zv.index(walk.HEADS * s + head).reshape([L, walk.DV]),
        rings.vectors.index(of_gates),
        rings.weights.index(of_gates),
        rings.extra.index(of_gates),
    )


@gluon.jit
def put_state(C, N, c, n, NORMALIZE: gl.constexpr):
    """Where the next tile reads it."""
    c.store(C.to(c.dtype))
    if NORMALIZE:
        n.store(N)
    fence_async_shared()
    barrier()


@gluon.jit
def first_state(index, mine, outer, work, head: gl.constexpr, walk):
    """That a piece of work starts from."""
    of_v: gl.constexpr = of_product(walk.DV)
    C = gl.zeros([walk.DK, walk.DV], gl.float32, of_v)
    N = gl.zeros([walk.DK], gl.float32, gl.SliceLayout(1, of_product(walk.L)))
    total = mine.one.to(gl.float32) + 1.0
    if walk.STATE:
        at = state_of(index, work) * walk.HEADS + head
        C = gl.load(
            state_pointers(outer.state_in, at, 0, 0, walk.DK, walk.DV, False, of_v, walk.DK, walk.DV)
        ).to(gl.float32)  # fmt: skip
        if walk.NORMALIZE:
            N = gl.load(outer.n_in + at.to(gl.int64) * walk.DK + mine.rk)
    return State(C, N, total)


@gluon.jit
def last_state(state, index, mine, outer, work, head: gl.constexpr, walk):
    """That a piece of work ends with, or what it adds to one, with the decay over it."""
    C, N, total = state
    state_out = outer.state_out
    at = state_of(index, work) * walk.HEADS + head
    dtype: gl.constexpr = state_out.dtype.element_ty
    pointers = state_pointers(state_out, at, 0, 0, walk.DK, walk.DV, False, of_product(walk.DV), walk.DK, walk.DV)
    gl.store(pointers, C.to(dtype))
    if walk.NORMALIZE:
        gl.store(outer.n_out + at.to(gl.int64) * walk.DK + mine.rk, N)
    if not walk.READS:
        gl.store(outer.decays + at + mine.one, total)


@gluon.jit
def denominators(P, tile, weight, walk):
    """d: zk . n, weighted, and the sums of P."""
    of_v: gl.constexpr = weight.type.layout
    of_k: gl.constexpr = of_product(walk.DK)
    row = gl.expand_dims(tile.n.load(gl.SliceLayout(0, of_k)), 0)
    dot = gl.sum(tile.zk.load(of_k).to(gl.float32) * row, 1)
    d = gl.convert_layout(gl.sum(P, 1), of_v, assert_trivial=True)
    return d + gl.convert_layout(dot, of_v, assert_trivial=True) * weight


@gluon.jit
def divided(V, d, t, tile, at, mine, outer, work, walk):
    """By max(|d|, exp(-m))."""
    if walk.SAVE_D:
        heads = work.H * walk.HEADS
        gl.store(outer.d_out + (at.first + t + mine.rd) * heads + at.h, d, mask=mine.rd < at.steps - t)
    return V * gl.expand_dims(1.0 / gl.maximum(gl.abs(d), tile.e.load(d.type.layout)), 1)


@gluon.jit
def find_delta(S, K, D, t, tile, at, mine, outer, walk):
    """-u (do . h): do . h is zk . (zv C^T), weighted, and the sums of the rows of (S, weighted) * (zk x^T)."""
    L: gl.constexpr = walk.L
    of_k: gl.constexpr = K.type.layout
    R = warpgroup_mma_wait(0, deps=[product(tile.zk, tile.x.permute((1, 0)))])
    dot = gl.sum(K * tile.zk.load(of_k).to(gl.float32), 1)
    dot *= tile.g.slice(OUT * L, L, 0).load(gl.SliceLayout(1, of_k))
    scores = gl.sum(seen(S, D, mine.i, mine.j, 0, walk.BACK) * R, 1)
    dot += gl.convert_layout(scores, dot.type.layout, assert_trivial=True)
    u = tile.e.load(dot.type.layout)
    delta = gl.where(u == 0.0, 0.0, u * dot)
    gl.store(outer.gates + ((at.tile0 + t // L) * VECTORS + DELTA_P) * L + mine.rl, delta)
    return delta


@gluon.jit
def add_keys(S, K, D, t, tile, at, mine, outer, walk):
    """zv C^T to out_k: starts to add P x, P = (zv y^T + delta) weighted."""
    L: gl.constexpr = walk.L
    if walk.FINDS:
        S, K = warpgroup_mma_wait(0, deps=[S, K])
        delta = find_delta(S, K, D, t, tile, at, mine, outer, walk)
        S += gl.expand_dims(gl.convert_layout(delta, gl.SliceLayout(1, S.type.layout), assert_trivial=True), 1)
    else:
        S = warpgroup_mma_wait(1, deps=[S])
        if walk.DELTA:
            S += gl.expand_dims(tile.e.load(gl.SliceLayout(0, S.type.layout)), 0)
    if walk.VALUES:
        D = gate_matrix(tile.g, L, 0, of_product(L), 1)  # again: kept, it takes registers that out_v needs
    P = seen(S, D, mine.i, mine.j, 0, walk.BACK)
    A = as_left(P.to(tile.x.dtype), walk.DK)
    weight = tile.g.slice(OUT * L, L, 0).load(gl.SliceLayout(1, of_product(walk.DK)))
    if not walk.FINDS:
        K = warpgroup_mma_wait(0, deps=[K])
    if walk.NORMALIZE:
        row = gl.expand_dims(tile.n.load(gl.SliceLayout(0, K.type.layout)), 0)
        if walk.BACK:
            K += row
        elif walk.FINDS:
            K += row * gl.expand_dims(delta, 1)
    return warpgroup_mma(A, tile.x, K * gl.expand_dims(weight, 1), is_async=True), A


@gluon.jit
def update_n(N, x_t, tile, walk):
    """decay n + x w."""
    L: gl.constexpr = walk.L
    layout: gl.constexpr = gl.SliceLayout(0, x_t.type.layout)
    N = N * gl.max(tile.g.slice(CARRY * L, 1, 0).load(layout), 0)
    if walk.DELTA or not walk.BACK:
        # Not of the left operand, which is rounded: outputs are divided by q . n, which can be small beside q and n.
        update = weights(tile.u, L, layout)
        if walk.BACK:
            update = update * tile.e.load(layout)
        N += gl.sum(x_t.to(gl.float32) * gl.expand_dims(update, 0), 1)
    return N


@gluon.jit
def sum_of_heads(K, part, shared, n, head: gl.constexpr):
    """In the first consumer, which waits for the part of the second; that waits until its part before is read."""
    if head == 1:
        mbarrier.wait(shared.taken, (n & 1) ^ 1)
        part.store(K.to(part.dtype))
        barrier()
        mbarrier.arrive(shared.given, count=1)
    else:
        mbarrier.wait(shared.given, n & 1)
        K += part.load(K.type.layout).to(gl.float32)
        barrier()
        mbarrier.arrive(shared.taken, count=1)
    return K


@gluon.jit
def send(s, t, at, outer, shared, work, head: gl.constexpr, walk):
    """The outputs of the tile in stage s."""
    copy: gl.constexpr = 0 if walk.SHARED else head
    if walk.VALUES:
        of_out = (shared.zv if walk.KEYS else shared.y).index(walk.HEADS * s + head)
        async_store(outer.out_v, coordinates(at.b, at.h, at.start + t, 0, at.start + at.steps, work), of_out)
    if walk.KEYS and copy == head:
        at_k = coordinates(at.b, at.hp * walk.COPIES + copy, at.start + t, 0, at.start + at.steps, work)
        async_store(outer.out_k, at_k, shared.zk.index(walk.COPIES * s + copy))


@gluon.jit
def leave_mark(C, N, c, t, n, marked, at, mine, outer, shared, work, head: gl.constexpr, walk):
    """The state that `put_state` has put, where it is one at a mark, or walking back <C, dC>."""
    step = t if walk.BACK else t + walk.L
    if step % walk.MARKS == 0 and step < at.steps and step > 0:
        mark = mark_of(at.b, at.start, step, at.h, work, walk)
        if walk.BACK:
            leave_dot(C, N, mark, n, marked, mine, outer, shared, head, walk)
            marked += 1
        else:
            async_store(outer.marks, [(mark * walk.DK).to(gl.int32), 0], c)
            if walk.NORMALIZE:
                gl.store(outer.n_marks + mark * walk.DK + mine.rk, N)
    return marked


@gluon.jit
def leave_dot(dC, dN, mark, n, marked, mine, outer, shared, head: gl.constexpr, walk):
    """<C, dC> at a mark, of C that the loader brings; n in float32 with it."""
    of_row: gl.constexpr = mine.rk.type.layout
    C = own(shared.m, head, n)
    full = shared.full_m.index(head)
    free = shared.free_m.index(head)
    phase = marked & 1
    one = gl.arange(0, 1, gl.SliceLayout(0, dC.type.layout))
    mbarrier.wait(full, phase)
    both = gl.convert_layout(gl.sum(dC * C.load(dC.type.layout).to(gl.float32), 1), of_row, assert_trivial=True)
    barrier()
    mbarrier.arrive(free, count=1)
    if walk.NORMALIZE:
        both += dN * gl.load(outer.n_marks + mark * walk.DK + mine.rk)
    gl.store(outer.dots + mark + one, gl.sum(both, 0).to(gl.float64) + one.to(gl.float64))


@gluon.jit
def walk_tile(state, place_n, step, at, mine, outer, shared, work, rings, head: gl.constexpr, walk):
    """A tile, from its arrival to the departure of its outputs."""
    L: gl.constexpr = walk.L
    STAGES: gl.constexpr = walk.STAGES
    copy: gl.constexpr = 0 if walk.SHARED else head
    of_p: gl.constexpr = of_product(L)
    dtype: gl.constexpr = shared.x.dtype
    C, N, total = state
    s, phase, n, marked = place_n
    tile = tile_of(shared, rings, s, n, head, walk)
    t = (at.tiles - 1 - step if walk.BACK else step) * L
    mbarrier.wait(shared.full.index(s), phase)
    if walk.VALUES:
        S = product(tile.zk, tile.x.permute((1, 0)))
        V = product(tile.zk, tile.c)
    elif walk.KEYS:
        S = product(tile.zv, tile.y.permute((1, 0)))
        K = product(tile.zv, tile.c.permute((1, 0)))
    if walk.READS:
        D = gate_matrix(tile.g, L, 0, of_p, 1)
    if walk.VALUES:
        weight = tile.g.slice(OUT * L, L, 0).load(gl.SliceLayout(1, of_product(walk.DV)))
        S = warpgroup_mma_wait(1, deps=[S])
        P = seen(S, D, mine.i, mine.j, 0, walk.BACK)
        if walk.NORMALIZE and not walk.BACK:
            d = denominators(P, tile, weight, walk)
        A = as_left(P.to(dtype), walk.DV)
        V = warpgroup_mma_wait(0, deps=[V])
        V = warpgroup_mma(A, tile.y, V * gl.expand_dims(weight, 1), is_async=True)
        if walk.KEYS:
            S = product(tile.zv, tile.y.permute((1, 0)))
    if walk.READS:
        # The stage of the previous tile is free once its outputs have left.
        tma.store_wait(0)
        mbarrier.arrive(shared.free.index((s + STAGES - 1) % STAGES), count=1, pred=n > 0)
    if walk.KEYS:
        if walk.VALUES:
            V, A = warpgroup_mma_wait(1, deps=[V, A])
            out_v = V.to(dtype)
            K = product(tile.zv, tile.c.permute((1, 0)))
        K, A_k = add_keys(S, K, D, t, tile, at, mine, outer, walk)
        if walk.VALUES:
            barrier()  # no warp's MMA reads zv any more
            tile.zv.store(out_v)
    # The state behind the tile, while the outputs are on their way.
    x_t = tile.x.permute((1, 0)).load(of_p)
    B = scaled(x_t, tile.u, L, gl.DotOperandLayout(0, of_product(walk.DV), 2))
    decay = tile.g.slice(CARRY * L, 1, 0).load(gl.SliceLayout(0, C.type.layout))
    C = warpgroup_mma(B, tile.y, C * gl.expand_dims(decay, 0), is_async=True)
    if not walk.READS:
        total = total * decay
    if walk.NORMALIZE:
        N = update_n(N, x_t, tile, walk)
    if walk.VALUES and not walk.KEYS:
        V, A = warpgroup_mma_wait(1, deps=[V, A])
        if walk.NORMALIZE and not walk.BACK:
            V = divided(V, d, t, tile, at, mine, outer, work, walk)
        out_v = V.to(dtype)
    if walk.KEYS:
        K, A_k = warpgroup_mma_wait(1, deps=[K, A_k])
        to = outer.w_out + at.tile0 * L + t + mine.rl
        gl.store(to, gl.sum(K * tile.zk.load(K.type.layout).to(gl.float32), 1))
        if walk.SHARED:
            K = sum_of_heads(K, tile.part, shared, n, head)
        out_k = K.to(dtype)
    C, B = warpgroup_mma_wait(0, deps=[C, B])
    barrier()  # no warp's MMA reads the tiles any more
    if walk.VALUES and not walk.KEYS:
        tile.y.store(out_v)
    if walk.KEYS and copy == head:
        tile.zk.store(out_k)
    if walk.READS:
        put_state(C, N, tile.c, tile.n, walk.NORMALIZE)
    else:
        mbarrier.arrive(shared.free.index(s), count=1)
    send(s, t, at, outer, shared, work, head, walk)
    if walk.MARKED:
        marked = leave_mark(C, N, tile.c, t, n, marked, at, mine, outer, shared, work, head, walk)
    s, phase = next_stage(s, phase, STAGES)
    return State(C, N, total), Place(s, phase, n + 1, marked)


@gluon.jit
def consume(head: gl.constexpr, outer, shared, work, tiles_of_head, rings, walk):
    """One warpgroup, with one head."""
    L: gl.constexpr = walk.L
    i = gl.arange(0, L, gl.SliceLayout(1, of_product(L)))
    j = gl.arange(0, L, gl.SliceLayout(0, of_product(L)))
    rk = gl.arange(0, walk.DK, gl.SliceLayout(1, of_product(L)))
    rl = gl.arange(0, L, gl.SliceLayout(1, of_product(walk.DK)))
    rd = gl.arange(0, L, gl.SliceLayout(1, of_product(walk.DV)))
    one = gl.arange(0, 1, gl.SliceLayout(0, of_product(walk.DV)))
    mine = Mine(i, j, rk, rl, rd, one)
    place_n = Place(0, 0, 0, 0)
    index = gl.program_id(0)
    while index < work.pieces:
        b, hp, start, steps, tile = piece(index, work, L, walk.SEGMENTED, True)
        h = hp * walk.HEADS + head
        tiles = tiles_of(index, start, steps, work, L, walk.BACK, walk.SKIP)
        first = b.to(gl.int64) * work.T + start
        at = Piece(b, hp, h, start, steps, tiles, first, h.to(gl.int64) * tiles_of_head + tile)
        state = first_state(index, mine, outer, work, head, walk)
        if walk.READS:
            n = place_n.n
            put_state(state.C, state.n, own(shared.c, head, n), own(shared.n, head, n), walk.NORMALIZE)
        for step in range(0, tiles):
            state, place_n = walk_tile(state, place_n, step, at, mine, outer, shared, work, rings, head, walk)
        if walk.FINAL:
            last_state(state, index, mine, outer, work, head, walk)
        index = next_piece(index)
    if walk.READS:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=NUMBERS)
def whole(
    X, Y, ZK, ZV, OutV, OutK, Marks, gates, i_gate, f_gate, w_out, d_out, dots, state_in, state_out, n_in, n_out,
    n_marks, decays, order,
    T, tiles_of_head, H, GROUP, length, pieces, ib, it, ih, fb, ft, fh, scale, log_scale,
    HEADS: gl.constexpr, SHARED: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, L: gl.constexpr,
    STAGES: gl.constexpr, MARKS: gl.constexpr, BACK: gl.constexpr, SEGMENTED: gl.constexpr, STATE: gl.constexpr,
    FINAL: gl.constexpr, SKIP: gl.constexpr, VALUES: gl.constexpr, KEYS: gl.constexpr, NORMALIZE: gl.constexpr,
    SAVE_D: gl.constexpr, DELTA: gl.constexpr, MARKED: gl.constexpr, PACKED: gl.constexpr,
    MADE: gl.constexpr, INPUT_GATE: gl.constexpr, SIGMOID_I: gl.constexpr, SIGMOID_F: gl.constexpr,
):  # fmt: skip
    """H is how often HEADS heads there are; with SHARED OutK has so many."""
    READS: gl.constexpr = VALUES or KEYS
    EXTRA: gl.constexpr = (DELTA_P if DELTA else None) if KEYS else (FLOOR if NORMALIZE and READS else None)
    partitions(
        (X, Y, ZK, ZV, Marks),
        Source(
            gates, i_gate, f_gate, ib, it, ih, fb, ft, fh, scale, log_scale, MADE, INPUT_GATE, SIGMOID_I, SIGMOID_F
        ),
        tiles_of_head, GROUP,
        Outer(OutV, OutK, Marks, state_in, state_out, n_in, n_out, n_marks, decays, w_out, d_out, dots, gates),
        Work(T, H, length, pieces, order if PACKED else None),
        Walk(
            HEADS, SHARED, 1 if SHARED else HEADS, DK, DV, L, STAGES, MARKS, BACK, SEGMENTED, STATE, FINAL, SKIP,
            VALUES, KEYS, READS, NORMALIZE, SAVE_D, DELTA, DELTA and not BACK, MARKED,
        ),
        Gater(L, STAGES, BACK, SEGMENTED, EXTRA, SKIP=SKIP, HEADS=HEADS, GATERS=HEADS if KEYS else HEADS + 1),
    )  # fmt: skip


@gluon.jit
def partitions(tensors, source, tiles_of_head, GROUP, outer, work, walk, gater):
    """Gives them shared memory, and starts them."""
    shared = allocate(tensors, walk)
    full = shared.full
    free = shared.free
    rings = GateRings(*gate_rings(shared.x.dtype, gater))
    if walk.HEADS == 1:
        gl.warp_specialize(
            [
                (consume, (0, outer, shared, work, tiles_of_head, rings, walk)),
                (load_tiles, (tensors, shared, work, GROUP, walk)),
                (load_gates, (0, source, rings, full, free, work, tiles_of_head, gater)),
                (load_gates, (1, source, rings, full, free, work, tiles_of_head, gater)),
            ],
            [1, 1, 1],
            [FILLER, FILLER, FILLER],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, outer, shared, work, tiles_of_head, rings, walk)),
                (consume, (1, outer, shared, work, tiles_of_head, rings, walk)),
                (load_tiles, (tensors, shared, work, GROUP, walk)),
                (load_gates, (0, source, rings, full, free, work, tiles_of_head, gater)),
                (load_gates, (1, source, rings, full, free, work, tiles_of_head, gater)),
                (load_gates, (2, source, rings, full, free, work, tiles_of_head, gater)),
            ],
            [4, 1, 1, 1, 1],
            [CONSUMER, FILLER, FILLER, FILLER, FILLER],
        )


@gluon.jit
def allocate(tensors, walk):
    """Shared memory and its barriers."""
    X, Y, ZK, ZV, _marks = tensors
    STAGES: gl.constexpr = walk.STAGES
    dtype: gl.constexpr = X.dtype
    x = ring_of(X, walk.COPIES * STAGES)
    y = ring_of(Y, walk.HEADS * STAGES)
    zk = ring_of(ZK, walk.COPIES * STAGES) if walk.READS else x
    c = matrices(dtype, walk.HEADS, walk.DK, walk.DV) if walk.READS else y
    zv = ring_of(ZV, walk.HEADS * STAGES) if walk.KEYS else y
    n = vectors(gl.float32, walk.HEADS, walk.DK) if walk.NORMALIZE else y
    full, free = stage_barriers(STAGES, 1 + walk.HEADS, walk.HEADS)
    part = c
    given = full
    taken = full
    if walk.SHARED and walk.KEYS:
        part = matrices(dtype, 1, walk.L, walk.DK)
        given = barrier_of(1)
        taken = barrier_of(1)
    m = c
    full_m = full
    free_m = full
    if walk.MARKED and walk.BACK:
        m = matrices(dtype, walk.HEADS, walk.DK, walk.DV)
        full_m, free_m = stage_barriers(walk.HEADS, 1, 1)
    fence_async_shared()
    return Shared(x, y, zk, zv, c, n, full, free, part, given, taken, m, full_m, free_m)


@gluon.jit
def gate_rings(dtype: gl.constexpr, gater):
    """Those of `GateRings`."""
    STAGES: gl.constexpr = gater.STAGES * gater.HEADS
    g = vectors(gl.float32, STAGES, GATES * gater.L)
    u = vectors(dtype, STAGES, 2 * gater.L)
    e = vectors(gl.float32, STAGES, gater.L) if gater.EXTRA is not None else g
    return g, u, e
