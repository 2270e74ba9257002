"""The FLOPs and bytes of the delta rule and of GLA in tiles of L steps, by part (docs/delta-rule.md).

Matrix products are counted as in appendix F: those inside a tile by their causal part, those with the state whole.
Gates for each key channel are products by levels inside a tile: together they have the pairs of steps of one product,
and take the elementwise products of their factors beside it. The bytes are the fewest that any algorithm moves: every
tensor once, and no states.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy as sp

from tfla.measure.roofline import DeltaModel
from tfla.paper.algorithms.symbols import (
    B_QKV,
    CAUSAL,
    DD,
    DEFAULTS,
    DHV,
    DQK,
    EXP,
    VEC,
    Direction,
    L,
    Parts,
    matrix_products,
    simplified,
)

STATE = 2 * L * DD  # a product with the state of a head
KEYS = CAUSAL * 2 * L**2 * DQK  # a product inside the tile with keys or queries
VALUES = CAUSAL * 2 * L**2 * DHV  # a product inside the tile with values, errors or their cotangents
B_STEP = 4  # bytes of a gate of one step and of a write strength
LEVELS = sp.log(L, 2)


def _gate_factors(model: DeltaModel, operands: int) -> Parts:
    """Count the factors of gates by channel: an exponential for each gate, two factors a level for each operand."""
    if model == "gdn":
        return {"gates": EXP * CAUSAL * L**2 + VEC * CAUSAL * L**2}
    return {"gates": EXP * L * DQK + VEC * operands * LEVELS * L * DQK}


def forward(model: DeltaModel) -> Parts:
    """Count one tile of the forward."""
    if model == "gla":
        return {
            "reads of the state": STATE,
            "update of the state": STATE,
            "products of keys": KEYS,
            "outputs": VALUES,
        } | _gate_factors(model, 2)
    return {
        "reads of the state": 2 * STATE,  # by q and by the read keys
        "update of the state": STATE,
        "products of keys": 2 * KEYS,  # P and M
        "solution X": L**3 / 3,
        "errors": VALUES,
        "outputs": VALUES,
    } | _gate_factors(model, 3)


def backward(model: DeltaModel) -> Parts:
    """Count one tile of the backward, which has the errors and X of the forward, but no states."""
    if model == "gla":
        return {
            "states and cotangents": 2 * STATE,
            "reads of the state": 3 * STATE,  # dq, dk, dv
            "products of keys": KEYS,
            "gradients of keys": 2 * KEYS,
            "gradients of values": 2 * VALUES,  # dP, and P^T dh
        } | _gate_factors(model, 4)
    return {
        "states and cotangents": 3 * STATE,  # k E^T, q dh^T, r dv^T
        "reads of the state": 4 * STATE,  # dU, dq, dr, dk
        "products of keys": KEYS,
        "gradients of keys": 4 * KEYS,  # dq, dr, and both parts of dk
        "gradients of values": 4 * VALUES,  # P^T dh, X^T dU, dh E^T, dv E^T
    } | _gate_factors(model, 6)


def gate_bytes(model: DeltaModel) -> sp.Expr:
    """Return the bytes of the gates and write strengths of one step."""
    by_model = {"gdn": sp.Integer(2 * B_STEP), "kda": DQK * B_QKV + B_STEP, "gla": DQK * B_QKV}
    return by_model[model]


def forward_bytes(model: DeltaModel) -> Parts:
    """Count the bytes of one tile of the forward."""
    return {
        "load": L * ((2 * DQK + DHV) * B_QKV + gate_bytes(model)),
        "store": L * DHV * B_QKV,
    }


def backward_bytes(model: DeltaModel) -> Parts:
    """Count the bytes of one tile of the backward."""
    return {
        "load": L * ((2 * DQK + 2 * DHV) * B_QKV + gate_bytes(model)),
        "store": L * ((2 * DQK + DHV) * B_QKV + gate_bytes(model)),
    }


@dataclass(frozen=True)
class TileForm:
    """The counts of one direction of a recurrence, for one tile of one head."""

    model: DeltaModel
    direction: Direction

    @property
    def flop_parts(self) -> Parts:
        """The FLOPs of a tile by part."""
        return forward(self.model) if self.direction == "forward" else backward(self.model)

    @property
    def byte_parts(self) -> Parts:
        """The bytes of a tile by part."""
        return forward_bytes(self.model) if self.direction == "forward" else backward_bytes(self.model)

    def flops(self, **sizes: Any) -> Any:
        """Return the FLOPs of a tile, counting each operation as one.

        Args:
            sizes: L, dqk, dhv and causal (1/2): numbers or arrays.
        """
        return evaluate(simplified(sum(self.flop_parts.values(), sp.Integer(0))), **sizes)

    def matrix_flops(self, **sizes: Any) -> Any:
        """Return the FLOPs of the matrix products of a tile and of the solution for X; sizes as in :meth:`flops`."""
        return evaluate(matrix_products(sum(self.flop_parts.values(), sp.Integer(0))), **sizes)

    def bytes(self, **sizes: Any) -> Any:
        """Return the bytes of a tile with 16-bit inputs; the sizes are those of :meth:`flops`."""
        return evaluate(sum(self.byte_parts.values(), sp.Integer(0)), **sizes)

    def intensity(self, **sizes: Any) -> Any:
        """Return the FLOPs of matrix products per byte; the sizes are those of :meth:`flops`."""
        return self.matrix_flops(**sizes) / self.bytes(**sizes)


@cache
def _compiled(expr: sp.Expr) -> Any:
    """Return an expression as a function of L, dqk, dhv, the causal part and the bytes of an element."""
    return sp.lambdify((L, DQK, DHV, CAUSAL, B_QKV), expr, "numpy")


def evaluate(expr: sp.Expr, *, L: Any, dqk: Any, dhv: Any, causal: Any = DEFAULTS[CAUSAL]) -> Any:
    """Return the value of a count for these sizes, numbers or arrays."""
    return _compiled(expr)(L, dqk, dhv, causal, DEFAULTS[B_QKV])
