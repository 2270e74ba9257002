"""FLOPs of the paper's forms, backward, which the paper does not count. By its rules: what one kernel computes twice
counts once, what two kernels compute counts twice.

The gradients are the exact ones of docs/mathematics.md, through the denominator too. `do` is the cotangent of the
numerator, `dd` of the denominator, `dP = do v^T + dd`; gradients of the gates come from sums of q dq and k dk.
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
    """do and dd from dh: h dh, two divisions, and max(|d|, exp(-m)) again."""
    return steps * (VEC * (3 * DHV + 3) + ABS + MAX + EXP)


def of_gates(gate: Gate, steps: sp.Expr) -> sp.Expr:
    """q dq and k dk, their running sum, and the derivative of each logsigmoid."""
    return VEC * 4 * steps * DQK + running_sums(steps) + steps * ((1 if gate == "exp" else 2) * (VEC + SIG) + VEC)


def gate_matrix(gate: Gate) -> sp.Expr:
    """Of a chunk, the max state being known from the forward."""
    return CAUSAL * L**2 * ((3 if gate == "exp" else 2) * VEC + EXP)


def chunkwise(gate: Gate) -> Parts:
    """One chunk of L steps: the states' cotangents, then a kernel each for dq, dk and dv (Table 1)."""
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
    """A sequence; the logits again, since T x T of them are not kept."""
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
    """One step, with the state of every step at hand."""
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
