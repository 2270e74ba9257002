"""Calls of `mlstm` and `linear_attention` whose kernels read and overwrite rows of a pool of states."""

from __future__ import annotations

import torch
from torch import Tensor

from tfla.ops.autocast import without_autocast
from tfla.ops.dispatch import Request, plan
from tfla.ops.gates import clamp
from tfla.ops.state_pool import PoolRows, as_packed, state_of_plan


def attend_rows(request: Request, indices: Tensor) -> Tensor | None:
    """Return h of a call whose kernels read and overwrite C of its states in the pool, or None if no kernel does.

    The rows of n and m are gathered before the kernels and scattered after them. Kernels do not overwrite n in the
    pool: all programs of a head read it, and one of them could write it before another one has read it.

    Args:
        request: the arguments of the call; its state is the pool.
        indices: (sequences,) int32 or int64, the row of each sequence; -1 stands for none.

    Returns:
        h, with the rows of the pool overwritten where the request returns states; None before anything is written.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """
    pool, state = request.state, state_of_plan(request.state, len(indices))
    if pool is None or state is None:
        return None
    given, found = plan(request._replace(state=state))
    spec = found.spec
    if found.use_dispatcher or spec.save or spec.kernel not in found.backend.row_kernels:
        return None
    x = as_packed(given)
    if x is None:
        return None
    if given.cu_seqlens is None and not found.backend.has_segments(given, spec):
        spec = spec._replace(chunk_size=x.v.shape[1])  # no sequence is longer than the chunk that all of them fit into
    size = pool.C.shape[0]
    rows = PoolRows(torch.where(indices < size, indices, -1), size)  # kernels make h NaN where the pool lacks the row
    n, m = (None if t is None else rows.read(t).float() for t in (pool.n, pool.m))
    with without_autocast(x.q.device.type):
        x = x._replace(C=pool.C, n=n, m=None if m is None else clamp(m))
        out = found.backend.forward_by_rows(x, indices, spec)
    if out is None:
        return None
    if request.return_state and pool.n is not None and pool.m is not None:
        rows.write(pool.n, out.n)
        rows.write(pool.m, out.m)
    h: Tensor = out.h.view(given.v.shape)
    return h
