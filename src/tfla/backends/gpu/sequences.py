"""The bounds of packed sequences: a kernel that clamps offsets and clears results outside of all sequences.

The host does not read the offsets, because it would have to wait for the GPU, so it cannot refuse malformed ones. The
offsets that all other kernels read are therefore the caller's, clamped to [0, T] and each at least as large as the one
before it. Sequences then neither leave the tensors nor overlap, and the steps outside of all of them are those before
the first offset and those from the last one on.

Where the states of the sequences are rows of a pool, two lists follow the bounded offsets, the rows of the initial and
those of the final states: kernels that read the offsets then find their states without a further argument. The same
kernel copies the rows of n and m, see :mod:`.normalizer_rows`.
"""

import dataclasses
import math

import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.base import Inputs
from tfla.backends.gpu.config import processors
from tfla.backends.gpu.context import LaunchContext
from tfla.backends.gpu.normalizer_rows import copy_normalizers

MAX_TENSORS = 5  # tensors that one launch clears
STEPS_PER_PROGRAM = 128
BLOCK = 1024  # elements that a program writes at once


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _clear(x, width, first, last, T, BLOCK: tl.constexpr):
    """Store zeros to rows [0, first) and [last, T) of x (T, width); the programs share them."""
    r = tl.arange(0, BLOCK)
    own = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    zeros = tl.zeros([BLOCK], x.dtype.element_ty)
    for e in range(own, first * width, step):
        tl.store(x + e + r, zeros, mask=e + r < first * width)
    for e in range(last * width + own, T * width, step):
        tl.store(x + e + r, zeros, mask=e + r < T * width)


