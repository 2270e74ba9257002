"""The check of whether kernels can read and overwrite rows of a pool of states. This module does not import Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from tfla.backends.base import FinalRows, Inputs
from tfla.backends.delta import DeltaInputs


def can_be_indexed(x: Inputs | DeltaInputs, rows: Tensor, final_rows: FinalRows) -> bool:
    """Return whether a call has steps, and kernels can address its states by one index each, counted in states.

    Args:
        x: the inputs of the call, whose C is a pool.
        rows: (sequences,), the rows that the call uses.
        final_rows: another pool that the call writes to, and its rows, or None.
    """
    if x.C is None or not x.v.numel():
        return False
    return all(_has_index(*pool) for pool in ((x.C, rows), final_rows) if pool is not None)


def _has_index(pool: Tensor, rows: Tensor) -> bool:
    """Return whether one index addresses each of the states of a pool, and there are rows.

    Each state has to be contiguous and in float32, and the distance from one state to the next a multiple of its size.
    """
    if pool.dtype != torch.float32 or not (len(rows) and pool.numel() and pool[0].is_contiguous()):
        return False
    distance = pool.stride(0)
    return distance > 0 and distance % pool[0].numel() == 0  # at distance 0 all rows would share one state
