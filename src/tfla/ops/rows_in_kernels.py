"""Calls of `mlstm` and `linear_attention` whose kernels read and overwrite rows of a pool of states."""

from __future__ import annotations

from torch import Tensor

from tfla.ops.autocast import without_autocast
from tfla.ops.dispatch import Request, plan
from tfla.ops.gates import clamp
from tfla.ops.state_pool import OtherRows, as_packed, rows_that_exist, state_of_plan


def attend_rows(request: Request, own: OtherRows) -> Tensor | None:
    """Return h of a call whose kernels read and overwrite C of its states in the pool, or None if no kernel does.

    The rows of n and m are gathered before the kernels and scattered after them. Kernels do not overwrite n in the
    pool: all programs of a head read it, and one of them could write it before another one has read it.

    Args:
        request: the arguments of the call; its state is the pool.
        own: the rows of the sequences, int32 or int64; -1 stands for none.

    Returns:
        h, with the rows of the pool overwritten where the request returns states; None before anything is written.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """
    indices, pool = own.indices, request.state
    state = state_of_plan(pool, len(indices))
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
    rows = rows_that_exist(indices, pool)  # kernels make h NaN where the pool lacks the row
    n, m = (None if t is None else rows.read(t).float() for t in (pool.n, pool.m))
    with without_autocast(x.q.device.type):
        x = x._replace(C=pool.C, n=n, m=None if m is None else clamp(m))
        out = found.backend.forward_by_rows(x, indices, spec, own.final_rows(pool))
    if out is None:
        return None
    if request.return_state and own.pool.n is not None and own.pool.m is not None:
        final = rows if own.final is indices else rows_that_exist(own.final, own.pool)
        final.write(own.pool.n, out.n)
        final.write(own.pool.m, out.m)
    h: Tensor = out.h.view(given.v.shape)
    return h
