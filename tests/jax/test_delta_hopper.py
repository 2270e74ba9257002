"""Hopper's kernels of the delta rule and of gates by channel from JAX.

They run on a Hopper GPU, where their bits are those of PyTorch. With TRITON_INTERPRET=1 their plans run on the CPU,
Gluon kernels in the simulator.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax_delta_cases
import pytest
import torch
from cases import INTERPRETED, TOLERANCE, error
from delta_cases import DeltaProblem, check_beside_terms, delta_problem
from interpreted_bfloat16 import use_bfloat16
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_cases import to_torch
from jax_hopper import pytestmark, simulation
from jax_plans import plans_run
from torch import Tensor

import tfla
import tfla.jax
from tfla.jax import hosting
from tfla.jax.delta import kernels

__all__ = ["pytestmark", "simulation"]  # the marks and the fixture of all tests of these kernels

DTYPE = torch.float16 if INTERPRETED else torch.bfloat16


@pytest.fixture(autouse=True)
def _plans_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with plans_run(monkeypatch, architecture=90):
        yield


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one tile": ("gdn", {"T": 64, "K": 128, "carried": False}),
    "heads that share keys": ("gdn", {"T": 70, "K": 64, "Hq": 1, "H": 2}),
    "wide": ("gdn", {"T": 70, "K": 72, "V": 136}),
    "wide, without gates": ("deltanet", {"T": 70, "K": 64, "V": 192}),
    "packed": ("gdn", {"lengths": (0, 66, 3), "K": 128}),
    "kda": ("kda", {"T": 70, "K": 64}),
    "kda, packed": ("kda", {"lengths": (5, 0, 66), "K": 64, "V": 136}),
    "gla": ("gla", {"T": 70, "K": 64}),
}
SMALL: dict[str, Any] = {"B": 1, "H": 1, "Hq": 1, "V": 64, "dtype": DTYPE}


def problem(case: str) -> DeltaProblem:
    model, sizes = CASES[case]
    return delta_problem(model, **SMALL | sizes)


def solve(p: DeltaProblem, **given: Any) -> dict[str, Tensor]:
    return jax_delta_cases.solve(p, backend="hopper", **given)


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_the_recurrence(case: str) -> None:
    p = problem(case)
    check_beside_terms(p, solve(p))


@pytest.mark.parametrize(("model", "V"), [("gdn", 64), ("deltanet", 136)])
def test_segments(model: str, V: int) -> None:
    p = delta_problem(model, **SMALL | {"T": 150, "K": 64, "V": V, "H": 2})
    check_beside_terms(p, solve(p, kernel="segmented", chunk_size=64))


NORMALIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "one tile": ("gdn", {"T": 64, "K": 128, "carried": False}),
    "heads that share keys": ("gdn", {"T": 70, "K": 64, "Hq": 1, "H": 2, "B": 2}),
    "packed": ("gdn", {"lengths": (0, 66, 3), "K": 72}),
    "without gates": ("deltanet", {"T": 70, "K": 64, "V": 128}),
    "wide": ("gdn", {"T": 70, "K": 72, "V": 136}),
    "kda": ("kda", {"T": 70, "K": 128, "dtype": torch.bfloat16}),
    "kda, packed": ("kda", {"lengths": (5, 0, 66), "K": 72, "V": 136, "dtype": torch.bfloat16}),
    "segments": ("gdn", {"T": 150, "K": 64, "H": 2, "B": 2}),
    "segments, wide": ("gdn", {"T": 150, "K": 64, "V": 136}),
}


@pytest.mark.parametrize("case", NORMALIZED)
def test_norms_in_kernels(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read q and k as they are given, of any norm; dq and dk are weighted by |q| and |k|."""
    model, sizes = NORMALIZED[case]
    if INTERPRETED and model == "kda":
        use_bfloat16(monkeypatch)
    p = delta_problem(model, **SMALL | sizes)
    generator = torch.Generator().manual_seed(0)
    q, k = (t * torch.exp(6 * torch.rand(*t.shape[:3], 1, generator=generator) - 3).to(t.dtype) for t in (p.x.q, p.x.k))
    p = dataclasses.replace(p, x=p.x._replace(q=q, k=k))
    by_kernels: list[bool] = []
    prepare = kernels.prepare

    def recorded(*given: Any) -> Any:
        spec = prepare(*given)
        by_kernels.append(spec.options.normalize_qk)
        return spec

    monkeypatch.setattr(kernels, "prepare", recorded)
    cut: dict[str, Any] = {"kernel": "segmented", "chunk_size": 64} if "segments" in case else {}
    found = solve(p, normalize_qk=True, **cut)
    assert by_kernels == [True]
    leaves = {name: t.detach().double().requires_grad_() for name, t in p.leaves.items()}
    given = dict(leaves)
    state = tfla.State(given.pop("C")) if "C" in given else None
    h, last = tfla.delta_rule(
        **given, initial_state=state, normalize_qk=True, scale=p.scale, cu_seqlens=p.x.cu_seqlens, return_state=True,
        backend="reference",
    )  # fmt: skip
    grads = torch.autograd.grad((h, last.C), list(leaves.values()), (p.dh.double(), p.dC.double()))
    expected = {"h": h, "C": last.C} | dict(zip((f"d{name}" for name in leaves), grads, strict=True))
    for name, exact in expected.items():
        weight = leaves[name[1:]].detach().norm(dim=-1, keepdim=True) if name in ("dq", "dk") else 1.0
        size = (exact * weight).norm().item()
        if name == "dlog_f":  # a sum of products of q and dq, and of k and dk
            size = max(size, (leaves["q"] * expected["dq"]).norm().item(), (leaves["k"] * expected["dk"]).norm().item())
        assert ((found[name].double() - exact.detach()) * weight).norm().item() <= TOLERANCE[p.x.q.dtype] * size, name


