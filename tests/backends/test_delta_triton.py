"""The Triton kernels of the delta rule, against the recurrence in float64 and autograd.

They run on a GPU. With TRITON_INTERPRET=1 they run on the CPU, where bfloat16 is not available.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import INTERPRETED, TOLERANCE, error
from delta_cases import DeltaProblem, check_beside_terms, delta_problem, rounding_of_inputs, truth
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tfla
from tfla.backends import DELTA_BACKENDS
from tfla.backends.delta import DeltaGrads, DeltaInputs

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
pytestmark = [pytest.mark.interpreter] if INTERPRETED else on_gpu
pytest.importorskip("triton")

BACKEND = DELTA_BACKENDS["triton"]
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16]
EXAMPLES = 5 if INTERPRETED else 30
MODELS = ("deltanet", "gdn", "read")


def solve(p: DeltaProblem) -> dict[str, Tensor]:
    """The quantities of `truth` by the kernels."""
    x = DeltaInputs(*(None if t is None else t.to(DEVICE) for t in p.x))
    assert BACKEND.unsupported(x) is None
    spec = p.spec("fused", BACKEND.default_chunk_size(x, "fused"))
    out = BACKEND.forward(x, spec)
    grads = BACKEND.backward(x, out, p.dh.to(DEVICE), p.dC.to(out.C), spec)
    assert isinstance(grads, DeltaGrads)
    found = {"h": out.h, "C": out.C} | {f"d{name}": getattr(grads, name) for name in p.leaves}
    return {name: t.cpu() for name, t in found.items()}


SHAPES: dict[str, dict[str, Any]] = {
    "one step": {"T": 1},
    "no initial state": {"T": 65, "carried": False},
    "three heads share keys": {"T": 70, "Hq": 1, "H": 3, "B": 1},
    "unaligned head dims": {"T": 40, "K": 13, "V": 35},
    "packed": {"lengths": (0, 30, 1, 99, 0), "Hq": 1},
    "checkpoints": {"T": 300, "B": 1, "H": 1, "Hq": 1},
}
if not INTERPRETED:
    SHAPES |= {
        "128 x 128": {"T": 700, "K": 128, "V": 128},
        "128 x 256": {"T": 300, "K": 128, "V": 256},
        "256 x 256": {"T": 200, "K": 256, "V": 256, "B": 1},
        "64 x 64": {"T": 300, "K": 64, "V": 64, "H": 6, "Hq": 2},
        "packed 128 x 128": {"lengths": (100, 0, 300, 64, 1), "K": 128, "V": 128},
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_shapes(shape: dict[str, Any], model: str, dtype: torch.dtype) -> None:
    p = delta_problem(model, **{"K": 16, "V": 16, **shape}, dtype=dtype)
    check_beside_terms(p, solve(p))


@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize("gates", ["long", "medium", "short", "half", "resets"])
def test_gates(gates: str, alike: float) -> None:
    """In bfloat16 errors are at most 1.5 times what rounding inputs and outputs costs, 2.5 times for long gates."""
    if INTERPRETED:
        p = delta_problem("gdn", gates=gates, T=130, B=1, H=1, Hq=1, K=32, V=32, alike=alike, dtype=torch.float32)
        check_beside_terms(p, solve(p))
        return
    p = delta_problem("gdn", gates=gates, T=1000, B=1, K=128, V=128, alike=alike)
    exact, costs = truth(p), rounding_of_inputs(p, torch.bfloat16)
    factors = {name: 2.5 if name == "dlog_f" and gates == "long" else 1.5 for name in costs}
    errors = {name: error(x, exact[name]) for name, x in solve(p.to(torch.bfloat16)).items()}
    assert all(e <= factors[n] * costs[n] for n, e in errors.items()), {n: e / costs[n] for n, e in errors.items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32] if INTERPRETED else [torch.bfloat16], ids=str)
def test_gates_above_0_leave_no_nan(dtype: torch.dtype) -> None:
    """The decay of a tile, squared, exceeds float32. All else is 0, because weights of that size exceed float16."""
    p = delta_problem("gdn", T=150, B=1, K=16, V=16, carried=False, dtype=dtype)
    assert p.x.log_f is not None
    keys, values = torch.zeros_like(p.x.q), torch.zeros_like(p.x.v)
    x = p.x._replace(q=keys, k=keys, v=values, log_f=torch.full_like(p.x.log_f, 0.8))
    found = solve(DeltaProblem(p.model, x, values, torch.zeros_like(p.dC), p.scale))
    assert not any(t.any() for t in found.values())  # NaN is true


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.sampled_from(MODELS), st.integers(1, 200), st.integers(1, 40), st.integers(1, 40),
    st.sampled_from([(1, 1), (1, 3), (2, 2)]), st.integers(0, 3),
)  # fmt: skip
def test_any_problem(model: str, T: int, K: int, V: int, heads: tuple[int, int], seed: int) -> None:
    p = delta_problem(model, B=1, T=T, K=K, V=V, Hq=heads[0], H=heads[1], seed=seed, dtype=DTYPES[0])
    check_beside_terms(p, solve(p))


def test_same_bits_again() -> None:
    """The second call replays the launches of the first."""
    p = delta_problem("gdn", T=150, K=16, V=16).to(DTYPES[-1])
    first, again = solve(p), solve(p)
    assert all(torch.equal(x, again[name]) for name, x in first.items())


def test_public_function() -> None:
    """tfla.delta_rule takes the kernels on request, and for a read before the decay another backend."""
    p = delta_problem("gdn", T=70, K=16, V=16, carried=False).to(DTYPES[-1])
    leaves = {name: t.to(DEVICE).requires_grad_() for name, t in p.leaves.items()}
    given = [leaves[name] for name in ("q", "k", "v", "beta", "log_f")]
    h = tfla.delta_rule(*given, scale=p.scale, backend="triton")
    assert isinstance(h, Tensor)
    assert error(h.detach().cpu(), truth(p)["h"]) <= TOLERANCE[DTYPES[-1]]
    dq = torch.autograd.grad(h, leaves["q"], p.dh.to(h))[0]
    assert dq.isfinite().all()
    with pytest.raises(
        ValueError, match="backend: 'triton' cannot run these inputs: it computes reads after the decay"
    ):
        tfla.delta_rule(*given, backend="triton", read_before_decay=True)
    assert tfla.explain_delta_rule(*given, read_before_decay=True).backend == "chunkwise"
