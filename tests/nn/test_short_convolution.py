"""The kernels of the short convolution equal its formula, and layers run them where they take a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer_kernels import DEVICE, RUNS, TOLERANCE, bfloat16, check  # noqa: F401
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tfla.nn.decode import capture_graph
from tfla.nn.mixers import fused_convolution, plain_convolution
from tfla.nn.mixers.documents import Documents
from tfla.nn.mixers.short_convolution import ShortConvolution

# batch, tokens, channels, size, and what else there is
CASES: dict[str, tuple[int, int, int, int, set[str]]] = {
    "one number": (1, 1, 1, 2, set()),
    "size 1": (1, 3, 2, 1, {"bias"}),
    "size 2, odd sizes": (2, 67, 5, 2, set()),
    "size 3, two tiles of channels": (1, 7, 261, 3, {"bias", "documents"}),
    "size 4": (1, 130, 8, 4, {"bias"}),
    "size 4, documents and history": (2, 131, 3, 4, {"documents", "history"}),
    "size 4, packed": (1, 70, 3, 4, {"bias", "packed"}),
    "size 5, history": (2, 63, 3, 5, {"history"}),
    "size 5, documents of all rows": (3, 9, 3, 5, {"packed", "history", "bias"}),
    "fewer tokens than the size": (2, 2, 3, 5, {"bias", "documents"}),
    "strides": (2, 9, 6, 4, {"strided", "history"}),
    "no tokens": (2, 0, 3, 4, {"history"}),
}


def problem(case: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None, int, Tensor]:
    """Return x, weight and bias, the first tokens of documents, the inputs before the first token, and dy."""
    B, T, C, size, having = CASES[case]
    before = size - 1 if "history" in having else 0
    x = torch.randn(B, before + T, C, device=DEVICE).to(dtype)
    dy = torch.randn(B, T, C, device=DEVICE).to(dtype)
    if "strided" in having:
        x, dy = x.repeat_interleave(2, 1)[:, ::2], dy.mT.contiguous().mT
    leaves = [x, torch.randn(C, size, device=DEVICE)] + [torch.randn(C, device=DEVICE)] * ("bias" in having)
    first = None
    if having & {"documents", "packed"}:
        starts = torch.rand(B if "documents" in having else 1, T, device=DEVICE) < 0.3
        first = Documents(dy, starts, None).boundaries()
    return [t.requires_grad_() for t in leaves], first, before, dy


def by_formula(x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor | None, before: int) -> Tensor:
    """Return the convolution in x's dtype, token by token."""
    found = []
    for t in range(x.shape[1] - before):
        p = torch.zeros_like(x[:, 0]) if bias is None else bias.expand(x.shape[0], -1)
        for j in range(min(weight.shape[1], t + before + 1)):
            inside = 1.0 if first is None else (first[:, t] <= t - j).to(x.dtype)[:, None]
            p = p + weight[:, -1 - j] * x[:, before + t - j] * inside
        found.append(p * p.sigmoid())
    return torch.stack(found, 1) if found else x[:, before:] * weight.sum()


