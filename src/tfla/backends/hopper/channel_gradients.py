"""The gradients of q, k, beta and gates by channel of tiles that need no levels, from the states around each tile.

The results are those of `tfla.backends.triton.channel_gradients`, for reads by k after the decay. Tiles do not depend
on each other: a work tile is one tile of one head. A program has one consumer of two warpgroups, which computes 128
key channels of it. Everything is transposed, (channels, steps), so that left operands of products come from registers.
With C the state before the tile and dC the cotangent after it, c_t the exponents of the decays from the middle of the
tile to step t, up = 2^c and down = 2^-c, and a, b the decays of its first and of its second half, the steps are
(`process_tile`):

    for each 32 columns of dhv:
    (1)   S_q <- S_q + do E^T,  S_r <- S_r + dv E^T                 (L, L), half of the columns in each warpgroup
    (2)   dq^T <- dq^T + C do^T,  dr^T <- dr^T + C dv^T             (128, L) = (128, 32) (32, L)
    (3)   W^T <- W^T + dC E^T                                       the same
    (4)   across <- across + sum over dhv of C * dC                 (128)
    then, of the whole tile:
    (5)   c^T <- g^T M                                              (128, L) = (128, L) (L, L), M of 0, 1 and -1
    (6)   S_q <- scale S_q masked to j <= i,  S_r <- -S_r to j < i  to shared memory, for both warpgroups
    (7)   dq^T <- scale a dq^T,  dr^T <- -a dr^T,  W^T <- b W^T
    (8)   W^T <- W^T + (q up)^T S_q + (k up)^T S_r                  (128, L) = (128, L) (L, L)
    (9)   dq^T <- dq^T + (k beta down)^T S_q^T,  dr^T likewise by S_r
    (10)  W <- W down,  dq <- dq up,  dr <- dr up,  dk = beta W + dr
    (11)  dg_t <- a b across + sum of what steps read of C + sum over j < t of k_j beta_j W_j - q_j dq_j - k_j dr_j

(11) is the sum over all pairs of a write before t and a read from t on. What its last sum takes off, reads of C before
t and pairs on one side of t, is in the other terms as sums of the same products. So that these cancel but for 2^-16,
the operands of (8), (9) and (11) and S_q are sums of two bfloat16 numbers each, and S_r is rounded once for both. The
products of two second numbers are left out.

Which partition waits for which:

    load warp  --full[s]-->       consumer --empty[s]-->       load warp   32 columns of E, do, dv, C and dC
    key warp   --gates_full[s]--> consumer --gates_empty[s]--> key warp    gates, over which their gradient is stored
    key warp   --keys_full-->     consumer --keys_empty-->     key warp    beta, q and k; dq and dk replace q and k

Where the caller normalizes queries and keys, q^ = r_q q and k^ = r_k k, the kernel reads q, k and the factors r. S_q
and dq take r_q for each reading step, S_r and dr take r_k, and beta r_k stands for beta, so that what it calls dq and
dk is r dq^ and r dk^. Of these it takes off what changes the norms alone, dq <- dq - r_q^2 (q . dq) q, for which warps
exchange sums over their channels (`compute_projections`) beside step (11). Where the caller activates gates, the
kernel reads what they are made of, computes log-gates before step (5), and multiplies by their derivative after step
(11).

The consumer releases q and k at the end of a tile, when dq and dk have left, and the gates in the next tile. One
consumer of two warpgroups has half of the instructions of two consumers, each of which would have a copy of its own:
with norms and activations, two copies seem not to fit into the instruction cache.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tfla.backends.gpu.config import ceil_div
from tfla.backends.gpu.context import time_strides
from tfla.backends.gpu.gate_activations import activated_gate, gate_derivatives, load_activation
from tfla.backends.gpu.gate_kernels import HIGHEST, LOG2E, LOWEST
from tfla.backends.hopper import host, mma, pipeline, scheduler
from tfla.backends.hopper.pipeline import PRODUCER_REGISTERS_MIN

if TYPE_CHECKING:
    from tfla.backends.triton.channel_gradients import Gradients
    from tfla.backends.triton.channel_rule import ChannelContext
    from tfla.backends.triton.channel_tiles import Operands

CHANNELS = gl.constexpr(128)  # key channels of a program
# The smallest log-gate that the products see: its decay is 0 in float32, and 0 times it is 0.
CLOSED_GATE = gl.constexpr(-104.0)
LOWEST_FLOAT16 = gl.constexpr(-65504.0)  # LOWEST in float16
SMALLEST_BETA = gl.constexpr(1e-6)  # of which dv . E / beta is the gradient
# Matrices in `p`:
OF_QUERIES = gl.constexpr(0)
LOW = gl.constexpr(1)  # the rounding errors of that
OF_KEYS = gl.constexpr(2)
# Numbers of a tile in `tile`:
ROW = gl.constexpr(0)  # batch row
HEAD = gl.constexpr(1)
START = gl.constexpr(2)  # first token in the batch row
END = gl.constexpr(3)  # the token after the last one
TINY = gl.constexpr(4)  # whether a beta is near 0
FIRST_TILE = gl.constexpr(5)  # its index among the tiles of its head
NUMBERS = gl.constexpr(6)
# Vectors of the steps of a tile in `steps`; without norms the first alone, which is then also the weight of writes:
STRENGTH = gl.constexpr(0)  # beta
WEIGHT = gl.constexpr(1)  # beta r_k
OF_Q = gl.constexpr(2)  # r_q
OF_K = gl.constexpr(3)  # r_k
# Vectors of the channels of a head in `activation`:
RATE = gl.constexpr(0)  # exp(A_log)
BIAS = gl.constexpr(1)  # dt_bias


class Config(NamedTuple):
    """The constants of the kernel."""

    L: Any  # steps of a tile
    COLUMNS: Any  # columns of dhv of a stage of the ring
    STAGES: Any  # stages of the ring
    COLUMN_BLOCKS: Any  # how often a program reads COLUMNS columns of dhv
    GATE_STAGES: Any  # tiles of which gates are in shared memory
    PARTS: Any  # parts of the gradient of beta, of 32 channels each
    DOTS: Any  # parts of dv . E
    CORRECT: Any  # there are read keys, which are k
    BETA: Any  # the gradient of beta is computed
    NORMALIZED: Any  # q and k are divided by their norms
    ACTIVATED: Any  # gates are pre-activations
    SOFTPLUS: Any  # of (2) of `gate_activations`, else of (3)
    SUMS: Any  # with A_log or dt_bias, which get sums over tiles


class Activations(NamedTuple):
    """The tensors and numbers of norms and activations; what the call does not have is not accessed."""

    q_norms: Any  # r_q, (B, T, H) float32, the heads next to each other
    k_norms: Any  # r_k
    norm_b: Any  # strides of both, by batch row and token
    norm_t: Any
    A_log: Any  # (H)
    bias: Any  # dt_bias, (H) or (H, dqk)
    rate_stride: Any  # of A_log
    bias_h: Any  # strides of dt_bias
    bias_c: Any
    factor: Any  # of (3) of `gate_activations`
    sums: Any  # outputs, sums over tiles of the gradients of A_log and dt_bias, (2, H, tiles, dqk)
    sum_h: Any  # elements of a head of them
    DK: Any  # dqk
    HAS_RATE: Any  # there is an A_log
    HAS_BIAS: Any  # there is a dt_bias


class GlobalPointers(NamedTuple):
    """The tensors in global memory that the consumer accesses."""

    dq: Any  # TMA descriptors of the results, in tiles (L, CHANNELS)
    dk: Any
    dg: Any
    dbeta: Any  # (B, T, H, PARTS)
    dots: Any  # dv . E over parts of dhv, (DOTS, tokens, H)
    beta: Any  # (B, T, H)
    stride_b: Any  # strides of beta, by batch row, token and head
    stride_t: Any
    stride_h: Any
    tokens: Any  # tokens of all batch rows
    scale: Any  # the factor of the queries
    activations: Any  # `Activations`


class Tiles(NamedTuple):
    """The tensors that tell which tiles a program computes."""

    needs_levels: Any  # (H, tiles) int8: 1 for tiles that another kernel computes
    tiles_per_head: Any  # tiles of one head over all batch rows


class SharedStorage(NamedTuple):
    """The shared memory of a program."""

    # The ring of E, do, dv, C and dC:
    e: Any  # (STAGES, L, COLUMNS)
    do: Any  # (STAGES, L, COLUMNS)
    dv: Any  # (STAGES, L, COLUMNS), with CORRECT
    states: Any  # (STAGES, COLUMNS, CHANNELS)
    cotangents: Any  # (STAGES, COLUMNS, CHANNELS)
    more: Any  # whether the stage has data, or all tiles are done, (STAGES, 1)
    full: Any  # barriers, (STAGES)
    empty: Any  # barriers, (STAGES)
    # What a tile has once:
    g: Any  # and then the gradient of the log-gates, (GATE_STAGES, L, CHANNELS)
    gates_full: Any  # barriers, (GATE_STAGES)
    gates_empty: Any  # barriers, (GATE_STAGES)
    q: Any  # and then dq, (1, L, CHANNELS)
    k: Any  # and then dk, (1, L, CHANNELS)
    steps: Any  # beta, and with norms three more vectors, (1 or 4, L)
    activation: Any  # with activated gates, (2, CHANNELS)
    tile: Any  # its numbers, (NUMBERS, 1)
    keys_full: Any  # a barrier
    keys_empty: Any  # a barrier
    # What warps exchange:
    p: Any  # S_q, its rounding errors and S_r, (2 or 3, L, L)
    projections: Any  # with norms parts of q . dq and k . dk, of each warp, (2, 8 L)
    of_norms: Any  # with norms r_q^2 q . dq and r_k^2 k . dk, (2, L)
    # Constants:
    from_middle: Any  # M of step (5), (L, L)
    before: Any  # 1 where the row is before the column, (L, L)
    sums: Any  # parts of k . W of each warp, (1, 8 L)


class Tile(NamedTuple):
    """The tile of one head that a program computes."""

    b: Any  # batch row
    h: Any  # head
    start: Any  # first token in the batch row
    steps: Any  # number of steps
    end: Any  # the token after them
    index: Any  # index among all tiles, of the states


@gluon.jit
def load_taken(index, tiles, params, L: gl.constexpr):
    """Return 1 where this kernel computes work tile `index`: it has steps, and needs no levels."""
    exists = index < params.num_work_tiles
    _b, h, _start, steps, first_tile = scheduler.get_work_tile(gl.where(exists, index, 0), params, L, True)
    flag = gl.load(tiles.needs_levels + h.to(gl.int64) * tiles.tiles_per_head + first_tile).to(gl.int32)
    return gl.where(exists & (steps > 0) & (flag == 0), 1, 0)


@gluon.jit
def locate(index, tiles, params, L: gl.constexpr):
    """Return the tile with the number `index`."""
    b, h, start, steps, first_tile = scheduler.get_work_tile(index, params, L, True)
    return Tile(b=b, h=h, start=start, steps=steps, end=start + steps, index=h * tiles.tiles_per_head + first_tile)


@gluon.jit
def store_number(x, to):
    """Store an int32 to shared memory; one warp calls this."""
    to.store(gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + x)


@gluon.jit
def tell_more(x, s, shared):
    """Store whether stage s has data, before the load warp arrives at its barrier."""
    store_number(x, shared.more.index(s))
    pipeline.barrier()  # all lanes have stored


@gluon.jit
def load_number(at):
    """Return an int32 in shared memory to all threads of the consumer."""
    return gl.max(at.load(gl.BlockedLayout([1], [32], [8], [0])), 0)


@gluon.jit
def run_load_warp(E, DO, DV, states, cotangents, tiles, shared, params, config):
    """Load E, do, dv, C and dC of each tile to shared memory by TMA, COLUMNS columns of dhv at a time.

    Args:
        E, DO, DV: TMA descriptors, in tiles (L, COLUMNS).
        states, cotangents: TMA descriptors of C and dC, in tiles (COLUMNS, CHANNELS).
        tiles: Which tiles a program computes.
        shared: Shared memory.
        params: The numbers of the scheduler.
        config: Constants.
    """
    L: gl.constexpr = config.L
    TENSORS: gl.constexpr = 3 if config.CORRECT else 2
    nbytes: gl.constexpr = TENSORS * E.block_type.nbytes + 2 * states.block_type.nbytes
    channel = gl.program_id(0) * CHANNELS
    n = 0
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        if load_taken(index, tiles, params, L) != 0:
            tile = locate(index, tiles, params, L)
            row = scheduler.row_of_whole(tile.b, params)
            for i in range(0, config.COLUMN_BLOCKS):
                s, bar = pipeline.acquire(n, shared.full, shared.empty, config.STAGES)
                tell_more(1, s, shared)
                mbarrier.expect(bar, nbytes)
                at = scheduler.tile_coordinates(row, tile.h, tile.start, i * config.COLUMNS, tile.end, params)
                pipeline.async_load(E, at, bar, shared.e.index(s))
                pipeline.async_load(DO, at, bar, shared.do.index(s))
                if config.CORRECT:
                    pipeline.async_load(DV, at, bar, shared.dv.index(s))
                block = (tile.index, i * config.COLUMNS, channel)
                pipeline.async_load(states, block, bar, shared.states.index(s))
                pipeline.async_load(cotangents, block, bar, shared.cotangents.index(s))
                n += 1
    s, bar = pipeline.acquire(n, shared.full, shared.empty, config.STAGES)
    tell_more(0, s, shared)
    mbarrier.arrive(bar, count=1)


@gluon.jit
def wait_for_release(n, shared):
    """Wait until the consumer has released the keys of the tile before the program's tile n."""
    mbarrier.wait(shared.keys_empty, (n & 1) ^ 1)


