"""The counts of fused scans against the products, loads and stores in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import sympy as sp
import torch
from cases import INTERPRETED
from torch import Tensor

from tfla.backends import BACKENDS
from tfla.backends.base import Inputs, Spec
from tfla.paper.algorithms import get
from tfla.paper.algorithms.symbols import B_QKV, DHV, DQK, L, S, T

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="it counts in Triton's interpreter"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


class Counter:
    """FLOPs of products, and addresses that were loaded and stored."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import InterpreterBuilder as Builder

        self.flops = 0
        self.addresses: list[np.ndarray] = []
        dot, load, store = Builder.create_dot, Builder.create_masked_load, Builder.create_masked_store

        def count_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
            self.flops += 2 * a.data.size * b.data.shape[-1]
            return dot(builder, a, b, *rest)

        def count_load(builder: Any, at: Any, mask: Any, *rest: Any) -> Any:
            self.note(at, mask)
            return load(builder, at, mask, *rest)

        def count_store(builder: Any, at: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.note(at, mask)
            return store(builder, at, value, mask, *rest)

        monkeypatch.setattr(Builder, "create_dot", count_dot)
        monkeypatch.setattr(Builder, "create_masked_load", count_load)
        monkeypatch.setattr(Builder, "create_masked_store", count_store)

    def note(self, at: Any, mask: Any) -> None:
        self.addresses.append(at.data[mask.data.astype(bool)])  # `a & b` of the interpreter is an int

    def take(self, *tensors: Tensor) -> tuple[int, int]:
        """Return the FLOPs, and the bytes of these tensors, since the last call."""
        every = np.concatenate(self.addresses)
        moved = 0
        for x in tensors:
            first = x.data_ptr()
            moved += int(((every >= first) & (every < first + x.nbytes)).sum()) * x.element_size()
        flops, self.flops, self.addresses = self.flops, 0, []
        return flops, moved


def of_large_tensors(form: str, direction: Any, sizes: dict[sp.Symbol, float]) -> float:
    """Return the counted bytes of q, k, v, h and their gradients in 16 bits, without states and checkpoints."""
    expr = sp.expand(get(form, "sig", direction).bytes_expr).coeff(B_QKV)
    terms = [term for term in sp.Add.make_args(sp.expand(expr)) if not {DQK, DHV} <= term.free_symbols]
    return float(2 * sum(terms).subs(sizes))


@pytest.mark.parametrize(("segment", "K", "V", "programs"), [(64, 32, 64, 1), (32, 32, 64, 1), (64, 256, 128, 2)])
def test_fused_scans_compute_and_move_what_is_counted(
    monkeypatch: pytest.MonkeyPatch, segment: int, K: int, V: int, programs: int
) -> None:
    """Run forward and backward of mLSTMsig, whole or in segments; all of each square tile is computed.

    In 16 bits, which is what the counts are of: float32 kernels compute one more product, for the gradient of gates.
    """
    from tfla.backends.gpu.config import kernel_config

    B, steps, H = 1, 64, 2
    q, k, v = (torch.randn(B, steps, H, d, dtype=torch.float16) for d in (K, K, V))
    log_i, log_f = (torch.nn.functional.logsigmoid(torch.randn(B, steps, H)) for _ in range(2))
    x = Inputs(q, k, v, log_i, log_f, None, None, None, None)
    spec = Spec(1.0, False, True, segment, "fused", True, False)
    config = kernel_config(x)
    form = "fused" if segment >= steps else "segments"
    sizes: dict[str, int] = {"T": steps, "L": config.tile_steps, "dqk": K, "dhv": V, "segment": segment, "causal": 1}
    sizes |= {"nv": -(-V // config.o_dv.split), "nk": -(-K // config.dq_dk.split)}
    assert sizes["nv"] == sizes["nk"] == programs
    symbols: dict[sp.Symbol, float] = {T: steps, L: config.tile_steps, DQK: K, DHV: V, S: segment}

    counter = Counter(monkeypatch)
    out = BACKENDS["triton"].forward(x, spec)
    flops, moved = counter.take(q, k, v, out.h)
    assert flops == B * H * get(form, "sig", "forward").matrix_flops(**sizes)
    if programs == 1:  # what programs that share a head load each for themselves counts once
        assert moved == B * H * of_large_tensors(form, "forward", symbols)

    dh = torch.randn_like(v)
    grads = BACKENDS["triton"].backward(x, out, dh, None, None, spec)
    flops, moved = counter.take(q, k, v, dh, grads.q, grads.k, grads.v)
    assert flops == B * H * get(form, "sig", "backward").matrix_flops(**sizes)
    if programs == 1:
        assert moved == B * H * of_large_tensors(form, "backward", symbols)
