"""The FLOPs of this library's own algorithms by part, counted by the paper's rules. L is a tile, S a segment.

fused      the fused scans on a GPU, which keep the state on chip from tile to tile: one scan in the forward pass, one
           each for dq, dk and dv in the backward pass. N_v programs share the columns of a head's state, N_k programs
           share its rows, and each of them computes the products inside tiles
segments   the fused scans over segments of S steps, from states that one more scan computes and state passing combines
segmented  the chunkwise backend on a CPU: the products inside tiles once for all gradients, states stored every S steps

The gate kernels compute the max state before the scans, which need no running maximum.
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

BLOCK = 1024  # steps whose states the chunkwise backend keeps at once; only earlier states are recomputed


def gates(gate: Gate) -> sp.Expr:
    """Count the log-gates, sums over the tile, weights of state and updates, the decay; for mLSTMexp m and exp(-m)."""
    normalizer = L * (VEC * 4 + MAX + EXP) if gate == "exp" else 0
    return L * log_gates(gate) + VEC * 5 * L + 2 * L * EXP + EXP + normalizer


def weighted(product: sp.Expr) -> sp.Expr:
    """Count a product inside the tile and its multiplication by the gate matrix exp(row + column)."""
    return CAUSAL * (product + L**2 * (VEC * 2 + EXP))


def update(width: sp.Expr = DQK) -> sp.Expr:
    """Count the update of the state: weights of the tile's rows, the decay of the state, the product."""
    return 2 * L * DD + VEC * (L * width + DD)


def fused_forward(gate: Gate) -> Parts:
    """Count one tile."""
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
    """Count q dq and k dk, their running sum by a scan, and the derivative of each logsigmoid."""
    return VEC * 4 * L * DQK + L * (VEC * 2 + (1 if gate == "exp" else 2) * (VEC + SIG))


def fused_backward(gate: Gate) -> Parts:
    """Count one tile: the scan for dv holds columns of the state, the scans for dq and dk hold rows."""
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


def segment_states(gate: Gate) -> sp.Expr:
    """Count the states at segment starts, for one tile.

    A scan computes what each segment but the last adds to the state; state passing combines one state a segment.
    """
    scanned = update() + (2 * L * DQK if gate == "exp" else 0)
    passed = VEC * 2 * (DD + (DQK if gate == "exp" else 0)) * L / S
    return (1 - S / T) * scanned + passed


def segments_forward(gate: Gate) -> Parts:
    """Count one tile of the forward pass in segments."""
    return fused_forward(gate) | {"states of segments": segment_states(gate)}


def segments_backward(gate: Gate) -> Parts:
    """Count one tile of the backward pass in segments."""
    return fused_backward(gate) | {"cotangents of segments": segment_states(gate)}


def segmented_forward(gate: Gate) -> Parts:
    """Count one tile of the forward pass of the chunkwise backend."""
    return {name: part.subs({NV: 1}) for name, part in fused_forward(gate).items()}


def segmented_backward(gate: Gate) -> Parts:
    """Count one tile of the backward pass of the chunkwise backend; S is at least BLOCK."""
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