@gluon.jit
def load_norms(tile, r, given, params):
    """Return r_q and r_k of the steps r of a tile, (L) each, 0 where there is no step."""
    at = tile.b.to(gl.int64) * given.norm_b + tile.h
    at += gl.to_tensor(scheduler.step_of_whole(tile.start, params)).to(gl.int64) * given.norm_t
    of_q = gl.load(given.q_norms + at + r * given.norm_t, mask=r < tile.steps, other=0.0)
    return of_q, gl.load(given.k_norms + at + r * given.norm_t, mask=r < tile.steps, other=0.0)


@gluon.jit
def load_parameters(tile, channel, given):
    """Return the parameters of the activation of the program's channels from `channel` on, (CHANNELS) or numbers."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    c = channel + gl.arange(0, CHANNELS, layout)
    a, bias = load_activation(
        given.A_log, given.bias, tile.h, c, given.rate_stride, given.bias_h, given.bias_c, given.DK, given.HAS_RATE,
        given.HAS_BIAS,
    )  # fmt: skip
    if given.HAS_RATE:
        a += gl.zeros([CHANNELS], gl.float32, layout)
    return a, bias


@gluon.jit
def run_key_warp(Q, K, G, gmem, tiles, shared, params, group_size, config):
    """Bring q, k, the gates, beta, norms and the gates' parameters of each tile to shared memory; store dbeta.

    Where no beta of a tile is near 0, dbeta is dv . E / beta. The consumer computes that of other tiles.

    Args:
        Q, K, G: TMA descriptors, in tiles (L, CHANNELS).
        gmem: Tensors in global memory.
        tiles: Which tiles a program computes.
        shared: Shared memory.
        params: The numbers of the scheduler.
        group_size: Heads of v that share a head of q and k.
        config: Constants.
    """
    L: gl.constexpr = config.L
    channel = gl.program_id(0) * CHANNELS
    r = gl.arange(0, L, gl.BlockedLayout([1], [32], [1], [0]))
    n = 0
    for index in range(gl.program_id(1), params.num_work_tiles, gl.num_programs(1)):
        if load_taken(index, tiles, params, L) != 0:
            tile = locate(index, tiles, params, L)
            # Loads that other tiles' work hides
            at = gmem.beta + (tile.b.to(gl.int64) * gmem.stride_b + tile.h.to(gl.int64) * gmem.stride_h)
            at += gl.to_tensor(scheduler.step_of_whole(tile.start, params)).to(gl.int64) * gmem.stride_t
            beta = gl.load(at + r * gmem.stride_t, mask=r < tile.steps, other=0.0).to(gl.float32)  # (L)
            tiny = gl.max(gl.where((gl.abs(beta) <= SMALLEST_BETA) & (r < tile.steps), 1, 0), 0)
            if config.NORMALIZED:
                of_q, of_k = load_norms(tile, r, gmem.activations, params)
            if config.ACTIVATED:
                rate, bias = load_parameters(tile, channel, gmem.activations)
            if config.DOTS > 0:
                by_errors = load_dots(tile, r, r < tile.steps, gmem, params, config)
            row = scheduler.row_of_whole(tile.b, params)
            s, bar = pipeline.acquire(n, shared.gates_full, shared.gates_empty, config.GATE_STAGES)
            mbarrier.expect(bar, G.block_type.nbytes)
            at = scheduler.tile_coordinates(row, tile.h, tile.start, channel, tile.end, params)
            pipeline.async_load(G, at, bar, shared.g.index(s))
            wait_for_release(n, shared)
            shared.steps.index(STRENGTH).store(beta)
            if config.NORMALIZED:
                shared.steps.index(WEIGHT).store(beta * of_k)
                shared.steps.index(OF_Q).store(of_q)
                shared.steps.index(OF_K).store(of_k)
            if config.ACTIVATED:
                if gmem.activations.HAS_RATE:
                    shared.activation.index(RATE).store(rate)
                if gmem.activations.HAS_BIAS:
                    shared.activation.index(BIAS).store(bias)
                store_number(tile.index - tile.h * tiles.tiles_per_head, shared.tile.index(FIRST_TILE))
            store_number(tile.b, shared.tile.index(ROW))
            store_number(tile.h, shared.tile.index(HEAD))
            store_number(tile.start, shared.tile.index(START))
            store_number(tile.end, shared.tile.index(END))
            store_number(tiny, shared.tile.index(TINY))
            pipeline.barrier()  # all lanes have stored
            mbarrier.expect(shared.keys_full, 2 * Q.block_type.nbytes)
            at = scheduler.tile_coordinates(row, tile.h // group_size, tile.start, channel, tile.end, params)
            pipeline.async_load(Q, at, shared.keys_full, shared.q.index(0))
            pipeline.async_load(K, at, shared.keys_full, shared.k.index(0))
            if config.DOTS > 0:  # noqa: SIM102  it is known when the kernel is compiled
                if tiny == 0:
                    found = gl.where(gl.program_id(0) == 0, by_errors / gl.where(r < tile.steps, beta, 1.0), 0.0)
                    part = gl.program_id(0) * (CHANNELS // 32)
                    store_parts(found, part, CHANNELS // 32, tile, r, r < tile.steps, gmem, params, config)
            n += 1


@gluon.constexpr_function
def accumulators(columns):
    """Return the layout of a product with CHANNELS rows and this many columns, 64 rows for each warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, columns, 16])


