"""The weights of tiles from log-gates: equations (36)-(38), stabilized, with every exponent a sum of small numbers.

Everything has the dtype of states, because some devices, such as Apple's GPUs, have no float64. A sum of closed gates
is so large that in float32 the difference of two such sums would lose the gates themselves. Each sum is therefore a
pair of a rounded number and its rounding error (double-float arithmetic). Sums start at the first step of a tile, so
that rounding errors do not add up from tile to tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from tfla.backends.chunkwise.workspace import Workspace

FACTORS = (
    -40.0
)  # the least log-weight of a factored tile, so that a product of three weights is in the range of float32
GROWING_FACTORS = 20.0  # the largest one, so that a product of two with the reciprocal of the least is too
GROWTH = 60.0  # the largest log-weight in a tile: float32 ends at exp(88), and q, k and v need part of its range
FINE = 2.0**17  # fractions of log-gates are summed in units of 1 / FINE

Pair = tuple[Tensor, Tensor]  # a number as the sum of a rounded one and a small one


def two_sum(a: Tensor, b: Tensor) -> Pair:
    """Return a + b exactly, as the rounded sum and its rounding error."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def cumulative_sum(x: Tensor) -> Pair:
    """Return the cumulative sums over the last dim of up to 128 log-gates, exact to about 2^-36.

    Sums of the whole numbers in them stay below 2^24, and of fractions in units of 1 / FINE below 2^24 units. Float32
    holds both exactly, whatever the order of additions; the sum of the remainders is tiny.
    """
    whole = x.round()
    fine = ((x - whole) * FINE).round() / FINE
    of_whole, of_fine, of_rest = torch.stack([whole, fine, x - whole - fine]).cumsum(-1).unbind()
    high, low = two_sum(of_whole, of_fine)
    return high, low + of_rest


def max_state(log_i: Tensor, log_f: Tensor, m: Tensor) -> Tensor:
    """Return m_t = max(log_f_t + m_{t-1}, log_i_t), (1), for all steps at once: (N, T) from the initial m (N,).

    The rounding error is that of sums over 64 steps. Any m near the maximum serves, because it cancels out of results
    as long as all later computations use the same one.
    """
    T = log_i.shape[-1]
    log_i, log_f = (F.pad(x, (0, -T % 64)).unflatten(-1, (-1, 64)) for x in (log_i, log_f))
    total = log_f.cumsum(-1)
    inside = total + (log_i - total).cummax(-1).values  # from m = -inf at the start of these 64 steps
    # The same between groups of 64 steps, by doubling: `starts` is m from the 1, 2, 4, ... groups before,
    # `grown` the sums of log_f over them.
    starts, grown, step = torch.cat([m[:, None], inside[:, :-1, -1]], -1), F.pad(total[:, :-1, -1], (1, 0)), 1
    while step < starts.shape[-1]:
        later = torch.maximum(starts[:, step:], grown[:, step:] + starts[:, :-step])
        starts = torch.cat([starts[:, :step], later], -1)
        grown = torch.cat([grown[:, :step], grown[:, step:] + grown[:, :-step]], -1)
        step *= 2
    return torch.maximum(inside, total + starts[..., None]).flatten(1)[:, :T]


def stabilized(log_i: Tensor, log_f: Tensor, m: Tensor, m_start: Tensor) -> Pair:
    """Return the stabilized log-gates I = log_i - m_t and F = log_f + m_{t-1} - m_t, the exponents of (7) and (6).

    Both are at most about 0. All are (N, T), and the initial max state m_start is (N,).
    """
    total, lost = two_sum(log_f, torch.cat([m_start[:, None], m[:, :-1]], -1))
    return log_i - m, (total - m) + lost


def steps_of_a_tile(log_i: Tensor, log_f: Tensor, most: int) -> int:
    """Return how many steps tiles may have so that no weight in one exceeds exp(GROWTH), from log-gates (N, T).

    Tiles of one step need no such bound: their weights are exp(log_i) and exp(log_f), as in the recurrence.
    """
    rises, first = log_f.clamp(min=0.0), log_i.amax().clamp(min=0.0)
    while most > 1:
        tiles = F.pad(rises, (0, -rises.shape[-1] % most)).unflatten(-1, (-1, most))
        if not bool(tiles.sum(-1).amax() + first > GROWTH):
            break
        most = max(1, most // 4)
    return most


class TileGates(NamedTuple):
    """The weights of n successive tiles of L steps for N heads.

    A weight inside a tile, scale D_ij = scale exp(row_i + column_j) for i >= j, equals inter_i update_j / decay: the
    gates from step j to the end of the tile, times those from its start to step i, divided by those of the whole tile.
    In `factored` tiles none of the three factors is too small or too large, so that q and k are multiplied by the
    weights. If all tiles are factored, D is not computed.
    """

    row: Pair  # (n, N, L), without scale
    column: Pair  # (n, N, L)
    inter: Tensor  # (n, N, L, 1): weight of the state before the tile in row i, times scale
    update: Tensor  # (n, N, L, 1): weight of step j in the state after the tile, exp(a_j)
    decay: Tensor  # (n, N, 1, 1): weight of the state before each tile in the one after it
    floor: Tensor  # (n, N, L, 1): exp(-m), never 0; empty without a normalizer
    scale: float
    factored: Tensor  # (n, N, 1, 1), bool
    all_factored: bool

    def inside(self, work: Workspace) -> Tensor:
        """Return the factor of the products q k^T inside tiles, (n, N, L or 1, L or 1); it is finite everywhere."""
        if self.all_factored:
            return self.decay.reciprocal()
        shape = (*self.row[0].shape, self.row[0].shape[-1])
        D, low = work("D", *shape), work("D low", *shape)
        for row, column, out in zip(self.row, self.column, (D, low), strict=True):
            torch.add(row.unsqueeze(-1), column.unsqueeze(-2), out=out)
        D.add_(low).exp_().mul_(self.scale).tril_()
        return torch.where(self.factored, self.decay.reciprocal(), D)

    def shares(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Split `inter` or `update` into its values in factored tiles and those in others, with 1 elsewhere."""
        one = weight.new_ones(())
        return torch.where(self.factored, weight, one), torch.where(self.factored, one, weight)


def tile_gates(log_i: Tensor, log_f: Tensor, m: Tensor | None, scale: float) -> TileGates:
    """Return the weights of tiles from log-gates (N, n, L).

    With a normalizer the log-gates are `stabilized` ones, and m (N, n, L) are the max states.
    """
    log_i, log_f = log_i.transpose(0, 1), log_f.transpose(0, 1)
    b, b_low = cumulative_sum(log_f)
    a, a_low = two_sum(log_i, -b)
    a_low = a_low - b_low
    inter = b + b_low
    update = (b[..., -1:] + a) + (b_low[..., -1:] + a_low)
    # The last weight of `inter`, without scale, is the decay.
    factored = torch.minimum(inter, update).amin(-1) > FACTORS
    factored &= torch.maximum(inter, update).amax(-1) < GROWING_FACTORS
    decay = inter[..., -1:].exp().unsqueeze(-1)
    inter, update = (inter.exp() * scale).unsqueeze(-1), update.exp().unsqueeze(-1)
    floor = b.new_empty(0, b.shape[1], 0)
    if m is not None:
        floor = m.neg().exp().clamp(min=torch.finfo(m.dtype).tiny).transpose(0, 1).unsqueeze(-1)
    return TileGates(
        (b, b_low), (a, a_low), inter, update, decay, floor, scale, factored[..., None, None], bool(factored.all())
    )
