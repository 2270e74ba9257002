"""The checks of the rows of a state, with the messages of :class:`tfla.State`."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tfla.ops.state import MASK


def checked_rows(rows: Any, count: int, once: bool = False) -> Array:
    """Check the indices of some sequences of a state and return them as an array (R,).

    The values of arrays that are traced or on other devices than CPUs are not checked: the host would wait for them.

    Args:
        rows: the indices, an int32 or int64 array or a list of integers.
        count: the number of sequences of the state.
        once: whether each may occur at most once.

    Raises:
        TypeError, ValueError: they are no one-dimensional integers, out of range, or an index occurs twice.
    """
    if not isinstance(rows, jax.Array | np.ndarray):
        if not isinstance(rows, Sequence) or not all(isinstance(row, numbers.Integral) for row in rows):
            raise TypeError(f"rows: got {rows!r}, expected an array or a list of integers")
        if any(isinstance(row, bool) for row in rows):
            raise TypeError(f"rows: got {rows!r}, expected an array or a list of integers{MASK}")
        rows = np.array(rows, np.int32)
    if str(rows.dtype) not in ("int32", "int64"):
        mask = MASK * (str(rows.dtype) == "bool")
        raise TypeError(f"rows: got dtype {rows.dtype}, expected int32 or int64{mask}")
    if rows.ndim != 1:
        raise ValueError(f"rows: got shape {tuple(rows.shape)}, expected one dimension")
    if is_readable(rows):
        values = np.asarray(rows)
        for row in values[(values < 0) | (values >= count)][:1]:
            raise ValueError(f"rows: got {row}, expected from 0 to {count - 1}")
        if once:
            check_once("rows", values, "sequence once")
    return jnp.asarray(rows)


def check_once(name: str, values: np.ndarray, allowed: str) -> None:
    """Raise ValueError, which names the first such value, if one of them occurs more than once."""
    _, first, counts = np.unique(values, return_index=True, return_counts=True)
    for at in np.sort(first[counts > 1])[:1]:
        raise ValueError(f"{name}: got {values[at]} more than once, expected each {allowed}")


def is_readable(x: Any) -> bool:
    """Return whether the host reads an array without waiting: NumPy's, or JAX's on CPUs of this process."""
    if isinstance(x, np.ndarray):
        return True
    if isinstance(x, jax.core.Tracer):
        return False
    return x.is_fully_addressable and all(device.platform == "cpu" for device in x.devices())
