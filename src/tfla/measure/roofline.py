"""The roofline bound of the operator.

FLOPs count exact causal halves and tiles of L steps; bytes count each tensor once.
"""

from __future__ import annotations

from tfla.ops.flops import TILE, backward_flops, forward_flops

__all__ = [
    "TILE",
    "backward_bytes",
    "backward_flops",
    "forward_bytes",
    "forward_flops",
    "roofline_seconds",
    "step_bytes",
]


def forward_bytes(T: int, heads: int, dqk: int, dhv: int, itemsize: int = 2) -> int:
    """Return the bytes of q, k, v and h; those of the gates, one number a head and step, are negligible."""
    return heads * T * (2 * dqk + 2 * dhv) * itemsize


def backward_bytes(T: int, heads: int, dqk: int, dhv: int, itemsize: int = 2, normalizer: bool = False) -> int:
    """Return the bytes of q, k, v, dh, dq, dk, dv, and with a normalizer of h, which its gradient needs."""
    return heads * T * (4 * dqk + (4 if normalizer else 3) * dhv) * itemsize


def step_bytes(heads: int, dqk: int, dhv: int, normalizer: bool = False, itemsize: int = 4) -> int:
    """Return the bytes of one step of decoding: the state is loaded and stored."""
    return 2 * heads * dqk * (dhv + normalizer) * itemsize


def roofline_seconds(flops: float, moved: float, gemm: float, copy: float) -> float:
    """Return the seconds of the FLOPs at ``gemm`` FLOP/s or of the bytes at ``copy`` byte/s, whichever is larger."""
    return max(flops / gemm, moved / copy)
