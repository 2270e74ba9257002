"""Mesh axes of explicit sharding: XLA divides the operators over them, and types say how their results are divided."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def across_explicit_axes(run: Callable[..., Any]) -> Any:
    """Return a function whose arrays may be divided over explicit mesh axes, which are automatic ones inside of it.

    Its outputs are divided as v is, and its states over batch and heads as v is.

    Args:
        run: a function of static options, of a NamedTuple of arrays with v (B, T, H, dhv) and the initial states C, and
            of further arrays. It returns a tuple of h (B, T, H, dhv) and of states (N, H, ...).
    """

    @functools.wraps(run)
    def across(options: Any, x: Any, *more: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        axes = tuple(n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)
        if not axes:
            return run(options, x, *more)
        batch, time, heads, channels = jax.typeof(x.v).sharding.spec
        rows = batch if x.C is None or x.C.shape[0] == x.v.shape[0] else None  # those of a pool are not the batch

        def compute(x: Any, *more: Any) -> Any:
            h, *states = run(options, x, *more)
            return h, states

        specs = PartitionSpec(batch, time, heads, channels), PartitionSpec(rows, heads)
        h, states = jax.sharding.auto_axes(compute, axes=axes, out_sharding=specs)(x, *more)
        return h, *states

    return across


def axes_of(x: Array) -> tuple[Any, ...]:
    """Return the explicit mesh axes over which each dim of an array is divided; None where it is not."""
    return tuple(jax.typeof(x).sharding.spec)


def divided(run: Callable[..., Array], dims: tuple[Any, ...], *arrays: Array) -> Array:
    """Compute a function of arrays that may be divided over explicit mesh axes, which are automatic ones inside of it.

    Args:
        run: the function, which uses no other arrays.
        dims: the mesh axes over which each dim of its result is divided.
        arrays: its arguments.
    """
    # Outside of `jax.set_mesh`, only the types of arrays know the mesh.
    for mesh in (jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in arrays)):
        axes = tuple(n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)
        if axes:
            to = NamedSharding(mesh, PartitionSpec(*dims))
            return jax.sharding.auto_axes(run, axes=axes, out_sharding=to)(*arrays)
    return run(*arrays)


def as_state_of(v: Array, x: Array) -> Array:
    """Return an array (N, H, ...) divided over its sequences and heads as v (B, T, H, dhv) is."""
    batch, _, heads, _ = axes_of(v)
    rows = batch if x.shape[0] == v.shape[0] else None
    return divided(lambda x: x, (rows, heads, *[None] * (x.ndim - 2)), x)
