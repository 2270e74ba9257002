"""Gradients of log-gates as sums over the pairs of steps that each gate lies between.

What step i reads of what step j wrote has the weight exp(log_f_{j+1} + ... + log_f_i + log_i_j). So dlog_i_j is the sum
over all i >= j, and dlog_f_t that over all i >= t > j, of the terms with such a weight: both steps may lie in the tile
of t, or one of them, or none. Every sum is of its own terms, whose rounding is as small as they are.

The sums of q . dq and k . dk over all later steps are the same but for rounding: they also have the pairs of a step
with itself, which cancel, and where gates are closed their rounding would be all there is of dlog_f.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def before(x: Tensor) -> Tensor:
    """Return the sums over all earlier elements of the last dim, (..., L) from (..., L)."""
    return F.pad(x[..., :-1].cumsum(-1), (1, 0))


def onward(x: Tensor) -> Tensor:
    """Return the sums over each element of the last dim and all later ones."""
    return x.flip(-1).cumsum(-1).flip(-1)


def boundary_dots(read: Tensor, written: Tensor, dots: Tensor) -> Tensor:
    """Return <C, dC> before each of n tiles, (n, N), from some of them, and from what passes it at each tile.

    A dot product less what the tile reads of C, plus what later tiles read of the tile, is the next one: `read` and
    `written` (n, N). `dots` (stretches + 1, N) are those at the starts of stretches of equally many tiles, of which the
    last one may be shorter, and at the end. What is missing at the end of a stretch is rounding. The most likely share
    of a number in it is the square of that number: so it is spread over the tiles and the dot product at the end.
    """
    n, stretches = read.shape[0], dots.shape[0] - 1
    tiles = -(-n // stretches)

    def by_stretch(x: Tensor) -> Tensor:  # (stretches, tiles, N)
        return F.pad(x, (0, 0, 0, stretches * tiles - n)).unflatten(0, (stretches, tiles))

    start, end = dots[:-1].unsqueeze(1), dots[1:].unsqueeze(1)
    values = torch.cat([start, start + by_stretch(written - read).cumsum(1)], 1)  # before tiles and after the last
    sizes = torch.cat([by_stretch(written.abs() + read.abs()), end.abs()], 1)
    largest = sizes.amax(1, keepdim=True).clamp(min=torch.finfo(sizes.dtype).tiny)
    squares = (sizes / largest).square().cumsum(1)
    shares = F.pad(squares[:, :-1] / squares[:, -1:].clamp(min=1.0), (0, 0, 1, 0))
    return (values + shares * (end - values[:, -1:]))[:, :-1].flatten(0, 1)[:n]


def crossing(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the sums over i >= t > j of a strictly lower matrix, (..., L), from the sums of its rows and columns.

    Each is the one before plus a column less a row. What is left after the last step is rounding, which is spread.
    """
    L = rows.shape[-1]
    gains = columns - rows
    share = torch.arange(L, dtype=gains.dtype, device=gains.device) / L
    return before(gains) - share * gains.sum(-1, keepdim=True)


def log_gate_gradients(
    terms: Tensor, reads: Tensor, writes: Tensor, dots: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """Return dlog_i and dlog_f, (n, N, L).

    `terms` (n, N, L, L) are those of pairs inside a tile, 0 above the diagonal; they are overwritten. `reads` and
    `writes`, (n, N, L), are what each step reads of the state before its tile, and what later tiles read of it. For
    `dots` see `boundary_dots`. `decay` (n, N, 1) is that of states over each tile.
    """
    diagonal = terms.diagonal(dim1=-2, dim2=-1)
    own = diagonal.clone()
    diagonal.zero_()
    columns = terms.sum(-2)
    read = reads.sum(-1)
    passing = (boundary_dots(read, writes.sum(-1), dots) - read).unsqueeze(-1)
    # What passes a tile decays over it. It is a difference; where the decay is below rounding, so is what passes.
    bounded = decay.clamp(max=1.0).square()
    passing = passing * (bounded / (bounded + torch.finfo(decay.dtype).eps ** 2))
    dlog_f = passing + onward(reads) + before(writes) + crossing(terms.sum(-1), columns)
    return writes + columns + own, dlog_f
