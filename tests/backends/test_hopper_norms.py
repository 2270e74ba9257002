"""q and k divided by their norms inside the Hopper kernels of the delta rule, against the recurrence in float64.

They run on a Hopper GPU. With TRITON_INTERPRET=1 they run on the CPU, Gluon kernels in the simulator.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases import INTERPRETED, TOLERANCE, error
from delta_cases import DeltaProblem, delta_problem, recurrence, sizes_of_terms, truth
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hopper_delta import BACKEND, DEVICE, DTYPE, inputs, pytestmark, simulation
from torch import Tensor

import tfla
from tfla.ops import fused_activations
from tfla.ops.delta_activations import normalized

__all__ = ["pytestmark", "simulation"]  # the marks and the fixture of the other tests of these kernels


def drawn(model: str, zeros: bool = True, with_beta: bool = True, **sizes: Any) -> DeltaProblem:
    """Return a problem whose q and k have norms from 0.05 to 20 or more, and a few rows of zeros if these are asked."""
    p = delta_problem(model, **{"K": 128, "V": 128, "B": 1, **sizes}, dtype=DTYPE)
    generator = torch.Generator().manual_seed(1)
    q, k = ((t * torch.exp(6 * torch.rand(*t.shape[:3], 1, generator=generator) - 3)).to(DTYPE) for t in (p.x.q, p.x.k))
    if zeros:
        q[:, 2::31] = 0.0
        k[:, 3::29] = 0.0
    return dataclasses.replace(p, x=p.x._replace(q=q, k=k, beta=p.x.beta if with_beta else None))


def with_norms_of_one(p: DeltaProblem) -> DeltaProblem:
    """Return the problem with normalized q and k in float64."""
    return dataclasses.replace(p, x=p.x._replace(q=normalized(p.x.q.double()), k=normalized(p.x.k.double())))


def check_gradients(p: DeltaProblem, kernel: str = "fused", chunk_size: int = 1024) -> None:
    """Check a forward that stores and its backward, launched and replayed; dq and dk are weighted by |q| and |k|.

    The error of dlog_f is one of the terms that it is a sum of, as in other tests of these kernels.
    """
    spec = p.spec(kernel, chunk_size)._replace(normalize_qk=True)
    assert BACKEND.normalizes(p.x, spec)
    leaves = {name: t.detach().double().requires_grad_() for name, t in p.leaves.items()}
    h, C = recurrence(p, leaves | {name: normalized(leaves[name]) for name in ("q", "k")})
    total = (h * p.dh.double()).sum() + (C * p.dC.double()).sum()
    expected = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
    for name in ("q", "k"):
        expected[name] = expected[name] * leaves[name].norm(dim=-1, keepdim=True)
    x, size_of_gates = inputs(p), sizes_of_terms(with_norms_of_one(p)).get("dlog_f", 1.0)
    for _ in range(2):
        out = BACKEND.forward(x, spec)
        assert (tuple(out.chunk_C.shape), out.chunk_C.dtype) == BACKEND.stored(x, spec).chunk_C
        found = BACKEND.backward(x, out, p.dh.to(DEVICE), p.dC.to(out.C), spec)
        assert error(out.h.cpu(), h.detach()) <= TOLERANCE[DTYPE]
        for name, exact in expected.items():
            grad = getattr(found, name).cpu().double()
            if name in ("q", "k"):
                grad = grad * leaves[name].norm(dim=-1, keepdim=True)
            size = size_of_gates if name == "log_f" else exact.norm().item() or 1.0
            assert (grad - exact.detach()).norm().item() / size <= TOLERANCE[DTYPE], name


def check(p: DeltaProblem, kernel: str = "fused", chunk_size: int = 1024) -> None:
    """Check h and the final state of a call, and of one that replays its launches."""
    spec = p.spec(kernel, chunk_size)._replace(save=False, normalize_qk=True)
    assert BACKEND.normalizes(p.x, spec)
    expected = truth(with_norms_of_one(p))
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


GRADIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a tile": ("gdn", {"T": 64, "H": 1, "Hq": 1, "carried": False}),
    "a few steps": ("gdn", {"T": 3, "H": 8, "Hq": 4, "B": 2}),
    "writes of strength 1": ("gdn", {"T": 70, "H": 1, "Hq": 1, "with_beta": False}),
    "several tiles": ("gdn", {"T": 330, "H": 1, "Hq": 1}),
    "heads that share keys": ("gdn", {"T": 70, "Hq": 1, "H": 2}),
    "packed": ("gdn", {"lengths": (0, 70, 3, 64, 0), "Hq": 1}),
    "72 x 64": ("gdn", {"T": 70, "K": 72, "V": 64, "B": 2}),
    "without gates": ("deltanet", {"T": 130, "H": 1, "Hq": 1}),
    "128 x 256": ("gdn", {"T": 330, "V": 256, "H": 1, "Hq": 1}),
    "128 x 256, packed heads that share keys": ("gdn", {"V": 256, "lengths": (0, 70, 3, 64, 0), "H": 2, "Hq": 1}),
    "72 x 136": ("gdn", {"T": 70, "K": 72, "V": 136, "B": 2}),
    "128 x 256 without gates": ("deltanet", {"T": 130, "V": 256, "H": 1, "Hq": 1}),
}


@pytest.mark.parametrize(("model", "sizes"), GRADIENTS.values(), ids=GRADIENTS.keys())
def test_gradients(model: str, sizes: dict[str, Any]) -> None:
    check_gradients(drawn(model, zeros=False, **sizes))


@pytest.mark.parametrize("gates", ["long", "half", "resets"])
def test_gates(gates: str) -> None:
    check(drawn("gdn", T=200, H=1, Hq=1, gates=gates, alike=0.9))


@pytest.mark.parametrize("model", ["deltanet", "gdn"])
def test_segments(model: str) -> None:
    check(drawn(model, T=150, K=64, V=64, H=2, Hq=1), "segmented", 64)
    for V in (64, 136):
        check_gradients(drawn(model, zeros=False, T=150, K=72, V=V, H=2, Hq=1, B=2), "segmented", 64)


@given(st.integers(1, 200), st.sampled_from([64, 96, 128]), st.sampled_from([64, 200]), st.integers(0, 99))
@settings(max_examples=4 if INTERPRETED else 30)
def test_any_problem(T: int, K: int, V: int, seed: int) -> None:
    check(drawn("gdn", T=T, K=K, V=V, H=2, Hq=1, seed=seed))


@pytest.mark.parametrize(("V", "options"), [(128, {}), (136, {}), (64, {"kernel": "segmented", "chunk_size": 64})])
def test_operator_launches_no_pass_of_its_own(
    V: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The kernels read q and k as they are."""
    p = drawn("gdn", zeros=False, T=130, V=V, H=1, Hq=1, carried=False)
    x, passes = inputs(p), []
    plain = fused_activations._Normalized.apply
    monkeypatch.setattr(fused_activations._Normalized, "apply", lambda x: passes.append(1) or plain(x))

    def run() -> Tensor:
        h: Tensor = tfla.delta_rule(
            x.q, x.k, x.v, x.beta, x.log_f, normalize_qk=True, scale=p.scale, backend="hopper", **options
        )
        return h

    with torch.no_grad():
        h = run()
    assert not passes
    assert error(h.cpu(), truth(with_norms_of_one(p))["h"]) <= TOLERANCE[DTYPE]
    leaves = [x.q.requires_grad_(), x.k.requires_grad_()]
    found = torch.autograd.grad(run(), leaves, p.dh.to(DEVICE))
    assert not passes
    q, k = (t.detach().double().cpu().requires_grad_() for t in leaves)
    every = {name: t.detach().double() for name, t in p.leaves.items()}
    h, _ = recurrence(p, every | {"q": normalized(q), "k": normalized(k)})
    for mine, expected, of in zip(found, torch.autograd.grad(h, (q, k), p.dh.double()), (q, k), strict=True):
        weights = of.detach().norm(dim=-1, keepdim=True)
        assert error(mine.cpu().double() * weights, expected * weights) <= TOLERANCE[DTYPE]


def test_second_derivatives() -> None:
    """The gradient of a gradient is that of the plain operations."""
    p = drawn("gdn", zeros=False, T=5, H=1, Hq=1, carried=False)
    x = inputs(p)

    def second(q: Tensor, k: Tensor, backend: str) -> tuple[Tensor, ...]:
        h = tfla.delta_rule(q, k, x.v.to(q.dtype), x.beta, x.log_f, normalize_qk=True, scale=p.scale, backend=backend)
        first = torch.autograd.grad(h, (q, k), p.dh.to(h), create_graph=True)
        return torch.autograd.grad(sum(t.float().square().sum() for t in first), (q, k))

    mine = second(x.q.clone().requires_grad_(), x.k.clone().requires_grad_(), "hopper")
    expected = second(x.q.double().requires_grad_(), x.k.double().requires_grad_(), "reference")
    for found, exact_ in zip(mine, expected, strict=True):
        assert error(found, exact_) <= TOLERANCE[DTYPE]


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
    expected = truth(with_norms_of_one(p))
    assert error(h.cpu(), expected["h"]) <= TOLERANCE[DTYPE]
    assert error(pool[rows].cpu(), expected["C"]) <= TOLERANCE[DTYPE]
    assert not pool[1].any()
