"""The symbols of appendix F. All counts are for one head of one sequence."""

from __future__ import annotations

from typing import Literal

import sympy as sp

Gate = Literal["exp", "sig"]
Direction = Literal["forward", "backward"]
Parts = dict[str, sp.Expr]

T, L, S = sp.symbols("T L S", positive=True)  # steps of the sequence, of a chunk or tile, of a segment
DQK, DHV = sp.symbols("d_qk d_hv", positive=True)
CAUSAL = sp.Symbol("F_causal", positive=True)  # the computed part of an L x L matrix, at least 1/2
EXP, LOG, SIG, MAX, ABS, MASK = sp.symbols("F_exp F_log F_sig F_max F_abs F_mask", nonnegative=True)
VEC = sp.Symbol("F_vec", nonnegative=True)  # an addition or multiplication outside of matrix products
OPERATIONS = (EXP, LOG, SIG, MAX, ABS, MASK, VEC)
NV, NK = sp.symbols("N_v N_k", positive=True)  # programs that share the columns, the rows of one head's state
B_QKV, B_IF, B_C = sp.symbols("bytes_qkv bytes_if bytes_Cmn", positive=True)
B_VEC = sp.Symbol("bytes_vec", positive=True)  # of a number in this library's gate vectors

DD = DQK * DHV
DEFAULTS: dict[sp.Symbol, float] = {CAUSAL: 0.5, B_QKV: 2, B_IF: 2, B_C: 4, B_VEC: 4, NV: 1, NK: 1}


def log_gates(gate: Gate) -> sp.Expr:
    """Count the log-gates of one step: one logsigmoid, or two with the sigmoid input gate."""
    return (1 if gate == "exp" else 2) * (LOG + SIG)


def at_unit_cost(expr: sp.Expr) -> sp.Expr:
    """Return the count with a cost of 1 for each operation (Section F.2)."""
    return expr.xreplace(dict.fromkeys(OPERATIONS, sp.Integer(1)))


def simplified(expr: sp.Expr) -> sp.Expr:
    """Return the count at unit cost as a sum of terms, as in the paper's tables."""
    return sp.expand(at_unit_cost(expr))


def matrix_products(expr: sp.Expr) -> sp.Expr:
    """Return the FLOPs of matrix products, which tensor cores compute: other operations cost nothing."""
    return expr.xreplace(dict.fromkeys(OPERATIONS, sp.Integer(0)))
