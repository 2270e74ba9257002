"""The checks of the arguments of the operators on JAX.

Messages are those of :mod:`tfla.ops.checks`: they name the argument, what was given and what is allowed. Values of
arrays that are traced cannot be checked.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import numbers
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from tfla._util.shapes import check_input_shapes, check_shape, state_parts
from tfla.jax.state import State
from tfla.ops.checks import LONGEST_STEPS

FLOATS = ("float64", "float32", "bfloat16", "float16")
STORE_DTYPES = ("float32", "bfloat16")
INTS = ("int32", "int64")


def is_array(x: object) -> bool:
    """Return whether x is an array of JAX or NumPy."""
    return isinstance(x, jax.Array | np.ndarray)


def is_traced(x: object) -> bool:
    """Return whether the values of x are unknown, since a transform traces it."""
    return isinstance(x, jax.core.Tracer)


STATIC = "name it in static_argnames of jax.jit, or pass it by functools.partial"


def check_static(**options: object) -> None:
    """Check that the values of options are known when a call is traced."""
    for name, option in options.items():
        if is_traced(option):
            raise TypeError(f"{name}: got an array that is traced, expected an option that is static: {STATIC}")


def check_float(name: str, x: object) -> None:
    """Check that an argument is an array of a float dtype that the operators support."""
    if not is_array(x):
        raise TypeError(f"{name}: got {type(x).__name__}, expected an array")
    dtype = x.dtype  # type: ignore[attr-defined]
    if str(dtype) not in FLOATS:
        raise TypeError(f"{name}: got dtype {dtype}, expected a float dtype: {', '.join(FLOATS)}")


def same_dtype(a: Any, b: Any) -> bool:
    """Return whether JAX reads two arrays in one dtype: float64 of NumPy is float32 without `jax_enable_x64`."""
    return bool(jax.dtypes.canonicalize_dtype(a.dtype) == jax.dtypes.canonicalize_dtype(b.dtype))


def check_inputs(q: Any, k: Any, v: Any, gates: dict[str, Any], time: bool) -> None:
    """Check shapes and dtypes of one call.

    Args:
        q, k, v: (B, T, Hq, dqk), (B, T, Hq, dqk), (B, T, H, dhv), or without T.
        gates: (B, T, H) or (B, H), by name.
        time: whether arrays have the dimension T.
    """
    for name, x in {"q": q, "k": k, "v": v, **gates}.items():
        check_float(name, x)
    if time and q.ndim > 1 and jax.export.is_symbolic_dim(q.shape[1]):
        raise ValueError(
            f"q: got T = {q.shape[1]}, expected a number: steps of an export may not be symbolic, the batch may"
        )
    check_input_shapes(q, k, v, gates, time)
    for name, x in {"k": k, "v": v}.items():
        if not same_dtype(x, q):
            raise TypeError(f"{name}: got dtype {x.dtype}, expected that of q, {q.dtype}")


def check_state(state: object, sequences: int, q: Any, v: Any, normalize: bool, name: str) -> None:
    """Check type, shapes and dtypes of a state for the given number of sequences."""
    if not isinstance(state, State):
        raise TypeError(f"{name}: got {type(state).__name__}, expected tfla.jax.State")
    for part, x, shape in state_parts(state, sequences, q, v, normalize, name, "an array"):
        check_float(part, x)
        check_shape(part, x, shape)


def check_cu_seqlens(cu_seqlens: Any, q: Any, axis: str | None = None, name: str = "q") -> None:
    """Check the offsets of packed sequences: an array, or a tuple of ints. Traced values are not checked.

    Args:
        cu_seqlens: the offsets.
        q: (B, T, ...).
        axis: the mesh axis over whose devices the steps are divided, T on each of them.
        name: the name of ``q`` for the caller.
    """
    if isinstance(cu_seqlens, tuple):
        if any(map(is_traced, cu_seqlens)):
            raise TypeError(
                f"cu_seqlens: got a tuple of traced numbers, expected an array, or a tuple that is static: {STATIC}"
            )
        if not all(isinstance(x, numbers.Integral) and not isinstance(x, bool) for x in cu_seqlens):
            raise TypeError(f"cu_seqlens: got {cu_seqlens!r}, expected an int32 or int64 array or a tuple of ints")
        shape: tuple[int, ...] = (len(cu_seqlens),)
    else:
        if not is_array(cu_seqlens) or str(cu_seqlens.dtype) not in INTS:
            got = cu_seqlens.dtype if is_array(cu_seqlens) else type(cu_seqlens).__name__
            raise TypeError(f"cu_seqlens: got {got}, expected an int32 or int64 array or a tuple of ints")
        shape = tuple(cu_seqlens.shape)
    if len(shape) != 1 or shape[0] < 2:
        raise ValueError(f"cu_seqlens: got shape {shape}, expected (sequences + 1,)")
    if q.shape[0] != 1:
        raise ValueError(f"{name}: got batch {q.shape[0]}, expected 1 with cu_seqlens: sequences are packed along time")
    if not is_traced(cu_seqlens):
        at, T = np.asarray(cu_seqlens).tolist(), q.shape[1] * (1 if axis is None else jax.lax.axis_size(axis))
        if at[0] != 0 or at[-1] != T:
            raise ValueError(f"cu_seqlens: goes from {at[0]} to {at[-1]}, expected from 0 to T = {T}")
        if any(a > b for a, b in itertools.pairwise(at)):
            raise ValueError(f"cu_seqlens: got {at}, expected values that never fall")


def check_store_dtype(store_dtype: Any) -> Any:
    """Check the dtype of the states that are stored for the backward, and return it as a NumPy dtype or None."""
    if store_dtype is None:
        return None
    if is_array(store_dtype):  # NumPy takes an array for its dtype
        raise TypeError(f"store_dtype: got {type(store_dtype).__name__}, expected a dtype or None")
    try:
        dtype = jnp.dtype(store_dtype)
    except (TypeError, ValueError):
        raise TypeError(f"store_dtype: got {type(store_dtype).__name__}, expected a dtype or None") from None
    if str(dtype) not in STORE_DTYPES:
        raise ValueError(f"store_dtype: got {dtype}, allowed are None, {', '.join(STORE_DTYPES)}")
    return dtype


def check_scale(scale: Any) -> float | None:
    """Check the scale and return it as a float, or None."""
    if scale is None:
        return None
    if is_traced(scale):
        raise TypeError(
            "scale: got an array that is traced, expected a number, which has no gradient: multiply q by the array and "
            "pass scale=1.0"
        )
    if is_array(scale):
        if scale.ndim or str(scale.dtype) not in (*FLOATS, *INTS):
            got = f"shape {tuple(scale.shape)}" if scale.ndim else f"dtype {scale.dtype}"
            raise TypeError(f"scale: got an array of {got}, expected a number or None")
        scale = scale.item()
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale: got {type(scale).__name__}, expected a number or None")
    value = float(scale)
    if not math.isfinite(value):
        raise ValueError(f"scale: got {value}, expected a finite number")
    return value


def check_few_steps(v: Any, return_state: bool, lengths: object) -> None:
    """Check the number of decoding steps, and that lengths are given only with a state to return."""
    if not 1 <= v.shape[1] <= LONGEST_STEPS:
        raise ValueError(
            f"v: got T = {v.shape[1]}, expected from 1 to {LONGEST_STEPS}; operators over whole sequences take more"
        )
    if lengths is not None and not return_state:
        raise ValueError("lengths: got it with return_state=False, expected it with a state to return")


def check_lengths(lengths: Any, v: Any) -> None:
    """Check the lengths of decoding steps, (B,). Traced values are not checked."""
    if lengths is None:
        return
    if not is_array(lengths) or str(lengths.dtype) not in INTS:
        got = lengths.dtype if is_array(lengths) else type(lengths).__name__
        raise TypeError(f"lengths: got {got}, expected an int32 or int64 array")
    check_shape("lengths", lengths, (v.shape[0],))
    if not is_traced(lengths) and lengths.size:
        values = np.asarray(lengths)
        low, high = int(values.min()), int(values.max())
        if low < 0 or high > v.shape[1]:
            raise ValueError(f"lengths: got values from {low} to {high}, expected from 0 to T = {v.shape[1]}")


def check_in_place(in_place: object) -> None:
    """Check that a step is not asked to overwrite its state, which arrays of JAX do not allow."""
    if in_place:
        raise ValueError(
            "in_place: got True, expected False: arrays are never overwritten. Donate the state to a jitted function "
            "instead (jax.jit with donate_argnames)"
        )


def check_context_parallel(axis: object, backend: str | None = None, allowed: tuple[str, ...] = ()) -> None:
    """Check the name of the mesh axis over which the sequence is divided.

    Args:
        axis: the argument of the call.
        backend: its backend, or None for a layer.
        allowed: the backends that divide sequences.

    Raises:
        TypeError, ValueError: it is no string, no axis of a `shard_map` around the call, as axes of `jax.vmap` are
            none, or together with another backend.
    """
    if axis is None:
        return
    if not isinstance(axis, str):
        raise TypeError(f"context_parallel: got {type(axis).__name__}, expected the name of a mesh axis or None")
    if backend is not None and backend not in allowed:
        names = ", ".join(map(repr, allowed))
        raise ValueError(f"context_parallel: got it with backend {backend!r}, expected {names}")
    mesh = jax.sharding.get_abstract_mesh()
    if axis in mesh.manual_axes:
        return
    got = repr(axis)
    with contextlib.suppress(NameError):  # the backward would not know that axis, or would count states several times
        jax.lax.axis_size(axis)
        got += ", an axis of jax.vmap"
    raise ValueError(f"context_parallel: got {got}, expected an axis of the mesh of a jax.shard_map around the call")
