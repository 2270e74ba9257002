"""Calls of `mlstm` and `linear_attention` whose kernels read and overwrite rows of a pool of states."""

from __future__ import annotations

from torch import Tensor

from tfla.ops.autocast import without_autocast
from tfla.ops.dispatch import Request, plan
from tfla.ops.state_pool import OtherRows, as_packed, state_of_plan


def attend_rows(request: Request, own: OtherRows) -> Tensor | None:
    """Return h of a call whose kernels read and overwrite its states in the pool, or None if no kernel does.

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
    if given.cu_seqlens is None and not found.backend.cuts_sequences(given, spec):
        spec = spec._replace(chunk_size=x.v.shape[1])  # no sequence is longer than the chunk that all of them fit into
    with without_autocast(x.q.device.type):
        x = x._replace(C=pool.C, n=pool.n, m=pool.m)
        h = found.backend.forward_by_rows(x, indices, spec, own.final_rows(pool))
    return None if h is None else h.view(given.v.shape)
