"""The path of a call with `context_parallel`: checks, choice of the backend, and the operator."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from tfla._util.caching import CallCache
from tfla.backends import BACKENDS, Backend, Inputs
from tfla.ops import checks
from tfla.ops.context_parallel.cuts import Cut, Placement
from tfla.ops.context_parallel.group import check_traced_part, context_parallel_of
from tfla.ops.context_parallel.local import Call, Shape
from tfla.ops.context_parallel.parts import check_parts
from tfla.ops.context_parallel.refusals import refuse_call
from tfla.ops.context_parallel.registration import attend_eagerly, attend_traced, cut_if_it_fits, cut_of
from tfla.ops.dispatch import Request, backend_inputs, call_signature, check, choose, spec_of, with_log_gates
from tfla.ops.gates import clamp
from tfla.ops.state import State
from tfla.ops.transforms import needs_dispatcher, transforms_active


def check_global_offsets(cu_seqlens: Tensor, q: Tensor) -> None:
    """Check the offsets of packed sequences among the steps of all processes, apart from their values."""
    checks.check_offsets(cu_seqlens, q)
    if cu_seqlens.device.type != "cpu":
        raise ValueError(
            f"cu_seqlens: got device {cu_seqlens.device}, expected cpu with context_parallel: each process computes "
            "its part on the host, without waiting for the device"
        )


def check_no_transforms() -> None:
    """Raise if a transform of torch.func or forward-mode AD is active."""
    if transforms_active():
        raise NotImplementedError("context_parallel: torch.func transforms and forward-mode AD have no rule for it")


def _as_the_backend_reads(x: Inputs, cut: Cut) -> Inputs:
    """Return inputs of the shapes that the backend gets, whose states and offsets have no values."""
    shape = Shape.of_cut(cut, x.q.shape[0])
    q, k, v, log_i, log_f = (None if t is None else shape.view(t) for t in x[:5])
    offsets = None if shape.offsets is None else x.q.new_empty(len(shape.offsets), dtype=torch.int32)
    return Inputs(q, k, v, log_i, log_f, None, None, None, offsets)  # type: ignore[arg-type]


class _Plan(NamedTuple):
    """The call that all calls of one signature make, and whether q, k and v have to be converted first."""

    call: Call
    convert: bool


# The plans of calls that have passed the checks.
_PLANS: CallCache[_Plan] = CallCache()


def _signature(request: Request, placement: Placement, group: str) -> Hashable:
    """Return all that the plan of a call depends on, or None where it cannot be cached."""
    signature, lengths = call_signature(request[:5], request.state, None, request[7:-1]), request.lengths
    if signature is None or lengths is None:
        return None if signature is None else (placement, group, signature)
    if not isinstance(lengths, Tensor) or lengths.device.type != "cpu" or needs_dispatcher((lengths,)):
        return None
    return placement, group, signature, lengths.dtype, tuple(lengths.tolist())


def _checked(request: Request, placement: Placement, group: str) -> tuple[Hashable, _Plan | None, Inputs]:
    """Return the signature of a call, its plan if it has one, and its inputs; without a plan they are checked first.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`attend_part`.
    """
    checks.check_chunk_size(request.chunk_size)  # here, since True equals the valid chunk size 1
    cu_seqlens = request.lengths
    signature = _signature(request, placement, group)
    # A traced call does not read the plans: it would be traced again for each new one.
    found = None if signature is None else _PLANS.get(signature)
    if found is not None:
        return signature, found, backend_inputs(request, found.convert)
    x = check(request._replace(lengths=None, state=None))
    check_no_transforms()
    if cu_seqlens is not None:
        check_global_offsets(cu_seqlens, request.q)
    if request.state is not None:
        sequences = x.q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        checks.check_state(request.state, sequences, request.q, request.v, request.normalize, "initial_state")
        C, n, m = request.state
        x = x._replace(C=C, n=n, m=None if m is None else clamp(m))
    return signature, None, x


def _prepared(
    request: Request, placement: Placement, group: str
) -> tuple[Hashable, _Plan | None, Inputs, Cut | None, tuple[Backend, str, int] | None]:
    """Return the results of :func:`_checked`, the part of this process, and what runs the call.

    The part is None if the call is traced, has a plan, or has steps that do not fit. Then nothing is chosen either but
    for a traced call.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`attend_part`.
    """
    signature, found, x = _checked(request, placement, group)
    traced = needs_dispatcher((*x[:-1], request.lengths))
    cut = None if traced or found is not None else cut_if_it_fits(placement, x.q.shape[1], request.lengths)
    return signature, found, x, cut, _choose(request, x, cut) if traced or cut is not None else None


def attend_part(request: Request, context_parallel: object) -> Tensor | tuple[Tensor, State]:
    """Compute the operator on this process's part of the sequence.

    Args:
        request: the arguments of the call; `lengths` are the offsets among the steps of all processes.
        context_parallel: a process group, a one-dimensional DeviceMesh or a ContextParallel.

    Raises:
        ValueError, TypeError: an argument is invalid.
        NotImplementedError: a transform of torch.func or forward-mode AD is active.
    """
    placement, group = context_parallel_of(context_parallel)
    cu_seqlens = request.lengths
    prepare = functools.partial(_prepared, request, placement, group)
    refused = request[:5], cu_seqlens, request.return_state, request.normalize
    try:
        signature, found, x, cut, chosen = prepare()
    except Exception as error:
        return refuse_call(error, prepare, placement, group, *refused)
    if needs_dispatcher((*x[:-1], cu_seqlens)):
        check = functools.partial(check_traced_part, context_parallel, x.q.shape[1])
        try:
            check()
        except ValueError as error:
            return refuse_call(error, check, placement, group, *refused, compare=True)
    else:
        check_parts(placement, group, x.q, cu_seqlens)
    if found is not None:
        h, *final = attend_eagerly(_with_gates(x, request, BACKENDS[found.call.backend]), found.call)
        return _result(request, h, final)
    x = x._replace(cu_seqlens=cu_seqlens)
    if chosen is None:
        cut = cut_of(placement, x.q.shape[1], cu_seqlens)  # raises, now that the other processes have compared theirs
        chosen = _choose(request, x, cut)
    backend, kernel, chunk_size = chosen
    spec = spec_of(request, x, backend, kernel, chunk_size)
    with_gates = _with_gates(x, request, backend)
    if cut is None:
        h, *final = attend_traced(with_gates, spec, backend.name, placement, group)
    else:
        call = Call(cut, placement, group, backend.name, spec, None)
        convert = any(a is not b for a, b in zip(x[:3], request[:3], strict=True))
        _PLANS.add(signature, _Plan(call, convert))
        h, *final = attend_eagerly(with_gates, call)
    return _result(request, h, final)


def _choose(request: Request, x: Inputs, cut: Cut | None) -> tuple[Backend, str, int]:
    """Return the backend, its kernel and the chunk size; a traced call, without a cut, chooses by its own shapes."""
    local = x._replace(C=None, n=None, m=None, cu_seqlens=None) if cut is None else _as_the_backend_reads(x, cut)
    return choose(local, request.normalize, request.backend, request.kernel, request.chunk_size)


def _with_gates(x: Inputs, request: Request, backend: Backend) -> Inputs:
    """Return inputs with the gates in the form that the backend takes."""
    return x if backend.takes_gates else with_log_gates(x, request.gates)


def _result(request: Request, h: Tensor, final: list[Tensor]) -> Tensor | tuple[Tensor, State]:
    """Return what the public function returns, from h and the final C, n and m."""
    if not request.return_state:
        return h
    C, n, m = final
    return h, State(C, n, m.detach()) if request.normalize else State(C)
