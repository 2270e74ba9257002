"""The head dims of the Hopper kernels, and those to which the heads of a call are padded."""

from __future__ import annotations

import itertools

from tfla.backends.base import Inputs

DIMS = (128, 256, 512, 1024)
SMALL_HEADS = ((64, 64), (64, 128), (128, 64))  # (dqk, dhv)
PADDED_DIMS = (*SMALL_HEADS, *itertools.product(DIMS, DIMS))


def padded_head_dims(dqk: int, dhv: int) -> tuple[int, int] | None:
    """Return the head dims of the kernels that take heads of `dqk` and `dhv`, or None where there are none.

    TMA reads zeros where heads of the kernels are wider than those of the inputs, and does not write there. dqk
    and dhv are at least half of those of the kernels.
    """
    if dqk % 8 or dhv % 8:  # TMA needs rows that are multiples of 16 bytes
        return None
    for K, V in PADDED_DIMS:
        if K <= 2 * dqk <= 2 * K and V <= 2 * dhv <= 2 * V:
            return K, V
    return None


def supports(dqk: int, dhv: int) -> bool:
    """Return whether the backend takes heads of `dqk` and `dhv`."""
    return padded_head_dims(dqk, dhv) is not None


def padded_dims_of(x: Inputs) -> tuple[int, int]:
    """Return the head dims of the kernels for inputs that the backend takes."""
    found = padded_head_dims(int(x.q.shape[3]), int(x.v.shape[3]))
    assert found is not None, "heads of other sizes are unsupported"
    return found
