"""The pools of states whose rows kernels can read and overwrite. This module does not import Triton."""

from __future__ import annotations

import torch
from torch import Tensor


def can_be_indexed(pool: Tensor, rows: Tensor) -> bool:
    """Return whether kernels find the states at `rows` of a pool, (pool rows, H, dqk, dhv), by a number each.

    A state has to be dense and in float32, and states have to stand a multiple of their size apart.
    """
    if pool.dtype != torch.float32 or not (len(rows) and pool.numel() and pool[0].is_contiguous()):
        return False
    apart = pool.stride(0)
    return apart > 0 and apart % pool[0].numel() == 0  # states at the same place would overwrite each other
