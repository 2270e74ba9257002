"""The division of planned launches over the devices of a mesh: batch and heads are independent.

Axes of a mesh that JAX divides automatically reach the launches by `custom_partitioning`, explicit ones by `shard_map`.
Inside of a `shard_map` every device launches for its own part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

# The dims of all arrays by their places in a call: batch, time, heads of q, heads of v, dqk, dhv, sequences, segments.
INPUTS = ("btgk", "btgk", "bthv", "bth", "bth", "nhkv", "nhk", "nh", "o")  # KernelInputs
SAVED = ("bthv", "bth", "shkv", "shk")  # h, d, and C and n at the starts of segments
RESULTS = ("bthv", "nhkv", "nhk", "nh", "bth", "shkv", "shk")  # tfla.backends.base.Outputs
COTANGENTS = ("bthv", "nhkv", "nhk")  # of h, C and n
GRADIENTS = ("btgk", "btgk", "bthv", "bth", "bth", "nhkv", "nhk")  # tfla.backends.base.Grads

STEP_INPUTS = (*INPUTS[:5], "nhkv", "nhk", "nh", "n", "n")  # tfla.backends.base.StepInputs; T is 1 or a few
STEP_RESULTS = RESULTS[:4]
POOLED_INPUTS = (*INPUTS[:5], "phkv", "phk", "ph", "n", "n")  # with indices of the rows


class Dims(NamedTuple):
    """The dims of what a call is given and returns."""

    given: tuple[str, ...]
    results: tuple[str, ...]
    offsets: int | None  # the place of the offsets of packed sequences
    pool: bool = False  # whether states are rows of a pool, dim p, so that the batch is not divided


FORWARD = Dims(INPUTS, RESULTS, 8)
BACKWARD = Dims(INPUTS + COTANGENTS + SAVED, GRADIENTS, 8)
STEPS = Dims(STEP_INPUTS, STEP_RESULTS, None)
POOLED_STEPS = Dims(POOLED_INPUTS, ("bthv", "phkv", "phk", "ph"), None, pool=True)
Launch = Callable[[tuple[Array | None, ...]], list[Array]]


class Division:
    """The dims of the arrays of one call, and how they are divided.

    Args:
        arrays: the given arrays.
        dims: their dims.
    """

    def __init__(self, arrays: Sequence[Array | None], dims: Dims) -> None:
        self.there = [x is not None for x in arrays]
        self.given = [dims for dims, there in zip(dims.given, self.there, strict=True) if there]
        self.results = dims.results
        v, q = arrays[2], arrays[0]
        assert v is not None
        assert q is not None
        self.packed = dims.offsets is not None and arrays[dims.offsets] is not None
        self.pool = dims.pool
        self.batch, self.heads, self.shared = v.shape[0], v.shape[2], q.shape[2]
        self.sizes = {"t": v.shape[1], "k": q.shape[3], "v": v.shape[3]}

    def spec(self, dims: str, shape: tuple[int, ...], batch: Any, heads: Any) -> P:
        """Return how an array of these dims is divided, if v is over `batch` and `heads`."""
        if len(shape) != len(dims):  # a result that was not asked for
            return P()
        axes = {"b": batch, "g": heads, "h": heads} | ({} if self.packed else {"n": batch, "s": batch})
        return P(*(axes.get(dim) if size else None for dim, size in zip(dims, shape, strict=True)))

    def axes(self, mesh: Any, spec: Any) -> tuple[Any, Any]:
        """Return the mesh axes of batch and heads from the division of v, without those that do not divide evenly."""
        spec = (*spec, None, None, None, None)

        def even(names: Any, size: int) -> Any:
            if names is None:
                return None
            names = names if isinstance(names, tuple) else (names,)
            return names if size % math.prod(mesh.shape[n] for n in names) == 0 else None

        return None if self.pool else even(spec[0], self.batch), even(spec[2], self.shared)

    def rule(self, given: Sequence[Any], results: Sequence[Any]) -> tuple[str, dict[str, int]]:
        """Return the sharding rule of Shardy for arrays of these shapes."""
        sizes: dict[str, int] = {}
        group = self.heads // self.shared

        def written(dims: str, shape: Sequence[int], place: int) -> str:
            names = []
            for d, (dim, size) in enumerate(zip(dims if len(dims) == len(shape) else "?" * len(shape), shape)):  # noqa: B905
                if dim in "gh":
                    names.append("g" if dim == "g" or group == 1 else "(g r)")
                elif dim in "bn" and not (self.packed or self.pool):
                    names.append("b")
                elif dim == "s" and not self.packed and size:
                    names.append("b" if size == self.batch else "(b s)")
                    sizes["s"] = size // self.batch
                elif size == self.sizes.get(dim):
                    names.append(dim)
                else:  # of this array alone, such as padded head dims
                    names.append(f"x{place}{'abcdef'[d]}")
            return " ".join(names)

        left = [written(d, x, n) for n, (d, x) in enumerate(zip(self.given, given, strict=True))]
        right = [written(d, x, n + 30) for n, (d, x) in enumerate(zip(self.results, results, strict=True))]
        text = ", ".join(left) + " -> " + ", ".join(right)
        fixed = {"r": group} if "r)" in text else {}
        return text, fixed | ({"s": sizes["s"]} if "(b s)" in text else {})

    def whole(self, there: Sequence[Array]) -> tuple[Array | None, ...]:
        """Return the given arrays, with None in the places of those that the call does not have."""
        left = list(there)
        return tuple(left.pop(0) if kept else None for kept in self.there)


def divided(launch: Launch, arrays: tuple[Array | None, ...], dims: Dims) -> list[Array]:
    """Launch on each device for its part of batch and heads."""
    division = Division(arrays, dims)
    there = [x for x in arrays if x is not None]
    mesh, explicit = _explicit_axes()
    if explicit:
        return _by_type(launch, division, there, mesh, explicit)
    return _automatically(launch, division)(*there)


def _explicit_axes() -> tuple[Any, set[str]]:
    """Return the mesh, and the names of its explicit axes."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return mesh, {name for name, kind in kinds if kind == AxisType.Explicit}


