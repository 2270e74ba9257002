"""From what a model computes to the log-gates that every backend reads."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.backends.base import Gates

InputGate = Literal["exp", "sigmoid"]
INPUT_GATES: tuple[str, ...] = get_args(InputGate)

# Infinite gates act like these: closed for every input gate that is accepted, and sums of them stay exact.
LOG_GATE_MIN, LOG_GATE_MAX = -1e5, 5e4


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), which takes the host a while even where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def clamp(log_gate: Tensor) -> Tensor:
    """log_gate in at least float32, infinities made finite; NaN stays."""
    wide = log_gate if log_gate.dtype == torch.float64 else log_gate.float()
    return wide.clamp(LOG_GATE_MIN, LOG_GATE_MAX)


def log_gates(i: Tensor, f: Tensor, gates: Gates) -> tuple[Tensor, Tensor]:
    """log_i and log_f of the mLSTM from its pre-activations, exp (6), (7) or sigmoid (22), or from log-gates."""
    i, f = (t if t.dtype == torch.float64 else t.float() for t in (i, f))
    return clamp(F.logsigmoid(i) if gates == "sigmoid" else i), clamp(f if gates == "log" else F.logsigmoid(f))
