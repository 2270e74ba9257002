"""o, or against time dv, of heads with dqk 128: a fused scan that keeps the state on chip.

A program computes 128 or 256 columns of dhv of each of its work tiles. Two consumers share them: each holds half of the
columns of the transposed state C^T, (dhv, dqk), in registers, as BLOCKS blocks of 64 x dqk, and computes the transposed
output, (dhv, L), of one tile after the other. The operands by result, with the gate weights of `docs/mathematics.md`;
INTER and UPDATE are the names of these weights in `gate_kernels.py`, which divides D and INTER by the denominators in a
backward with a normalizer (D', a'):

    result   scan           x    y     z    state    a            w
    o        with time      k    v     q    C^T      INTER        UPDATE
    dv       against time   q    do    k    dC^T     UPDATE       INTER (a')

The steps of tile number n (`process_tile`), with the gate matrix D, the decay g of the tile and P 1, the row sums of P.
In (5), (8) and (12) n is the normalizer state, which the code has as `N`, the consumer's half in registers, and as
`shared.n`. P is that of tile n, computed during tile n - 1. "With a normalizer" means for o (NORMALIZE): dv has the
denominators in its gate weights.

    (1)   out^T <- C^T z^T                              (64, L) = (64, dqk) (dqk, L), first term of (T2), (T11)
    (2)   the stage of tile n - 1 is empty              its output has left shared memory
    (3)   do . h, summed over the consumer's columns    (L), only for dv that computes delta, (T7)
    (4)   wait for both halves of P
    (5)   d <- a * (z n) + P 1;  1 / max(|d|, exp(-m))  (L), only with a normalizer, (T3)
    (6)   out^T <- out^T * a + y^T P^T                  (64, L), (T2), (T11)
    (7)   C^T <- g C^T + (y * w)^T x                    (64, dqk) = (64, L) (L, dqk), (T5), (T12)
    (8)   n <- g n + x^T w                              half of dqk, only with a normalizer, (T6)
    (9)   S <- z x^T of tile n + 1                      (L, L / 2), half of the columns for a consumer, (T1), (T11)
    (10)  out^T <- out^T / max(|d|, exp(-m))            with a normalizer, (T4); then over y in shared memory, and out
    (11)  P <- S * D of tile n + 1, masked              (L, L / 2), (T1), (T11)
    (12)  P; with a normalizer its row sums and n       to shared memory

With two blocks the order is (3), (1), (2), (4), then (5), (6), (7) and (10) of the first block, where its output waits
in shared memory, then (1), (6) and (7) of the second, and (8) to (12). Of the first block (6) and (7) are started
before d of (5) is read.

Which partition waits for which:

    load, gate and store warps --full[s]--> consumers 0 and 1 --empty[s]--> load, gate and store warps
    consumer 0 <--ready[n % 2], initial_n_ready--> consumer 1

ready[n % 2] says that both consumers have done (12) of tile n - 1. For the first tile of a work tile that is too early
for n: the consumers load the initial normalizer state after the last tile of the previous work tile. initial_n_ready
says that both halves of it are stored.

Where dv computes delta, the load warp also loads h, and the store warp writes delta = -u (do . h), with u the sign of d
where |d| > exp(-m) and 0 elsewhere. Of the scans of the backward only this one has time for more loads. Without a
normalizer dv of heads of 128 x 128 is computed together with dk, in `dk_dv.py`.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tfla.backends.gpu.context import LaunchContext, Pair
from tfla.backends.gpu.gate_kernels import FLOOR
from tfla.backends.hopper import gate_warp, host, mma, normalizer, pipeline, scheduler, store_warp
from tfla.backends.hopper.pipeline import (
    CONSUMER_REGISTERS,
    CONSUMER_REGISTERS_MAX,
    NUM_GATE_VECTORS,
    PRODUCER_REGISTERS,
    PRODUCER_REGISTERS_MIN,
    STATE_WEIGHT,
    TILE_DECAY,
)
from tfla.backends.hopper.store_warp import DENOMINATORS, DP_OFFSETS, NO_RESULT


class Config(NamedTuple):
    """The constants of the kernel."""

    DK: Any  # dqk
    DV: Any  # dhv
    BLOCKS: Any  # blocks of 64 columns of dhv that a consumer holds, 1 or 2
    L: Any  # steps of a tile
    STAGES: Any  # stages of the ring
    REVERSE: Any  # scan against time, for dv
    IS_SEGMENTED: Any  # sequences are cut into segments, each a work tile
    USE_INITIAL_STATE: Any  # start work tiles from `state_in` and `n_in`, not from zeros
    STORE_FINAL_STATE: Any  # store the states after work tiles to `state_out` and `n_out`
    NORMALIZE: Any  # divide by the denominators, for o; for dv the gate weights are divided already
    SAVE_D: Any  # store d to `d_out`
    COMPUTE_DP_OFFSET: Any  # replace -u in the gate vector DELTA_P by delta, the offset of dP: -u (y . y2), y2 being h
    INDEXED: Any  # for o: `state_in` and `state_out` are pools, whose rows the schedule has
    STATE_DK: Any  # dqk of `state_in` and `state_out`
    STATE_DV: Any  # their dhv
    PADDED: Any  # with INDEXED: they are less than DK or DV, and the last rows or columns of states are zero


class GlobalPointers(NamedTuple):
    """The tensors in global memory that consumers access."""

    out: Any  # TMA descriptor
    state_in: Any  # (segments, H, dqk, dhv)
    state_out: Any  # (segments, H, dqk, dhv)
    n_in: Any  # (segments, H, dqk)
    n_out: Any  # (segments, H, dqk)


class SharedStorage(NamedTuple):
    """The shared memory of a program."""

    # The ring. Tiles of TMA have dimensions of size 1 before L, which views of them drop (`reshape`).
    x: Any  # (STAGES, L, dqk)
    y: Any  # (2 STAGES, L, 64 BLOCKS): one tile for each consumer
    z: Any  # (STAGES, L, dqk)
    y2: Any  # (2 STAGES, L, 64 BLOCKS)
    g: Any  # gate vectors, (STAGES, NUM_GATE_VECTORS L)
    w: Any  # update weights, each as the sum of two 16-bit numbers, (STAGES, 2 L)
    full: Any  # barriers, (STAGES)
    empty: Any  # barriers, (STAGES)
    d: Any  # for the store warp: d from consumer 0, or `parts` partial sums of do . h, (STAGES, parts L)
    floor: Any  # exp(-m), (STAGES, L)
    matrix: Any  # update weights as a right operand, each the sum of three of its rows, (STAGES, 8, L)
    # What the consumers exchange:
    p: Any  # P of this tile and of the next, (2, L, L)
    ready: Any  # barriers, (2): both halves of P are stored, and with a normalizer n and the row sums of P
    n: Any  # n before this tile and before the next, (2, 8, dqk)
    sums: Any  # row sums of both halves of P of this tile and of the next, (4, L)
    inverse: Any  # 1 / max(|d|, exp(-m)), (2, L): one for each consumer, not exchanged
    initial_n_ready: Any  # barrier: both halves of n at the start of a work tile are stored


class Accumulators(NamedTuple):
    """The state that a consumer holds in registers, in float32."""

    C0: Any  # first block of C^T, (64, dqk)
    C1: Any  # second block, (64, dqk), with BLOCKS 2
    n: Any  # half of n, (64, 8): n is the sum of the columns, of which all but three are zero, see `normalizer.py`


class WorkTile(NamedTuple):
    """The work tile that a program computes."""

    b: Any  # batch row
    h: Any  # head
    start: Any  # first token in the batch row
    steps: Any  # number of steps
    tiles: Any  # number of tiles


class FragmentIds(NamedTuple):
    """The indices of what a consumer holds."""

    i: Any  # rows of P, which are the steps of the outputs, (L)
    j: Any  # columns of P, which are the steps of the updates, (L / 2); 0 is the first one of the consumer's half
    rk: Any  # the elements of n that the consumer keeps, (64)
    column: Any  # the first column of dhv that the consumer computes


@gluon.jit
def run_load_warp(X, Y, Z, Y2, shared, params, group_size, config):
    """Load the tiles of x, y and z, and h for delta, to shared memory by TMA.

    Args:
        X: TMA descriptor of x, in tiles (L, dqk).
        Y: TMA descriptor of y, in tiles (L, 64 BLOCKS), two a program.
        Z: TMA descriptor of z, in tiles (L, dqk).
        Y2: TMA descriptor of h, in tiles like those of y; unused without COMPUTE_DP_OFFSET.
        shared: Shared memory.
        params: The numbers of the scheduler.
        group_size: Heads of y that share a head of x and z.
        config: Constants.
    """
    L: gl.constexpr = config.L
    WIDTH: gl.constexpr = 64 * config.BLOCKS
    each_y: gl.constexpr = 4 if config.COMPUTE_DP_OFFSET else 2
    n = 0
    column = gl.program_id(0) * (2 * WIDTH)  # the first one of the program
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, config.IS_SEGMENTED)
        for i in range(0, (steps + L - 1) // L):
            t, end = scheduler.tile_rows(i, start, steps, L, config.REVERSE)
            s, bar = pipeline.acquire(n, shared.full, shared.empty, config.STAGES)
            # The barrier completes when all of these bytes have arrived.
            mbarrier.expect(bar, X.block_type.nbytes + Z.block_type.nbytes + each_y * Y.block_type.nbytes)
            pipeline.async_load(
                Z, scheduler.tile_coordinates(b, h // group_size, t, 0, end, params), bar, shared.z.index(s)
            )
            pipeline.async_load(
                X, scheduler.tile_coordinates(b, h // group_size, t, 0, end, params), bar, shared.x.index(s)
            )
            y = scheduler.tile_coordinates(b, h, t, column, end, params)
            y_right = scheduler.tile_coordinates(b, h, t, column + WIDTH, end, params)
            pipeline.async_load(Y, y, bar, shared.y.index(2 * s))
            pipeline.async_load(Y, y_right, bar, shared.y.index(2 * s + 1))
            if config.COMPUTE_DP_OFFSET:
                pipeline.async_load(Y2, y, bar, shared.y2.index(2 * s))
                pipeline.async_load(Y2, y_right, bar, shared.y2.index(2 * s + 1))
            n += 1
    pipeline.producer_tail(n, shared.full, shared.empty, config.STAGES)


@gluon.jit
def transposed_state_pointers(state, at, column, config):
    """Return pointers (64, dqk) to the transpose of 64 columns, from `column` on, of state `at`, (dqk, dhv)."""
    DK: gl.constexpr = config.STATE_DK
    DV: gl.constexpr = config.STATE_DV
    layout: gl.constexpr = mma.accumulator_layout(config.DK)
    v = column + gl.arange(0, 64, gl.SliceLayout(1, layout))
    k = gl.arange(0, config.DK, gl.SliceLayout(0, layout))
    return state + at.to(gl.int64) * (DK * DV) + gl.expand_dims(v, 1) + gl.expand_dims(k, 0) * DV


@gluon.jit
def load_columns(state, at, column, H, config):
    """Load the transpose of 64 columns, from `column` on, of the initial state `at`, (64, dqk)."""
    pointers = transposed_state_pointers(state, at, column, config)
    return mma.load_block(
        pointers, at, H, column, 0, config.STATE_DV, config.STATE_DK, config.PADDED, 64, config.DK, config.INDEXED
    )  # fmt: skip


@gluon.jit
def store_columns(C, state, at, column, config):
    """Store C, (64, dqk), as the transpose of 64 columns, from `column` on, of the final state `at`."""
    pointers = transposed_state_pointers(state, at, column, config)
    mma.store_block(
        pointers, C, at, column, 0, config.STATE_DV, config.STATE_DK, config.PADDED, 64, config.DK, config.INDEXED
    )  # fmt: skip


@gluon.jit
def load_initial_state(index, ids, gmem, params, config):
    """Return the state before the first step of work tile `index`: zeros, or loaded with USE_INITIAL_STATE."""
    C0 = gl.zeros([64, config.DK], gl.float32, mma.accumulator_layout(config.DK))
    C1 = gl.zeros([64, config.DK], gl.float32, mma.accumulator_layout(config.DK))
    N = normalizer.empty_n()
    if config.USE_INITIAL_STATE:
        at = scheduler.state_index(index, params, config.INDEXED)
        if config.BLOCKS == 2:
            C1 = load_columns(gmem.state_in, at, ids.column + 64, params.H, config)
        C0 = load_columns(gmem.state_in, at, ids.column, params.H, config)
        if config.NORMALIZE:
            if config.INDEXED:
                at = scheduler.state_index(index, params)
            N = normalizer.load_initial_n(gl.load(gmem.n_in + at.to(gl.int64) * config.DK + ids.rk))  # (64)
    return Accumulators(C0=C0, C1=C1, n=N)


@gluon.jit
def store_final_state(acc, index, ids, gmem, params, config):
    """Store the state after the last step of work tile `index`."""
    at = scheduler.state_index(index, params, config.INDEXED, True)
    if config.BLOCKS == 2:
        store_columns(acc.C1, gmem.state_out, at, ids.column + 64, config)
    store_columns(acc.C0, gmem.state_out, at, ids.column, config)
    if config.NORMALIZE:
        if config.INDEXED:
            at = scheduler.state_index(index, params)
        gl.store(gmem.n_out + at.to(gl.int64) * config.DK + ids.rk, gl.sum(acc.n, 1))


@gluon.jit
def issue_scores(shared, s, half: gl.constexpr, config):
    """Start S = z x^T of the tile in stage s for one half of the columns: (L, dqk) @ (dqk, L / 2), step (9)."""
    L: gl.constexpr = config.L
    z = shared.z.index(s).reshape([L, config.DK])
    x = shared.x.index(s).reshape([L, config.DK]).slice(half * (L // 2), L // 2, 0).permute((1, 0))
    return mma.issue_mma(z, x)


@gluon.jit
def view_tile(shared, s, n, half: gl.constexpr, config):
    """Return views of tile n in stage s.

    Returns:
        x: (L, dqk).
        y: The consumer's columns of y.
        z: (L, dqk).
        g: The gate vectors, (NUM_GATE_VECTORS L).
        p: P^T, (L, L).
    """
    z = shared.z.index(s).reshape([config.L, config.DK])
    x = shared.x.index(s).reshape([config.L, config.DK])
    y = shared.y.index(2 * s + half)
    return x, y, z, shared.g.index(s), shared.p.index(n % 2).permute((1, 0))


@gluon.jit
def transposed_block(y, block: gl.constexpr, config):
    """Return a view of the transpose of 64 columns of the tile `y`, (64, L)."""
    return y.reshape([config.L, 64 * config.BLOCKS]).slice(64 * block, 64, 1).permute((1, 0))


@gluon.jit
def store_dots(y, y2, to, half: gl.constexpr, config):
    """Store y . y2 of each step, summed over the consumer's columns, (L), step (3) with two blocks.

    The sums are the diagonal of y2 y^T. The tensor cores compute the whole matrix (L, L) in less time than the CUDA
    cores take for the diagonal alone.
    """
    WIDTH: gl.constexpr = 64 * config.BLOCKS
    y = y.reshape([config.L, WIDTH])
    y2 = y2.reshape([config.L, WIDTH])
    products = warpgroup_mma_wait(0, deps=[mma.issue_mma(y2, y.permute((1, 0)))])
    layout: gl.constexpr = products.type.layout
    i = gl.expand_dims(gl.arange(0, config.L, gl.SliceLayout(1, layout)), 1)
    j = gl.expand_dims(gl.arange(0, config.L, gl.SliceLayout(0, layout)), 0)
    to.slice(half * config.L, config.L, 0).store(gl.sum(gl.where(i == j, products, 0.0), 1))


@gluon.jit
def issue_state_product(C, z):
    """Start C^T z^T: (64, dqk) @ (dqk, L), step (1).

    Returns:
        The product, and the left operand: C^T, rounded, in registers. Both must be waited for.
    """
    A = mma.to_left_operand(C.to(z.dtype), z.shape[0])
    return mma.issue_mma(A, z.permute((1, 0))), A


@gluon.jit
def issue_intra_tile(out, weight, y_t, p):
    """Start out^T * a + y^T P^T: (64, L) + (64, L) @ (L, L), step (6).

    Returns:
        The sum, and the left operand in registers. Both must be waited for.
    """
    A = mma.to_left_operand(y_t, p.shape[1])
    return warpgroup_mma(A, p, out * weight, is_async=True), A


@gluon.jit
def issue_state_update(C, tile_decay, y_t, w, x):
    """Start g C^T + (y * w)^T x: (64, dqk) + (64, L) @ (L, dqk), step (7).

    Returns:
        The sum, and the left operand in registers. Both must be waited for.
    """
    B = mma.scale_by_gates(y_t, w, x.shape[0], gl.DotOperandLayout(0, mma.accumulator_layout(x.shape[1]), 2))
    return warpgroup_mma(B, x, C * tile_decay, is_async=True), B


@gluon.jit
def finish_first_block(C, out, weight, y_t, y_b, p, x, tile_decay, shared, s, n, half: gl.constexpr, config):
    """Return the first of two blocks of the state after the tile, steps (5), (6), (7) and (10) of that block.

    Its output goes to shared memory over its columns of y. The output of the second block follows, and both leave
    together.

    Args:
        C: The block of C^T before the tile, (64, dqk).
        out: C^T z^T, (64, L).
        weight: Weight of the state in the output of each step, (1, L).
        y_t: y^T of the block in registers, (64, L).
        y_b: y^T of the block in shared memory, (64, L), which the output overwrites.
        p: P^T, (L, L).
        x: The tile of x, (L, dqk).
        tile_decay: The decay g, (1, 1).
        shared: Shared memory.
        s: Stage of the tile.
        n: Number of the tile.
        half: Which consumer this is.
        config: Constants.
    """
    if config.NORMALIZE:
        d = normalizer.issue_n_product(shared.z.index(s).reshape([config.L, config.DK]), shared, n)
    out, A = issue_intra_tile(out, weight, y_t, p)
    C, B = issue_state_update(C, tile_decay, y_t, shared.w.index(s), x)
    if config.NORMALIZE:
        out, A, d = warpgroup_mma_wait(1, deps=[out, A, d])
        normalizer.store_shared_inverse(d, shared, s, n, half, config.L, config.SAVE_D)
        out = normalizer.divide_by_denominators(out, shared, half)
    else:
        out, A = warpgroup_mma_wait(1, deps=[out, A])
    y_b.store(out.to(y_b.dtype))
    C, B = warpgroup_mma_wait(0, deps=[C, B])
    return C


@gluon.jit
def process_tile(acc, pipe_state, step, work_tile, ids, gmem, shared, params, half: gl.constexpr, config):
    """Process a tile: everything from step (1) to (12) of the module's docstring.

    Args:
        acc: The state before the tile.
        pipe_state: Position of the tile in the ring. Its stage is full, and the consumer has waited for that.
        step: Number of the tile in its work tile, in the direction of the scan.
        work_tile: The work tile.
        ids: Indices of what the consumer holds.
        gmem: Tensors in global memory.
        shared: Shared memory.
        params: The numbers of the scheduler.
        half: Which consumer this is.
        config: Constants.

    Returns:
        The state after the tile, and the position of the next tile.
    """
    L: gl.constexpr = config.L
    STAGES: gl.constexpr = config.STAGES
    of_out: gl.constexpr = mma.accumulator_layout(L)
    C, C1, N = acc
    s, phase, n = pipe_state
    x, y, z, g, p = view_tile(shared, s, n, half, config)
    first = (work_tile.tiles - 1 - step if config.REVERSE else step) * L  # first step, counted in the work tile
    # (1, 1)
    tile_decay = gl.expand_dims(
        g.slice(TILE_DECAY * L, 1, 0).load(gl.SliceLayout(0, mma.accumulator_layout(config.DK))), 0
    )
    y_b = transposed_block(y, 0, config)  # y^T of the first block, (64, L), in shared memory
    # A and B are left operands in registers. They must not change before the wait for their product.
    if config.COMPUTE_DP_OFFSET and config.BLOCKS == 2:
        # (3) do . h
        store_dots(y, shared.y2.index(2 * s + half), shared.d.index(s), half, config)
    # (1) out^T <- C^T z^T
    out, A = issue_state_product(C, z)
    # (2) The output of the previous tile has left: its stage is empty. The compiler adds a barrier after this wait, so
    # that one arrival stands for all warps of the consumer.
    tma.store_wait(0)
    mbarrier.arrive(shared.empty.index((s + STAGES - 1) % STAGES), count=1, pred=n > 0)
    weight = gl.expand_dims(g.slice(STATE_WEIGHT * L, L, 0).load(gl.SliceLayout(0, of_out)), 0)  # (1, L)
    out, A = warpgroup_mma_wait(0, deps=[out, A])
    y_t = y_b.load(of_out)  # (64, L), from shared memory to registers
    if config.COMPUTE_DP_OFFSET and config.BLOCKS == 1:
        # (3) do . h
        mma.store_partial_dots(
            y_t, transposed_block(shared.y2.index(2 * s + half), 0, config), shared.d.index(s), half, L
        )
    # (4) Both consumers have stored their half of P, and with a normalizer of its row sums and of n.
    mbarrier.wait(shared.ready.index(n % 2), (n // 2) & 1)
    if config.BLOCKS == 2:
        # (5), (6), (7), (10) of the first block, then (1) of the second
        C0 = finish_first_block(C, out, weight, y_t, y_b, p, x, tile_decay, shared, s, n, half, config)
        C = C1
        y_b = transposed_block(y, 1, config)
        out, A = issue_state_product(C, z)
        # The weights are loaded again, so that they do not stay in registers through the first block.
        weight = gl.expand_dims(g.slice(STATE_WEIGHT * L, L, 0).load(gl.SliceLayout(0, of_out)), 0)
        out, A = warpgroup_mma_wait(0, deps=[out, A])
        y_t = y_b.load(of_out)  # (64, L)
    elif config.NORMALIZE:
        # (5) d and its inverse
        d = warpgroup_mma_wait(0, deps=[normalizer.issue_n_product(z, shared, n)])
        normalizer.store_shared_inverse(d, shared, s, n, half, L, config.SAVE_D)
    # (6) out^T <- out^T * a + y^T P^T
    out, A = issue_intra_tile(out, weight, y_t, p)
    # (7) C^T <- g C^T + (y * w)^T x
    C, B = issue_state_update(C, tile_decay, y_t, shared.w.index(s), x)
    if config.NORMALIZE:
        # (8) n <- g n + x^T w
        N = normalizer.update_n(N, x, half * 64, shared, s, L)
    # (9) The next tile has arrived: start its S while the products of this tile run. From here on s, phase and n are
    # those of the next tile, while x, y and y_b are still views of this one.
    s, phase = pipeline.advance(s, phase, STAGES)
    n += 1
    mbarrier.wait(shared.full.index(s), phase)
    S = issue_scores(shared, s, half, config)
    # (10) The output, over y and on its way to memory.
    if config.NORMALIZE:
        out, A = warpgroup_mma_wait(3, deps=[out, A])  # C, N and S still run
        out = normalizer.divide_by_denominators(out, shared, half)
    else:
        out, A = warpgroup_mma_wait(2, deps=[out, A])  # C and S still run
    y_b.store(out.to(y.dtype))
    fence_async_shared()
    pipeline.async_store(
        gmem.out,
        scheduler.tile_coordinates(
            work_tile.b, work_tile.h, work_tile.start + first, ids.column, work_tile.start + work_tile.steps, params
        ),
        y,
    )
    # (11) P of the next tile
    D = mma.load_gate_matrix(shared.g.index(s), L, half, mma.accumulator_layout(L // 2))  # (L, L / 2)
    if config.NORMALIZE:
        S, C, B, N = warpgroup_mma_wait(0, deps=[S, C, B, N])
    else:
        S, C, B = warpgroup_mma_wait(0, deps=[S, C, B])
    P = mma.apply_causal_mask(S, D, ids.i, ids.j, half, config.REVERSE)
    # (12) P, its row sums and n, for both consumers.
    if config.NORMALIZE:
        normalizer.store_shared_sums(P, shared, n, half)
        normalizer.store_shared_n(gl.sum(N, 1), shared.n.index(n % 2), half * 64)
    shared.p.index(n % 2).slice(half * (L // 2), L // 2, 1).store(P.to(y.dtype))
    fence_async_shared()  # MMAs read P and n through the asynchronous proxy
    pipeline.barrier()  # all warps of this consumer have stored
    mbarrier.arrive(shared.ready.index(n % 2), count=1)
    if config.BLOCKS == 2:
        return Accumulators(C0=C0, C1=C, n=N), pipeline.PipelineState(s, phase, n)
    else:
        return Accumulators(C0=C, C1=C1, n=N), pipeline.PipelineState(s, phase, n)


@gluon.jit
def run_consumer(half: gl.constexpr, gmem, shared, params, config):
    """Run one consumer warpgroup over all work tiles of the program."""
    L: gl.constexpr = config.L
    i = gl.arange(0, L, gl.SliceLayout(1, mma.accumulator_layout(L // 2)))
    j = gl.arange(0, L // 2, gl.SliceLayout(0, mma.accumulator_layout(L // 2)))
    rk = normalizer.accumulator_rows(half * 64)
    column = gl.program_id(0) * (128 * config.BLOCKS) + half * (64 * config.BLOCKS)
    ids = FragmentIds(i=i, j=j, rk=rk, column=column)
    pipe_state = pipeline.PipelineState(0, 0, 0)
    # (9), (11) and (12) of the first tile, which no earlier tile has done
    mbarrier.wait(shared.full.index(0), 0)
    S = issue_scores(shared, 0, half, config)
    D = mma.load_gate_matrix(shared.g.index(0), L, half, mma.accumulator_layout(L // 2))  # (L, L / 2)
    S = warpgroup_mma_wait(0, deps=[S])
    P = mma.apply_causal_mask(S, D, ids.i, ids.j, half, config.REVERSE)
    if config.NORMALIZE:
        normalizer.store_shared_sums(P, shared, 0, half)
    shared.p.index(0).slice(half * (L // 2), L // 2, 1).store(P.to(shared.p.dtype))
    fence_async_shared()
    pipeline.barrier()
    mbarrier.arrive(shared.ready.index(0), count=1)
    initial_n_phase = 0
    index = gl.program_id(1)
    # The last argument of `get_work_tile` is REMATERIALIZE. Together with `next_work_tile`, in place of a `range`, it
    # keeps the scheduler's numbers out of the registers that the tiles need.
    while index < params.num_work_tiles:
        b, h, start, steps, _first_tile = scheduler.get_work_tile(index, params, L, config.IS_SEGMENTED, True)
        tiles = (steps + L - 1) // L
        work_tile = WorkTile(b=b, h=h, start=start, steps=steps, tiles=tiles)
        acc = load_initial_state(index, ids, gmem, params, config)
        if config.NORMALIZE:
            # The other consumer reads this half of n, too.
            normalizer.store_shared_n(gl.sum(acc.n, 1), shared.n.index(pipe_state.count % 2), half * 64)
            initial_n_phase = normalizer.exchange_initial_n(shared, initial_n_phase)
        for step in range(0, tiles):
            acc, pipe_state = process_tile(acc, pipe_state, step, work_tile, ids, gmem, shared, params, half, config)
        if config.STORE_FINAL_STATE:
            store_final_state(acc, index, ids, gmem, params, config)
        index = scheduler.next_work_tile(index)
    tma.store_wait(0)
    if config.SAVE_D or config.COMPUTE_DP_OFFSET:
        # (2) of the last tile, for the store warp: it stores the results of that tile when its stage is empty.
        mbarrier.arrive(shared.empty.index((pipe_state.index + config.STAGES - 1) % config.STAGES), count=1)


@gluon.jit(do_not_specialize=scheduler.RUNTIME_SCALARS)
def o_dv_kernel(
    X, Y, Z, Y2, Out, gates, i_gate, f_gate, state_in, state_out, n_in, n_out, d_out, schedule,
    T, tiles_per_head, H, group_size, segment_steps, num_work_tiles, stride_ib, stride_it, stride_ih, stride_fb,
    stride_ft, stride_fh, scale, log_scale,
    DK: gl.constexpr, DV: gl.constexpr, BLOCKS: gl.constexpr, L: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, IS_SEGMENTED: gl.constexpr, USE_INITIAL_STATE: gl.constexpr, STORE_FINAL_STATE: gl.constexpr,
    NORMALIZE: gl.constexpr, SAVE_D: gl.constexpr, COMPUTE_DP_OFFSET: gl.constexpr, IS_VARLEN: gl.constexpr,
    GATES: gl.constexpr, INPUT_GATE: gl.constexpr, SIGMOID_I: gl.constexpr, SIGMOID_F: gl.constexpr,
    INDEXED: gl.constexpr, STATE_DK: gl.constexpr, STATE_DV: gl.constexpr,
):  # fmt: skip
    """Compute o, or with REVERSE dv.

    Args:
        X: TMA descriptor of k, or q for dv, in tiles (L, dqk).
        Y: TMA descriptor of v, or do, in tiles (L, 64 BLOCKS).
        Z: TMA descriptor of q, or k, in tiles (L, dqk).
        Y2: TMA descriptor of h, where dv computes delta.
        Out: TMA descriptor of the result, in tiles like those of y.
        gates: Gate vectors, (H, tiles, VECTORS, L).
        i_gate: Input gates, (B, T, H).
        f_gate: Forget gates, (B, T, H).
        state_in: Initial states, (segments, H, dqk, dhv), with USE_INITIAL_STATE; with INDEXED a pool.
        state_out: Final states, (segments, H, dqk, dhv), with STORE_FINAL_STATE; with INDEXED a pool.
        n_in: Initial n, (segments, H, dqk).
        n_out: Final n, (segments, H, dqk).
        d_out: Denominators d, (B, T, H), with SAVE_D.
        schedule: Schedule of packed sequences, with IS_VARLEN.
        T: Tokens of a batch row.
        tiles_per_head: Tiles of one head over all batch rows.
        H: Heads.
        group_size: Heads of v that share a head of q and k.
        segment_steps: Steps of a segment.
        num_work_tiles: Work tiles.
        stride_ib, stride_it, stride_ih: Strides of the input gates.
        stride_fb, stride_ft, stride_fh: Strides of the forget gates.
        scale: The factor of q.
        log_scale: Its logarithm in base 2.

    Constants are those of `Config` and `GateSource`. Tensors that the constants say are not used may be any.
    """
    partitions(
        X, Y, Z, Y2,
        gate_warp.GateSource(
            vectors=gates, i_gate=i_gate, f_gate=f_gate, stride_ib=stride_ib, stride_it=stride_it, stride_ih=stride_ih,
            stride_fb=stride_fb, stride_ft=stride_ft, stride_fh=stride_fh, scale=scale, log_scale=log_scale,
            GATES=GATES, INPUT_GATE=INPUT_GATE, SIGMOID_I=SIGMOID_I, SIGMOID_F=SIGMOID_F,
        ),
        d_out, tiles_per_head, group_size,
        GlobalPointers(out=Out, state_in=state_in, state_out=state_out, n_in=n_in, n_out=n_out),
        scheduler.SchedulerParams(
            T=T, H=H, segment_steps=segment_steps, num_work_tiles=num_work_tiles,
            schedule=schedule if IS_VARLEN else None,
        ),
        Config(
            DK=DK, DV=DV, BLOCKS=BLOCKS, L=L, STAGES=STAGES, REVERSE=REVERSE, IS_SEGMENTED=IS_SEGMENTED,
            USE_INITIAL_STATE=USE_INITIAL_STATE, STORE_FINAL_STATE=STORE_FINAL_STATE, NORMALIZE=NORMALIZE,
            SAVE_D=SAVE_D, COMPUTE_DP_OFFSET=COMPUTE_DP_OFFSET, INDEXED=INDEXED,
            STATE_DK=STATE_DK, STATE_DV=STATE_DV, PADDED=STATE_DK != DK or STATE_DV != DV,
        ),
    )  # fmt: skip


@gluon.jit
def partitions(X, Y, Z, Y2, source, d_out, tiles_per_head, group_size, gmem, params, config):
    """Allocate shared memory and start the partitions of the program: consumers, load, gate and store warps."""
    L: gl.constexpr = config.L
    STAGES: gl.constexpr = config.STAGES
    dtype: gl.constexpr = X.dtype
    x = pipeline.allocate_tiles(X, STAGES)
    z = pipeline.allocate_tiles(Z, STAGES)
    y = pipeline.allocate_tiles(Y, 2 * STAGES)
    y2 = pipeline.allocate_tiles(Y, 2 * STAGES) if config.COMPUTE_DP_OFFSET else None
    p = pipeline.allocate_operands(dtype, 2, L, L)
    g = pipeline.allocate_vectors(gl.float32, STAGES, NUM_GATE_VECTORS * L)
    w = pipeline.allocate_vectors(dtype, STAGES, 2 * L)
    floor = pipeline.allocate_vectors(gl.float32, STAGES, L) if config.NORMALIZE else None
    matrix = pipeline.allocate_operands(dtype, STAGES, 8, L) if config.NORMALIZE else None
    n = pipeline.allocate_operands(dtype, 2, 8, config.DK) if config.NORMALIZE else None
    sums = pipeline.allocate_vectors(gl.float32, 4, L) if config.NORMALIZE else None
    inverse = pipeline.allocate_vectors(gl.float32, 2, L) if config.NORMALIZE else None
    d = g  # any buffer, where the store warp has nothing to store and nothing uses d
    if config.NORMALIZE or config.COMPUTE_DP_OFFSET:
        # Partial sums of do . h that both consumers leave: 1 each with `store_dots`, 4 each with `store_partial_dots`.
        parts: gl.constexpr = 2 if config.BLOCKS == 2 else 8
        d = pipeline.allocate_vectors(gl.float32, STAGES, (parts if config.COMPUTE_DP_OFFSET else 1) * L)
    consumer_registers: gl.constexpr = CONSUMER_REGISTERS_MAX if config.BLOCKS == 2 else CONSUMER_REGISTERS
    producer_registers: gl.constexpr = PRODUCER_REGISTERS_MIN if config.BLOCKS == 2 else PRODUCER_REGISTERS
    RESULT: gl.constexpr = DP_OFFSETS if config.COMPUTE_DP_OFFSET else (DENOMINATORS if config.SAVE_D else NO_RESULT)
    store_config: gl.constexpr = store_warp.StoreWarpConfig(
        L=L, STAGES=STAGES, REVERSE=config.REVERSE, IS_SEGMENTED=config.IS_SEGMENTED, RESULT=RESULT,
    )  # fmt: skip
    full, empty = pipeline.allocate_full_empty(STAGES, store_warp.full_arrivals(RESULT), 2)
    ready = pipeline.allocate_barriers(2, 2)
    initial_n_ready = pipeline.allocate_barrier(2) if config.NORMALIZE else None
    fence_async_shared()
    shared = SharedStorage(
        x=x, y=y, z=z, y2=y2, g=g, w=w, full=full, empty=empty, d=d, floor=floor, matrix=matrix, p=p, ready=ready, n=n,
        sums=sums, inverse=inverse, initial_n_ready=initial_n_ready,
    )  # fmt: skip
    buffers = gate_warp.GateBuffers(vectors=g, weights=w, extra=floor, matrix=matrix)
    # One gate warp would be slower than the consumers with one block, whose tiles take less time, and with n, for which
    # it stores more.
    gate_config: gl.constexpr = gate_warp.GateWarpConfig(
        L=L, STAGES=STAGES, REVERSE=config.REVERSE, IS_SEGMENTED=config.IS_SEGMENTED,
        EXTRA=FLOOR if config.NORMALIZE else None,
        GATE_WARPS=2 if config.BLOCKS == 1 or config.NORMALIZE else 1,
    )  # fmt: skip
    # Consumer 0 runs in the four warps of the launch, with the registers that the other partitions leave. The lists of
    # warps and of registers are those of the other five partitions.
    gl.warp_specialize(
        [
            (run_consumer, (0, gmem, shared, params, config)),
            (run_consumer, (1, gmem, shared, params, config)),
            (run_load_warp, (X, Y, Z, Y2, shared, params, group_size, config)),
            (gate_warp.run_gate_warp, (0, source, buffers, full, empty, params, tiles_per_head, gate_config)),
            (gate_warp.run_gate_warp, (1, source, buffers, full, empty, params, tiles_per_head, gate_config)),
            (store_warp.run_store_warp, (
                d, d_out, source.vectors, full, empty, params, tiles_per_head, store_config,
            )),
        ],
        [4, 1, 1, 1, 1],
        [consumer_registers, producer_registers, producer_registers, producer_registers, producer_registers],
    )  # fmt: skip


# Stages of the ring: the widest tiles then take 192 KiB of shared memory.
RING_STAGES = 3
RING_STAGES_WITH_H = 2


def launch(
    ctx: LaunchContext, gates: gate_warp.GateVectors, x: Tensor, y: Tensor, z: Tensor, out: Tensor, *, reverse: bool,
    initial: Pair, final: Pair, d: Tensor | None = None, h: Tensor | None = None,
) -> None:  # fmt: skip
    """Compute o with its denominators, or with `reverse` dv, into `out`, (B, T, H, dhv).

    Args:
        ctx: The context of the call.
        gates: The gate vectors.
        x, y, z: The operands, in the table of the module: k, v, q for o; q, do, k for dv.
        out: Output like y.
        reverse: Whether dv is computed.
        initial: Initial states of work tiles, (segments, H, dqk, dhv) and (segments, H, dqk), or None for zeros.
        final: Outputs for the states after work tiles, or None.
        d: Output for the denominators, (B, T, H), or None.
        h: The output of the forward, with which delta is computed, or None.
    """
    vectors, blocks = gates.vectors, num_blocks(ctx.V)
    # `vectors` stands for the tensors that this launch does not use.
    C, n, C_final, n_final, d_out = (vectors if t is None else t for t in (*initial, *final, d))
    ctx.launch(o_dv_kernel, host.grid(ctx, ctx.V // (128 * blocks)),
        host.descriptor(ctx, x, ctx.K), host.descriptor(ctx, y, 64 * blocks), host.descriptor(ctx, z, ctx.K),
        vectors if h is None else host.descriptor(ctx, h, 64 * blocks), host.descriptor(ctx, out, 64 * blocks),
        vectors, *ctx.gate_inputs, C, C_final, n, n_final, d_out, ctx.schedule, *host.kernel_scalars(ctx),
        DK=ctx.K, DV=ctx.V, BLOCKS=blocks, L=ctx.L, STAGES=RING_STAGES if h is None else RING_STAGES_WITH_H,
        REVERSE=reverse, IS_SEGMENTED=ctx.segmented, USE_INITIAL_STATE=initial[0] is not None,
        STORE_FINAL_STATE=final[0] is not None, NORMALIZE=ctx.spec.normalize and not reverse, SAVE_D=d is not None,
        COMPUTE_DP_OFFSET=h is not None, IS_VARLEN=ctx.packed, **gates.constants, INDEXED=ctx.indexed,
        STATE_DK=ctx.state_dims[0], STATE_DV=ctx.state_dims[1], num_warps=4,
    )  # fmt: skip


def num_blocks(V: int) -> int:
    """Return how many blocks of 64 columns a consumer has for states of V columns."""
    return 2 if V % 256 == 0 else 1


def computes_delta(ctx: LaunchContext) -> bool:
    """Return whether the kernel can compute delta with dv: one program has all columns of do and h."""
    return ctx.K <= host.STATE_ROWS and 128 * num_blocks(ctx.V) == ctx.V
