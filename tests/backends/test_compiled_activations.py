"""Norms and activations inside the Hopper kernels of compiled calls of the delta rule, against those of eager calls.

They run on a Hopper GPU. With TRITON_INTERPRET=1 they run on the CPU, Gluon kernels in the simulator.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import error
from delta_cases import delta_problem
from test_channel_activations import drawn
from test_hopper_delta import BACKEND, DEVICE, DTYPE, pytestmark, simulation
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import tfla
from tfla._util import caching
from tfla.backends.delta import DeltaInputs
from tfla.ops.delta_operator import delta

__all__ = ["pytestmark", "simulation"]  # the marks and the fixture of the other tests of these kernels

Leaves = dict[str, Tensor]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one gate a step": ("gdn", {"K": 128, "V": 128, "T": 130, "B": 1, "H": 2, "Hq": 1}),
    "packed": ("gdn", {"K": 64, "V": 64, "lengths": (0, 70, 3), "B": 1, "H": 2, "Hq": 1}),
    "wide heads": ("gdn", {"K": 64, "V": 136, "T": 70, "B": 1, "H": 1, "Hq": 1}),
    "gates by channel": ("kda", {"T": 130, "B": 2}),
    "packed, gates by channel": ("kda", {"lengths": (70, 3), "H": 2}),
    "a bias of heads": ("kda", {"T": 20, "bias": "heads", "H": 2}),
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(BACKEND, "unsupported", lambda x: None)
    caching.clear_caches()
    yield
    caching.clear_caches()


def call(model: str, sizes: dict[str, Any]) -> tuple[Callable[..., Any], Leaves, Tensor, Tensor]:
    """Return a call, the tensors that it takes by name, and the cotangents of h and of the final state."""
    p = drawn(**sizes) if model == "kda" else delta_problem(model, **sizes, dtype=DTYPE)
    leaves = {name: t.detach().to(DEVICE) for name, t in p.leaves.items()}
    options: dict[str, Any] = {"normalize_qk": True, "scale": p.scale, "backend": "hopper", "return_state": True}
    if model == "kda":
        assert p.x.A_log is not None
        assert p.x.dt_bias is not None
        leaves |= {"A_log": p.x.A_log.to(DEVICE), "dt_bias": p.x.dt_bias.to(DEVICE)}
        options["gate_activation"] = "softplus"
    if p.x.cu_seqlens is not None:
        options["cu_seqlens"] = p.x.cu_seqlens.to(DEVICE)

    def run(leaves: Leaves, **more: Any) -> Any:
        given = dict(leaves)
        return tfla.delta_rule(initial_state=tfla.State(given.pop("C")), **given, **options, **more)

    return run, leaves, p.dh.to(DEVICE), p.dC.to(DEVICE)


def compiled(run: Callable[..., Any], graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    """Return a compiled function whose graphs are added to a list."""

    def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    return torch.compile(run, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))


def read_as_given(graph: torch.fx.GraphModule, operator: Any, inputs: int) -> set[int]:
    """Return which of the first inputs of an operator in a graph are inputs of the graph."""
    (node,) = graph.graph.find_nodes(op="call_function", target=operator)
    return {j for j in range(inputs) if getattr(node.args[j], "op", None) == "placeholder"}


@pytest.mark.parametrize(("model", "sizes"), CASES.values(), ids=CASES.keys())
def test_results_and_gradients(model: str, sizes: dict[str, Any]) -> None:
    """They have the bits of the eager call where the operator of the graph reads q, k and gates as they are given."""
    run, leaves, dh, dC = call(model, sizes)
    graphs: list[torch.fx.GraphModule] = []
    found = []
    for fn in (run, compiled(run, graphs)):
        own = {name: t.clone().requires_grad_() for name, t in leaves.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Dynamo")  # such as that it traces the inside of a cached function
            h, state = fn(own)
        found.append([h, state.C, *torch.autograd.grad((h, state.C), list(own.values()), (dh, dC))])
    given = read_as_given(graphs[0], torch.ops.tfla.delta.default, 5)
    assert given >= ({0, 1, 4} if model == "kda" else {0, 1})
    for eager, mine in zip(*found, strict=True):
        assert torch.equal(eager, mine)


@pytest.mark.parametrize("model", ["gdn", "kda"])
def test_rows_of_a_pool(model: str) -> None:
    """A compiled prefill overwrites the rows of a pool, and its operator reads q, k and gates as they are given."""
    run, leaves, *_ = call(model, {"lengths": (70, 3), "K": 128, "V": 64, "H": 2, "Hq": 1, "B": 1})
    rows = torch.tensor([2, 0], device=DEVICE)
    pool = torch.zeros(4, *leaves["C"].shape[1:], device=DEVICE)
    pool[rows] = leaves["C"]
    graphs: list[torch.fx.GraphModule] = []
    found = []
    with torch.no_grad():
        for fn in (run, compiled(run, graphs)):
            own = pool.clone()
            h, _ = fn(leaves | {"C": own}, state_indices=rows)
            found.append((h, own))
    functional = torch.ops.higher_order.auto_functionalized_v2
    (node,) = graphs[0].graph.find_nodes(op="call_function", target=functional)
    named = {name for name in ("q", "k", "log_f") if node.kwargs[name].op == "placeholder"}
    assert named >= ({"q", "k", "log_f"} if model == "kda" else {"q", "k"})
    for eager, mine in zip(*found, strict=True):
        assert torch.equal(eager, mine)


@pytest.mark.parametrize("model", ["gdn", "kda"])
def test_a_graph_that_was_traced_without_gradients(model: str) -> None:
    """An exported program has gradients, with what its operator has to store for them."""
    run, leaves, dh, dC = call(model, {"T": 70, "K": 128, "V": 64, "H": 2, "Hq": 1, "B": 1})

    class Module(torch.nn.Module):
        def forward(self, leaves: Leaves) -> tuple[Tensor, Tensor]:
            h, state = run(leaves)
            return h, state.C

    with torch.no_grad():
        program = torch.export.export(Module(), (leaves,)).module()
    found = []
    for fn in (Module(), program):
        own = {name: t.clone().requires_grad_() for name, t in leaves.items()}
        found.append(torch.autograd.grad(fn(own), list(own.values()), (dh, dC)))
    for eager, mine in zip(*found, strict=True):
        assert torch.equal(eager, mine)


@pytest.mark.parametrize("cut", [{}, {"kernel": "segmented", "chunk_size": 64}], ids=["whole sequences", "segments"])
def test_maps_over_cotangents_of_an_exported_program(cut: dict[str, Any]) -> None:
    """Norms of all rows of a batch are not divided among the calls that torch.vmap merges."""
    run, leaves, dh, _ = call("gdn", {"T": 70, "K": 64, "V": 64, "H": 1, "Hq": 1, "B": 1})
    weights = torch.stack([dh, dh.flip(1), 2 * dh])

    class Module(torch.nn.Module):
        def forward(self, leaves: Leaves) -> Tensor:
            h: Tensor = run(leaves, **cut)[0]
            return h

    with torch.no_grad():
        program = torch.export.export(Module(), (leaves,)).module()

    def total(leaves: Leaves, weights: Tensor) -> Tensor:
        return (program(leaves) * weights).flatten(-4).sum(-1)  # type: ignore[no-any-return]

    found = torch.func.jacrev(total)(leaves, weights)
    under_vmap = torch.vmap(torch.func.grad(total), in_dims=(None, 0))(leaves, weights)
    for j, each in enumerate(weights):
        for name, exact in torch.func.grad(total)(leaves, each).items():
            assert error(found[name][j], exact) <= 1e-6
            assert error(under_vmap[name][j], exact) <= 1e-6


@pytest.mark.parametrize("model", ["gdn", "kda"])
def test_shapes_of_results(model: str) -> None:
    """Tracing predicts the shapes of what a forward stores, norms among them."""
    p = drawn(T=70) if model == "kda" else delta_problem(model, T=70, K=64, V=64, B=1, H=2, Hq=1, dtype=DTYPE)
    x = DeltaInputs(*(None if t is None else t.to(DEVICE) for t in p.x))
    spec = p.spec("fused")._replace(save=True, normalize_qk=True)
    spec = spec._replace(gate_activation="softplus") if model == "kda" else spec
    args = delta.forward_schema.pack(x, (), "hopper", spec)
    torch.library.opcheck(torch.ops.tfla.delta.default, args, test_utils="test_faketensor")
