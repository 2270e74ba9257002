"""Triton's decoding kernel of the delta rule and of gates by channel under JAX, which applies all activations."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from jax import Array

from tfla.jax import partitions, step_kernels
from tfla.jax.delta.inputs import Rule
from tfla.jax.plans import GPU, Signature, torch_inputs
from tfla.jax.step_kernels import PlainSteps, StepKernelSpec, compute

__all__ = ["StepArrays", "choose", "compute", "plan", "spec_of", "unsupported"]


class StepArrays(NamedTuple):
    """The arrays of one call, as :class:`tfla.backends.delta.DeltaStepInputs`."""

    q: Array  # (B, T, Hq, dqk)
    k: Array  # (B, T, Hq, dqk)
    v: Array  # (B, T, H, dhv)
    beta: Array | None  # (B, T, H)
    log_f: Array | None  # (B, T, H) or (B, T, H, dqk)
    read_key: Array | None  # (B, T, Hq, dqk)
    A_log: Array | None  # (H,)
    dt_bias: Array | None  # (H,) or (H, dqk)
    C: Array  # (B, H, dqk, dhv); with indices (rows, H, dqk, dhv)
    lengths: Array | None  # (B,) int
    indices: Array | None = None  # (B,) int, as in tfla.jax.step_kernels.StepInputs


class KernelOptions(NamedTuple):
    """The options of the kernel."""

    rule: Rule
    final_state: bool


def _torch_inputs(given: Signature) -> Any:
    """Return the inputs as tensors of the meta device."""
    from tfla.backends.delta import DeltaStepInputs

    return DeltaStepInputs(*torch_inputs(given))


@functools.lru_cache(1024)
def unsupported(gpu: GPU, given: Signature) -> str | None:
    """Return why the kernel does not run these inputs on a GPU, or None."""
    from tfla.backends import DELTA_BACKENDS

    backend = DELTA_BACKENDS[step_kernels.BACKEND]
    return step_kernels.why_not(gpu, lambda: backend.steps_unsupported(_torch_inputs(given)))


def choose(backend: str | None, x: StepArrays) -> GPU | None:
    """Return the GPU whose kernel computes these steps, or None where plain JAX does."""
    return step_kernels.choose(backend, x, unsupported)


@functools.lru_cache(256)
def plan(gpu: GPU, options: KernelOptions, given: Signature) -> Any:
    """Return the lowered plan of the steps."""
    from tfla.backends.delta import DeltaStepSpec
    from tfla.backends.gpu import planning, runtime
    from tfla.backends.triton import delta_decode
    from tfla.jax.launches import LoweredPlan

    with planning.planning_side_by_side(runtime.PlannedGPU(*gpu)):
        x, rule = _torch_inputs(given), options.rule
        recorder = planning.PlanRecorder(x)
        spec = DeltaStepSpec(
            scale=rule.scale, correct=rule.correct, read_before_decay=rule.read_before_decay,
            final_state=options.final_state, normalize_qk=rule.normalize_qk, lower_bound=rule.lower_bound,
            beta_activation=rule.beta_activation, gate_activation=rule.gate_activation,  # type: ignore[arg-type]
        )  # fmt: skip
        in_place = options.final_state and (x.indices is not None or x.C.dtype == x.kept_dtype)
        return LoweredPlan(recorder.finish(delta_decode.launch(recorder, x, spec, x.C if in_place else None)))


def spec_of(gpu: GPU, rule: Rule, x: StepArrays, final_state: bool, plain: PlainSteps) -> StepKernelSpec:
    """Return the options of a call."""
    gates = "bth" if x.log_f is None or x.log_f.ndim == 3 else "bthk"
    bias = "h" if x.dt_bias is None or x.dt_bias.ndim == 1 else "hk"
    states = "nhkv" if x.indices is None else "phkv"
    inputs = ("btgk", "btgk", "bthv", "bth", gates, "btgk", "h", bias, states, "n", "n")
    dims = partitions.Dims(inputs, ("bthv", states), None, x.indices is not None)
    return StepKernelSpec(gpu, plan, KernelOptions(rule, final_state), dims, 2 if final_state else 1, plain)
