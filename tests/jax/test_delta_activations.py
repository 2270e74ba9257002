"""Norms and activations of gates inside the Hopper kernels with gates by channel, from JAX.

They run on a Hopper GPU. With TRITON_INTERPRET=1 their plans run on the CPU, Gluon kernels in the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax_delta_cases
import pytest
import torch
from cases import TOLERANCE, error
from delta_cases import DeltaProblem
from interpreted_bfloat16 import use_bfloat16
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_cases import to_jax, to_torch
from jax_hopper import pytestmark, simulation
from jax_plans import plans_run
from test_channel_activations import drawn
from test_hopper_delta import BACKEND, DEVICE
from torch import Tensor

import tfla
from tfla._util import caching
from tfla.jax import hosting
from tfla.jax.delta import kernels

__all__ = ["pytestmark", "simulation"]  # the marks and the fixture of the other tests of these kernels

ALL: dict[str, Any] = {"normalize_qk": True, "gate_activation": "softplus"}
PARAMETERS = ("A_log", "dt_bias")
Arrays = dict[str, Any]


@pytest.fixture(autouse=True)
def _plans_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_bfloat16(monkeypatch)
    monkeypatch.setattr(BACKEND, "unsupported", lambda x: None)
    monkeypatch.setattr("tfla.backends.gpu.config._architecture", lambda device: 90)  # that of the plans
    caching.clear_caches()
    with plans_run(monkeypatch, architecture=90):
        yield
    caching.clear_caches()


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, str]]:
    """Whether the kernels of each call normalize q and k, and the activation that they apply."""
    found: list[tuple[bool, str]] = []
    prepare = kernels.prepare

    def recorded(*given: Any) -> Any:
        spec = prepare(*given)
        found.append((spec.options.normalize_qk, spec.options.gate_activation))
        return spec

    monkeypatch.setattr(kernels, "prepare", recorded)
    return found


def parameters_of(p: DeltaProblem) -> dict[str, Tensor]:
    """Return A_log and dt_bias by name, without what is not given."""
    given = {name: getattr(p.x, name) for name in PARAMETERS}
    return {name: t for name, t in given.items() if t is not None}


def leaves_of(p: DeltaProblem) -> Arrays:
    """Return everything that has a gradient, by name."""
    return jax_delta_cases.leaves_of(p) | {name: to_jax(t) for name, t in parameters_of(p).items()}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two batch rows": ({"T": 70, "B": 2}, {}),
    "packed": ({"lengths": (5, 0, 66), "K": 72, "V": 136, "H": 2}, {}),
    "a bias of heads": ({"T": 20, "bias": "heads", "H": 2}, {}),
    "a sigmoid, no A_log": ({"T": 20, "A_log": False}, {"gate_activation": "sigmoid", "lower_bound": -5.0}),
    "a sigmoid, no parameters, without a state": (
        {"T": 20, "A_log": False, "bias": False, "carried": False},
        {"gate_activation": "sigmoid", "lower_bound": -5.0},
    ),
    "gates alone, tiles that need levels": ({"T": 70, "scaled": False, "closed": 0.2}, {"normalize_qk": False}),
}


@pytest.mark.parametrize(("sizes", "options"), CASES.values(), ids=CASES.keys())
def test_bits_are_those_of_pytorch(
    sizes: dict[str, Any], options: dict[str, Any], applied: list[tuple[bool, str]]
) -> None:
    """Gradients of A_log and dt_bias are summed over batch rows in another order."""
    p, options = drawn(**sizes), ALL | options
    more = parameters_of(p)
    found = jax_delta_cases.solve(p, more, backend="hopper", **options)
    assert applied == [(options["normalize_qk"], options["gate_activation"])]
    own = {name: t.detach().to(DEVICE).requires_grad_() for name, t in (p.leaves | more).items()}
    given = dict(own)
    state = tfla.State(given.pop("C")) if "C" in given else None
    cu_seqlens = None if p.x.cu_seqlens is None else p.x.cu_seqlens.to(DEVICE)
    h, last = tfla.delta_rule(
        **given, **options, initial_state=state, scale=p.scale, cu_seqlens=cu_seqlens, return_state=True,
        backend="hopper",
    )  # fmt: skip
    cotangents = p.dh.to(h), p.dC.to(last.C)
    grads = torch.autograd.grad((h, last.C), list(own.values()), cotangents)
    expected = {"h": h, "C": last.C} | dict(zip((f"d{name}" for name in own), grads, strict=True))
    assert found.keys() == expected.keys()
    for name, exact in expected.items():
        assert error(found[name], exact.detach().cpu()) <= (1e-5 if name[1:] in PARAMETERS else 0.0), name


def gradients(leaves: Arrays, backend: str = "hopper") -> Any:
    """Return the gradients of a sum of h and of the final state."""

    def total(leaves: Arrays) -> Any:
        h, state = jax_delta_cases.call("kda", leaves, backend=backend, **ALL)
        return jnp.sin(h.astype(jnp.float32)).sum() + state.C.sum()

    return jax.grad(total)(leaves)


@pytest.mark.parametrize("shared", [(), PARAMETERS], ids=["each its own parameters", "shared parameters"])
def test_vmap(shared: tuple[str, ...]) -> None:
    leaves = leaves_of(drawn(T=20, B=2))
    second = {name: x if name in shared else x[::-1] for name, x in leaves.items()}
    axes = {name: None if name in shared else 0 for name in leaves}
    both = {name: x if name in shared else jnp.stack([x, second[name]]) for name, x in leaves.items()}
    found = jax.jit(jax.vmap(gradients, in_axes=(axes,)))(both)
    for n, each in enumerate((leaves, second)):
        for name, exact in jax.jit(gradients)(each).items():
            bound = 1e-5 if name in PARAMETERS else 0.0
            assert error(to_torch(found[name][n]), to_torch(exact)) <= bound, name


@pytest.mark.parametrize("bias", [True, "heads"], ids=["a bias of channels", "a bias of heads"])
def test_on_other_platforms(bias: bool | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunkwise form stands for the launches, also under vmap, where it has the rows of all calls."""
    monkeypatch.setattr(hosting, "PLATFORM", "cuda" if jax.default_backend() == "cpu" else "none")
    leaves = leaves_of(drawn(T=20, B=2, H=2, bias=bias, K=72))
    whole = jax.jit(gradients)(leaves)
    for name, exact in jax.jit(gradients, static_argnums=1)(leaves, "chunkwise").items():
        assert error(to_torch(whole[name]), to_torch(exact)) <= TOLERANCE[torch.bfloat16], name
    axes = {name: None if name in PARAMETERS else 0 for name in leaves}
    both = {name: x if name in PARAMETERS else jnp.stack([x, x]) for name, x in leaves.items()}
    for name, found in jax.jit(jax.vmap(gradients, in_axes=(axes,)))(both).items():
        for each in found:
            assert error(to_torch(each), to_torch(whole[name])) <= TOLERANCE[torch.bfloat16], name


