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
    """Check the indices of some sequences of a state and return them as an array (R,). Traced values are not checked.

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
        raise TypeError(f"rows: got dtype {rows.dtype}, expected int64{MASK * (str(rows.dtype) == 'bool')}")
    if rows.ndim != 1:
        raise ValueError(f"rows: got shape {tuple(rows.shape)}, expected one dimension")
    if not isinstance(rows, jax.core.Tracer):
        values = np.asarray(rows).tolist()
        for row in values:
            if not 0 <= row < count:
                raise ValueError(f"rows: got {row}, expected from 0 to {count - 1}")
            if once and values.count(row) > 1:
                raise ValueError(f"rows: got {row} more than once, expected each sequence once")
    return jnp.asarray(rows)
