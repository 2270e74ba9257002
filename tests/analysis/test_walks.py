"""The counts of walks against the matrix products that Triton's interpreter sees."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from cases import INTERPRETED

from tfla.analysis.forms import get
from tfla.backends import BACKENDS
from tfla.backends.base import Inputs, Spec

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="it counts in Triton's interpreter"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """FLOPs of products by now."""
    from triton.runtime.interpreter import InterpreterBuilder

    found = {"flops": 0}
    dot = InterpreterBuilder.create_dot

    def count(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        M, K = a.data.shape
        found["flops"] += 2 * M * K * b.data.shape[1]
        return dot(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", count)
    return found


@pytest.mark.parametrize(("segment", "K", "V", "programs"), [(64, 32, 64, 1), (32, 32, 64, 1), (64, 128, 128, 2)])
def test_products_of_walks(counted: dict[str, int], segment: int, K: int, V: int, programs: int) -> None:
    """Forward and backward of mLSTMsig, whole or in segments; tiles are squares, so all of each is computed."""
    from tfla.backends.triton.launch import plan

    B, T, H = 1, 64, 2
    q, k, v = (torch.randn(B, T, H, d) for d in (K, K, V))
    log_i, log_f = (torch.nn.functional.logsigmoid(torch.randn(B, T, H)) for _ in range(2))
    x = Inputs(q, k, v, log_i, log_f, None, None, None, None)
    spec = Spec(1.0, False, True, segment, "fused", True, False)
    tiles = plan(K, V, 4)
    form = "fused" if segment >= T else "segments"
    sizes = {"T": T, "L": tiles.L, "dqk": K, "dhv": V, "segment": segment, "causal": 1}
    sizes |= {"nv": -(-V // tiles.columns.split), "nk": -(-K // tiles.rows.split)}

    assert sizes["nv"] == sizes["nk"] == programs

    out = BACKENDS["triton"].forward(x, spec)
    forward = counted["flops"]
    assert forward == B * H * get(form, "sig", "forward").matrix_flops(**sizes)
    BACKENDS["triton"].backward(x, out, torch.randn_like(v), None, None, spec)
    assert counted["flops"] - forward == B * H * get(form, "sig", "backward").matrix_flops(**sizes)
