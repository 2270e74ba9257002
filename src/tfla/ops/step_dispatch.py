"""The plan of a call of decoding steps, found under its call signature or chosen after its checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla._util.caching import CallCache
from tfla.backends import BACKENDS, StepInputs, select_steps
from tfla.backends.base import Replay, StepSpec
from tfla.ops import checks
from tfla.ops.autocast import autocast
from tfla.ops.dispatch import Request, call_signature
from tfla.ops.transforms import transforms_active


class StepPlan:
    """The backend and options of all calls of one signature.

    Attributes:
        backend: the backend whose kernel computes the steps; None computes them in plain PyTorch.
        spec: the options.
        replay: the recorded launches, None where there are none.
        record: whether to ask the backend for recorded launches after the next call, which is the first one.
    """

    __slots__ = ("backend", "record", "replay", "spec")

    def __init__(self, backend: Any, spec: Any, record: bool) -> None:
        self.backend, self.spec, self.record = backend, spec, record
        self.replay: Replay | None = None


# The plans of calls that have passed the checks.
_PLANS: CallCache[StepPlan] = CallCache()


def plan(request: Request) -> StepPlan:
    """Look up what runs a call under its signature, or check the call and choose it.

    Raises:
        ValueError, TypeError: an argument is invalid, or no backend has that name.
    """
    call = call_signature(
        request[:5], request.state, request.lengths, request[7:-1], state_indices=request.state_indices
    )
    found = _PLANS.get(call)
    if found is None:
        found = _check_and_choose(request, cached=call is not None)
        _PLANS.add(call, found)
    return found


def step_inputs(request: Request) -> StepInputs:
    """Return the inputs as backends read them: autocast, with a dimension of time."""
    state = request.state
    assert state is not None
    parts: tuple[Tensor | None, ...] = *autocast(request.q, request.k, request.v), request.i, request.f
    if not request.time:
        parts = tuple(None if t is None else t.unsqueeze(1) for t in parts)
    return StepInputs(*parts, *state, request.lengths, request.state_indices)  # type: ignore[call-arg, arg-type]


def _check_and_choose(request: Request, cached: bool) -> StepPlan:
    """Check a call and choose what runs it."""
    q, k, v, i, f, state, lengths = request[:7]
    normalize, in_place, return_state = request.normalize, request.in_place, request.return_state
    checks.check_flags(normalize=normalize, return_state=return_state, in_place=in_place)
    checks.check_inputs(q, k, v, checks.named_gates(i, f, request.gates), time=request.time)
    indices = request.state_indices
    state = checks.check_step_state(state, indices, q, v, normalize)
    if request.time:
        checks.check_few_steps(v, return_state, lengths, in_place)
    checks.check_lengths(lengths, v)
    x = step_inputs(request)
    scale = q.shape[-1] ** -0.5 if request.scale is None else request.scale
    spec = StepSpec(scale, request.gates, return_state, request.eps)
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*request[:5], *state))
    transformed = transforms_active()
    if indices is not None and return_state:
        parts = {"C": x.kept_dtype(state.C)}
        if state.n is not None:
            parts |= {"n": x.kept_dtype(state.n), "m": x.acc_dtype}
        checks.check_in_place(state, parts, recorded, transformed, "state_indices: got them")
    elif in_place:
        checks.check_in_place(state, {"C": x.kept_dtype(state.C)}, recorded, transformed, "in_place: got True")
    backend = select_steps(request.backend, x, BACKENDS)
    if recorded or transformed:  # the kernels have neither gradients nor rules for transforms
        backend = None
    same_dtypes = all(a.dtype == b.dtype for a, b in zip(x[:3], request[:3], strict=True))
    return StepPlan(backend, spec, cached and backend is not None and same_dtypes)
