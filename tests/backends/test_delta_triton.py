"""The Triton kernels of the delta rule, against the recurrence in float64 and autograd.

They run on a GPU. With TRITON_INTERPRET=1 they run on the CPU, where bfloat16 is not available.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases import INTERPRETED, TOLERANCE, error
from delta_cases import (
    GATES_WITH_MEMORY,
    DeltaProblem,
    check_beside_rounding,
    check_beside_terms,
    delta_problem,
    truth,
)
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
DTYPES = [torch.float32 if INTERPRETED else torch.bfloat16]
EXAMPLES = 5 if INTERPRETED else 30
MODELS = ("deltanet", "gdn", "read", "comba", "gla", "kda")


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
    "three blocks of channels": {"T": 66, "K": 70, "V": 20, "B": 1},
    "packed": {"lengths": (0, 30, 1, 70, 0), "Hq": 1},
    "checkpoints": {"T": 300, "B": 1, "H": 1, "Hq": 1},
}
if not INTERPRETED:
    SHAPES |= {
        "128 x 128": {"T": 700, "K": 128, "V": 128},
        "128 x 256": {"T": 300, "K": 128, "V": 256},
        "256 x 256": {"T": 200, "K": 256, "V": 256, "B": 1},
        "64 x 64": {"T": 300, "K": 64, "V": 64, "H": 6, "Hq": 2},
        "packed 128 x 128": {"lengths": (100, 0, 300, 64, 1), "K": 128, "V": 128},
        "32 x 64, unaligned": {"T": 90, "K": 36, "V": 70, "H": 4, "Hq": 2},
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_shapes(shape: dict[str, Any], model: str, dtype: torch.dtype) -> None:
    p = delta_problem(model, **{"K": 16, "V": 16, **shape}, dtype=dtype)
    check_beside_terms(p, solve(p))


@pytest.mark.parametrize("model", ["deltanet", "gdn", "kda", "comba"])
def test_steps_of_no_sequence_get_zeros(model: str) -> None:
    """Offsets that begin late and end early, which no host reads on a GPU."""
    p = delta_problem(model, lengths=(5, 65, 20), K=16, V=16, carried=False, dtype=DTYPES[0])
    assert p.x.cu_seqlens is not None
    second = p.x._replace(cu_seqlens=p.x.cu_seqlens[1:3])
    whole, part = solve(p), solve(dataclasses.replace(p, x=second, dC=p.dC[1:2]))
    inside = torch.zeros(90, dtype=torch.bool)
    inside[5:70] = True
    for name, found in part.items():
        if name not in ("C", "dC"):
            assert error(found[:, inside], whole[name][:, inside]) < TOLERANCE[DTYPES[0]], name
            assert not found[:, ~inside].any(), name


@pytest.mark.parametrize("model", ["deltanet", "gdn", "read", "kda"])
@pytest.mark.parametrize("shape", [{"T": 70, "Hq": 1}, {"lengths": (0, 30, 1, 70)}], ids=["dense", "packed"])
def test_cotangents_of_initial_states_alone(shape: dict[str, Any], model: str) -> None:
    """The gradient of the initial states where only h is read is what context parallelism exchanges."""
    p = delta_problem(model, **{"K": 16, "V": 16, **shape}, dtype=DTYPES[0])
    p = dataclasses.replace(p, dC=torch.zeros_like(p.dC))
    x = DeltaInputs(*(None if t is None else t.to(DEVICE) for t in p.x))
    if why := BACKEND.unsupported(x):
        pytest.skip(why)
    spec = p.spec("fused", BACKEND.default_chunk_size(x, "fused"))
    out = BACKEND.forward(x, spec)
    for _ in range(2):  # the second call replays the first one's launches
        found = BACKEND.initial_cotangent(x, out, p.dh.to(DEVICE), spec)
        assert error(found.cpu(), truth(p)["dC"]) < TOLERANCE[DTYPES[0]]


@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize("gates", GATES_WITH_MEMORY)
@pytest.mark.parametrize("model", ["deltanet", "gdn", "comba", "gla", "kda"])
def test_gates(model: str, gates: str, alike: float) -> None:
    """In bfloat16 errors are at most 1.5 times what rounding inputs and outputs costs, 2.5 times for long gates."""
    if model == "deltanet" and gates != "medium":
        return
    if INTERPRETED:
        check_gates_in_float32(model, gates, alike)
        return
    p = delta_problem(model, gates=gates, T=1000, B=1, K=128, V=128, alike=alike)
    check_beside_rounding(p, gates, solve, torch.bfloat16)


def check_gates_in_float32(model: str, gates: str, alike: float) -> None:
    """Check the errors in float32 on a small problem; keys that are alike are tried with one model alone."""
    if alike and model != "kda":
        return
    p = delta_problem(model, gates=gates, T=90, B=1, H=1, Hq=1, K=32, V=32, alike=alike, dtype=torch.float32)
    check_beside_terms(p, solve(p))


@pytest.mark.parametrize("gates", ["closed", "resets", "short"])
@pytest.mark.parametrize("model", ["gla", "kda", "gdn2", "before"])
def test_closed_gates_by_channel(model: str, gates: str) -> None:
    """Sums have no terms of other steps: gradients of closed gates, which are 1e-9 of others, have all their digits."""
    p = delta_problem(model, gates=gates, T=70, B=1, H=1, Hq=1, K=20, V=16, dtype=torch.float32)
    if not INTERPRETED:
        p = p.to(torch.bfloat16)
    exact = truth(p)
    errors = {name: error(x, exact[name]) for name, x in solve(p).items()}
    assert all(e <= TOLERANCE[p.x.q.dtype] for e in errors.values()), errors


@pytest.mark.parametrize("model", ["comba", "before"])
def test_first_gate_of_a_tile_is_closed(model: str) -> None:
    """The first step of a tile reads the state before its decay, which may be 0 where no other gate closes."""
    p = delta_problem(model, gates="long", T=70, B=1, H=1, Hq=1, K=20, V=16, dtype=torch.float32)
    assert p.x.log_f is not None
    p.x.log_f[:, [0, 64]] = -float("inf")
    if not INTERPRETED:
        p = p.to(torch.bfloat16)
    exact = truth(p)
    errors = {name: error(x, exact[name]) for name, x in solve(p).items()}
    assert all(e <= TOLERANCE[p.x.q.dtype] for e in errors.values()), errors


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32] if INTERPRETED else [torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", ["gdn", "kda"])
def test_gates_above_0_leave_no_nan(model: str, dtype: torch.dtype) -> None:
    """The decay of a tile, squared, exceeds float32. All else is 0, because weights of that size exceed float16."""
    p = delta_problem(model, T=150, B=1, K=16, V=16, carried=False, dtype=dtype)
    assert p.x.log_f is not None
    keys, values = torch.zeros_like(p.x.q), torch.zeros_like(p.x.v)
    x = p.x._replace(q=keys, k=keys, v=values, log_f=torch.full_like(p.x.log_f, 0.8))
    found = solve(DeltaProblem(p.model, x, values, torch.zeros_like(p.dC), p.scale))
    assert not any(t.any() for t in found.values())  # NaN is true


@pytest.mark.skipif(
    not INTERPRETED, reason="kernels for GPUs take bfloat16 alone, see tests/backends/test_delta_backends.py"
)
@pytest.mark.parametrize("model", ["gdn", "kda", "comba"])
def test_large_values_in_float16(model: str) -> None:
    """Corrections are computed in float16 from operands that exceed its range, and operands that are split add up."""
    p = delta_problem(model, T=70, B=1, K=16, V=16, carried=False)
    p = dataclasses.replace(p, x=p.x._replace(v=p.x.v * 8000), dh=p.dh / 8000, dC=p.dC / 8000).to(torch.float16)
    exact, found = truth(p), solve(p)
    assert p.x.v.abs().max() * 2 > torch.finfo(torch.float16).max / 2
    assert all(error(found[n], exact[n]) <= TOLERANCE[torch.float16] for n in ("h", "C", "dq", "dk")), found


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.sampled_from(MODELS), st.integers(1, 200), st.integers(1, 40), st.integers(1, 40),
    st.sampled_from([(1, 1), (1, 3), (2, 2)]), st.integers(0, 3),
)  # fmt: skip
def test_any_problem(model: str, T: int, K: int, V: int, heads: tuple[int, int], seed: int) -> None:
    B = 1 if INTERPRETED else 1 + 256 // T  # so many steps that errors of rounding to 16 bits are near their mean
    p = delta_problem(model, B=B, T=T, K=K, V=V, Hq=heads[0], H=heads[1], seed=seed, dtype=DTYPES[0])
    check_beside_terms(p, solve(p))


@pytest.mark.parametrize("model", ["gdn", "kda"])
def test_same_bits_again(model: str) -> None:
    """The second call replays the launches of the first."""
    p = delta_problem(model, T=70, B=1, K=16, V=16).to(DTYPES[0])
    first, again = solve(p), solve(p)
    assert all(torch.equal(x, again[name]) for name, x in first.items())


@pytest.mark.parametrize("model", ["gdn", "comba", "kda"])
def test_public_function(model: str) -> None:
    """tfla.delta_rule takes the kernels on request, also for a read before the decay and for gates by channel."""
    p = delta_problem(model, T=70, B=1, K=16, V=16, carried=False).to(DTYPES[0])
    leaves = {name: t.to(DEVICE).requires_grad_() for name, t in p.leaves.items()}
    h = tfla.delta_rule(
        *(leaves[name] for name in ("q", "k", "v", "beta", "log_f")), read_key=leaves.get("read_key"),
        read_before_decay=p.read_before_decay, scale=p.scale, backend="triton",
    )  # fmt: skip
    assert isinstance(h, Tensor)
    assert error(h.detach().cpu(), truth(p)["h"]) <= TOLERANCE[DTYPES[0]]
    dlog_f = torch.autograd.grad(h, leaves["log_f"], p.dh.to(h))[0]
    assert dlog_f.isfinite().all()


def test_linear_attention_with_gates_by_channel() -> None:
    """tfla.linear_attention takes the kernels for GLA, with more columns of v than a program of gates by step has."""
    p = delta_problem("gla", T=40, B=1, H=1, Hq=1, K=16, V=300, carried=False).to(DTYPES[0])
    leaves = {name: t.to(DEVICE).requires_grad_() for name, t in p.leaves.items()}
    h = tfla.linear_attention(*(leaves[n] for n in ("q", "k", "v", "log_f")), scale=p.scale, backend="triton")
    assert isinstance(h, Tensor)
    found = torch.autograd.grad(h, list(leaves.values()), p.dh.to(h))
    assert error(h.detach().cpu(), truth(p)["h"]) <= TOLERANCE[DTYPES[0]]
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("by_channel", [True, False])
def test_log_gates_as_the_caller_gives_them(by_channel: bool) -> None:
    """Kernels read gates in 16 bits without a copy, take any below -1e5 for -1e5, and give those a gradient of 0."""
    p = delta_problem("kda" if by_channel else "gdn", T=70, B=1, H=2, Hq=2, K=16, V=16, carried=False).to(DTYPES[0])
    short = torch.float16 if INTERPRETED else torch.bfloat16
    x = p.x._replace(log_f=p.leaves["log_f"].detach().to(short))
    assert x.log_f is not None
    x.log_f[:, 5] = -torch.inf
    x.log_f[:, 40] = -1e6 if short == torch.bfloat16 else -torch.inf
    found = {}
    for backend, device, dtype in ("triton", DEVICE, DTYPES[0]), ("reference", "cpu", torch.float64):
        tensors = {n: getattr(x, n).to(device) for n in ("q", "k", "v", "beta", "log_f")}
        leaves = {n: (t if n == "log_f" else t.to(dtype)).requires_grad_() for n, t in tensors.items()}
        h = tfla.delta_rule(**leaves, scale=p.scale, backend=backend)
        assert isinstance(h, Tensor)
        grads = torch.autograd.grad(h, list(leaves.values()), p.dh.to(h))
        found[backend] = {"h": h.detach(), **dict(zip(leaves, grads, strict=True))}
    dlog_f = found["triton"]["log_f"]
    assert dlog_f.dtype == short
    assert not dlog_f[:, [5, 40]].any()
    for name, t in found["triton"].items():
        assert error(t.cpu(), found["reference"][name]) <= TOLERANCE[short if name == "log_f" else DTYPES[0]]
