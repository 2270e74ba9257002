"""The matrix X of a tile, by which prediction errors follow from the state before the tile: E = R - X B R."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 16  # steps of the diagonal blocks that are solved directly


def corrections(M: Tensor, beta: Tensor) -> Tensor:
    """Return X = M (I + B M)^-1, (..., L, L), from a strictly lower M and beta (..., L); L is a power of 2.

    X_ij is what step i reads of the write of step j after all corrections in between. It is made by block inversion:
    from the diagonal blocks X1 and X2 of two halves follows X21 = (I - X2 B2) M21 (I - B1 X1). The diagonal blocks of
    `BASE` steps are solved by substitution, because the powers of their Neumann series can be far larger than X.
    """
    L = M.shape[-1]
    s = min(BASE, L)
    block = _diagonal(M, s)
    eye = torch.eye(s, dtype=M.dtype, device=M.device)
    system = eye + block * beta.unflatten(-1, (-1, s)).unsqueeze(-1)
    X = torch.linalg.solve_triangular(system, block, upper=False, left=False, unitriangular=True)
    while s < L:
        X1, X2 = X[..., 0::2, :, :], X[..., 1::2, :, :]
        b = beta.unflatten(-1, (-1, 2, s))
        M21 = _diagonal(M, 2 * s)[..., s:, :s]
        Y = M21 - (M21 * b[..., 0, None, :]) @ X1
        X21 = Y - (X2 * b[..., 1, None, :]) @ Y
        top = torch.cat([X1, torch.zeros_like(X21)], -1)
        X = torch.cat([top, torch.cat([X21, X2], -1)], -2)
        s *= 2
    return X.squeeze(-3)


def _diagonal(M: Tensor, s: int) -> Tensor:
    """Return the diagonal blocks of s rows of (..., L, L), (..., L / s, s, s), a view."""
    blocks = M.unflatten(-1, (-1, s)).unflatten(-3, (-1, s))
    return blocks.diagonal(0, -4, -2).movedim(-1, -3)
