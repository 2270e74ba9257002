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


def crossing(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the sums over i >= t > j of a strictly lower matrix, (..., L), from the sums of its rows and columns.

    Each is the one before plus a column less a row. What is left after the last step is rounding, which is spread.
    """
    L = rows.shape[-1]
    gains = columns - rows
    share = torch.arange(L, dtype=gains.dtype, device=gains.device) / L
    return before(gains) - share * gains.sum(-1, keepdim=True)


def log_gate_gradients(terms: Tensor, reads: Tensor, writes: Tensor, between: Tensor) -> tuple[Tensor, Tensor]:
    """Return dlog_i and dlog_f, (n, N, L).

    `terms` (n, N, L, L) are those of pairs inside a tile, 0 above the diagonal; they are overwritten. `reads` and
    `writes`, (n, N, L), are what each step reads of the state before its tile, and what later tiles read of it.
    `between` (n, N) is what later tiles read of the state before a tile. Where a sequence starts without a state, all
    that dlog_f of its first step is made of is exactly 0.
    """
    diagonal = terms.diagonal(dim1=-2, dim2=-1)
    own = diagonal.clone()
    diagonal.zero_()
    columns = terms.sum(-2)
    dlog_f = between.unsqueeze(-1) + onward(reads) + before(writes) + crossing(terms.sum(-1), columns)
    return writes + columns + own, dlog_f
