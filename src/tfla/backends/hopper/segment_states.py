"""What each segment adds to a state: (dqk, dhv), from zero to behind the segment, and the decay over it.

The partitions, and who waits for whom, are those of :mod:`.columns`, but a consumer is done with a tile when

    C = decay C + (x w)^T y

is, 64 rows of it by 128 or 256 columns; x, y are k, v, and walking back, for the cotangent, q, do. With a normaliser
there is one more column, n, of which y is 1.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tfla.backends.hopper.gate_warp import Gater, GateRings, Source, load_gates
from tfla.backends.hopper.mma import of_product, scaled, state_pointers
from tfla.backends.hopper.pipeline import (
    CARRY,
    CONSUMER,
    FILLER,
    GATES,
    OUT,
    async_load,
    barrier,
    last_stage,
    next_stage,
    place,
    ring_of,
    stage_barriers,
    vectors,
)
from tfla.backends.hopper.scheduler import NUMBERS, Work, coordinates, next_piece, piece, state_of, tiles_of


class Walk(NamedTuple):
    """Constants of a kernel."""

    DX: Any
    DY: Any
    PIECES: Any  # programs that share the columns
    L: Any  # steps of a tile
    STAGES: Any
    BACK: Any  # from the last tile to the first
    SEGMENTED: Any
    NORMALIZE: Any
    SKIP: Any  # nothing of the last segment of a sequence


class Outer(NamedTuple):
    """What consumers write in memory."""

    state_out: Any
    n_out: Any
    decays: Any


class Shared(NamedTuple):
    """Shared memory, in STAGES stages."""

    x: Any
    y: Any
    g: Any
    u: Any
    full: Any
    free: Any


@gluon.jit
def load_tiles(X, Y, shared, work, GROUP, walk):
    """The loader: one warp."""
    L: gl.constexpr = walk.L
    n = 0
    row = gl.program_id(1) // walk.PIECES * 128
    column = gl.program_id(1) % walk.PIECES * Y.block_type.shape[-1]
    for index in range(gl.program_id(0), work.pieces, gl.num_programs(0)):
        b, h, start, steps, _tile0 = piece(index, work, L, walk.SEGMENTED)
        tiles = tiles_of(index, start, steps, work, L, walk.BACK, walk.SKIP)
        for i in range(0, tiles):
            t = start + (tiles - 1 - i if walk.BACK else i) * L
            end = start + steps
            s, phase = place(n, walk.STAGES)
            mbarrier.wait(shared.free.index(s), phase ^ 1)
            bar = shared.full.index(s)
            mbarrier.expect(bar, X.block_type.nbytes + Y.block_type.nbytes)
            async_load(X, coordinates(b, h // GROUP, t, row, end, work), bar, shared.x.index(s))
            async_load(Y, coordinates(b, h, t, column, end, work), bar, shared.y.index(s))
            n += 1
    last_stage(n, shared.full, shared.free, walk.STAGES)


@gluon.jit
def left_operand(shared, s, half: gl.constexpr, walk):
    """(x w)^T of the tile in stage s, and with a normaliser its sums."""
    L: gl.constexpr = walk.L
    x_t = shared.x.index(s).reshape([L, 128]).slice(half * 64, 64, 1).permute((1, 0)).load(of_product(L))
    sums = gl.zeros([64], gl.float32, gl.SliceLayout(1, of_product(L)))
    if walk.NORMALIZE:
        # Not of what is rounded: outputs are divided by q . n, which can be small beside q and n.
        w = shared.g.index(s).slice(OUT * L, L, 0).load(gl.SliceLayout(0, of_product(L)))
        sums = gl.sum(x_t.to(gl.float32) * gl.expand_dims(w, 0), 1)
    return scaled(x_t, shared.u.index(s), L, gl.DotOperandLayout(0, of_product(128), 2)), sums


@gluon.jit
def add_up(half: gl.constexpr, outer, shared, work, walk):
    """One warpgroup, with 64 rows. The left operand of a tile is made while the products of that before are on their
    way."""
    L: gl.constexpr = walk.L
    WIDTH: gl.constexpr = walk.DY // walk.PIECES
    of_state: gl.constexpr = of_product(128)
    row = gl.program_id(1) // walk.PIECES * 128 + half * 64
    column = gl.program_id(1) % walk.PIECES * WIDTH
    one = gl.arange(0, 1, gl.SliceLayout(0, of_state))
    s = 0
    phase = 0
    mbarrier.wait(shared.full.index(0), 0)
    B, sums = left_operand(shared, 0, half, walk)
    index = gl.program_id(0)
    while index < work.pieces:
        _b, _h, start, steps, _tile0 = piece(index, work, L, walk.SEGMENTED, True)
        C0 = gl.zeros([64, 128], gl.float32, of_state)
        C1 = gl.zeros([64, 128], gl.float32, of_state)
        N = gl.zeros([64], gl.float32, gl.SliceLayout(1, of_product(L)))
        total = one.to(gl.float32) + 1.0
        for _ in range(0, tiles_of(index, start, steps, work, L, walk.BACK, walk.SKIP)):
            y = shared.y.index(s).reshape([L, WIDTH])
            decay = shared.g.index(s).slice(CARRY * L, 1, 0)
            of_tile = decay.load(gl.SliceLayout(0, of_state))
            carry = gl.expand_dims(of_tile, 0)
            total = total * of_tile
            if walk.NORMALIZE:
                N = N * gl.max(decay.load(gl.SliceLayout(0, of_product(L))), 0) + sums
            C0 = warpgroup_mma(B, y.slice(0, 128, 1), C0 * carry, is_async=True)
            if WIDTH == 256:
                C1 = warpgroup_mma(B, y.slice(128, 128, 1), C1 * carry, is_async=True)
            done = s
            s, phase = next_stage(s, phase, walk.STAGES)
            mbarrier.wait(shared.full.index(s), phase)
            later, sums = left_operand(shared, s, half, walk)
            if WIDTH == 256:
                C0, C1, B = warpgroup_mma_wait(0, deps=[C0, C1, B])
            else:
                C0, B = warpgroup_mma_wait(0, deps=[C0, B])
            B = later
            barrier()  # no warp reads the tile any more
            mbarrier.arrive(shared.free.index(done), count=1)
        leave(C0, C1, N, total, one, state_of(index, work), row, column, outer, walk)
        index = next_piece(index)


@gluon.jit
def leave(C0, C1, N, total, one, at, row, column, outer, walk):
    """What a segment adds to C, to n, and its decay, each by one program."""
    state_out = outer.state_out
    dtype: gl.constexpr = state_out.dtype.element_ty
    of_state: gl.constexpr = C0.type.layout
    gl.store(state_pointers(state_out, at, row, column, walk.DX, walk.DY, False, of_state), C0.to(dtype))
    if walk.DY == 256 * walk.PIECES:
        gl.store(state_pointers(state_out, at, row, column + 128, walk.DX, walk.DY, False, of_state), C1.to(dtype))
    if walk.NORMALIZE:
        rk = row + gl.arange(0, 64, N.type.layout)
        gl.store(outer.n_out + at.to(gl.int64) * walk.DX + rk, N, mask=rk * 0 + column == 0)
    gl.store(outer.decays + at + one, total, mask=one + row + column == 0)


@gluon.jit(do_not_specialize=NUMBERS)
def states(
    X, Y, gates, i_gate, f_gate, state_out, n_out, decays, order,
    T, tiles_of_head, H, GROUP, length, pieces, ib, it, ih, fb, ft, fh, scale, log_scale,
    DX: gl.constexpr, DY: gl.constexpr, PIECES: gl.constexpr, L: gl.constexpr, STAGES: gl.constexpr,
    BACK: gl.constexpr, SEGMENTED: gl.constexpr, NORMALIZE: gl.constexpr, SKIP: gl.constexpr, PACKED: gl.constexpr,
    MADE: gl.constexpr, INPUT_GATE: gl.constexpr, SIGMOID_I: gl.constexpr, SIGMOID_F: gl.constexpr,
):  # fmt: skip
    """Fills states, and with a normaliser n, and the decays."""
    partitions(
        X, Y,
        Source(
            gates, i_gate, f_gate, ib, it, ih, fb, ft, fh, scale, log_scale, MADE, INPUT_GATE, SIGMOID_I, SIGMOID_F
        ),
        tiles_of_head, GROUP, Outer(state_out, n_out, decays),
        Work(T, H, length, pieces, order if PACKED else None),
        Walk(DX, DY, PIECES, L, STAGES, BACK, SEGMENTED, NORMALIZE, SKIP),
    )  # fmt: skip


@gluon.jit
def partitions(X, Y, source, tiles_of_head, GROUP, outer, work, walk):
    """Gives them shared memory, and starts them."""
    L: gl.constexpr = walk.L
    STAGES: gl.constexpr = walk.STAGES
    x = ring_of(X, STAGES)
    y = ring_of(Y, STAGES)
    g = vectors(gl.float32, STAGES, GATES * L)
    u = vectors(X.dtype, STAGES, 2 * L)
    full, free = stage_barriers(STAGES, 2, 2)
    fence_async_shared()
    shared = Shared(x, y, g, u, full, free)
    rings = GateRings(g, u)
    gater: gl.constexpr = Gater(L, STAGES, walk.BACK, walk.SEGMENTED, SKIP=walk.SKIP, GATERS=2, OUTPUTS=False)
    gl.warp_specialize(
        [
            (add_up, (0, outer, shared, work, walk)),
            (add_up, (1, outer, shared, work, walk)),
            (load_tiles, (X, Y, shared, work, GROUP, walk)),
            (load_gates, (0, source, rings, full, free, work, tiles_of_head, gater)),
            (load_gates, (1, source, rings, full, free, work, tiles_of_head, gater)),
        ],
        [4, 1, 1, 1],
        [CONSUMER, FILLER, FILLER, FILLER],
    )  # fmt: skip
