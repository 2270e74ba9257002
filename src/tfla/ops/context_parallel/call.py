"""The way of a call with `context_parallel`: checks, choice of the backend, and the operator."""

from __future__ import annotations

import torch
from torch import Tensor

from tfla.backends import Inputs
from tfla.ops import checks
from tfla.ops.context_parallel.group import context_parallel_of
from tfla.ops.context_parallel.local import Call, Shape
from tfla.ops.context_parallel.registration import attend_eagerly, attend_traced, cut_of
from tfla.ops.dispatch import Request, check, choose, spec_of, with_log_gates
from tfla.ops.gates import clamp
from tfla.ops.state import State
from tfla.ops.transforms import needs_dispatcher, transforms_active


def _check_offsets(cu_seqlens: Tensor, q: Tensor) -> None:
    """Check the offsets of packed sequences among the steps of all processes, apart from their values."""
    checks.check_offsets(cu_seqlens, q)
    if cu_seqlens.device.type != "cpu":
        raise ValueError(
            f"cu_seqlens: got device {cu_seqlens.device}, expected cpu with context_parallel: each process computes "
            "its part on the host, without waiting for the device"
        )


def _as_the_backend_reads(x: Inputs, call: Call) -> Inputs:
    """Return inputs of the shapes that the backend gets, whose states and offsets have no values."""
    shape = Shape.of(call, x.q.shape[0])
    q, k, v, log_i, log_f = (None if t is None else shape.view(t) for t in x[:5])
    offsets = None if shape.offsets is None else x.q.new_empty(len(shape.offsets), dtype=torch.int32)
    return Inputs(q, k, v, log_i, log_f, None, None, None, offsets)  # type: ignore[arg-type]


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
    cu_seqlens, state = request.lengths, request.state
    x = check(request._replace(lengths=None, state=None))
    if transforms_active():
        raise NotImplementedError("context_parallel: torch.func transforms and forward-mode AD have no rule for it")
    if cu_seqlens is not None:
        _check_offsets(cu_seqlens, request.q)
    sequences = x.q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if state is not None:
        checks.check_state(state, sequences, request.q, request.v, request.normalize, "initial_state")
        C, n, m = state
        x = x._replace(C=C, n=n, m=None if m is None else clamp(m))
    x = x._replace(cu_seqlens=cu_seqlens)
    traced = needs_dispatcher(x)
    call: Call | None = None
    local = x._replace(C=None, n=None, m=None, cu_seqlens=None)  # a traced call chooses by the shapes of its arguments
    if not traced:
        call = Call(cut_of(placement, x.q.shape[1], cu_seqlens), placement, group, "", None, None)  # type: ignore[arg-type]
        local = _as_the_backend_reads(x, call)
    backend, kernel, chunk_size = choose(local, request.normalize, request.backend, request.kernel, request.chunk_size)
    spec = spec_of(request, x, backend, kernel, chunk_size)
    if not backend.takes_gates:
        x = with_log_gates(x, request.gates)
    if call is None:
        h, *final = attend_traced(x, spec, backend.name, placement, group)
    else:
        h, *final = attend_eagerly(x, call._replace(backend=backend.name, spec=spec))
    if not request.return_state:
        return h
    C, n, m = final
    return h, State(C, n, m.detach()) if request.normalize else State(C)
