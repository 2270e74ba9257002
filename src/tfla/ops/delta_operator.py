"""The delta rule over whole sequences, registered as `tfla::delta` and `tfla::delta_backward`.

Traced calls whose states are rows of a pool are `tfla::delta_rows` and `tfla::delta_rows_`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tfla.backends import DELTA_BACKENDS, DeltaBackend, DeltaInputs
from tfla.backends.base import packed_bounds
from tfla.backends.delta import DeltaGrads, DeltaOutputs, DeltaSpec
from tfla.ops import delta_differentiable, flops
from tfla.ops.checks import is_empty_batch
from tfla.ops.delta_dispatch import DeltaRequest, plan, plan_before_activations, planned_inputs
from tfla.ops.registration import DifferentiableOperator
from tfla.ops.row_registration import RowsOperator
from tfla.ops.state import State
from tfla.ops.state_pool import OtherRows, as_packed, attend_by_index, state_of_plan
from tfla.ops.transforms import is_distributed

if TYPE_CHECKING:
    from tfla.ops.context_parallel.group import Group


def _check(x: DeltaInputs) -> None:
    """Check the values of cu_seqlens on a CPU, which a call that is traced cannot read."""
    if x.cu_seqlens is not None and x.cu_seqlens.device.type == "cpu":
        packed_bounds(x.cu_seqlens, x.v.shape[1])


def _shapes(x: DeltaInputs, backend: str, spec: DeltaSpec) -> tuple[Tensor, ...]:
    """Return empty tensors of the shapes and dtypes of :class:`DeltaOutputs`."""
    state = (x.sequences, x.v.shape[2], x.q.shape[3], x.v.shape[3])
    saved = DELTA_BACKENDS[backend].stored(x, spec)

    def new(wanted: bool, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return x.q.new_empty(shape if wanted else (0,), dtype=dtype)

    return (
        x.v.new_empty(x.v.shape),
        new(spec.final_state, state, x.acc_dtype),
        *(new(spec.save, *like) for like in saved),
    )


def _gradients(x: DeltaInputs, g: DeltaGrads) -> tuple[Tensor | None, ...]:
    """Return the gradients of all inputs but cu_seqlens."""
    return g


def _num_read(spec: DeltaSpec) -> int:
    """Return how many results a call reads: h, and the final state."""
    return 2 if spec.final_state else 1


def _results(spec: DeltaSpec, out: Sequence[Tensor]) -> Tensor | tuple[Tensor, State]:
    """Return h, or h and the final state."""
    return (out[0], State(out[1])) if spec.final_state else out[0]


delta = DifferentiableOperator(
    "delta", inputs=DeltaInputs, spec=DeltaSpec, outputs=DeltaOutputs, backend_before="kernel", cotangents=("dh", "dC"),
    saved=("E", "X", "chunk_C"), backends=DELTA_BACKENDS, check=_check, shapes=_shapes, gradients=_gradients,
    num_read=_num_read, results=_results, differentiable=delta_differentiable.delta,
    flops=(flops.delta_flops, flops.delta_gradient_flops), without_batch=("A_log", "dt_bias"),
    stores_whole_batch=lambda backend, spec: DELTA_BACKENDS[backend].stores_whole_batch(spec),
)  # fmt: skip


def _prepare(x: DeltaInputs, backend: DeltaBackend, spec: DeltaSpec) -> tuple[DeltaInputs, DeltaSpec] | None:
    """Return inputs and options for the kernels that read rows of a pool, or None where no kernel does."""
    if spec.kernel not in backend.row_kernels:
        return None
    packed = x if spec.kernel in backend.batch_kernels else as_packed(x)
    return None if packed is None else (packed, spec)


delta_in_rows = RowsOperator(delta, "delta", _prepare, flops.delta_flops)


def _by_rows(request: DeltaRequest, rows: OtherRows) -> Tensor | None:
    """Return h of a call that reads and overwrites rows of the pool, its state, or None if kernels and graphs do not.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """
    pool, state = request.state, state_of_plan(request.state, rows.indices.shape[0])
    if pool is None or state is None:
        return None
    own = request._replace(state=state)
    given, found = plan_before_activations(own)
    if found.spec.save:
        return None
    # Eager calls without such kernels are left to the caller before the activations are computed.
    prepared = (given, found.spec) if found.use_dispatcher else _prepare(given, found.backend, found.spec)
    if prepared is None:
        return None
    x = planned_inputs(prepared[0], own, found)._replace(C=pool.C)
    h = delta_in_rows(x, rows.indices, found, rows.final_rows(pool))
    return None if h is None else h.view(given.v.shape)


def compute(
    request: DeltaRequest, context_parallel: Group | None, state_indices: Tensor | None = None, writes: int = 1
) -> Tensor | tuple[Tensor, State]:
    """Compute a call, whose tensors are this process's part of the sequences where processes share them.

    Args:
        request: the arguments of the call.
        context_parallel: the processes that share the steps.
        state_indices: the rows of a pool that are the states.
        writes: the number of steps next to each other that no cut of a sequence may part.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """
    if state_indices is not None:
        if context_parallel is not None:
            raise ValueError("state_indices: got them with context_parallel, expected at most one of them")
        return attend_by_index(
            request, state_indices, request.cu_seqlens, lambda own: delta(*plan(own)), in_kernels=_by_rows,
            in_graph=True,
        )  # fmt: skip
    if is_distributed(request.q):
        from tfla.ops import sharded

        given = {name: getattr(request, name) for name in (*request._fields[:8], "cu_seqlens")}
        return sharded.call_with_state(
            given, request.state, lambda local, state: compute(request._replace(**local, state=state), context_parallel)
        )
    if context_parallel is None or is_empty_batch(request.q, request.cu_seqlens):
        return delta(*plan(request))
    from tfla.ops.context_parallel.delta_call import delta_part

    return delta_part(request, context_parallel, writes)