@gluon.constexpr_function
def score_layout(L):
    """Return the layout of a product (L, L), of which each warpgroup has half of the columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, L // 2, 16])


@gluon.jit
def to_left_operand(x, columns: gl.constexpr):
    """Return `x`, 16-bit in the layout of accumulators, as the left operand of a product with this many columns."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, accumulators(columns), 2), assert_trivial=True)


@gluon.jit
def load_transposed(tile, L: gl.constexpr):
    """Return a tile (L, CHANNELS) in shared memory transposed, (CHANNELS, L), in the layout of accumulators."""
    return tile.reshape([L, CHANNELS]).permute((1, 0)).load(accumulators(L))


@gluon.jit
def store_transposed(x, to, L: gl.constexpr):
    """Store x, (CHANNELS, L), transposed, over a tile (L, CHANNELS) in shared memory."""
    to.reshape([L, CHANNELS]).permute((1, 0)).store(x.to(to.dtype))


@gluon.jit
def add_split_products(acc, A, A_low, b):
    """Start acc + (A + A_low) b, for left operands in registers."""
    acc = warpgroup_mma(A, b, acc, is_async=True)
    return warpgroup_mma(A_low, b, acc, is_async=True)


@gluon.jit
def store_scores(S_q, S_r, at0, gmem, shared, config):
    """Store S_q and S_r, step (6); at0 is an opaque 0."""
    L: gl.constexpr = config.L
    i = gl.arange(0, L, gl.SliceLayout(1, score_layout(L)))
    j = gl.arange(0, L, gl.SliceLayout(0, score_layout(L)))
    of_q = gmem.scale
    of_k = -1.0
    if config.NORMALIZED:
        of_q = gl.expand_dims(shared.steps.index(at0 + OF_Q).load(i.type.layout), 1) * gmem.scale  # (L, 1)
        of_k = -gl.expand_dims(shared.steps.index(at0 + OF_K).load(i.type.layout), 1)
    S_q, low = mma.split_in_two(mma.apply_causal_mask(S_q, of_q, i, j, 0, False), gl.bfloat16)
    shared.p.index(at0 + OF_QUERIES).store(S_q)
    shared.p.index(at0 + LOW).store(low)
    if config.CORRECT:
        S_r = mma.apply_causal_mask(S_r, of_k, i, j, 0, False, True)
        shared.p.index(at0 + OF_KEYS).store(S_r.to(gl.bfloat16))
    fence_async_shared()  # MMAs read them through the asynchronous proxy
    pipeline.barrier()  # all warps have stored


@gluon.jit
def start_states(s, phase, S_q, S_r, dq, dr, W, across, shared, config):
    """Start steps (1) to (3) for the columns of dhv in stage s, and return (4) as well.

    Returns:
        S_q, S_r, dq, dr, W and across as in `process_states`, MMAs being underway, and the left operands of these.
    """
    L: gl.constexpr = config.L
    of_out: gl.constexpr = accumulators(L)
    mbarrier.wait(shared.full.index(s), phase)
    e = shared.e.index(s).reshape([L, config.COLUMNS])
    do = shared.do.index(s).reshape([L, config.COLUMNS])
    # (1)
    writes = e.permute((1, 0))
    S_q = warpgroup_mma(do, writes, S_q, is_async=True)
    # (2) and (3)
    C = shared.states.index(s).reshape([config.COLUMNS, CHANNELS]).permute((1, 0)).load(of_out)  # (CHANNELS, COLUMNS)
    dC = shared.cotangents.index(s).reshape([config.COLUMNS, CHANNELS]).permute((1, 0)).load(of_out)
    A = to_left_operand(C, L)
    B = to_left_operand(dC, L)
    dq = warpgroup_mma(A, do.permute((1, 0)), dq, is_async=True)
    W = warpgroup_mma(B, e.permute((1, 0)), W, is_async=True)
    if config.CORRECT:
        dv = shared.dv.index(s).reshape([L, config.COLUMNS])
        S_r = warpgroup_mma(dv, writes, S_r, is_async=True)
        dr = warpgroup_mma(A, dv.permute((1, 0)), dr, is_async=True)
    # (4)
    across += gl.sum(C.to(gl.float32) * dC.to(gl.float32), 1)
    return S_q, S_r, dq, dr, W, across, A, B


