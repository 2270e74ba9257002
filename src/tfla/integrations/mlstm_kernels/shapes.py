"""The checks of the inputs of kernels of mlstm_kernels, which PyTorch and JAX share."""

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


def check_step(
    check_float: Callable[..., object], check_shape: Callable[..., object], q: Any, v: Any, i: Any, f: Any, c: Any,
    n: Any, m: Any,
) -> None:  # fmt: skip
    """Check the dtypes and the shapes of the inputs of a step; the operator checks k.

    Args:
        check_float, check_shape: those of :func:`check_inputs`.
        q: (B, NH, DHQK).
        v: (B, NH, DHHV).
        i, f: (B, NH, 1).
        c, n, m: (B, NH, DHQK, DHHV), (B, NH, DHQK) and (B, NH, 1).

    Raises:
        TypeError, ValueError: an input has another dtype or shape.
    """
    for name, x in {"q": q, "v": v, "i": i, "f": f, "c": c, "n": n, "m": m}.items():
        check_float(name, x)
    check_shape("q", q, ("B", "NH", "DHQK"))
    check_shape("v", v, (*q.shape[:2], "DHHV"))
    check_shape("c", c, (*q.shape, v.shape[-1]))
    check_shape("n", n, tuple(q.shape))
    for name, x in {"i": i, "f": f, "m": m}.items():
        check_shape(name, x, (*q.shape[:2], 1))
