"""The plans of the kernels for GPUs: the launches of a forward and a backward of :mod:`tfla.backends`, by signature.

With a mesh axis over which sequences are divided, the launch code of context parallelism is planned, whose collectives
become steps of the plan.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

from jax import Array

Signature = tuple[tuple[tuple[int, ...], str] | None, ...]  # shapes and dtypes of arrays


class GPU(NamedTuple):
    """The GPU that kernels are compiled for, as :class:`tfla.backends.gpu.runtime.PlannedGPU` describes it."""

    architecture: int  # 90 for sm_90
    processors: int  # its multiprocessors
    float32_products: str  # a value of tfla.jax.kernels.PRODUCTS, or "tf32"


class KernelSpec(NamedTuple):
    """The options of one call, all of them static."""

    backend: str
    gpu: GPU
    options: Any  # tfla.backends.base.Spec
    axis: str | None = None  # of the mesh, over whose devices the sequence is divided
    devices: int = 1  # along that axis
    head_dims: tuple[int, int] | None = None  # dqk and dhv of the results, where the arrays have padded heads


class KernelInputs(NamedTuple):
    """The arrays of one call, as :class:`tfla.backends.base.Inputs`: gates are those of the model."""

    q: Array  # (B, T, Hq, dqk)
    k: Array  # (B, T, Hq, dqk)
    v: Array  # (B, T, H, dhv)
    i: Array | None  # (B, T, H)
    f: Array  # (B, T, H)
    C: Array | None  # (N, H, dqk, dhv) float32
    n: Array | None  # (N, H, dqk) float32
    m: Array | None  # (N, H) float32
    cu_seqlens: Array | None  # (N + 1,) int32


def signature(arrays: tuple[Array | None, ...]) -> Signature:
    """Return shapes and dtypes of arrays."""
    return tuple(None if x is None else (tuple(x.shape), str(x.dtype)) for x in arrays)


def result_signature(plan: Any) -> Signature:
    """Return shapes and dtypes of the results of a recorded plan."""
    results = (plan.meta[n] for n in plan.results)
    return tuple((tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in results)


def torch_inputs(given: Signature) -> Any:
    """Return tensors of the meta device of these shapes and dtypes."""
    import torch

    from tfla.backends.gpu.planning import like

    return [None if x is None else like(x[0], getattr(torch, x[1])) for x in given]


def family(backend: str, x: Any) -> Any:
    """Return the launch code of a backend for these inputs."""
    if backend == "triton":
        from tfla.backends.triton import fused

        return fused.FAMILY
    from tfla.backends import hopper

    return hopper._family(x)


def _exchange(spec: KernelSpec) -> Any:
    """Return the exchange of states over the mesh axis of a call."""
    from tfla.backends.gpu.planning import PlannedExchange

    return PlannedExchange(spec.devices, spec.options.final_state)


def _backward_inputs(spec: KernelSpec, results: Signature) -> Signature:
    """Return shapes and dtypes of what a backward is given beside the inputs of a forward with these results."""
    h, C, n, _, *saved = results
    final, normalize = spec.options.final_state, spec.options.normalize
    return h, C if final else None, n if final and normalize else None, h, *saved


@functools.lru_cache(256)
def forward_plan(spec: KernelSpec, given: Signature) -> Any:
    """Return the lowered plan of a forward.

    Its results are those of :class:`tfla.backends.base.Outputs`. With a mesh axis, C, n and m are those of whole
    sequences, and these follow: the states C, n and m before the steps of this device, the sums of log-gates over the
    steps of each device, (devices, B, H) float64, the max states after the steps of this device, and m once more.

    A forward that saves also compiles the kernels of its backward, beside its own.
    """
    from tfla.backends import Inputs as TorchInputs
    from tfla.backends.base import Starts
    from tfla.backends.gpu import planning, runtime
    from tfla.jax.launches import LoweredPlan

    with planning.planning_side_by_side(runtime.PlannedGPU(*spec.gpu)):
        x = TorchInputs(*torch_inputs(given))
        code, recorder = family(spec.backend, x), planning.PlanRecorder(x)
        if spec.axis is None:
            plan = recorder.finish(code.forward(code.context(recorder, x, spec.options)))
            if spec.options.save:
                backward_plan(spec, (*given, *_backward_inputs(spec, result_signature(plan))))
            return LoweredPlan(plan)
        # The cotangents of later steps are stabilized with the max states after the steps of this device.
        options = spec.options._replace(final_state=spec.options.normalize)
        ctx = replace(code.context(recorder, x, options), exchange=_exchange(spec))
        out, found = code.forward(ctx), Starts(*ctx.exchanged)
        whole = found.final_C, found.final_n, found.final_m
        further = found.C, found.n, found.m, found.log_decays, out.m, found.final_m
        return LoweredPlan(recorder.finish([out.h, *whole, out.d, out.chunk_C, out.chunk_n, *further]), spec.axis)


@functools.lru_cache(256)
def backward_plan(spec: KernelSpec, given: Signature) -> Any:
    """Return the lowered plan of a backward, whose inputs are those of the forward, dh, dC, dn, h, d and states.

    With a mesh axis, further results of the forward follow, as :func:`forward_plan` says. dC and dn are the cotangents
    of the final states of whole sequences from this device, of which those of all devices are added up.
    """
    from tfla.backends import Inputs as TorchInputs
    from tfla.backends.base import Outputs
    from tfla.backends.gpu import planning, runtime
    from tfla.jax.launches import LoweredPlan

    with planning.planning_side_by_side(runtime.PlannedGPU(*spec.gpu)):
        tensors = torch_inputs(given)
        x = TorchInputs(*tensors[:9])
        dh, dC, dn, h, d, chunk_C, chunk_n, *further = tensors[9:]
        out = Outputs(h=h, C=h, n=h, m=h, d=d, chunk_C=chunk_C, chunk_n=chunk_n)
        options = spec.options
        if spec.axis is not None:
            C, n, m, log_decays, last_m, final_m = further
            x = x._replace(C=C, n=n if options.normalize else None, m=m if options.normalize else None)
            options = options._replace(final_state=False)
        code, recorder = family(spec.backend, x), planning.PlanRecorder(tensors)
        ctx = code.context(recorder, x, options)
        if spec.axis is not None:
            none = h.new_empty(0)
            cotangents = (none if t is None else t for t in (dC, dn))
            ctx = replace(ctx, exchange=_exchange(spec), saved=(last_m, log_decays, final_m, *cotangents))
            dC = dn = None
        return LoweredPlan(recorder.finish(code.backward(ctx, out, dh, dC, dn)), spec.axis)
