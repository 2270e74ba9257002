"""FLOPs of this library's own ways, part by part, by the same rules as the paper's forms. L is a tile, S a segment.

fused      walks on a GPU, the state on chip from tile to tile: one walk forward, one each for dq, dk and dv backward.
           N_v programs share out the columns of a head's state, N_k its rows, and each makes the products inside tiles
segments   the same, in segments of S steps from states that one more walk makes, and `join`
segmented  the chunkwise backend on a CPU: products inside tiles once for all gradients, states stored every S steps

Gates are made once, by scans, with the max state known before the walks: they carry no running maximum.
"""

from __future__ import annotations

import sympy as sp

from tfla.paper.algorithms.backward import of_denominator
from tfla.paper.algorithms.symbols import (
    ABS,
    CAUSAL,
    DD,
    DHV,
    DQK,
    EXP,
    MAX,
    NK,
    NV,
    SIG,
    VEC,
    Gate,
    L,
    Parts,
    S,
    T,
    log_gates,
)

BLOCK = 1024  # steps whose states the chunkwise backend keeps at once: only what lies before them is walked again


def gates(gate: Gate) -> sp.Expr:
    """Log-gates, sums over the tile, weights of state and updates, the decay; with a normalizer m, F, I, exp(-m)."""
    normalizer = L * (VEC * 4 + MAX + EXP) if gate == "exp" else 0
    return L * log_gates(gate) + VEC * 5 * L + 2 * L * EXP + EXP + normalizer


def weighted(product: sp.Expr) -> sp.Expr:
    """A product inside the tile, times the gate matrix exp(row + column)."""
    return CAUSAL * (product + L**2 * (VEC * 2 + EXP))


def update(width: sp.Expr = DQK) -> sp.Expr:
    """Weight a tile's rows, decay the state, add their product."""
    return 2 * L * DD + VEC * (L * width + DD)


def fused_forward(gate: Gate) -> Parts:
    """One tile."""
    parts = {
        "gates": gates(gate),
        "P": NV * weighted(2 * L**2 * DQK),
        "outputs": CAUSAL * 2 * L**2 * DHV + 2 * L * DD + VEC * L * DHV,
        "state": update(NV * DQK),
    }
    if gate == "exp":
        parts["normalizer"] = NV * (CAUSAL * VEC * L**2 + 4 * L * DQK + L * (VEC * 2 + ABS + MAX)) + VEC * L * DHV
    return parts


def of_gates(gate: Gate) -> sp.Expr:
    """q dq and k dk, their running sum by a scan, and the derivative of each logsigmoid."""
    return VEC * 4 * L * DQK + L * (VEC * 2 + (1 if gate == "exp" else 2) * (VEC + SIG))


def fused_backward(gate: Gate) -> Parts:
    """One tile: dv is a walk over columns, dq and dk are walks over rows."""
    row = NK * weighted(2 * L**2 * DHV) + CAUSAL * 2 * L**2 * DQK + 2 * L * DD + VEC * L * DQK + update()
    parts = {
        "gates": gates(gate) + of_gates(gate),
        "dv": NV * weighted(2 * L**2 * DQK) + CAUSAL * 2 * L**2 * DHV + 2 * L * DD + VEC * L * DHV + update(NV * DQK),
        "dq": row,
        "dk": row,
    }
    if gate == "exp":
        parts["normalizer"] = of_denominator(L) + NK * 2 * CAUSAL * VEC * L**2 + 4 * L * DQK + VEC * 5 * L * DQK
    return parts


def boundaries(gate: Gate) -> sp.Expr:
    """Of one tile: the walk that only makes states, but not the one behind the last segment, which nobody wants, and
    its share of joining them, one a segment."""
    walked = update() + (2 * L * DQK if gate == "exp" else 0)
    joined = VEC * 2 * (DD + (DQK if gate == "exp" else 0)) * L / S
    return (1 - S / T) * walked + joined


def segments_forward(gate: Gate) -> Parts:
    return fused_forward(gate) | {"states of segments": boundaries(gate)}


def segments_backward(gate: Gate) -> Parts:
    return fused_backward(gate) | {"cotangents of segments": boundaries(gate)}


def segmented_forward(gate: Gate) -> Parts:
    return {name: part.subs({NV: 1}) for name, part in fused_forward(gate).items()}


def segmented_backward(gate: Gate) -> Parts:
    """One tile; S is at least BLOCK."""
    parts = {
        "gates": gates(gate) + of_gates(gate),
        "P and dS": weighted(2 * L**2 * DQK) + CAUSAL * (2 * L**2 * DHV + VEC * L**2),
        "dq": CAUSAL * 2 * L**2 * DQK + 2 * L * DD + VEC * L * DHV,
        "dk": CAUSAL * 2 * L**2 * DQK + 2 * L * DD + VEC * L * DHV,
        "dv": CAUSAL * 2 * L**2 * DHV + 2 * L * DD + VEC * L * DQK,
        "states and cotangents": 4 * L * DD + VEC * 2 * DD,
        "states of a chunk again": (1 - BLOCK / S) * update(),
    }
    if gate == "exp":
        parts["normalizer"] = of_denominator(L) + CAUSAL * VEC * L**2 + VEC * 9 * L * DQK
    return parts
