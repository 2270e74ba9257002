"""Pools of states in dtypes of 16 bits, for tests of kernels that read and overwrite their rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from cases import INTERPRETED

import tfla

# The dtypes of C, n and m; calls that overwrite rows refuse m in 16 bits.
LOW = [(torch.bfloat16, torch.bfloat16, torch.float32), (torch.float16, torch.float32, torch.float32)]


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter, where it is on, round to bfloat16 as GPUs do."""
    if INTERPRETED:
        from interpreted_bfloat16 import use_bfloat16

        use_bfloat16(monkeypatch)


def in_dtypes(states: tfla.State, dtypes: Sequence[torch.dtype]) -> tfla.State:
    """Return states whose C, n and m have these dtypes."""
    parts = zip(states, dtypes, strict=True)
    return tfla.State(*(None if t is None else t.to(dtype) for t, dtype in parts))  # type: ignore[arg-type]
