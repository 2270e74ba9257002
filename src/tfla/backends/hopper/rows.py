"""dq, and walking back dk: one program walks all heads it is given, with 128 rows of their states.

The partitions, and who waits for whom, are those of :mod:`.columns`. Per tile a consumer, which has 64 rows of the
state C, (dqk, dhv), as BLOCKS pieces of 128 columns, computes

    out^T = C z^T, weighted, + x^T P^T
    C     = decay C + (x w)^T y
    P     = (z y^T + delta) weighted, of the next tile: half of the updates each

x, y, z are k, v, do for dq and q, do, v for dk. What `out` is a gradient of, q or k, comes with the stage too: its
product with `out` is summed over the rows, by the warps for the gater, which brings the sum to memory for the gradients
of the gates; then `out` overwrites it and leaves by TMA. With a normaliser there is one more column of the state, n.
Without one, dk of heads of 128 x 128 is made with dv, by :mod:`.both`.

All of it is linear in the columns: where a program cannot hold them, dhv > 256, several share them, PIECES, and leave
outputs to be summed; the first of them has delta and n. TRANSPOSED it is o and dv for dqk > 128, where :mod:`.columns`
cannot hold a state: rows are those of C^T, and x, y, z are v, k, q for o and do, q, k for dv.
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
    CONSUMER,
    FILLER,
    GATES,
    NOTHING,
    OF_SUMS,
    OUT,
    Gater,
    GateRings,
    Work,
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
    weights,
)
from tfla.backends.triton.gates import DELTA_P


@gluon.jit
def load_tiles(
    X, Y, Z, W, rings, full, free, work, GROUP,
    PIECES: gl.constexpr, L: gl.constexpr, STAGES: gl.constexpr, BACK: gl.constexpr, SEGMENTED: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """The loader: one warp."""
    ring_x, ring_y, ring_z, ring_w = rings
    pieces = work[3]
    n = 0
    row = gl.program_id(1) // PIECES * 128
    column = gl.program_id(1) % PIECES * Y.block_type.shape[-1]
    for index in range(gl.program_id(0), pieces, gl.num_programs(0)):
        b, h, start, steps, _tile0 = piece(index, work, L, SEGMENTED)
        tiles = (steps + L - 1) // L
        for i in range(0, tiles):
            t = start + (tiles - 1 - i if BACK else i) * L
            end = start + steps
            s, phase = place(n, STAGES)
            mbarrier.wait(free.index(s), phase ^ 1)
            bar = full.index(s)
            of_w: gl.constexpr = 0 if TRANSPOSED else 2 * W.block_type.nbytes
            mbarrier.expect(bar, X.block_type.nbytes + Y.block_type.nbytes + Z.block_type.nbytes + of_w)
            of_x = h if TRANSPOSED else h // GROUP
            of_y = h // GROUP if TRANSPOSED else h
            y = coordinates(b, of_y, t, column, end, work)
            x = coordinates(b, of_x, t, row, end, work)
            async_load(Z, y, bar, ring_z.index(s))
            async_load(Y, y, bar, ring_y.index(s))
            async_load(X, x, bar, ring_x.index(s))
            if not TRANSPOSED:
                async_load(W, x, bar, ring_w.index(2 * s))
                async_load(W, coordinates(b, of_x, t, row + 64, end, work), bar, ring_w.index(2 * s + 1))
            n += 1
    s, phase = place(n, STAGES)
    mbarrier.wait(free.index(s), phase ^ 1)
    mbarrier.arrive(full.index(s), count=1)


@gluon.jit
def load_state(
    state, at, row, column, DX: gl.constexpr, DY: gl.constexpr, TRANSPOSED: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    return gl.load(state_pointers(state, at, row, column, DX, DY, TRANSPOSED, layout)).to(gl.float32)


@gluon.jit
def start_weights(ring_y, ring_z, s, half: gl.constexpr, L: gl.constexpr, layout: gl.constexpr):
    """Starts z y^T of the tile in stage s for one half of the updates."""
    z = ring_z.index(s).reshape([L, ring_z.shape[-1]])
    y = ring_y.index(s).reshape([L, ring_y.shape[-1]]).slice(half * (L // 2), L // 2, 0).permute((1, 0))
    zero = gl.zeros([L, L // 2], gl.float32, layout)
    return warpgroup_mma(z, y, zero, use_acc=False, is_async=True)


@gluon.jit
def put_weights(
    S, g, delta, p, i, j, half: gl.constexpr, L: gl.constexpr, BACK: gl.constexpr, DELTA: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Ends what start_weights has started, and stores P."""
    D = gate_matrix(g, L, half, layout)
    if DELTA:
        if BACK:
            add = gl.expand_dims(delta.slice(half * (L // 2), L // 2, 0).load(gl.SliceLayout(0, layout)), 0)
        else:
            add = gl.expand_dims(delta.load(gl.SliceLayout(1, layout)), 1)
        S += add
    p.slice(half * (L // 2), L // 2, 1).store(seen(S, D, i, j, half, BACK).to(p.dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def mark_pointers(
    marks, at, row, column, DX: gl.constexpr, DY: gl.constexpr, layout: gl.constexpr, COLUMNS: gl.constexpr = 128
):
    """Of 64 rows and COLUMNS columns of a mark. Blocks of 8 x 8 lie together, of which a warp has one at a time."""
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    c = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    first = marks + at.to(gl.int64) * (DX * DY) + (row * DY + column * 8)
    return first + (r // 8 * (8 * DY) + c // 8 * 64 + r % 8 * 8 + c % 8)


@gluon.jit
def row_dots(C, marks, mark, row, column, DX: gl.constexpr, DY: gl.constexpr, layout: gl.constexpr):
    """Of each row of a part of a cotangent, with that of the state at a mark."""
    state = gl.load(mark_pointers(marks, mark, row, column, DX, DY, layout, C.shape[1]))
    return gl.sum(C * state.to(gl.float32), 1)


@gluon.jit
def consume(
    Out, states, rings, gate_rings, full, free, ready, work,
    half: gl.constexpr, DX: gl.constexpr, DY: gl.constexpr, PIECES: gl.constexpr, L: gl.constexpr,
    STAGES: gl.constexpr, MARKS: gl.constexpr, BACK: gl.constexpr, SEGMENTED: gl.constexpr, STATE: gl.constexpr,
    FINAL: gl.constexpr, NORMALIZE: gl.constexpr, DELTA: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """One warpgroup, with 64 rows."""
    WIDTH: gl.constexpr = DY // PIECES
    BLOCKS: gl.constexpr = WIDTH // 128
    ring_x, ring_y, ring_z, ring_w = rings
    ring_p, ring_g, ring_u, ring_d, ring_s = gate_rings
    state_in, state_out, n_in, n_out, marks, n_marks, dots = states
    T, H, pieces = work[0], work[1], work[3]
    of_out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L, 16])
    of_p: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L // 2, 16])
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    of_n: gl.constexpr = gl.SliceLayout(1, of_out)
    left_of_out: gl.constexpr = gl.DotOperandLayout(0, of_out, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    dtype: gl.constexpr = ring_x.dtype
    zero = gl.zeros([64, L], gl.float32, of_out)
    i = gl.arange(0, L, gl.SliceLayout(1, of_p))
    j = gl.arange(0, L // 2, gl.SliceLayout(0, of_p))
    row = gl.program_id(1) // PIECES * 128 + half * 64
    part = gl.program_id(1) % PIECES
    column = part * WIDTH
    rk = row + gl.arange(0, 64, of_n)
    has_n = rk * 0 + part == 0
    s = 0
    phase = 0
    n = 0
    mbarrier.wait(full.index(0), 0)
    S = start_weights(ring_y, ring_z, 0, half, L, of_p)
    S = warpgroup_mma_wait(0, deps=[S])
    put_weights(S, ring_g.index(0), ring_d.index(0), ring_p.index(0), i, j, half, L, BACK, DELTA, of_p)
    mbarrier.arrive(ready.index(0), count=1)
    for index in range(gl.program_id(0), pieces, gl.num_programs(0)):
        b, h, start, steps, _tile0 = piece(index, work, L, SEGMENTED)
        tiles = (steps + L - 1) // L
        first = b.to(gl.int64) * T + start
        mark = (first // MARKS - 1) * H + h
        C0 = gl.zeros([64, 128], gl.float32, of_state)
        C1 = gl.zeros([64, 128], gl.float32, of_state)
        N = gl.zeros([64], gl.float32, of_n)
        if STATE:
            of_piece = state_of(index, work)
            C0 = load_state(state_in, of_piece, row, column, DX, DY, TRANSPOSED, of_state)
            if BLOCKS == 2:
                C1 = load_state(state_in, of_piece, row, column + 128, DX, DY, TRANSPOSED, of_state)
            if NORMALIZE:
                N = gl.load(n_in + of_piece.to(gl.int64) * DX + rk, mask=has_n, other=0.0)
        for step in range(0, tiles):
            x = ring_x.index(s).reshape([L, 128]).slice(half * 64, 64, 1).permute((1, 0))
            y = ring_y.index(s).reshape([L, WIDTH])
            z = ring_z.index(s).reshape([L, WIDTH])
            w = ring_w.index(2 * s + half)
            g = ring_g.index(s)
            p = ring_p.index(n % 2).permute((1, 0))
            t = (tiles - 1 - step if BACK else step) * L
            carry = gl.expand_dims(g.slice(CARRY * L, 1, 0).load(gl.SliceLayout(0, of_state)), 0)
            A = gl.convert_layout(C0.to(dtype), left_of_out, assert_trivial=True)
            out = warpgroup_mma(A, z.slice(0, 128, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
            # The stage of the previous tile is free once its output has left.
            tma.store_wait(0)
            mbarrier.arrive(free.index((s + STAGES - 1) % STAGES), count=1, pred=n > 0)
            out, A = warpgroup_mma_wait(0, deps=[out, A])
            if BLOCKS == 2:
                A = gl.convert_layout(C1.to(dtype), left_of_out, assert_trivial=True)
                out = warpgroup_mma(A, z.slice(128, 128, 1).permute((1, 0)), out, is_async=True)
            weight = gl.expand_dims(g.slice(OUT * L, L, 0).load(gl.SliceLayout(0, of_out)), 0)
            if BLOCKS == 2:
                out, A = warpgroup_mma_wait(0, deps=[out, A])
            if NORMALIZE:
                if BACK:
                    out += gl.expand_dims(N, 1)
                elif DELTA:
                    delta = gl.expand_dims(ring_d.index(s).load(gl.SliceLayout(0, of_out)), 0)
                    out += gl.expand_dims(N, 1) * delta
            x_t = x.load(of_out)
            mbarrier.wait(ready.index(n % 2), (n // 2) & 1)
            A = gl.convert_layout(x_t, left_of_out, assert_trivial=True)
            out = warpgroup_mma(A, p, out * weight, is_async=True)
            B = scaled(x_t, ring_u.index(s), L, left_of_state)
            C0 = warpgroup_mma(B, y.slice(0, 128, 1), C0 * carry, is_async=True)
            if BLOCKS == 2:
                C1 = warpgroup_mma(B, y.slice(128, 128, 1), C1 * carry, is_async=True)
            out, A = warpgroup_mma_wait(BLOCKS, deps=[out, A])
            w_t = w.reshape([L, 64]).permute((1, 0))
            if not TRANSPOSED:
                put_dot(out, w_t, ring_s.index(s), half, L)
            w_t.store(out.to(dtype))
            fence_async_shared()
            async_store(Out, coordinates(b, h * PIECES + part, start + t, row, start + steps, work), w)
            if NORMALIZE:
                N = N * gl.max(g.slice(CARRY * L, 1, 0).load(gl.SliceLayout(0, of_out)), 0)
                if DELTA or not BACK:
                    # Not of A and B, whose registers MMAs read, and not before `out` has left: there are too few.
                    update = weights(ring_u.index(s), L, gl.SliceLayout(0, of_out))
                    if BACK:
                        update = update * ring_d.index(s).load(gl.SliceLayout(0, of_out))
                    N += gl.sum(x.load(of_out).to(gl.float32) * gl.expand_dims(update, 0), 1)
            s += 1
            if s == STAGES:
                s = 0
                phase ^= 1
            n += 1
            if BLOCKS == 2:
                C0, C1, B = warpgroup_mma_wait(0, deps=[C0, C1, B])
            else:
                C0, B = warpgroup_mma_wait(0, deps=[C0, B])
            mbarrier.wait(full.index(s), phase)
            S = start_weights(ring_y, ring_z, s, half, L, of_p)
            if not TRANSPOSED:
                at = t if BACK else t + L
                if at % MARKS == 0 and at < steps and at > 0:
                    to = mark + at // MARKS * H
                    if BACK:
                        dot = row_dots(C0, marks, to, row, column, DX, DY, of_state)
                        if BLOCKS == 2:
                            dot += row_dots(C1, marks, to, row, column + 128, DX, DY, of_state)
                        if NORMALIZE:
                            of_rows: gl.constexpr = gl.SliceLayout(1, of_state)
                            n_mark = gl.load(n_marks + to * DX + rk, mask=has_n, other=0.0)
                            dot += gl.convert_layout(N * n_mark, of_rows, assert_trivial=True)
                        warps = gl.sum(gl.reshape(dot, [4, 16]), 1)
                        at_dot = dots + (to * gl.num_programs(1) + gl.program_id(1)) * 8 + half * 4
                        gl.store(at_dot + gl.arange(0, 4, warps.type.layout), warps)
                    else:
                        gl.store(mark_pointers(marks, to, row, column, DX, DY, of_state), C0.to(dtype))
                        if BLOCKS == 2:
                            right = mark_pointers(marks, to, row, column + 128, DX, DY, of_state)
                            gl.store(right, C1.to(dtype))
                        if NORMALIZE:
                            gl.store(n_marks + to * DX + rk, N, mask=has_n)
            S = warpgroup_mma_wait(0, deps=[S])
            put_weights(S, ring_g.index(s), ring_d.index(s), ring_p.index(n % 2), i, j, half, L, BACK, DELTA, of_p)
            mbarrier.arrive(ready.index(n % 2), count=1)
        if FINAL:
            of_piece = state_of(index, work)
            gl.store(state_pointers(state_out, of_piece, row, column, DX, DY, TRANSPOSED, of_state), C0)
            if BLOCKS == 2:
                gl.store(state_pointers(state_out, of_piece, row, column + 128, DX, DY, TRANSPOSED, of_state), C1)
            if NORMALIZE:
                gl.store(n_out + of_piece.to(gl.int64) * DX + rk, N, mask=has_n)
    tma.store_wait(0)
    if not TRANSPOSED:
        mbarrier.arrive(free.index((s + STAGES - 1) % STAGES), count=1)


@gluon.jit(do_not_specialize=["T", "tiles_of_head", "H", "GROUP", "length", "pieces"])
def rows(
    X, Y, Z, W, Out, gates, w_out, state_in, state_out, n_in, n_out, marks, n_marks, dots, order,
    T, tiles_of_head, H, GROUP, length, pieces,
    DX: gl.constexpr, DY: gl.constexpr, PIECES: gl.constexpr, L: gl.constexpr, STAGES: gl.constexpr,
    MARKS: gl.constexpr, BACK: gl.constexpr, SEGMENTED: gl.constexpr, STATE: gl.constexpr, FINAL: gl.constexpr,
    NORMALIZE: gl.constexpr, DELTA: gl.constexpr, TRANSPOSED: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """States are (DX, DY), TRANSPOSED in memory (DY, DX); then W, w_out and the marks are not used.

    Outputs of PIECES programs, each with as many of the columns, lie side by side as if each head were so many.
    """
    dtype: gl.constexpr = X.dtype
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring_x = ring_of(X, STAGES)
    ring_y = ring_of(Y, STAGES)
    ring_z = ring_of(Z, STAGES)
    ring_w = ring_of(W, 2 * STAGES)
    ring_p = gl.allocate_shared_memory(dtype, [2, L, L], square)
    ring_g = gl.allocate_shared_memory(gl.float32, [STAGES, GATES * L], flat)
    ring_u = gl.allocate_shared_memory(dtype, [STAGES, 2 * L], flat)
    ring_d = gl.allocate_shared_memory(gl.float32, [STAGES, L], flat)
    ring_s = ring_d
    if not TRANSPOSED:
        ring_s = gl.allocate_shared_memory(gl.float32, [STAGES, 8 * L], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=2)
        mbarrier.init(free.index(s), count=2)
    for s in gl.static_range(2):
        mbarrier.init(ready.index(s), count=2)
    fence_async_shared()
    rings = (ring_x, ring_y, ring_z, ring_w)
    gate_rings = (ring_p, ring_g, ring_u, ring_d, ring_s)
    states = (state_in, state_out, n_in, n_out, marks, n_marks, dots)
    work = Work(T, H, length, pieces, order if PACKED else None)
    gl.warp_specialize(
        [
            (consume, (
                Out, states, rings, gate_rings, full, free, ready, work, 0, DX, DY, PIECES, L, STAGES, MARKS, BACK,
                SEGMENTED, STATE, FINAL, NORMALIZE, DELTA, TRANSPOSED,
            )),
            (consume, (
                Out, states, rings, gate_rings, full, free, ready, work, 1, DX, DY, PIECES, L, STAGES, MARKS, BACK,
                SEGMENTED, STATE, FINAL, NORMALIZE, DELTA, TRANSPOSED,
            )),
            (load_tiles, (X, Y, Z, W, rings, full, free, work, GROUP, PIECES, L, STAGES, BACK, SEGMENTED, TRANSPOSED)),
            (load_gates, (
                gates, GateRings(ring_g, ring_u, ring_d, carried=ring_s), w_out, full, free, work, tiles_of_head,
                Gater(
                    L, STAGES, BACK, SEGMENTED, DELTA_P if DELTA else None, NOTHING if TRANSPOSED else OF_SUMS, PIECES
                ),
            )),
        ],
        [4, 1, 1],
        [CONSUMER, FILLER, FILLER],
    )  # fmt: skip
