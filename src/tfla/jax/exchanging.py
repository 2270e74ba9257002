"""The kernels for GPUs of a sequence that is divided over a mesh axis: launches with collectives between them.

The plans are those of PyTorch's context parallelism (:mod:`tfla.backends.gpu.exchanging`): each device makes the rows
of its steps from the states of segments, all devices gather them, and each one composes those before its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType

from tfla.jax.plans import GPU, KernelInputs, KernelSpec, Signature, torch_inputs

SUMS_OF_FORWARD, SUMS_OF_BACKWARD = 10, 19  # the places of the sums of log-gates among results and given arrays
STATES = slice(5, 8)  # C, n and m among the given arrays
GRADIENTS_OF_STATES = slice(5, 7)  # among the results of the backward
Arrays = tuple[Array | None, ...]


def mesh_unsupported() -> str | None:
    """Return why launches cannot exchange states in the function that is being traced, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    outside = [n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual]
    return f"with context_parallel it needs a shard_map over all mesh axes, not without {outside}" if outside else None


@functools.lru_cache(1024)
def chunk_size(backend: str, gpu: GPU, given: Signature, wanted: int) -> int | None:
    """Return the chunk size with which a device cuts its own steps into segments, or None where it cannot.

    Args:
        backend: the backend.
        gpu: the GPU.
        given: shapes and dtypes of the inputs.
        wanted: the chunk size of the call, which is taken where it leaves several segments.
    """
    from tfla.backends import BACKENDS as backends
    from tfla.backends import Inputs as TorchInputs
    from tfla.backends.base import Spec as TorchSpec
    from tfla.backends.gpu import runtime
    from tfla.backends.gpu.planning import planning

    x = TorchInputs(*torch_inputs(given))
    with planning(runtime.PlannedGPU(*gpu)):
        for steps in (wanted, -(-x.v.shape[1] // 2)):
            spec = TorchSpec(
                scale=1.0, normalize=True, normalizer_grad=True, chunk_size=steps, kernel="fused", save=True,
                final_state=True,
            )  # fmt: skip
            if backends[backend].has_segments(x, spec):
                return steps
    return None


def unsupported(backend: str, gpu: GPU, given: Signature) -> str | None:
    """Return why a backend does not run these inputs on the devices of a mesh axis, or None."""
    dims = kernel_head_dims(backend, gpu, given)
    padded = tuple(
        None if array is None else (_with_head_dims(array[0], place, dims), array[1])
        for place, array in enumerate(given)
    )
    if chunk_size(backend, gpu, padded, 1) is None:
        return "with context_parallel it needs several tiles of steps on each device"
    return mesh_unsupported()


@functools.lru_cache(1024)
def kernel_head_dims(backend: str, gpu: GPU, given: Signature) -> tuple[int, int]:
    """Return the head dims dqk and dhv of the kernels of a backend for these inputs."""
    from tfla.backends import Inputs as TorchInputs
    from tfla.backends.gpu import runtime
    from tfla.backends.gpu.planning import planning

    x = TorchInputs(*torch_inputs(given))
    if backend != "hopper":
        return int(x.q.shape[3]), int(x.v.shape[3])
    from tfla.backends.hopper.head_dims import padded_dims_of

    with planning(runtime.PlannedGPU(*gpu)):
        return padded_dims_of(x)


def _with_head_dims(shape: tuple[int, ...], place: int, dims: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of an array of :class:`KernelInputs`, by its place, with other head dims dqk and dhv."""
    of_last = {"q": dims[:1], "k": dims[:1], "v": dims[1:], "C": dims, "n": dims[:1]}
    own = of_last.get(KernelInputs._fields[place], ())
    return *shape[: len(shape) - len(own)], *own


def pad_heads(x: KernelInputs, dims: tuple[int, int]) -> KernelInputs:
    """Return the inputs with zeros after the channels of heads, so that states have the shape that kernels exchange."""

    def padded(place: int, t: Array | None) -> Array | None:
        if t is None:
            return None
        more = zip(_with_head_dims(t.shape, place, dims), t.shape, strict=True)
        return jnp.pad(t, [(0, new - old) for new, old in more])

    return KernelInputs(*(padded(place, t) for place, t in enumerate(x)))  # type: ignore[arg-type]


def launch(
    spec: KernelSpec, arrays: Arrays, forward: bool, planned: Callable[[KernelSpec, Arrays, bool], list[Array]]
) -> list[Array]:
    """Launch a forward or a backward.

    Sums of log-gates, which kernels read as (devices, B, H) float64, are (B, devices, H, 2) outside: batch first, so
    that `jax.vmap` can extend it, and two float32 numbers each, since JAX may have no float64.

    Args:
        spec: the options.
        arrays: what the plan is given, as :mod:`tfla.jax.plans` says.
        forward: whether it is a forward.
        planned: the function that runs the plan.
    """
    with jax.enable_x64(True):
        first = jax.lax.axis_index(spec.axis) == 0  # the others' initial states are not read

        def on_first(x: Array | None) -> Array | None:
            return None if x is None else jnp.where(first, x, jnp.zeros_like(x))

        if forward:
            arrays = (*arrays[: STATES.start], *map(on_first, arrays[STATES]), *arrays[STATES.stop :])
        else:
            sums = arrays[SUMS_OF_BACKWARD]
            assert sums is not None
            wide = sums.astype(jnp.float64).sum(-1).swapaxes(0, 1)
            arrays = (*arrays[:SUMS_OF_BACKWARD], wide, *arrays[SUMS_OF_BACKWARD + 1 :])
        found: list[Any] = planned(spec, arrays, forward)
        if forward:
            wide = found[SUMS_OF_FORWARD].swapaxes(0, 1)
            high = wide.astype(jnp.float32)
            found[SUMS_OF_FORWARD] = jnp.stack([high, (wide - high).astype(jnp.float32)], -1)
        else:
            found[GRADIENTS_OF_STATES] = map(on_first, found[GRADIENTS_OF_STATES])
    return found
