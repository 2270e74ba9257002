"""q and k divided by their norms inside the Hopper kernels of the delta rule, against the recurrence in float64.

They run on a Hopper GPU. With TRITON_INTERPRET=1 they run on the CPU, Gluon kernels in the simulator.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases import INTERPRETED, TOLERANCE, error
from delta_cases import DeltaProblem, delta_problem, truth
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hopper_delta import BACKEND, DEVICE, DTYPE, inputs, pytestmark, simulation
from torch import Tensor

import tfla
from tfla.ops import fused_activations
from tfla.ops.delta_activations import normalized

__all__ = ["pytestmark", "simulation"]  # the marks and the fixture of the other tests of these kernels


def drawn(model: str, **sizes: Any) -> DeltaProblem:
    """Return a problem whose q and k have norms from 0.05 to 20, and a few rows of zeros."""
    p = delta_problem(model, **{"K": 128, "V": 128, "B": 1, **sizes}, dtype=DTYPE)
    generator = torch.Generator().manual_seed(1)
    q, k = ((t * torch.exp(6 * torch.rand(*t.shape[:3], 1, generator=generator) - 3)).to(DTYPE) for t in (p.x.q, p.x.k))
    q[:, 2::31] = 0.0
    k[:, 3::29] = 0.0
    return dataclasses.replace(p, x=p.x._replace(q=q, k=k))


def exact(p: DeltaProblem) -> dict[str, Tensor]:
    """Return `truth` of the problem with normalized q and k."""
    return truth(dataclasses.replace(p, x=p.x._replace(q=normalized(p.x.q.double()), k=normalized(p.x.k.double()))))


def check(p: DeltaProblem, kernel: str = "fused", chunk_size: int = 1024) -> None:
    """Check h and the final state of a call, and of one that replays its launches."""
    spec = p.spec(kernel, chunk_size)._replace(save=False, normalize_qk=True)
    assert BACKEND.normalizes(p.x, spec)
    expected = exact(p)
    for _ in range(2):
        out = BACKEND.forward(inputs(p), spec)
        assert error(out.h.cpu(), expected["h"]) <= TOLERANCE[DTYPE]
        assert error(out.C.cpu(), expected["C"]) <= TOLERANCE[DTYPE]


SHAPES: dict[str, dict[str, Any]] = {
    "one step": {"T": 1, "carried": False},
    "more tiles than stages": {"T": 290, "H": 1, "Hq": 1},
    "heads that share keys": {"T": 70, "Hq": 1, "H": 3},
    "72 x 136": {"T": 70, "K": 72, "V": 136, "B": 2},
    "packed": {"lengths": (0, 100, 1, 64, 0), "Hq": 1},
}


@pytest.mark.parametrize("model", ["deltanet", "gdn"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_shapes(shape: dict[str, Any], model: str) -> None:
    check(drawn(model, **shape))


@pytest.mark.parametrize("gates", ["long", "half", "resets"])
def test_gates(gates: str) -> None:
    check(drawn("gdn", T=200, H=1, Hq=1, gates=gates, alike=0.9))


@pytest.mark.parametrize("model", ["deltanet", "gdn"])
def test_segments(model: str) -> None:
    check(drawn(model, T=150, K=64, V=64, H=2, Hq=1), "segmented", 64)


@given(st.integers(1, 200), st.sampled_from([64, 96, 128]), st.sampled_from([64, 200]), st.integers(0, 99))
@settings(max_examples=4 if INTERPRETED else 30)
def test_any_problem(T: int, K: int, V: int, seed: int) -> None:
    check(drawn("gdn", T=T, K=K, V=V, H=2, Hq=1, seed=seed))


def test_operator_launches_no_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients the kernels read q and k as they are; with gradients they read normalized ones."""
    p = drawn("gdn", T=70)
    x, passes = inputs(p), []
    plain = fused_activations._Normalized.apply
    monkeypatch.setattr(fused_activations._Normalized, "apply", lambda x: passes.append(1) or plain(x))

    def run() -> Tensor:
        h: Tensor = tfla.delta_rule(
            x.q, x.k, x.v, x.beta, x.log_f, normalize_qk=True, initial_state=tfla.State(x.C), scale=p.scale,
            backend="hopper",
        )  # fmt: skip
        return h

    with torch.no_grad():
        h = run()
    assert not passes
    assert error(h.cpu(), exact(p)["h"]) <= TOLERANCE[DTYPE]
    x.q.requires_grad_()
    assert error(run().detach().cpu(), exact(p)["h"]) <= TOLERANCE[DTYPE]
    assert passes


def test_rows_of_a_pool() -> None:
    """Packed prefills read and overwrite rows of a pool with norms in the kernels, too."""
    p = drawn("gdn", lengths=(70, 3), Hq=1)
    x = inputs(p)
    pool = torch.zeros(4, *p.x.C.shape[1:], device=DEVICE)
    rows = torch.tensor([2, 0], device=DEVICE)
    pool[rows] = x.C
    h, _ = tfla.delta_rule(
        x.q, x.k, x.v, x.beta, x.log_f, normalize_qk=True, initial_state=tfla.State(pool), state_indices=rows,
        cu_seqlens=x.cu_seqlens, return_state=True, scale=p.scale, backend="hopper",
    )  # fmt: skip
    expected = exact(p)
    assert error(h.cpu(), expected["h"]) <= TOLERANCE[DTYPE]
    assert error(pool[rows].cpu(), expected["C"]) <= TOLERANCE[DTYPE]
    assert not pool[1].any()
