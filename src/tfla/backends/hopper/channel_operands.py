"""The operands of the scans with gates by channel, and P B and M B, of tiles that need no levels.

One program of two warpgroups computes a tile of 64 steps; two programs fit a multiprocessor. The equations are those of
:mod:`tfla.backends.triton.channel_tiles`, whose kernel computes the other tiles. What differs is how:

    layout     a warp has eight steps of 128 channels, a thread 4 channels of each: prefix sums of gates add up numbers
               of one thread, and sums over the steps of a warp go through shared memory once
    products   wgmma in tf32 with both operands in shared memory: the reads q a, and below them r a, by the writes k w
    M B        goes to memory in the place of X B, which `solve_kernel` of :mod:`.delta_solve` computes from it; above
               the diagonal, where M is 0, are the rounding errors of what is below it, transposed

Exponents are sums from the middle of the tile, c of :mod:`tfla.backends.triton.channel_decays`. In a bounded tile they
are at most 100, so that what float32 sums lose is below the rounding of tf32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from tfla.backends.gpu.gate_activations import activated_gate, load_activation
from tfla.backends.gpu.gate_kernels import HIGHEST, base2_exponent, first_tile, locate_chunk
from tfla.backends.hopper import delta_solve, delta_tiles, mma, pipeline

if TYPE_CHECKING:
    from torch import Tensor

    from tfla.backends.triton.channel_rule import ChannelContext

LARGEST_NARROW_HEAD = 64  # dqk that would leave half of a program idle
REGISTERS = 128  # of a thread, so that two programs fit a multiprocessor
L = gl.constexpr(64)  # steps of a tile
WIDTH = gl.constexpr(128)  # channels that a program has at a time
GROUP_STEPS = gl.constexpr(8)  # steps of a warp
GROUPS = gl.constexpr(8)  # warps
# A row of 128 channels for each warp, eight rows one after the other.
ELEMENTS = gl.constexpr(gl.BlockedLayout([8, 4], [1, 32], [8, 1], [1, 0]))
OPERAND = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 8]))  # a warpgroup has half of the columns
PAIRS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # of P and M in memory: 16 bytes a thread


@gluon.jit
def add(a, b):
    """Return a + b."""
    return a + b


@gluon.jit
def step_addresses(base, c, r, stride):
    """Return the addresses of channels c, (1, WIDTH), of the steps r, (L), which are `stride` elements apart.

    The steps of a warp differ by multiples of the stride, which all threads share.
    """
    first = base + gl.expand_dims((r & -GROUP_STEPS).to(gl.int64) * stride, 1) + c
    return first + gl.expand_dims((r & (GROUP_STEPS - 1)).to(gl.int64) * stride, 1)


@gluon.jit
def store_pairs(to, x, steps, stride):
    """Store a product of the steps of a tile, (L, L), masked and rounded."""
    r = gl.arange(0, L, gl.SliceLayout(1, PAIRS))
    at = gl.expand_dims(r * stride, 1) + gl.expand_dims(gl.arange(0, L, gl.SliceLayout(0, PAIRS)), 0)
    gl.store(to + at, gl.convert_layout(x, PAIRS), mask=gl.expand_dims(r < steps, 1))


@gluon.jit
def exponents_from_middle(g, sums):
    """Return c of the exponents g, (L, WIDTH), and the sums of g over the first and the second half of the tile.

    Args:
        g: The exponents of the gates, in ELEMENTS.
        sums: Shared memory for the sums of each warp, (GROUPS WIDTH).
    """
    by_group = gl.reshape(g, [GROUPS, GROUP_STEPS, WIDTH])
    sums.store(gl.reshape(gl.sum(by_group, 1), [GROUPS * WIDTH]))
    prefix = gl.reshape(gl.associative_scan(by_group, 1, add), [L, WIDTH])
    c = gl.convert_layout(prefix, ELEMENTS, assert_trivial=True)
    group = gl.expand_dims(gl.arange(0, L, gl.SliceLayout(1, ELEMENTS)) // GROUP_STEPS, 1)
    first = gl.zeros([WIDTH], gl.float32, gl.SliceLayout(0, ELEMENTS))
    second = first
    offset = gl.zeros([L, WIDTH], gl.float32, ELEMENTS)  # equal for the steps of a warp
    pipeline.barrier()
    for i in gl.static_range(GROUPS):
        total = sums.slice(i * WIDTH, WIDTH, 0).load(gl.SliceLayout(0, ELEMENTS))  # (WIDTH)
        if i < GROUPS // 2:
            offset -= gl.where(group <= i, gl.expand_dims(total, 0), 0.0)
            first += total
        else:
            offset += gl.where(group > i, gl.expand_dims(total, 0), 0.0)
            second += total
    return c + offset, first, second


@gluon.jit
def widened(x):
    """Return bfloat16 values x in float32.

    Assembly converts them, because the compiler would merge a plain conversion with the later ones of x, and keep its
    results, which take twice the registers of x, until the last of these.
    """
    asm: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return gl.inline_asm_elementwise(asm, "=r,=r,r", [x], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def store_norms(x, to, r, steps, stride):
    """Store the inverse norms of the steps x, (L, WIDTH), and return them, (L, 1).

    Args:
        x: The steps.
        to: Where the one of the first step is stored, and that of the next one `stride` elements after it.
        r: The numbers of the steps, (L).
        steps: How many steps there are.
        stride: The distance of steps in `to`.
    """
    x = widened(x)
    inverse = delta_tiles.inverse_norm(gl.sum(x * x, 1))  # (L)
    gl.store(to + r * stride, inverse, mask=r < steps)
    return gl.expand_dims(inverse, 1)


@gluon.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP", "first_row", "low_row"])
def channel_operands_kernel(
    Q, K, R, F, beta, cu, Qa, Ra, Kw, Kw_low, P, X, decays, needs_levels, q_norms, k_norms, A_log, Bias, scale,
    sequences, T, tiles_of_head, H, GROUP, first_row, low_row, qb, qt, qh, kb, kt, kh, rb, rt, rh,
    fb, ft, fh, fd, bb, bt, bh, gate_factor, rate_stride, bias_h, bias_c,
    DK: gl.constexpr, CORRECT: gl.constexpr, READ_KEY: gl.constexpr, SOLVE: gl.constexpr, SPLIT: gl.constexpr,
    IS_VARLEN: gl.constexpr, SLICED: gl.constexpr, BOUND: gl.constexpr, NORMALIZED: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_RATE: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Compute the operands of one tile of one head. The grid is (tiles * H).

    The arguments are those of `decay_operands`, for reads after the decay; M B, not X B, is written to X, with SOLVE.
    With NORMALIZED there are at most WIDTH channels, and this kernel writes q_norms and k_norms.
    """
    dtype: gl.constexpr = Qa.dtype.element_ty
    queries = gl.allocate_shared_memory(gl.float32, [L, WIDTH], OPERAND)
    reads = queries
    if SOLVE:
        reads = gl.allocate_shared_memory(gl.float32, [L, WIDTH], OPERAND)
    writes = gl.allocate_shared_memory(gl.float32, [L, WIDTH], OPERAND)
    sums = gl.allocate_shared_memory(gl.float32, [GROUPS * WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    betas = gl.allocate_shared_memory(gl.float32, [L], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    h = (gl.program_id(0) % H).to(gl.int64)
    s, first, length, start, _ = locate_chunk(cu, sequences, T, gl.program_id(0) // H, L, IS_VARLEN)
    tile = h * tiles_of_head + first_tile(first, s, T, L, IS_VARLEN) + start // L
    if start < length:
        hx = h // GROUP
        row = first * 0 if IS_VARLEN else s.to(gl.int64)
        t0 = (first + start if IS_VARLEN else start).to(gl.int64)
        steps = length - start
        r = gl.arange(0, L, gl.BlockedLayout([1], [32], [8], [0]))
        b = gl.load(beta + (row * bb + h * bh + t0 * bt) + r * bt, mask=r < steps, other=0.0)  # (L)
        betas.store(b.to(gl.float32))
        r = gl.arange(0, L, gl.SliceLayout(1, ELEMENTS))
        skipped = gl.to_tensor(first_row).to(gl.int64) if SLICED else 0  # rows before the slice
        if SLICED:
            row += skipped
        F += row * fb + h * fh + t0 * ft
        Q += row * qb + hx * qh + t0 * qt
        K += row * kb + hx * kh + t0 * kt
        R += row * rb + hx * rh + t0 * rt
        token = (first + start) * H + h
        of_keys = token + skipped * T * H if SLICED else token
        Qa += of_keys * DK
        Ra += of_keys * DK
        Kw += of_keys * DK
        of_low = token + gl.to_tensor(low_row).to(gl.int64) * T * H if SLICED else token
        Kw_low += of_low * DK
        decays += tile * DK
        worst = 0.0  # the largest exponent of a factor; above BOUND the tile needs levels
        S = gl.zeros([L, L], gl.float32, PRODUCT)  # P, [reading step, writing step]
        M = S
        for c0 in range(0, DK, WIDTH):
            channels = c0 + gl.arange(0, WIDTH, gl.SliceLayout(0, ELEMENTS))
            c = gl.expand_dims(channels, 0)
            inside = gl.expand_dims(r < steps, 1)
            if DK % WIDTH != 0:
                inside = inside & (c < DK)
            f = gl.load(step_addresses(F, c * fd, r, ft), mask=inside, other=0.0)  # (L, WIDTH)
            q = gl.load(step_addresses(Q, c, r, qt), mask=inside, other=0.0)  # (L, WIDTH)
            k = gl.load(step_addresses(K, c, r, kt), mask=inside, other=0.0)  # (L, WIDTH)
            read = k
            if READ_KEY:
                read = gl.load(step_addresses(R, c, r, rt), mask=inside, other=0.0)  # (L, WIDTH)
            if NORMALIZED:
                of_q = store_norms(q, q_norms + token, r, steps, H)  # (L, 1)
                of_k = store_norms(k, k_norms + token, r, steps, H)
            # (1) Exponents, and the decays from the start of the tile to its middle and from there to its end
            f = f.to(gl.float32)
            if ACTIVATION != "none":
                a, bias = load_activation(A_log, Bias, h, c, rate_stride, bias_h, bias_c, DK, HAS_RATE, HAS_BIAS)
                f = gl.where(inside, activated_gate(f + bias, a, gate_factor, ACTIVATION == "softplus", True), 0.0)
            g = base2_exponent(gl.where(f > HIGHEST, HIGHEST, f))
            e, before, after = exponents_from_middle(g, sums)
            worst = gl.maximum(worst, gl.max(gl.reshape(gl.abs(e), [L * WIDTH]), 0))
            to_middle = gl.exp2(before)  # (WIDTH)
            from_middle = gl.exp2(after)
            gl.store(decays + channels, to_middle * from_middle, mask=channels < DK)
            to_middle = gl.expand_dims(to_middle, 0)
            from_middle = gl.expand_dims(from_middle, 0)
            # (2) Reads: operands of products, and times the decay from the start of the tile to the middle
            up = gl.exp2(e)
            x = q.to(gl.float32) * up
            if NORMALIZED:
                x *= of_q
            queries.store(mma.nearest_tf32(x))
            gl.store(step_addresses(Qa, c, r, H * DK), (x * (to_middle * scale)).to(dtype), mask=inside)
            if CORRECT:
                x = read.to(gl.float32) * up
                if NORMALIZED:
                    x *= of_k
                if SOLVE:
                    reads.store(mma.nearest_tf32(x))
                gl.store(step_addresses(Ra, c, r, H * DK), (x * to_middle).to(dtype), mask=inside)
            # (3) Writes, likewise
            x = k.to(gl.float32) * gl.exp2(-e)
            if NORMALIZED:
                x *= of_k
            writes.store(mma.nearest_tf32(x))
            x *= from_middle * gl.expand_dims(betas.load(gl.SliceLayout(1, ELEMENTS)), 1)
            if SPLIT:
                high, low = mma.split_in_two(x, dtype)
                gl.store(step_addresses(Kw, c, r, H * DK), high, mask=inside)
                gl.store(step_addresses(Kw_low, c, r, H * DK), low, mask=inside)
            else:
                gl.store(step_addresses(Kw, c, r, H * DK), x.to(dtype), mask=inside)
            # (4) P and M: reads by writes
            fence_async_shared()
            pipeline.barrier()  # both warpgroups read what all warps have stored
            S = warpgroup_mma(queries, writes.permute((1, 0)), S, use_acc=c0 > 0, is_async=True)
            if SOLVE:
                M = warpgroup_mma(reads, writes.permute((1, 0)), M, use_acc=c0 > 0, is_async=True)
                S, M = warpgroup_mma_wait(0, deps=[S, M])
            else:
                S = warpgroup_mma_wait(0, deps=[S])
            pipeline.barrier()  # the next channels overwrite what both have read
        gl.store(needs_levels + tile, gl.where(worst <= BOUND, 0, 1).to(gl.int8))
        # (5) P B and M B
        i = gl.expand_dims(gl.arange(0, L, gl.SliceLayout(1, PRODUCT)), 1)
        j = gl.expand_dims(gl.arange(0, L, gl.SliceLayout(0, PRODUCT)), 0)
        b = gl.expand_dims(betas.load(gl.SliceLayout(0, PRODUCT)), 0)  # (1, L)
        x = gl.where(i >= j, S * (b * scale), 0.0).to(P.dtype.element_ty)
        store_pairs(P + token * L, x, steps, H * L)
        if SOLVE:
            high, low = mma.split_in_two(gl.where(i > j, M * b, 0.0), X.dtype.element_ty)
            low = gl.convert_layout(gl.permute(low, (1, 0)), PRODUCT)
            store_pairs(X + token * L, gl.where(i > j, high, low), steps, H * L)


def supports(ctx: ChannelContext) -> bool:
    """Return whether the kernel computes the operands of this call."""
    short = ctx.x.q.dtype == torch.bfloat16
    return short and ctx.base.K > LARGEST_NARROW_HEAD and not ctx.spec.read_before_decay


def launch(ctx: ChannelContext, arguments: tuple[Any, ...], X: Tensor | None, needs_levels: Tensor) -> None:
    """Launch `channel_operands_kernel`, and `solve_kernel` where M B is to be solved for X B.

    Args:
        ctx: The context of the call.
        arguments: The first arguments of `decay_operands`, without `per_program`.
        X: The output for X B, (B, T, H, L), or None where it is not computed.
        needs_levels: An output, (H, tiles) int8, 1 for tiles that need levels.
    """
    base = ctx.base
    base.launch(channel_operands_kernel, (base.tiles * base.H,),
        *arguments, *ctx.input_strides, *ctx.activation_numbers, DK=base.K, CORRECT=ctx.spec.correct,
        READ_KEY=ctx.x.read_key is not None, SOLVE=X is not None, SPLIT=ctx.split_keys, IS_VARLEN=base.packed,
        SLICED=ctx.first_row is not None, BOUND=ctx.tile_constants["BOUND"], num_warps=8,
        compilation={"maxnreg": REGISTERS}, **ctx.activation_constants,
    )  # fmt: skip
    if X is not None:
        delta_solve.launch_by_channel(ctx, X, needs_levels)
