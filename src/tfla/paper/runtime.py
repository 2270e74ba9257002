"""The paper's theory of the runtime (appendix G), for every counted algorithm.

The runtime is the time of the FLOPs at the accelerator's rate plus the time of the bytes at its rate.
"""

from __future__ import annotations

from typing import Any

from tfla.measure.accelerators import Accelerator
from tfla.paper.algorithms import Algorithm, get

SIG = get("chunkwise", "sig")


def seconds(accelerator: Accelerator, heads: float, algorithm: Algorithm = SIG, **sizes: Any) -> Any:
    """Return the runtime without overlap of computation and memory traffic (113), (116), in seconds.

    Args:
        accelerator: the rates.
        heads: batch size times heads.
        algorithm: the counted algorithm.
        sizes: the sizes of :meth:`tfla.paper.algorithms.Algorithm.flops`, numbers or arrays.
    """
    return heads * (algorithm.flops(**sizes) / accelerator.flops + algorithm.bytes(**sizes) / accelerator.bandwidth)


def least_seconds(accelerator: Accelerator, heads: float, algorithm: Algorithm = SIG, **sizes: Any) -> Any:
    """Return the runtime with full overlap of computation and memory traffic (114), in seconds."""
    import numpy as np

    return heads * np.maximum(
        algorithm.flops(**sizes) / accelerator.flops, algorithm.bytes(**sizes) / accelerator.bandwidth
    )


def intensity(algorithm: Algorithm = SIG, **sizes: Any) -> Any:
    """Return the arithmetic intensity in FLOP per byte (117), (118)."""
    return algorithm.flops(**sizes) / algorithm.bytes(**sizes)