@gluon.jit
def wait_for_states(count: gl.constexpr, S_q, S_r, dq, dr, W, A, B, config):
    """Wait until no more than `count` of the MMAs of `start_states` are underway; the others' operands are A and B."""
    if config.CORRECT:
        S_q, S_r, dq, dr, W, A, B = warpgroup_mma_wait(count, deps=[S_q, S_r, dq, dr, W, A, B])
    else:
        S_q, dq, W, A, B = warpgroup_mma_wait(count, deps=[S_q, dq, W, A, B])
    return S_q, S_r, dq, dr, W


@gluon.jit
def stage_of_columns(n, i, config):
    """Return stage and phase of block i of the columns of the program's tile n.

    Where a tile fills the ring exactly once, the compiler must not know it: it would keep the stages' addresses.
    """
    return pipeline.stage_and_phase(scheduler.rematerialize(n * config.COLUMN_BLOCKS + i), config.STAGES)


@gluon.jit
def release_gates(n, shared, config):
    """Hand back the gates of the tile before the program's tile n, once the gradient over them has left."""
    tma.store_wait(0)
    pipeline.barrier()
    s = (n + config.GATE_STAGES - 1) % config.GATE_STAGES
    mbarrier.arrive(shared.gates_empty.index(s), count=1, pred=n > 0)


@gluon.jit
def release_stage(s, shared):
    """Hand back stage s of the ring."""
    pipeline.barrier()  # the MMAs of all warps have read the stage
    mbarrier.arrive(shared.empty.index(s), count=1)


@gluon.jit
def process_states(n, shared, config):
    """Compute what a tile needs of E, do, dv, C and dC, steps (1) to (4).

    The MMAs of some columns still run while those of the next columns are started.

    Args:
        n: Number of the tile among those of the program.
        shared: Shared memory.
        config: Constants.

    Returns:
        S_q and S_r, (L, L); dq^T, dr^T and W^T, (CHANNELS, L); across, (CHANNELS).
    """
    L: gl.constexpr = config.L
    MMAS: gl.constexpr = 5 if config.CORRECT else 3  # of one call of `start_states`
    of_out: gl.constexpr = accumulators(L)
    of_scores: gl.constexpr = score_layout(L)
    S_q = gl.zeros([L, L], gl.float32, of_scores)
    S_r = gl.zeros([L, L], gl.float32, of_scores)
    dq = gl.zeros([CHANNELS, L], gl.float32, of_out)
    dr = gl.zeros([CHANNELS, L], gl.float32, of_out)
    W = gl.zeros([CHANNELS, L], gl.float32, of_out)
    across = gl.zeros([CHANNELS], gl.float32, gl.SliceLayout(1, of_out))
    s, phase = stage_of_columns(n, 0, config)
    S_q, S_r, dq, dr, W, across, A, B = start_states(s, phase, S_q, S_r, dq, dr, W, across, shared, config)
    # This waits for no MMA, as only MMAS of them run: a loop must carry accumulators that have been waited for.
    S_q, S_r, dq, dr, W = wait_for_states(MMAS, S_q, S_r, dq, dr, W, A, B, config)
    release_gates(n, shared, config)
    for i in range(1, config.COLUMN_BLOCKS):
        last, A_last, B_last = s, A, B
        s, phase = stage_of_columns(n, i, config)
        S_q, S_r, dq, dr, W, across, A, B = start_states(s, phase, S_q, S_r, dq, dr, W, across, shared, config)
        S_q, S_r, dq, dr, W = wait_for_states(MMAS, S_q, S_r, dq, dr, W, A_last, B_last, config)
        release_stage(last, shared)
    S_q, S_r, dq, dr, W = wait_for_states(0, S_q, S_r, dq, dr, W, A, B, config)
    release_stage(s, shared)
    return S_q, S_r, dq, dr, W, across


@gluon.jit
def load_dots(tile, r, exists, gmem, params, config):
    """Return the sum of the parts of dv . E of the steps r of a tile, (L), 0 where not `exists`."""
    H = scheduler.rematerialize(params.H)
    first = (tile.b.to(gl.int64) * params.T + tile.start) * H + tile.h
    layout: gl.constexpr = r.type.layout
    total = gl.zeros([config.L], gl.float32, layout)
    for i in gl.static_range(config.DOTS):
        at = gmem.dots + (i * gl.to_tensor(gmem.tokens).to(gl.int64) * H + first) + r * H
        total += gl.load(at, mask=exists, other=0.0)
    return total


@gluon.jit
def store_parts(found, part, count: gl.constexpr, tile, r, exists, gmem, params, config):
    """Store `found`, (L), as a part of the gradient of beta, and 0 as the `count` - 1 parts after it."""
    H = scheduler.rematerialize(params.H)
    first = (tile.b.to(gl.int64) * params.T + tile.start) * H + tile.h
    to = gmem.dbeta + first * config.PARTS + (r * (H * config.PARTS) + part)
    gl.store(to, found, mask=exists & (part < config.PARTS))
    for i in gl.static_range(1, count):
        gl.store(to + i, found * 0.0, mask=exists & (part + i < config.PARTS))


@gluon.jit
def store_sums(products, to, L: gl.constexpr):
    """Store sums over the rows of `products`, (CHANNELS, L), of each warp: (8 L)."""
    to.store(gl.reshape(gl.sum(gl.reshape(products, [8, 16, L]), 1), [8 * L]))
    pipeline.barrier()  # all warps have stored


