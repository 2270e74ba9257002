"""The plan of a call of the delta rule: what runs it, found under its call signature or chosen after its checks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tfla._util.caching import CallCache
from tfla.backends import DELTA_BACKENDS, DeltaBackend, DeltaInputs, select
from tfla.backends.delta import BetaActivation, DeltaSpec, GateActivation
from tfla.ops import checks, delta_checks, fused_activations
from tfla.ops.autocast import autocast
from tfla.ops.delta_activations import activated
from tfla.ops.dispatch import Plan, call_signature, check_kernel
from tfla.ops.state import State
from tfla.ops.transforms import compiles_alone, needs_dispatcher


class DeltaRequest(NamedTuple):
    """The arguments of one call over whole sequences, unchecked but for `scale`, as :func:`tfla.delta_rule` has them.

    The first eight fields are tensors; the fields after `cu_seqlens` are the options.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_f: Tensor | None
    read_key: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    state: State | None  # the initial state
    cu_seqlens: Tensor | None
    correct: bool  # whether a write replaces what its key reads (the delta rule); else it is added
    read_before_decay: bool
    normalize_qk: bool
    beta_activation: BetaActivation
    gate_activation: GateActivation
    lower_bound: float | None
    return_state: bool
    scale: float | None
    chunk_size: int | None
    backend: str | None
    kernel: str | None


_PLANS: CallCache[Plan] = CallCache()  # of calls that have passed the checks

READS_AFTER = "it computes reads after the decay only"


def plan(request: DeltaRequest) -> tuple[DeltaInputs, Plan]:
    """Look up what runs a call under its signature, or check the call and choose it.

    Returns:
        the inputs as the backend reads them, and the plan.

    Raises:
        ValueError, TypeError: as :func:`plan_before_activations`.
    """
    x, found = plan_before_activations(request)
    return planned_inputs(x, request, found), found


def planned_inputs(x: DeltaInputs, request: DeltaRequest, found: Plan) -> DeltaInputs:
    """Return inputs as the backend of a plan reads them, from those of :func:`plan_before_activations`."""
    if found.backend.activations_by == "backend":
        return x
    clamp_gates = not found.backend.clamps_gates
    if found.spec.normalize_qk:  # the kernels do it
        request = request._replace(normalize_qk=False)
    gates_by_kernels = found.spec.gate_activation != "none"
    if gates_by_kernels:
        request = request._replace(gate_activation="none")
    own = activated_inputs(x, request, found.backend, eager=not found.use_dispatcher, clamp_gates=clamp_gates)
    return own._replace(A_log=x.A_log, dt_bias=x.dt_bias) if gates_by_kernels else own


def plan_before_activations(request: DeltaRequest) -> tuple[DeltaInputs, Plan]:
    """Return the inputs without activations, and the plan.

    Raises:
        ValueError, TypeError: an argument is invalid, or no backend or kernel can run the call as it asks.
    """
    checks.check_chunk_size(request.chunk_size)  # here, since True equals the valid chunk size 1
    call = call_signature(request[:8], request.state, request.cu_seqlens, request[10:])
    found = _PLANS.get(call)
    if found is None:
        x, found = _check_and_choose(request, cached=call is not None)
        _PLANS.add(call, found)
    else:
        x = _inputs(request)
    return x, found


def activated_inputs(
    x: DeltaInputs, request: DeltaRequest, backend: DeltaBackend, eager: bool, clamp_gates: bool = True
) -> DeltaInputs:
    """Return inputs with the activations of the call applied, and with clamped log-gates.

    Args:
        x: the inputs.
        request: the arguments of the call.
        backend: what runs it.
        eager: whether neither a compiler nor a transform takes part, so that kernels may be launched.
        clamp_gates: whether log-gates without an activation are clamped.
    """
    by_kernels = eager and backend.activations_by == "kernels"
    apply = fused_activations.activated if by_kernels else activated
    return apply(
        x, request.normalize_qk, request.beta_activation, request.gate_activation, request.lower_bound or 0.0,
        clamp_gates,
    )  # fmt: skip


def _inputs(request: DeltaRequest) -> DeltaInputs:
    """Return the inputs as backends read them: autocast, with a dense last dimension."""
    q, k, v, beta, log_f, read_key, A_log, dt_bias, state, cu_seqlens = request[:10]
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in autocast(q, k, v))
    if read_key is not None:
        (read_key,) = autocast(read_key)
        read_key = read_key if read_key.stride(-1) == 1 else read_key.contiguous()
    C = None if state is None else state.C
    return DeltaInputs(q, k, v, beta, log_f, read_key, A_log, dt_bias, C, cu_seqlens)


