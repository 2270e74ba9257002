"""The normalizer on tensor cores: the state n, and the denominators d of each tile.

    d = a * (z n) + P 1                  (T3)
    h = num / max(|d|, exp(-m))          (T4)
    n <- g n + x^T w                     (T6)

z n and x^T w are products with 8 columns, the fewest that wgmma has. n is a sum of three 16-bit numbers in the first
three of the columns, because delta of (T7) jumps where |d| passes exp(-m). Each consumer updates half of n, in its
accumulators, and shares it through shared memory, with one buffer for this tile and one for the next.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from tfla.backends.hopper.mma import accumulator_layout, issue_mma, split_in_three
from tfla.backends.hopper.pipeline import STATE_WEIGHT, TILE_DECAY, barrier


@gluon.jit
def empty_n():
    """Return accumulators (64, 8) for 64 elements of n, zeros."""
    return gl.zeros([64, 8], gl.float32, accumulator_layout(8))


@gluon.jit
def accumulator_rows(first):
    """Return indices `first` to `first + 63` of n in the layout of its accumulators, (64)."""
    return first + gl.arange(0, 64, gl.SliceLayout(1, accumulator_layout(8)))


@gluon.jit
def load_initial_n(n):
    """Return accumulators (64, 8) whose columns add up to `n`, (64)."""
    column = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, accumulator_layout(8))), 0)
    return gl.where(column == 0, gl.expand_dims(n, 1), 0.0)


@gluon.jit
def store_shared_n(n, to, first: gl.constexpr):
    """Store 64 elements of n as columns of a right operand, a sum of three 16-bit numbers.

    Args:
        n: The elements, (64), float32.
        to: The operand in shared memory, (8, dqk).
        first: Index of the first element.
    """
    column = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, accumulator_layout(8))), 0)
    high, middle, low = split_in_three(n, to.dtype)
    columns = gl.where(column == 2, gl.expand_dims(low, 1), 0.0)
    columns = gl.where(column == 1, gl.expand_dims(middle, 1), columns)
    columns = gl.where(column == 0, gl.expand_dims(high, 1), columns)
    to.slice(first, 64, 1).permute((1, 0)).store(columns.to(to.dtype))


@gluon.jit
def exchange_initial_n(shared, phase):
    """Wait until both consumers have stored their halves of n at the start of a work tile; return the next phase.

    Args:
        shared: Shared memory of the kernel.
        phase: Phase of the barrier `initial_n_ready`.
    """
    fence_async_shared()
    barrier()
    mbarrier.arrive(shared.initial_n_ready, count=1)
    mbarrier.wait(shared.initial_n_ready, phase)
    return phase ^ 1


@gluon.jit
def issue_n_product(z, shared, n):
    """Start z n for tile n: (L, dqk) @ (dqk, 8)."""
    return issue_mma(z, shared.n.index(n % 2).permute((1, 0)))


@gluon.jit
def update_n(N, x, first: gl.constexpr, shared, s, L: gl.constexpr):
    """Start n <- g n + x^T w for 64 elements of n: (64, L) @ (L, 8), (T6).

    Args:
        N: Accumulators of n, (64, 8).
        x: A tile (L, dqk) in shared memory.
        first: Index of the first element of n.
        shared: Shared memory of the kernel.
        s: Stage of the tile.
        L: Steps of a tile.
    """
    tile_decay = gl.expand_dims(
        shared.g.index(s).slice(TILE_DECAY * L, 1, 0).load(gl.SliceLayout(0, accumulator_layout(8))), 0
    )
    x_t = x.slice(first, 64, 1).permute((1, 0))
    return warpgroup_mma(x_t, shared.matrix.index(s).permute((1, 0)), N * tile_decay, is_async=True)


@gluon.jit
def store_shared_sums(P, shared, n, half: gl.constexpr):
    """Store the row sums of one half of the columns of P of tile n, (L)."""
    shared.sums.index(n % 2 * 2 + half).store(gl.sum(P, 1))


@gluon.jit
def store_shared_inverse(d, shared, s, n, half: gl.constexpr, L: gl.constexpr, SAVE_D: gl.constexpr):
    """Store 1 / max(|d|, exp(-m)) of a tile for one consumer, (L), (T3) and (T4); with SAVE_D also d.

    Args:
        d: z n as three columns, (L, 8); the other columns are zero.
        shared: Shared memory of the kernel.
        s: Stage of the tile.
        n: Number of the tile.
        half: Which consumer this is.
        L: Steps of a tile.
        SAVE_D: Whether the first consumer leaves d for the store warp.
    """
    layout: gl.constexpr = gl.SliceLayout(1, accumulator_layout(8))
    floor = shared.floor.index(s)  # (L), exp(-m)
    inverse = shared.inverse.index(half)
    parity = n % 2
    saved = shared.d.index(s)
    d = gl.sum(d, 1) * shared.g.index(s).slice(STATE_WEIGHT * L, L, 0).load(layout)  # (L)
    d += shared.sums.index(2 * parity).load(layout) + shared.sums.index(2 * parity + 1).load(layout)
    inverse.store(1.0 / gl.maximum(gl.abs(d), floor.load(layout)))
    if SAVE_D and half == 0:
        saved.store(d)
    barrier()


@gluon.jit
def divide_by_denominators(out, shared, half: gl.constexpr):
    """Return the transposed output `out`, (dhv, L), times the stored 1 / max(|d|, exp(-m)), (T4)."""
    return out * gl.expand_dims(shared.inverse.index(half).load(gl.SliceLayout(0, out.type.layout)), 0)
