"""The running of lowered plans in functions of JAX: on their platform, under `jax.vmap`, and on the parts of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax import partitions
from tfla.jax.inputs import vary, varying_axes

PLATFORM = "cuda"  # the platform of JAX on which plans run
Arrays = tuple[Array | None, ...]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Absent:
    """An array of no elements as a pytree without leaves: XLA crashes where a `shard_map` on GPUs keeps the array."""

    shape: tuple[int, ...]
    dtype: Any


def without_empty(arrays: Iterable[Any]) -> list[Any]:
    """Return the arrays with :class:`Absent` in the places of those without elements."""
    return [Absent(x.shape, x.dtype) if x.size == 0 else x for x in arrays]


def with_empty(arrays: Iterable[Any]) -> tuple[Any, ...]:
    """Return the arrays that :func:`without_empty` was given."""
    return tuple(jnp.zeros(x.shape, x.dtype) if isinstance(x, Absent) else x for x in arrays)


def _whole(arrays: Arrays, there: tuple[Array, ...]) -> Arrays:
    """Return the arrays of `there` in their order, with None in the places where `arrays` has None."""
    left = list(there)
    return tuple(None if x is None else left.pop(0) for x in arrays)


def on_platform(lowered: Any, arrays: Arrays, otherwise: Callable[[list[Array | None]], list[Array | None]]) -> Any:
    """Run a lowered plan on NVIDIA GPUs, and another function on all other platforms.

    Args:
        lowered: the plan.
        arrays: what it is given.
        otherwise: the other function. It may return fewer results than the plan, or None or an empty array in their
            places; these are zeros. The others get the dtypes of the plan's results.
    """

    def elsewhere(*there: Array) -> list[Array]:
        axes = frozenset().union(*map(varying_axes, there))
        results = [lowered.plan.meta[n] for n in lowered.plan.results]
        found = otherwise(list(_whole(arrays, there)))
        found += [None] * (len(results) - len(found))
        dtypes = [str(like.dtype).removeprefix("torch.") for like in results]
        kept = [
            jnp.zeros(tuple(like.shape), dtype) if x is None or x.size == 0 else x.astype(dtype)
            for x, like, dtype in zip(found, results, dtypes, strict=True)
        ]
        return [vary(x, axes) for x in kept]

    branches = {PLATFORM: lambda *there: lowered(_whole(arrays, there))}
    return list(jax.lax.platform_dependent(*[x for x in arrays if x is not None], default=elsewhere, **branches))


def by_batch(launch: partitions.Launch, arrays: Arrays, dims: partitions.Dims | None) -> list[Array]:
    """Launch on the devices of a mesh, with a rule for `jax.vmap`: its axis becomes a part of the batch.

    Args:
        launch: the function that launches for given arrays.
        arrays: what it is given.
        dims: the dims of what it is given and returns; None inside of a `shard_map` over all mesh axes, without packed
            sequences.
    """

    @jax.custom_batching.custom_vmap
    def run(*there: Array) -> list[Array]:
        whole = _whole(arrays, there)
        return launch(whole) if dims is None else partitions.divided(launch, whole, dims)

    @run.def_vmap
    def run_batched(size: int, batched: list[bool], *there: Array) -> tuple[list[Array], list[bool]]:
        if size == 0:
            one = [jax.ShapeDtypeStruct(x.shape[b:], x.dtype) for x, b in zip(there, batched, strict=True)]
            found = [jnp.zeros((0, *x.shape), x.dtype) for x in jax.eval_shape(run, *one)]
            return found, [True] * len(found)
        of_heads = [False] * len(there)  # what has no rows of a batch
        packed = False
        if dims is not None:
            of_heads = [d[0] in "gh" for d, x in zip(dims.given, arrays, strict=True) if x is not None]
            # They are one row, and a pool has no rows of the batch.
            packed = dims.pool or (dims.offsets is not None and arrays[dims.offsets] is not None)
        if packed or any(b and alone for b, alone in zip(batched, of_heads, strict=True)):
            every = [x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in zip(there, batched, strict=True)]
            # No loop, and a barrier: XLA may call a kernel that overwrites an operand on a slice of a loop's arrays.
            alone = [run(*jax.lax.optimization_barrier([x[n] for x in every])) for n in range(size)]
            found = [jnp.stack(each) for each in zip(*alone, strict=True)]
            return found, [True] * len(found)
        rows = [
            x if alone else x.reshape(-1, *x.shape[2:]) if b else jnp.tile(x, (size, *[1] * (x.ndim - 1)))
            for x, b, alone in zip(there, batched, of_heads, strict=True)
        ]
        found = [x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in run(*rows)]
        return found, [True] * len(found)

    return run(*[x for x in arrays if x is not None])
