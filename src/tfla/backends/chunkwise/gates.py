"""Gate arithmetic of tiles: equations (36)-(38), stabilised, with every exponent a sum of small numbers.

In float64: sums of closed gates are large, their differences must keep float32 accuracy, and there are only B T H of
them. Sums start at the tile's first step, so no rounding is carried from tile to tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tfla.backends.chunkwise.workspace import Workspace

FACTORS = -40.0  # the least logarithm of a factor of a gate: the product of three stays far inside float32
GROWING_FACTORS = 20.0  # the largest: so do products of two with the reciprocal of the least
GROWTH = 60.0  # the largest logarithm of a weight in a tile: float32 ends at 88, and q, k and v need some of that


def max_state(log_i: Tensor, log_f: Tensor, m: Tensor) -> Tensor:
    """m_t = max(log_f_t + m_{t-1}, log_i_t), (1), for all steps at once: (..., T) float64 from the initial m (...)."""
    b = log_f.cumsum(-1)
    return b + torch.maximum((log_i - b).cummax(-1).values, m[..., None])


def steps_of_a_tile(log_i: Tensor, log_f: Tensor, most: int) -> int:
    """Return how many steps tiles may have so that no weight in one exceeds exp(GROWTH), from log-gates (N, T).

    A tile of one step has no weights but exp(log_i) and exp(log_f): it is as good as the recurrence.
    """
    rises, first = log_f.clamp(min=0.0), log_i.amax().clamp(min=0.0)
    while most > 1:
        tiles = torch.nn.functional.pad(rises, (0, -rises.shape[-1] % most)).unflatten(-1, (-1, most))
        if not bool(tiles.sum(-1).amax() + first > GROWTH):
            break
        most = max(1, most // 4)
    return most


class TileGates(NamedTuple):
    """Weights of n successive tiles of L steps for N heads; leading dims (n, N).

    A weight inside a tile, scale D_ij = exp(row_i + column_j), i >= j, is also inter_i update_j / decay: the way from
    step j to the tile's end and that from its start to step i, less the whole tile. In `factored` tiles none of the
    three is too small or too large: there q and k carry the weights, and where all tiles are such D is not made.
    """

    row: Tensor  # (n, N, L) float64, without scale
    column: Tensor  # (n, N, L) float64
    inter: Tensor  # (n, N, L, 1): weight of the state before the tile in row i, times scale
    update: Tensor  # (n, N, L, 1): weight of step j in the state behind the tile, exp(a_j)
    carry: Tensor  # (N, n + 1, n + 1): weight of boundary s in boundary t, boundaries before tiles and behind the last
    floor: Tensor  # (n, N, L, 1): exp(-m), never 0, or empty without normaliser
    scale: float
    factored: Tensor  # (n, N, 1, 1)
    all_factored: bool

    @property
    def decay(self) -> Tensor:
        """Of the state over each tile, (n, N, 1, 1)."""
        return self.carry.diagonal(-1, 1, 2).t()[..., None, None]

    def inside(self, work: Workspace) -> Tensor:
        """What products inside tiles are multiplied by, (n, N, L or 1, L or 1); above the diagonal it is anything."""
        if self.all_factored:
            return self.decay.reciprocal()
        L = self.row.shape[-1]
        wide = work("wide D", *self.row.shape, L, dtype=torch.float64)
        torch.add(self.row.unsqueeze(-1), self.column.unsqueeze(-2), out=wide)
        D = work("D", *wide.shape).copy_(wide).exp_().mul_(self.scale)
        return torch.where(self.factored, self.decay.reciprocal(), D)

    def shares(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """`inter` or `update` in factored tiles and elsewhere, each 1 where the other has it."""
        one = weight.new_ones(())
        return torch.where(self.factored, weight, one), torch.where(self.factored, one, weight)


def tile_gates(
    log_i: Tensor, log_f: Tensor, m: Tensor | None, m_start: Tensor | None, scale: float, dtype: torch.dtype
) -> TileGates:
    """From log-gates (N, n, L) float64, their max states m and the max state m_start (N,) before the first tile."""
    b = log_f.cumsum(-1)
    g = b[..., -1:]
    boundary = torch.nn.functional.pad(g[..., 0].cumsum(-1), (1, 0))
    row, column, inter, update = b, log_i - b, b, g - b + log_i
    floor = b.new_empty(0, b.shape[0], 0)
    if m is not None and m_start is not None:
        ends = torch.cat([m_start[:, None], m[..., -1]], -1)
        row = b - m
        inter = row + ends[:, :-1, None]
        update = update - ends[:, 1:, None]
        boundary = boundary - ends
        floor = m.neg().exp()
    # The last of inter is the decay.
    factored = torch.minimum(inter, update).amin(-1) > FACTORS
    factored &= torch.maximum(inter, update).amax(-1) < GROWING_FACTORS
    factored = factored.t()[..., None, None]
    carry = (boundary[:, :, None] - boundary[:, None, :]).tril()
    carry = carry.exp().tril().to(dtype)
    inter, update = (x.to(dtype).transpose(0, 1).unsqueeze(-1) for x in (inter.exp() * scale, update.exp()))
    floor = floor.to(dtype).clamp(min=torch.finfo(dtype).tiny).transpose(0, 1).unsqueeze(-1)
    row, column = row.transpose(0, 1), column.transpose(0, 1)
    return TileGates(row, column, inter, update, carry, floor, scale, factored, bool(factored.all()))
