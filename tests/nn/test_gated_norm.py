"""The kernels of the norm with an output gate equal its formula, and layers run them where they take a call."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from layer_kernels import DEVICE, RUNS, TOLERANCE, bfloat16, check  # noqa: F401
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tfla.backends.gpu.runtime import INTERPRETED
from tfla.nn.decode import capture_graph
from tfla.nn.layers import HeadNorm
from tfla.nn.mixers import fused_norm
from tfla.nn.mixers.norms import GatedNorm, gated_head_norm

EPS = 1e-5
KINDS = [
    fused_norm.Options(EPS, "silu"),
    fused_norm.Options(EPS, "sigmoid"),
    fused_norm.Options(EPS, "silu", gate_first=True),
    fused_norm.Options(EPS, "sigmoid", centered=True),
]
# the sizes of h, and what else there is
CASES: dict[str, tuple[tuple[int, ...], set[str]]] = {
    "one row": ((1, 33), set()),  # of fewer numbers, gradients can cancel
    "several blocks of rows": ((2, 300, 128), set()),
    "odd sizes": ((3, 5, 7, 100), set()),
    "a row for each program": ((3, 4097), set()),
    "no gate": ((5, 64), {"no gate"}),
    "strides": ((4, 6, 32), {"strided"}),
    "no rows": ((0, 8), set()),
    "16-bit weight": ((9, 40), {"short weight"}),
    "a weight for each head": ((2, 300, 3, 20), {"heads"}),
    "a skip connection": ((2, 150, 96), {"skip"}),
    "a skip connection, strides": ((4, 6, 32), {"strided", "skip"}),
    "a skip connection without a gate": ((3, 4098), {"no gate", "skip"}),
}


def problem(case: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return h, weight and, if there are such, the gate and the skip connection and its factors; and dy."""
    shape, having = CASES[case]
    h, gate, v, dy = (torch.randn(*shape, device=DEVICE).to(dtype) for _ in range(4))
    factors = torch.randn(3 if shape[-1] % 3 == 0 else 2, device=DEVICE)
    weight = torch.randn(shape[-2:] if "heads" in having else shape[-1], device=DEVICE)
    if "short weight" in having:
        weight = weight.to(dtype)
    if "strided" in having:
        h, gate, v, dy = (t.mT.contiguous().mT for t in (h, gate, v, dy))
    leaves = [h, weight] + [gate] * ("no gate" not in having) + [v, factors] * ("skip" in having)
    return [t.requires_grad_() for t in leaves], dy


