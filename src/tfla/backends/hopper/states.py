"""What each segment adds to a state: (dqk, dhv), from zero to behind the segment, and the decay over it.

The partitions, and who waits for whom, are those of :mod:`.columns`, but a consumer is done with a tile when

    C = decay C + (x w)^T y

is, 64 rows of it by 128 or 256 columns; x, y are k, v, and walking back, for the cotangent, q, do. With a normaliser
there is one more column, n, of which y is 1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tfla.backends.hopper.parts import (
    CARRY,
    GATES,
    NOTHING,
    async_load,
    coordinates,
    load_gates,
    piece,
    place,
    ring_of,
    scaled,
    state_of,
    state_pointers,
    tiles_of,
    weights,
)


@gluon.jit
def load_tiles(
    X, Y, rings, full, free, work, GROUP,
    PIECES: gl.constexpr, L: gl.constexpr, STAGES: gl.constexpr, BACK: gl.constexpr, SEGMENTED: gl.constexpr,
    SKIP: gl.constexpr,
):  # fmt: skip
    """The loader: one warp."""
    ring_x, ring_y = rings
    pieces = work[3]
    n = 0
    row = gl.program_id(1) // PIECES * 128
    column = gl.program_id(1) % PIECES * Y.block_type.shape[-1]
    for index in range(gl.program_id(0), pieces, gl.num_programs(0)):
        b, h, start, steps, _tile0 = piece(index, work, L, SEGMENTED)
        tiles = tiles_of(index, start, steps, work, L, BACK, SKIP)
        for i in range(0, tiles):
            t = start + (tiles - 1 - i if BACK else i) * L
            end = start + steps
            s, phase = place(n, STAGES)
            mbarrier.wait(free.index(s), phase ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, X.block_type.nbytes + Y.block_type.nbytes)
            async_load(X, coordinates(b, h // GROUP, t, row, end, work), bar, ring_x.index(s))
            async_load(Y, coordinates(b, h, t, column, end, work), bar, ring_y.index(s))
            n += 1
    s, phase = place(n, STAGES)
    mbarrier.wait(free.index(s), phase ^ 1)
    mbarrier.arrive(full.index(s), count=1)


@gluon.jit
def add_up(
    state_out, n_out, decays, rings, ring_g, ring_u, full, free, work,
    half: gl.constexpr, DX: gl.constexpr, DY: gl.constexpr, PIECES: gl.constexpr, L: gl.constexpr,
    STAGES: gl.constexpr, BACK: gl.constexpr, SEGMENTED: gl.constexpr, NORMALIZE: gl.constexpr, SKIP: gl.constexpr,
):  # fmt: skip
    """One warpgroup, with 64 rows."""
    ring_x, ring_y = rings
    pieces = work[3]
    WIDTH: gl.constexpr = DY // PIECES
    of_x: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L, 16])
    of_n: gl.constexpr = gl.SliceLayout(1, of_x)
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    row = gl.program_id(1) // PIECES * 128 + half * 64
    column = gl.program_id(1) % PIECES * WIDTH
    one = gl.arange(0, 1, gl.SliceLayout(0, of_state))
    s = 0
    phase = 0
    for index in range(gl.program_id(0), pieces, gl.num_programs(0)):
        _b, _h, start, steps, _tile0 = piece(index, work, L, SEGMENTED)
        C0 = gl.zeros([64, 128], gl.float32, of_state)
        C1 = gl.zeros([64, 128], gl.float32, of_state)
        N = gl.zeros([64], gl.float32, of_n)
        total = one.to(gl.float32) + 1.0
        for _ in range(0, tiles_of(index, start, steps, work, L, BACK, SKIP)):
            mbarrier.wait(full.index(s), phase)
            x = ring_x.index(s).reshape([L, 128]).slice(half * 64, 64, 1).permute((1, 0))
            y = ring_y.index(s).reshape([L, WIDTH])
            decay = ring_g.index(s).slice(CARRY * L, 1, 0).load(gl.SliceLayout(0, of_state))
            carry = gl.expand_dims(decay, 0)
            total = total * decay
            x_t = x.load(of_x)
            B = scaled(x_t, ring_u.index(s), L, left)
            C0 = warpgroup_mma(B, y.slice(0, 128, 1), C0 * carry, is_async=True)
            if WIDTH == 256:
                C1 = warpgroup_mma(B, y.slice(128, 128, 1), C1 * carry, is_async=True)
            if NORMALIZE:
                # Not of B, which is rounded: outputs are divided by q . n, which can be small beside q and n.
                w = gl.expand_dims(weights(ring_u.index(s), L, gl.SliceLayout(0, of_x)), 0)
                N = N * gl.max(ring_g.index(s).slice(CARRY * L, 1, 0).load(gl.SliceLayout(0, of_x)), 0)
                N += gl.sum(x_t.to(gl.float32) * w, 1)
            if WIDTH == 256:
                C0, C1, B = warpgroup_mma_wait(0, deps=[C0, C1, B])
            else:
                C0, B = warpgroup_mma_wait(0, deps=[C0, B])
            mbarrier.arrive(free.index(s), count=1)
            s += 1
            if s == STAGES:
                s = 0
                phase ^= 1
        at = state_of(index, work)
        dtype: gl.constexpr = state_out.dtype.element_ty
        gl.store(state_pointers(state_out, at, row, column, DX, DY, False, of_state), C0.to(dtype))
        if WIDTH == 256:
            gl.store(state_pointers(state_out, at, row, column + 128, DX, DY, False, of_state), C1.to(dtype))
        if NORMALIZE:
            rk = row + gl.arange(0, 64, of_n)
            gl.store(n_out + at.to(gl.int64) * DX + rk, N, mask=rk * 0 + column == 0)
        gl.store(decays + at + one, total, mask=one + row + column == 0)


@gluon.jit(do_not_specialize=["T", "tiles_of_head", "H", "GROUP", "length", "pieces"])
def states(
    X, Y, gates, state_out, n_out, decays, order, T, tiles_of_head, H, GROUP, length, pieces,
    DX: gl.constexpr, DY: gl.constexpr, PIECES: gl.constexpr, L: gl.constexpr, STAGES: gl.constexpr,
    BACK: gl.constexpr, SEGMENTED: gl.constexpr, NORMALIZE: gl.constexpr, SKIP: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = X.dtype
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring_x = ring_of(X, STAGES)
    ring_y = ring_of(Y, STAGES)
    ring_g = gl.allocate_shared_memory(gl.float32, [STAGES, GATES * L], flat)
    ring_u = gl.allocate_shared_memory(dtype, [STAGES, 2 * L], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=2)
        mbarrier.init(free.index(s), count=2)
    fence_async_shared()
    rings = (ring_x, ring_y)
    work = (T, H, length, pieces)
    if PACKED:
        work = (T, H, length, pieces, order)
    gl.warp_specialize(
        [
            (add_up, (
                state_out, n_out, decays, rings, ring_g, ring_u, full, free, work, 0, DX, DY, PIECES, L, STAGES,
                BACK, SEGMENTED, NORMALIZE, SKIP,
            )),
            (add_up, (
                state_out, n_out, decays, rings, ring_g, ring_u, full, free, work, 1, DX, DY, PIECES, L, STAGES,
                BACK, SEGMENTED, NORMALIZE, SKIP,
            )),
            (load_tiles, (X, Y, rings, full, free, work, GROUP, PIECES, L, STAGES, BACK, SEGMENTED, SKIP)),
            (load_gates, (
                gates, ring_g, ring_u, ring_g, ring_u, ring_g, gates, full, free, work, tiles_of_head, L, STAGES,
                BACK, SEGMENTED, -1, False, NOTHING, PIECES, SKIP,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
