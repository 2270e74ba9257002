"""Chunk sizes that minimize FLOPs (111) or runtime (121), solved from the counts of the parts."""

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
    """The chunk size where mLSTMsig's forward takes least time, for an accelerator of so many FLOP/byte, in 16 bits.

    With an intensity of 0, where bytes are free, it is that of the fewest FLOPs.
    """
    form = get("chunkwise", "sig")
    seconds = simplified(form.flops_expr) + INTENSITY * form.bytes_expr  # times the accelerator's FLOP/s
    seconds = sp.expand(seconds.subs({DQK: P * DHV, B_QKV: 2, B_IF: 2}))
    (best,) = (root for root in sp.solve(sp.diff(seconds, L), L) if root.could_extract_minus_sign() is False)
    return best


@cache
def _compiled() -> Callable[..., Any]:
    return sp.lambdify([DHV, P, CAUSAL, INTENSITY, B_C], optimum(), "numpy")


def flop_optimal_chunk(dhv: Any, pqk: Any, causal: float = 0.5) -> Any:
    """L_opt,FLOP of mLSTMsig's forward (111).

    Args:
        dhv: head dim of v, a number or an array.
        pqk: dqk / dhv.
        causal: part of each square that is computed, at least 1/2.
    """
    return _compiled()(dhv, pqk, causal, 0.0, 0.0)


def runtime_optimal_chunk(dhv: Any, pqk: Any, intensity: Any, causal: float = 0.5, state_bytes: float = 4) -> Any:
    """L_opt,Runtime of mLSTMsig's forward (121), by paper's model: no overlap of computing and moving.

    Args:
        intensity: of the accelerator, FLOP/byte (117).
        state_bytes: of one element of a stored state.
    """
    return _compiled()(dhv, pqk, causal, intensity, state_bytes)