@triton.jit
def _store_places(places, rows, size, is_row, PITCH: tl.constexpr):
    """Store where in a pool of so many rows some rows are, in states: -1 for row -1, -2 for one that is not there."""
    row = tl.load(rows, mask=is_row, other=-1).to(tl.int64)
    place = tl.where((row >= 0) & (row < size), row * PITCH, tl.where(row == -1, -1, -2))
    tl.store(places, place.to(places.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["entries", "T", "w0", "w1", "w2", "w3", "w4", "H", "n_pitch", "m_pitch"])
def bound_sequences(
    cu, bounds, x0, x1, x2, x3, x4, n, m, n_copy, m_copy, entries, T, w0, w1, w2, w3, w4, H, n_pitch, m_pitch,
    TENSORS: tl.constexpr, BOUND: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr, ROW_PITCH: tl.constexpr,
    FINAL_PITCH: tl.constexpr, DK: tl.constexpr, POOL_DK: tl.constexpr,
):  # fmt: skip
    """Write the bounded offsets of cu (entries,) to `bounds` and clear steps of no sequence in x0 to x4.

    Of x0 (T, w0) to x4 (T, w4), dense, the first TENSORS are used. Without BOUND, cu has been bounded already.

    With ROW_PITCH, x4 (entries - 1,) has the rows of a pool of w4 rows, which are ROW_PITCH rows apart in memory. After
    the offsets `bounds` gets ROW_PITCH times each row, -1 for row -1, and -2 for a row that the pool does not have; and
    after these the same of the rows of final states, from x3, w3 and FINAL_PITCH. With DK, n and m of the rows are
    copied from the pool, which has H heads, see `copy_normalizers`.
    """
    first = tl.minimum(tl.maximum(tl.load(cu).to(tl.int64), 0), T)
    last = first
    for e in range(0, entries, ENTRIES):
        at = e + tl.arange(0, ENTRIES)
        offset = tl.load(cu + at, mask=at < entries, other=0).to(tl.int64)
        offset = tl.minimum(tl.maximum(offset, 0), T)
        if BOUND:
            bounded = tl.maximum(tl.associative_scan(offset, 0, _larger), last)
            tl.store(bounds + at, bounded.to(bounds.dtype.element_ty), mask=(at < entries) & (tl.program_id(0) == 0))
        if ROW_PITCH > 0:
            is_row = (at < entries - 1) & (tl.program_id(0) == 0)
            _store_places(bounds + entries + at, x4 + at, w4, is_row, ROW_PITCH)
            _store_places(bounds + 2 * entries - 1 + at, x3 + at, w3, is_row, FINAL_PITCH)
        last = tl.maximum(last, tl.max(offset, 0))
    if TENSORS > 0:
        _clear(x0, w0, first, last, T, BLOCK)
    if TENSORS > 1:
        _clear(x1, w1, first, last, T, BLOCK)
    if TENSORS > 2:
        _clear(x2, w2, first, last, T, BLOCK)
    if TENSORS > 3:
        _clear(x3, w3, first, last, T, BLOCK)
    if TENSORS > 4:
        _clear(x4, w4, first, last, T, BLOCK)
    if DK > 0:
        copy_normalizers(n, m, x4, w4, n_copy, m_copy, entries - 1, H, n_pitch, m_pitch, DK, POOL_DK, BLOCK)


def bound(ctx: LaunchContext, *results: Tensor) -> LaunchContext:
    """Return the context with bounded offsets of packed sequences, and clear steps of no sequence in the results.

    Where the context has rows of a pool, that which is returned has copies of n and m of these rows.

    Args:
        ctx: The context of a call, with the offsets as given.
        results: At most MAX_TENSORS dense tensors, (1, T, ...), that the call is going to write; with rows two fewer.
    """
    if not ctx.packed:
        return ctx
    x, entries = ctx.x, ctx.x.sequences + 1
    bounds = ctx.new(entries if ctx.rows is None else 3 * entries - 2, dtype=ctx.cu_seqlens.dtype)
    if ctx.rows is not None and x.n is not None:
        x = x._replace(n=ctx.new(x.sequences, ctx.H, ctx.K), m=ctx.new(x.sequences, ctx.H))
    _launch(ctx, bounds, results, x)
    return dataclasses.replace(ctx, cu_seqlens=bounds, x=x)


def clear(ctx: LaunchContext, *results: Tensor) -> None:
    """Clear steps of no sequence in further results, (1, T, ...), after `bound`."""
    if ctx.packed:
        _launch(ctx, None, results, ctx.x)


def _launch(ctx: LaunchContext, bounds: Tensor | None, results: tuple[Tensor, ...], x: Inputs) -> None:
    """Launch `bound_sequences`, without `bounds` only to clear.

    Unless x is ctx.x, rows of n and m of ctx.x, which are those of a pool, are copied to n and m of x.
    """
    cu, unused, programs = ctx.cu_seqlens, MAX_TENSORS - len(results), ctx.T // STEPS_PER_PROGRAM
    tensors, widths = [*results, *[cu] * unused], [*(math.prod(t.shape[2:]) for t in results), *[0] * unused]
    pitches = [0, 0]
    if bounds is not None and ctx.rows is not None and ctx.x.C is not None:
        pools = (ctx.final_rows or (ctx.x.C, ctx.rows))[:2], (ctx.x.C, ctx.rows)
        pitches = [pool.stride(0) // pool[0].numel() for pool, _ in pools]
        tensors[-2:], widths[-2:] = [rows for _, rows in pools], [pool.shape[0] for pool, _ in pools]
    normalizers = [t for t in (ctx.x.n, ctx.x.m, x.n, x.m) if t is not None and x is not ctx.x]
    if normalizers:
        programs = max(programs, normalizers[2].numel() // BLOCK)
    strides = [t.stride(0) for t in normalizers[:2]] or [0, 0]
    ctx.launch(bound_sequences, (max(1, min(processors(cu.device), programs)),),
        cu, cu if bounds is None else bounds, *tensors, *(normalizers or [cu] * 4), ctx.x.sequences + 1, ctx.T,
        *widths, ctx.H, *strides, TENSORS=len(results), BOUND=bounds is not None, ENTRIES=512, BLOCK=BLOCK,
        ROW_PITCH=pitches[1], FINAL_PITCH=pitches[0], DK=ctx.K if normalizers else 0,
        POOL_DK=ctx.pool_dims[0] if normalizers else 0, num_warps=4,
    )  # fmt: skip