def check(request: DeltaRequest) -> DeltaInputs:
    """Check the arguments of a call, apart from the names of backend and kernel.

    Returns:
        the inputs without activations.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """
    q, k, v, beta, log_f, read_key, A_log, dt_bias, state, cu_seqlens = request[:10]
    checks.check_flags(
        read_before_decay=request.read_before_decay, normalize_qk=request.normalize_qk,
        return_state=request.return_state,
    )  # fmt: skip
    delta_checks.check_tensors(q, k, v, beta, log_f, read_key, A_log, dt_bias)
    delta_checks.check_activations(
        beta, log_f, A_log, dt_bias, request.beta_activation, request.gate_activation, request.lower_bound
    )
    checks.check_chunk_size(request.chunk_size)
    if cu_seqlens is not None:
        checks.check_cu_seqlens(cu_seqlens, q)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if state is not None:
        checks.check_state(state, sequences, q, v, False, "initial_state")
    return _inputs(request)


def _check_and_choose(request: DeltaRequest, cached: bool) -> tuple[DeltaInputs, Plan]:
    """Check a call and choose what runs it."""
    x = check(request)
    backend, kernel, chunk_size = choose(
        x, bool(request.read_before_decay), request.backend, request.kernel, request.chunk_size
    )
    spec = spec_of(request, x, backend, kernel, chunk_size)
    use_dispatcher = not cached and needs_dispatcher(x)
    if not use_dispatcher or compiles_alone():
        # Gradients may be asked of a graph that was traced without them.
        asked = spec._replace(save=spec.save or use_dispatcher)
        if request.normalize_qk and backend.normalizes(x, asked):
            spec = spec._replace(normalize_qk=True)
        if request.gate_activation != "none" and backend.activates(x, asked):
            spec = spec._replace(gate_activation=request.gate_activation, lower_bound=request.lower_bound or 0.0)
    return x, Plan(backend, spec, use_dispatcher, cached, True)


def spec_of(request: DeltaRequest, x: DeltaInputs, backend: DeltaBackend, kernel: str, chunk_size: int) -> DeltaSpec:
    """Return the options that the chosen backend gets."""
    spec = DeltaSpec(
        scale=x.q.shape[-1] ** -0.5 if request.scale is None else request.scale,
        correct=request.correct,
        read_before_decay=bool(request.read_before_decay),
        chunk_size=chunk_size,
        kernel=kernel,
        save=torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x),
        final_state=bool(request.return_state),
    )
    if backend.activations_by == "backend":
        spec = spec._replace(
            normalize_qk=bool(request.normalize_qk), beta_activation=request.beta_activation,
            gate_activation=request.gate_activation, lower_bound=request.lower_bound or 0.0,
        )  # fmt: skip
    return spec


def choose(
    x: DeltaInputs, read_before_decay: bool, backend: str | None, kernel: str | None, chunk_size: int | None
) -> tuple[DeltaBackend, str, int]:
    """Choose what runs a call: what the caller asks for, else the backend's default.

    Raises:
        ValueError: no backend or kernel has that name, or it cannot run these inputs (the message says why).
    """
    able = {n: b for n, b in DELTA_BACKENDS.items() if b.reads_before_decay or not read_before_decay}
    if isinstance(backend, str) and backend in DELTA_BACKENDS and backend not in able:
        raise ValueError(f"backend: {backend!r} cannot run these inputs: {READS_AFTER}")
    chosen = select(backend, x, able)
    return chosen, *choose_kernel(chosen, x, read_before_decay, kernel, chunk_size)


def choose_kernel(
    chosen: DeltaBackend, x: DeltaInputs, read_before_decay: bool, kernel: str | None, chunk_size: int | None
) -> tuple[str, int]:
    """Choose the kernel of a backend that runs a call, and its chunk size: what the caller asks for, else the default.

    Raises:
        ValueError: the backend has no kernel of that name, or it cannot run these inputs (the message says why).
    """
    check_kernel(kernel, chosen, x)
    if read_before_decay and kernel in chosen.read_after_decay:
        raise ValueError(f"kernel: {kernel!r} cannot run these inputs: {READS_AFTER}")
    if kernel is None:
        kernel = chosen.kernels[0] if read_before_decay else chosen.default_kernel(x, chunk_size)
    return kernel, chunk_size or chosen.default_chunk_size(x, kernel)
