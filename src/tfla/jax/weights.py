"""The weights of tiles from log-gates: equations (36)-(38), stabilized, with every exponent a sum of small numbers.

As in the chunkwise backend for PyTorch, sums of log-gates start at the first step of a tile, and each is a pair of a
rounded number and its rounding error, since closed gates make sums so large that in float32 the difference of two of
them would lose the gates themselves (docs/mathematics.md, "Rounding").
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax.tiles import Tiling

FINE = 2.0**17  # fractions of log-gates are summed in units of 1 / FINE

Pair = tuple[Array, Array]  # a number as the sum of a rounded one and a small one


def two_sum(a: Array, b: Array) -> Pair:
    """Return a + b exactly, as the rounded sum and its rounding error."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def running_sum(x: Array) -> Array:
    """Return the sums over each element of the last dim and all earlier ones.

    Tiles are short: XLA fuses the mask into one reduction, which compiles and runs faster than a parallel prefix sum.
    """
    return jnp.where(jnp.tri(x.shape[-1], dtype=bool), x[..., None, :], 0).sum(-1)


def cumulative_sum(x: Array) -> Pair:
    """Return the cumulative sums over the last dim of up to 128 log-gates, exact to about 2^-36.

    Sums of the whole numbers in them, and of the fractions in units of 1 / FINE, stay below 2^24. Float32 holds both
    exactly, whatever the order of additions; the sum of the remainders is tiny.
    """
    whole = jnp.round(x)
    fine = jnp.round((x - whole) * FINE) / FINE
    high, low = two_sum(running_sum(whole), running_sum(fine))
    return high, low + running_sum(x - whole - fine)


class TileGates(NamedTuple):
    """The log-weights of n tiles, each (n, R, heads, L): D_ij = exp(row_i + column_j) for i >= j, without scale.

    With a normalizer they are stabilized by the max states m.
    """

    row: Pair
    column: Pair
    m: Array | None  # (n, R, heads, L); None: no normalizer
    offset: Array | None  # (n, R, heads, L), added to the denominators; None: nothing is


def max_states(log_i: Array, log_f: Array, m: Array, tiling: Tiling) -> tuple[Array, Array]:
    """Return m_t = max(log_f_t + m_{t-1}, log_i_t), (1), and the m before each step, (n, R, heads, L).

    The rounding error is that of sums over a tile. Any m near the maximum serves, because it cancels out of results as
    long as all later computations use the same one.

    Args:
        log_i, log_f: (n, R, heads, L).
        m: (N, heads), the initial max states.
        tiling: the tiles.
    """
    total = running_sum(log_f)
    causal = jnp.tri(log_f.shape[-1], dtype=bool)
    # From m = -inf at the start of the tile.
    inside = total + jnp.where(causal, (log_i - total)[..., None, :], -jnp.inf).max(-1)
    # XLA's maximum over a dim may leave out NaN, which sums keep.
    inside = jnp.where(jnp.isnan(running_sum(log_i)), jnp.nan, inside)
    packing = tiling.packing

    def step(before: Array, tile: tuple[Array, ...]) -> tuple[Array, Array]:
        total_end, inside_end, *start = tile
        if start:
            before = jnp.where(start[1], m[start[0]][None], before)
        return jnp.maximum(inside_end, total_end + before), before

    ends = total[..., -1], inside[..., -1]
    if packing is None:
        _, before = jax.lax.scan(step, m, ends)
    else:
        rows = jnp.minimum(packing.sequence, m.shape[0] - 1)
        _, before = jax.lax.scan(step, m[:1], (*ends, rows, packing.starts))
    every = jnp.maximum(inside, total + before[..., None])
    return every, jnp.concatenate([before[..., None], every[..., :-1]], -1)


def tile_gates(log_i: Array, log_f: Array, m: Array | None, tiling: Tiling) -> TileGates:
    """Return the log-weights of tiles from log-gates (n, R, heads, L) and the initial max states m (N, heads).

    Max states are constants for derivatives, as that of a returned state is: they are any numbers by which results are
    scaled. The initial one has a derivative, since the initial state is C exp(m).
    """
    every = None
    if m is not None:
        constant = jax.lax.stop_gradient
        every, before = map(constant, max_states(constant(log_i), constant(log_f), constant(m), tiling))
        starts = _of_starts(m - constant(m), tiling, before.shape[:-1])
        before += jnp.pad(starts[..., None], [*[(0, 0)] * starts.ndim, (0, before.shape[-1] - 1)])
        log_i, log_f = stabilized(log_i, log_f, every, before)
    b, b_low = cumulative_sum(log_f)
    a, a_low = two_sum(log_i, -b)
    return TileGates((b, b_low), (a, a_low - b_low), every, None)


