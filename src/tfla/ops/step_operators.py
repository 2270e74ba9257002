"""The operators of decoding steps, registered with PyTorch.

    tfla::steps    a few steps
    tfla::steps_   the same; it overwrites the state C in place

They have neither gradients nor rules for transforms; :mod:`.step_reference` has both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tfla.backends import BACKENDS, Backend, StepInputs
from tfla.backends.base import StepSpec
from tfla.ops import flops
from tfla.ops.checks import check_values_of_lengths
from tfla.ops.dispatch import Request
from tfla.ops.schema import Schema
from tfla.ops.state import State
from tfla.ops.step_dispatch import StepPlan, step_inputs
from tfla.ops.step_reference import compute_steps

SCHEMA = Schema(StepInputs, StepSpec, backend_before="final_state", results=4)
SCHEMA_IN_PLACE = Schema(
    StepInputs, StepSpec, backend_before="eps", results=3, fixed={"final_state": True}, overwritten=("C",)
)
torch.library.define("tfla::steps", SCHEMA.text)
torch.library.define("tfla::steps_", SCHEMA_IN_PLACE.text)
steps, steps_ = torch.ops.tfla.steps.default, torch.ops.tfla.steps_.default
flops.add(torch.ops.tfla.steps, SCHEMA, flops.steps_flops)
flops.add(torch.ops.tfla.steps_, SCHEMA_IN_PLACE, flops.steps_flops)


def run(request: Request, plan: StepPlan) -> tuple[Tensor, State]:
    """Run the steps as planned.

    Returns:
        h, with a dimension of time where the request has one, and the new state, of empty tensors without return_state.
    """
    state = request.state
    assert state is not None
    if plan.replay is not None:
        h, C, n, m = plan.replay((*request[:5], *state, request.lengths, state.C if request.in_place else None))
    elif plan.backend is None:
        h, (C, n, m) = compute_steps(step_inputs(request), plan.spec)  # type: ignore[assignment]
        C = state.C.copy_(C) if request.in_place else C
    else:
        h, C, n, m = _run_backend(request, plan, plan.backend)
    return h if request.time else h.squeeze(1), State(C, n, m) if request.normalize else State(C)


def _run_backend(request: Request, plan: StepPlan, backend: Backend) -> Sequence[Tensor]:
    """Call the registered operator, and keep its recorded launches where that was planned."""
    x = step_inputs(request)
    into = x.C if request.in_place else None
    if into is not None:
        h, n, m = steps_(*SCHEMA_IN_PLACE.pack(x, (), backend.name, plan.spec))
        found = h, into, n, m
    else:
        found = steps(*SCHEMA.pack(x, (), backend.name, plan.spec))
    if plan.record:
        plan.record, plan.replay = False, backend.steps_replay(x, plan.spec, found[1] if request.in_place else None)
    return found


def _run(schema: Schema[StepInputs, StepSpec], args: Sequence[Any], in_place: bool) -> tuple[Tensor, ...]:
    """Run the steps on the backend that the arguments name, and return h, C, n and m as distinct tensors."""
    x, _, backend, spec = schema.unpack(args)
    if x.lengths is not None and x.lengths.device.type == "cpu":  # a call that is traced cannot read them
        check_values_of_lengths(x.lengths, x.v.shape[1])
    h, *state = BACKENDS[backend].steps(x, spec, x.C if in_place else None)
    return h, *(t if t.numel() else torch.empty_like(t) for t in state)


@torch.library.impl("tfla::steps", "default")
@torch._disable_dynamo
def _(*args: Any) -> tuple[Tensor, ...]:
    return _run(SCHEMA, args, in_place=False)


@torch.library.impl("tfla::steps_", "default")
@torch._disable_dynamo
def _(*args: Any) -> tuple[Tensor, ...]:
    h, _, n, m = _run(SCHEMA_IN_PLACE, args, in_place=True)
    return h, n, m


@torch.library.register_fake("tfla::steps")
def _(*args: Any) -> tuple[Tensor, ...]:
    x, _, _, spec = SCHEMA.unpack(args)
    h, n, m = _shapes(x)
    if not spec.final_state:
        return h, *(x.q.new_empty(0) for _ in range(3))
    return h, x.q.new_empty(x.C.shape, dtype=x.kept_dtype(x.C)), n, m


@torch.library.register_fake("tfla::steps_")
def _(*args: Any) -> tuple[Tensor, ...]:
    return _shapes(SCHEMA_IN_PLACE.unpack(args).x)


def _shapes(x: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors of the shapes and dtypes of h and of the new n and m."""
    n = x.q.new_empty(0) if x.n is None else x.q.new_empty(x.n.shape, dtype=x.kept_dtype(x.n))
    m = x.q.new_empty(0) if x.m is None else x.q.new_empty(x.m.shape, dtype=x.acc_dtype)
    return x.v.new_empty(x.v.shape), n, m
