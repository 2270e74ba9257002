"""The FLOPs of the forward pass of the paper's algorithms by part (Tables 8, 10 and 12).

The cost of each kind of operation is a symbol. Additions and multiplications outside of matrix products cost VEC, which
is 1 in the paper.
"""

from __future__ import annotations

import sympy as sp

from tfla.paper.algorithms.symbols import (
    ABS,
    CAUSAL,
    DD,
    DHV,
    DQK,
    EXP,
    LOG,
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


def running_sums(steps: sp.Expr) -> sp.Expr:
    """Count the cumulative sums over a chunk, each summed separately, as the paper does."""
    return VEC * steps * (steps + 1) / 2


def chunkwise(gate: Gate) -> Parts:
    """Count one chunk of L steps (Table 8)."""
    both = {
        "states: numerator": VEC * 2 * DD + 2 * L * DD + VEC * L * DQK,
        "outputs: cumulative forget gates": running_sums(L) + L * log_gates(gate),
        "outputs: intra": CAUSAL * (2 * L**2 * (DQK + DHV) + VEC * 3 * L**2),
    }
    if gate == "exp":
        return both | {
            "states: gates": VEC * (2 * L + L + 3) + running_sums(L) + L * (EXP + LOG + SIG) + MAX + EXP,
            "states: denominator": VEC * 2 * DQK + 2 * L * DQK,
            "outputs: gate matrix": CAUSAL * (L**2 * (3 * VEC + EXP + MAX) + L * (VEC + MAX)),
            "outputs: inter": 2 * L * DD + VEC * L * DQK + 2 * L * DQK,  # n q is a product too
            "outputs: combination": VEC * 2 * L * DHV + L * (VEC + MAX + ABS + EXP),
        }
    return both | {
        "states: gates": VEC * 2 * L + running_sums(L) + L * EXP + EXP + 2 * L * (LOG + SIG),
        "outputs: gate matrix": CAUSAL * L**2 * (2 * VEC + EXP),
        "outputs: inter": 2 * L * DD + VEC * L * DQK,
        "outputs: combination": VEC * L * DHV,
    }


def parallel(gate: Gate) -> Parts:
    """Count a sequence (Table 10). The paper counts a maximum in the gate matrix of mLSTMsig, which has none."""
    both = {
        "cumulative forget gates": running_sums(T) + T * log_gates(gate),
        "gate matrix": T**2 * (3 * VEC + EXP + MAX + MASK),
        "attention logits": CAUSAL * (2 * T**2 * DQK + VEC * 2 * T**2),
        "outputs": CAUSAL * 2 * T**2 * DHV,
    }
    if gate == "exp":
        both["normalization"] = CAUSAL * (T**2 * (3 * VEC + ABS) + T * (EXP + MAX))
    return both


def recurrent(gate: Gate) -> Parts:
    """Count one step (Table 12)."""
    both = {"memory cell update": VEC * 4 * DD, "output": 2 * DD + VEC * DQK}
    if gate == "exp":
        return both | {
            "gates": 4 * VEC + 2 * EXP + LOG + SIG + MAX,
            "denominator and scale": VEC * (4 * DQK + DHV + 1) + 2 * DQK + ABS + MAX,
        }
    return both | {"gates": 2 * SIG}
