"""Calls of `mlstm` and `linear_attention` whose kernels read and overwrite rows of a pool of states.

A traced call is one operator in a graph, `tfla::attend_rows_`, or `tfla::attend_rows` where it returns no states.
"""

from __future__ import annotations

from torch import Tensor

from tfla.backends.base import Backend, Inputs, Spec
from tfla.ops import flops
from tfla.ops.dispatch import Request, plan
from tfla.ops.operators import attend
from tfla.ops.row_registration import RowsOperator
from tfla.ops.state_pool import OtherRows, as_packed, state_of_plan


def _prepare(x: Inputs, backend: Backend, spec: Spec) -> tuple[Inputs, Spec] | None:
    """Return inputs and options for the kernels that read rows of a pool, or None where no kernel does."""
    packed = as_packed(x) if spec.kernel in backend.row_kernels else None
    if packed is None:
        return None
    if x.cu_seqlens is None and not backend.cuts_sequences(x, spec):
        spec = spec._replace(chunk_size=packed.v.shape[1])  # no sequence is longer than the chunk that all fit into
    return packed, spec


attend_in_rows = RowsOperator(attend, "attend", _prepare, flops.attend_flops)


def attend_rows(request: Request, own: OtherRows) -> Tensor | None:
    """Return h of a call that reads and overwrites its states in the pool, or None if neither kernels nor a graph do.

    Args:
        request: the arguments of the call; its state is the pool.
        own: the rows of the sequences, int32 or int64; -1 stands for none.

    Returns:
        h, with the rows of the pool overwritten where the request returns states; None before anything is written.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """
    pool, state = request.state, state_of_plan(request.state, own.indices.shape[0])
    if pool is None or state is None:
        return None
    x, found = plan(request._replace(state=state))
    if found.spec.save:
        return None
    return attend_in_rows(x._replace(C=pool.C, n=pool.n, m=pool.m), own.indices, found, own.final_rows(pool))
