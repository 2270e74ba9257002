"""o, and walking back dv: one program walks all heads it is given, with BLOCKS x 128 columns of their states.

    loader       tiles of x, z, y by TMA       -> a ring of STAGES stages -> consumers
    gater        their gate vectors            -> the same stages         -> consumers
    consumer 0,1 each half of the columns of the state C^T, (dhv, dqk), in registers. Per tile
        out^T = C^T z^T, weighted, + y^T P^T   the state, rounded, is a left operand as it lies in registers
        C^T   = decay C^T + (y w)^T x
        P     = z x^T, weighted, of the next tile: half of the updates each, exchanged through shared memory
        out   overwrites the tile of y and leaves by TMA; when it has left, a tile later, the stage is free

x, y, z are k, v, q for o and q, do, k for dv, as in :mod:`tfla.backends.triton.walk`. With a normaliser o's consumers
also have half of n each, and dv's read h as well: delta is made of do . h, and only this walk has time for its bytes.
Without one, dv of heads of 128 x 128 is made with dk, by :mod:`.both`.
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
    OF_D,
    OF_DELTA,
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
)
from tfla.backends.triton.gates import FLOOR


@gluon.jit
def load_tiles(
    X, Y, Z, Y2, rings, full, free, work, GROUP,
    WIDTH: gl.constexpr, L: gl.constexpr, STAGES: gl.constexpr, BACK: gl.constexpr, SEGMENTED: gl.constexpr,
    DELTA: gl.constexpr,
):  # fmt: skip
    """The loader: one warp."""
    ring_x, ring_y, ring_z, ring_y2 = rings
    each_y: gl.constexpr = 4 if DELTA else 2
    pieces = work[3]
    n = 0
    column = gl.program_id(1) * (2 * WIDTH)
    for index in range(gl.program_id(0), pieces, gl.num_programs(0)):
        b, h, start, steps, _tile0 = piece(index, work, L, SEGMENTED)
        tiles = (steps + L - 1) // L
        for i in range(0, tiles):
            t = start + (tiles - 1 - i if BACK else i) * L
            end = start + steps
            s, phase = place(n, STAGES)
            mbarrier.wait(free.index(s), phase ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, X.block_type.nbytes + Z.block_type.nbytes + each_y * Y.block_type.nbytes)
            async_load(Z, coordinates(b, h // GROUP, t, 0, end, work), bar, ring_z.index(s))
            async_load(X, coordinates(b, h // GROUP, t, 0, end, work), bar, ring_x.index(s))
            y = coordinates(b, h, t, column, end, work)
            y_right = coordinates(b, h, t, column + WIDTH, end, work)
            async_load(Y, y, bar, ring_y.index(2 * s))
            async_load(Y, y_right, bar, ring_y.index(2 * s + 1))
            if DELTA:
                async_load(Y2, y, bar, ring_y2.index(2 * s))
                async_load(Y2, y_right, bar, ring_y2.index(2 * s + 1))
            n += 1
    s, phase = place(n, STAGES)
    mbarrier.wait(free.index(s), phase ^ 1)
    mbarrier.arrive(full.index(s), count=1)


@gluon.jit
def state_pointers(state, at, column, DK: gl.constexpr, DV: gl.constexpr, layout: gl.constexpr):
    """Of 64 columns of a state (dqk, dhv), transposed."""
    v = column + gl.arange(0, 64, gl.SliceLayout(1, layout))
    k = gl.arange(0, DK, gl.SliceLayout(0, layout))
    return state + at.to(gl.int64) * (DK * DV) + gl.expand_dims(v, 1) + gl.expand_dims(k, 0) * DV


@gluon.jit
def next_weights(ring_x, ring_z, s, half: gl.constexpr, L: gl.constexpr, layout: gl.constexpr):
    """Starts z x^T of the tile in stage s for one half of the updates."""
    z = ring_z.index(s).reshape([L, ring_z.shape[-1]])
    x = ring_x.index(s).reshape([L, ring_x.shape[-1]]).slice(half * (L // 2), L // 2, 0).permute((1, 0))
    zero = gl.zeros([L, L // 2], gl.float32, layout)
    return warpgroup_mma(z, x, zero, use_acc=False, is_async=True)


@gluon.jit
def start_d(z, n, L: gl.constexpr, layout: gl.constexpr):
    """Starts z . n for all steps of a tile."""
    zero = gl.zeros([L, 8], gl.float32, layout)
    return warpgroup_mma(z, n.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def put_inverse(
    d, g, floor, sums, to, parity, ring_d, half: gl.constexpr, L: gl.constexpr, SAVE_D: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """1 / max(|d|, exp(-m)), where d is z . n, weighted, and both consumers' sums of P."""
    d = gl.sum(d, 1) * g.slice(OUT * L, L, 0).load(layout)
    d += sums.index(2 * parity).load(layout) + sums.index(2 * parity + 1).load(layout)
    to.store(1.0 / gl.maximum(gl.abs(d), floor.load(layout)))
    if SAVE_D and half == 0:
        ring_d.store(d)
    barrier()


