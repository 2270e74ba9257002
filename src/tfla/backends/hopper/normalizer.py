"""The normaliser in walks for o: n, kept by the tensor cores, and the denominators of a tile.

n is the sum of three of low precision, rows of a right operand in shared memory, so that n . z is a product of eight
columns. Each consumer has half of n, as accumulators of which the first three columns add up to it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tfla.backends.hopper.mma import accumulator_layout, issue_mma, split_in_three
from tfla.backends.hopper.pipeline import STATE_WEIGHT, TILE_DECAY, barrier


@gluon.jit
def empty_n():
    """64 of n, zeros."""
    return gl.zeros([64, 8], gl.float32, accumulator_layout(8))


@gluon.jit
def accumulator_rows(first):
    """Which the accumulators of `first` and 63 more are of."""
    return first + gl.arange(0, 64, gl.SliceLayout(1, accumulator_layout(8)))


@gluon.jit
def load_initial_n(n):
    """Accumulators of 64 of n that are given."""
    column = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, accumulator_layout(8))), 0)
    return gl.where(column == 0, gl.expand_dims(n, 1), 0.0)


@gluon.jit
def store_shared_n(n, to, first: gl.constexpr):
    """64 of n, from `first` on, as columns of a right operand."""
    column = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, accumulator_layout(8))), 0)
    high, middle, low = split_in_three(n, to.dtype)
    columns = gl.where(column == 2, gl.expand_dims(low, 1), 0.0)
    columns = gl.where(column == 1, gl.expand_dims(middle, 1), columns)
    columns = gl.where(column == 0, gl.expand_dims(high, 1), columns)
    to.slice(first, 64, 1).permute((1, 0)).store(columns.to(to.dtype))


@gluon.jit
def issue_n_product(z, shared, n):
    """Starts z . n of the n-th tile."""
    return issue_mma(z, shared.n.index(n % 2).permute((1, 0)))


@gluon.jit
def update_n(N, x, first: gl.constexpr, shared, s, L: gl.constexpr):
    """Starts decay n + x w for 64 of n."""
    tile_decay = gl.expand_dims(
        shared.g.index(s).slice(TILE_DECAY * L, 1, 0).load(gl.SliceLayout(0, accumulator_layout(8))), 0
    )
    x_t = x.slice(first, 64, 1).permute((1, 0))
    return warpgroup_mma(x_t, shared.matrix.index(s).permute((1, 0)), N * tile_decay, is_async=True)


@gluon.jit
def store_shared_sums(P, shared, n, half: gl.constexpr):
    """Of rows of half of the n-th tile's P."""
    shared.sums.index(n % 2 * 2 + half).store(gl.sum(P, 1))


@gluon.jit
def store_shared_inverse(d, shared, s, n, half: gl.constexpr, L: gl.constexpr, SAVE_D: gl.constexpr):
    """1 / max(|d|, exp(-m)), where d is z . n, weighted, and both consumers' sums of P."""
    layout: gl.constexpr = gl.SliceLayout(1, accumulator_layout(8))
    floor = shared.floor.index(s)
    inverse = shared.inverse.index(half)
    parity = n % 2
    saved = shared.d.index(s)
    d = gl.sum(d, 1) * shared.g.index(s).slice(STATE_WEIGHT * L, L, 0).load(layout)
    d += shared.sums.index(2 * parity).load(layout) + shared.sums.index(2 * parity + 1).load(layout)
    inverse.store(1.0 / gl.maximum(gl.abs(d), floor.load(layout)))
    if SAVE_D and half == 0:
        saved.store(d)
    barrier()


@gluon.jit
def divide_by_denominators(out, shared, half: gl.constexpr):
    """By what `store_shared_inverse` has put."""
    return out * gl.expand_dims(shared.inverse.index(half).load(gl.SliceLayout(0, out.type.layout)), 0)