def _of_starts(x: Array, tiling: Tiling, shape: tuple[int, ...]) -> Array:
    """Return x (N, heads) of each sequence at its first tile and zeros at other ones, (n, R, heads)."""
    packing = tiling.packing
    if packing is None:
        # An update of a whole dim has indices that are constants, which `custom_partitioning` does not take.
        return jnp.pad(x[None], [(0, shape[0] - 1), (0, 0), (0, 0)])
    rows = jnp.minimum(packing.sequence, x.shape[0] - 1)
    return jnp.where(packing.starts[:, None], x[rows], 0.0)[:, None]


def stabilized(log_i: Array, log_f: Array, m: Array, before: Array) -> Pair:
    """Return the stabilized log-gates I = log_i - m_t and F = log_f + m_{t-1} - m_t, the exponents of (7) and (6)."""
    total, lost = two_sum(log_f, before)
    return log_i - m, (total - m) + lost


MAX_LIFT = 44.0  # a power of e by which a cotangent may be multiplied: float32 ends at exp(88)


class Weights(NamedTuple):
    """The weights of one tile in R rows, or their square roots where weights may be so large that they overflow."""

    D: Array  # (R, heads, L, L): of step j in output i, 0 above the diagonal
    inter: Array  # (R, heads, L): of the state before the tile in output i
    update: Array  # (R, heads, L): of step j in the state after the tile
    decay: Array  # (R, heads): of the state before the tile in the one after it
    log_inter: Array  # (R, heads, L), the exponents of the true `inter`
    floor: Array | None  # (R, heads, L): exp(-m), never 0; None: no normalizer
    offset: Array | None  # (R, heads, L), added to the denominator; None: nothing is
    roots: bool  # whether D, inter, update and decay are square roots

    def scale(self, x: Array, weight: Array) -> Array:
        """Return x times the weight, which has a dim for each of the first ones of x."""
        weight = weight.reshape(*weight.shape, *[1] * (x.ndim - weight.ndim))
        return x * weight * weight if self.roots else x * weight

    def denominator(self, d: Array) -> Array:
        """Return max(|d|, exp(-m)), plus the offset if there is one, from the stabilized d (R, heads, L)."""
        assert self.floor is not None
        bounded = jnp.maximum(jnp.abs(d), self.floor)
        return bounded if self.offset is None else bounded + self.offset

    def lift(self) -> Array:
        """Return the factors (R, heads, L) by which products of cotangents may be multiplied before they are weighted.

        A state that grows has tiny cotangents at its start, whose products would be below the range of float32.
        """
        return jnp.exp(jnp.clip(self.log_inter * 0.5, 0.0, MAX_LIFT))

    def scale_root(self, x: Array) -> Array:
        """Return x (R, heads, dqk, dhv) times the square root of the decay."""
        return x * jnp.exp(self.log_inter[..., -1] * 0.5)[..., None, None]


def weights(gates: TileGates, roots: bool) -> Weights:
    """Return the weights of one tile, whose log-weights are (R, heads, L)."""
    (b, b_low), (a, a_low) = gates.row, gates.column
    part = 0.5 if roots else 1.0
    D = (b[..., :, None] + a[..., None, :]) + (b_low[..., :, None] + a_low[..., None, :])
    causal = jnp.tri(b.shape[-1], dtype=bool)
    update = (b[..., -1:] + a) + (b_low[..., -1:] + a_low)
    inter = b + b_low
    floor = None if gates.m is None else jnp.maximum(jnp.exp(-gates.m), jnp.finfo(b.dtype).tiny)
    return Weights(
        jnp.exp(jnp.where(causal, D, -jnp.inf) * part), jnp.exp(inter * part), jnp.exp(update * part),
        jnp.exp(inter[..., -1] * part), inter, floor, gates.offset, roots,
    )  # fmt: skip