def named(leaves: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Return h, weight, the gate, and the skip connection and its factors, from leaves that may lack the last two."""
    h, weight, *more = leaves
    return h, weight, more[: len(more) % 2], more[len(more) % 2 :]


def by_formula(leaves: list[Tensor], kind: fused_norm.Options) -> Tensor:
    h, weight, gate, skip = named(leaves)
    if skip:
        h = h + skip[0] * skip[1].repeat_interleave(h.shape[-1] // len(skip[1]))
    s = torch.ones_like(h)
    if gate:
        s = gate[0].sigmoid() * (gate[0] if kind.activation == "silu" else 1.0)
    z = h * s if kind.gate_first else h
    z = z - z.mean(-1, keepdim=True) if kind.centered else z
    n = z / (z.square().mean(-1, keepdim=True) + EPS).sqrt()
    return n * weight * (1.0 if kind.gate_first else s)


def by_kernels(leaves: list[Tensor], kind: fused_norm.Options) -> Tensor:
    h, weight, gate, skip = named(leaves)
    return fused_norm.gated_norm(h, weight, gate[0] if gate else None, kind, fused_norm.Skip(*skip) if skip else None)


def check_call(leaves: list[Tensor], dy: Tensor, kind: fused_norm.Options) -> None:
    y = by_kernels(leaves, kind)
    gradients = torch.autograd.grad(y, leaves, dy)
    assert [t.dtype for t in (y, *gradients)] == [dy.dtype, *(t.dtype for t in leaves)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    truth = by_formula(wide, kind)
    for found, expected in zip((y, *gradients), (truth, *torch.autograd.grad(truth, wide, dy.double())), strict=True):
        check(found, expected, TOLERANCE[found.dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in CASES),
        ("odd sizes", torch.bfloat16),
        ("16-bit weight", torch.bfloat16),
        ("strides", torch.float16),
        ("a skip connection", torch.bfloat16),
    ],
)
class TestKernels:
    """The kernels themselves."""

    pytestmark = RUNS

    def test_formula(self, case: str, dtype: torch.dtype, kind: fused_norm.Options) -> None:
        check_call(*problem(case, dtype), kind)

    def test_bits_repeat_and_do_not_depend_on_other_rows(
        self, case: str, dtype: torch.dtype, kind: fused_norm.Options
    ) -> None:
        leaves, dy = problem(case, dtype)
        found = []
        for _ in range(2):
            y = by_kernels(leaves, kind)
            found.append((y, *torch.autograd.grad(y, leaves, dy)))
        for once, again in zip(*found, strict=True):
            assert torch.equal(once, again)
        alone = [t[-1:].detach() if t.shape == leaves[0].shape else t for t in leaves]
        assert torch.equal(by_kernels(alone, kind), found[0][0][-1:])


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
def test_values_without_bounds() -> None:
    """Gates of any size, rows of zeros without an epsilon, and NaN in one row alone."""
    h, gate, weight = torch.randn(4, 8), torch.tensor([-1e4, -100.0, 0.0, 1e4])[:, None].expand(4, 8), torch.ones(8)
    for kind in KINDS:
        check_call([t.clone().requires_grad_() for t in (h, weight, gate)], torch.randn(4, 8), kind)
        leaves = [h.clone().requires_grad_(), weight.clone().requires_grad_()]
        leaves[0].data[2] = float("nan")
        y = fused_norm.gated_norm(*leaves, None, kind._replace(eps=0.0))
        (dh,) = torch.autograd.grad(y.sum(), leaves[:1])
        for found in (y, dh):
            assert found[[0, 1, 3]].isfinite().all()
            assert found[2].isnan().all()
    few = torch.ones(3, 8, requires_grad=True)  # a block of rows has others, which do not exist
    few_weight = torch.ones(8, requires_grad=True)
    y = fused_norm.gated_norm(few, few_weight, None, fused_norm.Options(0.0, "silu"))
    assert torch.equal(torch.autograd.grad(y.sum(), few_weight)[0], torch.full((8,), 3.0))


@pytest.fixture(params=[kind for kind in KINDS if not kind.centered])
def layer(request: pytest.FixtureRequest) -> GatedNorm:
    kind = request.param
    return GatedNorm(6, kind.eps, kind.activation, kind.gate_first).to(DEVICE)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched."""
    found: list[str] = []
    launch: Any = fused_norm._launch
    monkeypatch.setattr(fused_norm, "_launch", lambda name, *x, **y: [found.append(name), launch(name, *x, **y)])
    return found


def make_inputs() -> list[Tensor]:
    """Return h and the gate."""
    return [torch.randn(2, 9, 6, device=DEVICE, requires_grad=True) for _ in range(2)]


class TestLayer:
    """The layer, which runs the kernels where they take a call."""

    pytestmark = RUNS

    def test_gradients_are_those_of_pytorch(self, layer: GatedNorm, launches: list[str]) -> None:
        inputs = make_inputs()
        leaves, dy = [*inputs, layer.weight], torch.randn_like(inputs[0])
        y = layer(*inputs)
        gradients = torch.autograd.grad(y, leaves, dy)
        assert launches == ["gated_norm", "gated_norm_backward"]
        again = checkpoint(layer, *inputs, use_reentrant=False)
        for found, other in zip(torch.autograd.grad(again, leaves, dy), gradients, strict=True):
            assert torch.equal(found, other)
        wide = [t.detach().double().requires_grad_() for t in inputs]
        truth = layer.double()(*wide)
        expected = torch.autograd.grad(truth, [*wide, layer.weight], dy.double())
        for found, other in zip((y, *gradients), (truth, *expected), strict=True):
            check(found, other, 1e-6)

    def test_a_skip_connection_is_added_before(self, layer: GatedNorm, launches: list[str]) -> None:
        h, gate = make_inputs()
        v, factors = torch.randn_like(h).requires_grad_(), torch.randn(3, device=DEVICE, requires_grad=True)
        leaves, dy = [h, gate, v, factors, layer.weight], torch.randn_like(h)
        y = layer(h, gate, fused_norm.Skip(v, factors))
        found = y, *torch.autograd.grad(y, leaves, dy)
        assert launches == ["gated_norm", "gated_norm_backward"]
        second = torch.autograd.grad(layer(h, gate, fused_norm.Skip(v, factors)).sum(), v, create_graph=True)[0]
        twice = torch.autograd.grad(second.square().sum(), leaves)
        wide = [t.detach().double().requires_grad_() for t in leaves[:4]]
        skip = fused_norm.Skip(wide[2], wide[3])
        truth = layer.double()(*wide[:2], skip)
        expected = truth, *torch.autograd.grad(truth, [*wide, layer.weight], dy.double())
        for once, other in zip(found, expected, strict=True):
            check(once, other, 1e-6)
        second = torch.autograd.grad(layer(*wide[:2], skip).sum(), wide[2], create_graph=True)[0]
        for once, other in zip(twice, torch.autograd.grad(second.square().sum(), [*wide, layer.weight]), strict=True):
            check(once, other, 1e-5)

    def test_second_derivatives(self, layer: GatedNorm, launches: list[str]) -> None:
        inputs, found = make_inputs(), []
        for dtype in (torch.float32, torch.float64):
            leaves = [*(t.detach().to(dtype).requires_grad_() for t in inputs), *layer.to(dtype).parameters()]
            first = torch.autograd.grad(layer(*leaves[:2]).square().sum(), leaves, create_graph=True)
            found.append(torch.autograd.grad(torch.stack([t.square().sum() for t in first]).sum(), leaves))
        # The second call of grad differentiates the gradients, which are PyTorch's, and y, whose cotangent has a graph.
        assert launches == ["gated_norm", "gated_norm_backward"]
        for once, other in zip(*found, strict=True):
            check(once, other, 1e-5)

    def test_gradients_with_a_graph_of_inputs_that_depend_on_each_other(self, layer: GatedNorm) -> None:
        """What reaches one input through another is counted once, as without a graph."""
        x, factors = torch.randn(2, 9, 6, device=DEVICE, requires_grad=True), torch.ones(3, device=DEVICE)
        for h, gate, v in ((x, x, x), (2 * x, x.sin(), x), (x, None, 2 * x)):
            y, dy = layer(h, gate, fused_norm.Skip(v, factors)), torch.randn_like(x)
            (expected,) = torch.autograd.grad(y, x, dy, retain_graph=True)
            check(torch.autograd.grad(y, x, dy, create_graph=True)[0], expected, 1e-5)

    def test_what_the_kernels_do_not_take_runs_in_pytorch(self, layer: GatedNorm, launches: list[str]) -> None:
        inputs = make_inputs()
        expected = layer(*inputs)
        assert launches == ["gated_norm"]
        check(torch.func.vmap(layer)(*inputs), expected, 1e-6)
        _, tangent = torch.func.jvp(layer, tuple(inputs), tuple(map(torch.ones_like, inputs)))
        assert tangent.abs().sum() > 0
        check(layer(inputs[0], inputs[1][:1]), layer(inputs[0], inputs[1][:1].expand(2, -1, -1)), 1e-6)
        assert launches.pop() == "gated_norm"  # of the gate for each number
        check(layer.double()(*(t.double() for t in inputs)), expected, 1e-6)
        layer.float().batch_invariant = True
        check(layer(*inputs), expected, 1e-6)
        assert launches == ["gated_norm"]

    @pytest.mark.parametrize("kind", ["layer", "rms"])
    def test_heads(self, kind: Literal["layer", "rms"], launches: list[str]) -> None:
        """The norm of each head of the mLSTM, which a hook keeps from being skipped."""
        norm = HeadNorm(3, 6, EPS, kind).to(DEVICE)
        torch.nn.init.normal_(norm.weight)
        h, gate, dy = torch.randn(2, 9, 3, 6, device=DEVICE), *torch.randn(2, 2, 9, 18, device=DEVICE)
        leaves = [h.requires_grad_(), gate.requires_grad_(), norm.weight]

        def run() -> tuple[Tensor, ...]:
            y = gated_head_norm(norm, h, gate)
            return y, *torch.autograd.grad(y, leaves, dy)

        found = run()
        assert launches == ["gated_norm", "gated_norm_backward"]
        norm.register_forward_hook(lambda *_: launches.append("hook"))
        expected = run()
        assert launches[2:] == ["hook"] * 2  # the backward computes the forward again
        for once, other in zip(found, expected, strict=True):
            check(once, other.double(), 2e-6)

    def test_what_is_added_to_the_norm_of_heads_is_not_left_out(self, launches: list[str]) -> None:
        """Hooks of the backward, another forward and a module around the norm."""
        h, gate = torch.randn(2, 9, 3, 6, device=DEVICE, requires_grad=True), torch.randn(2, 9, 18, device=DEVICE)
        norm = HeadNorm(3, 6, EPS, "rms").to(DEVICE)
        handle = norm.register_full_backward_hook(lambda *_: launches.append("hook"))
        gated_head_norm(norm, h, gate).sum().backward()
        assert launches == ["hook"]
        handle.remove()
        expected = gated_head_norm(norm, h, gate)
        assert launches[1:] == ["gated_norm"]
        check(gated_head_norm(torch.nn.Sequential(norm), h, gate), expected.double(), 1e-6)  # type: ignore[arg-type]
        norm.forward = lambda h: torch.zeros_like(h)  # type: ignore[method-assign]
        assert not gated_head_norm(norm, h, gate).any()
        assert launches[1:] == ["gated_norm"]

    def test_weights_of_other_sizes_are_refused(self, layer: GatedNorm, launches: list[str]) -> None:
        """The kernel would read beyond the weights, or of another row."""
        for dim in (3, 12):
            with pytest.raises(RuntimeError, match="must match"):
                layer(*torch.randn(2, 2, 9, dim, device=DEVICE))
        assert not launches


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("shape", "parts"), [((2, 1111, 16, 256), 0), ((777, 8192), 0), ((3, 555, 4096), 64)])
def test_many_rows_and_cuda_graphs(
    shape: tuple[int, ...], parts: int, dtype: torch.dtype, kind: fused_norm.Options
) -> None:
    """A graph replays the same bits, and errors are those of one rounding; some rows have a skip connection."""
    h, gate, v, dy = (torch.randn(*shape, device="cuda", dtype=dtype) for _ in range(4))
    skip = [v, torch.randn(parts, device="cuda")] * bool(parts)
    leaves = [t.requires_grad_() for t in (h, torch.randn(shape[-1], device="cuda"), gate, *skip)]

    def run() -> tuple[Tensor, ...]:
        with torch.enable_grad():  # a capture has no gradients
            y = by_kernels(leaves, kind)
            return y.detach(), *torch.autograd.grad(y, leaves, dy)

    found = run()
    graph, replayed = capture_graph(run, dy.device)  # type: ignore[arg-type, return-value]
    graph.replay()
    for once, again in zip(found, replayed, strict=True):
        assert torch.equal(once, again)
    check_call(leaves, dy, kind)
