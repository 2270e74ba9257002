"""The decays of one tile with a gate for each step and key channel, as what kernels load and multiply by.

With exponents g of the gates in base 2, a step i reads the write of step j through exp2(g_{j+1} + ... + g_i), for each
channel. So that matrix products can compute what steps of a tile read of each other, this factor is split in two:

    pairs of a block   exp2(c_i) exp2(-c_j), where c_i sums the exponents from the middle of the block to step i and is
                       negative before it. Both factors are in the range of the products if every |c_i| is bounded.
    all others         by levels of s = L / 2, L / 4, ... steps: a pair of steps in two adjacent blocks of s steps, an
                       even and an odd one, has the decays from the write to the end of its block, and those from the
                       start of the block of the read. With gates of at most 1 no factor exceeds 1.

The block is the whole tile if every |c_i| is at most BOUND: such a tile needs no levels. In all other tiles, which need
levels, the block is 16 steps if these are bounded, else one step, which leaves all pairs to the levels. Kernels are
launched twice: without LEVELED for tiles that need no levels, and with it for the others. `needs_levels` has a flag for
each tile.

All sums of exponents are products with matrices of 0, 1 and -1 and have terms of one sign: large exponents, of closed
gates, cost no digits of others.

A step reads the state after step e: e is the step itself, or for reads before the decay the step before it.
"""

import triton
import triton.language as tl

from tfla.backends.gpu.gate_kernels import base2_exponent, clamp_gate

TILE_FLAGS = tl.constexpr(64)  # the flags of tiles that a program reads at once


@triton.jit
def exponents(f, inside):
    """Return the exponents in base 2 of log-gates in float32, 0 where not `inside`."""
    return tl.where(inside, base2_exponent(clamp_gate(f)), 0.0)


@triton.jit
def load_exponents(at, inside):
    """Load log-gates from the addresses `at` and return their exponents in base 2, 0 where not `inside`."""
    return exponents(tl.load(at, inside, 0.0).to(tl.float32), inside)


@triton.jit
def add_sums(total, weights, x, PRECISION: tl.constexpr):
    """Return total + weights x, (L, D): sums over the rows of x (L, D) with weights (L, L), which are 0, 1 and -1.

    With PRECISION "bf16x2" x is the sum of two bfloat16 numbers, which hold 16 bits of it.
    """
    if PRECISION == "bf16x2":
        w = weights.to(tl.bfloat16)
        # Integers round x: one instruction converts two floats, but only if nothing else reads the result.
        high = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
        return tl.dot(w, (x - high).to(tl.bfloat16), tl.dot(w, high.to(tl.bfloat16), total))
    else:
        return tl.dot(weights, x, total, input_precision=PRECISION)


@triton.jit
def add_sums_to(total, x, e, PRECISION: tl.constexpr):
    """Return total plus the sums of x, (L, D), from the start of the tile to each step of e."""
    j = tl.arange(0, x.shape[0])[None, :]
    return add_sums(total, tl.where(j <= e[:, None], 1.0, 0.0), x, PRECISION)


@triton.jit
def add_sums_after(total, x, e, PRECISION: tl.constexpr):
    """Return total plus the sums of x, (L, D), from after each step of e to the end of the tile."""
    j = tl.arange(0, x.shape[0])[None, :]
    return add_sums(total, tl.where(j > e[:, None], 1.0, 0.0), x, PRECISION)


@triton.jit
def decay_to(g, e, PRECISION: tl.constexpr):
    """Return the decays from the start of the tile to each step of e, from the exponents g, (L, D)."""
    return tl.exp2(add_sums_to(tl.zeros_like(g), g, e, PRECISION))


@triton.jit
def decay_after(g, e, PRECISION: tl.constexpr):
    """Return the decays from after each step of e to the end of the tile, from the exponents g, (L, D)."""
    return tl.exp2(add_sums_after(tl.zeros_like(g), g, e, PRECISION))


