"""The Triton kernels of the delta rule, against the recurrence in float64 and autograd.

They run on a GPU. With TRITON_INTERPRET=1 they run on the CPU, where bfloat16 is not available.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import INTERPRETED, TOLERANCE, error
from delta_cases import DeltaProblem, delta_problem, rounding_of_inputs, truth
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
# What closed gates leave of the initial state's cotangent underflows float16.
GATES = ["long", "medium", "short", "resets"] + ([] if INTERPRETED else ["half"])
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


def check(p: DeltaProblem, dtype: torch.dtype, factor: float = 4.0, of_gates: float = 6.0) -> None:
    """Errors are at most so many times what rounding inputs and outputs costs; in float32 within the tolerance.

    States are rounded to 16 bits whenever a product reads them. The gradient of gates is a sum of differences.
    """
    exact, found = truth(p), solve(p.to(dtype))
    errors = {name: error(x, exact[name]) for name, x in found.items()}
    if dtype == torch.float32:
        allowed = dict.fromkeys(errors, TOLERANCE[dtype])
    else:
        costs = rounding_of_inputs(p, dtype)
        allowed = {name: e * (of_gates if name == "dlog_f" else factor) for name, e in costs.items()}
    wrong = {n: f"{e:.1e} > {allowed[n]:.1e}" for n, e in errors.items() if not e <= allowed[n]}
    assert not wrong, wrong


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
    check(delta_problem(model, **{"K": 16, "V": 16, **shape}), dtype)


@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize("gates", GATES)
def test_gates(gates: str, alike: float) -> None:
    """States that remember long, and keys that are alike, add up the rounding of more steps."""
    if INTERPRETED:
        p = delta_problem("gdn", gates=gates, T=130, B=1, H=1, Hq=1, K=32, V=32, alike=alike)
        check(p, torch.float16, 3.0, 8.0)
        return
    p = delta_problem("gdn", gates=gates, T=1000, B=1, K=128, V=128, alike=alike)
    check(p, torch.bfloat16, 2.5 if alike or gates == "long" else 1.5)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.sampled_from(MODELS), st.integers(1, 200), st.integers(1, 40), st.integers(1, 40),
    st.sampled_from([(1, 1), (1, 3), (2, 2)]), st.integers(0, 3),
)  # fmt: skip
def test_any_problem(model: str, T: int, K: int, V: int, heads: tuple[int, int], seed: int) -> None:
    check(delta_problem(model, B=1, T=T, K=K, V=V, Hq=heads[0], H=heads[1], seed=seed), DTYPES[0], 10.0, 30.0)


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
    assert error(h.detach().cpu(), truth(p)["h"]) < 2e-2
    dq = torch.autograd.grad(h, leaves["q"], p.dh.to(h))[0]
    assert dq.isfinite().all()
    with pytest.raises(
        ValueError, match="backend: 'triton' cannot run these inputs: it computes reads after the decay"
    ):
        tfla.delta_rule(*given, backend="triton", read_before_decay=True)
    assert tfla.explain_delta_rule(*given, read_before_decay=True).backend == "chunkwise"
