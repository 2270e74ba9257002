"""Triton's decoding kernels under JAX: one launch that reads the state once and writes the new one in its place.

The kernels are that of the mLSTM, whose arrays are below, and that of the delta rule, in a module of the same name
beside its other kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax import kernels, launches, partitions, state_pool
from tfla.jax.hosting import by_batch, on_platform
from tfla.jax.inputs import vary_alike
from tfla.jax.plans import GPU, Signature, signature, torch_inputs
from tfla.jax.state import State

BACKEND = "triton"
AUTOMATIC = False  # whether backend=None takes the kernel; until it is measured, it is taken by name alone


class StepInputs(NamedTuple):
    """The arrays of one call, as :class:`tfla.backends.base.StepInputs`."""

    q: Array  # (B, T, Hq, dqk)
    k: Array  # (B, T, Hq, dqk)
    v: Array  # (B, T, H, dhv)
    i: Array | None  # (B, T, H)
    f: Array  # (B, T, H)
    C: Array  # (B, H, dqk, dhv); with indices (rows, H, dqk, dhv), n and m likewise
    n: Array | None  # (B, H, dqk)
    m: Array | None  # (B, H)
    lengths: Array | None  # (B,) int
    indices: Array | None = None  # (B,) int: the rows of the state that are read and overwritten; -1: none, h is 0


class PlainSteps(NamedTuple):
    """The computation of the same call by operations of JAX, for other devices and for gradients."""

    compute: Any  # of options and StepInputs: h and the new C, n and m, None where there is none
    options: Any  # hashable


class KernelOptions(NamedTuple):
    """The options of the mLSTM's kernel."""

    scale: float
    gates: str
    eps: float
    final_state: bool


class StepKernelSpec(NamedTuple):
    """The options of one call, all of them static."""

    gpu: GPU
    plan: Any  # the function from a GPU, options, and shapes and dtypes to the lowered plan
    options: Any  # of the kernel
    dims: partitions.Dims
    kept: int  # how many of the first results exist: h, with a final state C, and with a normalizer n and m
    plain: PlainSteps


Results = tuple[Array | None, ...]  # h and the new C, n and m, or the new C alone


@functools.lru_cache(1024)
def unsupported(gpu: GPU, given: Signature) -> str | None:
    """Return why the kernel does not run these inputs on a GPU, or None."""
    from tfla.backends import BACKENDS as backends

    return why_not(gpu, lambda: backends[BACKEND].steps_unsupported(_torch_inputs(given)))


def why_not(gpu: GPU, reason: Callable[[], str | None]) -> str | None:
    """Return why kernels of steps cannot run on a GPU, `reason()` where Triton and jaxlib let them, or None."""
    from tfla.backends.gpu import runtime

    if not runtime.INSTALLED:
        return 'Triton is not installed: pip install "tfla[triton]"'
    if (missing := launches.unsupported()) is not None:
        return missing
    from tfla.backends.gpu.planning import planning

    with planning(runtime.PlannedGPU(*gpu)):
        return reason()


def _torch_inputs(given: Signature) -> Any:
    """Return the inputs as tensors of the meta device."""
    from tfla.backends import StepInputs as TorchStepInputs

    return TorchStepInputs(*torch_inputs(given))


def choose(
    backend: str | None, x: Any, unsupported: Callable[[GPU, Signature], str | None] = unsupported
) -> GPU | None:
    """Return the GPU whose kernel computes these steps, or None where plain JAX does, which XLA compiles.

    As in PyTorch, a backend without a kernel of steps is no error.

    Args:
        backend: what the caller asks for.
        x: the arrays.
        unsupported: the function that says why the kernel does not run arrays on a GPU.
    """
    gpu = kernels.present_gpu()
    if gpu is None or 0 in x.v.shape or backend not in ((None, BACKEND) if AUTOMATIC else (BACKEND,)):
        return None
    return gpu if unsupported(gpu, signature(x)) is None else None


@functools.lru_cache(256)
def plan(gpu: GPU, options: KernelOptions, given: Signature) -> Any:
    """Return the lowered plan of the steps."""
    from tfla.backends.base import StepSpec as TorchStepSpec
    from tfla.backends.gpu import planning, runtime
    from tfla.backends.triton import decode

    with planning.planning_side_by_side(runtime.PlannedGPU(*gpu)):
        x = _torch_inputs(given)
        recorder = planning.PlanRecorder(x)
        in_place = options.final_state and (x.indices is not None or x.C.dtype == x.kept_dtype(x.C))
        spec = TorchStepSpec(options.scale, options.gates, options.final_state, options.eps)  # type: ignore[arg-type]
        return launches.LoweredPlan(recorder.finish(decode.launch(recorder, x, spec, x.C if in_place else None)))


def spec_of(gpu: GPU, options: KernelOptions, x: StepInputs, plain: PlainSteps) -> StepKernelSpec:
    """Return the options of a call of the mLSTM's kernel."""
    kept = 1 if not options.final_state else 2 if x.n is None else 4
    dims = partitions.STEPS if x.indices is None else partitions.POOLED_STEPS
    return StepKernelSpec(gpu, plan, options, dims, kept, plain)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(spec: StepKernelSpec, x: Any) -> Results:
    """Compute h and the new state; parts that do not exist are None.

    Args:
        spec: the options.
        x: the arrays, a named tuple with q, k and v first, and with `lengths` and `indices`.
    """

    def launch(arrays: tuple[Array | None, ...]) -> list[Array]:
        lowered = spec.plan(spec.gpu, spec.options, signature(arrays))
        return on_platform(lowered, arrays, lambda whole: list(_plain(spec, type(x)(*whole))))

    return _kept(spec, by_batch(launch, x, spec.dims))


def by_index(
    compute: Callable[[State], tuple[Array, State]], pool: State, indices: Array | None
) -> tuple[Array, State]:
    """Compute steps in plain JAX from the rows of a pool, or from its states where there are no indices.

    Args:
        compute: the function from states (B, ...) to h (B, T, H, dhv) and new states.
        pool: the states.
        indices: (B,), the rows.

    Returns:
        h, zero at indices of -1, and the new pool.
    """
    if indices is None:
        return compute(pool)
    h, new = compute(state_pool.read_rows(pool, indices))
    return jnp.where(state_pool.like(indices >= 0, h), h, 0), state_pool.write_rows(pool, indices, new)


def _kept(spec: StepKernelSpec, found: Sequence[Array | None]) -> Results:
    """Return the first `spec.kept` results, and None in the places of the others."""
    return *found[: spec.kept], *[None] * (len(found) - spec.kept)


def _plain(spec: StepKernelSpec, x: Any) -> Results:
    """Compute the results by operations of JAX."""
    return _kept(spec, spec.plain.compute(spec.plain.options, x))


def _attend_forward(spec: StepKernelSpec, x: Any) -> tuple[Results, Any]:
    return attend(spec, x), x


def _attend_backward(spec: StepKernelSpec, x: Any, cotangents: Results) -> tuple[Any]:
    integers = {"lengths": x.lengths, "indices": x.indices}
    _, pull = jax.vjp(lambda y: _plain(spec, y._replace(**integers)), x._replace(lengths=None, indices=None))
    (found,) = pull(cotangents)
    return (found,)


attend.defvjp(_attend_forward, _attend_backward)


@functools.partial(jax.jit, static_argnums=0)
def compute(spec: StepKernelSpec, x: Any) -> Results:
    """Compute :func:`attend` as one compiled function, also where the caller is not compiled."""
    return attend(spec, type(x)(*vary_alike(*x)))
