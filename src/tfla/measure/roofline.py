"""The roofline bound of the operator.

FLOPs count exact causal halves and tiles of L steps; bytes count each tensor once.
"""

from __future__ import annotations

from typing import Literal

from tfla.ops.flops import TILE, backward_flops, delta_backward_flops, delta_forward_flops, forward_flops

DeltaModel = Literal["gdn", "kda", "gla"]  # Gated DeltaNet, Kimi Delta Attention, gated linear attention

__all__ = [
    "TILE",
    "DeltaModel",
    "backward_bytes",
    "backward_flops",
    "delta_gate_bytes",
    "delta_roofline_seconds",
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


def delta_gate_bytes(model: DeltaModel, dqk: int, itemsize: int = 2) -> int:
    """Return the bytes of the gates of one head and step.

    Write strengths and one gate for each step are float32, gates for each key channel have the dtype of q.
    """
    return {"gdn": 4 + 4, "kda": dqk * itemsize + 4, "gla": dqk * itemsize}[model]


def delta_roofline_seconds(
    model: DeltaModel, T: int, heads: int, dqk: int, dhv: int, gemm: float, copy: float, *, backward: bool,
    itemsize: int = 2,
) -> float:  # fmt: skip
    """Return the roofline of a forward of the delta rule or of GLA, with `backward` the sum of both directions'.

    The bytes are those of q, k, v, h and the gates, and backward of q, k, v, dh, dq, dk, dv, the gates and their
    gradients.

    Args:
        model: the recurrence.
        T: the steps of all sequences together.
        heads: the number of heads of v.
        dqk, dhv: the head dims.
        gemm: the rate of a large matrix product in FLOP/s.
        copy: the rate of a device copy in byte/s.
        backward: whether the backward is included.
        itemsize: the bytes of an element of q, k and v.
    """
    gates = heads * T * delta_gate_bytes(model, dqk, itemsize)
    flops = (forward_flops, backward_flops) if model == "gla" else (delta_forward_flops, delta_backward_flops)
    moved = (
        forward_bytes(T, heads, dqk, dhv, itemsize) + gates,
        backward_bytes(T, heads, dqk, dhv, itemsize) + 2 * gates,
    )
    directions = [roofline_seconds(f(T, heads, dqk, dhv), b, gemm, copy) for f, b in zip(flops, moved, strict=True)]
    return sum(directions) if backward else directions[0]
