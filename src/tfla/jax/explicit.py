"""Mesh axes of explicit sharding: XLA divides the operators over them, and types say how their results are divided."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec


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
