"""The plan of a call of decoding steps of the delta rule, found under its call signature or chosen after its checks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tfla._util.caching import CallCache
from tfla.backends import DELTA_BACKENDS, select_steps
from tfla.backends.delta import BetaActivation, DeltaStepInputs, DeltaStepSpec, GateActivation
from tfla.ops import checks, delta_checks
from tfla.ops.autocast import autocast
from tfla.ops.dispatch import call_signature
from tfla.ops.state import State
from tfla.ops.step_dispatch import StepPlan
from tfla.ops.transforms import transforms_active


class DeltaStepRequest(NamedTuple):
    """The arguments of one call of a few steps, unchecked but for `scale`."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_f: Tensor | None
    read_key: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    state: State
    lengths: Tensor | None
    # The fields from here on are the options.
    time: bool  # whether tensors have a dimension of time
    correct: bool
    read_before_decay: bool
    normalize_qk: bool
    beta_activation: BetaActivation
    gate_activation: GateActivation
    lower_bound: float | None
    return_state: bool
    in_place: bool
    scale: float | None
    backend: str | None
    # The last field is a tensor.
    state_indices: Tensor | None = None  # the rows of the state, which is a pool

    @property
    def overwrites(self) -> bool:
        """True if the steps overwrite C of the state."""
        return self.in_place or (self.state_indices is not None and self.return_state)


_PLANS: CallCache[StepPlan] = CallCache()  # of calls that have passed the checks


def plan(request: DeltaStepRequest) -> StepPlan:
    """Look up what runs a call under its signature, or check the call and choose it.

    Raises:
        ValueError, TypeError: an argument is invalid, or no backend has that name.
    """
    call = call_signature(
        request[:8], request.state, request.lengths, request[10:-1], state_indices=request.state_indices
    )
    found = _PLANS.get(call)
    if found is None:
        found = _check_and_choose(request, cached=call is not None)
        _PLANS.add(call, found)
    return found


def step_inputs(request: DeltaStepRequest) -> DeltaStepInputs:
    """Return the inputs as backends read them: autocast, with a dimension of time."""
    q, k, v, beta, log_f, read_key, A_log, dt_bias, state, lengths = request[:10]
    q, k, v = autocast(q, k, v)
    if read_key is not None:
        (read_key,) = autocast(read_key)
    timed: tuple[Tensor | None, ...] = q, k, v, beta, log_f, read_key
    if not request.time:
        timed = tuple(None if t is None else t.unsqueeze(1) for t in timed)
    return DeltaStepInputs(*timed, A_log, dt_bias, state.C, lengths, request.state_indices)  # type: ignore[call-arg, arg-type]


def _check_and_choose(request: DeltaStepRequest, cached: bool) -> StepPlan:
    """Check a call and choose what runs it."""
    q, k, v, beta, log_f, read_key, A_log, dt_bias, state, lengths = request[:10]
    return_state, in_place = request.return_state, request.in_place
    checks.check_flags(
        read_before_decay=request.read_before_decay, normalize_qk=request.normalize_qk, return_state=return_state,
        in_place=in_place,
    )  # fmt: skip
    delta_checks.check_tensors(q, k, v, beta, log_f, read_key, A_log, dt_bias, time=request.time)
    delta_checks.check_activations(
        beta, log_f, A_log, dt_bias, request.beta_activation, request.gate_activation, request.lower_bound
    )
    checks.check_step_state(state, request.state_indices, q, v, False)
    if request.time:
        checks.check_few_steps(v, return_state, lengths, in_place)
    checks.check_lengths(lengths, v)
    x = step_inputs(request)
    spec = DeltaStepSpec(
        scale=q.shape[-1] ** -0.5 if request.scale is None else request.scale,
        correct=request.correct,
        read_before_decay=bool(request.read_before_decay),
        final_state=bool(return_state),
        normalize_qk=bool(request.normalize_qk),
        beta_activation=request.beta_activation,
        gate_activation=request.gate_activation,
        lower_bound=request.lower_bound or 0.0,
    )
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)
    transformed = transforms_active()
    if request.overwrites:
        by = "in_place: got True" if request.state_indices is None else "state_indices: got them"
        checks.check_in_place(state, {"C": x.kept_dtype}, recorded, transformed, by)
    backend = select_steps(request.backend, x, DELTA_BACKENDS)
    if recorded or transformed:  # the kernels have neither gradients nor rules for transforms
        backend = None
    given = request.q, request.k, request.v, request.read_key
    read = x.q, x.k, x.v, x.read_key
    same_dtypes = all(a is None or b is None or a.dtype == b.dtype for a, b in zip(read, given, strict=True))
    return StepPlan(backend, spec, cached and backend is not None and same_dtypes)
