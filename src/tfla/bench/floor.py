"""What a form must cost at least: its floating-point operations, with exact causal halves and tiles of L steps."""

from __future__ import annotations

TILE = 64


def forward_flops(T: int, heads: int, dqk: int, dhv: int, L: int = TILE) -> int:
    """Output and state of every tile, 4 T dqk dhv, and half of both products inside tiles."""
    return heads * (4 * T * dqk * dhv + T * L * (dqk + dhv))


def backward_flops(T: int, heads: int, dqk: int, dhv: int, L: int = TILE) -> int:
    """dq, dk, dv, their states' cotangents and the states once more; five products inside tiles."""
    return heads * (10 * T * dqk * dhv + T * L * (3 * dqk + 2 * dhv))
