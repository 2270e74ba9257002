"""The operator of decoding steps of the delta rule, registered as `tfla::delta_steps` and `tfla::delta_steps_`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tfla.backends import DELTA_BACKENDS
from tfla.backends.delta import DeltaStepInputs, DeltaStepSpec
from tfla.ops import flops, state_pool
from tfla.ops.delta_step_dispatch import DeltaStepRequest, plan, step_inputs
from tfla.ops.delta_step_reference import compute_steps
from tfla.ops.state import State
from tfla.ops.step_dispatch import StepPlan
from tfla.ops.step_registration import StepOperator
from tfla.ops.transforms import is_distributed


def _shapes(x: DeltaStepInputs) -> tuple[Tensor, ...]:
    """Return empty tensors of the shapes and dtypes of h and of the new C."""
    return x.v.new_empty(x.v.shape), x.q.new_empty(x.C.shape, dtype=x.kept_dtype)


delta_steps = StepOperator(
    "delta_steps", inputs=DeltaStepInputs, spec=DeltaStepSpec, backends=DELTA_BACKENDS, state=("C",), shapes=_shapes,
    count=flops.delta_steps_flops,
)  # fmt: skip


def compute(request: DeltaStepRequest) -> tuple[Tensor, State]:
    """Compute the steps of a call, or of the same call on the local tensors of DTensors.

    Returns:
        h, with a dimension of time where the request has one, and the new state, of empty tensors without return_state.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """
    if not is_distributed(request.q):
        return _run(request, plan(request))
    from tfla.ops import sharded

    return sharded.run_steps(
        {name: getattr(request, name) for name in (*request._fields[:8], "lengths")}, request.state,
        request.state_indices, lambda local, state: compute(request._replace(**local, state=state)),
        time=request.time, return_state=request.return_state,
    )  # fmt: skip


def _run(request: DeltaStepRequest, plan: StepPlan) -> tuple[Tensor, State]:
    """Run the steps as planned, with the results of :func:`compute`."""
    state = request.state
    if plan.replay is not None:
        into = state.C if request.overwrites else None
        h, C = plan.replay((*request[:8], state.C, request.lengths, request.state_indices, into))
        return h, State(C)
    if plan.backend is None:
        h, C = _compute(step_inputs(request), plan.spec, request.in_place)
    else:
        h, C = _run_backend(request, plan)
    return h if request.time else h.squeeze(1), State(C)


def _compute(x: DeltaStepInputs, spec: DeltaStepSpec, in_place: bool) -> tuple[Tensor, Tensor]:
    """Compute the steps in plain PyTorch, and overwrite the state where the call does."""
    if x.indices is None:
        h, C = compute_steps(x, spec)
        return h, x.C.copy_(C) if in_place else C
    pool = State(x.C)
    rows = state_pool.PoolRows(state_pool.checked(x.indices, pool), x.C.shape[0])
    h, C = compute_steps(x._replace(C=rows.read(x.C)), spec)
    if spec.final_state:
        rows.write(x.C, C)
    return state_pool.without_padding(h, rows.indices), x.C


def _run_backend(request: DeltaStepRequest, plan: StepPlan) -> Sequence[Tensor]:
    """Call the registered operator, and keep its recorded launches where that was planned."""
    x = step_inputs(request)
    found = delta_steps(x, plan.backend.name, plan.spec, request.overwrites)
    if plan.record:
        plan.record = False
        plan.replay = plan.backend.steps_replay(x, plan.spec, x.C if request.overwrites else None, request.time)
    return found