@triton.jit
def half_decays(g):
    """Return the decays of the first and of the second half of the tile, (D) each, from the exponents g, (L, D)."""
    L: tl.constexpr = g.shape[0]
    halves = tl.exp2(tl.sum(tl.reshape(g, [2, L // 2, g.shape[1]]), 1))  # (2, D)
    return tl.split(tl.trans(halves))


@triton.jit
def sums_from_middle(g, e, shift, PRECISION: tl.constexpr):
    """Return c of the module docstring for the steps e, in blocks of 1 << shift steps, and 0 where e is -1."""
    i = e[:, None]
    j = tl.arange(0, g.shape[0])[None, :]
    middle = ((tl.maximum(i, 0) >> shift) << shift) + (((1 << shift) - 1) >> 1)
    weights = tl.where((j > middle) & (j <= i), 1.0, tl.where((j <= middle) & (j > i) & (i >= 0), -1.0, 0.0))
    return add_sums(tl.zeros_like(g), weights, g, PRECISION)


@triton.jit
def block_exponents(g, e, BOUND: tl.constexpr, LEVELS: tl.constexpr, LEVELED: tl.constexpr, PRECISION: tl.constexpr):
    """Return c of the module docstring for the steps e (L, D), log2 of the steps of a block, and the largest |c|.

    The block is the tile; with LEVELED it is 16 steps if the largest |c| is at most BOUND, else one step, whose c is 0.
    """
    SHIFT: tl.constexpr = 4 if LEVELED else LEVELS
    c = sums_from_middle(g, e, SHIFT, PRECISION)
    top = tl.max(tl.abs(c))
    shift = tl.where(top <= BOUND, SHIFT, 0) if LEVELED else SHIFT
    if LEVELED:
        c = tl.where(shift == 0, 0.0, c)
    return c, shift, top


@triton.jit
def takes_tile(flag, exists, LEVELED: tl.constexpr):
    """Return whether a program computes a tile: it exists, and with LEVELED its flag, at this address, is set."""
    if LEVELED:
        return tl.load(flag, exists, 0) != 0
    else:
        return exists


@triton.jit
def tiles_of_program(needs_levels, per_program, tiles, LEVELED: tl.constexpr, PARTS: tl.constexpr):
    """Return the first tile of a program, and how many it looks at; PARTS programs share these tiles.

    Without LEVELED a program has one tile. With it a program has `per_program` of all `tiles`, and looks at none if no
    flag of theirs is set.
    """
    number = tl.program_id(0) // PARTS
    count = 1
    if LEVELED:
        number *= per_program
        n = tl.arange(0, TILE_FLAGS)
        count = tl.minimum(per_program, tiles - number)
        flags = tl.load(needs_levels + number + n, n < count, 0)  # (TILE_FLAGS)
        count = tl.where(tl.max(flags.to(tl.int32), 0) != 0, count, 0)
    return number, count


@triton.jit
def head_and_chunk(number, tiles_of_head, H, LEVELED: tl.constexpr):
    """Return the head and the chunk of tile `number`; with LEVELED the order is (H, tiles), else (tiles, H)."""
    if LEVELED:
        return (number // tiles_of_head).to(tl.int64), number % tiles_of_head
    else:
        return (number % H).to(tl.int64), number // H


@triton.jit
def in_odd_block(e, level, L: tl.constexpr, LEVELS: tl.constexpr):
    """Return which steps of e lie in odd blocks of L >> (level + 1) steps; LEVELS is log2(L)."""
    return ((e >> (LEVELS - 1 - level)) & 1) == 1


@triton.jit
def level_factors(g, e, level, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Return the factors of one level, (L, D): of reads for steps e in odd blocks, of writes for those in even ones."""
    L: tl.constexpr = g.shape[0]
    i = e[:, None]
    j = tl.arange(0, L)[None, :]
    shift = LEVELS - 1 - level
    start = (i >> shift) << shift
    odd = in_odd_block(i, level, L, LEVELS)
    inside = tl.where(odd, (j >= start) & (j <= i), (j > i) & (j < start + (1 << shift)))
    return tl.exp2(add_sums(tl.zeros_like(g), tl.where(inside, 1.0, 0.0), g, PRECISION))


@triton.jit
def level_pairs(e, level, L: tl.constexpr, LEVELS: tl.constexpr):
    """Return for which pairs of steps (e, j) the blocks of a level are the two halves of one larger block, (L, L)."""
    shift = LEVELS - level
    return (e[:, None] >> shift) == (tl.arange(0, L)[None, :] >> shift)