PLACES = {"batch": P("x"), "heads": P(None, None, "x")}


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit, AxisType.Manual], ids=str)
@pytest.mark.parametrize("divided", PLACES)
def test_divided_calls(divided: str, kind: AxisType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of A_log and dt_bias sum over all devices. On CPUs the chunkwise form stands for the launches."""
    monkeypatch.setattr(hosting, "PLATFORM", "cuda")
    leaves = leaves_of(drawn(T=20, B=2, H=2, Hq=2, K=72))
    expected = jax.jit(gradients)(leaves)
    of_heads = divided == "heads"
    places = dict.fromkeys(leaves, PLACES[divided])
    places |= {"C": P(None, "x") if of_heads else P("x")} | dict.fromkeys(PARAMETERS, P("x") if of_heads else P())
    manual = kind == AxisType.Manual
    axis_type = AxisType.Auto if manual else kind
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,), devices=jax.devices()[:2])
    fn: Any = jax.shard_map(gradients, mesh=mesh, in_specs=(places,), out_specs=places) if manual else gradients
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(x, NamedSharding(mesh, places[name])) for name, x in leaves.items()}
        compiled = jax.jit(fn).lower(placed).compile()
        found = compiled(placed)
    assert not any(name in compiled.as_text() for name in ("all-gather(", "all-to-all(", "collective-permute("))
    for name, exact in expected.items():
        assert error(to_torch(found[name]), to_torch(exact)) <= TOLERANCE[torch.bfloat16], name
