"""The action of a span of steps of the delta rule on the state.

A span acts on the state of a head by a transition A and a state S, which its steps leave where they start from zero:

    C_out = A C_in + S        dC_in = A^T dC_out + S'

S' is the cotangent of the state before the span from its outputs alone. A is a matrix (dqk x dqk); without a
correction, in gated linear attention, it is diagonal, and dqk numbers stand for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Action(NamedTuple):
    """The action of a span, or of several along leading dimensions."""

    A: Tensor  # (..., H, dqk, dqk), or (..., H, dqk) without a correction
    C: Tensor  # (..., H, dqk, dhv): S


def transition_shape(dqk: int, correct: bool) -> tuple[int, ...]:
    """Return the shape of the transition of one head."""
    return (dqk, dqk) if correct else (dqk,)


def row_width(dqk: int, dhv: int, correct: bool) -> int:
    """Return the numbers of one head in a row of an action."""
    return dqk * dhv + dqk * (dqk if correct else 1)


def to_row(action: Action, correct: bool) -> Tensor:
    """Return an action as a row that processes exchange, (..., H, width)."""
    return torch.cat([action.C.flatten(-2), action.A.flatten(-2) if correct else action.A], -1)


def from_rows(rows: Tensor, dqk: int, dhv: int, correct: bool) -> Action:
    """Return the actions that :func:`to_row` was given; their tensors are views of the rows."""
    C, A = rows.split([dqk * dhv, rows.shape[-1] - dqk * dhv], -1)
    return Action(A.unflatten(-1, transition_shape(dqk, correct)), C.unflatten(-1, (dqk, dhv)))


def apply(A: Tensor, C: Tensor, correct: bool) -> Tensor:
    """Return A C."""
    return A @ C if correct else A.unsqueeze(-1) * C


def apply_back(A: Tensor, dC: Tensor, correct: bool) -> Tensor:
    """Return A^T dC."""
    return A.mT @ dC if correct else A.unsqueeze(-1) * dC
