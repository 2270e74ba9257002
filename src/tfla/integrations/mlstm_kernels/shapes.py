"""The check of the inputs of kernels of mlstm_kernels, which PyTorch and JAX share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def check_inputs(
    check_float: Callable[..., object], check_shape: Callable[..., object], q: Any, k: Any, v: Any, i: Any, f: Any
) -> None:
    """Check the dtypes and the shapes of the inputs.

    Args:
        check_float, check_shape: the checks of one array, of :mod:`tfla.ops.checks` or :mod:`tfla.jax.checks`.
        q, k: (B, NH, S, DHQK).
        v: (B, NH, S, DHHV).
        i, f: (B, NH, S).

    Raises:
        TypeError, ValueError: an input has another dtype or shape.
    """
    for name, t in {"q": q, "k": k, "v": v, "i": i, "f": f}.items():
        check_float(name, t)
    check_shape("q", q, ("B", "NH", "S", "DHQK"))
    check_shape("k", k, tuple(q.shape))
    check_shape("v", v, (*q.shape[:3], "DHHV"))
    for name, t in {"i": i, "f": f}.items():
        check_shape(name, t, tuple(q.shape[:3]))