def pair(leaves: list[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return x, weight and the bias or None."""
    return leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in CASES),
        ("size 4", torch.bfloat16),
        ("size 4, documents and history", torch.float16),
        ("size 3, two tiles of channels", torch.bfloat16),
    ],
)
class TestKernels:
    """The kernels themselves."""

    pytestmark = RUNS

    def test_formula(self, case: str, dtype: torch.dtype) -> None:
        leaves, first, before, dy = problem(case, dtype)
        y = fused_convolution.convolve(*pair(leaves), first, before)
        gradients = torch.autograd.grad(y, leaves, dy)
        assert [t.dtype for t in (y, *gradients)] == [dtype, *(t.dtype for t in leaves)]
        wide = [t.detach().double().requires_grad_() for t in leaves]
        truth = by_formula(*pair(wide), first, before)
        for found, expected in zip(
            (y, *gradients), (truth, *torch.autograd.grad(truth, wide, dy.double())), strict=True
        ):
            check(found, expected, TOLERANCE[found.dtype])

    def test_bits_repeat(self, case: str, dtype: torch.dtype) -> None:
        leaves, first, before, dy = problem(case, dtype)
        found = []
        for _ in range(2):
            y = fused_convolution.convolve(*pair(leaves), first, before)
            found.append((y, *torch.autograd.grad(y, leaves, dy)))
        for once, again in zip(*found, strict=True):
            assert torch.equal(once, again)


@pytest.fixture
def layer() -> ShortConvolution:
    return ShortConvolution(6, 4, bias=True).to(DEVICE)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched."""
    found: list[str] = []
    launch: Any = fused_convolution._launch
    monkeypatch.setattr(fused_convolution, "_launch", lambda name, *x, **y: [found.append(name), launch(name, *x, **y)])
    return found


def make_inputs() -> tuple[Tensor, Tensor]:
    """Return x and the inputs before its first token."""
    x, before = (torch.randn(2, n, 6, device=DEVICE, requires_grad=True) for n in (9, 3))
    return x, before


class TestLayer:
    """The layer, which runs the kernels where they take a call."""

    pytestmark = RUNS

    @pytest.mark.parametrize("with_history", [False, True])
    def test_layer_and_steps(self, layer: ShortConvolution, launches: list[str], with_history: bool) -> None:
        x, before = make_inputs()
        leaves = [x, *layer.parameters()] + [before] * with_history
        y = layer(x, before if with_history else None, Documents(x, None, None))
        gradients = torch.autograd.grad(y.square().sum(), leaves)
        assert launches == ["convolve", "convolve_backward"]
        history = before if with_history else torch.zeros_like(before)
        wide = [t.detach().double().requires_grad_() for t in (torch.cat([history, x], 1), *layer.parameters())]
        truth = plain_convolution.convolve(F.silu, wide[0], wide[1], wide[2], None, None)
        expected = torch.autograd.grad(truth.square().sum(), wide)
        for found, other in zip(gradients, (expected[0][:, 3:], *expected[1:], expected[0][:, :3]), strict=False):
            check(found, other, 1e-6)
        check(torch.cat([layer.steps(x[:, :4], history)[0], layer.steps(x[:, 4:], x[:, 1:4])[0]], 1), truth, 1e-6)
        assert launches[2:] == ["convolve"] * 2

    def test_gradients_are_those_of_pytorch_under_checkpointing(
        self, layer: ShortConvolution, launches: list[str]
    ) -> None:
        x, _ = make_inputs()
        documents, leaves = Documents(x, torch.rand(2, 9, device=DEVICE) < 0.3, None), [x, *layer.parameters()]
        plain = torch.autograd.grad(layer(x, None, documents).sum(), leaves)
        y = checkpoint(layer, x, None, documents, use_reentrant=False)
        for found, other in zip(torch.autograd.grad(y.sum(), leaves), plain, strict=True):
            assert torch.equal(found, other)
        assert launches == ["convolve", "convolve_backward", "convolve", "convolve", "convolve_backward"]

    def test_second_derivatives(self, layer: ShortConvolution, launches: list[str]) -> None:
        x, _ = make_inputs()
        documents, found = Documents(x, None, None), []
        for dtype in (torch.float32, torch.float64):
            leaves = [x.detach().to(dtype).requires_grad_(), *layer.to(dtype).parameters()]
            y = layer(leaves[0], None, documents).square().sum()
            first = torch.autograd.grad(y, leaves, create_graph=True)
            found.append(torch.autograd.grad(torch.stack([t.square().sum() for t in first]).sum(), leaves))
        # The second call of grad differentiates the gradients, which are PyTorch's, and y, whose cotangent has a graph.
        assert launches == ["convolve", "convolve_backward"]
        for once, other in zip(*found, strict=True):
            check(once, other, 1e-5)

    def test_what_the_kernels_do_not_take_runs_in_pytorch(self, layer: ShortConvolution, launches: list[str]) -> None:
        x, before = make_inputs()
        documents = Documents(x, None, None)
        expected = layer(x, before, documents)
        assert launches == ["convolve"]
        mapped = torch.func.vmap(lambda t: layer(t[None], before[:1].detach(), documents)[0])(x)
        check(mapped, layer(x, before[:1].detach().expand(2, -1, -1), documents), 1e-6)
        launches.clear()
        _, tangent = torch.func.jvp(lambda t: layer(t, before, documents), (x,), (torch.ones_like(x),))
        assert tangent.abs().sum() > 0
        check(layer.double()(x.double(), before.double(), documents), expected, 1e-6)
        layer.float().batch_invariant = True
        check(layer(x, before, documents), expected, 1e-6)
        layer.batch_invariant = False
        packed = Documents(x[:1], None, torch.tensor([0, 4, 9], device=DEVICE))
        layer(x[:1], before, packed)  # inputs before packed sequences
        with pytest.raises(RuntimeError, match="must match"):
            layer(x[..., :4], None, documents)  # the weights have more channels
        assert not launches


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_many_tiles_and_cuda_graphs(dtype: torch.dtype) -> None:
    """A graph replays the same bits, and errors are those of one rounding."""
    leaves = [torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((3, 1111, 1000), (1000, 4), (1000,))]
    dy, starts = torch.randn_like(leaves[0]), torch.rand(3, 1111, device="cuda") < 0.01
    first, leaves = Documents(dy, starts, None).boundaries(), [t.requires_grad_() for t in leaves]

    def run() -> tuple[Tensor, ...]:
        with torch.enable_grad():  # a capture has no gradients
            y = fused_convolution.convolve(*pair(leaves), first, 0)
            return y.detach(), *torch.autograd.grad(y, leaves, dy)

    found = run()
    graph, replayed = capture_graph(run, dy.device)  # type: ignore[arg-type, return-value]
    graph.replay()
    wide = [t.detach().double().requires_grad_() for t in leaves]
    truth = plain_convolution.convolve(F.silu, F.pad(wide[0], (0, 0, 3, 0)), wide[1], wide[2], first, None)
    expected = truth, *torch.autograd.grad(truth, wide, dy.double())
    for once, again, other in zip(found, replayed, expected, strict=True):
        assert torch.equal(once, again)
        check(once, other, TOLERANCE[dtype])