CUTS: dict[str, dict[str, Any]] = {"whole sequences": {}, "segments": {"kernel": "segmented", "chunk_size": 64}}


def gradients_with_norms(leaves: dict[str, Any], **cut: Any) -> Any:
    """Return the gradients of a sum of h and of the final state, of a call that normalizes q and k."""

    def total(leaves: dict[str, Any]) -> Any:
        h, state = jax_delta_cases.call("gdn", leaves, normalize_qk=True, backend="hopper", **cut)
        return jnp.sin(h.astype(jnp.float32)).sum() + state.C.sum()

    return jax.grad(total)(leaves)


def normalized_leaves() -> dict[str, Any]:
    return jax_delta_cases.leaves_of(delta_problem("gdn", **SMALL | {"T": 70, "K": 64, "B": 2, "H": 2, "Hq": 2}))


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_norms_under_vmap(cut: dict[str, Any]) -> None:
    leaves, run = normalized_leaves(), jax.jit(functools.partial(gradients_with_norms, **cut))
    both = {name: jnp.stack([x, x[::-1]]) for name, x in leaves.items()}
    found = jax.jit(jax.vmap(run))(both)
    for n, each in enumerate((leaves, {name: x[::-1] for name, x in leaves.items()})):
        for name, exact in run(each).items():
            assert jnp.array_equal(found[name][n], exact), name


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ("steps", "states"), [(P("x"), P("x")), (P(None, None, "x"), P(None, "x"))], ids=["batch", "heads"]
)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_norms_of_divided_calls(
    cut: dict[str, Any], steps: P, states: P, kind: AxisType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a forward stores is divided too. On CPUs the chunkwise form stands for the launches."""
    monkeypatch.setattr(hosting, "PLATFORM", "cuda")
    leaves, run = normalized_leaves(), jax.jit(functools.partial(gradients_with_norms, **cut))
    expected = run(leaves)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        placed = {n: jax.device_put(x, NamedSharding(mesh, states if n == "C" else steps)) for n, x in leaves.items()}
        compiled = run.lower(placed).compile()
        found = compiled(placed)
    assert not any(name in compiled.as_text() for name in ("all-gather(", "all-to-all(", "collective-permute("))
    for name, exact in expected.items():
        assert error(to_torch(found[name]), to_torch(exact)) <= TOLERANCE[DTYPE], name


@pytest.mark.skipif(INTERPRETED, reason="PyTorch's launches run in the simulator in tests of their own")
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_pytorch(case: str, backend: str) -> None:
    jax_delta_cases.check_bits(problem(case), backend, "fused")


@pytest.mark.skipif(INTERPRETED, reason="PyTorch's launches run in the simulator in tests of their own")
@pytest.mark.parametrize(("model", "V"), [("gdn", 64), ("deltanet", 136)])
def test_bits_of_segments_are_those_of_pytorch(model: str, V: int) -> None:
    """One long sequence of one head is cut into segments by default."""
    jax_delta_cases.check_bits(delta_problem(model, **SMALL | {"T": 8192, "K": 64, "V": V}), "hopper", "segmented")


def test_explanation() -> None:
    x = jax_delta_cases.leaves_of(problem("one tile"))
    arrays = [x[name] for name in ("q", "k", "v", "beta", "log_f")]
    found = tfla.jax.explain_delta_rule(*arrays, backend="hopper")
    assert (found.backend, found.kernel) == ("hopper", "fused")
    assert found.not_taken["triton"] == "it could, but 'hopper' was asked for"
    found = tfla.jax.explain_delta_rule(*arrays)
    assert (found.backend, found.kernel) == ("hopper", "fused")
    assert found.not_taken["triton"] == found.not_taken["chunkwise"] == "it could, but 'hopper' comes before it"
    before = {"read_key": x["k"], "read_before_decay": True}
    reason = "it takes a read key with gates by channel alone"
    with pytest.raises(ValueError, match=r"^backend: 'hopper' cannot run this: "):
        tfla.jax.delta_rule(*arrays, **before, backend="hopper")
    assert tfla.jax.explain_delta_rule(*arrays, read_key=x["k"]).not_taken["hopper"] == reason
