"""The gradients of log-gates, as sums over pairs of steps.

The contribution of step j to the output of step i has the weight exp(log_f_{j+1} + ... + log_f_i + log_i_j). Hence
dlog_i_j is the sum of these terms over all i >= j, and dlog_f_t their sum over all i >= t > j. Both steps of a pair may
lie in the tile of t, or one of them, or none. Each sum contains only its own terms, so that its rounding error is
relative to them.

dlog_f is also the sum over all later steps of q . dq - k . dk (docs/mathematics.md). That sum contains the pairs of a
step with itself too, which cancel except for rounding; where gates are closed, this rounding would be all of dlog_f.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def before(x: Tensor) -> Tensor:
    """Return the sums over all earlier elements of the last dim, (..., L) from (..., L)."""
    return F.pad(x[..., :-1].cumsum(-1), (1, 0))


def onward(x: Tensor) -> Tensor:
    """Return the sums over each element of the last dim and all later ones."""
    return x.flip(-1).cumsum(-1).flip(-1)


def crossing(terms: Tensor) -> Tensor:
    """Return the sums over i >= t > j of a strictly lower matrix, (..., L), which is overwritten.

    Differences of sums of columns and rows are fewer additions, but have the rounding of pairs that a closed gate parts
    from those of t.
    """
    of_earlier = terms.cumsum_(-1).tril_(-1)  # the sums over all j before t at column t - 1
    return F.pad(of_earlier.sum(-2)[..., :-1], (1, 0))


def log_gate_gradients(terms: Tensor, reads: Tensor, writes: Tensor, between: Tensor) -> tuple[Tensor, Tensor]:
    """Return dlog_i and dlog_f, (n, N, L).

    Args:
        terms: (n, N, L, L), the terms of pairs inside a tile, 0 above the diagonal; overwritten.
        reads: (n, N, L), the terms of each step with all steps before its tile.
        writes: (n, N, L), the terms of each step with all steps after its tile.
        between: (n, N), the terms of steps before a tile with steps after it.

    Where a sequence starts without a state, dlog_f of its first step is exactly 0.
    """
    diagonal = terms.diagonal(dim1=-2, dim2=-1)
    diagonal_terms = diagonal.clone()
    diagonal.zero_()
    columns = terms.sum(-2)
    dlog_f = between.unsqueeze(-1) + onward(reads) + before(writes) + crossing(terms)
    return writes + columns + diagonal_terms, dlog_f
