"""The operators under torch.compile, torch.export, activation checkpointing and opcheck."""

from __future__ import annotations

import functools
import shutil
from typing import Any

import pytest
import torch
from cases import Implementation, Layout, Problem, as_it_is, call, leaves_on, problem
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tfla
from tfla.backends import BACKENDS, Inputs

CASES: dict[str, dict[str, Any]] = {
    "exp": {},
    "sigmoid": {"form": "sigmoid", "carried": False},
    "packed": {"lengths": (20, 0, 17)},
    "grouped heads": {"form": "plain", "Hq": 1},
}


def outputs_and_gradients(p: Problem, leaves: dict[str, Tensor], h: Tensor, state: tfla.State) -> list[Tensor]:
    outputs = [h, state.C] if state.n is None else [h, state.C, state.n]
    grads = torch.autograd.grad(outputs, [*leaves.values()], [torch.ones_like(x) for x in outputs])
    return [x.detach() for x in (*outputs, *grads)]


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def has_compiler(implementation: Implementation) -> bool:
    return implementation.device == "cuda" or any(shutil.which(name) for name in ("c++", "g++", "clang++"))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_compile(implementation: Implementation, case: dict[str, Any]) -> None:
    """Without a graph break, forward and backward."""
    torch.compiler.reset()
    p = problem(dtype=implementation.widest, **case)
    leaves = leaves_on(implementation, p)
    compiled = torch.compile(lambda x: call(p, x, **implementation.options), fullgraph=True, backend="aot_eager")
    found = outputs_and_gradients(p, leaves, *compiled(leaves))
    expected = outputs_and_gradients(p, leaves, *call(p, leaves, **implementation.options))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_compile_of_transposed_inputs(implementation: Implementation) -> None:
    """The strides that the tracer assumes are those of the results."""
    torch.compiler.reset()
    p = problem(dtype=implementation.widest)
    leaves = leaves_on(implementation, p, transposed)

    def flat(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        h, state = call(p, x, **implementation.options)
        return h.transpose(1, 2).reshape(2, 2, -1), state.C.transpose(2, 3).reshape(2, 2, -1)

    found = torch.compile(flat, fullgraph=True, backend="aot_eager")(leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, flat(leaves), strict=True))


def test_one_graph_for_all_lengths(implementation: Implementation) -> None:
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda *x: tfla.mlstm(*x, **implementation.options), fullgraph=True, dynamic=True, backend=counter
    )
    for T in (37, 5, 70):
        leaves = leaves_on(implementation, problem(dtype=implementation.widest, T=T, carried=False))
        assert torch.equal(compiled(*leaves.values()), tfla.mlstm(*leaves.values(), **implementation.options))
    assert counter.frame_count == 1


def test_compile_step(device: str) -> None:
    torch.compiler.reset()
    p = problem(dtype=torch.float32)
    step = [getattr(p, name)[:, 0].to(device) for name in "qkvif"]
    compiled = torch.compile(tfla.mlstm_step, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*step, p.state.to(device)), tfla.mlstm_step(*step, p.state.to(device))
    assert all(torch.equal(a, b) for a, b in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True))


@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_inductor(implementation: Implementation, form: str) -> None:
    """The default compiler, which fuses the gates' arithmetic."""
    if implementation.small_only or not has_compiler(implementation):
        pytest.skip("needs a compiler, and an implementation that is used in practice")
    torch.compiler.reset()
    p = problem(form, dtype=torch.float32)
    leaves = leaves_on(implementation, p)
    compiled = torch.compile(lambda x: call(p, x, **implementation.options), fullgraph=True)
    found = outputs_and_gradients(p, leaves, *compiled(leaves))
    expected = outputs_and_gradients(p, leaves, *call(p, leaves, **implementation.options))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(found, expected, strict=True))


