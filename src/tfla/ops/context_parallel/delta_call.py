"""The path of a call of the delta rule with `context_parallel`: checks, choice of the backend, and the operator."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tfla.backends import DeltaBackend, DeltaInputs
from tfla.ops import checks
from tfla.ops.context_parallel.call import check_global_offsets, check_no_transforms
from tfla.ops.context_parallel.cuts import Cut, Placement
from tfla.ops.context_parallel.delta_registration import delta_eagerly, delta_traced
from tfla.ops.context_parallel.delta_states import PER_STEP
from tfla.ops.context_parallel.group import check_traced_part, context_parallel_of
from tfla.ops.context_parallel.local import DeltaCall, Shape
from tfla.ops.context_parallel.parts import check_parts
from tfla.ops.context_parallel.refusals import refuse_call
from tfla.ops.context_parallel.registration import cut_if_it_fits, cut_of
from tfla.ops.delta_dispatch import DeltaRequest, activated_inputs, check, choose, spec_of
from tfla.ops.state import State
from tfla.ops.transforms import needs_dispatcher


def _as_the_backend_reads(x: DeltaInputs, cut: Cut) -> DeltaInputs:
    """Return inputs of the shapes that the backend gets, whose states and offsets have no values."""
    shape = Shape.of_cut(cut, x.q.shape[0])
    offsets = None if shape.offsets is None else x.q.new_empty(len(shape.offsets), dtype=torch.int32)
    of_steps = (None if t is None else shape.view(t) for t in x[:PER_STEP])
    return DeltaInputs(*of_steps, x.A_log, x.dt_bias, None, offsets)  # type: ignore[arg-type,call-arg]


def _checked(request: DeltaRequest) -> DeltaInputs:
    """Return the inputs of a call without offsets, after the checks of all its arguments.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`delta_part`.
    """
    checks.check_chunk_size(request.chunk_size)
    x, cu_seqlens = check(request._replace(cu_seqlens=None, state=None)), request.cu_seqlens
    check_no_transforms()
    if cu_seqlens is not None:
        check_global_offsets(cu_seqlens, request.q)
    if request.state is None:
        return x
    sequences = x.q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    checks.check_state(request.state, sequences, request.q, request.v, False, "initial_state")
    return x._replace(C=request.state.C)


def _prepared(
    request: DeltaRequest, placement: Placement
) -> tuple[DeltaInputs, Cut | None, tuple[DeltaBackend, str, int] | None]:
    """Return the inputs of :func:`_checked`, the part of this process, and what runs the call.

    The part is None if the call is traced or has steps that do not fit; then nothing is chosen.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`delta_part`.
    """
    x = _checked(request)
    traced = needs_dispatcher((*x[:-1], request.cu_seqlens))
    cut = None if traced else cut_if_it_fits(placement, x.q.shape[1], request.cu_seqlens)
    return x, cut, _choose(request, x, cut) if traced or cut is not None else None


def delta_part(request: DeltaRequest, context_parallel: object, writes: int = 1) -> Tensor | tuple[Tensor, State]:
    """Compute the delta rule on this process's part of the sequence.

    Args:
        request: the arguments of the call; `cu_seqlens` are the offsets among the steps of all processes.
        context_parallel: a process group, a one-dimensional DeviceMesh or a ContextParallel.
        writes: the number of steps next to each other that are writes of one step for the caller. Cuts lie between
            these, and the lengths of ``context_parallel`` count them.

    Raises:
        ValueError, TypeError: an argument is invalid.
        NotImplementedError: a transform of torch.func or forward-mode AD is active.
    """
    placement, group = context_parallel_of(context_parallel, writes)
    of_steps, cu_seqlens = context_parallel_of(context_parallel)[0], request.cu_seqlens
    prepare = functools.partial(_prepared, request, placement)
    refused = request[:PER_STEP], cu_seqlens, request.return_state, False
    try:
        x, cut, chosen = prepare()
    except Exception as error:
        return refuse_call(error, prepare, of_steps, group, *refused)
    if needs_dispatcher((*x[:-1], cu_seqlens)):
        check = functools.partial(check_traced_part, context_parallel, x.q.shape[1] // writes)
        try:
            check()
        except ValueError as error:
            return refuse_call(error, check, of_steps, group, *refused, compare=True, writes=writes)
    else:
        check_parts(of_steps, group, x.q, cu_seqlens, writes=writes)
        if writes > 1:  # errors count steps
            cut_of(of_steps, x.q.shape[1] // writes, None if cu_seqlens is None else cu_seqlens // writes)
    if chosen is None:
        cut = cut_of(placement, x.q.shape[1], cu_seqlens)  # raises, now that the other processes have compared theirs
        chosen = _choose(request, x, cut)
    backend, kernel, chunk_size = chosen
    spec = spec_of(request, x, backend, kernel, chunk_size)
    if backend.activations_by != "backend":
        x = activated_inputs(x, request, backend, eager=cut is not None)
    x = x._replace(cu_seqlens=cu_seqlens)
    if cut is None:
        h, C = delta_traced(x, spec, backend.name, placement, group, writes)
    else:
        h, C = delta_eagerly(x, DeltaCall(cut, placement, group, backend.name, spec, None))
    return (h, State(C)) if request.return_state else h


def _choose(request: DeltaRequest, x: DeltaInputs, cut: Cut | None) -> tuple[DeltaBackend, str, int]:
    """Return the backend, its kernel and the chunk size; a traced call, without a cut, chooses by its own shapes."""
    local = x._replace(C=None) if cut is None else _as_the_backend_reads(x, cut)
    return choose(local, bool(request.read_before_decay), request.backend, request.kernel, request.chunk_size)
