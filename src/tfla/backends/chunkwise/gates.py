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


def max_state(log_i: Tensor, log_f: Tensor, m: Tensor) -> Tensor:
    """m_t = max(log_f_t + m_{t-1}, log_i_t), (1), for all steps at once: (..., T) float64 from the initial m (...)."""
    b = log_f.cumsum(-1)
    return b + torch.maximum((log_i - b).cummax(-1).values, m[..., None])


class TileGates(NamedTuple):
    """Weights of n successive tiles of L steps for N heads; leading dims (n, N)."""

    row: Tensor  # (n, N, L) float64: the gate matrix is D_ij = exp(row_i + column_j), i >= j
    column: Tensor  # (n, N, L) float64
    inter: Tensor  # (n, N, L, 1): weight of the state before the tile in row i, times scale
    update: Tensor  # (n, N, L, 1): weight of step j in the state behind the tile, exp(a_j)
    carry: Tensor  # (N, n + 1, n + 1): weight of boundary s in boundary t, boundaries before tiles and behind the last
    floor: Tensor  # (n, N, L, 1): exp(-m), never 0, or empty without normaliser
    scale: float

    def head(self, part: slice) -> TileGates:
        """Those of some heads."""
        row, column, inter, update, carry, floor, scale = self
        row, column, inter, update, floor = (x[:, part] for x in (row, column, inter, update, floor))
        return TileGates(row, column, inter, update, carry[part], floor, scale)

    def decays(self) -> tuple[Tensor, ...]:
        """Of the state over each tile, (N, 1, 1)."""
        return self.carry.diagonal(-1, 1, 2).t()[..., None, None].unbind(0)

    def matrix(self, work: Workspace) -> Tensor:
        """scale D, (n, N, L, L), zero above the diagonal."""
        L = self.row.shape[-1]
        wide = work("wide D", *self.row.shape, L, dtype=torch.float64)
        torch.add(self.row.unsqueeze(-1), self.column.unsqueeze(-2), out=wide)
        D = work("D", *wide.shape).copy_(wide)
        return D.exp_().mul_(self.scale).tril_()  # zeroes whatever overflowed in the future


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
    carry = (boundary[:, :, None] - boundary[:, None, :]).tril()
    carry = carry.exp().tril().to(dtype)
    inter, update = (x.to(dtype).transpose(0, 1).unsqueeze(-1) for x in (inter.exp() * scale, update.exp()))
    floor = floor.to(dtype).clamp(min=torch.finfo(dtype).tiny).transpose(0, 1).unsqueeze(-1)
    return TileGates(row.transpose(0, 1), column.transpose(0, 1), inter, update, carry, floor, scale)