class Layer(torch.nn.Module):
    """A model around the operator, as export needs one."""

    def __init__(self, implementation: Implementation) -> None:
        super().__init__()
        self.implementation = implementation

    def forward(self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        h, state = tfla.mlstm(q, k, v, i, f, return_state=True, **self.implementation.options)
        return h * 2, state.C


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed length", "any length"])
def test_export(implementation: Implementation, dynamic: bool) -> None:
    def inputs(T: int) -> tuple[Tensor, ...]:
        p = problem(dtype=implementation.widest, T=T, carried=False)
        return tuple(x.to(implementation.device) for x in p.leaves.values())

    layer = Layer(implementation)
    T = torch.export.Dim("T", min=2, max=4096)
    exported = torch.export.export(layer, inputs(37), dynamic_shapes=({1: T},) * 5 if dynamic else None)
    assert any("tfla.attend" in str(node.target) for node in exported.graph.nodes)
    given = inputs(70 if dynamic else 37)
    assert all(torch.equal(a, b) for a, b in zip(exported.module()(*given), layer(*given), strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(implementation: Implementation, use_reentrant: bool) -> None:
    p = problem(dtype=implementation.widest, carried=False)
    leaves = [*leaves_on(implementation, p).values()]
    operator = functools.partial(tfla.mlstm, **implementation.options)
    results = []
    for h in (operator(*leaves), checkpoint(operator, *leaves, use_reentrant=use_reentrant)):
        for x in leaves:
            x.grad = None
        h.backward(p.dh.to(h))
        results.append([h, *(x.grad for x in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def operator_arguments(
    implementation: Implementation, case: dict[str, Any], layout: Layout
) -> tuple[tuple[Tensor | None, ...], tuple]:
    """Tensors and the rest, as `torch.ops.tfla.attend` takes them up to its last two.

    Packed lengths use every stored state: others stay unwritten, which `opcheck` would call a difference.
    """
    p = problem(
        **{"dtype": implementation.widest, "T": 13, **case} | ({"lengths": (6, 7)} if "lengths" in case else {})
    )
    leaves = leaves_on(implementation, p, layout)
    cu_seqlens = None if p.cu_seqlens is None else p.cu_seqlens.to(implementation.device)
    tensors = (*(leaves.get(name) for name in ("q", "k", "v", "i", "f", "C0", "n0", "m0")), cu_seqlens)
    return tensors, (0.5, p.normalize, True, 5, implementation.backend, implementation.kernel)


@pytest.mark.parametrize(
    ("case", "layout", "save"),
    [
        *((case, as_it_is, True) for case in CASES),
        ("exp", transposed, True),
        ("packed", transposed, True),
        ("exp", as_it_is, False),
        ("grouped heads", as_it_is, False),
    ],
)
def test_opcheck_forward(implementation: Implementation, case: str, layout: Layout, save: bool) -> None:
    tensors, rest = operator_arguments(implementation, CASES[case], layout)
    if not save:
        tensors = tuple(None if x is None else x.detach() for x in tensors)
    torch.library.opcheck(torch.ops.tfla.attend.default, (*tensors, *rest, save, True))


@pytest.mark.parametrize(
    ("case", "layout"), [*((case, as_it_is) for case in CASES), ("exp", transposed), ("packed", transposed)]
)
def test_opcheck_backward(implementation: Implementation, case: str, layout: Layout) -> None:
    tensors, rest = operator_arguments(implementation, CASES[case], layout)
    tensors = tuple(None if x is None else x.detach() for x in tensors)
    h, C, n, _, d, chunk_C, chunk_n = torch.ops.tfla.attend(*tensors, *rest, True, True)
    dn = torch.ones_like(n) if rest[1] else None
    args = (*tensors, h, d, chunk_C, chunk_n, torch.ones_like(h), torch.ones_like(C), dn, *rest)
    torch.library.opcheck(torch.ops.tfla.attend_backward.default, args)


@pytest.mark.parametrize("lengths", [None, (20, 0, 17)], ids=["batch", "packed"])
def test_states_of_chunks_are_as_many_as_said(implementation: Implementation, lengths: tuple[int, ...] | None) -> None:
    """The tracer knows the shape without running the backend."""
    p = problem(dtype=implementation.widest, lengths=lengths)
    leaves = leaves_on(implementation, p)
    cu_seqlens = None if p.cu_seqlens is None else p.cu_seqlens.to(implementation.device)
    tensors = tuple(leaves[name] for name in ("q", "k", "v", "i", "f", "C0", "n0", "m0"))
    x = Inputs(*tensors, cu_seqlens)
    for chunk_size in (1, 16, 1000):
        rest = (0.5, True, True, chunk_size, implementation.backend, implementation.kernel, True, False)
        chunk_C = torch.ops.tfla.attend(*tensors, cu_seqlens, *rest)[5]
        assert (
            chunk_C.numel()
            == BACKENDS[implementation.backend].stored_states(x, chunk_size, implementation.kernel) * 2 * 5 * 7
        )


def test_compile_without_naming_a_backend(device: str) -> None:
    torch.compiler.reset()
    x = [torch.randn(1, 20, 2, *d, device=device) for d in ((4,), (4,), (6,), (), ())]
    compiled = torch.compile(tfla.mlstm, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*x), tfla.mlstm(*x))


def test_modes_see_the_operator_and_get_the_same(implementation: Implementation) -> None:
    """Eager calls go past the dispatcher; what watches it finds the registered operator."""
    p = problem(dtype=implementation.widest, carried=False)
    leaves = leaves_on(implementation, p)
    recorded = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            recorded.add(str(func))
            return func(*args, **(kwargs or {}))

    def run() -> list[Tensor]:
        return outputs_and_gradients(p, leaves, *call(p, leaves, **implementation.options))

    expected = run()
    with Watch():
        found = run()
    assert {"tfla.attend.default", "tfla.attend_backward.default"} <= recorded
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_fake_tensors_have_the_shapes(implementation: Implementation) -> None:
    p = problem(dtype=implementation.widest)
    leaves = leaves_on(implementation, p)
    expected = outputs_and_gradients(p, leaves, *call(p, leaves, **implementation.options))
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in leaves.items()}
        found = outputs_and_gradients(p, fake, *call(p, fake, **implementation.options))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
