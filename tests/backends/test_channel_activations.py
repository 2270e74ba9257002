"""Norms and activations inside the Hopper kernels with gates by channel, and their gradients, against float64.

They run on a Hopper GPU. With TRITON_INTERPRET=1 they run on the CPU, Gluon kernels in the simulator.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases import TOLERANCE, error
from delta_cases import DeltaProblem, delta_problem, recurrence
from test_channel_operands import pytestmark, simulation
from test_hopper_delta import BACKEND, DEVICE
from torch import Tensor

import tfla
from tfla._util import caching
from tfla.backends.delta import DeltaInputs
from tfla.ops import fused_activations
from tfla.ops.delta_activations import log_gate, normalized

__all__ = ["pytestmark", "simulation"]  # the marks and the fixture of the other tests of these kernels

ALL = {"normalize_qk": True, "gate_activation": "softplus"}


def drawn(
    activated: bool = True, A_log: bool = True, bias: bool | str = True, closed: float = 0.0, scaled: bool = True,
    **sizes: Any,
) -> DeltaProblem:  # fmt: skip
    """Return a problem whose gates are pre-activations in bfloat16.

    Args:
        activated: whether the gates are pre-activations; else they are log-gates.
        A_log, bias: whether there are A_log and dt_bias then; the latter may be "heads", one number for each.
        closed: the share of gates that are closed then, so that their tiles need levels.
        scaled: whether q and k have norms from 0.05 to 20.
        sizes: arguments of `delta_problem`.
    """
    p = delta_problem("kda", **{"K": 128, "V": 64, "B": 1, "H": 1, "Hq": 1, **sizes}, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    x = p.x
    if scaled:
        q, k = ((t * torch.exp(6 * uniform(*t.shape[:3], 1) - 3)).to(t.dtype) for t in (x.q, x.k))
        x = x._replace(q=q, k=k)
    if activated:
        assert x.log_f is not None
        H, K = x.log_f.shape[2:]
        f = torch.where(uniform(*x.log_f.shape) < closed, 30.0, draw(*x.log_f.shape) - 3).to(torch.bfloat16)
        dt_bias = 0.3 * draw(H) if bias == "heads" else 0.3 * draw(H, K) if bias else None
        x = x._replace(log_f=f, A_log=0.3 * draw(H) if A_log else None, dt_bias=dt_bias)
    return dataclasses.replace(p, x=x)


def check(p: DeltaProblem, **options: Any) -> None:
    """Check h and the final state of a call, and of one that replays its launches."""
    spec = p.spec("fused")._replace(**ALL | {"save": False} | options)
    x = DeltaInputs(*(None if t is None else t.to(DEVICE) for t in p.x))
    assert BACKEND.activates(x, spec)
    assert BACKEND.normalizes(x, spec)
    leaves = {name: t.double() for name, t in p.leaves.items()}
    if spec.normalize_qk:
        leaves |= {name: normalized(leaves[name]) for name in ("q", "k")}
    log_f = leaves["log_f"], spec.gate_activation, p.x.A_log, p.x.dt_bias, spec.lower_bound
    h, C = recurrence(p, leaves | {"log_f": log_gate(*log_f)})
    for _ in range(2):
        out = BACKEND.forward(x, spec)
        assert error(out.h.cpu(), h) <= TOLERANCE[torch.bfloat16]
        assert error(out.C.cpu(), C) <= TOLERANCE[torch.bfloat16]


def check_gradients(p: DeltaProblem, **options: Any) -> None:
    """Check a call that stores and its backward, launched and replayed; dq and dk are weighted by |q| and |k|.

    The error of the gates' gradient is one of the terms that it is a sum of, as in other tests of these kernels.
    """
    spec = p.spec("fused")._replace(**ALL | {"save": True} | options)
    x = DeltaInputs(*(None if t is None else t.to(DEVICE) for t in p.x))
    assert BACKEND.activates(x, spec)
    assert BACKEND.normalizes(x, spec)
    leaves = {name: t.detach().double().requires_grad_() for name, t in p.leaves.items()}
    parameters = {name: getattr(p.x, name) for name in ("A_log", "dt_bias")}
    leaves |= {name: t.double().requires_grad_() for name, t in parameters.items() if t is not None}
    log_f = leaves["log_f"], spec.gate_activation, leaves.get("A_log"), leaves.get("dt_bias"), spec.lower_bound
    made = {"log_f": log_gate(*log_f)} | {n: normalized(leaves[n]) for n in ("q", "k") if spec.normalize_qk}
    h, C = recurrence(p, {name: t for name, t in (leaves | made).items() if name in p.leaves})
    total = (h * p.dh.double()).sum() + (C * p.dC.double()).sum()
    expected = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values()), retain_graph=True), strict=True))
    sizes = {name: t.norm().item() for name, t in expected.items()}
    # The gradient of a gate is a sum of products q dq and k dk, and those of A_log and dt_bias sum it over steps.
    normal = [(leaves | made)[name] for name in ("q", "k")]
    products = [x * dx for x, dx in zip(normal, torch.autograd.grad(total, normal, retain_graph=True), strict=True)]
    groups = p.x.v.shape[2] // p.x.q.shape[2]
    terms = torch.stack([t.detach().repeat_interleave(groups, 2) for t in products])
    (share,) = torch.autograd.grad(made["log_f"].sum(), [leaves["log_f"]])
    of_rows = (made["log_f"].detach() * terms).abs().sum(2)  # over steps, which have rounding in common
    for name, parts in {"log_f": share * terms, "dt_bias": share * terms, "A_log": of_rows}.items():
        if name in sizes:
            sizes[name] = max(sizes[name], *(t.norm().item() for t in parts))
    for _ in range(2):
        out = BACKEND.forward(x, spec)
        found = BACKEND.backward(x, out, p.dh.to(DEVICE), p.dC.to(out.C), spec)
        assert error(out.h.cpu(), h.detach()) <= TOLERANCE[torch.bfloat16]
        for name, exact in expected.items():
            grad = getattr(found, name).cpu().double()
            size = sizes[name]
            if name in ("q", "k") and spec.normalize_qk:
                norm = leaves[name].detach().norm(dim=-1, keepdim=True)
                grad, exact = grad * norm, exact * norm
                size = exact.norm().item()
            assert (grad - exact).norm().item() <= TOLERANCE[torch.bfloat16] * (size or 1.0), name


PROBLEMS: dict[str, dict[str, Any]] = {
    "one step": {"T": 1, "carried": False},
    "several tiles": {"T": 150, "V": 128},
    "heads that share keys": {"T": 70, "H": 3},
    "two batch rows": {"T": 70, "B": 2, "K": 96},
    "packed": {"lengths": (0, 70, 3, 64, 0), "H": 2},
    "tiles that need levels": {"T": 130, "closed": 0.3},
    "levels in packed sequences": {"lengths": (70, 3), "closed": 0.02, "H": 2},
}


@pytest.mark.parametrize("sizes", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_shapes(sizes: dict[str, Any]) -> None:
    check(drawn(**sizes))


@pytest.mark.parametrize("sizes", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_gradients(sizes: dict[str, Any]) -> None:
    check_gradients(drawn(**sizes))


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a sigmoid": ({}, {"gate_activation": "sigmoid", "lower_bound": -5.0}),
    "a sigmoid, gates beyond dqk": ({"K": 96}, {"gate_activation": "sigmoid", "lower_bound": -8.0}),
    "a sigmoid, levels": ({"closed": 0.2}, {"gate_activation": "sigmoid", "lower_bound": -40.0}),
    "a bias of heads": ({"bias": "heads", "H": 2}, {}),
    "no bias": ({"bias": False}, {}),
    "no A_log, levels": ({"A_log": False, "closed": 0.02}, {}),
    "neither": ({"A_log": False, "bias": False}, {}),
    "norms alone": ({"activated": False}, {"gate_activation": "none"}),
    "norms alone, levels": ({"activated": False, "gates": "half"}, {"gate_activation": "none"}),
    "gates alone": ({"scaled": False}, {"normalize_qk": False}),
    "gates alone, levels": ({"scaled": False, "closed": 0.2}, {"normalize_qk": False}),
}


@pytest.mark.parametrize(("sizes", "options"), OPTIONS.values(), ids=OPTIONS.keys())
def test_options(sizes: dict[str, Any], options: dict[str, Any]) -> None:
    p = drawn(**{"T": 70, **sizes})
    check(p, **options)
    check_gradients(p, **options)


def test_gates_in_float32() -> None:
    p = drawn(T=70)
    assert p.x.log_f is not None
    p = dataclasses.replace(p, x=p.x._replace(log_f=p.x.log_f.float()))
    check(p)
    check_gradients(p)


def test_slices_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of A_log and dt_bias sum over two batch rows, each in halves of two tiles and of one."""
    batch_slices = pytest.importorskip("tfla.backends.gpu.batch_slices")
    time_parts = pytest.importorskip("tfla.backends.gpu.time_parts")
    channel_rule = pytest.importorskip("tfla.backends.triton.channel_rule")
    new_sums, tiles = channel_rule.ChannelContext.new_sums, []

    def recorded(ctx: Any) -> Any:
        tiles.append(ctx.base.tiles)
        return new_sums(ctx)

    for module in (batch_slices, time_parts):
        monkeypatch.setattr(module, "SMALLEST", 0)
    monkeypatch.setattr(batch_slices, "FEWEST_TOKENS", 1)
    monkeypatch.setattr(batch_slices, "processors", lambda device: 1)
    monkeypatch.setattr(time_parts, "FEWEST_TILES", 1)
    monkeypatch.setattr(channel_rule.ChannelContext, "new_sums", recorded)
    caching.clear_caches()
    check_gradients(drawn(T=130, B=2))
    assert tiles == [1, 2] * 2  # the last half first
    caching.clear_caches()


