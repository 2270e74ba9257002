"""Traced calls over sequences whose states are rows of a pool: one operator of the graph, which overwrites the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import INTERPRETED, error
from pool_prefills import INDICES, SEVERAL_WRITES, Call, prefill, same
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import tfla
from tfla.backends import BACKENDS
from tfla.ops.operators import attend
from tfla.ops.state_pool import PoolRows

FORMS = ("exp", "sigmoid", "gdn", "kda", "gla", *SEVERAL_WRITES)
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


@pytest.fixture(autouse=True)
def fresh_graphs() -> Iterator[None]:
    """Compile every graph, also one that an earlier run has stored."""
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        yield


def overwriting(call: Call, **options: Any) -> Callable[[tfla.State, Tensor], Tensor]:
    """Return a function that computes a call twice from the same rows, the second time from their new states."""

    def twice(pool: tfla.State, indices: Tensor) -> Tensor:
        first, own = call(pool, state_indices=indices, return_state=True, **options)
        second, _ = call(own, state_indices=indices, return_state=True, **options)
        return first + 2 * second

    return twice


def check_compiled(form: str, dense: bool, compiler: str, dtype: torch.dtype, tolerance: float) -> None:
    """Check a compiled function of two calls, the second of which goes on from the rows that the first one wrote."""
    call, pool = prefill(form, DEVICE, dtype, dense)
    twice, indices = overwriting(call), torch.tensor(INDICES, device=DEVICE)
    own, compiled = pool.clone(), pool.clone()
    expected = twice(own, indices)
    found = torch.compile(twice, fullgraph=True, backend=compiler)(compiled, indices)
    assert error(found, expected) <= tolerance
    for a, b, old in zip(own, compiled, pool, strict=True):
        assert a is b is None or error(b, a) <= tolerance
        assert old is None or torch.equal(b[[1, 2, 4, 6]], old[[1, 2, 4, 6]])


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_calls_overwrite_the_rows(form: str, dense: bool, compiler: str) -> None:
    check_compiled(form, dense, compiler, torch.float32, 1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_calls_of_kernels_overwrite_the_rows(form: str, dense: bool) -> None:
    """The kernels of both calls are the same, so that outputs differ by the rounding of their sum to bfloat16 alone."""
    check_compiled(form, dense, "inductor", torch.bfloat16, 4e-3)


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_one_operator(form: str) -> None:
    """Without a gather or a scatter; one that returns no state does not overwrite the pool, of any dtype."""
    call, wide = prefill(form, DEVICE)
    pool = wide._replace(C=wide.C.bfloat16(), n=None if wide.n is None else wide.n.bfloat16())
    indices = torch.tensor(INDICES, dtype=torch.int32, device=DEVICE)
    for returned in (False, True):
        own, traced = pool.clone(), pool.clone()
        graphs: list[torch.fx.GraphModule] = []

        def kept(graph: torch.fx.GraphModule, _: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        def run(own: tfla.State, indices: Tensor, returned: bool = returned) -> Any:
            return call(own, state_indices=indices, return_state=returned)

        expected = run(own, indices)
        found = torch.compile(run, fullgraph=True, backend=kept)(traced, indices)
        found, expected = (found[0], expected[0]) if returned else (found, expected)
        torch.testing.assert_close(found, expected)
        assert all(a is b is None or torch.allclose(a, b) for a, b in zip(own, traced, strict=True))
        assert same(traced, pool) != returned
        (graph,) = graphs
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        name = ("attend" if form in ("exp", "sigmoid") else "delta") + "_rows" + "_" * returned
        assert [target for target in targets if "tfla" in target or "index" in target] == [f"tfla.{name}.default"]


@pytest.mark.parametrize("form", FORMS)
def test_a_trace_has_the_operator_alone(form: str) -> None:
    """Inductor traces the operator twice, and asks for two graphs of the same size."""
    call, pool = prefill(form, DEVICE)
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(lambda own, indices: call(own, state_indices=indices, return_state=True), backend=kept)(
        pool, torch.tensor(INDICES, device=DEVICE)
    )
    (node,) = [node for node in graphs[0].graph.nodes if str(node.target).startswith("tfla.")]
    args = [each.meta["example_value"] if isinstance(each, torch.fx.Node) else each for each in node.args]
    tensors = [j for j, each in enumerate(args) if isinstance(each, Tensor)]

    def run(*given: Tensor) -> Tensor:
        own = list(args)
        for j, t in zip(tensors, given, strict=True):
            own[j] = t
        h: Tensor = node.target(*own)
        return h

    traced = make_fx(run)(*(args[j] for j in tensors))
    found = [each.target for each in traced.graph.nodes if each.op == "call_function"]
    assert found == [node.target]


def test_lengths_are_dynamic() -> None:
    """One graph serves other numbers of steps, of sequences and of rows."""
    generator = torch.Generator().manual_seed(0)

    def call(B: int, T: int, rows: int, operator: Call) -> tuple[Tensor, Tensor]:
        sizes = ((8,), (8,), (6,), (), ())
        x = [torch.rand(B, T, 2, *d, generator=generator) for d in sizes]
        pool = tfla.State(*(torch.ones(rows, 2, *d) for d in ((8, 6), (8,), ())))
        return operator(*x, pool, torch.arange(B)), pool.C

    def run(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, pool: tfla.State, indices: Tensor) -> Tensor:
        h, _ = tfla.mlstm(q, k, v, i, f, initial_state=pool, state_indices=indices, return_state=True)
        return h

    graphs = CompileCounter()
    compiled = torch.compile(run, fullgraph=True, backend=graphs, dynamic=True)
    for sizes in ((5, 9, 11), (3, 7, 4), (4, 12, 10)):
        state = generator.get_state()
        h, C = call(*sizes, compiled)
        generator.set_state(state)
        expected_h, expected_C = call(*sizes, run)
        assert torch.equal(h, expected_h)
        assert torch.equal(C, expected_C)
    assert graphs.frame_count == 1


@pytest.mark.skipif(DEVICE != "cpu", reason="the host does not read indices on a GPU")
@pytest.mark.parametrize("form", ["exp", "gdn"])
def test_indices_are_checked_inside_the_graph(form: str) -> None:
    call, pool = prefill(form, DEVICE)
    compiled = torch.compile(overwriting(call), fullgraph=True, backend="aot_eager")
    before = pool.clone()
    for indices, words in (([0, 1, 2, 2], "got 2 more than once"), ([0, 1, 2, 7], "got 7, expected -1 or")):
        with pytest.raises(ValueError, match=f"^state_indices: {words}"):
            compiled(pool, torch.tensor(indices))
    assert same(pool, before)


@pytest.mark.parametrize("operator", [tfla.mlstm, tfla.delta_rule], ids=lambda operator: operator.__name__)
def test_a_compiled_call_has_gradients_where_it_overwrites_nothing(operator: Call) -> None:
    q, k, v, i, f = (torch.rand(4, 5, 2, *d, device=DEVICE) for d in ((16,), (16,), (8,), (), ()))
    pool = tfla.State(*(torch.rand(7, 2, *d, device=DEVICE) for d in ((16, 8), (16,), ())))
    pool = pool if operator is tfla.mlstm else tfla.State(pool.C)
    indices = torch.tensor(INDICES, device=DEVICE)

    def gradients(q: Tensor, C: Tensor, compiler: Any) -> tuple[Tensor, ...]:
        def run(q: Tensor, C: Tensor) -> Tensor:
            return operator(q, k, v, i, -f, initial_state=pool._replace(C=C), state_indices=indices)  # type: ignore[no-any-return]

        leaves = q.clone().requires_grad_(), C.clone().requires_grad_()
        return torch.autograd.grad(compiler(run)(*leaves).square().sum(), leaves)

    expected = gradients(q, pool.C, lambda run: run)
    found = gradients(q, pool.C, lambda run: torch.compile(run, fullgraph=True, backend="aot_eager"))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert expected[1].flatten(1).any(1).tolist() == [row in INDICES for row in range(7)]


@pytest.mark.parametrize("operator", [tfla.mlstm, tfla.delta_rule], ids=lambda operator: operator.__name__)
def test_a_graph_without_gradients_is_called_with_them(operator: Call) -> None:
    """They reach the pool as those of an eager call do, and a graph that overwrites the pool refuses them."""
    q, k, v, i, f = (torch.rand(4, 5, 2, *d, device=DEVICE) for d in ((16,), (16,), (8,), (), ()))
    n, m = torch.rand(7, 2, 16, device=DEVICE), torch.rand(7, 2, device=DEVICE)
    C, rows = torch.rand(7, 2, 16, 8, device=DEVICE), torch.tensor(INDICES, device=DEVICE)

    def read(q: Tensor, C: Tensor, rows: Tensor) -> Tensor:
        pool = tfla.State(C, n, m) if operator is tfla.mlstm else tfla.State(C)
        return operator(q, k, v, i, -f, initial_state=pool, state_indices=rows)  # type: ignore[no-any-return]

    def overwrite(q: Tensor, C: Tensor, rows: Tensor) -> Tensor:
        pool = tfla.State(C, n, m) if operator is tfla.mlstm else tfla.State(C)
        return operator(q, k, v, i, -f, initial_state=pool, state_indices=rows, return_state=True)[0]  # type: ignore[no-any-return]

    graph = make_fx(read)(q, C, rows)
    leaves = q.clone().requires_grad_(), C.clone().requires_grad_()
    found = torch.autograd.grad(graph(*leaves, rows).square().sum(), leaves)
    for a, b in zip(found, torch.autograd.grad(read(*leaves, rows).square().sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)
    tangents = [torch.func.jvp(lambda q, run=run: run(q, C, rows), (q,), (q,))[1] for run in (graph, read)]
    torch.testing.assert_close(*tangents)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match=r"^state_indices: got 5 more than once"):
            graph(*leaves, torch.full((4,), 5))
    before, graph = C.clone(), make_fx(overwrite)(q, C.clone(), rows)
    for given in ((leaves[0], C), (q, leaves[1])):
        with pytest.raises(ValueError, match=r"^state_indices: got them while gradients are recorded"):
            graph(*given, rows)
    with pytest.raises(ValueError, match=r"^state_indices: got them while a transform or"):
        torch.func.jvp(lambda q: graph(q, C, rows), (q,), (q,))
    assert torch.equal(C, before)
    with torch.no_grad():
        graph(leaves[0], C, rows)
    assert (before != C).flatten(1).any(1).tolist() == [row in INDICES for row in range(7)]


@pytest.mark.parametrize("form", ["exp", "gdn", "kda"])
def test_opcheck(form: str) -> None:
    """The operators as PyTorch tests them: their schemas, their shapes, and that they are functionalized."""
    _, pool = prefill(form, DEVICE)
    K, V = pool.C.shape[2:]
    q, k, v = (torch.rand(2, 2, 9, d, device=DEVICE).transpose(1, 2) for d in (K, K, V))  # h is dense all the same
    f = -torch.rand(2, 9, 2, *[K] * (form == "kda"), device=DEVICE)
    i, rows = torch.rand(2, 9, 2, device=DEVICE), torch.tensor([4, -1], device=DEVICE)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for own in ("_rows", "_rows_"):
        if form == "exp":
            args: tuple[Any, ...] = (q, k, v, i, f, *pool, None, rows, 0.5, True, True, 64, "reference", "recurrent")
        else:
            args = (q, k, v, i, f, None, None, None, pool.C, None, rows, 0.5, True, False, 64, "reference", "recurrent")
        name = ("attend" if form == "exp" else "delta") + own
        torch.library.opcheck(getattr(torch.ops.tfla, name).default, args, test_utils=tests)


def test_shapes_and_flops() -> None:
    call, pool = prefill("exp", DEVICE)
    indices = torch.tensor(INDICES, device=DEVICE)
    expected, _ = call(pool.clone(), state_indices=indices, return_state=True)
    with FlopCounterMode(display=False) as counter:
        h, _ = call(pool.clone(), state_indices=indices, return_state=True)
    assert torch.equal(h, expected)
    with FlopCounterMode(display=False) as separate:
        call(pool.gather([5, 1, 0, 3]), return_state=True)
    assert counter.get_total_flops() == separate.get_total_flops() > 0
    x = (torch.rand(2, 9, 2, *d, device=DEVICE) for d in ((8,), (8,), (6,), (), ()))
    parts = (torch.rand(7, 2, *d, device=DEVICE) for d in ((8, 6), (8,), ()))
    with FakeTensorMode() as mode:
        own = tfla.State(*(mode.from_tensor(t) for t in parts))
        given = (mode.from_tensor(t) for t in x)
        rows = torch.tensor([0, 3], device=DEVICE)
        h, new = tfla.mlstm(*given, initial_state=own, state_indices=rows, return_state=True)
    assert h.shape == (2, 9, 2, 6)
    assert new is own


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("form", ["exp", "gdn", "kda"])
def test_kernels_take_the_rows_in_a_graph(form: str, dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of the eager call, and no launch that gathers or scatters rows."""
    call, pool = prefill(form, DEVICE, torch.float32 if INTERPRETED else torch.bfloat16, dense)
    twice, indices = overwriting(call, backend="triton", chunk_size=64), torch.tensor(INDICES, device=DEVICE)
    own, compiled = pool.clone(), pool.clone()
    expected = twice(own, indices)
    for method in ("read", "write"):
        monkeypatch.setattr(PoolRows, method, lambda *_: pytest.fail("rows are gathered or scattered"))
    found = torch.compile(twice, fullgraph=True, backend="aot_eager")(compiled, indices)
    assert torch.equal(found, expected)
    assert same(own, compiled)


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")
def test_what_no_kernel_takes_is_gathered_inside_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on devices without kernels, the results are those of the backend's forward."""
    call, pool = prefill("exp", DEVICE, torch.float32 if INTERPRETED else torch.bfloat16)
    twice, indices = overwriting(call, backend="triton", chunk_size=64), torch.tensor(INDICES, device=DEVICE)
    own, compiled = pool.clone(), pool.clone()
    expected = twice(own, indices)
    monkeypatch.setattr(type(BACKENDS["triton"]), "forward_by_rows", lambda *_: None)
    found = torch.compile(twice, fullgraph=True, backend="aot_eager")(compiled, indices)
    assert torch.equal(found, expected)
    assert same(own, compiled)
    assert attend.backends is BACKENDS