@gluon.jit
def load_sums(sums, L: gl.constexpr):
    """Return the sums over all channels, (L), of what `store_sums` has stored."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    total = gl.zeros([L], gl.float32, layout)
    for warp in gl.static_range(8):
        total += sums.slice(warp * L, L, 0).load(layout)
    return total


@gluon.jit
def store_write_gradient(products, tile, gmem, shared, params, config):
    """Store what the program adds to the gradient of beta: sums of k * W over its channels.

    Where beta is not near 0, it is dv . E / beta, which the first program of a head adds. The program's channels are
    several parts, of which those after the first one are 0.

    Args:
        products: k^T * W^T, (CHANNELS, L); with norms k is not normalized.
        tile: The tile.
        gmem: Tensors in global memory.
        shared: Shared memory.
        params: The numbers of the scheduler.
        config: Constants.
    """
    L: gl.constexpr = config.L
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    r = gl.arange(0, L, layout)
    store_sums(products, shared.sums.index(0), L)
    found = load_sums(shared.sums.index(0), L)
    if config.NORMALIZED:
        found *= shared.steps.index(OF_K).load(layout)
    part = gl.program_id(0) * (CHANNELS // 32)
    if config.DOTS > 0:
        beta = shared.steps.index(STRENGTH).load(layout)
        by_errors = load_dots(tile, r, (r < tile.steps) & (part == 0), gmem, params, config)
        found = gl.where(gl.abs(beta) > SMALLEST_BETA, by_errors / beta, found)
    store_parts(found, part, CHANNELS // 32, tile, r, r < tile.steps, gmem, params, config)


@gluon.jit
def reciprocal(x):
    """Return 1 / x up to 2^-23; it is computed where it is used and not kept."""
    asm: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(asm, "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def clamp(x, lowest: gl.constexpr, highest: gl.constexpr):
    """Return x between two bounds, each rounded to the dtype of x; NaN stays NaN."""
    layout: gl.constexpr = x.type.layout
    low = gl.zeros(x.shape, gl.float32, layout) + lowest
    high = gl.zeros(x.shape, gl.float32, layout) + highest
    if x.dtype == gl.float32:
        asm: gl.constexpr = "{ .reg .f32 t; max.NaN.f32 t, $1, $2; min.NaN.f32 $0, t, $3; }"
        return gl.inline_asm_elementwise(asm, "=f,f,f,f", [x, low, high], dtype=gl.float32, is_pure=True, pack=1)
    elif x.dtype == gl.bfloat16:
        pairs: gl.constexpr = "{ .reg .b32 t; max.NaN.bf16x2 t, $1, $2; min.NaN.bf16x2 $0, t, $3; }"
        low, high = low.to(gl.bfloat16), high.to(gl.bfloat16)
        return gl.inline_asm_elementwise(pairs, "=r,r,r,r", [x, low, high], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        halves: gl.constexpr = "{ .reg .b32 t; max.NaN.f16x2 t, $1, $2; min.NaN.f16x2 $0, t, $3; }"
        low, high = low.to(gl.float16), high.to(gl.float16)
        return gl.inline_asm_elementwise(halves, "=r,r,r,r", [x, low, high], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def close(x, gates):
    """Return float32 values x in the dtype of the gates, 0 where a gate is below LOWEST or above HIGHEST."""
    if gates.dtype == gl.float32:
        return gl.where((gates < LOWEST) | (gates > HIGHEST), 0.0, x)
    elif gates.dtype == gl.bfloat16:
        bounded = clamp(gates, LOWEST, HIGHEST)
        pairs: gl.constexpr = "{ .reg .b32 t; set.equ.u32.bf16x2 t, $2, $3; and.b32 $0, $1, t; }"
        x = x.to(gl.bfloat16)
        return gl.inline_asm_elementwise(
            pairs, "=r,r,r,r", [x, gates, bounded], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        bounded = clamp(gates, LOWEST_FLOAT16, HIGHEST)
        halves: gl.constexpr = "{ .reg .b32 t; set.equ.u32.f16x2 t, $2, $3; and.b32 $0, $1, t; }"
        x = x.to(gl.float16)
        return gl.inline_asm_elementwise(
            halves, "=r,r,r,r", [x, gates, bounded], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def split_left_operand(x, columns: gl.constexpr):
    """Return float32 values x as left operands of two MMAs: cut off after the bits of bfloat16, and the rest."""
    high = (x.to(gl.int32, bitcast=True) & -0x10000).to(gl.float32, bitcast=True)
    low = (x - high).to(gl.bfloat16)
    return to_left_operand(high.to(gl.bfloat16), columns), to_left_operand(low, columns)


@gluon.jit
def load_pre_activations(g, gmem, shared, config):
    """Return z^T of the gates, (CHANNELS, L), and the rates exp(A_log), (CHANNELS, 1), or 1 without A_log.

    Args:
        g: What the gates are made of, in shared memory, (L, CHANNELS).
        gmem: Tensors in global memory.
        shared: Shared memory.
        config: Constants.
    """
    rows: gl.constexpr = gl.SliceLayout(1, accumulators(config.L))
    z = load_transposed(g, config.L).to(gl.float32)
    a = 1.0
    if gmem.activations.HAS_RATE:
        a = gl.expand_dims(shared.activation.index(RATE).load(rows), 1)
    if gmem.activations.HAS_BIAS:
        z += gl.expand_dims(shared.activation.index(BIAS).load(rows), 1)
    return z, a


@gluon.jit
def tile_steps(L: gl.constexpr):
    """Return the numbers of the steps of a tile, (1, L), in the layout of accumulators."""
    return gl.expand_dims(gl.arange(0, L, gl.SliceLayout(0, accumulators(L))), 0)


@gluon.jit
def differentiate_gates(dg, g, tile, gmem, shared, params, config):
    """Return the gradient of what the gates are made of, and store what the tile adds to those of A_log and dt_bias.

    Args:
        dg: The gradient of the log-gates, (CHANNELS, L).
        g: What the gates are made of, in shared memory, (L, CHANNELS).
        tile: The tile.
        gmem: Tensors in global memory.
        shared: Shared memory.
        params: The numbers of the scheduler.
        config: Constants.
    """
    L: gl.constexpr = config.L
    given = gmem.activations
    z, a = load_pre_activations(g, gmem, shared, config)
    gate, of_bias, of_rate = gate_derivatives(z, a, given.factor, config.SOFTPLUS, True)
    closed = (gate < LOWEST) | (tile_steps(L) >= tile.steps)  # no gate is above 0
    df = gl.where(closed, 0.0, of_bias * dg)
    if config.SUMS:
        sum_rate = gl.sum(gl.where(closed, 0.0, of_rate * dg), 1)  # (CHANNELS)
        c = gl.program_id(0) * CHANNELS + gl.arange(0, CHANNELS, sum_rate.type.layout)
        first_tile = load_number(shared.tile.index(FIRST_TILE))
        to = given.sums + (tile.h.to(gl.int64) * given.sum_h + first_tile * given.DK) + c
        gl.store(to, sum_rate, mask=c < given.DK)
        gl.store(to + gl.to_tensor(given.sum_h).to(gl.int64) * params.H, gl.sum(df, 1), mask=c < given.DK)
    return df


@gluon.jit
def split_gates(x, columns: gl.constexpr, dtype: gl.constexpr):
    """Return float32 values x as left operands of two MMAs, rounded and the rounding errors."""
    high, low = mma.split_in_two(x, dtype)
    return to_left_operand(high, columns), to_left_operand(low, columns)


@gluon.jit
def issue_product(a, b, L: gl.constexpr):
    """Start a b, (CHANNELS, L)."""
    return warpgroup_mma(a, b, gl.zeros([CHANNELS, L], gl.float32, accumulators(L)), use_acc=False, is_async=True)


@gluon.jit
def compute_decays(g, from_middle, gmem, shared, config):
    """Return the decays of both halves of a tile, (CHANNELS) each, and up^T, (CHANNELS, L), step (5).

    The products see gates that are at least CLOSED_GATE.

    Args:
        g: The log-gates in shared memory, (L, CHANNELS), or what they are made of.
        from_middle: M in shared memory, (L, L).
        gmem: Tensors in global memory.
        shared: Shared memory.
        config: Constants.
    """
    L: gl.constexpr = config.L
    SPLIT: gl.constexpr = config.ACTIVATED or g.dtype == gl.float32
    if config.ACTIVATED:
        z, a = load_pre_activations(g, gmem, shared, config)
        clamped = clamp(activated_gate(z, a, gmem.activations.factor, config.SOFTPLUS, True), CLOSED_GATE, HIGHEST)
        inside = tile_steps(L) < load_tile(shared).steps
        if gmem.activations.DK < CHANNELS:  # gates beyond dqk might close: their factors overflow, and 0 * inf is NaN
            c = gl.arange(0, CHANNELS, gl.SliceLayout(1, accumulators(L)))
            inside = inside & gl.expand_dims(c < gmem.activations.DK, 1)
        clamped = gl.where(inside, clamped, 0.0)
    else:
        clamped = clamp(load_transposed(g, L), CLOSED_GATE, HIGHEST)  # (CHANNELS, L)
    gates = clamped.to(gl.float32)
    if SPLIT:
        A, A_low = split_gates(gates, L, from_middle.dtype)
        c = warpgroup_mma(A_low, from_middle, issue_product(A, from_middle, L), is_async=True)
    else:
        A = to_left_operand(clamped, L)
        c = issue_product(A, from_middle, L)
    step = tile_steps(L)
    first = gl.exp2(gl.sum(gl.where(step < L // 2, gates, 0.0), 1) * LOG2E)  # (CHANNELS)
    second = gl.exp2(gl.sum(gl.where(step < L // 2, 0.0, gates), 1) * LOG2E)
    if SPLIT:
        c, A, A_low = warpgroup_mma_wait(0, deps=[c, A, A_low])
    else:
        c, A = warpgroup_mma_wait(0, deps=[c, A])
    return first, second, gl.exp2(c * LOG2E)


@gluon.jit
def load_tile(shared):
    """Return the tile whose keys are in shared memory."""
    start = load_number(shared.tile.index(START))
    end = load_number(shared.tile.index(END))
    b = load_number(shared.tile.index(ROW))
    h = load_number(shared.tile.index(HEAD))
    return Tile(b=b, h=h, start=start, steps=end - start, end=end, index=0)


@gluon.jit
def load_of_steps(which, shared, L: gl.constexpr):
    """Return a vector of the steps of the tile, (1, L), in the layout of accumulators."""
    return gl.expand_dims(shared.steps.index(which).load(gl.SliceLayout(0, accumulators(L))), 0)


@gluon.jit
def share_projections(dq, dk, q, k, shared, L: gl.constexpr):
    """Store the sums over the channels of each warp of q * dq and k * dk, (CHANNELS, L)."""
    store_sums(load_transposed(q, L).to(gl.float32) * dq, shared.projections.index(0), L)
    store_sums(load_transposed(k, L).to(gl.float32) * dk, shared.projections.index(1), L)


@gluon.jit
def compute_projections(shared, L: gl.constexpr):
    """Store r^2 q . dq and r^2 k . dk of the steps of a tile."""
    for which in gl.static_range(2):
        r = shared.steps.index(OF_Q + which).load(gl.BlockedLayout([1], [32], [8], [0]))
        shared.of_norms.index(which).store(load_sums(shared.projections.index(which), L) * r * r)
    pipeline.barrier()  # all warps have stored


@gluon.jit
def load_projection(which: gl.constexpr, shared, L: gl.constexpr):
    """Return what `compute_projections` has stored for q, or with `which` 1 for k, (1, L)."""
    x = shared.of_norms.index(which).load(gl.SliceLayout(0, accumulators(L)))
    return gl.expand_dims(x, 0)


@gluon.jit
def process_tile(n, gmem, shared, params, config):
    """Process the program's tile n: everything in the module's docstring.

    Args:
        n: Number of the tile among those of the program.
        gmem: Tensors in global memory.
        shared: Shared memory.
        params: The numbers of the scheduler.
        config: Constants.
    """
    L: gl.constexpr = config.L
    of_out: gl.constexpr = accumulators(L)
    S_q, S_r, dq, dr, W, across = process_states(n, shared, config)
    # An opaque 0, so that addresses of what is outside of the rings are computed in each tile, not kept and spilled
    at0 = scheduler.rematerialize(n * 0)
    # (6) before (5), for the registers of S_q and S_r. This wait passes at once. Without it the ptxas of Triton 3.6
    # moves later steps up, serializes an MMA and spills 24 bytes of KDA in place of 4.
    wait_for_release(n, shared)
    if config.NORMALIZED or config.ACTIVATED:
        mbarrier.wait(shared.keys_full, n & 1)
    store_scores(S_q, S_r, at0, gmem, shared, config)
    s, phase = pipeline.stage_and_phase(n, config.GATE_STAGES)
    g = shared.g.index(s)
    mbarrier.wait(shared.gates_full.index(s), phase)
    first, second, up = compute_decays(g, shared.from_middle.index(at0), gmem, shared, config)
    pipeline.keep_order()
    # (7)
    W *= gl.expand_dims(second, 1)
    dq *= gl.expand_dims(first * gmem.scale, 1)
    if config.NORMALIZED:
        dq *= load_of_steps(at0 + OF_Q, shared, L)
    total = across * first * second
    q, k = shared.q.index(at0), shared.k.index(at0)
    if not (config.NORMALIZED or config.ACTIVATED):
        mbarrier.wait(shared.keys_full, n & 1)
    query = load_transposed(q, L).to(gl.float32) * up
    total += gl.sum(query * dq, 1)  # (CHANNELS)
    # (8) W^T <- W^T + (q up)^T S_q + (k up)^T S_r
    A, A_low = split_left_operand(query, L)
    W = add_split_products(W, A, A_low, shared.p.index(at0 + OF_QUERIES))
    W = warpgroup_mma(A, shared.p.index(at0 + LOW), W, is_async=True)
    if config.CORRECT:
        W, A, A_low = warpgroup_mma_wait(0, deps=[W, A, A_low])
        dr *= gl.expand_dims(-first, 1)
        if config.NORMALIZED:
            dr *= load_of_steps(at0 + OF_K, shared, L)
        read = load_transposed(k, L).to(gl.float32) * up
        total += gl.sum(read * dr, 1)
        B, B_low = split_left_operand(read, L)
        W = add_split_products(W, B, B_low, shared.p.index(at0 + OF_KEYS))
    pipeline.keep_order()
    # (9) dq^T <- dq^T + (k beta down)^T S_q^T, and dr^T by S_r
    b = load_of_steps(at0 + (WEIGHT if config.NORMALIZED else STRENGTH), shared, L)  # (1, L)
    write = load_transposed(k, L).to(gl.float32) * b * reciprocal(up)
    D, D_low = split_left_operand(write, L)
    if config.CORRECT:
        W, B, B_low = warpgroup_mma_wait(0, deps=[W, B, B_low])
    else:
        W, A, A_low = warpgroup_mma_wait(0, deps=[W, A, A_low])
    dq = add_split_products(dq, D, D_low, shared.p.index(at0 + OF_QUERIES).permute((1, 0)))
    dq = warpgroup_mma(D, shared.p.index(at0 + LOW).permute((1, 0)), dq, is_async=True)
    if config.CORRECT:
        dr = add_split_products(dr, D, D_low, shared.p.index(at0 + OF_KEYS).permute((1, 0)))
    # (10)
    W *= reciprocal(up)
    k_t = load_transposed(k, L).to(gl.float32)
    if config.CORRECT and config.NORMALIZED:  # no registers are left for dq, dk and operands of MMAs
        dq, dr, D, D_low = warpgroup_mma_wait(0, deps=[dq, dr, D, D_low])
    elif config.CORRECT:
        dq = warpgroup_mma_wait(2, deps=[dq])  # those of dr are underway
    else:
        dq, D, D_low = warpgroup_mma_wait(0, deps=[dq, D, D_low])
    dq *= up
    if not config.NORMALIZED:
        change = k_t * (W * b) - load_transposed(q, L).to(gl.float32) * dq
        store_transposed(dq, q, L)
        if config.CORRECT:
            dr, D, D_low = warpgroup_mma_wait(0, deps=[dr, D, D_low])
    if config.BETA:
        if config.DOTS == 0:  # noqa: SIM114  it is known when the kernel is compiled
            store_write_gradient(k_t * W, load_tile(shared), gmem, shared, params, config)
        elif load_number(shared.tile.index(TINY)) != 0:
            store_write_gradient(k_t * W, load_tile(shared), gmem, shared, params, config)
    dk = W * b
    if config.NORMALIZED:
        change = dk
        if config.CORRECT:
            dr *= up
            change = dk - dr
            dk += dr
        change = load_transposed(k, L).to(gl.float32) * change - load_transposed(q, L).to(gl.float32) * dq
    elif config.CORRECT:
        dr *= up
        change -= k_t * dr
        dk += dr
    if config.NORMALIZED:
        share_projections(dq, dk, q, k, shared, L)
    else:
        store_transposed(dk, k, L)
    pipeline.keep_order()
    # (11)
    A, A_low = split_left_operand(change, L)
    dg = gl.zeros([CHANNELS, L], gl.float32, of_out) + gl.expand_dims(total, 1)
    dg = add_split_products(dg, A, A_low, shared.before.index(at0))
    if config.NORMALIZED:
        compute_projections(shared, L)
        store_transposed(dq - load_transposed(q, L).to(gl.float32) * load_projection(0, shared, L), q, L)
        store_transposed(dk - load_transposed(k, L).to(gl.float32) * load_projection(1, shared, L), k, L)
    if not config.ACTIVATED:
        gates = load_transposed(g, L)
    tile = load_tile(shared)
    column = gl.program_id(0) * CHANNELS
    row = scheduler.row_of_whole(tile.b, params)
    at = scheduler.tile_coordinates(row, tile.h, tile.start, column, tile.end, params)
    fence_async_shared()
    pipeline.async_store(gmem.dq, at, q)
    pipeline.async_store(gmem.dk, at, k)
    dg, A, A_low = warpgroup_mma_wait(0, deps=[dg, A, A_low])
    if config.ACTIVATED:
        store_transposed(differentiate_gates(dg, g, tile, gmem, shared, params, config), g, L)
    else:
        store_transposed(close(dg, gates), g, L)
    fence_async_shared()
    pipeline.async_store(gmem.dg, at, g)
    tma.store_wait(1)  # dq and dk have left
    pipeline.barrier()
    mbarrier.arrive(shared.keys_empty, count=1)


@gluon.jit
def wait_for_tile(n, shared, config):
    """Wait for the first columns of the program's tile n, and return 0 if there is no such tile."""
    s, phase = stage_of_columns(n, 0, config)
    mbarrier.wait(shared.full.index(s), phase)
    return load_number(shared.more.index(s))


