"""The operator of decoding steps, registered as `tfla::steps` and, with C overwritten in place, `tfla::steps_`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tfla.backends import BACKENDS, Backend, StepInputs
from tfla.backends.base import StepSpec
from tfla.ops import flops, state_pool
from tfla.ops.dispatch import Request
from tfla.ops.state import State
from tfla.ops.step_dispatch import StepPlan, step_inputs
from tfla.ops.step_reference import compute_steps
from tfla.ops.step_registration import StepOperator


def _shapes(x: StepInputs) -> tuple[Tensor, ...]:
    """Return empty tensors of the shapes and dtypes of h and of the new C, n and m."""
    n = x.q.new_empty(0) if x.n is None else x.q.new_empty(x.n.shape, dtype=x.kept_dtype(x.n))
    m = x.q.new_empty(0) if x.m is None else x.q.new_empty(x.m.shape, dtype=x.acc_dtype)
    return x.v.new_empty(x.v.shape), x.q.new_empty(x.C.shape, dtype=x.kept_dtype(x.C)), n, m


steps = StepOperator(
    "steps", inputs=StepInputs, spec=StepSpec, backends=BACKENDS, state=("C", "n", "m"), shapes=_shapes,
    count=flops.steps_flops,
)  # fmt: skip


def run(request: Request, plan: StepPlan) -> tuple[Tensor, State]:
    """Run the steps as planned.

    Returns:
        h, with a dimension of time where the request has one, and the new state, of empty tensors without return_state.
    """
    state = request.state
    assert state is not None
    if plan.replay is not None:
        into = state.C if request.overwrites else None
        h, C, n, m = plan.replay((*request[:5], *state, request.lengths, request.state_indices, into))
        return h, State(C, n, m) if request.normalize else State(C)
    if plan.backend is None:
        h, (C, n, m) = _compute(step_inputs(request), plan.spec, request.in_place)  # type: ignore[assignment]
    else:
        h, C, n, m = _run_backend(request, plan, plan.backend)
    return h if request.time else h.squeeze(1), State(C, n, m) if request.normalize else State(C)


def _compute(x: StepInputs, spec: StepSpec, in_place: bool) -> tuple[Tensor, State]:
    """Compute the steps in plain PyTorch, and overwrite the state where the call does."""
    if x.indices is None:
        h, new = compute_steps(x, spec)
        return h, new._replace(C=x.C.copy_(new.C)) if in_place else new
    pool = State(x.C, x.n, x.m)
    rows = state_pool.PoolRows(state_pool.checked(x.indices, pool), x.C.shape[0])
    C, n, m = rows.read_state(pool)
    h, new = compute_steps(x._replace(C=C, n=n, m=m), spec)
    if spec.final_state:
        rows.write_state(pool, new)
    return state_pool.without_padding(h, rows.indices), pool


def _run_backend(request: Request, plan: StepPlan, backend: Backend) -> Sequence[Tensor]:
    """Call the registered operator, and keep its recorded launches where that was planned."""
    x = step_inputs(request)
    found = steps(x, backend.name, plan.spec, request.overwrites)
    if plan.record:
        plan.record = False
        plan.replay = backend.steps_replay(x, plan.spec, x.C if request.overwrites else None, request.time)
    return found
