"""The log-gates that backends read, computed from the pre-activations of a model."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.backends.base import Gates

InputGate = Literal["exp", "sigmoid"]
INPUT_GATES: tuple[str, ...] = get_args(InputGate)

# Log-gates are clamped to this range. The minimum closes a forget gate over every input gate up to the maximum, and
# sums of such gates stay exact (docs/mathematics.md).
LOG_GATE_MIN, LOG_GATE_MAX = -1e5, 5e4


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x.to(dtype), without its host time where x has that dtype already."""
    return x if x.dtype == dtype else x.to(dtype)


def clamp(log_gate: Tensor) -> Tensor:
    """Return a log-gate clamped to the allowed range, in float64 or else float32; NaN stays NaN."""
    wide = log_gate if log_gate.dtype == torch.float64 else log_gate.float()
    return wide.clamp(LOG_GATE_MIN, LOG_GATE_MAX)


def log_gates(i: Tensor, f: Tensor, gates: Gates) -> tuple[Tensor, Tensor]:
    """Return the clamped log_i and log_f, in float64 or else float32.

    Args:
        i, f: the gates, any shape and float dtype.
        gates: what they are: "exp" pre-activations of mLSTMexp, (6), (7); "sigmoid" those of mLSTMsig, (22); "log"
            log-gates.
    """
    i, f = (t if t.dtype == torch.float64 else t.float() for t in (i, f))
    return clamp(F.logsigmoid(i) if gates == "sigmoid" else i), clamp(f if gates == "log" else F.logsigmoid(f))
