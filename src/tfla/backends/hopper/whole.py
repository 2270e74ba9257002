"""o, dq, or dk and dv together, of heads so narrow that one warpgroup has a whole state C, (dqk, dhv), in registers.

    loader     tiles of x, y, zk, zv by TMA  -> a ring of STAGES stages -> consumers
    gaters     the gate vectors of a head    -> the same stages         -> its consumer
    consumers  a head each. C, rounded, is in shared memory, a right operand. Per tile
        out_v = zk C, weighted, + P y        P = zk x^T, weighted              with VALUES
        out_k = zv C^T, weighted, + P x      P = (zv y^T + delta), weighted    with KEYS
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

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tfla.backends.hopper.parts import (
    CARRY,
    GATES,
    NOTHING,
    OUT,
    async_load,
    async_store,
    barrier,
    coordinates,
    gate_matrix,
    load_gates,
    piece,
    place,
    ring_of,
    scaled,
    seen,
    state_of,
    state_pointers,
    tiles_of,
    weights,
)
from tfla.backends.triton.gates import DELTA_P, FLOOR, VECTORS


@gluon.jit
def load_tiles(
    tensors, rings, full, free, of_marks, work, GROUP,
    HEADS: gl.constexpr, SHARED: gl.constexpr, DK: gl.constexpr, L: gl.constexpr, STAGES: gl.constexpr,
    MARKS: gl.constexpr, BACK: gl.constexpr, SEGMENTED: gl.constexpr, SKIP: gl.constexpr, READS: gl.constexpr,
    KEYS: gl.constexpr, DOTS: gl.constexpr,
):  # fmt: skip
    """The loader: one warp."""
    X, Y, ZK, ZV, Marks = tensors
    ring_x, ring_y, ring_zk, ring_zv = rings
    ring_m, full_m, free_m = of_marks
    T, H, pieces = work[0], work[1], work[3]
    COPIES: gl.constexpr = 1 if SHARED else HEADS
    of_k: gl.constexpr = X.block_type.nbytes * (2 if READS else 1) * COPIES
    of_v: gl.constexpr = Y.block_type.nbytes * (2 if KEYS else 1) * HEADS
    n = 0
    marked = 0
    for index in range(gl.program_id(0), pieces, gl.num_programs(0)):
        b, h, start, steps, _tile0 = piece(index, work, L, SEGMENTED)
        tiles = tiles_of(index, start, steps, work, L, BACK, SKIP)
        for i in range(0, tiles):
            step = (tiles - 1 - i if BACK else i) * L
            t = start + step
            end = start + steps
            s, phase = place(n, STAGES)
            mbarrier.wait(free.index(s), phase ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, of_k + of_v)
            for e in gl.static_range(COPIES):
                x = coordinates(b, (h * HEADS + e) // GROUP, t, 0, end, work)
                async_load(X, x, bar, ring_x.index(COPIES * s + e))
                if READS:
                    async_load(ZK, x, bar, ring_zk.index(COPIES * s + e))
            for e in gl.static_range(HEADS):
                y = coordinates(b, h * HEADS + e, t, 0, end, work)
                async_load(Y, y, bar, ring_y.index(HEADS * s + e))
                if KEYS:
                    async_load(ZV, y, bar, ring_zv.index(HEADS * s + e))
            n += 1
            if DOTS and step > 0 and step % MARKS == 0:
                for e in gl.static_range(HEADS):
                    mbarrier.wait(free_m.index(e), (marked & 1) ^ 1)
                    mbarrier.expect(full_m.index(e), Marks.block_type.nbytes)
                    row = mark_of(b, start, step, T, h * HEADS + e, H * HEADS, MARKS) * DK
                    async_load(Marks, [row.to(gl.int32), 0], full_m.index(e), ring_m.index(e))
                marked += 1


@gluon.jit
def mark_of(b, start, step, T, h, heads, MARKS: gl.constexpr):
    """Which mark of which head, the piece of b having begun with step `start`."""
    return ((b.to(gl.int64) * T + start) // MARKS - 1 + step // MARKS) * heads + h


@gluon.jit
def product(a, b, layout: gl.constexpr):
    """Starts a b."""
    rows: gl.constexpr = a.shape[0]
    columns: gl.constexpr = b.shape[1]
    zero = gl.zeros([rows, columns], gl.float32, layout)
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def own(ring, index: gl.constexpr, n):
    """The index-th of a ring. The compiler is not to know that no tile n changes it: what it would find out early about
    its addresses takes registers all the way."""
    return ring.index(index + (n >> 30))


@gluon.jit
def put_state(C, N, c, n, NORMALIZE: gl.constexpr):
    """Where the next tile reads it."""
    c.store(C.to(c.dtype))
    if NORMALIZE:
        n.store(N)
    fence_async_shared()
    barrier()


@gluon.jit
def leave_state(c, N, Marks, n_marks, mark, rk, DK: gl.constexpr, NORMALIZE: gl.constexpr):
    """What `put_state` has put, at a mark."""
    async_store(Marks, [(mark * DK).to(gl.int32), 0], c)
    if NORMALIZE:
        gl.store(n_marks + mark * DK + rk, N)


@gluon.jit
def leave_dot(dC, dN, C, n_marks, dots, mark, rk, full, free, phase, DK: gl.constexpr, NORMALIZE: gl.constexpr):
    """<C, dC> at a mark, of C that the loader brings; n in float32 with it."""
    of_row: gl.constexpr = rk.type.layout
    one = gl.arange(0, 1, gl.SliceLayout(0, dC.type.layout))
    mbarrier.wait(full, phase)
    both = gl.convert_layout(gl.sum(dC * C.load(dC.type.layout).to(gl.float32), 1), of_row, assert_trivial=True)
    barrier()
    mbarrier.arrive(free, count=1)
    if NORMALIZE:
        both += dN * gl.load(n_marks + mark * DK + rk)
    gl.store(dots + mark + one, gl.sum(both, 0).to(gl.float64) + one.to(gl.float64))


@gluon.jit
def consume(
    common, gate_rings,
    head: gl.constexpr, HEADS: gl.constexpr, SHARED: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, L: gl.constexpr,
    STAGES: gl.constexpr, MARKS: gl.constexpr, BACK: gl.constexpr, SEGMENTED: gl.constexpr, STATE: gl.constexpr,
    FINAL: gl.constexpr, SKIP: gl.constexpr, VALUES: gl.constexpr, KEYS: gl.constexpr, NORMALIZE: gl.constexpr,
    SAVE_D: gl.constexpr, DELTA: gl.constexpr, MARKED: gl.constexpr,
):  # fmt: skip
    """One warpgroup, with one head."""
    outputs, states, sums, shared, barriers, exchange, of_marks, work, tiles_of_head = common
    OutV, OutK, Marks = outputs
    state_in, state_out, n_in, n_out, n_marks, decays = states
    w_out, d_out, dots = sums
    ring_x, ring_y, ring_zk, ring_zv, ring_c, ring_n = shared
    ring_g, ring_u, ring_e = gate_rings
    full, free = barriers
    ring_p, given, taken = exchange
    ring_m, full_m, free_m = of_marks
    T, H, pieces = work[0], work[1], work[3]
    READS: gl.constexpr = VALUES or KEYS
    COPIES: gl.constexpr = 1 if SHARED else HEADS
    copy: gl.constexpr = 0 if SHARED else head
    of_p: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L, 16])
    of_v: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DK, 16])
    left_of_v: gl.constexpr = gl.DotOperandLayout(0, of_v, 2)
    left_of_k: gl.constexpr = gl.DotOperandLayout(0, of_k, 2)
    of_n: gl.constexpr = gl.SliceLayout(1, of_p)
    dtype: gl.constexpr = ring_x.dtype
    i = gl.arange(0, L, gl.SliceLayout(1, of_p))
    j = gl.arange(0, L, gl.SliceLayout(0, of_p))
    rk = gl.arange(0, DK, of_n)
    rl = gl.arange(0, L, gl.SliceLayout(1, of_k))
    rd = gl.arange(0, L, gl.SliceLayout(1, of_v))
    one = gl.arange(0, 1, gl.SliceLayout(0, of_v))
    s = 0
    phase = 0
    n = 0
    marked = 0
    for index in range(gl.program_id(0), pieces, gl.num_programs(0)):
        b, hp, start, steps, tile = piece(index, work, L, SEGMENTED)
        h = hp * HEADS + head
        tiles = tiles_of(index, start, steps, work, L, BACK, SKIP)
        first = b.to(gl.int64) * T + start
        tile0 = h.to(gl.int64) * tiles_of_head + tile
        C = gl.zeros([DK, DV], gl.float32, of_v)
        N = gl.zeros([DK], gl.float32, of_n)
        total = one.to(gl.float32) + 1.0
        if STATE:
            at_state = state_of(index, work) * HEADS + head
            C = gl.load(state_pointers(state_in, at_state, 0, 0, DK, DV, False, of_v, DK, DV)).to(gl.float32)
            if NORMALIZE:
                N = gl.load(n_in + at_state.to(gl.int64) * DK + rk)
        if READS:
            put_state(C, N, own(ring_c, head, n), own(ring_n, head, n), NORMALIZE)
        for step in range(0, tiles):
            c = own(ring_c, head, n)
            kept_n = own(ring_n, head, n)
            part = own(ring_p, 0, n)
            x = ring_x.index(COPIES * s + copy).reshape([L, DK])
            y = ring_y.index(HEADS * s + head).reshape([L, DV])
            zk = ring_zk.index(COPIES * s + copy).reshape([L, DK])
            zv = ring_zv.index(HEADS * s + head).reshape([L, DV])
            g = ring_g.index(s)
            w = ring_u.index(s)
            e = ring_e.index(s)
            t = (tiles - 1 - step if BACK else step) * L
            mbarrier.wait(full.index(s), phase)
            if VALUES:
                S = product(zk, x.permute((1, 0)), of_p)
                V = product(zk, c, of_v)
            elif KEYS:
                S = product(zv, y.permute((1, 0)), of_p)
                K = product(zv, c.permute((1, 0)), of_k)
            if READS:
                D = gate_matrix(g, L, 0, of_p, 1)
            if VALUES:
                weight = g.slice(OUT * L, L, 0).load(gl.SliceLayout(1, of_v))
                S = warpgroup_mma_wait(1, deps=[S])
                P = seen(S, D, i, j, 0, BACK)
                if NORMALIZE and not BACK:
                    row = gl.expand_dims(kept_n.load(gl.SliceLayout(0, of_k)), 0)
                    dot = gl.sum(zk.load(of_k).to(gl.float32) * row, 1)
                    d = gl.convert_layout(gl.sum(P, 1), gl.SliceLayout(1, of_v), assert_trivial=True)
                    d += gl.convert_layout(dot, gl.SliceLayout(1, of_v), assert_trivial=True) * weight
                A = gl.convert_layout(P.to(dtype), left_of_v, assert_trivial=True)
                V = warpgroup_mma_wait(0, deps=[V])
                V = warpgroup_mma(A, y, V * gl.expand_dims(weight, 1), is_async=True)
                if KEYS:
                    S = product(zv, y.permute((1, 0)), of_p)
            if READS:
                # The stage of the previous tile is free once its outputs have left.
                tma.store_wait(0)
                mbarrier.arrive(free.index((s + STAGES - 1) % STAGES), count=1, pred=n > 0)
            if KEYS:
                if VALUES:
                    V, A = warpgroup_mma_wait(1, deps=[V, A])
                    out_v = V.to(dtype)
                    K = product(zv, c.permute((1, 0)), of_k)
                S = warpgroup_mma_wait(1, deps=[S])
                if DELTA:
                    if BACK:
                        S += gl.expand_dims(e.load(gl.SliceLayout(0, of_p)), 0)
                    else:
                        S += gl.expand_dims(e.load(gl.SliceLayout(1, of_p)), 1)
                if VALUES:
                    D = gate_matrix(g, L, 0, of_p, 1)  # again: kept, it takes registers that V needs
                A_k = gl.convert_layout(seen(S, D, i, j, 0, BACK).to(dtype), left_of_k, assert_trivial=True)
                weight_k = g.slice(OUT * L, L, 0).load(gl.SliceLayout(1, of_k))
                K = warpgroup_mma_wait(0, deps=[K])
                if NORMALIZE:
                    row = gl.expand_dims(kept_n.load(gl.SliceLayout(0, of_k)), 0)
                    if BACK:
                        K += row
                    elif DELTA:
                        K += row * gl.expand_dims(e.load(gl.SliceLayout(1, of_k)), 1)
                K = warpgroup_mma(A_k, x, K * gl.expand_dims(weight_k, 1), is_async=True)
                if VALUES:
                    barrier()  # no warp's MMA reads zv any more
                    zv.store(out_v)
            x_t = x.permute((1, 0)).load(of_p)
            B = scaled(x_t, w, L, left_of_v)
            decay = g.slice(CARRY * L, 1, 0).load(gl.SliceLayout(0, of_v))
            C = warpgroup_mma(B, y, C * gl.expand_dims(decay, 0), is_async=True)
            if not READS:
                total = total * decay
            if NORMALIZE:
                N = N * gl.max(g.slice(CARRY * L, 1, 0).load(gl.SliceLayout(0, of_p)), 0)
                if DELTA or not BACK:
                    # Not of B, which is rounded: outputs are divided by q . n, which can be small beside q and n.
                    update = weights(w, L, gl.SliceLayout(0, of_p))
                    if BACK:
                        update = update * e.load(gl.SliceLayout(0, of_p))
                    N += gl.sum(x_t.to(gl.float32) * gl.expand_dims(update, 0), 1)
            if VALUES and not KEYS:
                V, A = warpgroup_mma_wait(1, deps=[V, A])
                if NORMALIZE and not BACK:
                    if SAVE_D:
                        gl.store(d_out + (first + t + rd) * (H * HEADS) + h, d, mask=rd < steps - t)
                    V = V * gl.expand_dims(1.0 / gl.maximum(gl.abs(d), e.load(gl.SliceLayout(1, of_v))), 1)
                out_v = V.to(dtype)
            if KEYS:
                K, A_k = warpgroup_mma_wait(1, deps=[K, A_k])
                gl.store(w_out + tile0 * L + t + rl, gl.sum(K * zk.load(of_k).to(gl.float32), 1))
                if SHARED:
                    if head == 1:
                        mbarrier.wait(taken, (n & 1) ^ 1)
                        part.store(K.to(dtype))
                        barrier()
                        mbarrier.arrive(given, count=1)
                    else:
                        mbarrier.wait(given, n & 1)
                        K += part.load(of_k).to(gl.float32)
                        barrier()
                        mbarrier.arrive(taken, count=1)
                out_k = K.to(dtype)
            C, B = warpgroup_mma_wait(0, deps=[C, B])
            barrier()  # no warp's MMA reads the tiles any more
            if VALUES and not KEYS:
                y.store(out_v)
            if KEYS and copy == head:
                zk.store(out_k)
            if READS:
                put_state(C, N, c, kept_n, NORMALIZE)
            else:
                mbarrier.arrive(free.index(s), count=1)
            if VALUES:
                of_out = (ring_zv if KEYS else ring_y).index(HEADS * s + head)
                async_store(OutV, coordinates(b, h, start + t, 0, start + steps, work), of_out)
            if KEYS and copy == head:
                at_k = coordinates(b, hp * COPIES + copy, start + t, 0, start + steps, work)
                async_store(OutK, at_k, ring_zk.index(COPIES * s + copy))
            if MARKED:
                at = t if BACK else t + L
                if at % MARKS == 0 and at < steps and at > 0:
                    to = mark_of(b, start, at, T, h, H * HEADS, MARKS)
                    if BACK:
                        leave_dot(
                            C, N, own(ring_m, head, n), n_marks, dots, to, rk, full_m.index(head),
                            free_m.index(head), marked & 1, DK, NORMALIZE,
                        )  # fmt: skip
                        marked += 1
                    else:
                        leave_state(c, N, Marks, n_marks, to, rk, DK, NORMALIZE)
            s += 1
            if s == STAGES:
                s = 0
                phase ^= 1
            n += 1
        if FINAL:
            at_state = state_of(index, work) * HEADS + head
            to_dtype: gl.constexpr = state_out.dtype.element_ty
            gl.store(state_pointers(state_out, at_state, 0, 0, DK, DV, False, of_v, DK, DV), C.to(to_dtype))
            if NORMALIZE:
                gl.store(n_out + at_state.to(gl.int64) * DK + rk, N)
            if not READS:
                gl.store(decays + at_state + one, total)
    if READS:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "tiles_of_head", "H", "GROUP", "length", "pieces"])
def whole(
    X, Y, ZK, ZV, OutV, OutK, Marks, gates, w_out, d_out, dots, state_in, state_out, n_in, n_out, n_marks, decays,
    order, T, tiles_of_head, H, GROUP, length, pieces,
    HEADS: gl.constexpr, SHARED: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, L: gl.constexpr,
    STAGES: gl.constexpr, MARKS: gl.constexpr, BACK: gl.constexpr, SEGMENTED: gl.constexpr, STATE: gl.constexpr,
    FINAL: gl.constexpr, SKIP: gl.constexpr, VALUES: gl.constexpr, KEYS: gl.constexpr, NORMALIZE: gl.constexpr,
    SAVE_D: gl.constexpr, DELTA: gl.constexpr, MARKED: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """H is how often HEADS heads there are; with SHARED OutK has so many."""
    dtype: gl.constexpr = X.dtype
    READS: gl.constexpr = VALUES or KEYS
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    EXTRA: gl.constexpr = (DELTA_P if DELTA else -1) if KEYS else (FLOOR if NORMALIZE and READS else -1)
    COPIES: gl.constexpr = 1 if SHARED else HEADS
    ring_x = ring_of(X, COPIES * STAGES)
    ring_y = ring_of(Y, HEADS * STAGES)
    ring_zk = ring_x
    ring_zv = ring_y
    ring_c = ring_y
    ring_n = ring_y
    if READS:
        ring_zk = ring_of(ZK, COPIES * STAGES)
        ring_c = gl.allocate_shared_memory(dtype, [HEADS, DK, DV], square)
    if KEYS:
        ring_zv = ring_of(ZV, HEADS * STAGES)
    if NORMALIZE:
        ring_n = gl.allocate_shared_memory(gl.float32, [HEADS, DK], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1 + HEADS)
        mbarrier.init(free.index(s), count=HEADS)
    exchange = (ring_c, full, full)
    if SHARED and KEYS:
        part = gl.allocate_shared_memory(dtype, [1, L, DK], square)
        given = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(given, count=1)
        mbarrier.init(taken, count=1)
        exchange = (part, given, taken)
    DOTS: gl.constexpr = MARKED and BACK
    of_marks = (ring_c, full, full)
    if DOTS:
        ring_m = gl.allocate_shared_memory(dtype, [HEADS, DK, DV], square)
        full_m = gl.allocate_shared_memory(gl.int64, [HEADS, 1], mbarrier.MBarrierLayout())
        free_m = gl.allocate_shared_memory(gl.int64, [HEADS, 1], mbarrier.MBarrierLayout())
        for e in gl.static_range(HEADS):
            mbarrier.init(full_m.index(e), count=1)
            mbarrier.init(free_m.index(e), count=1)
        of_marks = (ring_m, full_m, free_m)
    fence_async_shared()
    tensors = (X, Y, ZK, ZV, Marks)
    outputs = (OutV, OutK, Marks)
    rings = (ring_x, ring_y, ring_zk, ring_zv)
    shared = (ring_x, ring_y, ring_zk, ring_zv, ring_c, ring_n)
    states = (state_in, state_out, n_in, n_out, n_marks, decays)
    sums = (w_out, d_out, dots)
    barriers = (full, free)
    work = (T, H, length, pieces)
    if PACKED:
        work = (T, H, length, pieces, order)
    ring_g = gl.allocate_shared_memory(gl.float32, [STAGES, GATES * L], flat)
    ring_u = gl.allocate_shared_memory(dtype, [STAGES, 2 * L], flat)
    ring_e = ring_g
    if EXTRA >= 0:
        ring_e = gl.allocate_shared_memory(gl.float32, [STAGES, L], flat)
    gate_rings = (ring_g, ring_u, ring_e)
    common = (outputs, states, sums, shared, barriers, exchange, of_marks, work, tiles_of_head)
    stride = tiles_of_head * HEADS
    if HEADS == 1:
        gl.warp_specialize(
            [
                (consume, (
                    common, gate_rings, 0, HEADS, SHARED, DK, DV, L, STAGES, MARKS, BACK, SEGMENTED, STATE, FINAL,
                    SKIP, VALUES, KEYS, NORMALIZE, SAVE_D, DELTA, MARKED,
                )),
                (load_tiles, (
                    tensors, rings, full, free, of_marks, work, GROUP, HEADS, SHARED, DK, L, STAGES, MARKS, BACK,
                    SEGMENTED, SKIP, READS, KEYS, DOTS,
                )),
                (load_gates, (
                    gates, ring_g, ring_u, ring_e, ring_u, ring_g, gates, full, free, work, stride, L, STAGES, BACK,
                    SEGMENTED, EXTRA, False, NOTHING, 1, SKIP,
                )),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip
    else:
        other_g = gl.allocate_shared_memory(gl.float32, [STAGES, GATES * L], flat)
        other_u = gl.allocate_shared_memory(dtype, [STAGES, 2 * L], flat)
        other_e = other_g
        if EXTRA >= 0:
            other_e = gl.allocate_shared_memory(gl.float32, [STAGES, L], flat)
        other_rings = (other_g, other_u, other_e)
        other_gates = gates + tiles_of_head.to(gl.int64) * (VECTORS * L)
        gl.warp_specialize(
            [
                (consume, (
                    common, gate_rings, 0, HEADS, SHARED, DK, DV, L, STAGES, MARKS, BACK, SEGMENTED, STATE, FINAL,
                    SKIP, VALUES, KEYS, NORMALIZE, SAVE_D, DELTA, MARKED,
                )),
                (consume, (
                    common, other_rings, 1, HEADS, SHARED, DK, DV, L, STAGES, MARKS, BACK, SEGMENTED, STATE, FINAL,
                    SKIP, VALUES, KEYS, NORMALIZE, SAVE_D, DELTA, MARKED,
                )),
                (load_tiles, (
                    tensors, rings, full, free, of_marks, work, GROUP, HEADS, SHARED, DK, L, STAGES, MARKS, BACK,
                    SEGMENTED, SKIP, READS, KEYS, DOTS,
                )),
                (load_gates, (
                    gates, ring_g, ring_u, ring_e, ring_u, ring_g, gates, full, free, work, stride, L, STAGES, BACK,
                    SEGMENTED, EXTRA, False, NOTHING, 1, SKIP,
                )),
                (load_gates, (
                    other_gates, other_g, other_u, other_e, other_u, other_g, other_gates, full, free, work, stride, L,
                    STAGES, BACK, SEGMENTED, EXTRA, False, NOTHING, 1, SKIP,
                )),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )  # fmt: skip
