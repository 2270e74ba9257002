"""The chunk sizes that minimize FLOPs (111) or runtime (121), solved from the counts of the parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import sympy as sp

from tfla.paper.algorithms.algorithm import get
from tfla.paper.algorithms.symbols import B_C, B_IF, B_QKV, CAUSAL, DHV, DQK, L, simplified

P = sp.Symbol("p_qk", positive=True)
INTENSITY = sp.Symbol("I_acc", nonnegative=True)  # of the accelerator, FLOP/byte


@cache
def optimum() -> sp.Expr:
    """Return the chunk size at which the forward of mLSTMsig takes the least time, with 16-bit inputs.

    It depends on the accelerator's FLOP per byte. An intensity of 0, where bytes are free, gives the fewest FLOPs.
    """
    algorithm = get("chunkwise", "sig")
    seconds = simplified(algorithm.flops_expr) + INTENSITY * algorithm.bytes_expr  # times the accelerator's FLOP/s
    seconds = sp.expand(seconds.subs({DQK: P * DHV, B_QKV: 2, B_IF: 2}))
    (best,) = (root for root in sp.solve(sp.diff(seconds, L), L) if root.could_extract_minus_sign() is False)
    return best


@cache
def _compiled() -> Callable[..., Any]:
    """Return the optimal chunk size as a function of dhv, dqk / dhv, the causal factor, intensity and bytes."""
    return sp.lambdify([DHV, P, CAUSAL, INTENSITY, B_C], optimum(), "numpy")


def flop_optimal_chunk(dhv: Any, pqk: Any, causal: float = 0.5) -> Any:
    """Return L_opt,FLOP of the forward of mLSTMsig (111).

    Args:
        dhv: head dim of v, a number or an array.
        pqk: dqk / dhv.
        causal: the computed part of each square of the gate matrix, at least 1/2.
    """
    return _compiled()(dhv, pqk, causal, 0.0, 0.0)


def runtime_optimal_chunk(dhv: Any, pqk: Any, intensity: Any, causal: float = 0.5, state_bytes: float = 4) -> Any:
    """Return L_opt,Runtime of the forward of mLSTMsig (121), without overlap of computation and memory traffic.

    Args:
        dhv: head dim of v, a number or an array.
        pqk: dqk / dhv.
        intensity: the accelerator's FLOP per byte (117).
        causal: the computed part of each square of the gate matrix, at least 1/2.
        state_bytes: the bytes of one element of a stored state.
    """
    return _compiled()(dhv, pqk, causal, intensity, state_bytes)
