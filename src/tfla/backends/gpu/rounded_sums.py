"""The sums for what later tiles read of earlier ones where inputs have 16 bits, which rounds them more than float32.

With the notation of :mod:`.gate_gradients`, X = <C, dC> is known before and after some tiles, where the states are
stored. In between it is followed tile by tile in both directions, by (B7):

    across = X before the tile - what the tile reads of earlier tiles = X after it - what later tiles read of the tile

Each direction sums rounding errors up from where it starts, and loses them where gates forget: the two are estimates
of the same number, whose errors differ. Their mean has weights by the variances of these errors.
"""

import triton
import triton.language as tl

from tfla.backends.gpu.state_passing import rounded_product

# The most that is read across a tile, relative to its decay and the root of the sum of squares of what its steps read
# and write: an initial state or the cotangent of a final one can be larger than those that steps make.
LARGEST_READ = tl.constexpr(2.0**6)
# The variance of X where it is not known, over the sum of squares of all that is read and written.
UNKNOWN = tl.constexpr(2.0**20)


@triton.jit
def trust_differences(differences, squares, decay, LOW: tl.constexpr):
    """Return factors for what seems to be read across tiles, which are below 1 where 16-bit rounding is most of it.

    They are those of least squared error. The square of a difference is known from the difference itself, within what
    the decay of the tile allows.

    Args:
        differences: what later tiles seem to read of earlier ones, (HEADS, TILES) float64.
        squares: the sum of the squares of the terms of each difference, of the same shape.
        decay: the decays of the tiles, squared, of the same shape.
        LOW: a bound of the rounding of a sum, relative to the root of its terms' sum of squares.
    """
    least = decay * squares
    signal = tl.minimum(tl.maximum(differences * differences, least), least * (LARGEST_READ * LARGEST_READ))
    total = signal + squares * (LOW * LOW)
    return tl.where(total > 0.0, signal / tl.where(total > 0.0, total, 1.0), 0.0)


@triton.jit
def _follow_both(a, b, c, d, e, f):
    """Return x -> a x + b and y -> a y + c, followed by x -> d x + e and y -> d y + f, in the same form.

    Products are rounded, so that all threads that have a result have the same bits.
    """
    return a * d, rounded_product(b, d) + e, rounded_product(c, d) + f


@triton.jit
def follow_tiles(start, variance, taken, added, decay, LOW: tl.constexpr, REVERSE: tl.constexpr):
    """Return `across` of each tile by one direction, its variance over LOW squared, and X after the last tile.

    Args:
        start: X before the first tile in this direction, (HEADS, 1) float64.
        variance: the variance of that over LOW squared, (HEADS, 1) float64.
        taken: what a tile takes of X before `across`, by steps, (HEADS, TILES, L) float64.
        added: what it adds after that, of the same shape.
        decay: the decays of the tiles, squared, (HEADS, TILES) float64.
        LOW: a bound of the rounding of a sum, relative to the root of its terms' sum of squares.
        REVERSE: Whether the direction is that against time.
    """
    take = tl.sum(taken, 2)
    add = tl.sum(added, 2)
    take_squares = tl.sum(rounded_product(taken, taken), 2)
    add_squares = tl.sum(rounded_product(added, added), 2)
    squares = start * start + tl.cumsum(take_squares + add_squares, 1, reverse=REVERSE)
    differences = start + tl.cumsum(add - take, 1, reverse=REVERSE) - add
    kept = trust_differences(differences, squares, decay, LOW)
    factor, x, v = tl.associative_scan(
        (kept, add - kept * take, add_squares + kept * take_squares), 1, _follow_both, reverse=REVERSE
    )
    after = rounded_product(factor, start) + x
    tile = tl.arange(0, taken.shape[1])[None, :]
    last = tile == (0 if REVERSE else taken.shape[1] - 1)
    end = tl.sum(tl.where(last, after, 0.0), 1)[:, None]
    return after - add, rounded_product(factor, variance) + v - add_squares, end


@triton.jit
def pass_rounded_tiles(start, end, reads, writes, decay, is_known, LOW: tl.constexpr, READ_ERROR: tl.constexpr):
    """Return for each tile what later tiles read of earlier ones, (HEADS, TILES) float64.

    Args:
        start: X before the first tile, (HEADS, 1) float64.
        end: X after the last tile, of the same shape.
        reads: what each step reads of earlier tiles, (HEADS, TILES, L) float64.
        writes: what later tiles read of each step, of the same shape.
        decay: the decays of the tiles, squared, (HEADS, TILES) float64.
        is_known: whether `end` is known.
        LOW: a bound of the rounding of a sum, relative to the root of its terms' sum of squares.
        READ_ERROR: the variance of what all later tiles read, by errors of the state that they have in common, over
            (LOW X) squared.
    """
    by_writes, variance, last = follow_tiles(start, start * start, reads, writes, decay, LOW, False)
    squares = tl.sum(tl.sum(reads * reads + writes * writes, 2), 1)[:, None]
    end = tl.where(is_known, end, last)
    end_variance = tl.where(is_known, end * end, (start * start + squares) * UNKNOWN)
    by_reads, other, _first = follow_tiles(end, end_variance, writes, reads, decay, LOW, True)
    x = by_writes + tl.sum(reads, 2)
    other += READ_ERROR * (x * x)
    total = variance + other
    return by_writes + tl.where(total > 0.0, variance / tl.where(total > 0.0, total, 1.0), 0.0) * (by_reads - by_writes)