def by_types(arrays: tuple[Array | None, ...], dims: Dims) -> tuple[Array | None, ...]:
    """Return arrays whose types divide them over explicit axes as v is divided, so that their gradients are alike.

    Args:
        arrays: the first arrays that a launch is given.
        dims: the dims of all arrays that it is given.
    """
    mesh, explicit = _explicit_axes()
    if not explicit:
        return arrays
    division = Division(arrays, dims._replace(given=dims.given[: len(arrays)]))
    there = [x for x in arrays if x is not None]
    return division.whole(
        [jax.sharding.reshard(x, s) for x, s in zip(there, _specs(division, there, mesh), strict=True)]
    )


def _specs(division: Division, there: Sequence[Array], mesh: Any) -> tuple[P, ...]:
    """Return how the given arrays are divided where v is as its type says."""
    batch, heads = division.axes(mesh, jax.typeof(there[2]).sharding.spec)
    return tuple(division.spec(d, x.shape, batch, heads) for d, x in zip(division.given, there, strict=True))


def _by_type(launch: Launch, division: Division, there: list[Array], mesh: Any, explicit: set[str]) -> list[Array]:
    """Launch in a `shard_map` over the explicit axes, by the division that the type of v says."""
    batch, heads = division.axes(mesh, jax.typeof(there[2]).sharding.spec)
    given = _specs(division, there, mesh)
    shapes = jax.eval_shape(
        lambda *there: launch(division.whole(there)), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in there)
    )
    results = [division.spec(d, x.shape, batch, heads) for d, x in zip(division.results, shapes, strict=True)]
    run = jax.shard_map(
        lambda *there: launch(division.whole(there)), in_specs=given, out_specs=results, axis_names=explicit,
        check_vma=False,
    )  # fmt: skip
    return run(*(jax.sharding.reshard(x, s) for x, s in zip(there, given, strict=True)))


def _automatically(launch: Launch, division: Division) -> Any:
    """Return the launches as a function that XLA's partitioner divides."""

    @custom_partitioning
    def run(*there: Array) -> list[Array]:
        return launch(division.whole(there))

    def shardings(mesh: Any, given: Any, results: Any) -> tuple[Any, Any]:
        batch, heads = division.axes(mesh, given[2].sharding.spec)
        arrays = [
            NamedSharding(mesh, division.spec(d, x.shape, batch, heads))
            for d, x in zip(division.given, given, strict=True)
        ]
        found = [
            NamedSharding(mesh, division.spec(d, x.shape, batch, heads))
            for d, x in zip(division.results, results, strict=True)
        ]
        return arrays, found

    def partition(mesh: Any, given: Any, results: Any) -> Any:
        arrays, found = shardings(mesh, given, results)
        return mesh, lambda *there: launch(division.whole(there)), found, tuple(arrays)

    def rule(mesh: Any, given: Any, results: Any) -> Any:
        return division.rule([x.shape for x in given], [x.shape for x in results])

    run.def_partition(partition=partition, infer_sharding_from_operands=lambda *a: shardings(*a)[1], sharding_rule=rule)
    return run