@gluon.jit
def put_n(n, to, half: gl.constexpr, layout: gl.constexpr):
    """n as the sum of two of low precision, which are columns of a right operand."""
    column = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, layout)), 0)
    high = n.to(to.dtype)
    low = (n - high.to(gl.float32)).to(to.dtype)
    columns = gl.where(column == 0, gl.expand_dims(high, 1), gl.where(column == 1, gl.expand_dims(low, 1), 0.0))
    to.slice(half * 64, 64, 1).permute((1, 0)).store(columns.to(to.dtype))


@gluon.jit
def consume(
    tensors, shared, work,
    half: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, BLOCKS: gl.constexpr, L: gl.constexpr,
    STAGES: gl.constexpr, BACK: gl.constexpr, SEGMENTED: gl.constexpr, STATE: gl.constexpr, FINAL: gl.constexpr,
    NORMALIZE: gl.constexpr, SAVE_D: gl.constexpr, DELTA: gl.constexpr,
):  # fmt: skip
    """One warpgroup, with BLOCKS x 64 columns; with a normaliser also half of n."""
    Out, state_in, state_out, n_in, n_out = tensors
    ring_x, ring_y, ring_z, ring_y2, ring_p, ring_g, ring_w, full, free, ready, normaliser = shared
    ring_floor, ring_matrix, ring_n, ring_sums, ring_inverse, ring_d = normaliser
    pieces = work[3]
    of_out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L, 16])
    of_p: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L // 2, 16])
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DK, 16])
    of_n: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, of_n)
    left_of_out: gl.constexpr = gl.DotOperandLayout(0, of_out, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    dtype: gl.constexpr = ring_x.dtype
    zero = gl.zeros([64, L], gl.float32, of_out)
    i = gl.arange(0, L, gl.SliceLayout(1, of_p))
    j = gl.arange(0, L // 2, gl.SliceLayout(0, of_p))
    r = gl.arange(0, 64, of_rows)
    rk = half * 64 + r
    column = gl.program_id(1) * (128 * BLOCKS) + half * (64 * BLOCKS)
    s = 0
    phase = 0
    n = 0
    mbarrier.wait(full.index(0), 0)
    S = next_weights(ring_x, ring_z, 0, half, L, of_p)
    D = gate_matrix(ring_g.index(0), L, half, of_p)
    S = warpgroup_mma_wait(0, deps=[S])
    P = seen(S, D, i, j, half, BACK)
    if NORMALIZE:
        ring_sums.index(half).store(gl.sum(P, 1))
        first_n = gl.zeros([64], gl.float32, of_rows)
        if STATE:
            first_n = gl.load(n_in + state_of(gl.program_id(0), work).to(gl.int64) * DK + rk)
        put_n(first_n, ring_n.index(0), half, of_n)
    ring_p.index(0).slice(half * (L // 2), L // 2, 1).store(P.to(dtype))
    fence_async_shared()
    barrier()
    mbarrier.arrive(ready.index(0), count=1)
    for index in range(gl.program_id(0), pieces, gl.num_programs(0)):
        b, h, start, steps, _tile0 = piece(index, work, L, SEGMENTED)
        tiles = (steps + L - 1) // L
        C0 = gl.zeros([64, DK], gl.float32, of_state)
        C1 = gl.zeros([64, DK], gl.float32, of_state)
        N = gl.zeros([64, 8], gl.float32, of_n)
        if STATE:
            at = state_of(index, work)
            C1 = gl.load(state_pointers(state_in, at, column + 64 * (BLOCKS - 1), DK, DV, of_state)).to(gl.float32)
            if BLOCKS == 2:
                C0 = gl.load(state_pointers(state_in, at, column, DK, DV, of_state)).to(gl.float32)
            if NORMALIZE:
                begin = gl.expand_dims(gl.load(n_in + at.to(gl.int64) * DK + rk), 1)
                N = gl.where(gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, of_n)), 0) == 0, begin, 0.0)
        for step in range(0, tiles):
            z = ring_z.index(s).reshape([L, DK])
            x = ring_x.index(s).reshape([L, DK])
            y = ring_y.index(2 * s + half)
            g = ring_g.index(s)
            p = ring_p.index(n % 2).permute((1, 0))
            t = (tiles - 1 - step if BACK else step) * L
            carry = gl.expand_dims(g.slice(CARRY * L, 1, 0).load(gl.SliceLayout(0, of_state)), 0)
            if BLOCKS == 2:
                y0 = y.reshape([L, 128]).slice(0, 64, 1).permute((1, 0))
                A = gl.convert_layout(C0.to(dtype), left_of_out, assert_trivial=True)
                out = warpgroup_mma(A, z.permute((1, 0)), zero, use_acc=False, is_async=True)
                tma.store_wait(0)
                mbarrier.arrive(free.index((s + STAGES - 1) % STAGES), count=1, pred=n > 0)
                weight = gl.expand_dims(g.slice(OUT * L, L, 0).load(gl.SliceLayout(0, of_out)), 0)
                out, A = warpgroup_mma_wait(0, deps=[out, A])
                y_t = y0.load(of_out)
                if DELTA:
                    y2 = ring_y2.index(2 * s + half).reshape([L, 128]).slice(0, 64, 1).permute((1, 0))
                    put_dot(y_t, y2, ring_d.index(s), 2 * half, L)
                mbarrier.wait(ready.index(n % 2), (n // 2) & 1)
                A = gl.convert_layout(y_t, left_of_out, assert_trivial=True)
                if NORMALIZE:
                    d = start_d(z, ring_n.index(n % 2), L, of_n)
                out = warpgroup_mma(A, p, out * weight, is_async=True)
                B = scaled(y_t, ring_w.index(s), L, left_of_state)
                C0 = warpgroup_mma(B, x, C0 * carry, is_async=True)
                if NORMALIZE:
                    out, A, d = warpgroup_mma_wait(1, deps=[out, A, d])
                    put_inverse(
                        d, g, ring_floor.index(s), ring_sums, ring_inverse.index(half), n % 2, ring_d.index(s),
                        half, L, SAVE_D, of_rows,
                    )  # fmt: skip
                    out = out * gl.expand_dims(ring_inverse.index(half).load(gl.SliceLayout(0, of_out)), 0)
                else:
                    out, A = warpgroup_mma_wait(1, deps=[out, A])
                y0.store(out.to(dtype))
                C0, B = warpgroup_mma_wait(0, deps=[C0, B])
            y1 = y.reshape([L, 64 * BLOCKS]).slice(64 * (BLOCKS - 1), 64, 1).permute((1, 0))
            A = gl.convert_layout(C1.to(dtype), left_of_out, assert_trivial=True)
            out = warpgroup_mma(A, z.permute((1, 0)), zero, use_acc=False, is_async=True)
            if BLOCKS == 1:
                tma.store_wait(0)
                mbarrier.arrive(free.index((s + STAGES - 1) % STAGES), count=1, pred=n > 0)
            weight = gl.expand_dims(g.slice(OUT * L, L, 0).load(gl.SliceLayout(0, of_out)), 0)
            out, A = warpgroup_mma_wait(0, deps=[out, A])
            y_t = y1.load(of_out)
            if DELTA:
                y2 = (
                    ring_y2.index(2 * s + half)
                    .reshape([L, 64 * BLOCKS])
                    .slice(64 * (BLOCKS - 1), 64, 1)
                    .permute((1, 0))
                )
                put_dot(y_t, y2, ring_d.index(s), (half + 1) * BLOCKS - 1, L)
            if BLOCKS == 1:
                mbarrier.wait(ready.index(n % 2), (n // 2) & 1)
                if NORMALIZE:
                    d = start_d(z, ring_n.index(n % 2), L, of_n)
                    d = warpgroup_mma_wait(0, deps=[d])
                    put_inverse(
                        d, g, ring_floor.index(s), ring_sums, ring_inverse.index(half), n % 2, ring_d.index(s),
                        half, L, SAVE_D, of_rows,
                    )  # fmt: skip
            A = gl.convert_layout(y_t, left_of_out, assert_trivial=True)
            out = warpgroup_mma(A, p, out * weight, is_async=True)
            B = scaled(y_t, ring_w.index(s), L, left_of_state)
            C1 = warpgroup_mma(B, x, C1 * carry, is_async=True)
            if NORMALIZE:
                carry_n = gl.expand_dims(g.slice(CARRY * L, 1, 0).load(gl.SliceLayout(0, of_n)), 0)
                x_t = x.slice(half * 64, 64, 1).permute((1, 0))
                N = warpgroup_mma(x_t, ring_matrix.index(s).permute((1, 0)), N * carry_n, is_async=True)
            s += 1
            if s == STAGES:
                s = 0
                phase ^= 1
            n += 1
            mbarrier.wait(full.index(s), phase)
            S = next_weights(ring_x, ring_z, s, half, L, of_p)
            if NORMALIZE:
                out, A = warpgroup_mma_wait(3, deps=[out, A])
                out = out * gl.expand_dims(ring_inverse.index(half).load(gl.SliceLayout(0, of_out)), 0)
            else:
                out, A = warpgroup_mma_wait(2, deps=[out, A])
            y1.store(out.to(dtype))
            fence_async_shared()
            async_store(Out, coordinates(b, h, start + t, column, start + steps, work), y)
            D = gate_matrix(ring_g.index(s), L, half, of_p)
            if NORMALIZE:
                S, C1, B, N = warpgroup_mma_wait(0, deps=[S, C1, B, N])
            else:
                S, C1, B = warpgroup_mma_wait(0, deps=[S, C1, B])
            P = seen(S, D, i, j, half, BACK)
            if NORMALIZE:
                ring_sums.index(n % 2 * 2 + half).store(gl.sum(P, 1))
                next_n = gl.sum(N, 1)
                last = step == tiles - 1
                if STATE:
                    later = index + gl.num_programs(0)
                    later_n = n_in + state_of(later, work, (later < pieces) & last).to(gl.int64) * DK
                    mask = (rk * 0 + later < pieces) & last
                    next_n = gl.where(last, gl.load(later_n + rk, mask, 0.0), next_n)
                else:
                    next_n = gl.where(last, 0.0, next_n)
                put_n(next_n, ring_n.index(n % 2), half, of_n)
            ring_p.index(n % 2).slice(half * (L // 2), L // 2, 1).store(P.to(dtype))
            fence_async_shared()
            barrier()
            mbarrier.arrive(ready.index(n % 2), count=1)
        if FINAL:
            at = state_of(index, work)
            gl.store(state_pointers(state_out, at, column + 64 * (BLOCKS - 1), DK, DV, of_state), C1)
            if BLOCKS == 2:
                gl.store(state_pointers(state_out, at, column, DK, DV, of_state), C0)
            if NORMALIZE:
                gl.store(n_out + at.to(gl.int64) * DK + rk, gl.sum(N, 1))
    tma.store_wait(0)
    if SAVE_D or DELTA:
        mbarrier.arrive(free.index((s + STAGES - 1) % STAGES), count=1)


@gluon.jit(do_not_specialize=["T", "tiles_of_head", "H", "GROUP", "length", "pieces"])
def columns(
    X, Y, Z, Y2, Out, gates, state_in, state_out, n_in, n_out, d_out, order,
    T, tiles_of_head, H, GROUP, length, pieces,
    DK: gl.constexpr, DV: gl.constexpr, BLOCKS: gl.constexpr, L: gl.constexpr, STAGES: gl.constexpr,
    BACK: gl.constexpr, SEGMENTED: gl.constexpr, STATE: gl.constexpr, FINAL: gl.constexpr,
    NORMALIZE: gl.constexpr, SAVE_D: gl.constexpr, DELTA: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """DELTA: the gate vector DELTA_P has -u and gets -u (y . y2), which are do and h."""
    dtype: gl.constexpr = X.dtype
    CARRIED: gl.constexpr = OF_DELTA if DELTA else (OF_D if SAVE_D else NOTHING)
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring_x = ring_of(X, STAGES)
    ring_z = ring_of(Z, STAGES)
    ring_y = ring_of(Y, 2 * STAGES)
    ring_y2 = ring_y
    if DELTA:
        ring_y2 = ring_of(Y, 2 * STAGES)
    ring_p = gl.allocate_shared_memory(dtype, [2, L, L], square)
    ring_g = gl.allocate_shared_memory(gl.float32, [STAGES, GATES * L], flat)
    ring_w = gl.allocate_shared_memory(dtype, [STAGES, 2 * L], flat)
    normaliser = (ring_g, ring_g, ring_g, ring_g, ring_g, ring_g)
    if NORMALIZE:
        normaliser = (
            gl.allocate_shared_memory(gl.float32, [STAGES, L], flat),  # exp(-m)
            gl.allocate_shared_memory(dtype, [STAGES, 8, L], square),  # weights of updates
            gl.allocate_shared_memory(dtype, [2, 8, DK], square),  # n
            gl.allocate_shared_memory(gl.float32, [4, L], flat),  # sums of P
            gl.allocate_shared_memory(gl.float32, [2, L], flat),  # 1 / max(|d|, exp(-m))
            gl.allocate_shared_memory(gl.float32, [STAGES, L], flat),  # d
        )
    elif DELTA:
        parts = gl.allocate_shared_memory(gl.float32, [STAGES, 8 * BLOCKS * L], flat)  # of do . h
        normaliser = (ring_g, ring_g, ring_g, ring_g, ring_g, parts)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=2)
        mbarrier.init(free.index(s), count=2)
    for s in gl.static_range(2):
        mbarrier.init(ready.index(s), count=2)
    fence_async_shared()
    rings = (ring_x, ring_y, ring_z, ring_y2)
    shared = (ring_x, ring_y, ring_z, ring_y2, ring_p, ring_g, ring_w, full, free, ready, normaliser)
    tensors = (Out, state_in, state_out, n_in, n_out)
    work = (T, H, length, pieces)
    if PACKED:
        work = (T, H, length, pieces, order)
    gl.warp_specialize(
        [
            (consume, (
                tensors, shared, work,
                0, DK, DV, BLOCKS, L, STAGES, BACK, SEGMENTED, STATE, FINAL, NORMALIZE, SAVE_D, DELTA,
            )),
            (consume, (
                tensors, shared, work,
                1, DK, DV, BLOCKS, L, STAGES, BACK, SEGMENTED, STATE, FINAL, NORMALIZE, SAVE_D, DELTA,
            )),
            (load_tiles, (
                X, Y, Z, Y2, rings, full, free, work, GROUP, 64 * BLOCKS, L, STAGES, BACK, SEGMENTED, DELTA,
            )),
            (load_gates, (
                gates, ring_g, ring_w, normaliser[0], normaliser[1], normaliser[5], d_out, full, free, work,
                tiles_of_head, L, STAGES, BACK, SEGMENTED, FLOOR if NORMALIZE else -1, NORMALIZE, CARRIED,
                1, False,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
