"""The arrays and the options of one call, as the implementations of the operator read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Inputs(NamedTuple):
    """The arrays of one call; Hq divides H, and N is the number of sequences.

    Log-gates are finite. They and the initial state have the dtype of the arithmetic, float64 if q is float64, else
    float32.
    """

    q: Array  # (B, T, Hq, dqk)
    k: Array  # (B, T, Hq, dqk)
    v: Array  # (B, T, H, dhv)
    log_i: Array  # (B, T, H)
    log_f: Array  # (B, T, H)
    C: Array  # (N, H, dqk, dhv), the initial state
    n: Array | None  # (N, H, dqk); None: no normalizer
    m: Array | None  # (N, H); None: no normalizer
    cu_seqlens: Array | None  # (N + 1,) int, of packed sequences; None: N = B, or the offsets are in Spec
    offset: Array | None = None  # (B, T, H), added to the stabilized denominators max(|d|, exp(-m)); "chunkwise" only

    @property
    def group(self) -> int:
        """The number of heads of v for each head of q and k."""
        return self.v.shape[2] // self.q.shape[2]


class Spec(NamedTuple):
    """The options of one call, all of them static."""

    backend: str
    kernel: str
    scale: float  # factor of the queries
    normalize: bool  # with n, m and the denominator
    normalizer_grad: bool  # False: no gradient through the denominator, as in the paper
    chunk_size: int  # distance in steps between stored states
    grows: bool  # log-gates may be above 0 without a normalizer, so that weights may be large
    store_dtype: Any  # of stored states; None: that of the arithmetic
    offsets: tuple[int, ...] | None = None  # of packed sequences, where they are known when the call is traced
    axis: str | None = None  # of the mesh, over whose devices the sequence is divided


def acc_dtype(x: Array) -> Any:
    """Return the dtype of the arithmetic and of states for q, k and v of the dtype of ``x``."""
    return jnp.float64 if jax.dtypes.canonicalize_dtype(x.dtype) == jnp.float64 else jnp.float32


def vary_alike(*arrays: Array | None) -> tuple[Any, ...]:
    """Return the arrays, each varying over all mesh axes of a `shard_map` over which any of them varies.

    Loops and rules for gradients need equal types of what they carry. Gradients of an array that did not vary are
    summed over the axes.
    """
    axes = frozenset().union(*(varying_axes(x) for x in arrays if x is not None))
    return tuple(None if x is None else vary(x, axes) for x in arrays)


def vary(x: Array, axes: frozenset[str]) -> Array:
    """Return an array that varies over these mesh axes, beside those over which it does already."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def varying_axes(x: Array) -> frozenset[str]:
    """Return the mesh axes over which an array varies in the `shard_map` that is being traced."""
    kind = jax.typeof(x)
    kind = getattr(kind, "manual_axis_type", kind)  # the name differs between versions of JAX
    axes: frozenset[str] = getattr(kind, "varying", None) or getattr(kind, "vma", None) or frozenset()
    return axes