def call(x: DeltaInputs, backend: str | None = "hopper", **options: Any) -> Tensor:
    """Return h of an operator whose inputs have all activations."""
    h: Tensor = tfla.delta_rule(
        x.q, x.k, x.v, x.beta, x.log_f, beta_activation="sigmoid", A_log=x.A_log, dt_bias=x.dt_bias, scale=0.1,
        backend=backend, **ALL, **options,
    )  # fmt: skip
    return h


def test_operator_launches_no_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only beta, one number a step and head, has a kernel of its own."""
    monkeypatch.setattr(BACKEND, "unsupported", lambda x: None)
    shapes: list[tuple[int, ...]] = []
    for of in (fused_activations._Normalized, fused_activations._Gates):
        apply = of.apply
        monkeypatch.setattr(of, "apply", lambda x, *more, apply=apply: shapes.append(x.shape) or apply(x, *more))
    p = drawn(T=70, carried=False)
    x = DeltaInputs(*(None if t is None else t.to(DEVICE) for t in p.x))
    with torch.no_grad():
        h = call(x)
    assert shapes == [(1, 70, 1)]
    exact = call(DeltaInputs(*(None if t is None else t.double().cpu() for t in x)), "reference")
    assert error(h.cpu(), exact) <= TOLERANCE[torch.bfloat16]
    shapes.clear()
    again = call(x._replace(q=x.q.requires_grad_()))
    assert shapes == [(1, 70, 1)]
    assert error(again.detach().cpu(), exact) <= TOLERANCE[torch.bfloat16]
    wide = drawn(T=3, K=200, carried=False)
    assert not BACKEND.activates(wide.x, wide.spec("fused")._replace(save=False))


def test_rows_of_a_pool() -> None:
    """Packed prefills read and overwrite rows of a pool with activations in the kernels, too."""
    p = drawn(lengths=(70, 3))
    x = DeltaInputs(*(None if t is None else t.to(DEVICE) for t in p.x))
    assert x.C is not None
    spec = p.spec("fused")._replace(**ALL, save=False)
    out = BACKEND.forward(x, spec)
    pool = torch.zeros(4, *x.C.shape[1:], device=DEVICE)
    rows = torch.tensor([2, 0], device=DEVICE)
    pool[rows] = x.C
    h = BACKEND.forward_by_rows(x._replace(C=pool), rows, spec)
    assert h is not None
    assert torch.equal(h, out.h)
    assert torch.equal(pool[rows], out.C)
    assert not pool[1].any()
