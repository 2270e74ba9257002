"""The FLOPs of the backward pass of the paper's algorithms, which the paper does not count.

They follow the paper's rules: a quantity that one kernel computes twice counts once, a quantity that two kernels
compute counts twice. The gradients are the exact ones of docs/mathematics.md, including the denominator's. `do` is the
cotangent of the numerator and `dd` that of the denominator, `dP = do v^T + dd`. The gradients of the gates follow from
sums of q dq and k dk.
"""

from __future__ import annotations

import sympy as sp

from tfla.paper.algorithms.forward import running_sums
from tfla.paper.algorithms.symbols import (
    ABS,
    CAUSAL,
    DD,
    DHV,
    DQK,
    EXP,
    MASK,
    MAX,
    SIG,
    VEC,
    Gate,
    L,
    Parts,
    T,
    log_gates,
)


def of_denominator(steps: sp.Expr) -> sp.Expr:
    """Count do and dd from dh: the product h dh, two divisions, and the recomputation of max(|d|, exp(-m))."""
    return steps * (VEC * (3 * DHV + 3) + ABS + MAX + EXP)


def of_gates(gate: Gate, steps: sp.Expr) -> sp.Expr:
    """Count q dq and k dk, their running sum, and the derivative of each logsigmoid."""
    return VEC * 4 * steps * DQK + running_sums(steps) + steps * ((1 if gate == "exp" else 2) * (VEC + SIG) + VEC)


def gate_matrix(gate: Gate) -> sp.Expr:
    """Count the gate matrix of a chunk, with the max state from the forward pass."""
    return CAUSAL * L**2 * ((3 if gate == "exp" else 2) * VEC + EXP)


def chunkwise(gate: Gate) -> Parts:
    """Count one chunk of L steps: the cotangents of the states, then a kernel each for dq, dk and dv (Table 1)."""
    exp = gate == "exp"
    gates = running_sums(L) + L * log_gates(gate) + gate_matrix(gate)
    from_dP = CAUSAL * (2 * L**2 * (DHV + DQK) + VEC * (3 if exp else 2) * L**2) + 2 * L * DD + VEC * 2 * L * DQK
    parts = {
        "cotangents of states": VEC * 2 * DD + 2 * L * DD + VEC * L * DQK + running_sums(L) + L * log_gates(gate),
        "dq": gates + from_dP,
        "dk": gates + from_dP,
        "dv": gates + CAUSAL * (2 * L**2 * (DQK + DHV) + VEC * 2 * L**2) + 2 * L * DD + VEC * (L * DQK + L * DHV),
        "gates": of_gates(gate, L),
    }
    if exp:
        parts["denominator"] = of_denominator(L) + VEC * 2 * DQK + 2 * L * DQK + VEC * 3 * L * DQK
    return parts


def parallel(gate: Gate) -> Parts:
    """Count a sequence, with the recomputation of the T x T logits, which are not stored."""
    exp = gate == "exp"
    parts = {
        "cumulative forget gates": running_sums(T) + T * log_gates(gate),
        "gate matrix": T**2 * ((3 if exp else 2) * VEC + EXP + MASK),
        "logits again": CAUSAL * (2 * T**2 * DQK + VEC * 2 * T**2),
        "dP": CAUSAL * (2 * T**2 * DHV + VEC * (3 if exp else 2) * T**2),
        "dq": CAUSAL * 2 * T**2 * DQK,
        "dk": CAUSAL * 2 * T**2 * DQK,
        "dv": CAUSAL * 2 * T**2 * DHV,
        "gates": of_gates(gate, T),
    }
    if exp:
        parts["denominator"] = of_denominator(T)
    return parts


def recurrent(gate: Gate) -> Parts:
    """Count one step, with the states of all steps stored."""
    parts = {
        "cotangent of the state": VEC * (3 * DD + DQK),
        "dq": 2 * DD + VEC * DQK,
        "dk": 2 * DD + VEC * DQK,
        "dv": 2 * DD + VEC * DHV,
        "gates": of_gates(gate, sp.Integer(1)) + 2 * EXP,
    }
    if gate == "exp":
        parts["denominator"] = of_denominator(sp.Integer(1)) + VEC * 7 * DQK
    return parts
