"""What a form must cost at least: its floating-point operations, with exact causal halves and tiles of L steps, and its
bytes, every tensor moved once."""

from __future__ import annotations

from tfla.ops.flops import TILE, backward_flops, forward_flops

__all__ = ["TILE", "backward_bytes", "backward_flops", "floor_seconds", "forward_bytes", "forward_flops", "step_bytes"]


def forward_bytes(T: int, heads: int, dqk: int, dhv: int, itemsize: int = 2) -> int:
    """q, k, v in, h out; the gates, one number a head and step, are left out."""
    return heads * T * (2 * dqk + 2 * dhv) * itemsize


def backward_bytes(T: int, heads: int, dqk: int, dhv: int, itemsize: int = 2, normalizer: bool = False) -> int:
    """q, k, v, dh in, dq, dk, dv out; with a normaliser h too, which the denominator's gradient needs."""
    return heads * T * (4 * dqk + (4 if normalizer else 3) * dhv) * itemsize


def step_bytes(heads: int, dqk: int, dhv: int, normalizer: bool = False, itemsize: int = 4) -> int:
    """One step of decoding: the state in and out."""
    return 2 * heads * dqk * (dhv + normalizer) * itemsize


def floor_seconds(flops: float, moved: float, gemm: float, copy: float) -> float:
    """The longer of computing at ``gemm`` FLOP/s and moving at ``copy`` byte/s."""
    return max(flops / gemm, moved / copy)
