"""The check of whether kernels can read and overwrite rows of a pool of states. This module does not import Triton."""

from __future__ import annotations

from torch import Tensor

from tfla.backends.base import POOL_DTYPES, FinalRows, Inputs
from tfla.backends.delta import DeltaInputs


def can_be_indexed(x: Inputs | DeltaInputs, rows: Tensor, final_rows: FinalRows | None) -> bool:
    """Return whether a call has steps, and kernels can address its states by one index each, counted in states.

    Args:
        x: the inputs of the call, whose states are a pool.
        rows: (sequences,), the rows that the call uses.
        final_rows: another pool that the call writes to, and its rows, or None.
    """
    if x.C is None or not x.v.numel():
        return False
    initial = FinalRows(x.C, rows, x.n, x.m) if isinstance(x, Inputs) else FinalRows(x.C, rows)
    return all(_has_index(pool) for pool in (initial, final_rows) if pool is not None)


def _has_index(pool: FinalRows) -> bool:
    """Return whether one index addresses each of the states of a pool, and there are rows.

    Each C, n and m has to be contiguous and in one of POOL_DTYPES, and the distance from one C to the next a multiple
    of its size.
    """
    if not (len(pool.rows) and pool.C.numel()):
        return False
    parts = [t for t in (pool.C, pool.n, pool.m) if t is not None]
    if any(t.dtype not in POOL_DTYPES or not t[0].is_contiguous() for t in parts):
        return False
    if any(t.stride(0) == 0 for t in parts):  # all rows would share one state
        return False
    return pool.C.stride(0) % pool.C[0].numel() == 0
