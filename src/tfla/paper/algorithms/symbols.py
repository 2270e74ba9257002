"""The symbols of appendix F. All counts are for one head of one sequence."""

from __future__ import annotations

from typing import Literal

import sympy as sp

Gate = Literal["exp", "sig"]
Direction = Literal["forward", "backward"]
Parts = dict[str, sp.Expr]

T, L, S = sp.symbols("T L S", positive=True)  # steps of the sequence, of a chunk or tile, of a segment
DQK, DHV = sp.symbols("d_qk d_hv", positive=True)
CAUSAL = sp.Symbol("F_causal", positive=True)  # part of an L x L matrix that is computed: 1/2 is all that is needed
EXP, LOG, SIG, MAX, ABS, MASK = sp.symbols("F_exp F_log F_sig F_max F_abs F_mask", nonnegative=True)
VEC = sp.Symbol("F_vec", nonnegative=True)  # an addition or multiplication that is none of a matrix product's
OPERATIONS = (EXP, LOG, SIG, MAX, ABS, MASK, VEC)
NV, NK = sp.symbols("N_v N_k", positive=True)  # programs that share out the columns, the rows of one head's state
B_QKV, B_IF, B_C = sp.symbols("bytes_qkv bytes_if bytes_Cmn", positive=True)
B_VEC = sp.Symbol("bytes_vec", positive=True)  # of what this library's gate kernels leave for its walks

DD = DQK * DHV
DEFAULTS: dict[sp.Symbol, float] = {CAUSAL: 0.5, B_QKV: 2, B_IF: 2, B_C: 4, B_VEC: 4, NV: 1, NK: 1}


def log_gates(gate: Gate) -> sp.Expr:
    """What makes one step's log-gates from pre-activations: one logsigmoid, or with the sigmoid input gate two."""
    return (1 if gate == "exp" else 2) * (LOG + SIG)


def at_unit_cost(expr: sp.Expr) -> sp.Expr:
    """Every operation counts one (Section F.2)."""
    return expr.xreplace(dict.fromkeys(OPERATIONS, sp.Integer(1)))


def simplified(expr: sp.Expr) -> sp.Expr:
    """The same as a sum of terms, as the paper's tables have it."""
    return sp.expand(at_unit_cost(expr))


def matrix_products(expr: sp.Expr) -> sp.Expr:
    """What is left when everything but matrix products is free: work for tensor cores."""
    return expr.xreplace(dict.fromkeys(OPERATIONS, sp.Integer(0)))
