"""The paper's theory of the runtime (appendix G) for mLSTMsig's forward, and by the same rules for every counted form:
FLOPs at the accelerator's rate plus bytes at its rate, nothing overlapped.
"""

from __future__ import annotations

from typing import Any

from tfla.measure.accelerators import Accelerator
from tfla.paper.algorithms import Algorithm, get

SIG = get("chunkwise", "sig")


def seconds(accelerator: Accelerator, heads: float, form: Algorithm = SIG, **sizes: Any) -> Any:
    """Runtime (113), (116).

    Args:
        heads: batch times heads.
        form: what computes it.
        sizes: as for :meth:`tfla.paper.algorithms.Algorithm.flops`: T, L, dqk, dhv and where they are not the defaults
            segment, causal (1/2), state_bytes (4), nv, nk. Numbers or arrays.
    """
    return heads * (form.flops(**sizes) / accelerator.flops + form.bytes(**sizes) / accelerator.bandwidth)


def least_seconds(accelerator: Accelerator, heads: float, form: Algorithm = SIG, **sizes: Any) -> Any:
    """Runtime where computing and moving overlap entirely (114)."""
    import numpy as np

    return heads * np.maximum(form.flops(**sizes) / accelerator.flops, form.bytes(**sizes) / accelerator.bandwidth)


def intensity(form: Algorithm = SIG, **sizes: Any) -> Any:
    """FLOP/byte (117), (118)."""
    return form.flops(**sizes) / form.bytes(**sizes)
