"""The check of whether kernels can read and overwrite rows of a pool of states. This module does not import Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from tfla.backends.base import FinalRows


def can_be_indexed(pool: Tensor, rows: Tensor, final_rows: FinalRows = None) -> bool:
    """Return whether kernels can address the states of a pool by one index each, counted in states.

    Each state has to be contiguous and in float32, and the distance from one state to the next a multiple of its size.

    Args:
        pool: (rows of the pool, H, dqk, dhv).
        rows: (sequences,), the rows that a call uses; there has to be one at least.
        final_rows: another pool that the call writes to, and its rows, or None.
    """
    if final_rows is not None and not can_be_indexed(*final_rows):
        return False
    if pool.dtype != torch.float32 or not (len(rows) and pool.numel() and pool[0].is_contiguous()):
        return False
    distance = pool.stride(0)
    return distance > 0 and distance % pool[0].numel() == 0  # at distance 0 all rows would share one state
