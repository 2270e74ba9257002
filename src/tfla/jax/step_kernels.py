"""Triton's decoding kernel under JAX: one launch that reads the state once and writes the new one in its place."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax import Array

from tfla.jax import kernels, launches, partitions
from tfla.jax.hosting import by_batch, on_platform
from tfla.jax.inputs import vary_alike
from tfla.jax.kernels import GPU, Signature, signature

BACKEND = "triton"
AUTOMATIC = False  # whether backend=None takes the kernel; until it is measured, it is taken by name alone


class StepInputs(NamedTuple):
    """The arrays of one call, as :class:`tfla.backends.base.StepInputs`."""

    q: Array  # (B, T, Hq, dqk)
    k: Array  # (B, T, Hq, dqk)
    v: Array  # (B, T, H, dhv)
    i: Array | None  # (B, T, H)
    f: Array  # (B, T, H)
    C: Array  # (B, H, dqk, dhv)
    n: Array | None  # (B, H, dqk)
    m: Array | None  # (B, H)
    lengths: Array | None  # (B,) int


class PlainSteps(NamedTuple):
    """The same call in plain JAX."""

    compute: Any  # of options and StepInputs: h and the new C, n and m, None where there is none
    options: Any  # hashable


class StepKernelSpec(NamedTuple):
    """The options of one call, all of them static."""

    gpu: GPU
    scale: float
    gates: str
    eps: float
    final_state: bool
    plain: PlainSteps


Results = tuple[Array | None, ...]  # h and the new C, n and m


@functools.lru_cache(1024)
def unsupported(gpu: GPU, given: Signature) -> str | None:
    """Return why the kernel does not run these inputs on a GPU, or None."""
    from tfla.backends import BACKENDS as backends
    from tfla.backends.gpu import runtime

    if not runtime.INSTALLED:
        return 'Triton is not installed: pip install "tfla[triton]"'
    if (reason := launches.unsupported()) is not None:
        return reason
    from tfla.backends.gpu.planning import planning

    with planning(runtime.PlannedGPU(*gpu)):
        return backends[BACKEND].steps_unsupported(_torch_inputs(given))


def _torch_inputs(given: Signature) -> Any:
    """Return the inputs as tensors of the meta device."""
    from tfla.backends import StepInputs as TorchStepInputs

    return TorchStepInputs(*kernels.torch_inputs(given))


def choose(backend: str | None, x: StepInputs) -> GPU | None:
    """Return the GPU whose kernel computes these steps, or None where plain JAX does, which XLA compiles.

    As in PyTorch, a backend without a kernel of steps is no error.
    """
    gpu = kernels.present_gpu()
    if gpu is None or 0 in x.v.shape or backend not in ((None, BACKEND) if AUTOMATIC else (BACKEND,)):
        return None
    return gpu if unsupported(gpu, signature(x)) is None else None


@functools.lru_cache(256)
def _plan(spec: StepKernelSpec, given: Signature) -> Any:
    """Return the lowered plan of the steps."""
    from tfla.backends.base import StepSpec as TorchStepSpec
    from tfla.backends.gpu import planning, runtime
    from tfla.backends.triton import decode

    with planning.planning(runtime.PlannedGPU(*spec.gpu)):
        x = _torch_inputs(given)
        recorder = planning.PlanRecorder(x)
        in_place = spec.final_state and x.C.dtype == x.kept_dtype(x.C)
        options = TorchStepSpec(spec.scale, spec.gates, spec.final_state, spec.eps)  # type: ignore[arg-type]
        out = decode.launch(recorder, x, options, x.C if in_place else None)
        return launches.LoweredPlan(recorder.finish(out))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(spec: StepKernelSpec, x: StepInputs) -> Results:
    """Compute h and the new C, n and m; parts that do not exist are None."""

    def launch(arrays: tuple[Array | None, ...]) -> list[Array]:
        lowered = _plan(spec, signature(arrays))
        return on_platform(lowered, arrays, lambda whole: list(_plain(spec, StepInputs(*whole))))  # type: ignore[arg-type]

    h, C, n, m = by_batch(launch, x, partitions.STEPS)
    if not spec.final_state:
        return h, None, None, None
    return (h, C, None, None) if x.n is None else (h, C, n, m)


def _plain(spec: StepKernelSpec, x: StepInputs) -> Results:
    """Compute the same in plain JAX."""
    found: Results = spec.plain.compute(spec.plain.options, x)
    return found if spec.final_state else (found[0], None, None, None)


def _attend_forward(spec: StepKernelSpec, x: StepInputs) -> tuple[Results, StepInputs]:
    return attend(spec, x), x


def _attend_backward(spec: StepKernelSpec, x: StepInputs, cotangents: Results) -> tuple[StepInputs]:
    _, pull = jax.vjp(lambda y: _plain(spec, y._replace(lengths=x.lengths)), x._replace(lengths=None))
    (found,) = pull(cotangents)
    return (found,)


attend.defvjp(_attend_forward, _attend_backward)


@functools.partial(jax.jit, static_argnums=0)
def compute(spec: StepKernelSpec, x: StepInputs) -> Results:
    """Compute :func:`attend` as one compiled function, also where the caller is not compiled."""
    return attend(spec, StepInputs(*vary_alike(*x)))