@gluon.jit
def run_consumer(gmem, shared, params, config):
    """Run the consumer over all tiles of the program."""
    n = gl.to_tensor(0)
    more = wait_for_tile(n, shared, config)
    while more != 0:
        process_tile(n, gmem, shared, params, config)
        n += 1
        more = wait_for_tile(n, shared, config)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[
    "T", "tiles_per_head", "H", "group_size", "num_work_tiles", "tokens", "stride_b", "stride_t", "stride_h", "scale",
    "first_row", "first_step", "norm_b", "norm_t", "gate_factor", "sum_h",
])  # fmt: skip
def channel_gradients_kernel(
    Q, K, G, E, DO, DV, states, cotangents, dQ, dK, dG, needs_levels, beta, q_norms, k_norms, A_log, Bias, sums, dots,
    dbeta, schedule,
    T, tiles_per_head, H, group_size, num_work_tiles, tokens, stride_b, stride_t, stride_h, scale,
    first_row, first_step, norm_b, norm_t, gate_factor, rate_stride, bias_h, bias_c, sum_h,
    L: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, COLUMN_BLOCKS: gl.constexpr,
    GATE_STAGES: gl.constexpr, PARTS: gl.constexpr, DOTS: gl.constexpr, CORRECT: gl.constexpr, BETA: gl.constexpr,
    IS_VARLEN: gl.constexpr, SLICED: gl.constexpr, DK: gl.constexpr, NORMALIZED: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_RATE: gl.constexpr, HAS_BIAS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of tiles that need no levels. The grid is (dqk / CHANNELS, programs).

    Args:
        Q, K, G: TMA descriptors of the queries, keys and log-gates, in tiles (L, CHANNELS).
        E, DO, DV: TMA descriptors of the prediction errors, or without CORRECT of the values, of the cotangent of h
            and of dv, in tiles (L, COLUMNS). DV is read with CORRECT.
        states, cotangents: TMA descriptors of C before each tile and dC after it, (H * tiles, dhv, dqk), in tiles
            (COLUMNS, CHANNELS).
        dQ, dK, dG: TMA descriptors of the results, (B, T, H, dqk), in tiles (L, CHANNELS).
        needs_levels: (H, tiles) int8, 1 for tiles that need levels.
        beta: (B, T, H), any float dtype.
        q_norms, k_norms: With NORMALIZED r_q and r_k, (B, T, H) float32, with the strides norm_b, norm_t and 1; there
            are then at most CHANNELS channels.
        A_log, Bias, gate_factor, rate_stride, bias_h, bias_c: The parameters of the gates' activation, as for
            `decay_operands`. G is then what gates are made of, and dG the gradient of that.
        sums: With SUMS an output for what tiles add to their gradients, (2, H, tiles, dqk) float32, with
            sum_h from one head to the next.
        dots: dv . E over each of DOTS parts of dhv, (DOTS, B, T, H) float32.
        dbeta: Output for parts of the gradient of beta, (B, T, H, PARTS) float32, with BETA.
        schedule: Schedule of the tiles of packed sequences, with IS_VARLEN.
        T: Tokens of a batch row.
        tiles_per_head: Tiles of one head over all batch rows.
        H: Heads.
        group_size: Heads of v that share a head of q and k.
        num_work_tiles: Tiles times H.
        tokens: Tokens of all batch rows.
        stride_b, stride_t, stride_h: Strides of beta.
        scale: The factor of the queries.
        first_row: With SLICED the row at which those of the slice start in all tensors (B, T, ...) but beta, the norms,
            dots and dbeta, which have the rows of the slice.
        first_step: With SLICED the token at which the steps start in all of them but dots and dbeta, which have these
            steps alone.
    """
    partitions(
        (Q, K, G), (E, DO, DV, states, cotangents), group_size,
        GlobalPointers(
            dq=dQ, dk=dK, dg=dG, dbeta=dbeta, dots=dots, beta=beta, stride_b=stride_b, stride_t=stride_t,
            stride_h=stride_h, tokens=tokens, scale=scale,
            activations=Activations(
                q_norms=q_norms, k_norms=k_norms, norm_b=norm_b, norm_t=norm_t, A_log=A_log, bias=Bias,
                rate_stride=rate_stride, bias_h=bias_h, bias_c=bias_c, factor=gate_factor, sums=sums, sum_h=sum_h,
                DK=DK, HAS_RATE=HAS_RATE, HAS_BIAS=HAS_BIAS,
            ),
        ),
        Tiles(needs_levels=needs_levels, tiles_per_head=tiles_per_head),
        scheduler.SchedulerParams(
            T=T, H=H, segment_steps=L, num_work_tiles=num_work_tiles, schedule=schedule if IS_VARLEN else None,
            first_row=first_row if SLICED else None, first_step=first_step if SLICED else None,
        ),
        Config(
            L=L, COLUMNS=COLUMNS, STAGES=STAGES, COLUMN_BLOCKS=COLUMN_BLOCKS, GATE_STAGES=GATE_STAGES, PARTS=PARTS,
            DOTS=DOTS, CORRECT=CORRECT, BETA=BETA, NORMALIZED=NORMALIZED, ACTIVATED=ACTIVATION != "none",
            SOFTPLUS=ACTIVATION == "softplus", SUMS=SUMS,
        ),
    )  # fmt: skip


@gluon.jit
def store_constants(shared, L: gl.constexpr):
    """Store the matrices of steps (5) and (11) to shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    j = gl.expand_dims(gl.arange(0, L, gl.SliceLayout(1, layout)), 1)
    i = gl.expand_dims(gl.arange(0, L, gl.SliceLayout(0, layout)), 0)
    middle: gl.constexpr = L // 2 - 1
    weights = gl.where((j > middle) & (j <= i), 1.0, gl.where((j <= middle) & (j > i), -1.0, 0.0))
    shared.from_middle.index(0).store(weights.to(shared.from_middle.dtype))
    shared.before.index(0).store(gl.where(j < i, 1.0, 0.0).to(gl.bfloat16))


@gluon.jit
def partitions(keys, values, group_size, gmem, tiles, params, config):
    """Allocate shared memory and start the partitions of the program: consumer, load and key warp."""
    Q, K, G = keys
    E, DO, DV, states, cotangents = values
    L: gl.constexpr = config.L
    full, empty = pipeline.allocate_full_empty(config.STAGES, 1, 1)
    gates_full, gates_empty = pipeline.allocate_full_empty(config.GATE_STAGES, 1, 1)
    shared = SharedStorage(
        e=pipeline.allocate_tiles(E, config.STAGES),
        do=pipeline.allocate_tiles(DO, config.STAGES),
        dv=pipeline.allocate_tiles(DV, config.STAGES) if config.CORRECT else None,
        states=pipeline.allocate_tiles(states, config.STAGES),
        cotangents=pipeline.allocate_tiles(cotangents, config.STAGES),
        more=pipeline.allocate_vectors(gl.int32, config.STAGES, 1),
        full=full,
        empty=empty,
        g=pipeline.allocate_tiles(G, config.GATE_STAGES),
        gates_full=gates_full,
        gates_empty=gates_empty,
        q=pipeline.allocate_tiles(Q, 1),
        k=pipeline.allocate_tiles(K, 1),
        steps=pipeline.allocate_vectors(gl.float32, 4 if config.NORMALIZED else 1, L),
        activation=pipeline.allocate_vectors(gl.float32, 2, CHANNELS) if config.ACTIVATED else None,
        tile=pipeline.allocate_vectors(gl.int32, NUMBERS, 1),
        keys_full=pipeline.allocate_barrier(1),
        keys_empty=pipeline.allocate_barrier(1),
        p=pipeline.allocate_operands(gl.bfloat16, 3 if config.CORRECT else 2, L, L),
        projections=pipeline.allocate_vectors(gl.float32, 2, 8 * L) if config.NORMALIZED else None,
        of_norms=pipeline.allocate_vectors(gl.float32, 2, L) if config.NORMALIZED else None,
        from_middle=pipeline.allocate_operands(Q.dtype, 1, L, L),
        before=pipeline.allocate_operands(gl.bfloat16, 1, L, L),
        sums=pipeline.allocate_vectors(gl.float32, 1, 8 * L),
    )
    store_constants(shared, L)
    fence_async_shared()
    gl.warp_specialize(
        [
            (run_consumer, (gmem, shared, params, config)),
            (run_load_warp, (E, DO, DV, states, cotangents, tiles, shared, params, config)),
            (run_key_warp, (Q, K, G, gmem, tiles, shared, params, group_size, config)),
        ],
        [1, 1],
        [PRODUCER_REGISTERS_MIN, PRODUCER_REGISTERS_MIN],
    )


def _state_descriptor(ctx: "ChannelContext", states: Tensor, columns: int) -> Any:
    """Return the TMA descriptor of states, (H, tiles, dhv, dqk), in tiles (columns, CHANNELS)."""
    _, _, V, K = states.shape
    layout, block = gl.NVMMASharedLayout(128, 16, 3), [1, columns, CHANNELS.value]
    descriptor = TensorDescriptor(states, [states.numel() // (V * K), V, K], [V * K, K, 1], block, layout)
    return ctx.base.do(host.descriptor_factory(descriptor), states)


def supports(ctx: "ChannelContext") -> bool:
    """Return whether the kernel computes the gradients of this call."""
    return ctx.x.channel_gates and ctx.x.read_key is None and not ctx.spec.read_before_decay


def launch(
    ctx: "ChannelContext", operands: "Operands", dh: Tensor, dv: Tensor, E: Tensor, states: Tensor,
    cotangents: Tensor, dots: Tensor | None, grads: "Gradients", sums: Tensor | None,
) -> None:  # fmt: skip
    """Compute the gradients of all tiles that need no levels.

    Args:
        ctx: The context of the call.
        operands: The operands of the scans, with the flags of tiles that need levels, and the norms.
        dh, dv: The cotangents of h and v, (B, T, H, dhv); dv is dense.
        E: The prediction errors, or without correction the values.
        states, cotangents: The states before the tiles and the cotangents after them, (H, tiles, dhv, dqk).
        dots: dv . E over parts of dhv, (parts, B, T, H) float32, or None where dbeta is not computed from it.
        grads: The outputs; that of beta has the parts of the Triton kernel, (B, T, H, parts).
        sums: Output for what tiles add to the gradients of A_log and dt_bias, (2, H, tiles, dqk), or None.
    """
    base, x = ctx.base, ctx.x
    tiles = scheduler.launch(replace(base, segment_steps=base.L, segments=base.tiles))
    blocks = ceil_div(base.K, CHANNELS.value)
    count = base.tiles * base.H
    programs = host.balanced_programs(count, max(1, host.processors(x.q.device) // blocks))
    # Shared memory has room for a fifth stage without values of reads and without the sums of the gradient of beta.
    columns, stages = 32, 4 if ctx.spec.correct or x.beta is not None else 5
    gate_stages = 2 if ctx.log_f.element_size() == 2 else 1  # shared memory has no room for a second tile in float32
    base.launch(channel_gradients_kernel, (blocks, programs),
        *(host.descriptor(base, t, CHANNELS.value) for t in (x.q, x.k, ctx.log_f)),
        *(host.descriptor(base, t, columns) for t in (E, dh, dv)),
        *(_state_descriptor(ctx, t, columns) for t in (states, cotangents)),
        *(host.descriptor(base, t, CHANNELS.value) for t in (grads.q, grads.k, grads.log_f)),
        operands.needs_levels, ctx.beta, *operands.norms(ctx.beta), *ctx.activation, ctx.beta if sums is None else sums,
        grads.beta if dots is None else dots, grads.beta, tiles.schedule, base.T, base.tiles,
        base.H, base.group, count, base.B * base.T, *time_strides(ctx.beta), ctx.spec.scale, ctx.first_row or 0,
        ctx.first_step, *operands.norm_strides, *ctx.activation_numbers, 0 if sums is None else sums.stride(1),
        L=base.L, COLUMNS=columns, STAGES=stages, GATE_STAGES=gate_stages, COLUMN_BLOCKS=ceil_div(base.V, columns),
        PARTS=grads.beta.numel() // (base.B * base.T * base.H), DOTS=0 if dots is None else dots.shape[0],
        CORRECT=ctx.spec.correct, BETA=x.beta is not None, IS_VARLEN=base.packed, SLICED=ctx.first_row is not None,
        DK=base.K, SUMS=sums is not None, num_warps=8, **ctx.activation_constants,
    )  # fmt: skip
