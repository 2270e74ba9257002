"""The errors of a call of an operator that are found before its processes are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def refuse_early(
    error: Exception,
    context_parallel: object,
    tensors: Sequence[object],
    cu_seqlens: Any,
    return_state: bool,
    normalize: bool = False,
) -> Any:
    """Raise an error of the arguments of a call, on all processes that share its steps.

    Args:
        error: the error that names the argument.
        context_parallel: the argument of the operator; None: no other process takes part in the call.
        tensors: q, k, v and further tensors of the call, of which any may be wrong or a DTensor.
        cu_seqlens, return_state: the arguments of the operator.
        normalize: whether the state that the call returns has n and m.

    Returns:
        results of the shapes that those of the call have, if it is traced; the graph raises the error when it runs.

    Raises:
        TypeError, ValueError: the error, or one of `context_parallel`.
    """
    if context_parallel is None:
        raise error
    from tfla.ops.context_parallel.group import context_parallel_of
    from tfla.ops.context_parallel.refusals import refuse_call

    placement, group = context_parallel_of(context_parallel)
    return refuse_call(error, None, placement, group, tensors, cu_seqlens, return_state, normalize)
