"""dk and dv together, of heads with dqk 128 and dhv 128 without a normaliser: one program walks all heads it is given,
with whole states, and reads q, k, v and do once.

    loader       q, v of a tile by TMA   -> a ring of READ stages   -> consumers
                 k, do of a tile by TMA  -> a ring of STAGES stages -> consumers
    gater        their gate vectors      -> the stages of k and do  -> consumers
    consumer 0,1 each half of the rows of the state's cotangent C, (dqk, dhv), in registers. Per tile
        P    = v do^T by consumer 0, for dk, and k q^T by consumer 1, for dv, weighted
        dk^T = C v^T                     C, rounded, is a left operand as it lies in registers, and goes to shared
                                         memory, where dv finds the rows of both
        -- ready: both have stored P and C
        dk^T = dk^T weighted + q^T P^T   half of the rows each
        C    = decay C + (q w)^T do
        dv   = k C, weighted, + P do     half of the columns each
        -- read: both are done with k and C, and with the half of do that the other writes into
        dk   overwrites k, and dv do, and they leave by TMA; when they have left, a tile later, their stage is free,
             and that of q and v has been since `ready`

The sums of k . dk and the products of C with states at marks are as in :mod:`.rows`.
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
    OF_SUMS,
    OUT,
    async_load,
    async_store,
    barrier,
    coordinates,
    gate_matrix,
    load_gates,
    piece,
    place,
    put_dot,
    ring_of,
    scaled,
    seen,
    state_of,
    state_pointers,
)
from tfla.backends.hopper.rows import row_dots

D = gl.constexpr(128)  # dqk and dhv
HALF = gl.constexpr(64)
READ = gl.constexpr(2)
STAGES = gl.constexpr(3)


@gluon.jit
def load_tiles(tensors, rings, full_q, free_q, full, free, work, GROUP, L: gl.constexpr, SEGMENTED: gl.constexpr):
    """The loader: one warp."""
    Q, K, V, DO = tensors
    ring_q, ring_k, ring_v, ring_do = rings
    pieces = work[3]
    n = 0
    for index in range(gl.program_id(0), pieces, gl.num_programs(0)):
        b, h, start, steps, _tile0 = piece(index, work, L, SEGMENTED)
        tiles = (steps + L - 1) // L
        end = start + steps
        for i in range(0, tiles):
            t = start + (tiles - 1 - i) * L
            left_k = coordinates(b, h // GROUP, t, 0, end, work)
            left_v = coordinates(b, h, t, 0, end, work)
            s, phase = place(n, STAGES)
            mbarrier.wait(free.index(s), phase ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, 2 * (K.block_type.nbytes + DO.block_type.nbytes))
            async_load(DO, left_v, bar, ring_do.index(2 * s))
            async_load(DO, coordinates(b, h, t, HALF, end, work), bar, ring_do.index(2 * s + 1))
            async_load(K, left_k, bar, ring_k.index(2 * s))
            async_load(K, coordinates(b, h // GROUP, t, HALF, end, work), bar, ring_k.index(2 * s + 1))
            s, phase = place(n, READ)
            mbarrier.wait(free_q.index(s), phase ^ 1)
            bar = full_q.index(s)
            mbarrier.expect(bar, Q.block_type.nbytes + V.block_type.nbytes)
            async_load(V, left_v, bar, ring_v.index(s))
            async_load(Q, left_k, bar, ring_q.index(s))
            n += 1


@gluon.jit
def consume(
    OutK, OutV, states, rings, shared, barriers, work,
    half: gl.constexpr, L: gl.constexpr, MARKS: gl.constexpr, SEGMENTED: gl.constexpr, STATE: gl.constexpr,
    FINAL: gl.constexpr,
):  # fmt: skip
    """One warpgroup, with 64 rows as two pieces of 64 columns."""
    ring_q, ring_k, ring_v, ring_do = rings
    c, ring_p, ring_g, ring_u, ring_s = shared
    full_q, free_q, full, free, ready, read = barriers
    state_in, state_out, marks, dots = states
    T, H, pieces = work[0], work[1], work[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    dtype: gl.constexpr = ring_v.dtype
    zero = gl.zeros([HALF, HALF], gl.float32, layout)
    i = gl.arange(0, L, gl.SliceLayout(1, layout))
    j = gl.arange(0, L, gl.SliceLayout(0, layout))
    row: gl.constexpr = half * HALF
    my_rows = c.slice(row, HALF, 0)
    my_columns = c.slice(row, HALF, 1)
    n = 0
    for index in range(gl.program_id(0), pieces, gl.num_programs(0)):
        b, h, start, steps, _tile0 = piece(index, work, L, SEGMENTED)
        tiles = (steps + L - 1) // L
        mark = ((b.to(gl.int64) * T + start) // MARKS - 1) * H + h
        C0 = gl.zeros([HALF, HALF], gl.float32, layout)
        C1 = gl.zeros([HALF, HALF], gl.float32, layout)
        if STATE:
            at = state_of(index, work)
            C0 = gl.load(state_pointers(state_in, at, row, 0, D, D, False, layout, HALF, HALF)).to(gl.float32)
            C1 = gl.load(state_pointers(state_in, at, row, HALF, D, D, False, layout, HALF, HALF)).to(gl.float32)
        for step in range(0, tiles):
            t = (tiles - 1 - step) * L
            r, phase_r = place(n, READ)
            s, phase = place(n, STAGES)
            q = ring_q.index(r).reshape([L, D])
            v = ring_v.index(r).reshape([L, D])
            k0 = ring_k.index(2 * s).reshape([L, HALF])
            k1 = ring_k.index(2 * s + 1).reshape([L, HALF])
            do0 = ring_do.index(2 * s).reshape([L, HALF])
            do1 = ring_do.index(2 * s + 1).reshape([L, HALF])
            g = ring_g.index(s)
            # The other consumer may read its P of dv of the tile before, which is not in the way.
            p_k = ring_p.index(0)
            p_v = ring_p.index(1 + n % 2)
            mbarrier.wait(full.index(s), phase)
            mbarrier.wait(full_q.index(r), phase_r)
            if half == 0:
                S = warpgroup_mma(v.slice(0, HALF, 1), do0.permute((1, 0)), zero, use_acc=False, is_async=True)
                S = warpgroup_mma(v.slice(HALF, HALF, 1), do1.permute((1, 0)), S, is_async=True)
            else:
                S = warpgroup_mma(k0, q.slice(0, HALF, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
                S = warpgroup_mma(k1, q.slice(HALF, HALF, 1).permute((1, 0)), S, is_async=True)
            # The stage of the previous tile is free once its outputs have left.
            tma.store_wait(0)
            mbarrier.arrive(free.index((s + STAGES - 1) % STAGES), count=1, pred=n > 0)
            gate = gate_matrix(g, L, 0, layout, 1)
            S = warpgroup_mma_wait(0, deps=[S])
            P = seen(S, gate, i, j, 0, True).to(dtype)
            if half == 0:
                p_k.store(P)
            else:
                p_v.store(P)
            A = gl.convert_layout(C0.to(dtype), left, assert_trivial=True)
            dk = warpgroup_mma(A, v.slice(0, HALF, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
            my_rows.slice(0, HALF, 1).store(C0.to(dtype))
            dk, A = warpgroup_mma_wait(0, deps=[dk, A])
            A = gl.convert_layout(C1.to(dtype), left, assert_trivial=True)
            dk = warpgroup_mma(A, v.slice(HALF, HALF, 1).permute((1, 0)), dk, is_async=True)
            my_rows.slice(HALF, HALF, 1).store(C1.to(dtype))
            fence_async_shared()
            dk, A = warpgroup_mma_wait(0, deps=[dk, A])
            barrier()
            mbarrier.arrive(ready, count=1)
            q_t = q.slice(row, HALF, 1).permute((1, 0)).load(layout)
            barrier()
            mbarrier.arrive(free_q.index(r), count=1)
            weight = gl.expand_dims(g.slice(OUT * L, L, 0).load(gl.SliceLayout(0, layout)), 0)
            mbarrier.wait(ready, n & 1)
            A = gl.convert_layout(q_t, left, assert_trivial=True)
            dk = warpgroup_mma(A, p_k.permute((1, 0)), dk * weight, is_async=True)
            B = scaled(q_t, ring_u.index(s), L, left)
            carry = gl.expand_dims(g.slice(CARRY * L, 1, 0).load(gl.SliceLayout(0, layout)), 0)
            C0 = warpgroup_mma(B, do0, C0 * carry, is_async=True)
            C1 = warpgroup_mma(B, do1, C1 * carry, is_async=True)
            dk, A = warpgroup_mma_wait(2, deps=[dk, A])
            my_k = ring_k.index(2 * s + half)
            k_t = my_k.reshape([L, HALF]).permute((1, 0))
            put_dot(dk, k_t, ring_s.index(s), half, L)
            C0, C1, B = warpgroup_mma_wait(0, deps=[C0, C1, B])
            dv = warpgroup_mma(k0, my_columns.slice(0, HALF, 0), zero, use_acc=False, is_async=True)
            dv = warpgroup_mma(k1, my_columns.slice(HALF, HALF, 0), dv, is_async=True)
            weight = gl.expand_dims(g.slice(OUT * L, L, 0).load(gl.SliceLayout(1, layout)), 1)
            dv = warpgroup_mma_wait(0, deps=[dv])
            barrier()
            mbarrier.arrive(read, count=1)
            my_do = ring_do.index(2 * s + half)
            dv = warpgroup_mma(p_v, my_do.reshape([L, HALF]), dv * weight, is_async=True)
            mbarrier.wait(read, n & 1)
            k_t.store(dk.to(dtype))
            dv = warpgroup_mma_wait(0, deps=[dv])
            barrier()  # no warp's MMA reads do any more
            my_do.reshape([L, HALF]).store(dv.to(dtype))
            fence_async_shared()  # would wait for a copy that is on its way: both go after it
            barrier()
            async_store(OutK, coordinates(b, h, start + t, row, start + steps, work), my_k)
            async_store(OutV, coordinates(b, h, start + t, row, start + steps, work), my_do)
            n += 1
            if t % MARKS == 0 and t > 0:
                to = mark + t // MARKS * H
                dot = row_dots(C0, marks, to, row, 0, D, D, layout)
                dot += row_dots(C1, marks, to, row, HALF, D, D, layout)
                warps = gl.sum(gl.reshape(dot, [4, 16]), 1)
                gl.store(dots + to * 8 + half * 4 + gl.arange(0, 4, warps.type.layout), warps)
        if FINAL:
            at = state_of(index, work)
            gl.store(state_pointers(state_out, at, row, 0, D, D, False, layout, HALF, HALF), C0)
            gl.store(state_pointers(state_out, at, row, HALF, D, D, False, layout, HALF, HALF), C1)
    tma.store_wait(0)
    mbarrier.arrive(free.index((n + STAGES - 1) % STAGES), count=1)


@gluon.jit(do_not_specialize=["T", "tiles_of_head", "H", "GROUP", "length", "pieces"])
def both(
    Q, K, V, DO, OutK, OutV, gates, w_out, state_in, state_out, marks, dots, order,
    T, tiles_of_head, H, GROUP, length, pieces,
    L: gl.constexpr, MARKS: gl.constexpr, BACK: gl.constexpr, SEGMENTED: gl.constexpr, STATE: gl.constexpr,
    FINAL: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The walk is back. Tiles of Q and V are whole, of the others half as wide."""
    dtype: gl.constexpr = Q.dtype
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring_q = ring_of(Q, READ)
    ring_v = ring_of(V, READ)
    ring_k = ring_of(K, 2 * STAGES)
    ring_do = ring_of(DO, 2 * STAGES)
    c = gl.allocate_shared_memory(dtype, [D, D], square)
    ring_p = gl.allocate_shared_memory(dtype, [3, L, L], square)
    ring_g = gl.allocate_shared_memory(gl.float32, [STAGES, GATES * L], flat)
    ring_u = gl.allocate_shared_memory(dtype, [STAGES, 2 * L], flat)
    ring_s = gl.allocate_shared_memory(gl.float32, [STAGES, 8 * L], flat)
    full_q = gl.allocate_shared_memory(gl.int64, [READ, 1], mbarrier.MBarrierLayout())
    free_q = gl.allocate_shared_memory(gl.int64, [READ, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(READ):
        mbarrier.init(full_q.index(s), count=1)
        mbarrier.init(free_q.index(s), count=2)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=2)
        mbarrier.init(free.index(s), count=2)
    mbarrier.init(ready, count=2)
    mbarrier.init(read, count=2)
    fence_async_shared()
    tensors = (Q, K, V, DO)
    rings = (ring_q, ring_k, ring_v, ring_do)
    shared = (c, ring_p, ring_g, ring_u, ring_s)
    barriers = (full_q, free_q, full, free, ready, read)
    states = (state_in, state_out, marks, dots)
    work = (T, H, length, pieces)
    if PACKED:
        work = (T, H, length, pieces, order)
    gl.warp_specialize(
        [
            (consume, (
                OutK, OutV, states, rings, shared, barriers, work, 0, L, MARKS, SEGMENTED, STATE, FINAL,
            )),
            (consume, (
                OutK, OutV, states, rings, shared, barriers, work, 1, L, MARKS, SEGMENTED, STATE, FINAL,
            )),
            (load_tiles, (tensors, rings, full_q, free_q, full, free, work, GROUP, L, SEGMENTED)),
            (load_gates, (
                gates, ring_g, ring_u, ring_g, ring_u, ring_s, w_out, full, free, work, tiles_of_head, L, STAGES,
                BACK, SEGMENTED, -1, False, OF_SUMS, 1, False,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
